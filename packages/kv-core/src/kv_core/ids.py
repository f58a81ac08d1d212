"""The names by which parts of a cluster know each other.

Each is a `NewType`, so that a request id cannot be passed where a node id is meant. An incarnation is one life of
one process: a restart gets a higher one, and whatever names the old one is refused.
"""

from typing import NewType

NodeId = NewType("NodeId", str)
RequestId = NewType("RequestId", str)
RegionId = NewType("RegionId", int)
TenantId = NewType("TenantId", str)
Incarnation = NewType("Incarnation", int)
Generation = NewType("Generation", int)

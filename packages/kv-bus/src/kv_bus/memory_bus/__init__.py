"""The bus without sockets: the in-memory twin for tests and the simulator.

    network = MemoryNetwork(faults=faults)
    bus = MemoryBus(network, node_id, incarnation, registry, stamper=stamper, clock=clock)

Everything above the carrier is the production code; only moving frames is imitated (`network`, `connection`). It runs
on any loop, also one in virtual time, and then needs a clock of that loop.
"""

from kv_bus.endpoint import Endpoint
from kv_bus.interface import Stamper
from kv_bus.memory_bus.carrier import MemoryCarrier
from kv_bus.memory_bus.network import Channel, MemoryNetwork, NetworkFaults, NetworkStats, NoFaults
from kv_core.clock import Clock
from kv_core.ids import Incarnation, NodeId
from kv_core.wire import Registry

__all__ = ["Channel", "MemoryBus", "MemoryNetwork", "NetworkFaults", "NetworkStats", "NoFaults"]


class MemoryBus(Endpoint):
    """A `Bus` on a `MemoryNetwork`. Its arguments are those of `Endpoint`."""

    def __init__(
        self,
        network: MemoryNetwork,
        node_id: NodeId,
        incarnation: Incarnation,
        registry: Registry,
        *,
        stamper: Stamper,
        clock: Clock,
    ) -> None:
        carrier = MemoryCarrier(network, node_id)
        super().__init__(node_id, incarnation, registry, carrier, stamper=stamper, clock=clock)

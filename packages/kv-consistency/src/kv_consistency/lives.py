"""Which lives of which nodes go on. Death is sticky: a life that ended, or that a later one followed, stays ended.

M1: of one node at most one life is live, and no life above it was ever seen. M2: `is_over` never turns false again.
"""

from kv_consistency.version_vector import Origin
from kv_core.ids import Incarnation, NodeId


class Lives:
    """What one replica knows of births and deaths."""

    __slots__ = ("_dead", "_floors", "_newest", "members")

    def __init__(self) -> None:
        self._newest: dict[NodeId, Incarnation] = {}
        self._dead: set[Origin] = set()
        self._floors: dict[NodeId, Incarnation] = {}
        self.members: dict[NodeId, Incarnation] = {}
        """The peers that hold a replica."""

    def is_over(self, origin: Origin) -> bool:
        """Whether that life is over."""
        node, incarnation = origin.node, origin.incarnation
        if incarnation < self._newest.get(node, 0) or incarnation < self._floors.get(node, 0):
            return True
        return origin in self._dead

    def seen(self, origin: Origin) -> Origin | None:
        """That life was heard of; returns the life before it that is over by that, if it was not yet."""
        before = self._newest.get(origin.node)
        if before is not None and origin.incarnation <= before:
            return None
        self._newest[origin.node] = origin.incarnation
        if before is None:
            return None
        former = Origin(origin.node, before)
        if self.members.get(origin.node) == before:
            del self.members[origin.node]
        if former in self._dead:
            self._dead.discard(former)  # said by the newer life from now on
            return None
        return former

    def joined(self, origin: Origin) -> bool:
        """Membership admitted it; False when it is over or was already admitted."""
        if self.is_over(origin) or self.members.get(origin.node) == origin.incarnation:
            return False
        self.members[origin.node] = origin.incarnation
        return True

    def died(self, origin: Origin) -> bool:
        """It is over; False when that was known."""
        if self.is_over(origin):
            return False
        self._dead.add(origin)
        if self.members.get(origin.node) == origin.incarnation:
            del self.members[origin.node]
        return True

    def retired(self, node: NodeId, below: Incarnation) -> None:
        """Every life of the node below that one is over."""
        self._floors[node] = max(below, self._floors.get(node, Incarnation(0)))
        if self.members.get(node, below) < below:
            del self.members[node]

    def incarnation(self, node: NodeId) -> Incarnation:
        """The newest life of a node that was heard of; 0 for none."""
        return self._newest.get(node, Incarnation(0))

    def check(self) -> None:
        """Assert M1."""
        for node, incarnation in self.members.items():
            assert self._newest[node] == incarnation and not self.is_over(Origin(node, incarnation))
        assert all(origin.incarnation == self._newest[origin.node] for origin in self._dead)

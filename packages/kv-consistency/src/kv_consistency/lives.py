"""Which lives of which nodes go on. Death is sticky: a life that ended, or that a later one followed, stays ended.

M1: of one node at most one life is live, and no life above it was ever seen. M2: `is_over` never turns false again.
"""

from kv_consistency.version_vector import Origin
from kv_core.ids import Incarnation, NodeId

_NONE = Incarnation(0)


class Lives:
    """What one replica knows of births and deaths."""

    __slots__ = ("_current", "_floors", "_newest", "_over", "members")

    def __init__(self) -> None:
        self._current: dict[Origin, int] = {}
        self._newest: dict[NodeId, Incarnation] = {}
        self._over: dict[Origin, int] = {}
        self._floors: dict[NodeId, Incarnation] = {}
        self.members: dict[NodeId, Incarnation] = {}
        """The peers that hold a replica."""

    def is_over(self, origin: Origin) -> bool:
        """Whether that life is over."""
        if origin in self._current:
            return False
        node, incarnation = origin.node, origin.incarnation
        if incarnation < self._newest.get(node, _NONE) or incarnation < self._floors.get(node, _NONE):
            return True
        return origin in self._over

    def is_current(self, origin: Origin) -> bool:
        """Whether it is the newest life of its node that was heard of, and goes on."""
        return origin in self._current

    def over(self) -> list[Origin]:
        """Lives that are over and not retired, in order."""
        return sorted(self._over)

    def over_since(self, origin: Origin) -> int:
        """When it was learned that this life is over, on the monotonic clock."""
        return self._over[origin]

    def strangers(self, own: Origin, since_ns: int) -> list[Origin]:
        """Lives that were heard of since then, go on, and that membership did not admit yet."""
        return [o for o, met_ns in self._current.items() if met_ns >= since_ns and o != own and not self.is_member(o)]

    def is_member(self, origin: Origin) -> bool:
        """Whether that life of a peer is admitted and goes on."""
        return self.members.get(origin.node) == origin.incarnation

    def seen(self, origin: Origin, now_ns: int) -> Origin | None:
        """That life was heard of; returns the life before it that is over by that, if it was not yet."""
        if origin in self._current:
            return None
        before = self._newest.get(origin.node)
        if before is not None and origin.incarnation <= before:
            return None
        former = None if before is None else Origin(origin.node, before)
        was_over = former is None or self.is_over(former)
        self._newest[origin.node] = origin.incarnation
        if not self.is_over(origin):
            self._current[origin] = now_ns
        if former is None or was_over:
            return None
        self._end(former, now_ns)
        return former

    def joined(self, origin: Origin) -> bool:
        """Membership admitted it; False when it is over or was already admitted."""
        if self.is_over(origin) or self.is_member(origin):
            return False
        self.members[origin.node] = origin.incarnation
        return True

    def died(self, origin: Origin, now_ns: int) -> bool:
        """It is over; False when that was known."""
        if self.is_over(origin):
            if origin.incarnation >= self._floors.get(origin.node, _NONE):
                self._over.setdefault(origin, now_ns)
            return False
        self._end(origin, now_ns)
        return True

    def retire(self, node: NodeId, below: Incarnation) -> None:
        """Every life of the node below that one is over and needs no mention any more."""
        self._floors[node] = max(below, self._floors.get(node, _NONE))
        for origin in [origin for origin in self._over if origin.node == node and origin.incarnation < below]:
            del self._over[origin]
        self._current = {o: met for o, met in self._current.items() if o.node != node or o.incarnation >= below}
        if self.members.get(node, below) < below:
            del self.members[node]

    def incarnation(self, node: NodeId) -> Incarnation:
        """The newest life of a node that was heard of; 0 for none."""
        return self._newest.get(node, _NONE)

    def check(self) -> None:
        """Assert M1."""
        for node, incarnation in self.members.items():
            assert self._newest[node] == incarnation and not self.is_over(Origin(node, incarnation))
        assert all(self.is_over(origin) for origin in self._over)
        assert not self._current.keys() & self._over.keys()
        for origin in self._current:
            assert origin.incarnation == self._newest[origin.node] >= self._floors.get(origin.node, _NONE)

    def _end(self, origin: Origin, now_ns: int) -> None:
        self._over[origin] = now_ns
        self._current.pop(origin, None)
        if self.is_member(origin):
            del self.members[origin.node]

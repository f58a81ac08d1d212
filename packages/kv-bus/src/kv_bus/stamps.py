"""A stamper for processes that hold no replica: tools, tests, examples."""

from typing import Final

from kv_bus.interface import Stamp
from kv_core.ids import NodeId

_LOGICAL_MAX: Final = (1 << 32) - 1


class LamportStamper:
    """Lamport's clock: counts messages, reads no time. Its stamps order what is causally ordered.

    The count runs over from `logical` into `wall_ns`, so it starts below every hybrid clock and follows the highest
    one it hears of.
    """

    __slots__ = ("_logical", "_wall_ns", "node_id")

    def __init__(self, node_id: NodeId) -> None:
        self.node_id = node_id
        self._wall_ns = 0
        self._logical = 0

    def tick(self) -> Stamp:
        if self._logical == _LOGICAL_MAX:
            self._wall_ns += 1
            self._logical = 0
        else:
            self._logical += 1
        return Stamp(self._wall_ns, self._logical, self.node_id)

    def merge(self, remote: Stamp, /) -> None:
        if (remote.wall_ns, remote.logical) > (self._wall_ns, self._logical):
            self._wall_ns, self._logical = remote.wall_ns, remote.logical

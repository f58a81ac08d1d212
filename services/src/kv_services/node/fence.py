"""Remembers which epochs of which requests are over, so that a late message cannot bring one back.

F1: an epoch at or below the fenced one of its request is refused.
F2: memory is bounded: the oldest fences are forgotten first, long after any message of theirs could be under way.
"""

from typing import Final

from kv_core.ids import NodeId, RequestId
from kv_services.errors import EpochFencedError

FENCES_MAX: Final = 65_536
"""At 1,000 requests a second that is a minute, many times the longest time a message can be on its way."""


class EpochFence:
    """The highest ended epoch of each recent request at one node, which errors name."""

    def __init__(self, node_id: NodeId, fences_max: int = FENCES_MAX) -> None:
        self._node_id = node_id
        self._max = fences_max
        self._ended: dict[RequestId, int] = {}

    def known(self, request_id: RequestId) -> int:
        """The highest epoch that ended; 0 when none did."""
        return self._ended.get(request_id, 0)

    def end(self, request_id: RequestId, epoch: int) -> None:
        """Refuse `epoch` and all below it from now on."""
        highest = max(epoch, self._ended.pop(request_id, 0))
        self._ended[request_id] = highest
        if len(self._ended) > self._max:
            del self._ended[next(iter(self._ended))]

    def late(self, request_id: RequestId, epoch: int, live_epoch: int = 0) -> EpochFencedError | None:
        """What whoever asks for work of that epoch is answered, if it has ended or is not above the live one."""
        known = max(self.known(request_id), live_epoch)
        return self._error(request_id, epoch, known) if epoch <= known else None

    def ended(self, request_id: RequestId, epoch: int) -> EpochFencedError:
        """What whoever waits for that epoch is answered when it ends."""
        return self._error(request_id, epoch, self.known(request_id))

    def refuses(self, request_id: RequestId, epoch: int) -> bool:
        return epoch <= self.known(request_id)

    def _error(self, request_id: RequestId, epoch: int, known: int) -> EpochFencedError:
        return EpochFencedError(request_id=request_id, epoch=epoch, node=self._node_id, known=known)

"""Remembers which epochs of which requests are over, so that a late message cannot bring one back.

F1: an epoch at or below the fenced one of its request is refused.
F2: memory is bounded: the oldest fences are forgotten first, long after any message of theirs could be under way.
"""

from typing import Final

from kv_core.ids import RequestId

FENCES_MAX: Final = 65_536
"""At 1,000 requests a second that is a minute, many times the longest time a message can be on its way."""


class EpochFence:
    """The highest ended epoch of each recent request."""

    def __init__(self, fences_max: int = FENCES_MAX) -> None:
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

    def refuses(self, request_id: RequestId, epoch: int) -> bool:
        return epoch <= self.known(request_id)

"""What happened that an operator should be able to read afterwards: one line in the log, one entry in a ring.

The ring keeps the last `EVENTS_MAX`; what is older is in the log only. Times are wall-clock, for people.
"""

import logging
from collections import deque
from typing import Final

import msgspec

from kv_core.clock import Clock

EVENTS_MAX: Final = 256
CAUSE_CHARS_MAX: Final = 500

_log = logging.getLogger(__name__)


class OperatorEvent(msgspec.Struct, frozen=True):
    """One thing that happened.

    Attributes:
        at_s: seconds of the epoch.
        kind: what was done or noticed, as `fall_back_to_tcp` or `link_opened`.
        link: the nodes concerned, as `prefill-1>decode-1`, or one node.
        cause: why, in one sentence.
        request: whose transfer it was, if it was one's.
        count: how often the same happened in a row; only the last is kept.
    """

    at_s: float
    kind: str
    link: str
    cause: str
    request: str = ""
    count: int = 1


class EventLog:
    """The events of one process."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._ring: deque[OperatorEvent] = deque(maxlen=EVENTS_MAX)

    def note(self, kind: str, link: str, cause: str, *, request: str = "") -> None:
        """Keep and log one event; repetitions of the last one are counted, and logged at powers of two."""
        event = OperatorEvent(self._clock.wall_ns() / 1e9, kind, link, cause[:CAUSE_CHARS_MAX], request)
        last = self._ring[-1] if self._ring else None
        if last is not None and (last.kind, last.link) == (kind, link):
            event = msgspec.structs.replace(event, count=last.count + 1)
            self._ring[-1] = event
        else:
            self._ring.append(event)
        if event.count & (event.count - 1) == 0:
            _log.warning(
                "event kind=%s link=%s request=%s count=%d cause=%s", kind, link, request, event.count, event.cause
            )

    def recent(self) -> list[OperatorEvent]:
        """What is kept, oldest first."""
        return list(self._ring)

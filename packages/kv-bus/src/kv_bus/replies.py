"""Replies on their way out: sent at once, or kept in order until the carrier takes them.

A reply that finds its asker gone, or the queue full, is dropped and counted: the asker has a deadline.
"""

from collections import deque

from kv_bus.carrier import Carrier, ReplyOutcome
from kv_bus.limits import REPLY_QUEUE_MAX
from kv_bus.local import Counters


class ReplyQueue:
    """The replies of one endpoint, in order for each route."""

    def __init__(self, carrier: Carrier, counters: Counters) -> None:
        self._carrier = carrier
        self._counters = counters
        self._waiting: dict[bytes, deque[bytes]] = {}
        self._length = 0

    def send(self, route: bytes, data: bytes) -> None:
        """Send a reply after those that wait for the same route."""
        if route not in self._waiting:
            outcome = self._carrier.reply(route, data)
            if outcome is ReplyOutcome.SENT:
                self._counters.replies_sent += 1
                return
            if outcome is ReplyOutcome.GONE:
                self._counters.replies_dropped += 1
                return
        if self._length >= REPLY_QUEUE_MAX:
            self._counters.replies_dropped += 1
            return
        self._waiting.setdefault(route, deque()).append(data)
        self._length += 1

    def writable(self) -> None:
        """Replies that had to wait may be tried again."""
        for route in list(self._waiting):
            waiting = self._waiting[route]
            while waiting:
                outcome = self._carrier.reply(route, waiting[0])
                if outcome is ReplyOutcome.BUSY:
                    break
                if outcome is ReplyOutcome.GONE:
                    self._counters.replies_dropped += len(waiting)
                    self._length -= len(waiting)
                    waiting.clear()
                else:
                    waiting.popleft()
                    self._length -= 1
                    self._counters.replies_sent += 1
            if not waiting:
                del self._waiting[route]

    def clear(self) -> None:
        """Forget what waits."""
        self._waiting.clear()
        self._length = 0

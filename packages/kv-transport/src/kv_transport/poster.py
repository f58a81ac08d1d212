"""Hands calls from threads to the event loop, many with one wake-up."""

import asyncio
import threading
from collections import deque
from collections.abc import Callable


class LoopPoster:
    """Calls posted from any thread run on the loop, in order of posting."""

    __slots__ = ("_calls", "_closed", "_loop", "_scheduled", "_thread")

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._thread = threading.get_ident()
        self._calls: deque[Callable[[], None]] = deque()
        self._scheduled = False
        self._closed = False

    def post(self, call: Callable[[], None]) -> None:
        """Run `call` on the loop soon. Dropped once the loop is closed: nobody is left to hear it."""
        self._calls.append(call)
        if self._scheduled or self._closed:
            return
        self._scheduled = True
        try:
            self._loop.call_soon_threadsafe(self._drain)
        except RuntimeError:
            self._closed = True

    def run(self, call: Callable[[], None]) -> None:
        """Run `call` at once if this is the loop's thread, else soon."""
        if threading.get_ident() == self._thread:
            call()
        else:
            self.post(call)

    def _drain(self) -> None:
        # Cleared first: whoever appends after this schedules another drain.
        self._scheduled = False
        for _ in range(len(self._calls)):
            self._calls.popleft()()

"""The bounded stream between whoever makes tokens and the one client that reads them.

A completer makes one per request and fills it; the HTTP front takes from it. Everything happens on one loop.

Policy when full: the producer is told how far the client has read (`on_taken`) and must keep at most `window` tokens
ahead of it. One that does not is not waited for: its request ends with `SlowReaderError`, and nothing grows.

Q1: every pushed token is given once, in order, before the end; then `Finished`, or one error; then StopAsyncIteration.
Q2: exactly one of `on_stop`-then-end, end, `on_cancel` is told; after the end or `cancel` no callback is made.
Q3: a cancelled wait takes nothing.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Sequence

from kv_core.errors import KVError
from kv_services.gateway.completer import Finished, GenerationEvent, Token
from kv_services.gateway.errors import SlowReaderError, StreamProtocolError
from kv_services.gateway.limits import STREAM_WINDOW


def _ignore(_: int = 0) -> None:
    """Nobody asked to be told."""


class TokenStream:
    """A `GenerationStream` for a completer to fill.

    Args:
        on_taken: called with the number of tokens the reader has taken so far; the producer may be `window` ahead.
        on_stop: the reader needs no more tokens; the producer still owes `finish` or `fail`.
        on_cancel: the reader has gone; whatever is pushed from now on is dropped.
    """

    __slots__ = (
        "_closed",
        "_end",
        "_events",
        "_on_cancel",
        "_on_stop",
        "_on_taken",
        "_stopped",
        "_taken",
        "_waiter",
        "_window",
    )

    def __init__(
        self,
        *,
        window: int = STREAM_WINDOW,
        on_taken: Callable[[int], None] = _ignore,
        on_stop: Callable[[], None] = _ignore,
        on_cancel: Callable[[], None] = _ignore,
    ) -> None:
        self._window = window
        self._on_taken = on_taken
        self._on_stop = on_stop
        self._on_cancel = on_cancel
        self._events: deque[Token] = deque()
        self._end: Finished | KVError | None = None
        self._taken = 0
        self._stopped = False
        self._closed = False
        self._waiter: asyncio.Future[None] | None = None

    @property
    def room(self) -> int:
        """Tokens that may be pushed now."""
        return self._window - len(self._events)

    @property
    def ended(self) -> bool:
        """Whether the producer owes nothing more: it ended the stream, or the reader has gone."""
        return self._end is not None or self._closed

    def push(self, tokens: Sequence[Token]) -> bool:
        """Add tokens. False when the reader is more than the window behind: the request is over, release it."""
        if self.ended or self._stopped:
            return not self._closed and not isinstance(self._end, SlowReaderError)
        if len(tokens) > self.room:
            self.fail(SlowReaderError(detail=f"{len(self._events)} tokens unread"))
            return False
        self._events.extend(tokens)
        self._wake()
        return True

    def finish(self, finished: Finished) -> None:
        """The answer is complete; later calls change nothing."""
        self._set_end(finished)

    def fail(self, error: KVError) -> None:
        """The request failed; tokens pushed before are still given. Later calls change nothing."""
        self._set_end(error)

    def stop(self) -> None:
        """See `GenerationStream.stop`."""
        if self._stopped or self.ended:
            return
        self._stopped = True
        self._events.clear()
        self._on_stop()

    def cancel(self) -> None:
        """See `GenerationStream.cancel`."""
        if self._closed:
            return
        self._closed = True
        self._events.clear()
        self._wake()
        if self._end is None:
            self._on_cancel()
        self._let_go()

    def __aiter__(self) -> "TokenStream":
        return self

    async def __anext__(self) -> GenerationEvent:
        """See `GenerationStream.__anext__`."""
        while not self._events and self._end is None and not self._closed:
            if self._waiter is not None:
                raise StreamProtocolError(detail="two readers of one stream")
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        if self._closed:
            raise StopAsyncIteration
        if self._events:
            token = self._events.popleft()
            self._taken += 1
            if self._end is None:
                self._on_taken(self._taken)
            return token
        self._closed = True
        if isinstance(self._end, Finished):
            return self._end
        assert self._end is not None
        raise self._end

    def _set_end(self, end: Finished | KVError) -> None:
        if self.ended:
            return
        self._end = end
        self._wake()
        self._let_go()

    def _let_go(self) -> None:
        # None of them is called any more; whoever made the stream is likely to hold it, and would be garbage in a ring.
        self._on_taken = self._on_stop = self._on_cancel = _ignore

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

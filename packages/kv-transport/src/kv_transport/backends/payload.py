"""What a frame carries beside its head: where the bytes come from, and where they go."""

import socket
from collections.abc import Callable, Sequence
from typing import Final

import numpy as np

from kv_transport import stream_io
from kv_transport.stream_io import Spans, Sums

_scratch: Final = memoryview(bytearray(256 * 1024))
"""Where bytes go that nobody wants any more. Written by all, read by none."""
_NO_SPANS: Final = np.zeros((0, 2), np.int64)


def spans_of(offsets: Sequence[int], sizes: Sequence[int]) -> Spans:
    """The table of those pieces of a memory."""
    table = np.empty((len(sizes), 2), np.int64)
    table[:, 0], table[:, 1] = offsets, sizes
    return table


class Source:
    """Bytes to be sent: spans of a memory, which is in use until the peer has answered.

    Args:
        summed: take the CRC-64 of each span on its way, for a frame that follows (`checks`).
    """

    __slots__ = ("checks", "memory", "nbytes", "spans")

    def __init__(self, memory: memoryview, spans: Spans, *, summed: bool = False) -> None:
        self.memory = memory
        self.spans = spans
        self.checks: Sums | None = np.zeros(len(spans), np.uint64) if summed else None
        self.nbytes = int(spans[:, 1].sum())

    @classmethod
    def whole(cls, data: memoryview) -> "Source":
        return cls(data, np.array([[0, len(data)]], np.int64))


NOTHING: Final = Source(memoryview(b""), _NO_SPANS)
"""The payload of a frame that has none."""


class Sink:
    """Where a payload goes: span by span, with the CRC-64 of each.

    Args:
        memory, spans: where, in order.
        dropped: per span, whether its bytes go nowhere (it is complete already).
        diverted: asked before each read; once true, the rest goes nowhere.
    """

    __slots__ = ("_checks", "_diverted", "_dropped", "_memory", "_spans", "_state", "left")

    def __init__(self, memory: memoryview, spans: Spans, dropped: Sequence[bool], diverted: Callable[[], bool]) -> None:
        self._memory = memory
        self._spans = spans
        self._dropped = list(dropped) if any(dropped) else None
        self._diverted = diverted
        self._state = stream_io.receive_state()
        self._checks = np.zeros(len(spans), np.uint64)
        self.left = int(spans[:, 1].sum())

    @classmethod
    def nowhere(cls, nbytes: int) -> "Sink":
        """Takes so many bytes and keeps none."""
        return cls(memoryview(b""), np.array([[0, nbytes]], np.int64), [True], lambda: False)

    @property
    def checks(self) -> list[int | None]:
        """Once it is full: CRC-64 of each span, None for one that was not written."""
        found: list[int] = self._checks.tolist()
        if self._dropped is None:
            return list(found)
        return [None if gone else check for gone, check in zip(self._dropped, found, strict=True)]

    def receive(self, sock: socket.socket, others: int) -> int:
        """Take what the socket has; how many bytes, 0 at its end. Raises `OSError`; `others` as in `stream_io`."""
        if self._diverted():
            self._dropped = [True] * len(self._spans)
        if self._dropped is None:
            came = stream_io.receive(sock.fileno(), others, self._memory, self._spans, self._checks, self._state)
        else:
            came = self._receive_some(sock, others, self._dropped)
        self.left -= came
        return came

    def _receive_some(self, sock: socket.socket, others: int, dropped: list[bool]) -> int:
        """Up to the next change between spans that are dropped and such that are not."""
        index, done = self._state.tolist()
        if not dropped[index]:
            end = next((at for at in range(index, len(dropped)) if dropped[at]), len(dropped))
            return stream_io.receive(
                sock.fileno(), others, self._memory, self._spans[:end], self._checks[:end], self._state
            )
        left = int(self._spans[index, 1]) - done
        came = sock.recv_into(_scratch, min(left, len(_scratch)))
        self._state[:] = (index + 1, 0) if came == left else (index, done + came)
        return came

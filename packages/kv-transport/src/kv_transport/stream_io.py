"""Bytes between a stream socket and memory, with the CRC-64 of each span taken on the way, while it is in the cache.

Compiled, with plain twins (`plain_...`) that are the definition, as in `kernels`. The compiled ones release the GIL
and stay until all is done: while the socket is not ready they wait for it, unless something happens meanwhile on
`others`, an epoll of everything that the thread serves. `others` of -1 means: do not wait. The twins never do.

Spans are an `(n, 2)` table of int64: offset in the memory, bytes (at least one).
"""

import os
from typing import Final

import numpy as np
from numpy.typing import NDArray

from kv_core.checksum import crc64
from kv_transport import kernels

try:
    # It sums with the function that `kernels` has loaded.
    from kv_transport import _stream_io as _compiled
except ImportError:  # built without a compiler
    _compiled = None  # type: ignore[assignment]

COMPILED: Final = kernels.COMPILED and _compiled is not None

Spans = NDArray[np.int64]
Sums = NDArray[np.uint64]
State = NDArray[np.int64]

DO_NOT_WAIT: Final = -1
_PIECE: Final = 256 * 1024
_PARTS: Final = 64


def receive_state() -> State:
    """Where `receive` begins: index of the span at hand, bytes of it that have come."""
    return np.zeros(2, np.int64)


def send_state() -> State:
    """Where `send` begins: the same for what is sent, and bytes of the head that are sent."""
    return np.zeros(3, np.int64)


def receive(fd: int, others: int, memory: memoryview, spans: Spans, checks: Sums, state: State) -> int:
    """Receive into the spans until they are full, or nothing more is there and the thread should do something else.

    Args:
        checks: per span, the CRC-64 of what has come; continued.
        state: from `receive_state`; continued.

    Returns:
        How many bytes came; 0 at the end of the stream.

    Raises:
        OSError: as `recv` does; `BlockingIOError` when nothing came.
        IndexError: a span lies outside the memory, or all are full already.
    """
    if _compiled is None:
        return plain_receive(fd, memory, spans, checks, state)
    came = _compiled.receive(fd, others, memory, spans, checks, state)
    if came < 0:
        raise OSError(-came, os.strerror(-came))
    return came


def plain_receive(fd: int, memory: memoryview, spans: Spans, checks: Sums, state: State) -> int:
    """The same without compiled code: what one system call brings."""
    parts = _gather(memory, spans, state, _PIECE)
    if not parts:
        raise IndexError("every span is full")
    came = os.readv(fd, parts)
    _sum(memory, spans, checks, state, came)
    _advance(spans, state, came)
    return came


def send(
    fd: int, others: int, head: bytes, memory: memoryview, spans: Spans, checks: Sums | None, state: State
) -> bool:
    """Send the head, then the spans; false when the socket takes no more and the thread should do something else.

    Args:
        checks: where the CRC-64 of each span is to be put, if it is wanted: right when all is sent.
        state: from `send_state`; continued.

    Raises:
        OSError: as `send` does, but never because the socket is full.
        IndexError: a span lies outside the memory.
    """
    if _compiled is None:
        return plain_send(fd, head, memory, spans, checks, state)
    done = _compiled.send(fd, others, head, memory, spans, checks, state)
    if done < 0:
        raise OSError(-done, os.strerror(-done))
    return done == 1


def plain_send(fd: int, head: bytes, memory: memoryview, spans: Spans, checks: Sums | None, state: State) -> bool:
    """The same without compiled code."""
    while state[2] < len(head) or state[0] < len(spans):
        of_head = memoryview(head)[int(state[2]) :]
        try:
            sent = os.writev(fd, [of_head, *_gather(memory, spans, state, _PIECE)])
        except (BlockingIOError, InterruptedError):
            return False
        to_head = min(sent, len(of_head))
        state[2] += to_head
        if checks is not None:
            _sum(memory, spans, checks, state, sent - to_head)
        _advance(spans, state, sent - to_head)
    return True


def _gather(memory: memoryview, spans: Spans, state: State, room: int) -> list[memoryview]:
    """Up to `room` bytes from where `state` is."""
    index, skip = int(state[0]), int(state[1])
    parts = []
    for offset, nbytes in spans[index : index + _PARTS].tolist():
        want = min(nbytes - skip, room)
        if not want:
            break
        if offset < 0 or offset + nbytes > len(memory):
            raise IndexError(f"span {index} lies outside its memory")
        parts.append(memory[offset + skip : offset + skip + want])
        room -= want
        skip = 0
    return parts


def _sum(memory: memoryview, spans: Spans, checks: Sums, state: State, nbytes: int) -> None:
    index, skip = int(state[0]), int(state[1])
    while nbytes:
        offset, size = spans[index].tolist()
        taken = min(size - skip, nbytes)
        checks[index] = crc64(memory[offset + skip : offset + skip + taken], int(checks[index]))
        nbytes -= taken
        index, skip = index + 1, 0


def _advance(spans: Spans, state: State, nbytes: int) -> None:
    index, done = int(state[0]), int(state[1]) + nbytes
    while index < len(spans) and done >= spans[index, 1]:
        done -= int(spans[index, 1])
        index += 1
    state[:2] = index, done

"""A unix SOCK_SEQPACKET socket as a channel of frames: each frame arrives whole, with the descriptors beside it.

`send` may be called from any thread, so that the thread that placed bytes rings the doorbell itself. What the kernel
does not take at once waits in order; a peer that reads nothing is cut off when too much waits.
"""

import asyncio
import os
import socket
import threading
from array import array
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Final

from kv_transport import doorbell, limits
from kv_transport.poster import LoopPoster

BACKLOG_FRAMES_MAX: Final = 16 * 1024
"""Frames that wait for a peer that does not read. In good order a window of units and some notifications wait."""

# Plain integers: with the enumerations of `socket` their arithmetic costs as much as the call.
_NO_SIGNAL: Final = int(socket.MSG_NOSIGNAL)
_CLOSE_ON_EXEC: Final = int(socket.MSG_CMSG_CLOEXEC)
_CUT: Final = int(socket.MSG_TRUNC) | int(socket.MSG_CTRUNC)
_FDS_PER_FRAME: Final = 1
_ANCILLARY: Final = socket.CMSG_SPACE(_FDS_PER_FRAME * array("i").itemsize)

FrameHandler = Callable[[memoryview, list[int]], None]


class FrameSocket:
    """Takes over a connected, non-blocking socket. Handlers are called on the loop.

    `on_frame(data, fds)` owns the descriptors; `data` is only valid during the call. `on_end(cause)` is called once,
    unless `close` was called first.
    """

    def __init__(
        self,
        sock: socket.socket,
        loop: asyncio.AbstractEventLoop,
        poster: LoopPoster,
        on_frame: FrameHandler,
        on_end: Callable[[str], None],
    ) -> None:
        self._sock = sock
        self._fd = sock.fileno()
        self._loop = loop
        self._poster = poster
        self._on_frame = on_frame
        self._on_end = on_end
        self.takes_descriptors = False
        """Set it while descriptors are awaited; else the kernel drops those that come, and receiving is cheaper."""
        self._lock = threading.Lock()
        self._backlog: deque[tuple[bytes, Sequence[int]]] = deque()
        self._writing = False
        self._closed = self._is_deaf = False
        self._buffer = bytearray(limits.CONTROL_FRAME_BYTES_MAX + 1)
        self._view = memoryview(self._buffer)
        loop.add_reader(self._fd, self._readable)

    @property
    def closed(self) -> bool:
        return self._closed

    def send(self, data: bytes, fds: Sequence[int] = ()) -> None:
        """Send a frame, now or soon. `fds` are duplicated by the kernel; keep them open until it is out. Thread-safe.

        On a socket that has ended this does nothing: `on_end` tells, or has told.
        """
        with self._lock:
            if self._closed:
                return
            if not self._backlog:
                try:
                    self._transmit(data, fds)
                    return
                except BlockingIOError:
                    pass
                except OSError as error:
                    self._poster.post(partial(self._deaf, os.strerror(error.errno or 0)))
                    return
            self._backlog.append((data, [os.dup(fd) for fd in fds]))
            full = len(self._backlog) > BACKLOG_FRAMES_MAX
        if full:
            self._poster.post(partial(self._end, "it reads nothing"))
        else:
            self._poster.run(self._watch_writable)

    def put(
        self, to: memoryview, source: memoryview, offset: int, text: bytearray, seq: int, number: int, nonce: int
    ) -> int:
        """`doorbell.put`, its message in order with what is sent, now or soon; gives what became of it."""
        with self._lock:
            fd = -1 if self._closed or self._backlog else self._fd
            try:
                outcome = doorbell.put(fd, to, source, offset, text, seq, number, nonce)
            except OSError as error:
                self._poster.post(partial(self._deaf, os.strerror(error.errno or 0)))
                return doorbell.WAITS
        if outcome == doorbell.WAITS:
            self.send(bytes(text))
        return outcome

    def close(self) -> None:
        """Idempotent; on the loop."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            for _, fds in self._backlog:
                for fd in fds:
                    os.close(fd)
            self._backlog.clear()
        self._loop.remove_reader(self._fd)
        if self._writing:
            self._loop.remove_writer(self._fd)
        self._sock.close()

    def _transmit(self, data: bytes, fds: Sequence[int]) -> None:
        if fds:
            rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array("i", fds))]
            self._sock.sendmsg([data], rights, _NO_SIGNAL)
        else:
            self._sock.send(data, _NO_SIGNAL)

    def _watch_writable(self) -> None:
        if not self._closed and not self._writing:
            self._writing = True
            self._loop.add_writer(self._fd, self._writable)

    def _writable(self) -> None:
        with self._lock:
            while self._backlog and not self._closed:
                data, fds = self._backlog[0]
                try:
                    self._transmit(data, fds)
                except BlockingIOError:
                    return
                except OSError as error:
                    self._poster.post(partial(self._deaf, os.strerror(error.errno or 0)))
                    return
                self._backlog.popleft()
                for fd in fds:
                    os.close(fd)
        if not self._closed:
            self._writing = False
            self._loop.remove_writer(self._fd)

    def _readable(self) -> None:
        # One frame a turn: to find that there is no second one costs as much as the turn in which the loop tells of it.
        self._receive()

    def _receive(self) -> bool:
        """Whether there was something."""
        fds: list[int] = []
        try:
            if self.takes_descriptors:
                nbytes, ancillary, flags, _ = self._sock.recvmsg_into([self._view], _ANCILLARY, _CLOSE_ON_EXEC)
                fds = _descriptors(ancillary)
                cut = bool(flags & _CUT)
            else:
                nbytes = self._sock.recv_into(self._buffer)
                cut = nbytes > limits.CONTROL_FRAME_BYTES_MAX
        except (BlockingIOError, InterruptedError):
            return False
        except ConnectionResetError as error:
            # The peer closed before it had read all of ours. The kernel says so once, and first; what it said follows.
            self._deaf(os.strerror(error.errno or 0))
            return False
        except OSError as error:
            self._end(os.strerror(error.errno or 0))
            return False
        if nbytes == 0 or cut:
            for fd in fds:
                os.close(fd)
            self._end("frame too long" if nbytes else "the peer is gone")
            return False
        self._on_frame(self._view[:nbytes], fds)
        return True

    def _deaf(self, cause: str) -> None:
        """The peer takes nothing any more. What it had said before still counts."""
        again, self._is_deaf = self._is_deaf, True
        for _ in range(0 if again else BACKLOG_FRAMES_MAX):  # in good order a few lie there
            if self._closed or not self._receive():
                break
        self._end(cause)

    def _end(self, cause: str) -> None:
        if not self._closed:
            self.close()
            self._on_end(cause)


def _descriptors(ancillary: list[tuple[int, int, bytes]]) -> list[int]:
    fds = array("i")
    for level, kind, data in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            fds.frombytes(data[: len(data) - len(data) % fds.itemsize])
    return list(fds)

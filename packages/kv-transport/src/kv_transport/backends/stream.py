"""One TCP connection as a channel of frames with payloads, living in one IO thread.

    frame = prefix (head length u32, zero u32, payload length u64, MAC 16) | head | payload

The MAC covers a counter, the lengths and the head, so no frame can be made up, changed, dropped or repeated by
somebody on the path; the payload is covered by the CRC-64s inside the head. Payloads go straight from and to the
memory they belong to: `sendmsg` over the runs of an arena, `recvmsg_into` its cells, with the checksum of each piece
taken while it is in the cache. Control frames overtake payloads that have not begun.
"""

import hmac
import os
import select
import socket
import struct
from collections import deque
from collections.abc import Callable, Sequence
from typing import Final, Protocol

import numpy as np

from kv_core.checksum import crc64
from kv_core.errors import KVError
from kv_transport import kernels, limits
from kv_transport.auth import MAC_BYTES, FrameMac
from kv_transport.backends.io_thread import IoThread

_LENGTHS: Final = struct.Struct("<IIQ")
_PREFIX_BYTES: Final = _LENGTHS.size + MAC_BYTES
_STAGE_BYTES: Final = _PREFIX_BYTES + limits.CONTROL_FRAME_BYTES_MAX
_HEAD_READ: Final = 4096
_TURNS: Final = 4
_IOVECS: Final = 64
_scratch: Final = memoryview(bytearray(256 * 1024))
"""Where bytes go that nobody wants any more. Written by all, read by none."""


class Sink:
    """Where a payload goes: cell by cell, with the CRC-64 of each.

    Args:
        cells: memory per cell; None for one that is to be dropped (it is complete already).
        sizes: bytes per cell.
        diverted: asked before each read; once true, the rest goes nowhere.
    """

    __slots__ = ("_cells", "_checks", "_direct", "_diverted", "_sizes", "_state", "left")

    def __init__(self, cells: Sequence[memoryview | None], sizes: Sequence[int], diverted: Callable[[], bool]) -> None:
        self._cells = list(cells)
        self._sizes = sizes
        self._diverted = diverted
        # Where the next byte goes (cell, byte), and the sum of what each cell has so far: the kernel goes on with them.
        self._state = np.zeros(2, np.int64)
        self._checks = np.zeros(len(sizes), np.uint64)
        written = [cell for cell in cells if cell is not None]
        self._direct = written if kernels.COMPILED and len(written) == len(sizes) else None
        self.left = sum(sizes)

    @property
    def checks(self) -> list[int | None]:
        """Once it is full: CRC-64 of each cell, None for one that was not written."""
        found = zip(self._cells, self._checks.tolist(), strict=True)
        return [None if cell is None else check for cell, check in found]

    def receive(self, sock: socket.socket) -> int:
        """Take what the socket has; how many bytes, 0 at its end. Raises `OSError`."""
        # A wrapped socket is no plain stream of bytes to the kernel.
        if self._direct is None or type(sock) is not socket.socket or self._diverted():
            came: int = sock.recvmsg_into(self.buffers())[0]
            self.advance(came)
            return came
        came = kernels.receive_cells(sock.fileno(), self._direct, self._checks, self._state)
        self.left -= came
        return came

    def buffers(self) -> list[memoryview]:
        """Where the next bytes go, up to `RECEIVE_PIECE_BYTES`."""
        if self._diverted():
            self._cells = [None] * len(self._sizes)
            self._direct = None
        room, (index, filled) = limits.RECEIVE_PIECE_BYTES, self._state.tolist()
        found: list[memoryview] = []
        while room and index < len(self._sizes) and len(found) < _IOVECS:
            cell, want = self._cells[index], min(self._sizes[index] - filled, room)
            if cell is None:
                want = min(want, len(_scratch))
                found.append(_scratch[:want])
            else:
                found.append(cell[filled : filled + want])
            room -= want
            filled += want
            if filled < self._sizes[index]:
                break
            index, filled = index + 1, 0
        return found

    def advance(self, nbytes: int) -> None:
        """So many bytes have arrived where `buffers` said."""
        self.left -= nbytes
        index, filled = self._state.tolist()
        while nbytes:
            cell, size = self._cells[index], self._sizes[index]
            taken = min(nbytes, size - filled)
            if cell is not None:
                self._checks[index] = crc64(cell[filled : filled + taken], int(self._checks[index]))
            nbytes -= taken
            filled += taken
            if filled == size:
                index, filled = index + 1, 0
        self._state[:] = index, filled

    def feed(self, data: memoryview) -> None:
        """Bytes that arrived together with the head."""
        while len(data):
            for buffer in self.buffers():
                taken = min(len(buffer), len(data))
                buffer[:taken] = data[:taken]
                self.advance(taken)
                data = data[taken:]
                if taken < len(buffer):
                    return


class Receiver(Protocol):
    """What a stream's frames mean; called in its IO thread."""

    def frame(self, stream: "Stream", head: memoryview, payload: int) -> Sink | None:
        """A frame's head, and how long its payload is; the sink must take exactly that. Raises `KVError` to end."""
        ...

    def payload_done(self, stream: "Stream", sink: Sink) -> None:
        """The sink is full."""
        ...

    def ended(self, stream: "Stream", sink: Sink | None, cause: str) -> None:
        """The connection is closed; no memory is touched any more. `sink` was not filled."""
        ...


class Stream:
    """Takes over a connected, non-blocking socket. `start` it once; all other methods run in its IO thread."""

    def __init__(
        self, sock: socket.socket, io: IoThread, send_key: bytes, receive_key: bytes, receiver: Receiver
    ) -> None:
        self.io: Final = io
        self._sock = sock
        self._fd = sock.fileno()
        self._receiver = receiver
        self._mac_out = FrameMac(send_key)
        self._mac_in = FrameMac(receive_key)
        self._control: deque[tuple[bytes, list[memoryview]]] = deque()
        self._frames: deque[tuple[bytes, list[memoryview]]] = deque()
        self._current: list[memoryview] = []
        self._current_at = 0
        self._watching = select.EPOLLIN
        self._stage = memoryview(bytearray(_STAGE_BYTES))
        self._staged = 0
        self._sink: Sink | None = None
        self._ended = False

    def fileno(self) -> int:
        return self._fd

    def start(self) -> None:
        """From any thread."""
        self.io.call(lambda: self.io.serve(self, select.EPOLLIN))

    def send(self, head: bytes, payload: list[memoryview] | None = None) -> None:
        """Queue a frame and send what the kernel takes. Payload memory is in use until the peer answers or `ended`."""
        if self._ended:
            return
        if payload is None:
            if len(self._control) >= limits.QUEUED_UNITS_MAX:
                self._end("it reads nothing")
                return
            self._control.append((head, []))
        else:
            self._frames.append((head, payload))
        self._flush()

    def abort(self, cause: str) -> None:
        """Close at once, after a last try to send what is queued of control frames. Idempotent."""
        if not self._ended:
            self._frames.clear()
            if not self._current:
                self._flush()
            self._end(cause)

    def on_events(self, events: int) -> None:
        try:
            if events & select.EPOLLOUT:
                self._flush()
            if events & (select.EPOLLIN | select.EPOLLHUP | select.EPOLLERR) and not self._ended:
                self._read()
        except KVError as error:
            self._end(str(error))

    # Sending.

    def _flush(self) -> None:
        try:
            while self._current or self._next_frame():
                self._advance(self._sock.sendmsg(self._current[self._current_at : self._current_at + _IOVECS]))
        except (BlockingIOError, InterruptedError):
            self._watch(select.EPOLLIN | select.EPOLLOUT)
            return
        except OSError as error:
            self._end(os.strerror(error.errno or 0))
            return
        self._watch(select.EPOLLIN)

    def _next_frame(self) -> bool:
        queue = self._control or self._frames
        if not queue:
            return False
        head, payload = queue.popleft()
        lengths = _LENGTHS.pack(len(head), 0, sum(len(part) for part in payload))
        # The counter must follow the order of sending, so the MAC is made now and not when the frame was queued.
        self._current = [memoryview(lengths + self._mac_out.next(lengths, head) + head), *payload]
        self._current_at = 0
        return True

    def _advance(self, sent: int) -> None:
        while sent:
            part = self._current[self._current_at]
            if sent < len(part):
                self._current[self._current_at] = part[sent:]
                return
            sent -= len(part)
            self._current_at += 1
        if self._current_at == len(self._current):
            self._current = []

    def _watch(self, events: int) -> None:
        if events != self._watching and not self._ended:
            self._watching = events
            self.io.watch(self, events)

    # Receiving.

    def _read(self) -> None:
        for _ in range(_TURNS):
            if self._ended:
                return
            try:
                if self._sink is None:
                    nbytes = self._sock.recv_into(self._stage[self._staged : self._staged + self._wanted()])
                else:
                    nbytes = self._sink.receive(self._sock)
            except (BlockingIOError, InterruptedError):
                return
            except OSError as error:
                self._end(os.strerror(error.errno or 0))
                return
            if nbytes == 0:
                self._end("the peer is gone")
                return
            if self._sink is None:
                self._staged += nbytes
                self._parse()
            else:
                self._finish_payload()

    def _wanted(self) -> int:
        """Enough for the head at hand, and little more: payload that comes along must be copied once."""
        need = _PREFIX_BYTES
        if self._staged >= _PREFIX_BYTES:
            need += _LENGTHS.unpack_from(self._stage)[0]
        return min(max(_HEAD_READ, need - self._staged), _STAGE_BYTES - self._staged)

    def _parse(self) -> None:
        at = 0
        while self._staged - at >= _PREFIX_BYTES and not self._ended:
            head_nbytes, zero, payload = _LENGTHS.unpack_from(self._stage, at)
            if head_nbytes > limits.CONTROL_FRAME_BYTES_MAX or zero or payload > limits.UNIT_BYTES_MAX:
                self._end(f"frame of {head_nbytes} and {payload} bytes")
                return
            body = at + _PREFIX_BYTES
            if self._staged - body < head_nbytes:
                break
            head = self._stage[body : body + head_nbytes]
            mac = self._mac_in.next(bytes(self._stage[at : at + _LENGTHS.size]), head)
            if not hmac.compare_digest(mac, self._stage[at + _LENGTHS.size : body]):
                self._end("a frame's MAC is wrong")
                return
            at = body + head_nbytes
            sink = self._receiver.frame(self, head, payload)
            if self._ended:
                return
            if payload:
                if sink is None or sink.left != payload:
                    self._end(f"a payload of {payload} bytes that nothing asked for")
                    return
                self._sink = sink
                came_along = min(payload, self._staged - at)
                sink.feed(self._stage[at : at + came_along])
                at += came_along
                self._finish_payload()
                if self._sink is not None:
                    break
        rest = self._staged - at
        if rest and at:
            self._stage[:rest] = bytes(self._stage[at : self._staged])
        self._staged = rest

    def _finish_payload(self) -> None:
        sink = self._sink
        if sink is not None and not sink.left:
            self._sink = None
            self._receiver.payload_done(self, sink)

    def _end(self, cause: str) -> None:
        if self._ended:
            return
        self._ended = True
        self.io.drop(self)
        self._sock.close()
        self._control.clear()
        self._frames.clear()
        self._current = []
        sink, self._sink = self._sink, None
        self._receiver.ended(self, sink, cause)

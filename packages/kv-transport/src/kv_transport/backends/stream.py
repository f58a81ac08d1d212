"""One TCP connection as a channel of frames with payloads, living in one IO thread.

    frame = prefix (head length u32, zero u32, payload length u64, MAC 16) | head | payload

The MAC covers a counter, the lengths and the head, so no frame can be made up, changed, dropped or repeated by
somebody on the path; the payload is covered by CRC-64s that are inside its head, or inside the head of the frame that
follows it. Payloads go straight from and to the memory they belong to (`stream_io`), with the checksum of each piece
taken while it is in the cache. Control frames overtake payloads that have not begun.
"""

import hmac
import os
import select
import socket
import struct
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final, Protocol

from kv_core.clock import thread_cpu_ns
from kv_core.errors import KVError
from kv_transport import limits, stream_io
from kv_transport.auth import MAC_BYTES, FrameMac
from kv_transport.backends.io_thread import IoThread
from kv_transport.backends.payload import NOTHING, Sink, Source
from kv_transport.stream_io import DO_NOT_WAIT, State

_LENGTHS: Final = struct.Struct("<IIQ")
_PREFIX_BYTES: Final = _LENGTHS.size + MAC_BYTES
_STAGE_BYTES: Final = _PREFIX_BYTES + limits.CONTROL_FRAME_BYTES_MAX
_READS: Final = 24
"""System calls to read before other sockets of the thread get their turn: two for a head."""
_MEASURED_BYTES: Final = 256 * 1024
"""A payload from which one learns what bytes cost: below, it is mostly what is around them."""


@dataclass(slots=True, eq=False)
class _Outgoing:
    """A frame that waits, or is on its way; `follow` makes the head of the one right after it."""

    head: bytes
    source: Source = NOTHING
    follow: Callable[[], bytes] | None = None
    state: State = field(default_factory=stream_io.send_state)
    spent_ns: int = 0


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
        self._control: deque[_Outgoing] = deque()
        self._frames: deque[_Outgoing] = deque()
        self._follow: Callable[[], bytes] | None = None
        self._sending: _Outgoing | None = None
        self._watching = select.EPOLLIN
        self._stage = memoryview(bytearray(_STAGE_BYTES))
        self._staged = 0
        self._sink: Sink | None = None
        self._payload = self._spent_ns = 0
        self._ended = False

    def fileno(self) -> int:
        return self._fd

    def start(self) -> None:
        """From any thread."""
        self.io.call(lambda: self.io.serve(self, select.EPOLLIN))

    def send(self, head: bytes) -> None:
        """Queue a control frame and send what the kernel takes."""
        if self._ended:
            return
        if len(self._control) >= limits.QUEUED_UNITS_MAX:
            self._end("it reads nothing")
            return
        self._control.append(_Outgoing(head))
        self._flush(DO_NOT_WAIT)

    def send_payload(self, head: bytes, source: Source, follow: Callable[[], bytes] | None = None) -> None:
        """The same with a payload, whose memory is in use until the peer answers or `ended`.

        Args:
            follow: makes the head of a frame that comes right after the payload, once the source is summed.
        """
        if not self._ended:
            self._frames.append(_Outgoing(head, source, follow))
            self._flush(DO_NOT_WAIT)

    def abort(self, cause: str) -> None:
        """Close at once, after a last try to send what is queued of control frames. Idempotent."""
        if not self._ended:
            self._frames.clear()
            if self._sending is None:
                self._flush(DO_NOT_WAIT)
            self._end(cause)

    def on_events(self, events: int) -> None:
        try:
            if events & select.EPOLLOUT:
                self._flush(self.io.others())
            if events & (select.EPOLLIN | select.EPOLLHUP | select.EPOLLERR) and not self._ended:
                self._read()
        except KVError as error:
            self._end(str(error))

    # Sending.

    def _flush(self, others: int) -> None:
        """Send until the socket takes no more, or a payload is through: then it is the turn of other sockets."""
        try:
            while (out := self._sending or self._next_frame()) is not None:
                source = out.source
                if not self._transmit(out, others):
                    break
                self._sending, self._follow = None, out.follow
                if source.nbytes and self._frames:
                    break
        except OSError as error:
            self._end(os.strerror(error.errno or 0))
            return
        more = self._sending is not None or self._follow is not None or self._control or self._frames
        self._watch(select.EPOLLIN | select.EPOLLOUT if more else select.EPOLLIN)

    def _transmit(self, out: _Outgoing, others: int) -> bool:
        """Send of it what can be sent; whether that was all."""
        source = out.source
        measured = source.nbytes >= _MEASURED_BYTES
        began_ns = thread_cpu_ns() if measured else 0
        done = stream_io.send(self._fd, others, out.head, source.memory, source.spans, source.checks, out.state)
        if measured:
            out.spent_ns += thread_cpu_ns() - began_ns
            if done:
                self.io.moving.sent(source.nbytes, out.spent_ns)
        return done

    def _next_frame(self) -> _Outgoing | None:
        if self._follow is not None:
            out, self._follow = _Outgoing(self._follow()), None
        elif self._control:
            out = self._control.popleft()
        elif self._frames:
            out = self._frames.popleft()
        else:
            return None
        lengths = _LENGTHS.pack(len(out.head), 0, out.source.nbytes)
        # The counter must follow the order of sending, so the MAC is made now and not when the frame was queued.
        out.head = lengths + self._mac_out.next(lengths, out.head) + out.head
        self._sending = out
        return out

    def _watch(self, events: int) -> None:
        if events != self._watching and not self._ended:
            self._watching = events
            self.io.watch(self, events)

    # Receiving.

    def _read(self) -> None:
        for _ in range(_READS):
            if self._ended:
                return
            sink = self._sink
            try:
                if sink is None:
                    nbytes = self._sock.recv_into(self._stage[self._staged : self._needed()])
                else:
                    nbytes = self._receive(sink)
            except (BlockingIOError, InterruptedError):
                return
            except OSError as error:
                self._end(os.strerror(error.errno or 0))
                return
            if nbytes == 0:
                self._end("the peer is gone")
                return
            if sink is None:
                self._staged += nbytes
                self._parse()
            elif not sink.left:
                self._sink = None
                self._receiver.payload_done(self, sink)
                return

    def _receive(self, sink: Sink) -> int:
        """Take of its payload what is there; how many bytes, 0 at the end of the stream."""
        if self._payload < _MEASURED_BYTES:
            return sink.receive(self._sock, self.io.others())
        began_ns = thread_cpu_ns()
        try:
            return sink.receive(self._sock, self.io.others())
        finally:
            self._spent_ns += thread_cpu_ns() - began_ns
            if not sink.left:
                self.io.moving.received(self._payload, self._spent_ns)

    def _needed(self) -> int:
        """Bytes of the frame at hand up to the end of its prefix, or of its head: never one of its payload."""
        if self._staged < _PREFIX_BYTES:
            return _PREFIX_BYTES
        return _PREFIX_BYTES + int(_LENGTHS.unpack_from(self._stage)[0])

    def _parse(self) -> None:
        if self._staged < _PREFIX_BYTES:
            return
        head_nbytes, zero, payload = _LENGTHS.unpack_from(self._stage)
        if not 0 < head_nbytes <= limits.CONTROL_FRAME_BYTES_MAX or zero or payload > limits.UNIT_BYTES_MAX:
            self._end(f"frame of {head_nbytes} and {payload} bytes")
            return
        if self._staged < _PREFIX_BYTES + head_nbytes:
            return
        head = self._stage[_PREFIX_BYTES : self._staged]
        mac = self._mac_in.next(bytes(self._stage[: _LENGTHS.size]), head)
        if not hmac.compare_digest(mac, self._stage[_LENGTHS.size : _PREFIX_BYTES]):
            self._end("a frame's MAC is wrong")
            return
        self._staged = 0
        sink = self._receiver.frame(self, head, payload)
        if self._ended or not payload:
            return
        if sink is None or sink.left != payload:
            self._end(f"a payload of {payload} bytes that nothing asked for")
            return
        self._sink, self._payload, self._spent_ns = sink, payload, 0

    def _end(self, cause: str) -> None:
        if self._ended:
            return
        self._ended = True
        self.io.drop(self)
        self._sock.close()
        self._control.clear()
        self._frames.clear()
        self._sending = self._follow = None
        sink, self._sink = self._sink, None
        self._receiver.ended(self, sink, cause)

"""The owner's end of a TCP connection of several streams.

Writes land here by our own hand: each is admitted before its first byte is taken from the socket, goes straight into
its slots, and is verified before anybody hears of it. That also makes the fence simple: once a grant is revoked, what
still arrives for it goes nowhere.
"""

from collections.abc import Callable
from functools import partial

from kv_core.checksum import crc64
from kv_core.errors import KVError
from kv_transport.backends.base import Surroundings
from kv_transport.backends.session import OwnerSession
from kv_transport.backends.stream import Sink, Stream
from kv_transport.descriptors import merge_offsets
from kv_transport.errors import FrameRefused
from kv_transport.frames import (
    Acked,
    Data,
    Frame,
    FromInitiator,
    Read,
    Write,
    decode_from_initiator,
    encode,
    pack_checks,
    refusal,
)
from kv_transport.ledger_items import Landing
from kv_transport.types import PeerName


class TcpSession(OwnerSession):
    """See the module. Implements `stream.Receiver`; streams join as they come."""

    scheme = "tcp"
    one_sided = False

    def __init__(self, around: Surroundings, peer: PeerName, on_end: Callable[[], None]) -> None:
        super().__init__(around, peer, on_end)
        self._streams: list[Stream] = []
        self._landings: dict[Sink, tuple[int, Landing | KVError]] = {}

    def attach(self, stream: Stream) -> None:
        """On the loop: one more stream of this connection."""
        self._streams.append(stream)
        stream.start()

    @property
    def num_streams(self) -> int:
        return len(self._streams)

    # On the loop.

    def _send(self, frame: Frame) -> None:
        stream = self._streams[0]
        stream.io.call(partial(stream.send, encode(frame)))

    def _shut(self) -> None:
        for stream in self._streams:
            stream.io.call(partial(stream.abort, "the session ended"))

    # In the IO thread of the stream.

    def frame(self, stream: Stream, head: memoryview, payload: int) -> Sink | None:
        frame = decode_from_initiator(head, str(self.peer))
        match frame:
            case Write():
                return self._write(frame, payload)
            case Read():
                self._read(stream, frame)
            case _:
                self._around.poster.post(partial(self._on_frame, frame))
        return None

    def _write(self, frame: Write, payload: int) -> Sink:
        """Where the bytes go; a refused unit's bytes go nowhere, and the reason is sent when they are through."""
        try:
            landing = self._around.ledger.admit(self, frame.unit)
        except KVError as error:
            sink = Sink([None], [payload], lambda: True)
            self._landings[sink] = frame.seq, error
            return sink
        if landing.nbytes != payload:
            self._around.ledger.abort(landing)
            raise FrameRefused(peer=str(self.peer), reason=f"{payload} bytes for a unit of {landing.nbytes}")
        view = landing.memory.data_view
        cells = [
            view[offset : offset + size] if landing.writable(cell) else None
            for cell, (offset, size) in enumerate(zip(landing.offsets, landing.sizes, strict=True))
        ]
        sink = Sink(cells, landing.sizes, lambda: landing.revoked)
        self._landings[sink] = frame.seq, landing
        return sink

    def payload_done(self, stream: Stream, sink: Sink) -> None:
        seq, landing = self._landings.pop(sink)
        if isinstance(landing, KVError):
            stream.send(encode(refusal(seq, landing)))
            return
        # A cell that was not written counts as what it already is.
        checks = [
            expected if check is None else check for check, expected in zip(sink.checks, landing.expected, strict=True)
        ]
        try:
            self._around.ledger.land(landing, checks)
        except KVError as error:
            stream.send(encode(refusal(seq, error)))
        else:
            stream.send(encode(Acked(seq)))

    def _read(self, stream: Stream, frame: Read) -> None:
        try:
            serving = self._around.ledger.reads.serve(self, frame.unit)
        except KVError as error:
            stream.send(encode(refusal(frame.seq, error)))
            return
        view = serving.memory.data_view
        checks = serving.checks or [
            crc64(view[offset : offset + size]) for offset, size in zip(serving.offsets, serving.sizes, strict=True)
        ]
        pieces = merge_offsets(serving.offsets, serving.sizes)
        stream.send(
            encode(Data(frame.seq, pack_checks(checks))), [view[offset : offset + size] for offset, size in pieces]
        )

    def ended(self, stream: Stream, sink: Sink | None, cause: str) -> None:
        if sink is not None:
            _, landing = self._landings.pop(sink)
            if isinstance(landing, Landing):
                self._around.ledger.abort(landing)
        self._around.poster.post(partial(self._lost, cause))

    def _on_frame(self, frame: FromInitiator) -> None:
        if not self.over:
            self._received(frame)

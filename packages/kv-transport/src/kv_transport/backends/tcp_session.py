"""The owner's end of a TCP connection of several streams.

Writes land here by our own hand: each is admitted before its first byte is taken from the socket, goes straight into
its slots, and is verified before anybody hears of it, once the checksums are here too, which may follow the bytes. That
also makes the fence simple: once a grant is revoked, what still arrives for it goes nowhere.
"""

from collections.abc import Callable
from functools import partial

from kv_core.errors import KVError
from kv_transport.backends.base import Surroundings
from kv_transport.backends.payload import Sink
from kv_transport.backends.session import OwnerSession
from kv_transport.backends.stream import Stream
from kv_transport.backends.wire_form import Arrival, Place, summed_form, write_form
from kv_transport.codecs import Codec, codec_name
from kv_transport.errors import FrameRefused
from kv_transport.frames import (
    Acked,
    Data,
    Frame,
    FromInitiator,
    Read,
    Sums,
    Write,
    decode_from_initiator,
    encode,
    pack_checks,
    refusal,
)
from kv_transport.ledger_items import Landing
from kv_transport.ticket_checks import unpack_checks
from kv_transport.types import PeerName


class TcpSession(OwnerSession):
    """See the module. Implements `stream.Receiver`; streams join as they come."""

    scheme = "tcp"
    one_sided = False

    def __init__(self, around: Surroundings, peer: PeerName, on_end: Callable[[], None]) -> None:
        super().__init__(around, peer, on_end)
        self._streams: list[Stream] = []
        self._landings: dict[Sink, tuple[int, Landing, Arrival] | tuple[int, KVError]] = {}
        self._unsummed: dict[Stream, tuple[int, Landing, Arrival]] = {}

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
        if stream in self._unsummed and not isinstance(frame, Sums):
            raise FrameRefused(peer=str(self.peer), reason=f"{type(frame).__name__} where checksums were to follow")
        match frame:
            case Write():
                return self._write(frame, payload)
            case Read():
                self._read(stream, frame)
            case Sums():
                self._sums(stream, frame)
            case _:
                self._around.poster.post(partial(self._on_frame, frame))
        return None

    def _write(self, frame: Write, payload: int) -> Sink:
        """Where the bytes go; a refused unit's bytes go nowhere, and the reason is sent when they are through."""
        try:
            landing = self._around.ledger.admit(self, frame.unit)
        except KVError as error:
            sink = Sink.nowhere(payload)
            self._landings[sink] = frame.seq, error
            return sink
        geometry = landing.entry.arena.geometry if landing.entry is not None else None
        try:
            arrival = Arrival(
                landing.codec,
                Place(landing.memory, landing.offsets, landing.sizes, geometry),
                [landing.writable(cell) for cell in range(len(landing.sizes))],
                payload,
                lambda: landing.revoked,
                str(self.peer),
            )
        except FrameRefused:
            self._around.ledger.abort(landing)
            raise
        self._landings[arrival.sink] = frame.seq, landing, arrival
        return arrival.sink

    def payload_done(self, stream: Stream, sink: Sink) -> None:
        match self._landings.pop(sink):
            case seq, KVError() as error:
                stream.send(encode(refusal(seq, error)))
            case seq, landing, arrival if not landing.expected:
                self._unsummed[stream] = seq, landing, arrival
            case seq, landing, arrival:
                self._land(stream, seq, landing, arrival)

    def _sums(self, stream: Stream, frame: Sums) -> None:
        """What a unit was to be that is here already. Those of a unit that was refused mean nothing."""
        waiting = self._unsummed.get(stream)
        if waiting is not None:
            seq, landing, arrival = waiting
            expected = unpack_checks(frame.checks, len(landing.sizes), self.peer)
            if frame.seq != seq:
                raise FrameRefused(peer=str(self.peer), reason="checksums of another unit")
            del self._unsummed[stream]
            landing.expected = expected
            self._land(stream, seq, landing, arrival)

    def _land(self, stream: Stream, seq: int, landing: Landing, arrival: Arrival) -> None:
        try:
            checks, stored = arrival.finish(landing.expected, self._around.codec_rates)
            self._around.ledger.land(landing, checks, stored, arrival.payload)
        except KVError as error:
            self._around.ledger.abort(landing)
            stream.send(encode(refusal(seq, error)))
        else:
            stream.send(encode(Acked(seq)))

    def _read(self, stream: Stream, frame: Read) -> None:
        try:
            serving = self._around.ledger.reads.serve(self, frame.unit)
            place = Place(serving.memory, serving.offsets, serving.sizes, serving.geometry)
            if serving.checks or serving.codec is not Codec.NONE:
                checks = serving.checks or place.sums()
                form = write_form(serving.codec, place, checks, self._around.codec_rates, str(self._around.me))
            else:
                form = summed_form(place)
        except KVError as error:
            stream.send(encode(refusal(frame.seq, error)))
            return
        head = encode(Data(frame.seq, pack_checks(form.checks), codec_name(form.codec)))
        stream.send_payload(head, form.source, form.sums_of(frame.seq))

    def ended(self, stream: Stream, sink: Sink | None, cause: str) -> None:
        unfinished = [self._unsummed.pop(stream, None), self._landings.pop(sink) if sink is not None else None]
        for one in unfinished:
            match one:
                case _, Landing() as landing, _:
                    self._around.ledger.abort(landing)
                case _:
                    pass
        self._around.poster.post(partial(self._lost, cause))

    def _on_frame(self, frame: FromInitiator) -> None:
        if not self.over:
            self._received(frame)

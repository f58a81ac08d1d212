"""The initiator's end of a TCP connection of several streams."""

import os
from dataclasses import dataclass, field
from functools import partial

from kv_core.errors import KVError, LocalProtocolError
from kv_transport.backends.base import Link, LinkOwner, Surroundings
from kv_transport.backends.payload import Sink
from kv_transport.backends.stream import Stream
from kv_transport.backends.wire_form import Arrival, Place, WireForm, summed_form, write_form
from kv_transport.codec_choice import MovingCost
from kv_transport.codecs import Codec, decoded_checks, wire_codec
from kv_transport.errors import ChecksumMismatch, CodecFailed, ConnectionLost, FrameRefused
from kv_transport.frames import Acked, Data, Frame, Read, Refused, Sums, Write, decode_from_owner, encode
from kv_transport.ticket_checks import unpack_checks
from kv_transport.tickets import AgentMetadata
from kv_transport.types import XferOp
from kv_transport.units import NonceSource, Unit


@dataclass(slots=True, eq=False)
class _Reading:
    """A unit whose bytes are arriving; nothing is expected of them as long as their checksums have not followed."""

    seq: int
    unit: Unit
    expected: list[int]
    arrival: Arrival


@dataclass(slots=True, eq=False)
class _Lane:
    """One stream and what is on it. `queued` belongs to the loop, the rest to the IO thread."""

    stream: Stream
    queued: int = 0
    reads: dict[int, Unit] = field(default_factory=dict)
    arriving: dict[Sink, _Reading] = field(default_factory=dict)
    unsummed: _Reading | None = None


class TcpLink(Link):
    """See the module. Implements `stream.Receiver`; give it its streams with `attach`, then `start`."""

    scheme = "tcp"
    encodes = True

    def __init__(self, around: Surroundings, peer: AgentMetadata, nonces: NonceSource, owner: LinkOwner) -> None:
        super().__init__(around, peer.name, nonces, owner)
        self._lanes: list[_Lane] = []
        self._by_stream: dict[Stream, _Lane] = {}
        self._on_lane: dict[int, _Lane] = {}
        self._running = 0

    def attach(self, stream: Stream) -> None:
        lane = _Lane(stream)
        self._lanes.append(lane)
        self._by_stream[stream] = lane
        self._running += 1

    def start(self) -> None:
        for stream in self._by_stream:
            stream.start()

    def moving_cost(self) -> MovingCost:
        threads = len({lane.stream.io for lane in self._lanes})
        return self._lanes[0].stream.io.moving.cost(min(threads, len(os.sched_getaffinity(0))))

    # On the loop.

    def _begin(self, seq: int, unit: Unit) -> None:
        lane = min(self._lanes, key=lambda lane: lane.queued)
        lane.queued += unit.nbytes
        self._on_lane[seq] = lane
        lane.stream.io.call(partial(self._transmit, lane, lane.stream, seq, unit, self._nonces()))

    def _settle(self, seq: int, error: KVError | None) -> None:
        lane = self._on_lane.pop(seq, None)
        posted = self._posted.get(seq)
        if lane is not None and posted is not None:
            lane.queued -= posted.unit.nbytes
        super()._settle(seq, error)

    def _send(self, frame: Frame) -> None:
        stream = self._lanes[0].stream
        stream.io.call(partial(stream.send, encode(frame)))

    def _break(self, error: KVError) -> None:
        for stream in self._by_stream:
            stream.io.call(partial(stream.abort, str(error)))
        if not self._running:
            self._settle_all(error)

    def _ticket_busy(self, ticket: int) -> bool:
        # The owner's own thread writes its memory, so it needs no word from us to stop.
        return False

    def _stream_over(self, cause: str) -> None:
        self._running -= 1
        # The first lost stream takes the others with it.
        self.fail(ConnectionLost(peer=str(self.peer), transport="tcp", cause=cause))
        if not self._running and self.lost is not None:
            self._settle_all(self.lost)

    # In the IO thread of the stream.

    def _transmit(self, lane: _Lane, stream: Stream, seq: int, unit: Unit, nonce: int) -> None:
        try:
            if unit.op is XferOp.READ:
                lane.reads[seq] = unit
                stream.send(encode(Read(seq, unit.head(nonce, [], unit.codec))))
                return
            form = self._form(unit)
            head = encode(Write(seq, unit.head(nonce, form.checks, form.codec)))
            stream.send_payload(head, form.source, form.sums_of(seq))
        except KVError as error:
            self._around.poster.post(partial(self._settle, seq, error))
        except Exception as bug:
            broken = LocalProtocolError(detail=f"sending a unit raised {bug!r}")
            self._around.poster.post(partial(self._settle, seq, broken))

    def _form(self, unit: Unit) -> WireForm:
        """How the unit is written. A codec that was our own idea, and does not suit the values, is left out."""
        if unit.codec is Codec.NONE and unit.arena is None:
            form = summed_form(_place(unit, Codec.NONE))
            unit.sent_codec, unit.wire_nbytes = form.codec, form.nbytes
            return form
        rates, me, checks = self._around.codec_rates, str(self._around.me), unit.take_checks()
        try:
            form = write_form(unit.codec, _place(unit, unit.codec), checks, rates, me)
        except CodecFailed:
            if unit.codec_required:
                raise
            form = write_form(Codec.NONE, _place(unit, Codec.NONE), checks, rates, me)
        unit.sent_codec, unit.wire_nbytes = form.codec, form.nbytes
        geometry = unit.geometry()
        if not form.codec.lossless and geometry is not None:
            unit.far_checks = decoded_checks(form.codec, geometry, form.source.memory)
        if unit.codec is Codec.LZ4:
            unit.lz4_ratio = form.nbytes / unit.nbytes
        return form

    def frame(self, stream: Stream, head: memoryview, payload: int) -> Sink | None:
        frame = decode_from_owner(head, str(self.peer))
        lane = self._by_stream[stream]
        if isinstance(frame, Sums):
            self._sums(lane, frame)
            return None
        if lane.unsummed is not None:
            raise FrameRefused(peer=str(self.peer), reason=f"{type(frame).__name__} where checksums were to follow")
        if isinstance(frame, Data):
            return self._arrive(lane, frame, payload)
        if isinstance(frame, Refused | Acked):
            lane.reads.pop(frame.seq, None)
        self._around.poster.post(partial(self._received, frame))
        return None

    def _arrive(self, lane: _Lane, frame: Data, payload: int) -> Sink:
        unit = lane.reads.pop(frame.seq, None)
        codec = wire_codec(frame.codec, str(self.peer))
        if unit is None or codec not in (Codec.NONE, unit.codec):
            raise FrameRefused(peer=str(self.peer), reason="data that nobody asked for")
        follow = not frame.checks and codec is Codec.NONE
        expected = [] if follow else unpack_checks(frame.checks, len(unit.cells), self.peer)
        arrival = Arrival(codec, _place(unit, codec), [True] * len(unit.cells), payload, lambda: False, str(self.peer))
        unit.sent_codec, unit.wire_nbytes = codec, payload
        if unit.codec is Codec.LZ4:
            unit.lz4_ratio = payload / unit.nbytes
        lane.arriving[arrival.sink] = _Reading(frame.seq, unit, expected, arrival)
        return arrival.sink

    def payload_done(self, stream: Stream, sink: Sink) -> None:
        lane = self._by_stream[stream]
        reading = lane.arriving.pop(sink)
        if reading.expected:
            self._arrived(reading)
        else:
            lane.unsummed = reading

    def _sums(self, lane: _Lane, frame: Sums) -> None:
        reading, lane.unsummed = lane.unsummed, None
        if reading is None or frame.seq != reading.seq:
            raise FrameRefused(peer=str(self.peer), reason="checksums that nobody asked for")
        reading.expected = unpack_checks(frame.checks, len(reading.unit.cells), self.peer)
        self._arrived(reading)

    def _arrived(self, reading: _Reading) -> None:
        error: KVError | None = None
        try:
            checks, stored = reading.arrival.finish(reading.expected, self._around.codec_rates)
            if checks != reading.expected:
                bad = sum(ours != theirs for ours, theirs in zip(checks, reading.expected, strict=True))
                self._around.ledger.count_checksum_failure()
                raise ChecksumMismatch(
                    peer=str(self.peer), transport="tcp", bad=bad, total=len(checks), layer=reading.unit.layer
                )
            reading.unit.store_checks(stored)
        except KVError as failed:
            error = failed
        self._around.poster.post(partial(self._read_over, reading.seq, error))

    def ended(self, stream: Stream, sink: Sink | None, cause: str) -> None:
        lane = self._by_stream[stream]
        lane.reads.clear()
        lane.arriving.clear()
        lane.unsummed = None
        self._around.poster.post(partial(self._stream_over, cause))

    def _read_over(self, seq: int, error: KVError | None) -> None:
        self._heard_ns = self._around.clock.monotonic_ns()
        self._settle(seq, error)


def _place(unit: Unit, codec: Codec) -> Place:
    geometry = None if codec.lossless else unit.geometry()
    return Place(unit.local, unit.cells.local.tolist(), unit.cells.sizes.tolist(), geometry)

"""The initiator's end of a TCP connection of several streams."""

from dataclasses import dataclass, field
from functools import partial

from kv_core.errors import KVError, LocalProtocolError
from kv_transport.backends.base import Link, LinkOwner, Surroundings
from kv_transport.backends.stream import Sink, Stream
from kv_transport.descriptors import merge_offsets
from kv_transport.errors import ChecksumMismatch, ConnectionLost, FrameRefused
from kv_transport.frames import Acked, Data, Frame, Read, Refused, Write, decode_from_owner, encode
from kv_transport.tickets import AgentMetadata
from kv_transport.types import XferOp
from kv_transport.units import NonceSource, Unit


@dataclass(slots=True, eq=False)
class _Reading:
    """A unit whose bytes are arriving."""

    seq: int
    unit: Unit
    expected: list[int]


@dataclass(slots=True, eq=False)
class _Lane:
    """One stream and what is on it. `queued` belongs to the loop, the rest to the IO thread."""

    stream: Stream
    queued: int = 0
    reads: dict[int, Unit] = field(default_factory=dict)
    arriving: dict[Sink, _Reading] = field(default_factory=dict)


class TcpLink(Link):
    """See the module. Implements `stream.Receiver`; give it its streams with `attach`, then `start`."""

    scheme = "tcp"

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
                stream.send(encode(Read(seq, unit.head(nonce, []))))
                return
            head = encode(Write(seq, unit.head(nonce, unit.take_checks())))
            view = unit.local.data_view
            pieces = merge_offsets(unit.cells.local.tolist(), unit.cells.sizes.tolist())
            stream.send(head, [view[offset : offset + nbytes] for offset, nbytes in pieces])
        except KVError as error:
            self._around.poster.post(partial(self._settle, seq, error))
        except Exception as bug:
            broken = LocalProtocolError(detail=f"sending a unit raised {bug!r}")
            self._around.poster.post(partial(self._settle, seq, broken))

    def frame(self, stream: Stream, head: memoryview, payload: int) -> Sink | None:
        frame = decode_from_owner(head, str(self.peer))
        lane = self._by_stream[stream]
        if isinstance(frame, Data):
            return self._arrive(lane, frame, payload)
        if isinstance(frame, Refused | Acked):
            lane.reads.pop(frame.seq, None)
        self._around.poster.post(partial(self._received, frame))
        return None

    def _arrive(self, lane: _Lane, frame: Data, payload: int) -> Sink:
        unit = lane.reads.pop(frame.seq, None)
        if unit is None or payload != unit.nbytes or len(frame.checks) != 8 * len(unit.cells):
            raise FrameRefused(peer=str(self.peer), reason="data that nobody asked for")
        view = unit.local.data_view
        sizes = unit.cells.sizes.tolist()
        cells = [view[offset : offset + size] for offset, size in zip(unit.cells.local.tolist(), sizes, strict=True)]
        expected = [int.from_bytes(frame.checks[at : at + 8], "little") for at in range(0, len(frame.checks), 8)]
        sink = Sink(cells, sizes, lambda: False)
        lane.arriving[sink] = _Reading(frame.seq, unit, expected)
        return sink

    def payload_done(self, stream: Stream, sink: Sink) -> None:
        reading = self._by_stream[stream].arriving.pop(sink)
        error: KVError | None = None
        if sink.checks == reading.expected:
            reading.unit.store_checks(reading.expected)
        else:
            bad = sum(ours != theirs for ours, theirs in zip(sink.checks, reading.expected, strict=True))
            self._around.ledger.count_checksum_failure()
            error = ChecksumMismatch(
                peer=str(self.peer), transport="tcp", bad=bad, total=len(sink.checks), layer=reading.unit.layer
            )
        self._around.poster.post(partial(self._read_over, reading.seq, error))

    def ended(self, stream: Stream, sink: Sink | None, cause: str) -> None:
        lane = self._by_stream[stream]
        lane.reads.clear()
        lane.arriving.clear()
        self._around.poster.post(partial(self._stream_over, cause))

    def _read_over(self, seq: int, error: KVError | None) -> None:
        self._heard_ns = self._around.clock.monotonic_ns()
        self._settle(seq, error)

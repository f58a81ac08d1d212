"""A stream of frames in its IO thread: one that waits holds nobody up, and what was promised to follow must follow."""

import errno
import queue
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from kv_core.checksum import crc64
from kv_transport import Access, SharedBuffer, XferDesc, XferOp, limits
from kv_transport.auth import FrameMac
from kv_transport.backends.io_thread import IoThread
from kv_transport.backends.payload import Sink, Source
from kv_transport.backends.stream import Stream
from kv_transport.backends.wire_form import WireForm
from kv_transport.errors import ConnectionLost
from kv_transport.frames import Frame, Ping, Sums, encode
from kv_transport.stream_io import DO_NOT_WAIT
from kv_transport.xfer import Xfer
from tests.transport.helpers_proxy import flip_at, proxied
from tests.transport.helpers_transport import NO_RESERVE, Node, eventually, introduce, pair

KEY, OTHER_KEY = b"k" * 32, b"o" * 32
PATIENCE_S = 20


@dataclass(eq=False)
class Heard:
    """A receiver that puts payloads into memory of its own and tells what happened."""

    memory: memoryview = field(default_factory=lambda: memoryview(bytearray(1 << 22)))
    told: "queue.Queue[tuple[str, object]]" = field(default_factory=queue.Queue)

    def frame(self, stream: Stream, head: memoryview, payload: int) -> Sink | None:
        self.told.put(("frame", bytes(head)))
        return Sink(self.memory, np.array([[0, payload]], np.int64), [False], lambda: False) if payload else None

    def payload_done(self, stream: Stream, sink: Sink) -> None:
        self.told.put(("payload", sink.checks))

    def ended(self, stream: Stream, sink: Sink | None, cause: str) -> None:
        self.told.put(("ended", cause))

    def next(self) -> tuple[str, object]:
        return self.told.get(timeout=PATIENCE_S)


@dataclass(eq=False)
class End:
    """A stream in an IO thread, and the bare socket of its peer."""

    stream: Stream
    heard: Heard
    peer: socket.socket
    mac: FrameMac = field(default_factory=lambda: FrameMac(OTHER_KEY))

    def frame(self, head: bytes, payload: int = 0) -> bytes:
        """What the peer sends before a payload."""
        lengths = struct.pack("<IIQ", len(head), 0, payload)
        return lengths + self.mac.next(lengths, head) + head


def take(sock: socket.socket, nbytes: int) -> bytes:
    """Exactly so many bytes."""
    found = bytearray()
    while len(found) < nbytes:
        found += sock.recv(nbytes - len(found))
    return bytes(found)


@pytest.fixture
def io() -> Iterator[IoThread]:
    thread = IoThread("test-io")
    yield thread
    thread.close()


@pytest.fixture
def ends(io: IoThread) -> Iterator[tuple[End, End]]:
    """Two connections served by one thread."""
    made = []
    for _ in range(2):
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        theirs.settimeout(PATIENCE_S)
        heard = Heard()
        made.append(End(Stream(ours, io, KEY, OTHER_KEY, heard), heard, theirs))
        made[-1].stream.start()
    yield made[0], made[1]
    for end in made:
        io.call(partial(end.stream.abort, "over"))
        end.peer.close()


def test_a_payload_that_stalls_holds_up_neither_calls_nor_other_connections(
    io: IoThread, ends: tuple[End, End]
) -> None:
    one, other = ends
    one.peer.sendall(one.frame(b"head", payload=8) + b"half")
    assert one.heard.next() == ("frame", b"head")
    called = threading.Event()
    io.call(called.set)
    assert called.wait(PATIENCE_S)
    other.peer.sendall(other.frame(b"control"))
    assert other.heard.next() == ("frame", b"control")
    one.peer.sendall(b"rest")
    assert one.heard.next() == ("payload", [crc64(b"halfrest")])


def test_a_peer_that_takes_nothing_holds_up_neither_calls_nor_other_connections(
    io: IoThread, ends: tuple[End, End]
) -> None:
    one, other = ends
    data = memoryview(bytearray(1 << 22))
    io.call(lambda: one.stream.send_payload(b"large", Source.whole(data)))
    # By now the thread has filled the socket, or is about to.
    assert one.peer.recv(1)
    called = threading.Event()
    io.call(called.set)
    assert called.wait(PATIENCE_S)
    other.peer.sendall(other.frame(b"control"))
    assert other.heard.next() == ("frame", b"control")
    one.peer.sendall(one.frame(b"answer"))
    assert one.heard.next() == ("frame", b"answer")


def test_nobody_waits_for_a_socket_while_calls_are_pending(io: IoThread) -> None:
    gate, over, seen = threading.Event(), threading.Event(), list[int]()
    io.call(lambda: seen.append(int(gate.wait(PATIENCE_S))))
    for _ in range(2):
        io.call(lambda: seen.append(io.others()))
    io.call(over.set)
    gate.set()
    assert over.wait(PATIENCE_S)
    assert seen == [1, DO_NOT_WAIT, DO_NOT_WAIT]
    # The last call finds the queue empty.
    last: queue.Queue[int] = queue.Queue()
    io.call(lambda: last.put(io.others()))
    assert last.get(timeout=PATIENCE_S) != DO_NOT_WAIT


def test_control_frames_overtake_payloads_but_not_what_follows_one(io: IoThread, ends: tuple[End, End]) -> None:
    one, _ = ends
    data = memoryview(bytearray(b"x" * (1 << 21)))
    sources = [Source(data, np.array([[0, len(data)]], np.int64), summed=True) for _ in range(2)]

    def follow(source: Source) -> bytes:
        assert source.checks is not None
        return b"sums:" + source.checks.tobytes()

    def send() -> None:
        for index, source in enumerate(sources):
            one.stream.send_payload(b"payload %d" % index, source, partial(follow, source))
        one.stream.send(b"control")

    io.call(send)
    mac = FrameMac(KEY)
    found: list[bytes] = []
    while len(found) < 5:
        prefix = take(one.peer, 32)
        head_nbytes, _, payload = struct.unpack_from("<IIQ", prefix)
        head = take(one.peer, head_nbytes)
        assert mac.next(prefix[:16], head) == prefix[16:]
        assert not take(one.peer, payload).strip(b"x")
        found.append(head)
    sums = b"sums:" + crc64(data).to_bytes(8, "little")
    assert found == [b"payload 0", sums, b"control", b"payload 1", sums]


@pytest.mark.parametrize("lengths", [(0, 0, 0), (limits.CONTROL_FRAME_BYTES_MAX + 1, 0, 0), (4, 1, 0)])
def test_lengths_that_no_frame_has_end_the_connection(ends: tuple[End, End], lengths: tuple[int, int, int]) -> None:
    one, _ = ends
    one.peer.sendall(struct.pack("<IIQ", *lengths) + bytes(16))
    what, cause = one.heard.next()
    assert what == "ended" and "frame of" in str(cause)


# Checksums that follow their bytes.


@pytest.fixture
def plain(tmp_path: Path) -> Iterator[tuple[SharedBuffer, SharedBuffer]]:
    with (
        SharedBuffer.create(1 << 20, "one", budget=NO_RESERVE) as one,
        SharedBuffer.create(1 << 20, "two", budget=NO_RESERVE) as two,
    ):
        one.data[:] = np.random.default_rng(1).integers(0, 256, 1 << 20, np.uint8)
        yield one, two


async def put(sender: Node, receiver: Node, one: SharedBuffer, two: SharedBuffer, flips: int) -> int:
    """One put of all through a proxy that flips a bit in so many passes of the payload; how many units were retried."""
    mine = sender.agent.register_memory(one)
    theirs = receiver.agent.register_memory(two, Access.WRITE)
    metadata = receiver.agent.get_agent_metadata(sender.agent.name.node, sender.agent.name.incarnation)
    async with proxied(metadata, flip_at(600_000, flips)) as through:
        sender.agent.add_remote_agent(through)
        xfer = sender.agent.initialize_xfer(
            XferOp.WRITE,
            [XferDesc(mine.region, 0, 1 << 20)],
            [XferDesc(theirs.region, 0, 1 << 20)],
            receiver.agent.name.node,
        )
        sender.agent.transfer(xfer)
        stats = await xfer.done(PATIENCE_S * 1000)
        await sender.agent.remove_remote_agent(receiver.agent.name.node)
    return stats.retries


async def test_a_bit_lost_under_way_is_found_by_the_sums_behind_the_bytes(
    plain: tuple[SharedBuffer, SharedBuffer], tmp_path: Path
) -> None:
    async with pair("tcp", tmp_path, tcp_streams=1) as (sender, receiver):
        assert await put(sender, receiver, *plain, flips=1) == 1
        assert bytes(plain[0].data_view) == bytes(plain[1].data_view)
        assert receiver.agent.stats().checksum_failures == 1
        assert not receiver.agent.inventory().work


def whole(left: Node, right: Node, one: SharedBuffer, two: SharedBuffer, op: XferOp) -> Xfer:
    """A transfer of everything in two buffers."""
    mine = left.agent.register_memory(one, Access.WRITE)
    theirs = right.agent.register_memory(two, Access.WRITE)
    introduce(left, right)
    ours, others = [XferDesc(mine.region, 0, 1 << 20)], [XferDesc(theirs.region, 0, 1 << 20)]
    return left.agent.initialize_xfer(op, ours, others, right.agent.name.node)


@pytest.mark.parametrize("op", list(XferOp))
async def test_a_connection_cut_between_bytes_and_sums_is_made_again(
    op: XferOp, plain: tuple[SharedBuffer, SharedBuffer], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    send, cuts = Stream._next_frame, [1]

    def next_frame(self: Stream) -> object:
        if self._follow is not None and cuts[0]:
            cuts[0] = 0
            raise ConnectionResetError(errno.ECONNRESET, "cut by the test")
        return send(self)

    monkeypatch.setattr(Stream, "_next_frame", next_frame)
    async with pair("tcp", tmp_path) as (left, right):
        one, two = plain
        expected = bytes(one.data_view if op is XferOp.WRITE else two.data_view)
        async with whole(left, right, one, two, op) as xfer:
            left.agent.transfer(xfer)
            stats = await xfer.done(PATIENCE_S * 1000)
        assert cuts == [0] and stats.retries == 1
        assert bytes(one.data_view) == bytes(two.data_view) == expected
        assert not left.agent.inventory().work and not right.agent.inventory().work


@pytest.mark.parametrize("op", list(XferOp))
@pytest.mark.parametrize("what", ["none", "of another unit", "too few"])
async def test_bytes_without_their_sums_are_worth_nothing(
    what: str,
    op: XferOp,
    plain: tuple[SharedBuffer, SharedBuffer],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A peer that breaks the promise loses the connection, and the transfer fails with both sides at rest."""

    def sums_of(form: WireForm, seq: int) -> Callable[[], bytes]:
        assert form.source.checks is not None
        sums = form.source.checks.tobytes()
        frames: dict[str, Frame] = {
            "none": Ping(),
            "of another unit": Sums(seq + 1, sums),
            "too few": Sums(seq, sums[:-8]),
        }
        return lambda: encode(frames[what])

    monkeypatch.setattr(WireForm, "sums_of", sums_of)
    async with pair("tcp", tmp_path) as (left, right):
        async with whole(left, right, *plain, op) as xfer:
            left.agent.transfer(xfer)
            with pytest.raises(ConnectionLost):
                await xfer.done(PATIENCE_S * 1000)
        await eventually(lambda: not right.agent.inventory().work)
        assert not left.agent.inventory().work
        regions = [(one.agent.regions, region.region) for one in (left, right) for region in one.agent.regions.all()]
        await eventually(lambda: not any(table.uses(region) for table, region in regions))

"""The message of a small put and the page that answers it: compiled and plain alike; nothing else is taken for one."""

import contextlib
import os
import random
import socket
from collections.abc import Callable, Iterator
from typing import Final

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kv_core.checksum import crc64
from kv_core.errors import KVError
from kv_core.header import CorruptHeaderError
from kv_core.ids import Incarnation, NodeId
from kv_transport import SharedBuffer, doorbell, kernels
from kv_transport.doorbell import DAMAGED, HEAD_NBYTES, MARK, PLACES, SENT, WAITS, AnswersGiven, AnswersWanted, Put
from kv_transport.errors import FrameRefused, InvalidDescriptor
from kv_transport.types import PeerName
from kv_transport.unit_header import plain_header
from tests.transport.helpers_transport import NO_RESERVE

PEER = PeerName(NodeId("writer"), Incarnation(1))
MEMORY: Final = 1 << 17
MAX_UINT64: Final = (1 << 64) - 1
needs_compiled = pytest.mark.skipif(not doorbell.COMPILED, reason="installed without a compiler")

Putting = Callable[[int, memoryview, memoryview, int, bytearray, int, int, int], int]
Reading = Callable[[memoryview | bytes, PeerName], Put]
both_put = pytest.mark.parametrize("put", [pytest.param(doorbell.put, marks=needs_compiled), doorbell.plain_put])
both_read = pytest.mark.parametrize("read", [pytest.param(doorbell.read, marks=needs_compiled), doorbell.plain_read])
words = st.integers(0, MAX_UINT64)


@contextlib.contextmanager
def packets() -> Iterator[tuple[socket.socket, socket.socket]]:
    one, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with one, other:
        one.setblocking(False)
        other.setblocking(False)
        yield one, other


@st.composite
def pieces(draw: st.DrawFn) -> tuple[int, int, int]:
    """Offset there, offset here, bytes."""
    nbytes = draw(st.one_of(st.integers(1, 300), st.integers(1, 1 << 16)))
    offsets = st.integers(0, MEMORY - nbytes)
    return draw(offsets), draw(offsets), nbytes


@both_put
@given(piece=pieces(), numbers=st.tuples(words, words, words), region=words, notif=st.binary(max_size=200), seed=words)
def test_a_put_copies_its_piece_and_says_so(
    put: Putting, piece: tuple[int, int, int], numbers: tuple[int, int, int], region: int, notif: bytes, seed: int
) -> None:
    there, here, nbytes = piece
    source = memoryview(random.Random(seed).randbytes(MEMORY))
    before = random.Random(seed + 1).randbytes(MEMORY)
    to = bytearray(before)
    text = doorbell.message(region, there, nbytes, notif)
    seq, number, nonce = numbers
    with packets() as (mine, theirs):
        assert put(mine.fileno(), memoryview(to), source, here, text, seq, number, nonce) == SENT
        came = theirs.recv(1 << 17)
    assert came == text
    assert to == before[:there] + source[here : here + nbytes] + before[there + nbytes :]
    expected = seq, number, region, there, nbytes, nonce, notif
    assert doorbell.read(came, PEER) == doorbell.plain_read(memoryview(came), PEER) == expected
    checksum = crc64(source[here : here + nbytes])
    assert came[48:HEAD_NBYTES] == plain_header(1).attempt(nonce, checksum)


@both_put
@pytest.mark.parametrize(
    ("there", "here", "nbytes"),
    [(MEMORY, 0, 1), (0, MEMORY, 1), (MEMORY - 1, 0, 2), (0, MEMORY - 1, 2), (0, 0, MEMORY + 1), (0, 0, 0), (0, -1, 1)],
)
def test_a_piece_outside_its_memory_is_not_copied(put: Putting, there: int, here: int, nbytes: int) -> None:
    to = bytearray(MEMORY)
    with packets() as (mine, _), pytest.raises(IndexError):
        put(
            mine.fileno(),
            memoryview(to),
            memoryview(b"x" * MEMORY),
            here,
            doorbell.message(1, there, nbytes, b""),
            1,
            1,
            1,
        )
    assert not any(to)


@both_put
@pytest.mark.parametrize("which", ["to", "source", "message"])
def test_memory_that_was_let_go_is_an_error_and_not_touched(put: Putting, which: str) -> None:
    given = {"to": memoryview(bytearray(64)), "source": memoryview(b"x" * 64)}
    text = doorbell.message(1, 0, 64, b"n")
    message = memoryview(text)
    {**given, "message": message}[which].release()
    with pytest.raises(ValueError, match="released"):
        put(-1, given["to"], given["source"], 0, message, 1, 2, 3)  # type: ignore[arg-type]


@both_put
def test_a_message_that_cannot_leave_now_waits_complete(put: Putting) -> None:
    to, text = memoryview(bytearray(64)), doorbell.message(1, 0, 64, b"n")
    with packets() as (mine, _):
        with contextlib.suppress(BlockingIOError):
            while True:
                mine.send(bytes(1 << 12))
        assert put(mine.fileno(), to, memoryview(b"y" * 64), 0, text, 5, 6, 7) == WAITS
        assert to == b"y" * 64 and doorbell.read(bytes(text), PEER)[:2] == (5, 6)
    assert put(-1, to, memoryview(b"z" * 64), 0, text, 8, 9, 10) == WAITS
    assert to == b"z" * 64 and doorbell.read(bytes(text), PEER)[0] == 8


@both_put
def test_a_socket_whose_other_end_is_gone_is_an_error(put: Putting) -> None:
    with packets() as (mine, theirs):
        theirs.close()
        with pytest.raises(OSError, match="pipe"):
            put(
                mine.fileno(),
                memoryview(bytearray(8)),
                memoryview(bytes(8)),
                0,
                doorbell.message(1, 0, 8, b""),
                1,
                1,
                1,
            )


def test_what_arrives_damaged_makes_no_message(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = kernels.copy_unsealed_cells

    def torn(to: memoryview, source: memoryview, cells: kernels.CellTable) -> tuple[list[int], list[int]]:
        arrived, read = whole(to, source, cells)
        return [arrived[0] ^ 1], read

    monkeypatch.setattr(kernels, "copy_unsealed_cells", torn)
    with packets() as (mine, theirs):
        text = doorbell.message(1, 0, 8, b"n")
        blank = bytes(text)
        outcome = doorbell.plain_put(mine.fileno(), memoryview(bytearray(8)), memoryview(bytes(8)), 0, text, 1, 1, 1)
        assert outcome == DAMAGED and text == blank
        with pytest.raises(BlockingIOError):
            theirs.recv(1)


def sample(notif: bytes = b"note") -> bytes:
    text = doorbell.message(3, 0, 16, notif)
    doorbell.plain_put(-1, memoryview(bytearray(16)), memoryview(b"0123456789abcdef"), 0, text, 1, 2, 3)
    return bytes(text)


@both_read
@pytest.mark.parametrize("bit", [*range(8 * 48, 8 * HEAD_NBYTES, 7), 8, 63])
def test_a_damaged_header_or_mark_is_refused(read: Reading, bit: int) -> None:
    text = bytearray(sample())
    text[bit // 8] ^= 1 << bit % 8
    with pytest.raises((CorruptHeaderError, FrameRefused)):
        read(bytes(text), PEER)


@both_read
@pytest.mark.parametrize("nbytes", [1, 8, 48, HEAD_NBYTES - 1])
def test_a_message_that_is_too_short_is_refused(read: Reading, nbytes: int) -> None:
    for call in (read, doorbell.seq_of):
        with pytest.raises(FrameRefused):
            call(sample()[:nbytes], PEER)


@both_read
def test_a_header_about_something_else_is_refused(read: Reading) -> None:
    text = bytearray(sample())
    text[48:HEAD_NBYTES] = plain_header(2).attempt(3, 4)
    with pytest.raises(FrameRefused, match="seq_end"):
        read(bytes(text), PEER)


@given(st.binary(max_size=400))
def test_noise_is_refused_with_an_error_of_ours(noise: bytes) -> None:
    with contextlib.suppress(KVError):
        doorbell.read(bytes([MARK]) + noise, PEER)
        raise AssertionError("noise was taken for a put")


# The page.


@contextlib.contextmanager
def answer_page() -> Iterator[tuple[AnswersWanted, AnswersGiven]]:
    wanted = AnswersWanted.create()
    assert wanted is not None
    given_ = AnswersGiven.of(os.dup(wanted.fileno()))
    assert given_ is not None
    yield wanted, given_
    given_.close()
    wanted.close()
    wanted.close()


@needs_compiled
@given(st.lists(st.tuples(st.sampled_from(["give", "wait", "rest"]), st.integers(1, 3 * PLACES)), max_size=80))
def test_a_place_says_what_was_put_there_last_and_who_waits_is_told(plan: list[tuple[str, int]]) -> None:
    with answer_page() as (wanted, given_):
        places: dict[int, int] = {}
        waits = False
        for step, seq in plan:
            if step == "give":
                assert given_.give(seq) is waits
                places[seq % PLACES] = seq
            else:
                waits = step == "wait"
                wanted.wait(waits)
            assert all(wanted.answered(seq) is (places.get(seq % PLACES) == seq) for seq in range(1, 3 * PLACES))


@needs_compiled
def test_only_a_sealed_page_of_the_right_size_is_taken() -> None:
    with SharedBuffer.create(4096, budget=NO_RESERVE) as other, pytest.raises(InvalidDescriptor):
        AnswersGiven.of(os.dup(other.fileno()))
    open_end = os.memfd_create("open", os.MFD_ALLOW_SEALING)
    os.ftruncate(open_end, 64 + 8 * PLACES)
    with pytest.raises(InvalidDescriptor):
        AnswersGiven.of(open_end)


def test_without_compiled_code_there_is_no_page(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doorbell, "COMPILED", False)
    assert AnswersWanted.create() is None
    read_end, write_end = os.pipe()
    os.close(write_end)
    assert AnswersGiven.of(read_end) is None
    with pytest.raises(OSError):
        os.fstat(read_end)

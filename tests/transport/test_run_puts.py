"""The owner's side of puts of one run: one call admits what step by step would be admitted, and nothing twice."""

import contextlib
import random
import threading
from collections.abc import Iterator
from itertools import accumulate
from typing import Final

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kv_core.errors import KVError
from kv_core.ids import Incarnation, NodeId
from kv_transport import Access, SharedBuffer, doorbell, limits, replay
from kv_transport.doorbell import HEADER_BYTES, Admitting, AnswersWanted
from kv_transport.regions import RegionTable
from kv_transport.replay import PeerHistory
from kv_transport.run_puts import RunPuts
from kv_transport.types import PeerName
from kv_transport.unit_header import plain_header
from tests.transport.helpers_transport import NO_RESERVE

PEER: Final = PeerName(NodeId("writer"), Incarnation(1))
MAX_UINT64: Final = (1 << 64) - 1
REGION_NBYTES: Final = 4_096
needs_compiled = pytest.mark.skipif(not doorbell.COMPILED, reason="installed without a compiler")
both = pytest.mark.parametrize("admit", [pytest.param(doorbell.admit, marks=needs_compiled), doorbell.plain_admit])


def text_of(
    seq: int, put: int, region: int, offset: int, nbytes: int, nonce: int, notif: bytes, flip: int = -1
) -> bytes:
    """A message that says so; `flip` damages a bit."""
    text = doorbell.message(region, offset, nbytes, notif)
    fixed = [doorbell.MARK, seq, put, region, offset, nbytes]
    text[:48] = b"".join(word.to_bytes(8, "little") for word in fixed)
    text[48 : doorbell.HEAD_NBYTES] = plain_header(1).attempt(nonce, 7)
    if flip >= 0:
        text[flip // 8 % len(text)] ^= 1 << flip % 8
    return bytes(text)


JUMPS: Final = st.one_of(st.just(1), st.integers(-9, 9))
"""From one number to the next: in order, reordered a little, or over what is remembered."""

STARTS: Final = st.sampled_from([0, 0, 0, MAX_UINT64 - 40])


def walk(start: int, jumps: list[int]) -> list[int]:
    """Numbers of 64 bits."""
    return [max(0, min(MAX_UINT64, at)) for at in accumulate(jumps, initial=start)]


@st.composite
def texts(draw: st.DrawFn) -> list[bytes]:
    """Messages of which most are right."""
    count = draw(st.integers(0, 40))
    walks = [walk(draw(STARTS), draw(st.lists(JUMPS, min_size=count, max_size=count))) for _ in range(2)]
    return [draw(text_with(nonce, put)) for nonce, put in zip(*walks, strict=True)]


@st.composite
def text_with(draw: st.DrawFn, nonce: int, put: int) -> bytes:
    right = st.integers(0, 19).map(lambda kind: kind > 0)
    region = 3 if draw(right) else draw(st.sampled_from([0, 4, MAX_UINT64]))
    nbytes = draw(st.sampled_from([1, 64, 65, REGION_NBYTES])) if draw(right) else draw(st.sampled_from([0, 4_097]))
    room = max(0, REGION_NBYTES - nbytes)
    offset = draw(st.integers(0, room)) if draw(right) else draw(st.sampled_from([room + 1, 4_096, MAX_UINT64]))
    flip = -1 if draw(right) else draw(st.integers(0, 8 * 180))
    notif = draw(st.sampled_from([b"", b"n", b"note"]))
    whole = text_of(draw(st.integers(0, 99)), put, region, offset, nbytes, nonce, notif, flip)
    return whole if draw(right) else whole[: draw(st.integers(0, len(whole)))]


@contextlib.contextmanager
def page(waits: bool) -> Iterator[memoryview]:
    wanted = AnswersWanted.create()
    assert wanted is not None
    wanted.wait(waits)
    yield wanted._view
    wanted.close()


@needs_compiled
@given(
    plan=texts(),
    windows=st.tuples(st.integers(1, 5), st.integers(0, 6)),
    waits=st.sampled_from([None, False, True]),
    nbytes_max=st.sampled_from([64, 1 << 20, 1 << 20]),
)
def test_compiled_and_plain_admit_the_same_and_mark_the_same(
    plan: list[bytes], windows: tuple[int, int], waits: bool | None, nbytes_max: int
) -> None:
    nonces, puts = ([replay.new_marks(size) if size else bytearray() for _ in range(2)] for size in windows)
    with page(bool(waits)) as one, page(bool(waits)) as other:
        pages = (None, None) if waits is None else (one, other)
        for text in plan:
            compiled, plain = (
                admit(text, HEADER_BYTES, nonces[which], puts[which], 3, REGION_NBYTES, nbytes_max, pages[which])
                for which, admit in enumerate([doorbell.admit, doorbell.plain_admit])
            )
            assert compiled == plain
            assert nonces[0] == nonces[1] and puts[0] == puts[1] and bytes(one) == bytes(other)


@both
@given(
    steps=st.lists(st.tuples(JUMPS, JUMPS, st.booleans()), max_size=60),
    starts=st.tuples(STARTS, STARTS),
    windows=st.tuples(st.integers(1, 8), st.integers(1, 8)),
)
def test_a_nonce_is_used_once_and_a_put_announced_once_and_what_is_forgotten_is_not_admitted(
    admit: Admitting, steps: list[tuple[int, int, bool]], starts: tuple[int, int], windows: tuple[int, int]
) -> None:
    nonces, puts = replay.new_marks(windows[0]), replay.new_marks(windows[1])
    used, announced = set[int](), set[int]()
    used_next, put_next = (walk(start, [step[which] for step in steps]) for which, start in enumerate(starts))
    for nonce, put, (_, _, told) in zip(used_next, put_next, steps, strict=False):
        before = bytes(nonces), bytes(puts)
        admitted = admit(
            text_of(1, put, 3, 0, 8, nonce, b"n" if told else b""), HEADER_BYTES, nonces, puts, 3, 64, 64, None
        )
        known = max(used, default=0) - nonce < windows[0] and (
            not told or (put > 0 and max(announced, default=0) - put < windows[1])
        )
        if nonce in used or not known:
            assert admitted is None and (bytes(nonces), bytes(puts)) == before
            continue
        assert admitted == (1, b"n" if told and put not in announced else b"", False)
        used.add(nonce)
        if told:
            announced.add(put)


@both
@pytest.mark.parametrize(("nonces", "puts"), [(bytes(8), bytes(16)), (bytearray(16), memoryview(b"")), (b"", b"")])
def test_marks_that_are_none_admit_nothing(admit: Admitting, nonces: bytes, puts: bytes) -> None:
    with contextlib.suppress(ValueError, TypeError, BufferError, ZeroDivisionError):
        admitted = admit(
            text_of(1, 1, 3, 0, 8, 1, b"n"),
            HEADER_BYTES,
            nonces,  # type: ignore[arg-type]
            puts,  # type: ignore[arg-type]
            3,
            64,
            64,
            None,
        )
        assert admitted is None


# With regions.


class Owner:
    """One connection's puts, and what came of them."""

    def __init__(self, table: RegionTable, history: PeerHistory) -> None:
        self.refused = 0
        self.heard: list[bytes] = []
        self.table = table
        self.history = history
        self.puts = RunPuts(PEER, history, threading.Lock(), table, lambda _, text: self.heard.append(text), self._no)

    def _no(self) -> None:
        self.refused += 1

    def take(self, text: bytes, *, step_by_step: bool) -> tuple[int, bool] | str:
        if step_by_step:
            self.puts._region = None
        try:
            return self.puts.take(memoryview(text), None)
        except KVError as error:
            return f"{type(error).__name__}: {error}"


def test_by_one_call_or_step_by_step_the_same_is_admitted_and_refused() -> None:
    rng = random.Random(5)
    tables = [RegionTable(NodeId("owner")) for _ in range(2)]
    with contextlib.ExitStack() as stack:
        owners = [Owner(table, PeerHistory("writer")) for table in tables]
        for table in tables:
            for access in [Access.WRITE, Access.WRITE, Access.READ, Access.WRITE]:
                memory = SharedBuffer.create(REGION_NBYTES, budget=NO_RESERVE)
                stack.callback(memory.close)
                table.add(memory, access)
        newest_nonce = newest_put = 0
        outcomes = set[str]()
        for step in range(4_000):
            if step == 2_000:
                for table in tables:
                    table.remove(table.get(2).region)
            if step == 3_000:
                for table in tables:
                    table.get(4).memory.close()
            # Mostly the next one; else ahead of it, again, late, or older than what is remembered.
            nonce = max(0, newest_nonce + rng.choice([1] * 9 + [5, 0, -1, -limits.REPLAY_WINDOW]))
            put = max(0, newest_put + rng.choice([1] * 9 + [limits.PUT_WINDOW + 1, 0, -1, -limits.PUT_WINDOW]))
            newest_nonce, newest_put = max(nonce, newest_nonce), max(put, newest_put)
            nbytes = rng.choice([1, 8, REGION_NBYTES, REGION_NBYTES + 1, 0] if rng.random() < 0.2 else [64])
            text = text_of(
                step,
                put,
                rng.choice([1, 1, 1, 2, 3, 4, 9]),
                rng.choice([0, 0, 4_032, 4_064]),
                nbytes,
                nonce,
                rng.choice([b"", b"%d" % put]),
                rng.randrange(1_400) if rng.random() < 0.05 else -1,
            )
            one, other = owners[0].take(text, step_by_step=False), owners[1].take(text, step_by_step=True)
            assert one == other
            outcomes.add(one.partition(":")[0] if isinstance(one, str) else "taken")
            assert owners[0].heard == owners[1].heard and owners[0].refused == owners[1].refused
            for name in ("nonces", "puts"):
                assert getattr(owners[0].history, name).marks == getattr(owners[1].history, name).marks
    assert outcomes >= {
        "taken",
        "ReplayedNonce",
        "ForgottenPut",
        "UnknownRegion",
        "GrantRefused",
        "InvalidDescriptor",
        "CorruptHeaderError",
        "FrameRefused",
    }
    assert len(set(owners[0].heard)) == len(owners[0].heard)


def test_a_notification_is_as_long_as_it_may_be_and_no_longer() -> None:
    table = RegionTable(NodeId("owner"))
    with SharedBuffer.create(REGION_NBYTES, budget=NO_RESERVE) as memory:
        table.add(memory, Access.WRITE)
        owner = Owner(table, PeerHistory("writer"))
        longest = bytes(limits.NOTIF_BYTES_MAX)
        for step_by_step in (True, False):
            nonce = 1 + 2 * (not step_by_step)
            taken = owner.take(text_of(nonce, nonce, 1, 0, 64, nonce, longest, -1), step_by_step=step_by_step)
            assert taken == (nonce, True) and owner.heard.pop() == longest
            text = text_of(nonce + 1, nonce + 1, 1, 0, 64, nonce + 1, longest + b"x", -1)
            refused = owner.take(text, step_by_step=step_by_step)
            assert isinstance(refused, str) and refused.startswith("FrameRefused") and not owner.heard
        assert owner.refused == 2

"""Threads that share a copy: every cell once, one of them says how it ended, and nothing is touched after that."""

import mmap
import random
import threading
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kv_core.checksum import crc64
from kv_transport import kernels
from kv_transport.copying import CopyStopped, SharedCopy
from kv_transport.descriptors import Cells
from kv_transport.regions import SharedBuffer
from tests.transport.helpers_transport import NO_RESERVE

SOURCE = random.Random("shared").randbytes(200_000)
KERNELS = [kernels.copy_shared, kernels.plain_copy_shared] if kernels.COMPILED else [kernels.plain_copy_shared]
both_kernels = pytest.mark.parametrize("copy", KERNELS, ids=["compiled", "plain"][-len(KERNELS) :])

Copy = Callable[[bytearray, memoryview, memoryview, kernels.CellTable, bytearray, bytearray | None], bool | None]


class Shared:
    """One copy of those sizes, a gap between cells at the destination, and what each `help` gave."""

    def __init__(self, copy: Copy, sizes: list[int], *, sums_source: bool = True, source: bytes = SOURCE) -> None:
        self.copy = copy
        self.source = source
        begins = np.cumsum([0, *sizes[:-1]])
        gaps = 3 * np.arange(len(sizes))
        self.cells = np.stack((begins + gaps, begins, sizes), axis=1).astype(np.int64)
        self.to = memoryview(bytearray(sum(sizes) + 3 * len(sizes)))
        self.checks = bytearray(8 * len(sizes))
        self.read = bytearray(8 * len(sizes)) if sums_source else None
        self.state = bytearray(kernels.SHARED_NBYTES)
        self.outcomes: list[bool | None] = []

    def help(self) -> bool | None:
        outcome = self.copy(self.state, self.to, memoryview(self.source), self.cells, self.checks, self.read)
        self.outcomes.append(outcome)
        return outcome

    def stop(self) -> None:
        self.state[kernels.STOP_AT] = 1

    def sums(self, of: bytearray) -> list[int]:
        return memoryview(of).cast("Q").tolist()

    def content(self, cell: int) -> bytes:
        to, _, nbytes = self.cells[cell].tolist()
        return bytes(self.to[to : to + nbytes])

    def wanted(self, cell: int) -> bytes:
        _, origin, nbytes = self.cells[cell].tolist()
        return self.source[origin : origin + nbytes]


def in_threads(count: int, work: Callable[[], object]) -> None:
    barrier = threading.Barrier(count)

    def run() -> None:
        barrier.wait()
        work()

    threads = [threading.Thread(target=run) for _ in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


@both_kernels
@given(
    sizes=st.lists(st.integers(0, 6_000), min_size=1, max_size=30), threads=st.integers(1, 4), sums_source=st.booleans()
)
def test_every_cell_is_copied_once_and_one_thread_says_so(
    copy: Copy, sizes: list[int], threads: int, sums_source: bool
) -> None:
    """A cell that two threads took would have the sum of its bytes twice."""
    shared = Shared(copy, sizes, sums_source=sums_source)
    in_threads(threads, shared.help)
    assert sorted(shared.outcomes, key=bool) == [None] * (threads - 1) + [True]
    expected = [crc64(shared.wanted(cell)) for cell in range(len(sizes))]
    assert [shared.content(cell) for cell in range(len(sizes))] == [shared.wanted(cell) for cell in range(len(sizes))]
    assert shared.sums(shared.checks) == expected
    if shared.read is not None:
        assert shared.sums(shared.read) == expected
    shared.to[:] = bytes(len(shared.to))
    shared.help()
    assert shared.outcomes[-1] is None and not any(shared.to), "who comes late touches nothing"


@both_kernels
@pytest.mark.parametrize("threads", [1, 3])
def test_a_copy_that_was_stopped_begins_nothing_and_one_thread_says_so(copy: Copy, threads: int) -> None:
    shared = Shared(copy, [1_000] * 20)
    shared.stop()
    in_threads(threads, shared.help)
    assert sorted(map(str, shared.outcomes)) == sorted(["False"] + ["None"] * (threads - 1))
    assert not any(shared.to) and not any(shared.checks)


@both_kernels
@pytest.mark.parametrize("turn", range(60))
def test_a_copy_that_is_stopped_under_way_is_at_rest_when_one_thread_says_so(copy: Copy, turn: int) -> None:
    """Stopped a little later each time; cells are whole or untouched."""
    shared = Shared(copy, [9_000] * 22)
    at_rest: list[bytes] = []

    def work() -> None:
        if shared.help() is not None:
            at_rest.append(bytes(shared.to))

    def halt() -> None:
        for _ in range(40 * turn):
            pass
        shared.stop()

    halting = threading.Thread(target=halt)
    halting.start()
    in_threads(3, work)
    halting.join()
    (complete,) = [outcome for outcome in shared.outcomes if outcome is not None]
    assert at_rest == [bytes(shared.to)], "it was written after it had ended"
    for cell, check in enumerate(shared.sums(shared.checks)):
        if complete or check:
            assert shared.content(cell) == shared.wanted(cell) and check == crc64(shared.wanted(cell))
        else:
            assert not any(shared.content(cell))


@both_kernels
@pytest.mark.parametrize("turn", range(5))
def test_who_finds_nothing_left_does_not_speak_for_a_thread_that_is_within_its_cell(copy: Copy, turn: int) -> None:
    """The first cell takes far longer than all others."""
    large = 16 << 20
    shared = Shared(copy, [large, *[10] * 20], source=bytes(large) + SOURCE)
    whole: list[bool] = []

    def work() -> None:
        if shared.help() is not None:
            whole.append(shared.sums(shared.checks)[0] != 0)

    in_threads(2, work)
    assert whole == [True] and True in shared.outcomes


@both_kernels
def test_threads_that_ask_for_cells_all_the_time_never_get_the_same_one(copy: Copy) -> None:
    for _ in range(2 if copy is kernels.plain_copy_shared else 40):
        shared = Shared(copy, [8] * 25_000)
        in_threads(4, shared.help)
        assert shared.sums(shared.checks) == kernels.sum_cells(memoryview(SOURCE), shared.cells[:, 1:].copy())


def test_the_last_thread_out_says_so_whoever_took_the_last_cell(monkeypatch: pytest.MonkeyPatch) -> None:
    """One thread is held within its cell while another does all the others."""
    shared = Shared(kernels.plain_copy_shared, [500] * 6)
    inside, go = threading.Event(), threading.Event()
    whole = kernels._copy_cell

    def held(to: memoryview, source: memoryview, cell: tuple[int, int, int]) -> int:
        if cell[1] == 0:
            inside.set()
            go.wait()
        return whole(to, source, cell)

    monkeypatch.setattr(kernels, "_copy_cell", held)
    first = threading.Thread(target=shared.help)
    first.start()
    try:
        inside.wait()
        shared.help()
        assert shared.outcomes == [None]
    finally:
        go.set()  # whatever was found, nobody is left behind
        first.join()
    assert shared.outcomes == [None, True]


@both_kernels
@pytest.mark.parametrize(
    "cell", [(-1, 0, 2), (0, -1, 2), (0, 0, -1), (0, 199_999, 2), (3_000, 0, 2_000), (1 << 62,) * 3]
)
def test_a_cell_outside_is_said_once_and_nothing_is_copied(copy: Copy, cell: tuple[int, int, int]) -> None:
    shared = Shared(copy, [1_000] * 4)
    shared.cells[3] = cell
    with pytest.raises(IndexError):
        shared.help()
    shared.help()
    assert shared.outcomes == [None] and not any(shared.to) and not any(shared.checks)


@both_kernels
@pytest.mark.parametrize("size", [0, kernels.SHARED_NBYTES - 1, kernels.SHARED_NBYTES + 8])
def test_what_is_no_state_is_refused(copy: Copy, size: int) -> None:
    cells = np.array([[0, 0, 1]], np.int64)
    with pytest.raises(ValueError, match="state"):
        copy(bytearray(size), memoryview(bytearray(8)), memoryview(SOURCE), cells, bytearray(8), None)


class Mapped:
    """As much of a mapped region as a copy looks at."""

    def __init__(self, nbytes: int) -> None:
        self.memory = mmap.mmap(-1, nbytes)

    @property
    def data_view(self) -> memoryview:
        return memoryview(self.memory)


@pytest.mark.parametrize("into_local", [False, True])
def test_sums_of_both_sides_and_the_right_way_round(into_local: bool) -> None:
    with (
        SharedBuffer.create(1 << 16, budget=NO_RESERVE) as mine,
        SharedBuffer.create(1 << 16, budget=NO_RESERVE) as theirs,
    ):
        mine.data[:] = np.random.default_rng(1).integers(0, 256, 1 << 16, np.uint8)
        theirs.data[:] = np.random.default_rng(2).integers(0, 256, 1 << 16, np.uint8)
        offsets = np.array([0, 40_000], np.int64)
        cells = Cells(offsets, offsets[::-1].copy(), np.array([5_000, 5_000], np.int64))
        source, destination = (theirs, mine) if into_local else (mine, theirs)
        copy = SharedCopy(destination, source, cells, into_local=into_local, sums_source=True, stopped=lambda: False)
        assert copy.help() and not copy.help()
        assert copy.arrived == copy.read
        for index, (to, of) in enumerate([(0, 40_000), (40_000, 0)] if into_local else [(40_000, 0), (0, 40_000)]):
            assert bytes(destination.data[to : to + 5_000]) == bytes(source.data[of : of + 5_000])
            assert copy.arrived[index] == crc64(destination.data_view[to : to + 5_000])


@pytest.mark.parametrize("ending", ["copied", "stopped", "outside"])
def test_memory_is_not_held_any_more_when_a_copy_has_ended(ending: str) -> None:
    """A mapping with a view of it somewhere cannot be closed."""
    to, source = Mapped(8_192), Mapped(8_192)
    offsets = np.array([0, 4_096 if ending != "outside" else 8_000], np.int64)
    cells = Cells(offsets, offsets, np.array([4_096, 4_096], np.int64))
    copy = SharedCopy(
        to,  # type: ignore[arg-type]
        source,  # type: ignore[arg-type]
        cells,
        into_local=False,
        sums_source=False,
        stopped=lambda: ending == "stopped",
    )
    if ending == "copied":
        assert copy.help()
    else:
        with pytest.raises(CopyStopped if ending == "stopped" else IndexError):
            copy.help()
    to.memory.close()
    source.memory.close()
    assert not copy.help()

"""Cells read and summed in one loop: the compiled reader does what its plain twin does, whatever the file does."""

import ctypes
import importlib
import mmap
import os
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kv_core.checksum import crc64
from kv_prefix.tiers import cell_io
from kv_prefix.tiers.blocks import pack_checks
from kv_prefix.tiers.cell_io import PIECE_BYTES, CellReader, PlainCellReader, cells_of, make_cell_reader

READERS: list[Callable[[int], CellReader]] = [make_cell_reader, PlainCellReader]
GUARD = 64
"""Bytes before and after each cell that nobody may touch."""

_HUGE = 40_000_000
"""Bytes of the longest file of a test."""


@dataclass
class Targets:
    """Cells apart from each other in one memory, `shift` bytes off a line's beginning."""

    num_cells: int
    nbytes: int
    shift: int = 0

    def __post_init__(self) -> None:
        self._stride = self.nbytes + GUARD
        self.memory = mmap.mmap(-1, self.num_cells * self._stride + 2 * GUARD)
        self.memory[:] = b"\xa5" * len(self.memory)

    def cells(self) -> list[memoryview]:
        view = memoryview(self.memory)
        begins = [GUARD + self.shift + i * self._stride for i in range(self.num_cells)]
        return [view[begin : begin + self.nbytes] for begin in begins]

    def check_guards(self) -> None:
        before = 0
        for i in range(self.num_cells):
            begin = GUARD + self.shift + i * self._stride
            assert not self.memory[before:begin].strip(b"\xa5")
            before = begin + self.nbytes
        assert not self.memory[before:].strip(b"\xa5")


def checks_of(data: bytes, nbytes: int) -> bytes:
    return pack_checks([crc64(data[at : at + nbytes]) for at in range(0, len(data), nbytes)])


def read_all(
    make: Callable[[int], CellReader], fd: int, offset: int, nbytes: int, checks: bytes, shift: int = 0
) -> list[bytes | None]:
    """What a reader gives for each cell: its bytes, or None when they are not sound."""
    targets = Targets(len(checks) // 8, nbytes, shift)
    sound = make(nbytes).read(fd, offset, targets.cells(), checks)
    targets.check_guards()
    assert len(sound) == targets.num_cells and set(sound) <= {0, 1}
    return [bytes(cell) if good else None for cell, good in zip(targets.cells(), sound, strict=True)]


SIZES = st.one_of(st.integers(1, 2_000), st.sampled_from([4096, 65_536, 65_544, PIECE_BYTES, 300_001, 600_000]))


@given(
    nbytes=SIZES,
    num_cells=st.integers(1, 20),
    offset=st.integers(0, 5_000),
    shift=st.integers(0, 63),
    cut=st.floats(0, 1.2),
    seed=st.integers(0, 1 << 32),
)
@pytest.mark.parametrize("make", READERS)
def test_exactly_the_cells_that_are_whole_and_unchanged_are_sound(
    make: Callable[[int], CellReader],
    tmp_path_factory: pytest.TempPathFactory,
    nbytes: int,
    num_cells: int,
    offset: int,
    shift: int,
    cut: float,
    seed: int,
) -> None:
    random = Random(seed)
    sealed = random.randbytes(num_cells * nbytes)
    checks = checks_of(sealed, nbytes)
    damaged = bytearray(sealed)
    for _ in range(random.randrange(3)):
        damaged[random.randrange(len(damaged))] ^= 1 << random.randrange(8)
    there = bytes(damaged[: int(cut * len(damaged))])
    path = tmp_path_factory.getbasetemp() / "cells"
    path.write_bytes(bytes(offset) + there)
    cells = [(sealed[at : at + nbytes], there[at : at + nbytes]) for at in range(0, len(sealed), nbytes)]
    with path.open("rb") as file:
        got = read_all(make, file.fileno(), offset, nbytes, checks, shift)
    assert got == [told if told == lies else None for told, lies in cells]


@pytest.mark.parametrize("make", READERS)
def test_many_cells_of_many_pieces(make: Callable[[int], CellReader], tmp_path: Path) -> None:
    nbytes = 65_536
    sealed = Random(4).randbytes(_HUGE // nbytes * nbytes)
    checks = checks_of(sealed, nbytes)
    damaged = bytearray(sealed)
    for at in (5, 9 * nbytes - 1, 300 * nbytes + 17):
        damaged[at] ^= 1
    (tmp_path / "cells").write_bytes(damaged)
    with (tmp_path / "cells").open("rb") as file:
        got = read_all(make, file.fileno(), 0, nbytes, checks)
    assert [i for i, cell in enumerate(got) if cell is None] == [0, 8, 300]
    assert all(cell in (None, sealed[i * nbytes : (i + 1) * nbytes]) for i, cell in enumerate(got))


@dataclass
class BadPlace:
    """Memory with a hole, read through the kernel as a file: reading up to the hole is short, reading in it is EIO."""

    nbytes: int

    def __post_init__(self) -> None:
        self.libc = ctypes.CDLL(None, use_errno=True)
        self.libc.mmap.restype = ctypes.c_void_p
        self.libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
        self.libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
        self.begin: int = self.libc.mmap(None, self.nbytes, 3, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1, 0)
        self.fd = os.open("/proc/self/mem", os.O_RDONLY)

    def fill(self, data: bytes) -> None:
        ctypes.memmove(self.begin, data, len(data))

    def make_hole(self, at: int, nbytes: int) -> None:
        assert self.libc.munmap(self.begin + at, nbytes) == 0

    def close(self) -> None:
        os.close(self.fd)
        self.libc.munmap(self.begin, self.nbytes)


@pytest.mark.parametrize("make", READERS)
@pytest.mark.parametrize(
    ("nbytes", "hole_at", "lost"),
    [
        (65_536, 5 * 65_536 + 8192, range(4, 8)),  # the whole piece of four, also the cell before the bad place
        (65_536, 7 * 65_536 + 61_440, range(4, 8)),
        (3 * PIECE_BYTES, 3 * PIECE_BYTES + 8192, range(1, 2)),  # a cell of several pieces is one
        (3 * PIECE_BYTES, 6 * PIECE_BYTES - 4096, range(1, 2)),
    ],
)
def test_a_bad_place_of_the_device_costs_its_piece_and_nothing_behind_it(
    make: Callable[[int], CellReader], nbytes: int, hole_at: int, lost: range
) -> None:
    num_cells = 12
    sealed = Random(5).randbytes(num_cells * nbytes)
    place = BadPlace(len(sealed))
    try:
        place.fill(sealed)
        place.make_hole(hole_at, 4096)
        got = read_all(make, place.fd, place.begin, nbytes, checks_of(sealed, nbytes))
    finally:
        place.close()
    assert got == [None if i in lost else sealed[i * nbytes : (i + 1) * nbytes] for i in range(num_cells)]


@pytest.mark.parametrize("make", READERS)
def test_a_file_that_cannot_be_read_at_all_has_nothing_sound(make: Callable[[int], CellReader], tmp_path: Path) -> None:
    folder = os.open(tmp_path, os.O_RDONLY)
    try:
        assert read_all(make, folder, 0, 512, bytes(8 * 5)) == [None] * 5
    finally:
        os.close(folder)
    assert read_all(make, -1, 0, 512, bytes(8 * 5)) == [None] * 5


@pytest.mark.parametrize("make", READERS)
def test_arguments_that_do_not_fit_each_other_are_refused(make: Callable[[int], CellReader], tmp_path: Path) -> None:
    (tmp_path / "cells").write_bytes(bytes(4096))
    reader = make(512)
    cells = Targets(3, 512).cells()
    with (tmp_path / "cells").open("rb") as file:
        assert reader.read(file.fileno(), 0, [], b"") == b""
        with pytest.raises(ValueError, match="checks"):
            reader.read(file.fileno(), 0, cells, bytes(16))
        with pytest.raises(ValueError, match="512"):
            reader.read(file.fileno(), 0, [*cells[:2], cells[2][:511]], bytes(24))
        with pytest.raises((BufferError, TypeError)):
            reader.read(file.fileno(), 0, [*cells[:2], memoryview(bytes(512))], bytes(24))
        # Nothing is held after a refusal, and the reader goes on.
        assert reader.read(file.fileno(), 0, cells, checks_of(bytes(1536), 512)) == bytes([1, 1, 1])


def test_threads_read_at_once_through_one_reader(tmp_path: Path) -> None:
    nbytes, num_cells = 65_536, 64
    sealed = Random(6).randbytes(nbytes * num_cells)
    checks = checks_of(sealed, nbytes)
    (tmp_path / "cells").write_bytes(sealed)
    reader = make_cell_reader(nbytes)
    with (tmp_path / "cells").open("rb") as file, ThreadPoolExecutor(4) as pool:

        def read(turn: int) -> list[bytes | None]:
            # Each begins at another cell, so that no two have the same bytes at a time.
            first = turn % num_cells
            return read_all(lambda _: reader, file.fileno(), first * nbytes, nbytes, checks[8 * first :])

        for turn, got in enumerate(pool.map(read, range(24))):
            first = turn % num_cells
            assert got == [sealed[i * nbytes : (i + 1) * nbytes] for i in range(first, num_cells)], turn


def test_pieces_hold_at_least_a_cell_and_no_more_than_one_call_takes() -> None:
    assert cells_of(PIECE_BYTES, 65_536) == 4
    assert cells_of(PIECE_BYTES, PIECE_BYTES + 1) == 1
    assert cells_of(PIECE_BYTES, 1) == cell_io.IOV_MAX


@pytest.fixture
def uncompiled(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The module as it is where no compiler was."""
    monkeypatch.setitem(sys.modules, "kv_prefix._cell_io", None)
    monkeypatch.delattr("kv_prefix._cell_io", raising=False)
    importlib.reload(cell_io)
    yield
    monkeypatch.undo()
    importlib.reload(cell_io)


def test_without_a_compiler_the_twin_stands_in(uncompiled: None) -> None:
    assert not cell_io.COMPILED
    assert type(cell_io.make_cell_reader(512)).__name__ == "PlainCellReader"

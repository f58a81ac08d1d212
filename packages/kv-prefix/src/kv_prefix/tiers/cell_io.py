"""Cells that follow one another in a file, read to where each belongs and held against its CRC-64. Compiled, with a
plain twin.

`PlainCellReader` is the definition: tests hold the compiled one against it, and it stands in where the package was
installed without a compiler, or the processor has no carry-less multiplication of 512 bits; `COMPILED` says which.
Both go piece by piece, so that what is summed is still in the processor's cache.

E1: a cell is sound only when all its bytes came, and their CRC-64 is the one that was asked for.
E2: a piece that cannot be read is not sound; what lies behind it may be.
"""

import mmap
import os
from collections.abc import Callable, Sequence
from typing import Final, Protocol

from kv_core.checksum import crc64_each

try:
    from kv_prefix import _cell_io as _kernels
except ImportError:  # built without a compiler
    _kernels = None  # type: ignore[assignment]

COMPILED: Final = bool(_kernels and _kernels.wide())

IOV_MAX: Final = 1024
"""Buffers of one call to the kernel."""
PIECE_BYTES: Final = 256 << 10
"""Bytes that are read and then summed at a time, at least one cell: they stay in the second-level cache meanwhile."""
_CHECK_BYTES: Final = 8


class CellReader(Protocol):
    """Reads from any number of threads at once."""

    def read(self, fd: int, offset: int, cells: Sequence[memoryview], checks: bytes) -> bytes:
        """Fill cells that follow one another in a file from `offset` on; what is not sound has any bytes.

        Args:
            cells: writable, each of the reader's size.
            checks: the CRC-64 of each, 8 bytes little-endian.

        Returns:
            A byte a cell, 1 when it is sound and else 0.

        Raises:
            ValueError, BufferError, TypeError: the arguments do not fit each other. Never for what the file does.
        """
        ...


class PlainCellReader:
    """By calls to the kernel that scatter, each followed by the CRC-64s of what came.

    Args:
        cell_nbytes: bytes of each cell.
    """

    def __init__(self, cell_nbytes: int) -> None:
        self._nbytes = cell_nbytes
        self._most = cells_of(PIECE_BYTES, cell_nbytes)

    def read(self, fd: int, offset: int, cells: Sequence[memoryview], checks: bytes) -> bytes:
        nbytes, most, preadv = self._nbytes, self._most, os.preadv
        if len(checks) != _CHECK_BYTES * len(cells) or any([cell.nbytes != nbytes for cell in cells]):
            raise ValueError(f"{len(cells)} cells of {nbytes} bytes, {len(checks)} bytes of checks")
        expected: list[int] = memoryview(checks).cast("Q").tolist()
        sound = bytearray()
        for at in range(0, len(cells), most):
            buffers = cells[at : at + most]
            wanted = len(buffers) * nbytes
            try:
                got = preadv(fd, buffers, offset)
                if got != wanted:
                    got = move_rest(preadv, fd, buffers, offset, got)
            except OSError:
                # A bad place of the device: what lies behind it may be sound.
                got = 0
            sums = crc64_each(buffers[: got // nbytes])
            sound += bytes(map(int.__eq__, sums, expected[at : at + len(sums)]))
            sound += bytes(len(buffers) - len(sums))
            offset += wanted
        return bytes(sound)


class CompiledCellReader:
    """By one loop for a run of cells: each piece goes through a buffer that stays in the cache, and what is copied from
    there is summed on the way. Buffers are kept: one for each thread that has been in `read` at once with others.

    Args:
        cell_nbytes: bytes of each cell.
    """

    def __init__(self, cell_nbytes: int) -> None:
        self._nbytes = cell_nbytes
        self._most = cells_of(PIECE_BYTES, cell_nbytes)
        self._spare: list[mmap.mmap] = []

    def read(self, fd: int, offset: int, cells: Sequence[memoryview], checks: bytes) -> bytes:
        try:
            scratch = self._spare.pop()
        except IndexError:
            scratch = mmap.mmap(-1, PIECE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        try:
            return _kernels.read_cells(fd, offset, list(cells), self._nbytes, self._most, checks, scratch)
        finally:
            self._spare.append(scratch)


def make_cell_reader(cell_nbytes: int) -> CellReader:
    """A reader for cells of that size: compiled where that is there."""
    return CompiledCellReader(cell_nbytes) if COMPILED else PlainCellReader(cell_nbytes)


def cells_of(piece_nbytes: int, cell_nbytes: int) -> int:
    """Cells that one call moves."""
    return max(1, min(IOV_MAX, piece_nbytes // cell_nbytes))


def move_rest(
    move: Callable[[int, Sequence[memoryview], int], int],
    fd: int,
    buffers: Sequence[memoryview],
    offset: int,
    moved: int,
) -> int:
    """After a short read or write of `moved` bytes, move the rest; the number of bytes moved in all.

    Raises:
        OSError: as `move`.
    """
    total = 0
    left = [buffer.cast("B") if buffer.format != "B" else buffer for buffer in buffers]
    while moved:
        total += moved
        while left and moved >= len(left[0]):
            moved -= len(left.pop(0))
        if not left:
            break
        left[0] = left[0][moved:]
        moved = move(fd, left, offset + total)
    return total

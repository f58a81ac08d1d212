"""Which bytes go where: cells, runs and units. Pure arithmetic.

A cell is the smallest piece with a CRC-64 of its own: one (slot, layer), or one piece of a plain buffer. Cells that
are adjacent on both sides merge into one run, which is what is copied or handed to the kernel. A unit is a list of
cells of one layer, at most `UNIT_BYTES_MAX` long: what is posted, acknowledged and retried as one.

D1: cutting and merging keep every byte exactly once, in order. D2: a unit never holds cells of two layers.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from kv_transport import limits
from kv_transport.arena_layout import IntArray
from kv_transport.errors import InvalidDescriptor


@dataclass(frozen=True, slots=True)
class Run:
    """Bytes that are contiguous on both sides."""

    local: int
    remote: int
    nbytes: int


class Cells:
    """Cells in order: offset on our side, offset on the peer's, length. Not to be changed."""

    __slots__ = ("_merged", "_runs", "_sizes", "_tables", "first_local", "local", "nbytes", "remote", "sizes")

    def __init__(self, local: IntArray, remote: IntArray, sizes: IntArray) -> None:
        self.local: Final = local
        self.remote: Final = remote
        self.sizes: Final = sizes
        self.nbytes: Final = int(sizes.sum())
        self.first_local: Final = int(local[0]) if len(local) else 0
        self._runs: list[int] = []
        self._sizes: list[int] = []
        self._tables: dict[bool, IntArray] = {}
        self._merged: list[Run] | None = None

    def __len__(self) -> int:
        return len(self.sizes)

    def remote_runs(self) -> list[int]:
        """Flat pairs of offset and length on the peer's side, made once."""
        if not self._runs:
            self._runs = np.stack((self.remote, self.sizes), axis=1).ravel().tolist()
        return self._runs

    def size_list(self) -> list[int]:
        """`sizes` as integers, made once."""
        if not self._sizes:
            self._sizes = self.sizes.tolist()
        return self._sizes

    def table(self, *, into_local: bool) -> IntArray:
        """What a copy needs, made once: `(n, 3)` of destination, source and length."""
        found = self._tables.get(into_local)
        if found is None:
            to, of = (self.local, self.remote) if into_local else (self.remote, self.local)
            found = self._tables[into_local] = np.stack((to, of, self.sizes), axis=1).astype(np.int64, copy=False)
        return found

    def part(self, start: int, end: int) -> "Cells":
        return Cells(self.local[start:end], self.remote[start:end], self.sizes[start:end])

    def runs(self) -> list[Run]:
        """Neighbours merged where both sides are adjacent, made once."""
        if self._merged is None:
            self._merged = self._merge()
        return self._merged

    def _merge(self) -> list[Run]:
        if not len(self):
            return []
        ends_meet = (self.local[:-1] + self.sizes[:-1] == self.local[1:]) & (
            self.remote[:-1] + self.sizes[:-1] == self.remote[1:]
        )
        first = np.concatenate(([0], np.flatnonzero(~ends_meet) + 1))
        nbytes = np.add.reduceat(self.sizes, first)
        return [
            Run(local, remote, size)
            for local, remote, size in zip(
                self.local[first].tolist(), self.remote[first].tolist(), nbytes.tolist(), strict=True
            )
        ]


def merge_offsets(offsets: Sequence[int], sizes: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Adjacent pieces of one side merged: `(offset, nbytes)`."""
    begin = end = -1
    for offset, size in zip(offsets, sizes, strict=True):
        if offset == end:
            end += size
            continue
        if end > begin:
            yield begin, end - begin
        begin, end = offset, offset + size
    if end > begin:
        yield begin, end - begin


def equal_cells(local: IntArray, remote: IntArray, nbytes: int) -> Cells:
    """Cells that are all `nbytes` long."""
    return Cells(local, remote, np.full(len(local), nbytes, np.int64))


def split_pieces(pieces: Sequence[tuple[int, int, int]], cell_nbytes: int = limits.COPY_PIECE_BYTES) -> Cells:
    """Cells of plain pieces `(local offset, remote offset, nbytes)`, each cut to at most `cell_nbytes`."""
    local, remote, sizes = [], [], []
    for mine, theirs, nbytes in pieces:
        for begin in range(0, nbytes, cell_nbytes):
            local.append(mine + begin)
            remote.append(theirs + begin)
            sizes.append(min(cell_nbytes, nbytes - begin))
    return Cells(np.array(local, np.int64), np.array(remote, np.int64), np.array(sizes, np.int64))


def cut_units(sizes: IntArray, unit_bytes: int) -> list[tuple[int, int]]:
    """Cut a list of cells into units: index ranges `[start, end)` of at most `unit_bytes` and `CELLS_PER_UNIT_MAX`.

    Raises:
        InvalidDescriptor: a single cell is longer than a unit may be.
    """
    units: list[tuple[int, int]] = []
    begin = filled = 0
    for index, size in enumerate(sizes.tolist()):
        if size > unit_bytes:
            raise InvalidDescriptor(what="cell", value=size, reason=f"a unit holds {unit_bytes} bytes")
        if filled + size > unit_bytes or index - begin == limits.CELLS_PER_UNIT_MAX:
            units.append((begin, index))
            begin, filled = index, 0
        filled += size
    if begin < len(sizes):
        units.append((begin, len(sizes)))
    return units

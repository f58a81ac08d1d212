"""Copies cells from one memory to another and takes the CRC-64 of each at its destination.

The checksum of a piece is taken right after the piece was copied, from the destination, while it is still in the
cache: that costs little more than the copy alone, and proves what has arrived rather than what was sent.
"""

from collections.abc import Callable

import numpy as np

from kv_transport import kernels, limits
from kv_transport.descriptors import Cells
from kv_transport.regions import Memory


class CopyStopped(Exception):
    """The copy was told to stop between two pieces."""


def copy_cells(
    destination: Memory, source: Memory, cells: Cells, *, into_local: bool, stopped: Callable[[], bool]
) -> list[int]:
    """Copy every cell and return the CRC-64 of each, taken at the destination.

    Args:
        into_local: `cells.local` are offsets in `destination` (a read); else in `source` (a write).
        stopped: asked before each piece of at most `COPY_PIECE_BYTES`.

    Raises:
        CopyStopped: `stopped` said so; any part may have been copied.
    """
    to, of = (cells.local, cells.remote) if into_local else (cells.remote, cells.local)
    table = np.stack((to, of, cells.sizes), axis=1)
    checks: list[int] = []
    for start, end in _groups(cells.sizes.tolist()):
        if cells.sizes[start] > limits.COPY_PIECE_BYTES:
            checks.append(_copy_long(destination, source, table[start], stopped))
            continue
        if stopped():
            raise CopyStopped
        checks += kernels.copy_cells(destination.data_view, source.data_view, table[start:end])
    return checks


def _groups(sizes: list[int]) -> list[tuple[int, int]]:
    """Index ranges of together at most a piece; a longer cell is alone."""
    groups = []
    begin = filled = 0
    for index, size in enumerate(sizes):
        if filled and filled + size > limits.COPY_PIECE_BYTES:
            groups.append((begin, index))
            begin, filled = index, 0
        filled += size
    if sizes:
        groups.append((begin, len(sizes)))
    return groups


def _copy_long(destination: Memory, source: Memory, cell: kernels.CellTable, stopped: Callable[[], bool]) -> int:
    """One cell of more than a piece."""
    target, origin, nbytes = cell.tolist()
    check = 0
    for begin in range(0, nbytes, limits.COPY_PIECE_BYTES):
        if stopped():
            raise CopyStopped
        piece = [[target + begin, origin + begin, min(limits.COPY_PIECE_BYTES, nbytes - begin)]]
        (check,) = kernels.copy_cells(destination.data_view, source.data_view, np.array(piece, np.int64), check)
    return check

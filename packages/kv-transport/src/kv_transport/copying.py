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
    checks: list[int] = []
    for piece in cells.pieces(into_local=into_local):
        if len(piece) == 1 and piece[0, 2] > limits.COPY_PIECE_BYTES:
            checks.append(_copy_long(destination, source, piece[0], stopped))
            continue
        if stopped():
            raise CopyStopped
        checks += kernels.copy_cells(destination.data_view, source.data_view, piece)
    return checks


def copy_unsealed(
    destination: Memory, source: Memory, cells: Cells, *, into_local: bool, stopped: Callable[[], bool]
) -> tuple[list[int], list[int]]:
    """The same for memory that keeps no checksums: those of the destination, and those of the source.

    Cells are at most `COPY_PIECE_BYTES` long.
    """
    arrived: list[int] = []
    read: list[int] = []
    for piece in cells.pieces(into_local=into_local):
        if stopped():
            raise CopyStopped
        here, there = kernels.copy_unsealed_cells(destination.data_view, source.data_view, piece)
        arrived += here
        read += there
    return arrived, read


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

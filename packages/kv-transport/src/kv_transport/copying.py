"""Copies cells from one memory to another and takes the CRC-64 of each at its destination.

The checksum of a piece is taken right after the piece was copied, from the destination, while it is still in the
cache: that costs little more than the copy alone, and proves what has arrived rather than what was sent.
"""

from collections.abc import Callable

import numpy as np

from kv_core.checksum import crc64
from kv_transport import limits
from kv_transport.descriptors import Cells
from kv_transport.regions import Memory

_SMALL = 16 * 1024


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
    checks: list[int] = []
    group: list[tuple[int, int, int]] = []
    grouped = 0
    for target, origin, nbytes in zip(to.tolist(), of.tolist(), cells.sizes.tolist(), strict=True):
        if nbytes <= limits.COPY_PIECE_BYTES:
            group.append((target, origin, nbytes))
            grouped += nbytes
            if grouped >= limits.COPY_PIECE_BYTES:
                checks += _copy_group(destination, source, group, stopped)
                group, grouped = [], 0
        else:
            checks += _copy_group(destination, source, group, stopped)
            group, grouped = [], 0
            checks.append(_copy_long(destination, source, target, origin, nbytes, stopped))
    return checks + _copy_group(destination, source, group, stopped)


def _copy_group(
    destination: Memory, source: Memory, group: list[tuple[int, int, int]], stopped: Callable[[], bool]
) -> list[int]:
    """Whole cells of together about one piece: neighbours are copied as one."""
    if not group:
        return []
    if stopped():
        raise CopyStopped
    target, origin, nbytes = group[0]
    for next_target, next_origin, next_nbytes in group[1:]:
        if next_target == target + nbytes and next_origin == origin + nbytes:
            nbytes += next_nbytes
            continue
        _copy(destination, source, target, origin, nbytes)
        target, origin, nbytes = next_target, next_origin, next_nbytes
    _copy(destination, source, target, origin, nbytes)
    view = destination.data_view
    return [crc64(view[target : target + nbytes]) for target, _, nbytes in group]


def _copy_long(
    destination: Memory, source: Memory, target: int, origin: int, nbytes: int, stopped: Callable[[], bool]
) -> int:
    """One cell of more than a piece."""
    check, view = 0, destination.data_view
    for begin in range(0, nbytes, limits.COPY_PIECE_BYTES):
        if stopped():
            raise CopyStopped
        size = min(limits.COPY_PIECE_BYTES, nbytes - begin)
        _copy(destination, source, target + begin, origin + begin, size)
        check = crc64(view[target + begin : target + begin + size], check)
    return check


def _copy(destination: Memory, source: Memory, target: int, origin: int, nbytes: int) -> None:
    if nbytes <= _SMALL:
        destination.data_view[target : target + nbytes] = source.data_view[origin : origin + nbytes]
    else:
        # Lets other threads run meanwhile, which a memoryview does not.
        np.copyto(destination.data[target : target + nbytes], source.data[origin : origin + nbytes])

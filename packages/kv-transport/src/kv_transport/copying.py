"""Copies the cells of a unit from one memory to another and takes the CRC-64 of each at its destination.

The checksum is taken a few KiB behind the copy, from the destination, while that is still in the cache: this costs
little more than the copy alone, and proves what has arrived rather than what was sent. A unit is one call: a copy that
must stop does so within 8 MiB, and the interpreter is asked for twice, not once a piece.
"""

from collections.abc import Callable

from kv_transport import kernels
from kv_transport.descriptors import Cells
from kv_transport.regions import Memory


class CopyStopped(Exception):
    """The copy was told to stop before it began."""


def copy_cells(
    destination: Memory, source: Memory, cells: Cells, *, into_local: bool, stopped: Callable[[], bool]
) -> list[int]:
    """Copy every cell and return the CRC-64 of each, taken at the destination.

    Args:
        into_local: `cells.local` are offsets in `destination` (a read); else in `source` (a write).
        stopped: asked first.

    Raises:
        CopyStopped: `stopped` said so; nothing was copied.
    """
    if stopped():
        raise CopyStopped
    return kernels.copy_cells(destination.data_view, source.data_view, cells.table(into_local=into_local))


def copy_unsealed(
    destination: Memory, source: Memory, cells: Cells, *, into_local: bool, stopped: Callable[[], bool]
) -> tuple[list[int], list[int]]:
    """The same for memory that keeps no checksums: those of the destination, and those of the source."""
    if stopped():
        raise CopyStopped
    return kernels.copy_unsealed_cells(destination.data_view, source.data_view, cells.table(into_local=into_local))

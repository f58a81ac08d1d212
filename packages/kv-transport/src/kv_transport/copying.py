"""Copies the cells of a unit from one memory to another and takes the CRC-64 of each at its destination.

The checksum is taken a few KiB behind the copy, from the destination, while that is still in the cache: this costs
little more than the copy alone, and proves what has arrived rather than what was sent.

Several threads may share a copy: each takes the next cell until none is left, so that they end together whatever else
the machine does, and a unit is copied as fast as all of them can. The interpreter is asked for twice a thread.

SC1: exactly one `help` gives the outcome, after every thread has left the memory, which is not held any more then.
SC2: a copy that is told to stop begins no further cell.
"""

from collections.abc import Callable
from typing import Final

from kv_transport import kernels
from kv_transport.descriptors import Cells
from kv_transport.regions import Memory

_STOP: Final = (1).to_bytes(8, "little")


class CopyStopped(Exception):
    """The copy was told to stop; nothing is being written any more."""


class SharedCopy:
    """See the module. Thread-safe."""

    __slots__ = ("_checks", "_read", "_state", "_stopped", "_table", "_views")

    def __init__(
        self,
        destination: Memory,
        source: Memory,
        cells: Cells,
        *,
        into_local: bool,
        sums_source: bool,
        stopped: Callable[[], bool],
    ) -> None:
        """Of every cell, which is not begun yet.

        Args:
            into_local: `cells.local` are offsets in `destination` (a read); else in `source` (a write).
            sums_source: take the CRC-64 of the source, too, for memory that keeps none.
            stopped: each thread asks it before it begins.
        """
        self._views: tuple[memoryview, memoryview] | None = (destination.data_view, source.data_view)
        self._table = cells.table(into_local=into_local)
        self._checks = bytearray(8 * len(cells))
        self._read = bytearray(8 * len(cells)) if sums_source else None
        self._state = bytearray(kernels.SHARED_NBYTES)
        self._stopped = stopped

    def help(self) -> bool:
        """Copy what nobody has taken.

        Returns:
            Whether every cell is copied and this thread is the one to go on with that.

        Raises:
            CopyStopped: to one thread, instead.
            IndexError: a cell lies outside; nothing was copied. To one thread, instead.
        """
        state, views = self._state, self._views
        if views is None:
            return False
        if self._stopped():
            state[kernels.STOP_AT : kernels.STOP_AT + 8] = _STOP
        try:
            outcome = kernels.copy_shared(state, *views, self._table, self._checks, self._read)
        except BaseException:
            self._views = None
            raise
        if outcome is None:
            return False
        self._views = None
        if not outcome:
            raise CopyStopped
        return True

    @property
    def arrived(self) -> list[int]:
        """The CRC-64 of each cell at its destination."""
        return memoryview(self._checks).cast("Q").tolist()

    @property
    def read(self) -> list[int]:
        """That of its source."""
        assert self._read is not None
        return memoryview(self._read).cast("Q").tolist()

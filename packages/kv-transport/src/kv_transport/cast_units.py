"""Units between arenas of different element types: the bytes on the wire are in the peer's form, ours are cast.

Sending, a cell is verified, cast into staging memory and summed there, so what is sent carries a checksum made after
that of its source was checked. Reading, a cell is verified as its holder sealed it, cast into our arena and summed
there. Staging exists while a unit is in flight only.
"""

from dataclasses import dataclass, field

import numpy as np

from kv_core.checksum import crc64
from kv_core.dtypes import DType
from kv_transport.arena import Arena, ByteArray
from kv_transport.casting import cast_cell
from kv_transport.descriptors import Cells, equal_cells
from kv_transport.errors import ChecksumMismatch
from kv_transport.tickets import ReadGrant, WriteGrant
from kv_transport.units import Unit, remote_shape


class Staging:
    """Memory of one unit, there from `take` to `drop`."""

    def __init__(self, nbytes: int) -> None:
        self._nbytes = nbytes
        self.drop()

    def take(self) -> None:
        self.data_view = memoryview(bytearray(self._nbytes))
        self.data: ByteArray = np.frombuffer(self.data_view, np.uint8)

    def drop(self) -> None:
        self.data_view = memoryview(b"")
        self.data = np.empty(0, np.uint8)


@dataclass(slots=True, eq=False)
class StagedUnit(Unit):
    """A unit whose `local` is staging: cell after cell, as long as the peer's."""

    staging: Staging = field(default_factory=lambda: Staging(0))

    def begin(self) -> None:
        self.staging.take()

    def rest(self) -> None:
        self.staging.drop()

    def staged(self) -> list[memoryview]:
        """The staged cells."""
        view = self.staging.data_view
        return [
            view[at : at + size] for at, size in zip(self.cells.local.tolist(), self.cells.sizes.tolist(), strict=True)
        ]


@dataclass(slots=True, eq=False)
class CastUnit(StagedUnit):
    """See the module."""

    def take_checks(self) -> list[int]:
        checks = self.source_checks()
        arena, ticket = self._ends()
        assert checks is not None and self.slots is not None
        target = DType(ticket.form.dtype)
        found = []
        for slot, check, out in zip(self.slots.tolist(), checks, self.staged(), strict=True):
            cell = arena.cell(slot, self.layer)
            if crc64(cell) != check:
                raise ChecksumMismatch(peer="this node", transport="memory", bad=1, total=len(checks), layer=self.layer)
            cast_cell(arena.geometry, cell, target, self._scale(), out)
            found.append(crc64(out))
        return found

    def sample(self, nbytes_max: int) -> memoryview:
        arena, ticket = self._ends()
        assert self.slots is not None
        out = memoryview(bytearray(ticket.form.geometry().slot_layer_nbytes))
        cell = arena.cell(int(self.slots[0]), self.layer)
        cast_cell(arena.geometry, cell, DType(ticket.form.dtype), self._scale(), out)
        return out[:nbytes_max]

    def store_checks(self, checks: list[int]) -> None:
        arena, ticket = self._ends()
        assert self.slots is not None
        theirs, found = ticket.form.geometry(), []
        for slot, data in zip(self.slots.tolist(), self.staged(), strict=True):
            cell = arena.cell(slot, self.layer)
            cast_cell(theirs, data, arena.geometry.dtype, self._scale(), cell)
            found.append(crc64(cell))
        arena.checks[self.layer, self.slots] = np.array(found, np.uint64)

    def _ends(self) -> tuple[Arena, WriteGrant | ReadGrant]:
        assert self.arena is not None and self.ticket is not None, "KV of an arena, under a ticket"
        return self.arena, self.ticket

    def _scale(self) -> int:
        """That of the side that has FP8."""
        arena, ticket = self._ends()
        return arena.fp8_scale if arena.geometry.dtype is DType.FP8_E4M3 else ticket.form.fp8_scale


def staged_cells(ticket: WriteGrant | ReadGrant, layer: int, start: int, end: int) -> Cells:
    """Cells between staging and the positions `[start, end)` of a ticket, in one layer."""
    shape = remote_shape(ticket.form, ticket.num_slots)
    theirs = np.array(ticket.slots[start:end], np.int64)
    places = np.arange(end - start, dtype=np.int64) * shape.cell_nbytes
    return equal_cells(places, shape.offsets(theirs, layer), shape.cell_nbytes)

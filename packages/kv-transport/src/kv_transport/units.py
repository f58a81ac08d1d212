"""A unit on the side that posts it: which of our cells, which of the peer's, and how to know that they are right."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Final

import numpy as np

from kv_core.block import BlockGeometry, Layout
from kv_transport import kernels
from kv_transport.arena import Arena
from kv_transport.arena_layout import ArenaLayout, IntArray
from kv_transport.codecs import Codec, codec_name, encoded_cell_nbytes
from kv_transport.descriptors import Cells, equal_cells
from kv_transport.frames import UnitHead, pack_checks
from kv_transport.regions import Memory
from kv_transport.tickets import KVForm, ReadGrant, WriteGrant
from kv_transport.types import TransferPriority, XferOp
from kv_transport.unit_header import combined, plain_header, ticket_header


@dataclass(slots=True, eq=False)
class Unit:
    """One unit.

    Attributes:
        op: WRITE moves our bytes to the peer, READ the peer's to us.
        region: the peer's region; `cells.remote` are offsets in it.
        local: our memory; `cells.local` are offsets in it.
        ticket: the grant or lease that allows it; None for an open region.
        layer, start, end: positions of the ticket.
        arena, slots: our side when it is an arena: where checksums are read (WRITE) or stored (READ).
        notif, put: sent with the last byte (writes), and by what number the peer tells attempts at it from another put.
        codec: how its payload is to be written by a transport that encodes; `codec_required`: that, or an error.
        sent_codec, wire_nbytes, lz4_ratio: what became of the latest attempt.
        far_checks: after a write through a lossy codec, the CRC-64 of each cell as the peer has it; else empty.
        message: for `doorbell.put`, made when it is first needed.
    """

    op: XferOp
    priority: TransferPriority
    region: int
    local: Memory
    cells: Cells
    ticket: WriteGrant | ReadGrant | None = None
    layer: int = 0
    start: int = 0
    end: int = 0
    arena: Arena | None = None
    slots: IntArray | None = None
    notif: bytes = b""
    put: int = 0
    codec: Codec = Codec.NONE
    codec_required: bool = False
    sent_codec: Codec = Codec.NONE
    wire_nbytes: int = 0
    lz4_ratio: float | None = None
    far_checks: Sequence[int] = ()
    message: bytearray | None = None

    @property
    def nbytes(self) -> int:
        return self.cells.nbytes

    def source_checks(self) -> list[int] | None:
        """CRC-64 of our cells as they were sealed; None where the memory keeps none. Seals what is not sealed yet.

        Runs in the thread that is about to move the bytes.
        """
        if self.arena is None or self.slots is None:
            return None
        table = self.arena.checks[self.layer]
        unsealed = self.slots[table[self.slots] == 0]
        if len(unsealed):
            self.arena.seal(self.layer, unsealed.tolist())
        found: list[int] = table[self.slots].tolist()
        return found

    def take_checks(self) -> list[int]:
        """`source_checks`, or a sum taken now over memory that keeps none."""
        return self.source_checks() or kernels.sum_cells(
            self.local.data_view, np.stack((self.cells.local, self.cells.sizes), axis=1)
        )

    def store_checks(self, checks: list[int]) -> None:
        """What was read is verified: it carries its checksums from now on."""
        if self.arena is not None and self.slots is not None:
            self.arena.checks[self.layer, self.slots] = np.array(checks, np.uint64)

    def geometry(self) -> BlockGeometry | None:
        """Of a cell on the wire, None for plain bytes."""
        return self.ticket.form.geometry() if self.ticket is not None else None

    @property
    def source_offset(self) -> int:
        """Where its first cell is in our memory."""
        return self.cells.first_local

    def sample(self, nbytes_max: int) -> memoryview:
        """The beginning of its first cell."""
        offset, size = self.cells.first_local, int(self.cells.sizes[0])
        return self.local.data_view[offset : offset + min(size, nbytes_max)]

    def begin(self) -> None:
        """It is about to be posted."""

    def rest(self) -> None:
        """It is over for now: nothing of it is kept that could be made again."""

    def head(self, nonce: int, checks: list[int], codec: Codec = Codec.NONE) -> UnitHead:
        """What the owner is told. `checks` of a read are not known yet: pass an empty list."""
        geometry = None if codec is Codec.NONE or codec.lossless else self.geometry()
        if geometry is None:
            checked = self.cells.size_list()
        else:
            checked = [encoded_cell_nbytes(codec, geometry)] * len(self.cells)
        checksum = combined(checks, checked)
        if self.ticket is not None:
            header = ticket_header(self.ticket, self.layer, self.start, self.end)
            ticket, runs = self.ticket.ticket, NO_RUNS
        else:
            header = plain_header(len(checked))
            ticket, runs = 0, self.cells.remote_runs()
        return UnitHead(
            ticket,
            self.region,
            self.layer,
            self.start,
            self.end,
            runs,
            pack_checks(checks),
            header.attempt(nonce, checksum),
            self.notif,
            codec_name(codec),
            self.put,
        )


NO_RUNS: Final[list[int]] = []

NonceSource = Callable[[], int]
"""Draws the nonce of the next attempt; grows by one."""


@lru_cache(maxsize=256)
def remote_shape(form: KVForm, num_slots: int) -> ArenaLayout:
    """The shape of a peer's arena. Raises `KVError` for numbers that cannot be."""
    return ArenaLayout(geometry=form.geometry(), num_slots=num_slots, layout=Layout(form.layout))


def ticket_cells(
    ticket: WriteGrant | ReadGrant, arena: Arena, slots: IntArray, layer: int, start: int, end: int
) -> Cells:
    """Cells between our `slots` and the positions `[start, end)` of a ticket, in one layer."""
    shape = remote_shape(ticket.form, ticket.num_slots)
    theirs = np.array(ticket.slots[start:end], np.int64)
    return equal_cells(arena.shape.offsets(slots, layer), shape.offsets(theirs, layer), shape.cell_nbytes)

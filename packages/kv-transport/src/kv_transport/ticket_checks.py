"""What is checked of a unit before any memory is touched for it: positions, generations, checksums, runs."""

import struct
from operator import add

from kv_core.ids import RegionId
from kv_transport import limits
from kv_transport.arena import ArenaView
from kv_transport.errors import FrameRefused, GrantRefused, StaleGeneration
from kv_transport.frames import UnitHead
from kv_transport.regions import XferDesc, check_piece
from kv_transport.tickets import ReadGrant, WriteGrant
from kv_transport.types import PeerName


def require_generations(
    memory: ArenaView, ticket: WriteGrant | ReadGrant, start: int = 0, end: int | None = None
) -> None:
    """The owner's slots still hold what the ticket is about.

    Raises:
        GrantRefused: positions outside the ticket.
        StaleGeneration: a slot was given to other content.
    """
    stop = ticket.num_positions if end is None else end
    if not 0 <= start < stop <= ticket.num_positions:
        raise GrantRefused(ticket=ticket.ticket, reason=f"positions [{start}, {stop}) lie outside")
    slots = ticket.slots[start:stop]
    found, granted = memory.generations[slots].tolist(), ticket.generations[start:stop]
    if found != granted:
        slot, now, then = next(item for item in zip(slots, found, granted, strict=True) if item[1] != item[2])
        raise StaleGeneration(region=ticket.region, slot=slot, found=now, expected=then)


def unpack_checks(data: bytes, cells: int, peer: PeerName) -> list[int]:
    """CRC-64 per cell. Raises `FrameRefused` unless there is one for each."""
    if len(data) != 8 * cells or cells > limits.CELLS_PER_UNIT_MAX:
        raise FrameRefused(peer=str(peer), reason=f"{len(data)} bytes of checksums for {cells} cells")
    return list(struct.unpack(f"<{cells}Q", data))


def unpack_runs(head: UnitHead, nbytes: int, peer: PeerName) -> tuple[list[int], list[int]]:
    """Offsets and sizes of a plain unit.

    Raises:
        FrameRefused: too many, or an odd number.
        InvalidDescriptor: one lies outside the region of `nbytes`.
    """
    runs = head.runs
    if not runs or len(runs) % 2 or len(runs) > 2 * limits.CELLS_PER_UNIT_MAX:
        raise FrameRefused(peer=str(peer), reason=f"{len(runs)} numbers of runs")
    offsets, sizes = runs[0::2], runs[1::2]
    if min(sizes) < 1 or min(offsets) < 0 or max(map(add, offsets, sizes)) > nbytes:
        for offset, size in zip(offsets, sizes, strict=True):  # which one it is
            check_piece(XferDesc(region=RegionId(head.region), offset=offset, nbytes=size), nbytes)
    if sum(sizes) > limits.UNIT_BYTES_MAX:
        raise FrameRefused(peer=str(peer), reason=f"a unit of {sum(sizes)} bytes")
    return offsets, sizes

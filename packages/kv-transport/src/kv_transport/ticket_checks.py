"""What is checked of a unit before any memory is touched for it: positions, generations, checksums, runs."""

import struct
from operator import add

from kv_core.ids import RegionId
from kv_transport import limits
from kv_transport.arena import ArenaView
from kv_transport.codecs import Codec, wire_codec
from kv_transport.errors import FrameRefused, GrantRefused, StaleGeneration
from kv_transport.frames import UnitHead
from kv_transport.ledger_items import Session
from kv_transport.regions import MemoryRegion, RegionTable, XferDesc, check_piece
from kv_transport.tickets import ReadGrant, WriteGrant
from kv_transport.types import Access, PeerName
from kv_transport.unit_header import check_header, combined, plain_header


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
    if len(runs) == 2 and 0 <= runs[0] <= nbytes - runs[1] and 1 <= runs[1] <= limits.UNIT_BYTES_MAX:
        return runs[:1], runs[1:]
    offsets, sizes = runs[0::2], runs[1::2]
    if min(sizes) < 1 or min(offsets) < 0 or max(map(add, offsets, sizes)) > nbytes:
        for offset, size in zip(offsets, sizes, strict=True):  # which one it is
            check_piece(XferDesc(region=RegionId(head.region), offset=offset, nbytes=size), nbytes)
    if sum(sizes) > limits.UNIT_BYTES_MAX:
        raise FrameRefused(peer=str(peer), reason=f"a unit of {sum(sizes)} bytes")
    return offsets, sizes


def refuse_piece(region: MemoryRegion, offset: int, nbytes: int, peer: PeerName) -> None:
    """Raise what is wrong with a put of one piece.

    Raises:
        GrantRefused: the region is not open for writing.
        InvalidDescriptor: the piece lies outside it.
        FrameRefused: it is longer than a unit.
    """
    require_open(region)
    check_piece(XferDesc(RegionId(region.region), offset, nbytes), region.nbytes)
    raise FrameRefused(peer=str(peer), reason=f"a unit of {nbytes} bytes")


def require_open(region: MemoryRegion) -> None:
    """Raises `GrantRefused` for a region that is not open for writing."""
    if region.access is not Access.WRITE:
        raise GrantRefused(ticket=0, reason=f"region {region.region} is not open for writing")


def codec_of(session: Session, head: UnitHead) -> Codec:
    """How a unit is written. Raises `FrameRefused` for a codec that is none, or that its transport does not use."""
    if not head.codec:
        return Codec.NONE
    codec = wire_codec(head.codec, str(session.peer))
    if codec is not Codec.NONE and session.one_sided:
        raise FrameRefused(peer=str(session.peer), reason=f"{codec.value} over {session.scheme}, which does not encode")
    return codec


def check_plain_unit(
    regions: RegionTable, session: Session, head: UnitHead, checksum: int
) -> tuple[MemoryRegion, Codec, list[int], list[int], list[int]]:
    """A unit for an open region: the region, how it is written; offset, size and CRC-64 of each cell (none where they
    follow the bytes).

    Args:
        checksum: what the header says.

    Raises:
        UnknownRegion, GrantRefused, FrameRefused, InvalidDescriptor, ChecksumMismatch.
    """
    region = regions.get(head.region)
    require_open(region)
    codec = codec_of(session, head)
    if codec is not Codec.NONE and not codec.lossless:
        raise FrameRefused(peer=str(session.peer), reason=f"plain bytes in {codec.value}")
    offsets, sizes = unpack_runs(head, region.nbytes, session.peer)
    follow = not (head.checks or session.one_sided or codec is not Codec.NONE)
    expected = [] if follow else unpack_checks(head.checks, len(sizes), session.peer)
    check_header(
        head.header,
        checksum,
        plain_header(len(sizes)),
        combined(expected, sizes),
        peer=session.peer,
        transport=session.scheme,
        cells=len(sizes),
    )
    return region, codec, offsets, sizes, expected

"""The `KVCacheTransferHeader` of a unit: made by the sender for each attempt, checked by the receiver.

A unit's checksum is the CRC-64 of its bytes in order, put together from the CRCs of its cells, so that no byte is
summed twice. Units of plain regions have no tokens: their header counts cells of one byte-sized element.
"""

from collections.abc import Sequence
from functools import lru_cache
from typing import Final

from kv_core.dtypes import DType
from kv_core.header import KVCacheTransferHeader, PackedHeader
from kv_core.ids import RequestId
from kv_transport import kernels
from kv_transport.errors import ChecksumMismatch, FrameRefused
from kv_transport.tickets import ReadGrant, WriteGrant
from kv_transport.types import PeerName

PLAIN = RequestId("plain")
"""Request id of units that belong to no request."""

_DESCRIBED: Final = (
    "request_id",
    "layer_start",
    "layer_end",
    "seq_start",
    "seq_end",
    "num_heads",
    "head_dim",
    "dtype",
)


def combined(checks: Sequence[int], sizes: Sequence[int]) -> int:
    """CRC-64 of the pieces one after the other."""
    return kernels.combine(checks, sizes)


def ticket_header(ticket: WriteGrant | ReadGrant, layer: int, start: int, end: int) -> PackedHeader:
    """The header of positions `[start, end)` of one layer."""
    form, block_size = ticket.form, ticket.form.block_size
    return _ticket_header(
        ticket.request_id,
        layer,
        ticket.seq_start + start * block_size,
        min(ticket.seq_start + end * block_size, ticket.seq_end),
        form.num_kv_heads,
        form.head_dim,
        form.dtype,
    )


@lru_cache(maxsize=4096)
def _ticket_header(
    request_id: str, layer: int, seq_start: int, seq_end: int, num_heads: int, head_dim: int, dtype: str
) -> PackedHeader:
    """What stays the same over attempts, and on both sides: checked once."""
    return PackedHeader(
        KVCacheTransferHeader(
            request_id=RequestId(request_id),
            layer_start=layer,
            layer_end=layer + 1,
            seq_start=seq_start,
            seq_end=seq_end,
            num_heads=num_heads,
            head_dim=head_dim,
            dtype=DType(dtype),
            nonce=0,
            checksum=0,
        )
    )


@lru_cache(maxsize=4096)
def plain_header(num_cells: int) -> PackedHeader:
    """The header of a unit that belongs to no request."""
    return PackedHeader(
        KVCacheTransferHeader(
            request_id=PLAIN,
            layer_start=0,
            layer_end=1,
            seq_start=0,
            seq_end=num_cells,
            num_heads=1,
            head_dim=1,
            dtype=DType.INT8,
            nonce=0,
            checksum=0,
        )
    )


def check_header(
    raw: bytes, found: int, expected: PackedHeader, checksum: int, *, peer: PeerName, transport: str, cells: int
) -> None:
    """Refuse a header that is not the one these bytes must have.

    Args:
        raw, found: its bytes, and the checksum that `read_stamps` found in them.

    Raises:
        FrameRefused, RemoteProtocolError: it describes something else, or is none.
        ChecksumMismatch: it describes the right thing with another checksum.
    """
    described = expected.is_attempt(raw)
    if described and found == checksum:
        return
    if not described:
        theirs, ours = KVCacheTransferHeader.unpack(raw), expected.header
        for name in _DESCRIBED:
            if getattr(theirs, name) != getattr(ours, name):
                difference = f"header says {name} {getattr(theirs, name)}, expected {getattr(ours, name)}"
                raise FrameRefused(peer=str(peer), reason=difference)
    raise ChecksumMismatch(
        peer=str(peer), transport=transport, bad=cells, total=cells, layer=expected.header.layer_start
    )

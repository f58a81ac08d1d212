"""The `KVCacheTransferHeader` of a unit: made by the sender for each attempt, checked by the receiver.

A unit's checksum is the CRC-64 of its bytes in order, put together from the CRCs of its cells, so that no byte is
summed twice. Units of plain regions have no tokens: their header counts cells of one byte-sized element.
"""

from collections.abc import Sequence

from kv_core.dtypes import DType
from kv_core.header import KVCacheTransferHeader
from kv_core.ids import RequestId
from kv_transport import kernels
from kv_transport.errors import ChecksumMismatch, FrameRefused
from kv_transport.tickets import ReadGrant, WriteGrant

PLAIN = RequestId("plain")
"""Request id of units that belong to no request."""


def combined(checks: Sequence[int], sizes: Sequence[int]) -> int:
    """CRC-64 of the pieces one after the other."""
    return kernels.combine(checks, sizes)


def ticket_header(
    ticket: WriteGrant | ReadGrant, layer: int, start: int, end: int, nonce: int, checksum: int
) -> KVCacheTransferHeader:
    """The header of positions `[start, end)` of one layer."""
    block_size = ticket.form.block_size
    return KVCacheTransferHeader(
        request_id=RequestId(ticket.request_id),
        layer_start=layer,
        layer_end=layer + 1,
        seq_start=ticket.seq_start + start * block_size,
        seq_end=min(ticket.seq_start + end * block_size, ticket.seq_end),
        num_heads=ticket.form.num_kv_heads,
        head_dim=ticket.form.head_dim,
        dtype=DType(ticket.form.dtype),
        nonce=nonce,
        checksum=checksum,
    )


def plain_header(num_cells: int, nonce: int, checksum: int) -> KVCacheTransferHeader:
    """The header of a unit that belongs to no request."""
    return KVCacheTransferHeader(
        request_id=PLAIN,
        layer_start=0,
        layer_end=1,
        seq_start=0,
        seq_end=num_cells,
        num_heads=1,
        head_dim=1,
        dtype=DType.INT8,
        nonce=nonce,
        checksum=checksum,
    )


def check_header(
    header: KVCacheTransferHeader, expected: KVCacheTransferHeader, *, peer: str, transport: str, cells: int
) -> None:
    """Refuse a header that is not the one these bytes must have.

    Raises:
        FrameRefused: it describes something else.
        ChecksumMismatch: it describes the right thing with another checksum.
    """
    if header == expected:
        return
    for name in ("request_id", "layer_start", "seq_start", "seq_end", "num_heads", "head_dim", "dtype"):
        theirs, ours = getattr(header, name), getattr(expected, name)
        if theirs != ours:
            raise FrameRefused(peer=peer, reason=f"header says {name} {theirs}, expected {ours}")
    raise ChecksumMismatch(peer=peer, transport=transport, bad=cells, total=cells, layer=header.layer_start)

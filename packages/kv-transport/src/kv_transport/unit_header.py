"""The `KVCacheTransferHeader` of a unit: made by the sender for each attempt, checked by the receiver.

A unit's checksum is the CRC-64 of its bytes in order, put together from the CRCs of its cells, so that no byte is
summed twice. Units of plain regions have no tokens: their header counts cells of one byte-sized element.
"""

from collections.abc import Sequence
from functools import lru_cache

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
    form, block_size = ticket.form, ticket.form.block_size
    fixed = _ticket_header(
        ticket.request_id,
        layer,
        ticket.seq_start + start * block_size,
        min(ticket.seq_start + end * block_size, ticket.seq_end),
        form.num_kv_heads,
        form.head_dim,
        form.dtype,
    )
    return fixed.attempt(nonce, checksum)


@lru_cache(maxsize=4096)
def _ticket_header(
    request_id: str, layer: int, seq_start: int, seq_end: int, num_heads: int, head_dim: int, dtype: str
) -> KVCacheTransferHeader:
    """What stays the same over attempts, and on both sides: checked once."""
    return KVCacheTransferHeader(
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


def plain_header(num_cells: int, nonce: int, checksum: int) -> KVCacheTransferHeader:
    """The header of a unit that belongs to no request."""
    return _plain_header(num_cells).attempt(nonce, checksum)


@lru_cache(maxsize=4096)
def _plain_header(num_cells: int) -> KVCacheTransferHeader:
    return KVCacheTransferHeader(
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

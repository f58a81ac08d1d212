"""Hashes that collide on purpose, to show that a hit is decided by tokens and never by a hash."""

from collections.abc import Iterable

from kv_core.hashing import BlockHash


def truncated_hashes(hashes: Iterable[BlockHash], bits: int, check_bits: int = 0) -> list[BlockHash]:
    """The same hashes with only the low `bits` of the sequence hash and `check_bits` of the check left."""
    mask, check_mask = (1 << bits) - 1, (1 << check_bits) - 1
    return [
        BlockHash((int.from_bytes(block.sequence, "big") & mask).to_bytes(16, "big"), block.check & check_mask)
        for block in hashes
    ]

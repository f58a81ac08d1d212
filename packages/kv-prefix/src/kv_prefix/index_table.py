"""Blocks and the bits set for them: the memory behind the prefix index, in plain Python.

Knows hashes and bit numbers, nothing of holders. Sharded, so that growing one shard never stops the loop for long.

T1: an entry is there exactly while a bit of it is set.
T2: an entry answers only to the check hash it was made with: two blocks with one first hash are not mixed up.
"""

from collections.abc import Sequence
from typing import Final

from kv_core.hashing import BlockHash

NUM_SHARDS: Final = 256
_CHECK_BITS: Final = 32
_CHECK_MASK: Final = (1 << _CHECK_BITS) - 1


class BitTable:
    """Bits per block. An entry is one integer: the bits above the check hash."""

    def __init__(self) -> None:
        self._shards: list[dict[bytes, int]] = [{} for _ in range(NUM_SHARDS)]

    def __len__(self) -> int:
        return sum(map(len, self._shards))

    def set(self, block_hashes: Sequence[BlockHash], bit: int) -> None:
        """Set one bit for each block. A block whose first hash is there with another check hash is left out."""
        shards, value = self._shards, 1 << (bit + _CHECK_BITS)
        for block_hash in block_hashes:
            sequence = block_hash.sequence
            shard = shards[sequence[0]]
            entry = shard.get(sequence)
            if entry is None:
                shard[sequence] = value | block_hash.check
            elif entry & _CHECK_MASK == block_hash.check:
                shard[sequence] = entry | value

    def clear(self, block_hashes: Sequence[BlockHash], bit: int) -> None:
        """Clear one bit for each block; looks at the first hash only, for whoever removes a block knows no more."""
        shards, value = self._shards, 1 << (bit + _CHECK_BITS)
        for block_hash in block_hashes:
            sequence = block_hash.sequence
            shard = shards[sequence[0]]
            entry = shard.get(sequence, 0) & ~value
            if entry > _CHECK_MASK:
                shard[sequence] = entry
            else:
                shard.pop(sequence, None)

    def get(self, block_hash: BlockHash) -> int:
        """The bits of one block; 0 when it is not there."""
        entry = self._shards[block_hash.sequence[0]].get(block_hash.sequence, 0)
        return entry >> _CHECK_BITS if entry & _CHECK_MASK == block_hash.check else 0

    def sweep(self, shard_idx: int, dead: int) -> tuple[int, dict[bytes, int]]:
        """Clear the bits `dead` in one shard, and give its spare memory back.

        Returns how many entries it had, and the bits of those that are gone by this.
        """
        old, kept = self._shards[shard_idx], ~(dead << _CHECK_BITS)
        left = {name: bits for name, entry in old.items() if (bits := entry & kept) > _CHECK_MASK}
        gone = {name: entry >> _CHECK_BITS for name, entry in old.items() if name not in left}
        self._shards[shard_idx] = left
        return len(old), gone

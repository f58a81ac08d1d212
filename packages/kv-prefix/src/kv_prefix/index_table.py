"""Blocks and the bits set for them: the memory behind the prefix index. Compiled, with a plain twin.

Knows names and bit numbers, nothing of holders: bit `4 * column + tier` is that tier of whoever has that column.
Cut into parts, so that growing never stops the loop for long. `PlainBitTable` is the definition: tests hold the
compiled table against it, and it stands in where the package was installed without a compiler; `COMPILED` says which.

T1: an entry is there exactly while a bit of it is set.
T2: an entry answers only to the check hash it was made with: two blocks with one first hash are not mixed up.
T3: `lookup` changes nothing, and equals a walk over the names with a set of bits for each, provided that names are
    chained: the same name has the same names before it, in whatever is set as consecutive or looked up.
T4: what a lookup steps over was set as consecutive, and has the bits of the block that it steps from.
"""

import sys
from array import array
from typing import Final, Protocol

from kv_core.checksum import Buffer
from kv_core.hash_chain import unpack

try:
    from kv_prefix import _bit_table as _kernels
except ImportError:  # built without a compiler
    _kernels = None  # type: ignore[assignment]

COMPILED: Final = _kernels is not None

TIERS: Final = 4
NOT_ANSWERED: Final = 0xFFFF
"""Rank of a column that no lookup answers with."""

Run = tuple[int, int, tuple[int, int, int, int]]
"""(column, blocks from block 0 on without a hole, the same by fastest tier)."""

_CHECK_BITS: Final = 32
_CHECK_MASK: Final = (1 << _CHECK_BITS) - 1
_ALL_TIERS: Final = (1 << TIERS) - 1
_PLAIN_SHARDS: Final = 256


class BitTable(Protocol):
    """Names are packed as in `kv_core.block_hashes`: 20 bytes a block."""

    def __len__(self) -> int: ...

    def set(self, packed: bytes, bit: int, consecutive: bool = False, /) -> None:
        """Set one bit for each block. A block whose first hash is there with another check hash is left out.

        Args:
            consecutive: each is the child of the one before it.
        """
        ...

    def clear(self, packed: bytes, bit: int, /) -> None:
        """Clear one bit for each block; looks at the first hash only, for whoever removes a block knows no more."""
        ...

    def get(self, packed: bytes, /) -> tuple[int, ...]:
        """The bits of one block, ascending; none when it is not there."""
        ...

    def lookup(self, packed: bytes, ranks: Buffer, /) -> list[Run]:
        """Every column that has block 0, with its unbroken run; the longest first, then by rank.

        Args:
            ranks: one uint16 a column, `NOT_ANSWERED` for those to leave out; columns beyond its end are left out too.
        """
        ...

    def sweep(self, position: int, dead: Buffer, max_told: int, /) -> tuple[int, int, list[bytes], list[int]]:
        """Clear all bits of some columns in one part of the table, and give its spare memory back.

        Begin at position 0, go on at each position returned, with the same `dead`, until it is -1. In between, no bit
        of a dead column may be set.

        Args:
            dead: one byte a column, not 0 for those to clear.
            max_told: at most so many of the blocks that are gone by this are named.

        Returns:
            The next position, how many entries were looked at, first hashes of blocks that are gone, and a column that
            each had.
        """
        ...

    def nbytes(self) -> int:
        """Memory of the table."""
        ...


class PlainBitTable:
    """The table in plain Python. An entry is one integer: the bits above the check hash. It walks name by name, so
    which blocks are consecutive is nothing to it."""

    def __init__(self) -> None:
        self._shards: list[dict[bytes, int]] = [{} for _ in range(_PLAIN_SHARDS)]

    def __len__(self) -> int:
        return sum(map(len, self._shards))

    def set(self, packed: bytes, bit: int, consecutive: bool = False, /) -> None:
        shards, value = self._shards, 1 << (bit + _CHECK_BITS)
        for sequence, check in unpack(packed):
            shard = shards[sequence[0]]
            entry = shard.get(sequence)
            if entry is None:
                shard[sequence] = value | check
            elif entry & _CHECK_MASK == check:
                shard[sequence] = entry | value

    def clear(self, packed: bytes, bit: int, /) -> None:
        shards, value = self._shards, 1 << (bit + _CHECK_BITS)
        for sequence, _ in unpack(packed):
            shard = shards[sequence[0]]
            entry = shard.get(sequence, 0) & ~value
            if entry > _CHECK_MASK:
                shard[sequence] = entry
            else:
                shard.pop(sequence, None)

    def get(self, packed: bytes, /) -> tuple[int, ...]:
        (name,) = unpack(packed)
        bits = self._bits(*name)
        return tuple(bit for bit in range(bits.bit_length()) if bits >> bit & 1)

    def lookup(self, packed: bytes, ranks: Buffer, /) -> list[Run]:
        rank_of = memoryview(ranks).cast("B").cast("H")
        counts: dict[int, list[int]] = {}
        # The prefix cut where anything changes; `alive` has had every block so far.
        alive = [column for column, rank in enumerate(rank_of) if rank != NOT_ANSWERED]
        current, length = -1, 0

        def count() -> None:
            for column in alive if length else ():
                tiers = current >> column * TIERS & _ALL_TIERS
                counts.setdefault(column, [0] * TIERS)[(tiers & -tiers).bit_length() - 1] += length

        for sequence, check in unpack(packed):
            bits = self._bits(sequence, check)
            if bits != current:
                count()
                alive = [column for column in alive if bits >> column * TIERS & _ALL_TIERS]
                current, length = bits, 0
                if not alive:
                    break
            length += 1
        count()
        runs: list[Run] = [(column, sum(n), (n[0], n[1], n[2], n[3])) for column, n in counts.items()]
        return sorted(runs, key=lambda run: (-run[1], rank_of[run[0]]))

    def sweep(self, position: int, dead: Buffer, max_told: int, /) -> tuple[int, int, list[bytes], list[int]]:
        old = self._shards[position]
        mask = sum(_ALL_TIERS << column * TIERS for column, is_dead in enumerate(memoryview(dead).cast("B")) if is_dead)
        kept = ~(mask << _CHECK_BITS)
        left = {name: bits for name, entry in old.items() if (bits := entry & kept) > _CHECK_MASK}
        gone = [name for name in old if name not in left][:max_told]
        columns = [_lowest(old[name] >> _CHECK_BITS) // TIERS for name in gone]
        self._shards[position] = left
        following = position + 1 if position + 1 < _PLAIN_SHARDS else -1
        return following, len(old), gone, columns

    def nbytes(self) -> int:
        return sum(
            sys.getsizeof(shard) + sum(sys.getsizeof(name) + sys.getsizeof(entry) for name, entry in shard.items())
            for shard in self._shards
        )

    def _bits(self, sequence: bytes, check: int) -> int:
        entry = self._shards[sequence[0]].get(sequence, 0)
        return entry >> _CHECK_BITS if entry & _CHECK_MASK == check else 0


def make_bit_table() -> BitTable:
    """An empty table: compiled where that is there."""
    return _kernels.BitTable() if COMPILED else PlainBitTable()


def make_ranks(num_columns: int) -> "array[int]":
    """Ranks for so many columns, none of them answered with."""
    return array("H", [NOT_ANSWERED]) * num_columns


def _lowest(bits: int) -> int:
    return (bits & -bits).bit_length() - 1

"""Who holds how much of a prefix, over all nodes of the cluster.

Fed by claims that kv-consistency has already ordered: the index keeps sets, it does not judge versions. A lookup goes
from block 0 on and keeps the holders that had every block so far, so a hole ends a holder's match exactly there. It
takes whole stretches at a step: that a block is its neighbour's child and held alike is maintained with every change
(`index_table`), and no presence is guessed from that of a deeper block.

I1: a lookup equals, for every holder, a plain walk over that holder's set of blocks.
I2: lookups change nothing.
I3: a removed holder is out of every answer at once; its entries are swept out in bounded steps, and its column is not
    used again before the sweep has ended.
"""

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

import msgspec

from kv_core.hashing import BlockHash, BlockHashes
from kv_core.ids import Incarnation, NodeId
from kv_prefix import limits
from kv_prefix.errors import HolderLimitError
from kv_prefix.events import Tier
from kv_prefix.index_table import NOT_ANSWERED, TIERS, BitTable, make_bit_table, make_ranks

SWEEP_BLOCKS: Final = 4_096
"""Entries one call to `sweep` looks at: a millisecond or two."""

_TOLD_A_SWEEP: Final = 1_024
"""Lost blocks that one call to `sweep` remembers: remembering one costs more than sweeping it."""

_LOST_PARTS: Final = 16


@dataclass(frozen=True, slots=True, order=True)
class Holder:
    """One life of one node. A restarted node is another holder."""

    node: NodeId
    incarnation: Incarnation


class HolderMatch(msgspec.Struct, frozen=True, gc=False):
    """How many blocks from block 0 on, without a hole, a holder has, and in which tier each is best read from.

    Attributes:
        num_blocks: length of the unbroken run.
        by_tier: blocks of that run by fastest tier, indexed by `Tier`; sums to `num_blocks`.
    """

    holder: Holder
    num_blocks: int
    by_tier: tuple[int, int, int, int]


@dataclass(frozen=True, slots=True)
class IndexStats:
    """A snapshot. `sweeping` counts removed holders whose entries are not all gone yet."""

    blocks: int
    holders: int
    sweeping: int


class PrefixIndex:
    """The cluster's prefix index; one per process that routes or pulls.

    Args:
        table: the memory to use; a compiled one when None and there is one.
    """

    def __init__(self, table: BitTable | None = None) -> None:
        # A holder's column is four neighbouring bits, one per tier.
        self._table = make_bit_table() if table is None else table
        self._column_of: dict[Holder, int] = {}
        self._holder_of: list[Holder | None] = []
        self._ranks = make_ranks(0)
        self._free_columns: list[int] = []
        # Columns of removed holders: being swept from `_position` on, and waiting for the next sweep.
        self._sweeping: dict[int, Holder] = {}
        self._waiting: dict[int, Holder] = {}
        self._position = 0
        self._lost: deque[dict[bytes, Holder]] = deque(({},), maxlen=_LOST_PARTS)

    def stored(
        self, holder: Holder, tier: Tier, block_hashes: Iterable[BlockHash], *, consecutive: bool = False
    ) -> None:
        """These blocks are in that tier of the holder. Saying it again changes nothing. Fastest from `BlockHashes`.

        Args:
            consecutive: each block is the child of the one before it, so that lookups need not look at every one. To
                say so of blocks that are not makes lookups credit a holder with blocks between that it may not have.

        Raises:
            HolderLimitError: a new holder, and there is no room for another.
        """
        column = self._column_of.get(holder)
        if column is None:
            column = self._add(holder)
        self._table.set(BlockHashes.of(block_hashes).packed, column * TIERS + tier, consecutive)

    def removed(self, holder: Holder, tier: Tier, block_hashes: Iterable[BlockHash]) -> None:
        """These blocks are no longer in that tier of the holder; other tiers and holders keep theirs.

        Only `BlockHash.sequence` is looked at.
        """
        column = self._column_of.get(holder)
        if column is not None:
            self._table.clear(BlockHashes.of(block_hashes).packed, column * TIERS + tier)

    def remove_holder(self, holder: Holder) -> None:
        """Drop a holder from every answer at once; call `sweep` until it returns False to get the memory back."""
        column = self._column_of.pop(holder, None)
        if column is None:
            return
        self._holder_of[column] = None
        self._ranks[column] = NOT_ANSWERED
        self._waiting[column] = holder

    def sweep(self, max_blocks: int = SWEEP_BLOCKS) -> bool:
        """Free what removed holders left, looking at about `max_blocks` entries; True while there is more."""
        looked_at, told = 0, 0
        while looked_at < max_blocks and (self._sweeping or self._waiting):
            if not self._sweeping:
                self._sweeping, self._waiting, self._position = self._waiting, {}, 0
            dead = bytearray(len(self._holder_of))
            for column in self._sweeping:
                dead[column] = True
            following, num_entries, names, columns = self._table.sweep(self._position, dead, _TOLD_A_SWEEP - told)
            looked_at += 1 + num_entries
            told += len(names)
            self._remember(names, columns)
            self._position = following
            if following < 0:
                self._free_columns += self._sweeping
                self._sweeping = {}
        return bool(self._sweeping or self._waiting)

    def lookup(self, block_hashes: Iterable[BlockHash]) -> list[HolderMatch]:
        """Every holder that has block 0, with its unbroken run; deepest first, then by holder.

        Fastest from `BlockHashes`.
        """
        found = self._table.lookup(BlockHashes.of(block_hashes).packed, self._ranks)
        holders = self._holder_of
        return [
            HolderMatch(holder, num_blocks, by_tier)
            for column, num_blocks, by_tier in found
            if (holder := holders[column]) is not None
        ]

    def tiers_of(self, block_hash: BlockHash) -> dict[Holder, tuple[Tier, ...]]:
        """Who has this one block, wherever in a prefix it stands."""
        tiers: dict[Holder, list[Tier]] = {}
        for bit in self._table.get(BlockHashes.of((block_hash,)).packed):
            holder = self._holder_of[bit // TIERS]
            if holder is not None:
                tiers.setdefault(holder, []).append(Tier(bit % TIERS))
        return {holder: tuple(tiers[holder]) for holder in sorted(tiers)}

    def lost_with(self, block_hash: BlockHash) -> Holder | None:
        """A removed holder that had this block when it was last anywhere, if that is remembered.

        About 65,536 are kept, the latest, and of a holder that had more only a part is.
        """
        return next((part[block_hash.sequence] for part in self._lost if block_hash.sequence in part), None)

    def holders(self) -> list[Holder]:
        """The holders that are followed, in order."""
        return sorted(self._column_of)

    def stats(self) -> IndexStats:
        """Sizes."""
        return IndexStats(len(self._table), len(self._column_of), len(self._sweeping) + len(self._waiting))

    def nbytes(self) -> int:
        """Memory of blocks and their holders."""
        return self._table.nbytes()

    def _add(self, holder: Holder) -> int:
        if self._free_columns:
            column = self._free_columns.pop()
        elif len(self._holder_of) < limits.MAX_HOLDERS:
            column = len(self._holder_of)
            self._holder_of.append(None)
            self._ranks.append(NOT_ANSWERED)
        else:
            raise HolderLimitError(
                holder=f"{holder.node}/{holder.incarnation}", held=len(self._holder_of), limit=limits.MAX_HOLDERS
            )
        self._column_of[holder], self._holder_of[column] = column, holder
        for rank, known in enumerate(sorted(self._column_of)):
            self._ranks[self._column_of[known]] = rank
        return column

    def _remember(self, names: Sequence[bytes], columns: Sequence[int]) -> None:
        # In parts, the latest first: a dict that is full and goes on changing stops the loop when it moves.
        if len(self._lost[0]) >= limits.MAX_REMOVAL_RECORDS // _LOST_PARTS:
            self._lost.appendleft({})
        self._lost[0].update((name, self._sweeping[column]) for name, column in zip(names, columns, strict=True))

"""Who holds how much of a prefix, over all nodes of the cluster.

Fed by claims that kv-consistency has already ordered: the index keeps sets, it does not judge versions. A lookup walks
the prefix from block 0 and keeps the set of holders that had every block so far, so a hole ends a holder's match
exactly there; nothing is guessed by bisection.

I1: a lookup equals, for every holder, a plain walk over that holder's set of blocks.
I2: lookups change nothing.
I3: a removed holder is out of every answer at once; its entries are swept out in bounded steps, and its column is not
    used again before the sweep has ended.
"""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

from kv_core.hashing import BlockHash
from kv_core.ids import Incarnation, NodeId
from kv_prefix import limits
from kv_prefix.errors import HolderLimitError
from kv_prefix.events import Tier
from kv_prefix.index_table import NUM_SHARDS, BitTable

_TIERS = len(Tier)
_ALL_TIERS = (1 << _TIERS) - 1


@dataclass(frozen=True, slots=True, order=True)
class Holder:
    """One life of one node. A restarted node is another holder."""

    node: NodeId
    incarnation: Incarnation


@dataclass(frozen=True, slots=True)
class HolderMatch:
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
    """The cluster's prefix index; one per process that routes or pulls."""

    def __init__(self) -> None:
        # A holder's column is four neighbouring bits of every entry, one per tier.
        self._table = BitTable()
        self._column_of: dict[Holder, int] = {}
        self._holder_of: dict[int, Holder] = {}
        self._free_columns: list[int] = []
        self._num_columns = 0
        # Columns of removed holders: being swept from shard `_next_shard` on, and waiting for the next sweep.
        self._sweeping: dict[int, Holder] = {}
        self._waiting: dict[int, Holder] = {}
        self._next_shard = 0
        self._lost: OrderedDict[bytes, Holder] = OrderedDict()

    def stored(self, holder: Holder, tier: Tier, block_hashes: Sequence[BlockHash]) -> None:
        """These blocks are in that tier of the holder. Saying it again changes nothing.

        Raises:
            HolderLimitError: a new holder, and there is no room for another.
        """
        column = self._column_of.get(holder)
        if column is None:
            column = self._add(holder)
        self._table.set(block_hashes, column * _TIERS + tier)

    def removed(self, holder: Holder, tier: Tier, block_hashes: Sequence[BlockHash]) -> None:
        """These blocks are no longer in that tier of the holder; other tiers and holders keep theirs.

        Only `BlockHash.sequence` is looked at.
        """
        column = self._column_of.get(holder)
        if column is not None:
            self._table.clear(block_hashes, column * _TIERS + tier)

    def remove_holder(self, holder: Holder) -> None:
        """Drop a holder from every answer at once; call `sweep` until it returns False to get the memory back."""
        column = self._column_of.pop(holder, None)
        if column is None:
            return
        del self._holder_of[column]
        self._waiting[column] = holder

    def sweep(self, max_blocks: int = 4096) -> bool:
        """Free what removed holders left, looking at about `max_blocks` entries; True while there is more."""
        looked_at = 0
        while looked_at < max_blocks and (self._sweeping or self._waiting):
            if not self._sweeping:
                self._sweeping, self._waiting, self._next_shard = self._waiting, {}, 0
            dead = sum(_ALL_TIERS << column * _TIERS for column in self._sweeping)
            num_entries, gone = self._table.sweep(self._next_shard, dead)
            looked_at += 1 + num_entries
            self._next_shard += 1
            self._remember(gone)
            if self._next_shard == NUM_SHARDS:
                self._free_columns += self._sweeping
                self._sweeping = {}
        return bool(self._sweeping or self._waiting)

    def lookup(self, block_hashes: Sequence[BlockHash]) -> list[HolderMatch]:
        """Every holder that has block 0, with its unbroken run; deepest first, then by holder."""
        counts: dict[int, list[int]] = {}
        for length, bits, alive in self._runs(block_hashes):
            for column in alive:
                tiers = bits >> column * _TIERS & _ALL_TIERS
                fastest = (tiers & -tiers).bit_length() - 1
                counts.setdefault(column, [0] * _TIERS)[fastest] += length
        matches = [
            HolderMatch(self._holder_of[column], sum(by_tier), (by_tier[0], by_tier[1], by_tier[2], by_tier[3]))
            for column, by_tier in counts.items()
        ]
        return sorted(matches, key=lambda match: (-match.num_blocks, match.holder))

    def tiers_of(self, block_hash: BlockHash) -> dict[Holder, tuple[Tier, ...]]:
        """Who has this one block, wherever in a prefix it stands."""
        bits = self._table.get(block_hash)
        return {
            holder: tuple(tier for tier in Tier if bits >> (column * _TIERS + tier) & 1)
            for column, holder in sorted(self._holder_of.items())
            if bits >> column * _TIERS & _ALL_TIERS
        }

    def lost_with(self, block_hash: BlockHash) -> Holder | None:
        """The removed holder that was the last to have this block, if that is remembered (the latest 65,536 are)."""
        return self._lost.get(block_hash.sequence)

    def holders(self) -> list[Holder]:
        """The holders that are followed, in order."""
        return sorted(self._column_of)

    def stats(self) -> IndexStats:
        """Sizes."""
        return IndexStats(len(self._table), len(self._column_of), len(self._sweeping) + len(self._waiting))

    def _add(self, holder: Holder) -> int:
        if self._free_columns:
            column = self._free_columns.pop()
        elif self._num_columns < limits.MAX_HOLDERS:
            column = self._num_columns
            self._num_columns += 1
        else:
            raise HolderLimitError(
                holder=f"{holder.node}/{holder.incarnation}", held=self._num_columns, limit=limits.MAX_HOLDERS
            )
        self._column_of[holder], self._holder_of[column] = column, holder
        return column

    def _remember(self, gone: dict[bytes, int]) -> None:
        for name, bits in gone.items():
            self._lost[name] = self._sweeping[((bits & -bits).bit_length() - 1) // _TIERS]
            self._lost.move_to_end(name)
        while len(self._lost) > limits.MAX_REMOVAL_RECORDS:
            self._lost.popitem(last=False)

    def _runs(self, block_hashes: Sequence[BlockHash]) -> list[tuple[int, int, list[int]]]:
        """The prefix cut where anything changes: (length, bits, columns that had every block so far)."""
        runs: list[tuple[int, int, list[int]]] = []
        # Bits of removed holders, not swept yet, may cut a run in two; they are in no run's columns.
        alive = list(self._holder_of)
        start, current = 0, -1
        for block_idx, block_hash in enumerate(block_hashes):
            bits = self._table.get(block_hash)
            if bits == current:
                continue
            if block_idx:
                runs.append((block_idx - start, current, alive))
            alive = [column for column in alive if bits >> column * _TIERS & _ALL_TIERS]
            start, current = block_idx, bits
            if not alive:
                return runs
        if block_hashes:
            runs.append((len(block_hashes) - start, current, alive))
        return runs

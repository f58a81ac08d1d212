"""Who holds how much of a prefix, over all nodes of the cluster.

Fed by claims that kv-consistency has already ordered: the index keeps sets, it does not judge versions. A lookup walks
the prefix from block 0 and keeps the set of holders that had every block so far, so a hole ends a holder's match
exactly there; nothing is guessed by bisection.

I1: a lookup equals, for every holder, a plain walk over that holder's set of blocks.
I2: lookups change nothing.
I3: a removed holder is out of every answer at once; its entries are swept out in bounded steps, and its column is not
    used again before the sweep has ended.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from kv_core.hashing import BlockHash
from kv_core.ids import Incarnation, NodeId
from kv_prefix.events import Tier


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
    nbytes: int


class PrefixIndex:
    """The cluster's prefix index; one per process that routes or pulls."""

    def stored(self, holder: Holder, tier: Tier, block_hashes: Sequence[BlockHash]) -> None:
        """These blocks are in that tier of the holder. Saying it again changes nothing.

        Raises:
            HolderLimitError: a new holder, and there is no room for another.
        """
        raise NotImplementedError

    def removed(self, holder: Holder, tier: Tier, block_hashes: Sequence[BlockHash]) -> None:
        """These blocks are no longer in that tier of the holder; other tiers and holders keep theirs."""
        raise NotImplementedError

    def remove_holder(self, holder: Holder) -> None:
        """Drop a holder from every answer at once; call `sweep` until it returns False to get the memory back."""
        raise NotImplementedError

    def sweep(self, max_blocks: int = 4096) -> bool:
        """Free what removed holders left, looking at about `max_blocks` entries; True while there is more."""
        raise NotImplementedError

    def lookup(self, block_hashes: Sequence[BlockHash]) -> list[HolderMatch]:
        """Every holder that has block 0, with its unbroken run; deepest first, then by holder."""
        raise NotImplementedError

    def tiers_of(self, block_hash: BlockHash) -> dict[Holder, tuple[Tier, ...]]:
        """Who has this one block, wherever in a prefix it stands."""
        raise NotImplementedError

    def holders(self) -> list[Holder]:
        """The holders that are followed, in order."""
        raise NotImplementedError

    def stats(self) -> IndexStats:
        """Sizes."""
        raise NotImplementedError

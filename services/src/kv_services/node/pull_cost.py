"""Decides whether fetching another node's blocks is cheaper than computing them, from rates measured here.

Pure: what was measured comes in by `computed` and `fetched`, the clock stays outside. Before the first measurement of
either kind the rates of a slow machine are assumed, so that the first decisions are cautious, not blind. Where
computing is taken to be cheaper, a few blocks are fetched all the same now and then: nothing else would ever tell that
what was slow has recovered.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from kv_core.hashing import BlockHash
from kv_core.ids import NodeId
from kv_prefix.prefix_index import HolderMatch
from kv_services.node.prefill_events import PullPlan

FIRST_COMPUTE_NS_PER_TOKEN: Final = 1_000_000
FIRST_FETCH_NS_PER_BYTE: Final = 2.0
FETCH_OVERHEAD_NS: Final = 5_000_000
"""One lease round trip and one release, on a busy machine."""
RETRY_AFTER: Final = 64
"""Fetches that were not made, for computing was cheaper, after which one is tried all the same."""
RETRY_BLOCKS: Final = 8
"""The most blocks of such a trial."""
_WEIGHT: Final = 0.25


@dataclass(slots=True)
class PullCost:
    """Rates of one node, as moving averages.

    Args:
        block_nbytes: bytes of one block over all layers.
        block_size: tokens of one block.
    """

    block_nbytes: int
    block_size: int
    compute_ns_per_token: float = FIRST_COMPUTE_NS_PER_TOKEN
    fetch_ns_per_byte: float = FIRST_FETCH_NS_PER_BYTE
    skipped: int = 0
    _on_trial: bool = False

    def computed(self, num_tokens: int, duration_ns: int) -> None:
        """A prefill took that long."""
        if num_tokens > 0:
            self.compute_ns_per_token += _WEIGHT * (duration_ns / num_tokens - self.compute_ns_per_token)

    def fetched(self, nbytes: int, duration_ns: int) -> None:
        """A fetch took that long."""
        if nbytes > 0:
            # What is known besides a trial is old.
            weight = 1.0 if self._on_trial else _WEIGHT
            self.fetch_ns_per_byte += weight * (duration_ns / nbytes - self.fetch_ns_per_byte)
            self._on_trial = False

    def fetch_ns(self, num_blocks: int) -> float:
        """What fetching that many blocks is expected to take."""
        return FETCH_OVERHEAD_NS + num_blocks * self.block_nbytes * self.fetch_ns_per_byte

    def worth_it(self, num_blocks: int) -> bool:
        """Whether fetching that many blocks is expected to be quicker than computing them."""
        return self.fetch_ns(num_blocks) < num_blocks * self.block_size * self.compute_ns_per_token

    def blocks_to_fetch(self, num_blocks: int) -> int:
        """How many of that many blocks to fetch: all, none, or a few as a trial."""
        if self.worth_it(num_blocks):
            return num_blocks
        self.skipped += 1
        if self.skipped % RETRY_AFTER:
            return 0
        self._on_trial = True
        return min(num_blocks, RETRY_BLOCKS)

    def explain(self, num_blocks: int) -> str:
        """The comparison in one sentence."""
        fetch_ns = self.fetch_ns(num_blocks)
        compute_ns = num_blocks * self.block_size * self.compute_ns_per_token
        choice = "fetch" if self.worth_it(num_blocks) else "compute"
        return (
            f"{choice}: {num_blocks} blocks take {fetch_ns / 1e6:.1f} ms to fetch, {compute_ns / 1e6:.1f} ms to compute"
        )


def plan_pull(
    holders: Sequence[HolderMatch],
    usable: Sequence[NodeId],
    hashes: Sequence[BlockHash],
    have_blocks: int,
    cost: PullCost,
) -> PullPlan | None:
    """What to fetch for a prompt of which `have_blocks` full blocks are here; None when computing is cheaper, but for
    a trial now and then.

    Args:
        holders: who holds how much of it, deepest first (`PrefixIndex.lookup`).
        usable: nodes that may be asked.
        hashes: of the blocks that are needed; never more than these are fetched.
    """
    for match in holders:
        if match.holder.node not in usable:
            continue
        missing = min(match.num_blocks, len(hashes)) - have_blocks
        count = cost.blocks_to_fetch(missing) if missing > 0 else 0
        return PullPlan(match.holder.node, have_blocks, count) if count else None
    return None

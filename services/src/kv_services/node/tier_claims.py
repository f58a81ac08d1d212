"""Blocks of slower tiers in the words of kv-consistency: what a node claims to hold there, and no longer. Pure."""

from collections.abc import Iterator, Sequence
from typing import Final

from kv_consistency import limits
from kv_consistency.events import Removal
from kv_consistency.update import NamespaceRef, Run, Tier, pack_hashes, pack_run
from kv_prefix import events as pool_events
from kv_prefix.tiers.blocks import TierBlock

SCOPE_BYTES: Final = 8
RUNS_PER_UPDATE: Final = 128
BLOCKS_PER_UPDATE: Final = 2048
"""About 40 KiB of names: an update is sent whole."""


def namespace_of(block: TierBlock, block_size: int) -> NamespaceRef:
    """The namespace that a block was stored under."""
    scopes = tuple(block.scopes[i : i + SCOPE_BYTES] for i in range(0, len(block.scopes), SCOPE_BYTES))
    return NamespaceRef(block.namespace, block_size, scopes[: limits.MAX_SCOPES])


def packed_runs(tier: pool_events.Tier, blocks: Sequence[TierBlock], block_size: int) -> Iterator[list[Run]]:
    """Claims for blocks, in groups of one update each. Blocks that follow one another go in one run."""
    group: list[Run] = []
    num_blocks = 0
    for run in _chains(blocks):
        first = run[0]
        names = [block.block_hash for block in run]
        packed = pack_run(namespace_of(first, block_size), Tier(tier), first.block_idx, names)
        # They may have outlived a restart: they count as made when they were.
        group.append(Run(packed.namespace, packed.tier, packed.start, packed.hashes, packed.checks, b"", first.epoch))
        num_blocks += len(run)
        if len(group) >= RUNS_PER_UPDATE or num_blocks >= BLOCKS_PER_UPDATE:
            yield group
            group, num_blocks = [], 0
    if group:
        yield group


def packed_removals(tier: pool_events.Tier, blocks: Sequence[TierBlock]) -> Iterator[list[Removal]]:
    """What takes claims back, in groups of one update each."""
    for at in range(0, len(blocks), BLOCKS_PER_UPDATE):
        by_namespace: dict[bytes, list[bytes]] = {}
        for block in blocks[at : at + BLOCKS_PER_UPDATE]:
            by_namespace.setdefault(block.namespace, []).append(block.sequence)
        removals = [Removal(digest, Tier(tier), pack_hashes(names)) for digest, names in by_namespace.items()]
        for first in range(0, len(removals), RUNS_PER_UPDATE):
            yield removals[first : first + RUNS_PER_UPDATE]


def _chains(blocks: Sequence[TierBlock]) -> Iterator[list[TierBlock]]:
    chain: list[TierBlock] = []
    for block in blocks:
        follows = chain and block.parent == chain[-1].sequence and block.epoch == chain[-1].epoch
        if chain and (not follows or len(chain) >= BLOCKS_PER_UPDATE):
            yield chain
            chain = []
        chain.append(block)
    if chain:
        yield chain

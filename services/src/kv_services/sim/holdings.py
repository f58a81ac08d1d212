"""What one simulated node holds: blocks in memory with their bytes, and blocks in its slower tiers by name."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from kv_core.hashing import BlockHash
from kv_services.node.process import NodeWork

BLOCK_SIZE: Final = 4


@dataclass(frozen=True, slots=True)
class HeldChain:
    """A run of blocks from the first of a sequence to a last one behind which the node's memory holds no more."""

    hashes: tuple[BlockHash, ...]
    tokens: tuple[int, ...]
    slots: tuple[int, ...]


def chains_in_memory(work: NodeWork) -> Iterator[HeldChain]:
    """Everything findable in the pool, as chains that end where nothing follows."""
    chains: dict[BlockHash, HeldChain] = {}
    inner: dict[BlockHash, None] = {}
    for run in work.ctx.pool.snapshot():
        parent = None if run.parent is None else chains[run.parent]
        if run.parent is not None:
            inner[run.parent] = None
        hashes, tokens, slots = (parent.hashes, parent.tokens, parent.slots) if parent else ((), (), ())
        raw = memoryview(run.tokens).cast("I")
        for index, (block_hash, ref) in enumerate(zip(run.block_hashes, run.refs, strict=True)):
            if index:
                inner[hashes[-1]] = None
            hashes, slots = (*hashes, block_hash), (*slots, ref.slot)
            tokens = (*tokens, *raw[index * BLOCK_SIZE : (index + 1) * BLOCK_SIZE])
            chains[block_hash] = HeldChain(hashes, tokens, slots)
    return (chain for block_hash, chain in chains.items() if block_hash not in inner)


def names_held(work: NodeWork) -> dict[BlockHash, None]:
    """Every block that can be had from the node, from whichever tier."""
    names = dict[BlockHash, None]()
    for run in work.ctx.pool.snapshot():
        names.update(dict.fromkeys(run.block_hashes))
    for tier in work.ctx.tiers.tiers:
        names.update(dict.fromkeys(block.block_hash for block in tier.catalog.blocks()))
    return names


def chains_below(work: NodeWork) -> Iterator[tuple[BlockHash, ...]]:
    """Every block of the slower tiers, with all the blocks before it where the node holds them."""
    before: dict[bytes, tuple[bytes, BlockHash]] = {}
    for tier in work.ctx.tiers.tiers:
        before.update((block.sequence, (block.parent, block.block_hash)) for block in tier.catalog.blocks())
    for run in work.ctx.pool.snapshot():
        parent = b"" if run.parent is None else run.parent.sequence
        for block_hash in run.block_hashes:
            before[block_hash.sequence] = (parent, block_hash)
            parent = block_hash.sequence
    for tier in work.ctx.tiers.tiers:
        for block in tier.catalog.blocks():
            chain, at = [], block.sequence
            while at in before:
                at, block_hash = before[at]
                chain.append(block_hash)
            if not at:
                yield tuple(reversed(chain))


def depth(names: dict[BlockHash, None], hashes: Sequence[BlockHash]) -> int:
    """How many of the first of `hashes` are among `names`."""
    return next((index for index, block_hash in enumerate(hashes) if block_hash not in names), len(hashes))

"""What one simulated node holds: blocks in memory with their bytes, and blocks in its slower tiers by name."""

from collections.abc import Container, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from kv_core.hashing import TOKEN_BYTES, BlockHash
from kv_prefix.events import Tier
from kv_services.node.process import NodeWork

BLOCK_SIZE: Final = 4
HeldBlock = tuple[BlockHash | None, bytes, int]
"""A block's parent, its tokens as little-endian uint32, and its slot."""


@dataclass(frozen=True, slots=True)
class HeldChain:
    """A run of blocks from the first of a sequence on, all in a node's memory."""

    hashes: tuple[BlockHash, ...]
    tokens: tuple[int, ...]
    slots: tuple[int, ...]


def blocks_in_memory(work: NodeWork) -> dict[BlockHash, HeldBlock]:
    """Everything findable in the pool, parents before children."""
    blocks: dict[BlockHash, HeldBlock] = {}
    nbytes = BLOCK_SIZE * TOKEN_BYTES
    for run in work.ctx.pool.snapshot():
        parent = run.parent
        for index, (block_hash, ref) in enumerate(zip(run.block_hashes, run.refs, strict=True)):
            blocks[block_hash] = parent, run.tokens[index * nbytes : (index + 1) * nbytes], ref.slot
            parent = block_hash
    return blocks


def chain_to(last: BlockHash, blocks: dict[BlockHash, HeldBlock]) -> HeldChain:
    """The run of blocks that ends in that one."""
    names: list[BlockHash] = []
    at: BlockHash | None = last
    while at is not None:
        names.append(at)
        at = blocks[at][0]
    names.reverse()
    held = [blocks[name] for name in names]
    tokens = memoryview(b"".join([tokens for _, tokens, _ in held])).cast("I")
    return HeldChain(tuple(names), tuple(tokens), tuple([slot for _, _, slot in held]))


def chains_in_memory(work: NodeWork) -> Iterator[HeldChain]:
    """Everything findable in the pool, as chains that end where nothing follows."""
    blocks = blocks_in_memory(work)
    inner = {parent for parent, _, _ in blocks.values()}
    return (chain_to(last, blocks) for last in blocks if last not in inner)


def names_held(work: NodeWork) -> dict[BlockHash, tuple[Tier, ...]]:
    """Every block that can be had from the node, and in which of its tiers it lies, fastest first."""
    tiers: dict[BlockHash, tuple[Tier, ...]] = {}
    for run in work.ctx.pool.snapshot():
        tiers.update(dict.fromkeys(run.block_hashes, (Tier.HOST,)))
    for tier in work.ctx.tiers.tiers:
        for block in tier.catalog.blocks():
            name = block.block_hash
            tiers[name] = (*tiers.get(name, ()), tier.tier)
    return tiers


def copies_held(work: NodeWork) -> dict[tuple[object, ...], None]:
    """Every copy of a block that can be found on the node, told from later copies of the same block."""
    arena, copies = work.ctx.arena, dict[tuple[object, ...], None]()
    for chain in chains_in_memory(work):
        for slot, block_hash in zip(chain.slots, chain.hashes, strict=True):
            copies["memory", block_hash, slot, int(arena.generations[slot])] = None
    for tier in work.ctx.tiers.tiers:
        for block in tier.catalog.blocks():
            copies[tier.name, block.block_hash, block.epoch] = None
    return copies


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


def depth(names: Container[BlockHash], hashes: Sequence[BlockHash]) -> int:
    """How many of the first of `hashes` are among `names`."""
    return next((index for index, block_hash in enumerate(hashes) if block_hash not in names), len(hashes))

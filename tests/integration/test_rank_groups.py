"""Four tensor-parallel ranks, each with an arena and a pool: their shards are found together and gone together.

Each rank reads back its own heads, and what one of them evicts or finds damaged is absent in all.
"""

from collections.abc import Iterator
from contextlib import ExitStack

import numpy as np
import pytest
from numpy.typing import NDArray

from kv_core.block import BlockGeometry, Layout
from kv_core.dtypes import DType
from kv_core.hashing import hash_tokens
from kv_core.ids import RegionId
from kv_core.namespace import Namespace
from kv_prefix.block_pool import BlockPool
from kv_prefix.errors import NoSpaceError
from kv_prefix.groups import GroupMatch, GroupPool
from kv_transport import Arena

TP, HEADS, LAYERS, DIM, BLOCK = 4, 8, 2, 4, 4
NS = Namespace("model", "main", dtype=DType.FP16, block_size=BLOCK)
SLOTS = (8, 8, 6, 8)
"""Rank 2 has less memory than the others, so it is the one that evicts."""

Whole = NDArray[np.float16]
"""KV of some blocks before it is cut: `(blocks, layers, 2, HEADS, BLOCK, DIM)`."""


class Ranks:
    """What an engine with tensor parallelism would have."""

    def __init__(self, arenas: list[Arena]) -> None:
        self.arenas = arenas
        pools = [BlockPool(arena.num_slots, BLOCK, region=RegionId(rank)) for rank, arena in enumerate(arenas)]
        self.group = GroupPool(pools)

    def find(self, tokens: list[int]) -> GroupMatch:
        return self.group.match(NS.digest, hash_tokens(NS, tokens), [*tokens, 0])

    def store(self, tokens: list[int], whole: Whole) -> None:
        """Each rank writes its two heads of every block and seals them; then all of them are findable, or none."""
        match, names = self.find(tokens), hash_tokens(NS, tokens)
        first = match.num_blocks
        table = self.group.open("request", match, len(names) - first)
        heads = HEADS // TP
        for rank, (arena, opened) in enumerate(zip(self.arenas, table.ranks, strict=True)):
            for i, ref in enumerate(opened.refs[first:], first):
                arena.raise_generation(ref.slot, ref.generation)
                for layer in range(LAYERS):
                    part = whole[i, layer, :, rank * heads : (rank + 1) * heads]
                    arena.kv(layer)[ref.slot] = part.view(arena.kv(layer).dtype)
                arena.seal_block(ref.slot)
        self.group.commit(table.receipt, NS.digest, first, names[first:], tokens[first * BLOCK :])
        self.group.release(table.receipt)

    def read(self, match: GroupMatch) -> Whole:
        """The heads of all ranks joined again."""
        parts = []
        for arena, part in zip(self.arenas, match.ranks, strict=True):
            slots = [ref.slot for ref in part.refs]
            assert all(arena.verify(slot) for slot in slots)
            parts.append(np.stack([arena.kv(layer)[slots].view(np.float16) for layer in range(LAYERS)], axis=1))
        return np.concatenate(parts, axis=3)


@pytest.fixture
def ranks() -> Iterator[Ranks]:
    geometry = BlockGeometry(LAYERS, HEADS // TP, DIM, DType.FP16, BLOCK)
    with ExitStack() as stack:
        yield Ranks([stack.enter_context(Arena.create(geometry, slots, Layout.LAYER_FIRST)) for slots in SLOTS])


def kv_of(seed: int, num_blocks: int) -> tuple[list[int], Whole]:
    values = np.random.default_rng(seed).standard_normal((num_blocks, LAYERS, 2, HEADS, BLOCK, DIM))
    return [seed * 100 + i for i in range(num_blocks * BLOCK)], values.astype(np.float16)


def test_each_rank_reads_back_its_own_heads_and_a_longer_prompt_goes_on_from_the_shared_blocks(ranks: Ranks) -> None:
    tokens, whole = kv_of(1, 5)
    ranks.store(tokens[: 3 * BLOCK], whole)
    assert np.array_equal(ranks.read(ranks.find(tokens)), whole[:3])
    ranks.store(tokens, whole)
    match = ranks.find(tokens)
    assert match.num_blocks == 5 and np.array_equal(ranks.read(match), whole)
    assert {pool.stats().cached for pool in ranks.group.pools} == {5}


def test_what_the_smallest_rank_evicts_is_evicted_everywhere_and_its_bound_is_the_group_s(ranks: Ranks) -> None:
    (first, one), (second, two) = kv_of(1, 4), kv_of(2, 4)
    ranks.store(first, one)
    ranks.store(second, two)
    assert (ranks.find(first).num_blocks, ranks.find(second).num_blocks) == (2, 4)
    assert np.array_equal(ranks.read(ranks.find(first)), one[:2])
    before = ranks.group.stats()
    with pytest.raises(NoSpaceError):
        ranks.group.open("request", None, 7)
    assert ranks.group.stats() == before
    ranks.group.check()


def test_one_damaged_shard_makes_its_block_and_what_follows_absent_in_every_rank(ranks: Ranks) -> None:
    tokens, whole = kv_of(1, 4)
    ranks.store(tokens, whole)
    bad = ranks.find(tokens).ranks[3].refs[1]
    ranks.arenas[3].cell(bad.slot, 1)[0] ^= 1
    assert not ranks.arenas[3].verify(bad.slot)
    ranks.group.drop(hash_tokens(NS, tokens)[1])
    match = ranks.find(tokens)
    assert match.num_blocks == 1 and np.array_equal(ranks.read(match), whole[:1])
    assert {pool.stats().cached for pool in ranks.group.pools} == {1}
    # Computed again it is whole again.
    ranks.store(tokens, whole)
    assert np.array_equal(ranks.read(ranks.find(tokens)), whole)

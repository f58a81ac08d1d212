"""The way down: what waits, what is held while it is written, what is absent when that fails."""

from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kv_core.hashing import hash_tokens, token_bytes
from kv_core.ids import RegionId
from kv_prefix.block_pool import BlockPool
from kv_prefix.errors import NoSpaceError
from kv_prefix.tiers.catalog import TierCatalog
from kv_prefix.tiers.cost import RETRY_AFTER, TierCost
from kv_prefix.tiers.spill import SpillBatch, SpillQueue, places_of
from tests.prefix.helpers_tiers import BLOCK_SIZE, NS, chain, names_of, prompt

CHECKS = bytes(24)


class Node:
    """A pool and a tier, with memory and medium as lists of block names."""

    def __init__(self, num_slots: int, num_places: int, max_in_flight: int = 4) -> None:
        self.pool = BlockPool(num_slots, BLOCK_SIZE, region=RegionId(1))
        self.catalog = TierCatalog(num_places)
        self.queue = SpillQueue(self.pool, self.catalog, max_in_flight)
        self.memory: dict[int, bytes] = {}
        self.medium: dict[int, bytes] = {}
        self.under_way: list[SpillBatch] = []

    def compute(self, tokens: list[int]) -> None:
        """A request that runs and ends."""
        names = hash_tokens(NS, tokens)
        match = self.pool.match(NS.digest, names, [*tokens, 0])
        first = len(match.refs)
        opened = self.pool.open("r", match, len(names) - first, use_partial=False)
        for ref, name in zip(opened.refs[first:], names[first:], strict=True):
            self.memory[ref.slot] = name.sequence
        self.pool.commit(opened.table, NS.digest, first, names[first:], tokens[first * BLOCK_SIZE :])
        self.pool.release(opened.table)
        self.queue.observe(self.pool.take_events())

    def begin(self, max_blocks: int = 8) -> None:
        batch = self.queue.next_batch(max_blocks, lambda slot: CHECKS)
        if batch is not None:
            self.under_way.append(batch)

    def finish(self, batch: SpillBatch, ok: bool = True) -> None:
        # The bytes are read at the very end of the write: the latest that they may be.
        for item, ref in places_of(batch):
            self.medium[item.place] = self.memory[ref.slot]
        self.queue.done(batch, ok=ok)
        self.queue.observe(self.pool.take_events())

    def drain(self) -> None:
        while self.under_way or len(self.queue):
            self.begin()
            while self.under_way:
                self.finish(self.under_way.pop())

    def check(self) -> None:
        self.pool.check()
        self.catalog.check()
        for batch in self.under_way:
            for item, ref in places_of(batch):
                assert self.memory[ref.slot] == item.block.sequence, "a block was overwritten while its spill ran"
        for block in self.catalog.blocks():
            (placed,) = self.catalog.begin_load([block])
            assert self.medium[placed.place] == block.sequence
            self.catalog.end_load([placed])


@settings(max_examples=60)
@given(
    num_slots=st.integers(6, 12),
    run=st.lists(st.tuples(st.sampled_from(["compute", "begin", "finish", "fail"]), st.integers(0, 30)), max_size=40),
)
def test_a_block_is_never_overwritten_while_its_spill_runs_and_a_failed_one_is_absent(
    num_slots: int, run: list[tuple[str, int]]
) -> None:
    node = Node(num_slots, 10)
    for kind, pick in run:
        if kind == "compute":
            try:
                node.compute(prompt(pick % 5, 1 + pick % 4, shared_blocks=pick % 2))
            except NoSpaceError:
                assert node.under_way
        elif kind == "begin":
            node.begin()
            assert node.queue.in_flight <= 4, "P2"
        elif node.under_way:
            batch = node.under_way.pop(pick % len(node.under_way))
            node.finish(batch, ok=kind == "finish")
            if kind == "fail":
                assert not any(node.catalog.get(item.block.block_hash) for item in batch.plan.writes)
        node.check()
        assert len(node.queue) <= num_slots, "P3"
    while node.under_way:
        node.finish(node.under_way.pop())
    node.drain()
    node.check()
    assert node.queue.in_flight == 0 and not node.pool.holds()


def test_pressure_during_a_spill_takes_other_blocks_or_is_refused() -> None:
    node = Node(8, 64)
    node.compute(prompt(1, 8))
    node.begin(max_blocks=4)
    node.compute(prompt(2, 4))
    node.check()
    with pytest.raises(NoSpaceError):
        node.compute(prompt(3, 5))
    node.finish(node.under_way.pop())
    node.check()
    assert len(node.catalog.blocks()) == 4
    node.compute(prompt(3, 5))


def test_what_was_evicted_from_memory_is_found_below_it_with_the_whole_prefix_compared() -> None:
    node = Node(8, 64)
    for seed in range(10):
        node.compute(prompt(seed, 4))
        node.drain()
    for seed in range(10):
        tokens = prompt(seed, 4)
        blocks = chain(tokens)
        found = node.catalog.match(NS.digest, names_of(blocks), token_bytes(tokens), {}, 0)
        assert [(b.sequence, b.prefix_digest, b.tokens) for b in found] == [
            (b.sequence, b.prefix_digest, b.tokens) for b in blocks
        ]
    assert node.queue.stats.missed == 0


def test_what_is_evicted_before_its_turn_is_counted_and_not_written() -> None:
    node = Node(8, 64)
    for seed in range(4):
        node.compute(prompt(seed, 4))
    assert node.queue.stats.missed == 8
    node.drain()
    assert node.queue.stats.spilled == 8


def test_what_is_below_already_is_not_written_again() -> None:
    node = Node(8, 64)
    node.compute(prompt(1, 4))
    node.drain()
    node.compute(prompt(2, 8))
    node.drain()
    spilled = node.queue.stats.spilled
    node.compute(prompt(1, 4))
    node.drain()
    assert node.queue.stats.spilled == spilled


def test_a_block_that_is_not_sealed_is_not_spilled() -> None:
    node = Node(8, 64)
    node.compute(prompt(1, 2))
    assert node.queue.next_batch(8, lambda slot: None) is None
    assert node.queue.stats.unsealed == 2


def test_a_tier_slower_than_computing_is_skipped_and_says_so() -> None:
    cost = TierCost("disk", block_nbytes=1000, ns_per_byte=1.0, overhead_ns=1000)
    assert cost.choose(10, compute_ns_per_block=1e6).num_blocks == 10
    # Loads that take 40 s where computing takes 1 s.
    for _ in range(20):
        cost.loaded(10_000, 40_000_000_000)
    choice = cost.choose(10, compute_ns_per_block=1e8)
    assert choice.num_blocks == 0
    assert choice.reason.startswith("compute: 10 blocks take ") and "1000.0 ms to compute" in choice.reason


def test_a_skipped_tier_is_tried_again_and_comes_back_when_it_is_fast() -> None:
    cost = TierCost("disk", block_nbytes=1000, ns_per_byte=1000.0, overhead_ns=0)
    choices = [cost.choose(100, compute_ns_per_block=1e4) for _ in range(RETRY_AFTER)]
    assert [choice.num_blocks > 0 for choice in choices] == [False] * (RETRY_AFTER - 1) + [True]
    for _ in range(40):
        cost.loaded(8_000, 8_000)
    assert cost.choose(100, compute_ns_per_block=1e4).num_blocks == 100


def test_rates_follow_what_loads_really_took() -> None:
    cost, random = TierCost("disk", 1000, ns_per_byte=5.0, overhead_ns=10_000), Random(1)
    for _ in range(400):
        nbytes = random.randrange(1_000, 1_000_000)
        cost.loaded(nbytes, int(100_000 + 0.5 * nbytes))
    for num_blocks in (1, 30, 1000):
        true = 100_000 + 0.5 * 1000 * num_blocks
        assert 0.5 * true < cost.load_ns(num_blocks) < 2 * true

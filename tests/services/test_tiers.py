"""A node's tiers over a real pool, arena and replica, with a medium that the test can stop, fail and fill."""

import asyncio
import dataclasses
import itertools
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from random import Random

import pytest
import pytest_asyncio

from kv_consistency.manager import KvCacheConsistencyManager
from kv_consistency.replica import ReplicaConfig
from kv_consistency.update import scope_id
from kv_core.clock import SystemClock
from kv_core.hashing import hash_tokens, token_bytes
from kv_core.ids import Incarnation
from kv_prefix.events import Tier
from kv_prefix.prefix_index import PrefixIndex
from kv_prefix.tiers.blocks import PlacedBlock
from kv_prefix.tiers.disk import DiskShape, DiskStore
from kv_prefix.tiers.errors import TierFullError, TierIOError
from kv_services.node import tiers as tiers_module
from kv_services.node.purge_watch import PurgeWatch
from kv_services.node.tier import Opened
from kv_services.purge_file import PurgeFile, PurgeFileError
from kv_services.replica.service import ReplicaService
from tests.services.helpers_node_tiers import GEOMETRY, NODE, NS, Life, Medium, Node, prompt, tier_blocks


@pytest_asyncio.fixture
async def node() -> AsyncIterator[Node]:
    node = Node()
    yield node
    node.medium.gate.set()
    await node.tiers.close()
    assert not node.pool.holds()
    node.pool.check()
    node.arena.close()


async def evicted(node: Node) -> list[int]:
    """A prompt of 4 blocks that is on disk and no more in memory."""
    tokens = prompt(1, 4)
    await node.push_down(tokens, range(2, 6))
    return tokens


async def test_what_was_spilled_comes_back_as_it_was_and_the_index_knows_the_tier(node: Node) -> None:
    tokens = await evicted(node)
    assert node.tiers_of(tokens) == (0, 0, 4, 0)
    assert await node.promote(tokens) == 4
    assert node.in_memory(tokens) == 4
    assert node.tiers_of(tokens) == (0, 4, 0, 0)
    assert "load: 4 blocks" in node.disk.choice


async def test_a_thousand_blocks_come_back_from_a_real_disk_as_they_were_through_a_full_pool(
    node: Node, tmp_path: Path
) -> None:
    """Every block was evicted, and every one is compared."""
    shape = DiskShape(GEOMETRY.slot_layer_nbytes, GEOMETRY.num_layers, 4, "test")
    node.tiers.tiers.clear()
    await node.disk.close()
    node.disk = node.tier(Tier.DISK, Opened.of(*DiskStore.open(tmp_path, shape, 4 << 20)))
    node.tiers.add(node.disk)
    node.disk.start(lambda block: True)
    for _ in range(100):
        # However long this machine's disk takes, computing takes longer.
        node.cost.computed(1, 10**12)
    seeds = list(range(1, 251))
    for seed in seeds:
        node.compute(prompt(seed, 4))
        await node.at_rest()
    Random(5).shuffle(seeds)
    for seed in seeds:
        found = node.in_memory(prompt(seed, 4))
        assert await node.promote(prompt(seed, 4)) == 4 - found
        assert node.in_memory(prompt(seed, 4)) == 4
    assert node.disk.counts().absent == 0 and node.disk.counts().spilled == 1000


async def test_a_read_that_never_returns_is_given_up_and_its_slots_stay_its_own(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokens = await evicted(node)
    monkeypatch.setattr(tiers_module, "LOAD_TIMEOUT_NS", 20_000_000)
    node.medium.gate.clear()
    assert await node.promote(tokens) == 0
    # The prompt goes on; what the thread may still write is nobody else's.
    assert node.pool.stats().pinned == 4
    assert "timeout" in node.metrics.expose(0).decode()
    node.medium.gate.set()
    async with asyncio.timeout(20):
        while node.pool.stats().pinned:  # noqa: ASYNC110 - a thread ends it
            await asyncio.sleep(0.005)
    # It came after all.
    assert node.in_memory(tokens) == 4


async def test_a_short_load_gives_what_came_before_and_the_rest_is_absent(node: Node) -> None:
    tokens = await evicted(node)
    block = node.disk.catalog.get(hash_tokens(NS, tokens)[2])
    assert block is not None
    (placed,) = node.disk.catalog.begin_load([block])
    node.disk.catalog.end_load([placed])
    del node.medium.places[placed.place]
    assert await node.promote(tokens) == 2
    assert node.in_memory(tokens) == 2
    assert node.disk.counts().absent == 1
    assert node.tiers_of(tokens) == (0, 2, 0, 0)


async def test_two_prompts_with_one_beginning_load_it_once(node: Node) -> None:
    tokens = await evicted(node)
    before = node.medium.reads
    assert list(await asyncio.gather(node.promote(tokens), node.promote(tokens))) == [4, 4]
    assert node.medium.reads == before + 1


async def test_a_tier_slower_than_computing_is_left_alone(node: Node) -> None:
    tokens = await evicted(node)
    for _ in range(30):
        node.disk.cost.loaded(10_000, 40_000_000_000)
    before = node.medium.reads
    assert await node.promote(tokens) == 0
    assert node.medium.reads == before and node.disk.choice.startswith("compute: ")


async def test_a_medium_that_fails_loses_no_request_and_counts(node: Node) -> None:
    node.medium.error = TierIOError(where="medium", reason="broken")
    node.compute(prompt(1, 4))
    await node.at_rest()
    assert node.disk.counts().failed == 4 and node.disk.counts().blocks == 0
    assert node.tiers_of(prompt(1, 4)) == (0, 4, 0, 0)
    node.medium.error = TierFullError(where="medium", reason="no space")
    node.compute(prompt(2, 4))
    await node.at_rest()
    assert node.disk.counts().full
    node.medium.error = None
    node.compute(prompt(3, 4))
    await node.at_rest()
    assert not node.disk.counts().full and node.disk.counts().blocks > 0


async def test_a_slot_is_not_reused_while_its_block_is_being_written(node: Node) -> None:
    node.medium.gate.clear()
    tokens = prompt(1, 4)
    node.compute(tokens)
    for seed in range(2, 8):
        node.compute(prompt(seed, 4))
    assert node.in_memory(tokens) == 4
    node.medium.gate.set()
    await node.at_rest()
    assert node.disk.catalog.get(hash_tokens(NS, tokens)[0]) is not None


@pytest.mark.parametrize(
    "scope",
    [NS.digest, scope_id("tenant", "mark"), scope_id("weights", "model@weights"), scope_id("model", "model")],
    ids=["namespace", "tenant", "weights", "model"],
)
async def test_a_purge_empties_memory_and_disk_and_what_comes_later_stays(node: Node, scope: bytes) -> None:
    tokens = await evicted(node)
    node.replica.purge([scope])
    # Before the next tick already nothing of it is promoted.
    assert await node.promote(tokens) == 0
    node.tiers.tick()
    assert node.pool.stats().cached == 0 and node.disk.counts().blocks == 0
    assert node.tiers_of(tokens) == (0, 0, 0, 0)
    node.compute(tokens)
    await node.at_rest()
    node.tiers.tick()
    assert node.in_memory(tokens) == 4 and node.disk.counts().blocks == 4


async def test_namespaces_that_come_and_go_are_not_watched_for_ever_and_what_is_held_is_purged(node: Node) -> None:
    """A client may name a namespace for each of its requests."""
    node.tiers.watch = PurgeWatch(node.replica.manager, node.tiers._holds, watched_min=8)
    held = await evicted(node)
    node.disk.catalog.purge(lambda block: block.sequence not in {name.sequence for name in hash_tokens(NS, held)})
    watched = 0
    for number in range(200):
        node.compute(prompt(1, 1), dataclasses.replace(NS, salt=f"mark.{number}"))
        await node.at_rest()
        watched = max(watched, len(node.tiers.watch))
    # 16 slots and 64 places: no more can be held, and as many again may wait to be looked at.
    assert watched <= 2 * (16 + 64) + 1
    last = dataclasses.replace(NS, salt="mark.199")
    node.replica.purge([scope_id("tenant", "mark")])
    node.tiers.tick()
    assert not node.pool.has_any(last.digest) and not node.disk.catalog.has_any(last.digest)
    assert node.pool.stats().cached == 0 and node.disk.counts().blocks == 0
    node.disk.catalog.check()


async def test_a_purge_during_a_load_leaves_nothing_behind(node: Node) -> None:
    tokens = await evicted(node)
    node.medium.gate.clear()
    before = node.medium.reads
    load = asyncio.get_running_loop().create_task(node.promote(tokens))
    async with asyncio.timeout(20):
        while node.medium.reads == before:  # noqa: ASYNC110 - a thread begins it
            await asyncio.sleep(0.005)
    node.replica.purge([NS.digest])
    node.tiers.tick()
    node.medium.gate.set()
    await load
    assert node.in_memory(tokens) == 0 and node.disk.counts().blocks == 0


async def test_a_reader_s_lease_brings_a_prefix_up_by_its_name(node: Node) -> None:
    tokens = await evicted(node)
    last = hash_tokens(NS, tokens)[-1]
    assert await node.tiers.promote_named(last, node.clock.monotonic_ns() + 10**10) == 4
    assert node.pool.prefix(last) is not None
    assert node.in_memory(tokens) == 4


async def test_a_prefix_longer_than_one_load_comes_up_whole_and_what_misses_a_block_does_not(node: Node) -> None:
    tokens = prompt(1, 10)
    await node.push_down(tokens, range(2, 6))
    names = hash_tokens(NS, tokens)
    assert len(await node.tiers.everything()) == 26
    deadline_ns = node.clock.monotonic_ns() + 10**10
    before = node.medium.reads
    assert await node.tiers.bring_up(names, deadline_ns)
    # At most a quarter of the 16 slots is loaded at a time.
    assert node.in_memory(tokens) == 10 and node.medium.reads == before + 3
    # The disk goes with its node.
    assert not node.tiers.outlives(names)
    node.disk.purge(lambda block: block.sequence == names[5].sequence)
    node.pool.purge(NS.digest)
    node.flush()
    assert not await node.tiers.bring_up(names, deadline_ns)
    assert node.in_memory(tokens) in (0, 4)


async def test_a_long_prompt_is_put_together_from_several_tiers() -> None:
    node = Node(slots=2_800, num_places=800)
    medium = Medium(800)
    remote = node.tier(Tier.REMOTE, Opened.of(medium, []))
    node.tiers.add(remote)
    tokens = prompt(1, 700)
    node.compute(tokens)
    await node.at_rest()
    async with asyncio.timeout(20):
        while len(remote.queue) or remote.queue.in_flight:  # noqa: ASYNC110 - threads end it
            await asyncio.sleep(0.005)
    holes = {name.sequence for name in hash_tokens(NS, tokens)[600:605]}
    node.disk.purge(lambda block: block.sequence in holes)
    remote.purge(lambda block: block.block_idx > 650)
    node.pool.purge(NS.digest)
    node.flush()
    assert node.tiers.below(NS, hash_tokens(NS, tokens), token_bytes([*tokens, 0]), 0) == (600 + 49, 51)
    assert await node.promote(tokens) == 700
    assert node.in_memory(tokens) == 700 and medium.reads == 1
    await node.tiers.close()
    node.arena.close()


async def test_a_closing_node_writes_what_waits(node: Node) -> None:
    node.medium.gate.clear()
    for seed in range(1, 4):
        node.compute(prompt(seed, 4))
    asyncio.get_running_loop().call_later(0.05, node.medium.gate.set)
    await node.tiers.close()
    assert node.disk.counts().blocks == 12


async def test_a_store_that_answers_later_gets_what_memory_held_before(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tiers_module, "OPEN_AGAIN_NS", 0)
    tries: list[int] = []

    def open_store() -> Opened:
        tries.append(1)
        if len(tries) < 3:
            raise TierIOError(where="store", reason="not yet")
        return Opened.of(Medium(), [])

    tokens = prompt(1, 4)
    node.compute(tokens)
    node.tiers.open_later(open_store, lambda opened: node.tier(Tier.REMOTE, opened))
    told: list[str] = []
    async with asyncio.timeout(20):
        while node.tiers.counts().get("remote", node.disk.counts()).blocks < 4 or len(node.tiers.tiers) < 2:
            node.tiers.tick()
            told += node.tiers.problems()
            await asyncio.sleep(0.005)
    assert set(told) == {"a tier is not open, which is tried again: store failed: not yet"}
    assert not node.tiers.problems()
    # A prompt that left memory and disk comes back from there.
    node.pool.purge(NS.digest)
    node.flush()
    node.disk.purge(lambda block: True)
    assert node.tiers_of(tokens) == (0, 0, 0, 4)
    assert await node.promote(tokens) == 4
    assert node.in_memory(tokens) == 4


class Hasty(SystemClock):
    """A millisecond goes by each time that somebody looks: every slice of work uses its turn up."""

    def __init__(self) -> None:
        super().__init__()
        self._looks = 0

    def monotonic_ns(self) -> int:
        self._looks += 1
        return super().monotonic_ns() + self._looks * 1_000_000


async def test_many_blocks_are_announced_and_purged_a_slice_at_a_turn_of_the_loop(node: Node) -> None:
    tokens = [i % 50_000 for i in range(4 * 1_500)]
    blocks = tier_blocks(node, tokens)
    medium = Medium(len(blocks))
    node.clock = Hasty()
    tier = node.tier(Tier.REMOTE, Opened.of(medium, [PlacedBlock(i, block) for i, block in enumerate(blocks)]))
    node.tiers.add(tier)

    async def turns_until(blocks_left: Callable[[], int], wanted: int) -> list[int]:
        seen = [blocks_left()]
        while seen[-1] != wanted:
            await asyncio.sleep(0)
            if blocks_left() != seen[-1]:
                seen.append(blocks_left())
        return seen

    tier.start(lambda block: block.block_idx < 1_400)
    seen = await turns_until(lambda: node.tiers_of(tokens)[3], 1_400)
    assert len(seen) > 5 and max(b - a for a, b in itertools.pairwise(seen)) <= 256
    assert tier.counts().blocks == 1_400
    node.replica.purge([NS.digest])
    node.tiers.tick()
    seen = await turns_until(lambda: tier.counts().blocks, 0)
    assert len(seen) > 5 and max(a - b for a, b in itertools.pairwise(seen)) <= 256
    assert await node.promote(tokens[: 4 * 8]) == 0


async def test_purges_outlive_the_process_beside_the_blocks(node: Node, tmp_path: Path) -> None:
    file = PurgeFile(tmp_path, "node")
    node.tiers.keep_purges(file)
    node.replica.purge([NS.digest])
    node.tiers.tick()
    async with asyncio.timeout(20):
        while not file.load():  # noqa: ASYNC110 - a thread writes it
            await asyncio.sleep(0.005)
    settings = ReplicaConfig(raises=file.load())
    later = ReplicaService(
        KvCacheConsistencyManager(NODE, Incarnation(2), settings), node.clock, PrefixIndex(), Life(), node.metrics
    )
    later.prime()
    # The next purge exceeds what blocks from before carry.
    assert later.manager.namespace_epoch(later.know(NS)) == 1
    (tmp_path / "node.purges").write_bytes(b"\x00" * 40)
    with pytest.raises(PurgeFileError):
        file.load()

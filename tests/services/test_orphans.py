"""What a node left in the remote tier, taken over by a node that lives: over a real folder as the store."""

import asyncio
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest_asyncio

from kv_core.hashing import hash_tokens
from kv_core.ids import NodeId
from kv_prefix.events import Tier
from kv_prefix.tiers.blocks import PlacedBlock, TierBlock, pack_checks
from kv_prefix.tiers.disk import DiskShape
from kv_prefix.tiers.remote import RemoteStore
from kv_services.membership.state import Liveness
from kv_services.node.orphans import Orphans, Peers
from kv_services.node.tier import NodeTier, Opened
from tests.services.helpers_node_tiers import GEOMETRY, NODE, NS, Node, prompt, tier_blocks

SHAPE = DiskShape(GEOMETRY.slot_layer_nbytes, GEOMETRY.num_layers, GEOMETRY.block_size, "test")
ROOM = SHAPE.block_nbytes + SHAPE.record_nbytes
LOST = NodeId("lost")


class Members:
    """Who lives, as the test says."""

    def __init__(self) -> None:
        self.liveness: dict[NodeId, Liveness] = {LOST: Liveness.DEAD}
        self.living: list[NodeId] = []

    def peers(self) -> Peers:
        return Peers(
            living=lambda: self.living,
            liveness=self.liveness.get,
            gone=lambda: frozenset(n for n, liveness in self.liveness.items() if liveness is Liveness.DEAD),
        )


class Cluster:
    """One node with a remote tier, and a folder in which another one left prompts."""

    def __init__(self, folder: Path) -> None:
        self.url = f"file://{folder}"
        self.files = folder
        self.node = Node()
        self.members = Members()
        self.stores: list[RemoteStore] = []
        self.orphans: list[Orphans] = []

    def leave_behind(self, seeds: range, folder: str = LOST) -> list[TierBlock]:
        """What a node computed and stored before it went."""
        other = Node()
        store, held = RemoteStore.open(self.url, folder, SHAPE, 64 * ROOM)
        place = len(held)
        blocks = []
        for seed in seeds:
            tokens = prompt(seed, 4)
            other.compute(tokens)
            refs = other.pool.match(NS.digest, hash_tokens(NS, tokens), [*tokens, 0]).refs
            checks = [pack_checks(other.arena.block_checks(ref.slot)) for ref in refs]
            for block, ref in zip(tier_blocks(other, tokens, checks), refs, strict=True):
                store.write(
                    [(PlacedBlock(place, block), [other.arena.cell(ref.slot, i) for i in range(SHAPE.num_layers)])]
                )
                blocks.append(block)
                place += 1
        store.close()
        return blocks

    def open(self, num_blocks: int = 64, abandoned_after_s: float = 600, name: NodeId = NODE) -> NodeTier:
        store, held = RemoteStore.open(self.url, name, SHAPE, num_blocks * ROOM, "", abandoned_after_s)
        tier = self.node.tier(Tier.REMOTE, Opened.of(store, held))
        self.stores.append(store)
        args = store, tier, self.members.peers(), self.node.clock, self.node.tiers.may_serve
        self.orphans.append(Orphans(name, *args, abandoned_after_s=abandoned_after_s))
        self.node.tiers.add(tier)
        tier.start(lambda block: True)
        return tier

    async def until(self, done: Callable[[], bool]) -> None:
        async with asyncio.timeout(20):
            while not done():
                for orphans in self.orphans:
                    orphans.tick()
                await asyncio.sleep(0.01)

    async def looked(self) -> None:
        """One whole look around of everybody."""
        for orphans in self.orphans:
            orphans._next_ns = 0
            orphans.tick()
        async with asyncio.timeout(20):
            while any(orphans._task is not None for orphans in self.orphans):  # noqa: ASYNC110 - a thread ends it
                await asyncio.sleep(0.005)

    def records(self, folder: str = LOST) -> int:
        return len(list(self.files.glob(f"{folder}/*.meta")))


@pytest_asyncio.fixture
async def cluster(tmp_path: Path) -> AsyncIterator[Cluster]:
    cluster = Cluster(tmp_path)
    # Only the tier under test: what the node stores itself would be found on its disk.
    cluster.node.tiers.tiers.clear()
    yield cluster
    for orphans in cluster.orphans:
        await orphans.close()
    await cluster.node.tiers.close()
    await cluster.node.disk.close()
    assert not cluster.node.pool.holds()
    cluster.node.arena.close()


async def test_what_a_dead_node_left_is_claimed_found_and_loaded(cluster: Cluster) -> None:
    cluster.leave_behind(range(1, 3))
    tier = cluster.open()
    await cluster.until(lambda: tier.counts().blocks == 8)
    assert cluster.node.tiers_of(prompt(1, 4)) == (0, 0, 0, 4)
    assert await cluster.node.promote(prompt(1, 4)) == 4
    assert cluster.node.in_memory(prompt(1, 4)) == 4
    assert tier.counts().absent == 0 and cluster.records() == 8


async def test_a_node_that_is_back_has_all_it_left(cluster: Cluster) -> None:
    cluster.leave_behind(range(1, 3))
    tier = cluster.open()
    await cluster.until(lambda: tier.counts().blocks == 8)
    cluster.members.liveness[LOST] = Liveness.ALIVE
    await cluster.until(lambda: tier.counts().blocks == 0)
    assert cluster.node.tiers_of(prompt(1, 4)) == (0, 0, 0, 0)
    store, held = RemoteStore.open(cluster.url, LOST, SHAPE, 64 * ROOM)
    assert len(held) == 8
    store.close()
    # And when it goes again, it is all there again.
    cluster.members.liveness[LOST] = Liveness.DEAD
    await cluster.until(lambda: tier.counts().blocks == 8)


async def test_nodes_that_live_or_were_never_seen_keep_what_is_theirs(cluster: Cluster) -> None:
    for folder, liveness in (("a", Liveness.ALIVE), ("b", Liveness.SUSPECT), ("c", Liveness.UNSEEN), ("d", None)):
        cluster.leave_behind(range(1, 2), folder)
        if liveness is not None:
            cluster.members.liveness[NodeId(folder)] = liveness
    tier = cluster.open()
    await cluster.looked()
    assert tier.counts().blocks == 0
    assert [cluster.records(folder) for folder in "abcd"] == [4] * 4


async def test_what_was_purged_or_belongs_to_nobody_any_more_is_not_taken(cluster: Cluster) -> None:
    kept = cluster.leave_behind(range(1, 2))
    cluster.leave_behind(range(2, 3))
    cluster.node.tiers.keep_only(lambda block: block in kept)
    tier = cluster.open()
    await cluster.looked()
    assert tier.counts().blocks == 4 and cluster.node.tiers_of(prompt(2, 4)) == (0, 0, 0, 0)
    cluster.node.replica.purge([NS.digest])
    cluster.node.tiers.tick()
    await cluster.looked()
    assert tier.counts().blocks == 0 and await cluster.node.promote(prompt(1, 4)) == 0
    # Its node may be back: it purges by itself what is left there.
    assert cluster.records() == 8


async def test_only_what_fits_is_taken_beginnings_first_and_the_rest_waits_for_its_node(cluster: Cluster) -> None:
    cluster.leave_behind(range(1, 3))
    tier = cluster.open(num_blocks=5)
    await cluster.looked()
    assert tier.counts().blocks == 5 and cluster.records() == 8
    assert sorted(block.block_idx for block in tier.catalog.blocks()) == [0, 0, 1, 1, 2]


async def test_when_its_node_is_gone_for_long_what_finds_no_room_is_deleted(cluster: Cluster) -> None:
    cluster.leave_behind(range(1, 3))
    tier = cluster.open(num_blocks=5, abandoned_after_s=1)
    await cluster.until(lambda: cluster.records() == 5)
    assert tier.counts().blocks == 5
    # What was taken goes with whoever needs the room, object and all.
    for seed in (3, 4):
        cluster.node.compute(prompt(seed, 4))
    await cluster.until(lambda: cluster.records() <= 1 and tier.counts().blocks == 5)
    assert cluster.records() + cluster.records(NODE) == 5


async def test_who_is_back_after_all_loses_nothing_any_more(cluster: Cluster) -> None:
    cluster.leave_behind(range(1, 3))
    tier = cluster.open(abandoned_after_s=1)
    await cluster.until(lambda: cluster.stores[0].siblings()[0].abandoned)
    await cluster.until(lambda: tier.counts().blocks == 8)
    cluster.members.liveness[LOST] = Liveness.ALIVE
    await cluster.until(lambda: tier.counts().blocks == 0)
    await tier.close()
    assert cluster.records() == 8


async def test_one_node_takes_a_prefix_over_and_all_of_them_are_taken(cluster: Cluster) -> None:
    names = [NodeId(f"n-{i}") for i in range(3)]
    lost = [NodeId(f"lost-{i}") for i in range(6)]
    for number, folder in enumerate(lost):
        cluster.leave_behind(range(10 + number, 11 + number), folder)
        cluster.members.liveness[folder] = Liveness.DEAD
    cluster.members.living = names
    tiers = [cluster.open(name=name) for name in names]
    await cluster.looked()
    taken = [tier.counts().blocks for tier in tiers]
    assert sum(taken) == 24 and max(taken) < 24
    # One of them goes: the others take over what it had taken, and nothing else moves.
    mine = {folder: tier for folder in lost for tier in tiers if folder in cluster.orphans[tiers.index(tier)]._adopted}
    cluster.members.living = names[1:]
    cluster.members.liveness[names[0]] = Liveness.DEAD
    await cluster.orphans.pop(0).close()
    await cluster.looked()
    assert sum(tier.counts().blocks for tier in tiers[1:]) == 24
    assert all(tier is tiers[0] or tier.counts().blocks >= 4 for tier in mine.values())

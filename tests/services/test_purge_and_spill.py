"""A purge that comes while the same blocks are on their way down: nothing of them is readable in any tier afterwards.

Real media: a disk tier and a remote tier in a folder, each of which a test can hold up before it writes a batch and
after it has written it. What a process that is killed at such an instant leaves is a copy of both folders.
"""

import asyncio
import shutil
import threading
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from kv_consistency.update import scope_id
from kv_core.hashing import hash_tokens
from kv_prefix.events import Tier
from kv_prefix.tiers.blocks import PlacedBlock
from kv_prefix.tiers.disk import DiskShape, DiskStore
from kv_prefix.tiers.remote import RemoteStore
from kv_prefix.tiers.store import Cells, TierStore
from kv_services.config import ModelSection
from kv_services.launch import PortReservation, local_config
from kv_services.node.purge_watch import PurgeWatch
from kv_services.node.tier import NodeTier, Opened
from kv_services.node.tier_setup import blocks_to_keep
from tests.services.helpers_node_tiers import GEOMETRY, NS, Node, prompt

pytest.importorskip("obstore")

SHAPE = DiskShape(GEOMETRY.slot_layer_nbytes, GEOMETRY.num_layers, GEOMETRY.block_size, "test")
TOKENS = prompt(1, 8)
"""Twice as many blocks as a tier writes at a time: when the first are being written the others wait."""
SCOPES = {
    "an operator purges everything": scope_id("model", "model"),
    "an operator purges a tenant": scope_id("tenant", "mark"),
    "an operator purges weights": scope_id("weights", "model@weights"),
}


class HeldUp:
    """A medium that waits at `before` and at `after` each batch; everything else goes through at once."""

    def __init__(self, inner: TierStore) -> None:
        self._inner = inner
        self.num_places = inner.num_places
        self.before, self.after = threading.Event(), threading.Event()
        self.reached_before, self.reached_after = threading.Event(), threading.Event()

    def write(self, items: Sequence[tuple[PlacedBlock, Cells]], forget: Sequence[int] = ()) -> None:
        self.reached_before.set()
        assert self.before.wait(30)
        self._inner.write(items, forget)
        self.reached_after.set()
        assert self.after.wait(30)

    def let_go(self) -> None:
        self.before.set()
        self.after.set()

    def forget(self, places: Sequence[int]) -> None:
        self._inner.forget(places)

    def read(self, items: Sequence[tuple[PlacedBlock, Cells]]) -> list[bool]:
        return self._inner.read(items)

    def clear(self) -> None:
        self._inner.clear()

    def used_bytes(self) -> int:
        return self._inner.used_bytes()

    def close(self) -> None:
        self._inner.close()


class Below:
    """A node with both tiers in a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.node = Node()
        self.node.tiers.tiers.clear()
        self.media: list[HeldUp] = []
        self.tiers: list[NodeTier] = []
        for _ in range(100):
            self.node.cost.computed(1, 10**12)  # whatever this machine's disk takes, computing takes longer

    def open(self) -> None:
        for name, medium, held in (
            (Tier.DISK, *DiskStore.open(self.folder / "disk", SHAPE, 1 << 20)),
            (Tier.REMOTE, *RemoteStore.open(f"file://{self.folder}/remote", "node", SHAPE, 1 << 20)),
        ):
            self.media.append(HeldUp(medium))
            tier = self.node.tier(name, Opened.of(self.media[-1], held))
            tier.queue.observe(self.node.pool.snapshot())
            self.tiers.append(tier)
            self.node.tiers.add(tier)
            self.node.tiers._begin(tier)

    async def at_rest(self) -> None:
        async with asyncio.timeout(30):
            while any(tier._jobs or len(tier.queue) for tier in self.tiers):  # noqa: ASYNC110 - threads end it
                await asyncio.sleep(0.002)

    async def nothing_readable(self) -> None:
        """By any way that there is to a block: memory, a promotion, a lease by name, the index, the catalogs."""
        assert self.node.in_memory(TOKENS) == 0
        assert await self.node.promote(TOKENS) == 0
        names = hash_tokens(NS, TOKENS)
        for name in names:
            assert await self.node.tiers.promote_named(name, self.node.clock.monotonic_ns() + 10**10) == 0
        assert self.node.in_memory(TOKENS) == 0 and self.node.pool.stats().cached == 0
        assert self.node.tiers_of(TOKENS) == (0, 0, 0, 0)
        assert await self.node.tiers.everything() == []
        for tier in self.tiers:
            assert not any(tier.catalog.knows(name.sequence) for name in names)
            tier.catalog.check()


@asynccontextmanager
async def life(folder: Path) -> AsyncIterator[Below]:
    below = Below(folder)
    try:
        yield below
    finally:
        for medium in below.media:
            medium.let_go()
        await below.node.tiers.close()
        await below.node.disk.close()
        assert not below.node.pool.holds()
        below.node.pool.check()
        below.node.arena.close()


async def reached(*events: threading.Event) -> None:
    async with asyncio.timeout(30):
        while not all(event.is_set() for event in events):  # noqa: ASYNC110 - threads set it
            await asyncio.sleep(0.002)


async def on_its_way(below: Below, written: bool) -> None:
    """The prompt's first blocks are at the media, before or after their record is; the others wait."""
    below.open()
    for medium in below.media:
        if written:
            medium.before.set()
    below.node.compute(TOKENS)
    await reached(*(medium.reached_after if written else medium.reached_before for medium in below.media))
    assert all(tier.queue.in_flight == 4 and len(tier.queue) == 4 for tier in below.tiers)
    assert below.node.in_memory(TOKENS) == 8


def media_of(folder: Path) -> list[int]:
    """How many blocks lie on each medium, as whoever opens it finds them."""
    found = []
    for store, held in (
        DiskStore.open(folder / "disk", SHAPE, 1 << 20),
        RemoteStore.open(f"file://{folder}/remote", "node", SHAPE, 1 << 20),
    ):
        found.append(len(held))
        store.close()
    return found


@pytest.mark.parametrize("written", [False, True], ids=["before its bytes", "after its record"])
@pytest.mark.parametrize("scope", SCOPES.values(), ids=SCOPES)
async def test_a_purge_during_a_spill_leaves_nothing_readable_also_after_a_restart(
    scope: bytes, written: bool, tmp_path: Path
) -> None:
    async with life(tmp_path / "now") as below:
        await on_its_way(below, written)
        below.node.replica.purge([scope])
        # Heard, and not acted on yet: it is out of reach from below already.
        assert await below.node.promote(TOKENS) == 0
        below.node.tiers.tick()
        assert below.node.in_memory(TOKENS) == 0 and below.node.tiers_of(TOKENS) == (0, 0, 0, 0)
        if written:
            # Killed at this instant: the records stand, the process that would revoke them does not.
            shutil.copytree(tmp_path / "now", tmp_path / "killed")
            assert media_of(tmp_path / "killed") == [4, 4]
        for medium in below.media:
            medium.let_go()
        await below.at_rest()
        await below.nothing_readable()
        # What comes later is as good as ever.
        below.node.compute(TOKENS)
        await below.at_rest()
        below.node.tiers.tick()
        assert below.node.in_memory(TOKENS) == 8
        assert [tier.counts().blocks for tier in below.tiers] == [8, 8]
        below.node.replica.purge([scope])
        below.node.tiers.tick()
        await below.at_rest()
    assert media_of(tmp_path / "now") == [0, 0]
    async with life(tmp_path / "now") as later:
        later.open()
        await later.at_rest()
        await later.nothing_readable()


@pytest.mark.parametrize(
    "heard", ["kept beside the blocks", "from a peer", "and the prompt was computed since", "not: its weights are gone"]
)
async def test_a_process_killed_in_a_purged_spill_serves_nothing_of_it_in_its_next_life(
    heard: str, tmp_path: Path
) -> None:
    async with life(tmp_path / "now") as below:
        await on_its_way(below, written=True)
        below.node.replica.purge([NS.digest])
        below.node.tiers.tick()
        shutil.copytree(tmp_path / "now", tmp_path / "killed")
    assert media_of(tmp_path / "killed") == [4, 4]
    async with life(tmp_path / "killed") as later:
        if heard in ("kept beside the blocks", "and the prompt was computed since"):
            later.node.replica.purge([NS.digest])
            later.node.tiers.tick()
        if heard == "not: its weights are gone":
            with PortReservation() as ports:
                config = local_config(ports, model=ModelSection(id=NS.model_id))
            later.node.tiers.keep_only(blocks_to_keep(config, "newer"))
        if heard == "and the prompt was computed since":
            later.node.compute(TOKENS[:8])
            assert later.node.in_memory(TOKENS[:8]) == 2
        later.open()
        if heard == "from a peer":
            assert [tier.counts().blocks for tier in later.tiers] == [4, 4]
            later.node.replica.purge([NS.digest])
            assert await later.node.promote(TOKENS) == 0
        for medium in later.media:
            medium.let_go()
        later.node.tiers.tick()
        await later.at_rest()
        if heard == "and the prompt was computed since":
            # Nothing is kept, found or told of behind what was computed.
            assert later.node.in_memory(TOKENS) == 2
            assert not any(block.epoch == 0 for tier in later.tiers for block in tier.catalog.blocks())
            assert later.node.tiers_of(TOKENS) == (0, 2, 0, 0)
            assert await later.node.promote(TOKENS) == 0
        else:
            await later.nothing_readable()
    assert max(media_of(tmp_path / "killed")) <= (2 if heard == "and the prompt was computed since" else 0)


async def test_what_comes_with_an_older_count_of_purges_than_is_watched_is_purged_once() -> None:
    node = Node()
    watch = PurgeWatch(node.replica.manager, lambda digest: True)
    namespace = node.replica.know(NS)
    node.replica.purge([NS.digest])
    # Told of between a purge and the look that follows it: it may have been stored before.
    watch.follow(namespace)
    assert watch.followed(namespace) == 0
    assert list(watch.purged()) == [(NS.digest, 1)] and watch.followed(namespace) == 1
    watch.follow(namespace, 0)
    watch.follow(namespace, 1)
    assert list(watch.purged()) == [(NS.digest, 1)] and list(watch.purged()) == []
    node.arena.close()


@pytest.mark.parametrize("told", ["before its tick", "by its tick"])
async def test_what_was_stored_before_a_purge_and_told_of_after_it_stays_nowhere(told: str, tmp_path: Path) -> None:
    """What a pool does is told of a few milliseconds later."""
    async with life(tmp_path / "now") as below:
        node = below.node
        below.open()
        for medium in below.media:
            medium.let_go()
        flush = node.flush
        node.flush = lambda: None  # type: ignore[method-assign]
        node.compute(TOKENS)
        node.flush = flush  # type: ignore[method-assign]
        assert node.in_memory(TOKENS) == 8
        node.replica.purge([NS.digest])
        if told == "before its tick":
            node.flush()
            await below.at_rest()
        node.tiers.tick()
        await below.at_rest()
        node.tiers.tick()
        await below.nothing_readable()
    assert media_of(tmp_path / "now") == [0, 0]


async def test_a_tier_that_opens_between_a_purge_and_its_tick_takes_nothing_purged(tmp_path: Path) -> None:
    """What memory holds then was stored before the purge, whatever number it has followed by now."""
    async with life(tmp_path / "now") as below:
        node = below.node
        for tier in node.tiers.tiers:
            await tier.close()
        node.tiers.tiers.clear()
        node.compute(TOKENS)

        def make_tier(opened: Opened) -> NodeTier:
            below.tiers.append(node.tier(Tier.REMOTE, opened))
            return below.tiers[-1]

        def open_store() -> Opened:
            store, held = RemoteStore.open(f"file://{below.folder}/remote", "node", SHAPE, 1 << 20)
            medium = HeldUp(store)
            medium.let_go()
            return Opened.of(medium, held)

        node.tiers.open_later(open_store, make_tier)
        node.tiers.tick()
        node.replica.purge([NS.digest])
        async with asyncio.timeout(30):
            while not below.tiers:  # noqa: ASYNC110 - a thread opens it
                await asyncio.sleep(0.002)
        # Traffic before the tick sends down what waits.
        node.compute(prompt(2, 1))
        await below.at_rest()
        node.tiers.tick()
        await below.at_rest()
        assert node.in_memory(TOKENS) == 0 and await node.promote(TOKENS) == 0
        names = hash_tokens(NS, TOKENS)
        assert not any(below.tiers[0].catalog.knows(name.sequence) for name in names)

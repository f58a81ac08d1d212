"""Spills and promotions beside traffic: what is held and copied for them is bounded, as its peak is measured.

Many more blocks than memory has slots go down and come up. No time is compared: media are stopped where a peak is
wanted, and left to run where many blocks are.
"""

import asyncio
import itertools
import threading
import tracemalloc
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from random import Random

import pytest

from kv_core.checksum import crc64
from kv_core.hashing import hash_tokens
from kv_prefix.errors import NoSpaceError
from kv_prefix.events import Tier
from kv_prefix.tiers.blocks import PlacedBlock, TierBlock, pack_checks
from kv_prefix.tiers.disk import DiskShape, DiskStore
from kv_prefix.tiers.remote import PARALLEL, RemoteStore
from kv_prefix.tiers.store import Cells, TierStore
from kv_services.node import tiers as tiers_module
from kv_services.node.tier import NodeTier, Opened
from kv_services.node.tier_setup import SPILL_SHARE
from kv_services.node.tiers import IN_FLIGHT_SHARE
from tests.services.helpers_node_tiers import GEOMETRY, NS, Medium, Node, prompt

SLOTS = 64
SPILLS_MAX = SLOTS // SPILL_SHARE
LOADS_MAX = SLOTS // IN_FLIGHT_SHARE
BLOCK = GEOMETRY.block_nbytes


class Measured(Medium):
    """A medium that counts the bytes it is reading and writing, and keeps the peaks."""

    def __init__(self, num_places: int) -> None:
        super().__init__(num_places)
        self._lock = threading.Lock()
        self._now = {"write": 0, "read": 0}
        self.peak = {"write": 0, "read": 0}
        self.total = {"write": 0, "read": 0}

    @contextmanager
    def _counted(self, way: str, items: Sequence[tuple[PlacedBlock, Cells]]) -> Iterator[None]:
        nbytes = sum(len(cell) for _, cells in items for cell in cells)
        with self._lock:
            self._now[way] += nbytes
            self.total[way] += nbytes
            self.peak[way] = max(self.peak[way], self._now[way])
        try:
            yield
        finally:
            with self._lock:
                self._now[way] -= nbytes

    def write(self, items: Sequence[tuple[PlacedBlock, Cells]], forget: Sequence[int] = ()) -> None:
        with self._counted("write", items):
            super().write(items, forget)

    def read(self, items: Sequence[tuple[PlacedBlock, Cells]]) -> list[bool]:
        with self._counted("read", items):
            return super().read(items)


class Busy:
    """A node of 64 slots with both tiers, each on a measured medium. `peak_held`: slots that spills and promotions
    held at once, of each as the pool's holders are named."""

    def __init__(self) -> None:
        self.node = Node(SLOTS)
        self.node.tiers.tiers.clear()
        for _ in range(100):
            self.node.cost.computed(1, 10**12)  # computing takes longer than any load
        self.media = {tier: Measured(1 << 12) for tier in (Tier.DISK, Tier.REMOTE)}
        self.tiers = [self.node.tier(tier, Opened.of(medium, []), SPILLS_MAX) for tier, medium in self.media.items()]
        for tier in self.tiers:
            self.node.tiers.add(tier)
        self.peak_held: dict[str, int] = {"spill": 0, "promotion": 0}
        self.peak_waiting = 0

    def look(self) -> None:
        """Keep what is held just now, if it is more than ever."""
        for word in self.peak_held:
            held = sum(count for owner, count in self.held().items() if owner.startswith(word))
            self.peak_held[word] = max(self.peak_held[word], held)
        self.peak_waiting = max(self.peak_waiting, *(len(tier.queue) for tier in self.tiers))

    def held(self) -> dict[str, int]:
        found: dict[str, int] = {}
        for hold in self.node.pool.holds():
            found[hold.receipt.owner] = found.get(hold.receipt.owner, 0) + hold.num_slots
        return found

    def open_gates(self, *, is_open: bool) -> None:
        for medium in self.media.values():
            if is_open:
                medium.gate.set()
            else:
                medium.gate.clear()

    async def at_rest(self) -> None:
        async with asyncio.timeout(60):
            while any(tier._jobs or len(tier.queue) for tier in self.tiers):
                self.look()
                await asyncio.sleep(0.001)

    async def close(self) -> None:
        self.open_gates(is_open=True)
        await self.node.tiers.close()
        await self.node.disk.close()
        assert not self.node.pool.holds()
        self.node.pool.check()
        self.node.arena.close()


async def test_while_media_stand_still_a_share_of_memory_is_held_and_traffic_goes_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Every bound is reached, and none is passed."""
    monkeypatch.setattr(tiers_module, "LOAD_TIMEOUT_NS", 20_000_000)
    busy = Busy()
    try:
        await stand_still(busy)
    finally:
        await busy.close()


async def stand_still(busy: Busy) -> None:
    node = busy.node
    for seed in range(40):
        node.compute(prompt(seed, 4))
        await busy.at_rest()
    busy.open_gates(is_open=False)
    for seed in range(100, 150):
        node.compute(prompt(seed, 4))  # raises if traffic found no slot
        busy.look()
        assert node.in_memory(prompt(seed, 4)) == 4
    for tier in busy.tiers:
        assert tier.queue.in_flight == SPILLS_MAX
    assert busy.peak_held["spill"] == SPILLS_MAX * len(busy.tiers)
    assert SPILLS_MAX < busy.peak_waiting <= SLOTS

    loads = [asyncio.create_task(node.promote(prompt(seed, 4))) for seed in range(10)]
    assert await asyncio.gather(*loads) == [0] * 10
    busy.look()
    assert busy.peak_held["promotion"] == LOADS_MAX
    for seed in range(200, 220):
        node.compute(prompt(seed, 4))
        assert node.in_memory(prompt(seed, 4)) == 4
    with pytest.raises(NoSpaceError):
        node.compute(prompt(300, SLOTS - LOADS_MAX - SPILLS_MAX + 1))
    for medium in busy.media.values():
        assert medium.peak["write"] <= SPILLS_MAX * BLOCK and medium.peak["read"] <= LOADS_MAX * BLOCK
    busy.open_gates(is_open=True)
    await busy.at_rest()


async def test_many_blocks_going_down_and_up_beside_traffic_never_hold_more_than_their_share() -> None:
    busy = Busy()
    try:
        await run_many(busy)
    finally:
        await busy.close()


async def run_many(busy: Busy) -> None:
    node, random = busy.node, Random(7)
    loading: list[asyncio.Task[int]] = []
    came = 0
    for seed in range(600):
        node.compute(prompt(seed, 4))
        busy.look()
        asked = [prompt(random.randrange(seed + 1), 4) for _ in range(2)]
        loading += [asyncio.create_task(node.promote(tokens)) for tokens in asked]
        await asyncio.sleep(0)
        busy.look()
        if len(loading) > 16 or seed % 7 == 0:
            came += sum(await asyncio.gather(*loading))
            loading.clear()
            await busy.at_rest()
    came += sum(await asyncio.gather(*loading))
    await busy.at_rest()

    assert 0 < busy.peak_held["spill"] <= SPILLS_MAX * len(busy.tiers)
    assert busy.peak_waiting <= SLOTS
    for medium in busy.media.values():
        assert 0 < medium.peak["write"] <= SPILLS_MAX * BLOCK
        assert medium.peak["read"] <= LOADS_MAX * BLOCK
    # It was many: memory went through both ways several times over.
    assert busy.media[Tier.DISK].total["write"] > 8 * SLOTS * BLOCK
    assert busy.media[Tier.DISK].total["read"] > 4 * SLOTS * BLOCK and came > 4 * SLOTS
    for seed in random.sample(range(600), 40):
        await node.promote(prompt(seed, 4))
        node.in_memory(prompt(seed, 4))  # compares every byte


LAYER = 1 << 18
SHAPE = DiskShape(LAYER, 4, 4, "test")
BATCH = 32


def big_blocks() -> list[TierBlock]:
    """A chain of blocks of one MiB of zeros each."""
    checks = pack_checks([crc64(bytes(LAYER))] * SHAPE.num_layers)
    names = hash_tokens(NS, list(range(4 * BATCH)))
    parents = [b"", *(name.sequence for name in names)]
    return [
        TierBlock(NS.digest, i, name.sequence, name.check, parents[i], bytes(16), bytes(16), (), checks, b"", 0)
        for i, name in enumerate(names)
    ]


def disk(folder: Path) -> TierStore:
    return DiskStore.open(folder / "disk", SHAPE, 64 << 20)[0]


def remote(folder: Path) -> TierStore:
    pytest.importorskip("obstore")
    return RemoteStore.open(f"file://{folder}/remote", "node", SHAPE, 64 << 20)[0]


@pytest.mark.parametrize(
    ("opened", "copies_max"),
    [(disk, 1.0), (remote, 2.0 * PARALLEL)],
    ids=["disk copies nothing", "remote copies as many blocks as it has requests under way"],
)
def test_what_a_medium_copies_of_a_batch_is_bounded(
    tmp_path: Path, opened: Callable[[Path], TierStore], copies_max: float
) -> None:
    """Blocks of a MiB, 32 of them at once: far more than the bound, were they copied."""
    store = opened(tmp_path)
    cells = [[memoryview(bytearray(LAYER)) for _ in range(SHAPE.num_layers)] for _ in range(BATCH)]
    items = [(PlacedBlock(i, block), cells[i]) for i, block in enumerate(big_blocks())]
    store.write(items[:1])
    store.read(items[:1])
    peaks = []
    found: list[bool] | None = None
    for work in (lambda: store.write(items), lambda: store.read(items)):
        tracemalloc.start()
        try:
            found = work()
            peaks.append(tracemalloc.get_traced_memory()[1])
        finally:
            tracemalloc.stop()
    store.close()
    assert found == [True] * BATCH
    assert max(peaks) <= copies_max * SHAPE.block_nbytes, peaks
    assert len(list(itertools.chain(*cells))) * LAYER > 1.5 * copies_max * SHAPE.block_nbytes


def test_the_shares_are_those_of_the_node() -> None:
    """What this file measures with is what a node is put together with."""
    assert (SPILLS_MAX, LOADS_MAX) == (4, 16)
    node = Node(SLOTS)
    assert node.tiers._most_in_flight == LOADS_MAX
    assert isinstance(node.disk, NodeTier)

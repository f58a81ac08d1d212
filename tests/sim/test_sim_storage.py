"""The disk tier under faults of its medium, in simulated clusters and by itself."""

import asyncio
from collections.abc import Callable
from concurrent.futures import Executor, ThreadPoolExecutor
from pathlib import Path
from random import Random

import pytest

from kv_core.ids import NodeId
from kv_core.testing import LoopClock
from kv_prefix.tiers.blocks import PlacedBlock
from kv_prefix.tiers.catalog import TierEvent, TierRemoved
from kv_prefix.tiers.disk import DiskStore
from kv_prefix.tiers.errors import TierFullError, TierIOError
from kv_prefix.tiers.store import Cells
from kv_services.node.tier import NodeTier
from kv_services.node.tiers import Tiers
from kv_services.sim.disk import SimDisk
from kv_services.sim.loop import SimLoop, context_of, run_simulated
from kv_services.sim.tier_disk import SimTierStore
from kv_services.sim.world import SimulationFailedError, simulate
from tests.prefix.helpers_tiers import SHAPE, chain, prompt, with_bytes

SPOIL = ("flipped bit", "short block reads")


@pytest.fixture(autouse=True)
def _quiet(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("CRITICAL")


@pytest.mark.timeout(300)
def test_what_a_bad_disk_gives_back_is_absent_and_never_wrong() -> None:
    result = simulate(5, seconds=30.0, kinds=(*SPOIL, "crash", "disk full", "slow disk"))
    assert result.on_disk["stored"] > 100 and result.on_disk["loaded"] > 5 and result.on_disk["spoiled"] > 0


@pytest.mark.timeout(300)
def test_a_medium_whose_bytes_nobody_checks_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    read = DiskStore.read

    def credulous(self: DiskStore, items: list[tuple[PlacedBlock, Cells]]) -> list[bool]:
        return [True] * len(read(self, items))

    monkeypatch.setattr(DiskStore, "read", credulous)
    with pytest.raises(SimulationFailedError, match=r"wrong|was given"):
        simulate(2, seconds=30.0, kinds=SPOIL)


@pytest.mark.timeout(300)
def test_a_tier_that_does_not_say_what_it_lost_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    say = Tiers.on_events

    def silent(self: Tiers, tier: NodeTier, events: list[TierEvent]) -> None:
        say(self, tier, [event for event in events if not isinstance(event, TierRemoved)])

    monkeypatch.setattr(Tiers, "on_events", silent)
    with pytest.raises(SimulationFailedError, match=r"of a prefix, the nodes hold|of its own blocks"):
        simulate(2, seconds=30.0, kinds=SPOIL)


def _open(disk: SimDisk) -> tuple[SimTierStore, list[PlacedBlock], Callable[[], None]]:
    mount = disk.mount()
    store, held = SimTierStore.open(disk, mount, disk.tier_folder, SHAPE, 1 << 20)
    return store, held, mount.crash


def _items(seed: int) -> list[tuple[PlacedBlock, list[memoryview]]]:
    placed = [PlacedBlock(4 * seed + i, block) for i, block in enumerate(chain(prompt(seed, 4)))]
    return with_bytes(placed)


def test_a_life_that_crashed_changes_nothing_and_the_next_one_has_the_folder(tmp_path: Path) -> None:
    disk = SimDisk(Random(1), tmp_path)
    store, held, crash = _open(disk)
    assert held == []
    items = _items(1)
    store.write(items)
    crash()
    with pytest.raises(TierIOError, match="over"):
        store.write(_items(2))
    assert store.read(items) == [False] * 4
    store, held, _ = _open(disk)
    assert [item.place for item in held] == [4, 5, 6, 7]
    assert store.read(items) == [True] * 4
    store.close()


def test_a_full_disk_refuses_and_a_short_read_is_short_once(tmp_path: Path) -> None:
    disk = SimDisk(Random(3), tmp_path)
    store, _, _ = _open(disk)
    items = _items(1)
    store.write(items)
    disk.full = True
    for _ in range(8):
        with pytest.raises(TierFullError):
            store.write(_items(2))
    disk.full = False
    disk.short_block_reads = 1
    short = store.read(items)
    assert short != [True] * 4 and short == sorted(short, reverse=True), "what lies before the end came whole"
    assert store.read(items) == [True] * 4
    store.close()


def test_bits_flip_where_they_lie(tmp_path: Path) -> None:
    disk = SimDisk(Random(3), tmp_path)
    store, _, _ = _open(disk)
    items = _items(1)
    store.write(items)
    while store.read(items) == [True] * 4:
        disk.flip_bits()
    store.close()


def test_jobs_of_one_executor_come_one_after_another_and_no_thread_runs() -> None:
    seen: list[tuple[str, float]] = []

    async def main(loop: SimLoop, clock: LoopClock) -> None:
        loop.work_takes_s = lambda node: 1.0

        async def give(executor: Executor | None, name: str, node: str) -> None:
            await loop.run_in_executor(executor, lambda: seen.append((name, loop.time())))

        first, second = ThreadPoolExecutor(1), ThreadPoolExecutor(1)
        work = [give(first, "a", "x"), give(first, "b", "x"), give(second, "c", "x"), give(None, "d", "x")]
        tasks = [asyncio.get_running_loop().create_task(one, context=context_of(NodeId("x"))) for one in work]
        await asyncio.sleep(1.5)
        loop.stop_node(NodeId("x"))
        await asyncio.sleep(3.0)
        loop.continue_node(NodeId("x"))
        await asyncio.gather(*tasks)
        failing = loop.run_in_executor(first, lambda: 1 // 0)
        with pytest.raises(ZeroDivisionError):
            await failing
        for executor in (first, second):
            assert not executor._threads

    run_simulated(main, 0)
    assert seen == [("a", 1.0), ("c", 1.0), ("d", 1.0), ("b", 4.5)]

"""The small parts of the services that decide: fences, pull costs, placement by load, life files."""

import asyncio
import os
import stat
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kv_bus.interface import Stamp
from kv_consistency.errors import ClockBoundReachedError, RemoteClockAheadError
from kv_consistency.manager import KvCacheConsistencyManager
from kv_consistency.replica import ReplicaConfig
from kv_consistency.update import scope_id
from kv_core.hashing import BlockHash
from kv_core.ids import Incarnation, NodeId, RequestId
from kv_core.testing import ManualClock
from kv_prefix.prefix_index import Holder, HolderMatch, PrefixIndex
from kv_services.errors import ReplicaEndedError
from kv_services.life import LifeFile, LifeFileError, OneLife, SystemDisk
from kv_services.metrics import Metrics
from kv_services.node.fence import EpochFence
from kv_services.node.prefill_events import PullPlan
from kv_services.node.pull_cost import RETRY_AFTER, RETRY_BLOCKS, PullCost, plan_pull
from kv_services.replica.service import ReplicaService
from kv_services.replica.stamper import ReplicaStamper

R = RequestId("r")
A, B = NodeId("a"), NodeId("b")
HASHES = [BlockHash(bytes([i]) * 16, i) for i in range(8)]


def holder(node: NodeId, num_blocks: int) -> HolderMatch:
    return HolderMatch(Holder(node, Incarnation(1)), num_blocks, (0, num_blocks, 0, 0))


@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(1, 9)), max_size=40))
def test_a_fence_refuses_what_ended_and_nothing_else(ends: list[tuple[str, int]]) -> None:
    fence, highest = EpochFence(NodeId("n")), dict.fromkeys("abc", 0)
    for name, epoch in ends:
        fence.end(RequestId(name), epoch)
        highest[name] = max(highest[name], epoch)
        for other, limit in highest.items():
            assert [fence.refuses(RequestId(other), e) for e in range(1, 11)] == [e <= limit for e in range(1, 11)]


def test_the_oldest_fences_are_forgotten_first() -> None:
    fence = EpochFence(NodeId("n"), fences_max=2)
    for name in ("a", "b", "a", "c"):
        fence.end(RequestId(name), 1)
    assert [fence.known(RequestId(name)) for name in "abc"] == [1, 0, 1]


def test_the_deepest_usable_holder_is_asked_for_what_is_missing() -> None:
    cost = PullCost(block_nbytes=1_000, block_size=16)
    holders = [holder(A, 8), holder(B, 5)]
    assert plan_pull(holders, [A, B], HASHES, 2, cost) == PullPlan(A, 2, 6)
    assert plan_pull(holders, [B], HASHES, 2, cost) == PullPlan(B, 2, 3)
    assert plan_pull(holders, [], HASHES, 2, cost) is None
    assert plan_pull(holders, [A], HASHES[:4], 2, cost) == PullPlan(A, 2, 2)
    assert plan_pull([holder(B, 2)], [B], HASHES, 2, cost) is None


def test_a_fetch_that_costs_more_than_computing_is_not_made() -> None:
    cost = PullCost(block_nbytes=1_000_000, block_size=16)
    assert cost.worth_it(4)
    for _ in range(40):
        cost.fetched(1_000_000, 400_000_000)
        cost.computed(1_000, 10_000_000)
    assert not cost.worth_it(4)
    assert cost.explain(4).startswith("compute: 4 blocks take 1605.0 ms to fetch")
    assert plan_pull([holder(A, 8)], [A], HASHES, 0, cost) is None


def test_where_fetching_was_slow_it_is_tried_now_and_then_and_used_again_when_it_is_quick() -> None:
    """Nothing else is measured while nothing is fetched: one slow hour would decide for the rest of a node's life."""
    cost = PullCost(block_nbytes=1_000_000, block_size=16)
    names = [BlockHash(bytes([i]) * 16, i) for i in range(20)]
    holders = [holder(A, 20)]
    whole = PullPlan(A, 0, 20)
    cost.computed(1_000, 1_000_000_000)
    for _ in range(20):
        cost.fetched(1_000_000, 1_000_000)
    assert plan_pull(holders, [A], names, 0, cost) == whole
    for _ in range(20):
        cost.fetched(1_000_000, 400_000_000)

    def trials() -> int:
        plans = [plan_pull(holders, [A], names, 0, cost) for _ in range(RETRY_AFTER)]
        tried = [plan for plan in plans if plan is not None]
        assert all(plan == PullPlan(A, 0, RETRY_BLOCKS) for plan in tried)
        return len(tried)

    assert trials() == 1
    cost.fetched(RETRY_BLOCKS * 1_000_000, RETRY_BLOCKS * 400_000_000)
    assert trials() == 1, "it is as slow as ever"
    cost.fetched(RETRY_BLOCKS * 1_000_000, RETRY_BLOCKS * 1_000_000)
    assert plan_pull(holders, [A], names, 0, cost) == whole
    assert plan_pull(holders, [], names, 0, cost) is None


def next_life(folder: Path, clock: ManualClock, node: str = "n") -> OneLife:
    """A life of the next process of that node."""
    disk = SystemDisk()
    life = LifeFile(folder, node, disk).begin(clock)
    disk.release()
    return life


def test_each_life_has_a_higher_incarnation_whatever_the_wall_says(tmp_path: Path) -> None:
    clock = ManualClock(wall_ns=5_000_000_000)
    seen = []
    for step_ns in (0, -4_000_000_000, 3_000_000_000):
        clock.step_wall(step_ns)
        seen.append(next_life(tmp_path, clock).incarnation)
    assert seen == sorted(set(seen))
    other = next_life(tmp_path, clock, "other").incarnation
    assert other == clock.wall_ns() // 1_000_000_000


def test_the_clock_bound_survives_and_never_falls(tmp_path: Path) -> None:
    clock = ManualClock(wall_ns=1)
    life = next_life(tmp_path, clock)
    life.keep_clock_bound(50)
    life.keep_clock_bound(20)
    assert next_life(tmp_path, clock).clock_bound_ns == 50


def test_a_node_runs_in_one_process_at_a_time(tmp_path: Path) -> None:
    clock, disk = ManualClock(wall_ns=5_000_000_000), SystemDisk()
    first = LifeFile(tmp_path, "n", disk).begin(clock)
    with pytest.raises(LifeFileError, match=r"n\.life\.json: another process runs this node"):
        LifeFile(tmp_path, "n").begin(clock)
    disk.release()
    assert next_life(tmp_path, clock).incarnation == first.incarnation + 1


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(1, 1000)), max_size=20))
def test_what_a_former_life_writes_late_changes_nothing(writes: list[tuple[int, int]]) -> None:
    with TemporaryDirectory() as folder:
        clock, disk = ManualClock(wall_ns=5_000_000_000), SystemDisk()
        file = LifeFile(Path(folder), "n", disk)
        lives = [file.begin(clock)]
        bound_ns = 0
        for life, at_ns in writes:
            if life >= len(lives):
                lives.append(file.begin(clock))
            lives[min(life, len(lives) - 1)].keep_clock_bound(at_ns)
            if life >= len(lives) - 1:
                bound_ns = max(bound_ns, at_ns)
        disk.release()
        after = next_life(Path(folder), clock)
        assert after.incarnation == lives[-1].incarnation + 1
        assert after.clock_bound_ns == bound_ns


def test_threads_of_two_lives_may_write_at_once(tmp_path: Path) -> None:
    clock, file = ManualClock(wall_ns=5_000_000_000), LifeFile(tmp_path, "n")
    with ThreadPoolExecutor(2) as threads:
        lives = [file.begin(clock)]
        for bound_ns in range(1, 100):
            late = threads.submit(lives[-1].keep_clock_bound, bound_ns)
            lives.append(file.begin(clock))
            late.result()
    assert [life.incarnation for life in lives] == [5 + number for number in range(100)]


def test_a_life_file_is_durable_by_name_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After a loss of power a rename that was not synced is undone, and with it the bound that stamps went by."""
    done: list[str] = []
    sync, rename = os.fsync, Path.replace

    def synced(descriptor: int) -> None:
        sync(descriptor)
        done.append("folder" if stat.S_ISDIR(os.fstat(descriptor).st_mode) else "file")

    def renamed(path: Path, target: Path) -> Path:
        done.append("name")
        return rename(path, target)

    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(Path, "replace", renamed)
    LifeFile(tmp_path / "lives", "n").begin(ManualClock())
    assert done == ["file", "name", "folder"]


def test_a_damaged_life_file_says_which_and_what_to_do(tmp_path: Path) -> None:
    (tmp_path / "n.life.json").write_text("{")
    with pytest.raises(LifeFileError, match=r"n\.life\.json: damaged .* remove it"):
        LifeFile(tmp_path, "n").begin(ManualClock())


@pytest.mark.parametrize("bit", range(0, 8 * 80, 11))
def test_no_flipped_bit_of_a_life_file_is_taken_for_another_life(tmp_path: Path, bit: int) -> None:
    clock = ManualClock(wall_ns=8_000_000_000)
    life = next_life(tmp_path, clock)
    life.keep_clock_bound(9_876_543_210)
    path = tmp_path / "n.life.json"
    data = bytearray(path.read_bytes())
    data[bit // 8] ^= 1 << (bit % 8)
    path.write_bytes(data)
    with pytest.raises(LifeFileError, match="damaged"):
        LifeFile(tmp_path, "n").begin(clock)


def test_a_process_that_stood_still_beyond_its_clock_bound_goes_on_with_a_higher_one(tmp_path: Path) -> None:
    clock = ManualClock()
    life = next_life(tmp_path, clock)
    manager = KvCacheConsistencyManager(NodeId("n"), Incarnation(1), ReplicaConfig(clock_horizon_ns=1_000_000_000))
    replica = ReplicaService(manager, clock, PrefixIndex(), life, Metrics("n", "decode"))
    replica.prime()
    first = ReplicaStamper(manager, clock).tick()
    clock.advance(10_000_000_000)
    with pytest.raises(ClockBoundReachedError):
        ReplicaStamper(manager, clock).tick()
    stamper = ReplicaStamper(manager, clock, replica.renew_clock_bound)
    stamp = stamper.tick()
    assert stamp.wall_ns > first.wall_ns
    # What was stamped lies below what is on disk: the next life begins above it.
    assert next_life(tmp_path, clock).clock_bound_ns > stamp.wall_ns
    clock.advance(10_000_000_000)
    stamper.merge(Stamp(clock.wall_ns(), 7, NodeId("peer")))
    assert manager.clock.wall_ns >= clock.wall_ns()


async def test_nobody_waits_at_a_replica_that_has_ended(tmp_path: Path) -> None:
    clock = ManualClock()
    manager = KvCacheConsistencyManager(NodeId("n"))
    replica = ReplicaService(manager, clock, PrefixIndex(), next_life(tmp_path, clock), Metrics("n", "decode"))
    replica.prime()
    await replica.start()
    token = replica.purge([scope_id("tenant", "t")]).to_bytes()
    await replica.caught_up(token, clock.monotonic_ns())
    await replica.close()
    with pytest.raises(ReplicaEndedError, match="the replica of n has ended: it is closed"):
        await replica.caught_up(token, clock.monotonic_ns())


def test_a_jump_of_the_wall_is_neither_stamped_nor_merged_but_reported(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    clock = ManualClock(wall_ns=100_000_000_000)
    life = next_life(tmp_path, clock)
    manager = KvCacheConsistencyManager(NodeId("n"))
    replica = ReplicaService(manager, clock, PrefixIndex(), life, Metrics("n", "decode"))
    replica.prime()
    stamper = ReplicaStamper(manager, clock)
    stamper.tick()
    clock.step_wall(3_600_000_000_000)
    clock.advance(1_000)
    assert stamper.tick().wall_ns == 100_000_001_000
    stamper.merge(Stamp(100_000_000_500, 0, NodeId("peer")))
    with pytest.raises(RemoteClockAheadError):
        stamper.merge(Stamp(clock.wall_ns(), 0, NodeId("peer")))
    assert stamper.tick().wall_ns == 100_000_001_000

    async def one_round() -> None:
        await replica.start()
        running = asyncio.ensure_future(replica.run())
        await asyncio.sleep(0)
        await replica.close()
        await running

    asyncio.run(one_round())
    reports = [record.getMessage() for record in caplog.records if "clock is wrong" in record.getMessage()]
    assert len(reports) == 2 and "whose=ours" in reports[0] and "whose=peer" in reports[1]

"""The simulator's own parts: standing still, the disk, and the oracle against histories written by hand."""

import asyncio
from pathlib import Path
from random import Random

import pytest

from kv_bus.interface import Stamp
from kv_consistency.update import EntryWritten, OwnerEpoch, Update
from kv_consistency.version_vector import CausalToken, Dot, Origin, VersionVector
from kv_core.ids import Incarnation, NodeId, RequestId
from kv_core.testing import LoopClock, ManualClock
from kv_services.life import LifeFile, LifeFileError
from kv_services.sim.causality import CausalOracle
from kv_services.sim.disk import SimDisk
from kv_services.sim.loop import SimLoop, context_of, run_simulated
from kv_services.sim.streams import stream

A, B = NodeId("a"), NodeId("b")
LIFE_A, LIFE_B = Origin(A, Incarnation(1)), Origin(B, Incarnation(1))
REQUEST = RequestId("r")
OWNER = OwnerEpoch(1, LIFE_A)


def test_a_draw_more_of_one_concern_shifts_no_other() -> None:
    alone = stream(3, "network")
    expected = [alone.random() for _ in range(5)]
    between, again = stream(3, "chaos"), stream(3, "network")
    drawn = [(between.random(), again.random()) for _ in range(5)]
    assert [second for _, second in drawn] == expected
    for other in (stream(3, "chaos"), stream(4, "network")):
        assert [other.random() for _ in range(5)] != expected


def test_a_node_that_stands_still_does_nothing_and_then_goes_on_in_order() -> None:
    async def main(loop: SimLoop, clock: LoopClock) -> list[tuple[str, int, int]]:
        seen: list[tuple[str, int, int]] = []

        async def beat(name: str) -> None:
            for number in range(4):
                await asyncio.sleep(1)
                seen.append((name, number, clock.monotonic_ns() // 1_000_000_000))

        tasks = [
            asyncio.get_running_loop().create_task(beat(name), context=context_of(NodeId(name))) for name in ("a", "b")
        ]
        await asyncio.sleep(1.5)
        loop.stop_node(A)
        await asyncio.sleep(5)
        loop.continue_node(A)
        await asyncio.gather(*tasks)
        return seen

    seen = run_simulated(main, 0)
    assert [line for line in seen if line[0] == "b"] == [("b", n, n + 1) for n in range(4)]
    # Its second beat was due at 2 s and came when it went on; the others follow from there.
    assert [line for line in seen if line[0] == "a"] == [("a", 0, 1), ("a", 1, 6), ("a", 2, 7), ("a", 3, 8)]


def test_a_run_that_fails_while_a_node_stands_still_ends() -> None:
    ended: list[str] = []

    async def main(loop: SimLoop, clock: LoopClock) -> None:
        async def wait() -> None:
            try:
                await asyncio.sleep(1_000)
            finally:
                ended.append("told")

        asyncio.get_running_loop().create_task(wait(), context=context_of(A))
        await asyncio.sleep(1)
        loop.stop_node(A)
        raise LookupError("the run")

    with pytest.raises(LookupError, match="the run"):
        run_simulated(main, 0)
    assert ended == ["told"]


def test_what_a_node_writes_after_its_crash_never_happened_and_a_full_disk_refuses() -> None:
    disk, clock = SimDisk(Random(1), Path("tier")), ManualClock(wall_ns=5_000_000_000)
    mount = disk.mount()
    life = LifeFile(Path("lives"), "n", mount).begin(clock)
    first = life.incarnation
    mount.crash()
    life.keep_clock_bound(99)
    assert LifeFile(Path("lives"), "n", disk.mount()).begin(clock).clock_bound_ns == 0
    disk.full = True
    with pytest.raises(LifeFileError, match="No space left"):
        LifeFile(Path("lives"), "n", disk.mount()).begin(clock)
    disk.full = False
    assert LifeFile(Path("lives"), "n", disk.mount()).begin(clock).incarnation == first + 2


@pytest.mark.parametrize("fault", ["short read", "flipped bit"])
def test_a_damaged_life_is_told_from_a_whole_one(fault: str) -> None:
    for seed in range(40):
        disk, clock = SimDisk(Random(seed), Path("tier")), ManualClock(wall_ns=5_000_000_000)
        life = LifeFile(Path("lives"), "n", disk.mount()).begin(clock)
        life.keep_clock_bound(77)
        if fault == "short read":
            disk.short_reads = 1
        else:
            disk.flip_bits()
        with pytest.raises(LifeFileError, match="damaged"):
            LifeFile(Path("lives"), "n", disk.mount()).begin(clock)


def test_the_oracle_refuses_a_stamp_below_one_that_was_heard_of() -> None:
    oracle = CausalOracle()
    a, b = oracle.begin_life(A), oracle.begin_life(B)
    oracle.stamped(a, 100, 0)
    oracle.received(b, Stamp(100, 0, A), (100, 1))
    oracle.stamped(b, 100, 2)
    assert not oracle.refused
    oracle.stamped(b, 99, 0)
    assert len(oracle.refused) == 2  # below what it heard of, and below its own


def test_the_oracle_remembers_what_a_former_life_stamped() -> None:
    oracle = CausalOracle()
    oracle.stamped(oracle.begin_life(A), 100, 0)
    oracle.stamped(oracle.begin_life(A), 100, 1)
    assert not oracle.refused
    oracle.stamped(oracle.begin_life(A), 100, 0)
    assert "had heard of (100, 1)" in str(oracle.refused[0])
    oracle.stamped(oracle.begin_life(A, forgot=True), 50, 0)
    assert len(oracle.refused) == 1


def _oracle(*ops: EntryWritten) -> CausalOracle:
    oracle = CausalOracle()
    oracle.published(LIFE_A, tuple(Update(n, n, 0, (op,)) for n, op in enumerate(ops, start=1)))
    return oracle


def _read(oracle: CausalOracle, applied: int, length: int, epoch: OwnerEpoch = OWNER, after: int = 0) -> list[str]:
    token = CausalToken((Dot(LIFE_A, after),)) if after else CausalToken(())
    vector = VersionVector({LIFE_A: applied})
    oracle.read(LIFE_B, vector, frozenset(), REQUEST, length, epoch, token)
    return [str(error) for error in oracle.refused]


def test_the_oracle_allows_reads_of_what_is_applied_and_refuses_all_others() -> None:
    grown = (EntryWritten(REQUEST, OWNER, 0, 4), EntryWritten(REQUEST, OWNER, 4, 8))
    assert _read(_oracle(*grown), applied=2, length=8, after=2) == []
    assert _read(_oracle(*grown), applied=1, length=4) == []
    assert "it knew 4" in _read(_oracle(*grown), applied=1, length=8)[0]
    assert "without" in _read(_oracle(*grown), applied=1, length=4, after=2)[0]
    ended = (*grown, EntryWritten(REQUEST, OWNER, 8, 8, ended=True))
    assert "has ended" in _read(_oracle(*ended), applied=3, length=8)[0]
    newer = OwnerEpoch(2, LIFE_B)
    taken = (*grown, EntryWritten(REQUEST, newer, 0, 0))
    assert "its owner is" in _read(_oracle(*taken), applied=3, length=8)[0]


def test_the_oracle_refuses_updates_that_came_before_what_they_follow() -> None:
    oracle = _oracle(EntryWritten(REQUEST, OWNER, 0, 4))
    oracle.published(LIFE_B, (Update(1, 1, 0, (), (Dot(LIFE_A, 1),)),))
    reader = Origin(NodeId("c"), Incarnation(1))
    oracle.applied(reader, VersionVector({LIFE_B: 1}), frozenset())
    assert "without a" in str(oracle.refused[0])
    oracle.applied(reader, VersionVector({LIFE_A: 1}), frozenset())
    assert "forgot updates of b" in str(oracle.refused[1])

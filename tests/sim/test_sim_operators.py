"""Nodes join, are drained, leave and change roles in a simulated cluster, and its directory may be lost."""

import asyncio
from random import Random

import pytest

from kv_core.ids import NodeId
from kv_core.testing import LoopClock
from kv_prefix.block_pool import BlockPool
from kv_services.config import Role
from kv_services.membership.discovery_state import Directory, Event, Listing, RecordGone, RecordPut
from kv_services.membership.discovery_state import Effect as DirectoryEffect
from kv_services.membership.records import NodeRecord
from kv_services.node.mover import Mover
from kv_services.node.store import LeaseDesk
from kv_services.sim import operators
from kv_services.sim.directory import LEASE_S, SimDirectory
from kv_services.sim.loop import SimLoop, context_of, run_simulated
from kv_services.sim.world import SimulationFailedError, simulate


@pytest.fixture(autouse=True)
def _quiet(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("CRITICAL")


@pytest.mark.timeout(300)
def test_no_request_fails_while_nodes_join_are_drained_leave_and_change_roles() -> None:
    result = simulate(11, seconds=25.0, kinds=operators.KINDS)
    assert result.requests > 40 and result.failures == {}
    assert min(result.acts.values()) >= 2 and set(result.faults) == set(operators.KINDS)


@pytest.mark.timeout(300)
def test_a_node_that_left_and_is_remembered_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def keep(self: Directory, node_ids: object) -> list[DirectoryEffect]:
        return []

    monkeypatch.setattr(Directory, "_drop_if_over", keep)
    with pytest.raises(SimulationFailedError, match="who left"):
        simulate(14, seconds=25.0, kinds=("join", "leave"))


@pytest.mark.timeout(300)
def test_a_node_that_loses_count_while_it_is_drained_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    add = Mover._add

    def careless(self: Mover, to: object, names: object, **say: bool) -> None:
        if to != "elsewhere":
            add(self, to, names, **say)  # type: ignore[arg-type]

    monkeypatch.setattr(Mover, "_add", careless)
    with pytest.raises(SimulationFailedError, match="lost count"):
        simulate(11, seconds=25.0, kinds=("drain",))


@pytest.mark.timeout(300)
def test_a_node_that_is_read_from_after_it_said_that_it_is_safe_to_stop_is_found(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(LeaseDesk, "readers", lambda self: {NodeId("late")})
    with pytest.raises(SimulationFailedError, match=r"was safe to stop and is not any more.*read by \['late'\]"):
        simulate(11, seconds=25.0, kinds=("drain",))


@pytest.mark.timeout(300)
def test_a_node_that_keeps_what_was_purged_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(BlockPool, "purge", lambda self, namespace: 0)
    with pytest.raises(SimulationFailedError, match=r"blocks that were purged|of its own blocks|of a prefix"):
        simulate(11, seconds=15.0, kinds=("purge",))


def _record(name: str, incarnation: int = 1) -> NodeRecord:
    return NodeRecord(name, Role.PREFILL, "127.0.0.1", 7000, 7001, 7002, incarnation)


def test_a_lease_ends_though_its_node_stands_still_and_a_new_session_begins_with_everything() -> None:
    a, b = _record("a"), _record("b")
    heard: dict[str, list[Event]] = {"a": [], "b": []}

    async def main(loop: SimLoop, clock: LoopClock) -> None:
        directory = SimDirectory(Random(1))

        async def live(record: NodeRecord) -> None:
            session = directory.open(record, heard[record.node_id].append)
            while True:
                await asyncio.sleep(LEASE_S / 3)
                if session is None or not directory.renew(session):
                    session = directory.open(record, heard[record.node_id].append)

        start = asyncio.get_running_loop().create_task
        tasks = [start(live(record), context=context_of(record.node)) for record in (a, b)]
        await asyncio.sleep(2 * LEASE_S)
        assert heard["a"] == [Listing((a,)), RecordPut(b)] and heard["b"] == [Listing((a, b))]
        loop.stop_node(b.node)
        await asyncio.sleep(2 * LEASE_S)
        assert heard["a"][2:] == [RecordGone(b.node)]
        loop.continue_node(b.node)
        await asyncio.sleep(LEASE_S)
        assert heard["a"][3:] == [RecordPut(b)] and heard["b"][1:] == [Listing((a, b))]
        directory.cut(NodeId("a"))
        await asyncio.sleep(2 * LEASE_S)
        assert heard["b"][2:] == [RecordGone(a.node)] and len(heard["a"]) == 4
        directory.heal(NodeId("a"))
        await asyncio.sleep(LEASE_S)
        assert heard["b"][3:] == [RecordPut(a)] and heard["a"][4:] == [Listing((b, a))]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    run_simulated(main, 0)

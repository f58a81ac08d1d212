"""The agent's NIXL-shaped surface: descriptor lists, transfers by index, notifications, over each transport."""

from pathlib import Path

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kv_core.ids import Incarnation, NodeId, RegionId
from kv_transport import Access, SharedBuffer, TransferAgent, TransportConfig, XferDesc, XferOp, XferState, limits
from kv_transport.config import TransportName
from kv_transport.errors import (
    AgentClosed,
    GrantRefused,
    InvalidDescriptor,
    StaleIncarnation,
    UnknownPeer,
    UnknownRegion,
    XferActive,
)
from tests.transport.helpers_transport import NO_RESERVE, config, introduce, node, pair

MIB = 1 << 20


async def test_units_over_shared_memory_are_larger(transport: TransportName, tmp_path: Path) -> None:
    """Two threads, 17 MiB: units of 16 MiB over shm and of 4 MiB over the others."""
    with (
        SharedBuffer.create(17 * MIB, "one", budget=NO_RESERVE) as one,
        SharedBuffer.create(17 * MIB, "two", budget=NO_RESERVE) as two,
    ):
        async with pair(transport, tmp_path) as (left, right):
            mine = left.agent.register_memory(one)
            theirs = right.agent.register_memory(two, Access.WRITE)
            introduce(left, right)
            one.data[:] = np.random.default_rng(2).integers(0, 256, 17 * MIB, np.uint8)
            for nbytes, units in (
                (17 * MIB, 2 if transport == "shm" else 5),
                (9 * MIB, 1 if transport == "shm" else 3),
            ):
                for op in (XferOp.WRITE, XferOp.READ):
                    ours, other = [XferDesc(region, 0, nbytes) for region in (mine.region, theirs.region)]
                    async with left.agent.initialize_xfer(op, [ours], [other], NodeId("decode")) as xfer:
                        left.agent.transfer(xfer)
                        stats = await xfer.done(30_000)
                        assert (stats.nbytes, stats.units) == (nbytes, units)
                    assert bytes(two.data_view[:nbytes]) == bytes(one.data_view[:nbytes])


@given(nbytes=st.integers(0, 1 << 30), threads=st.integers(1, 64))
def test_a_unit_over_shared_memory_is_no_larger_than_its_threads_move_as_soon_as_one_a_smaller_one(
    nbytes: int, threads: int
) -> None:
    settings = TransportConfig(copy_threads=threads)
    over = {scheme: settings.unit_bytes_over(scheme, nbytes) for scheme in ("shm", "tcp", "ucx", "memory", "")}
    chosen = over.pop("shm")
    assert set(over.values()) == {limits.UNIT_BYTES}
    assert limits.UNIT_BYTES <= chosen <= limits.UNIT_BYTES_MAX
    assert chosen == limits.UNIT_BYTES or chosen <= min(nbytes, threads * limits.UNIT_SHARE_BYTES)
    assert chosen >= min(nbytes, 2 * limits.UNIT_SHARE_BYTES) or threads == 1
    told = TransportConfig(copy_threads=threads, unit_bytes=4096)
    assert {told.unit_bytes_over(scheme, nbytes) for scheme in ("shm", "tcp")} == {4096}


@pytest.mark.parametrize("nbytes", [64, 100_000, 9 * MIB + 17])
async def test_a_write_with_a_notification_and_a_read_back(
    transport: TransportName, tmp_path: Path, nbytes: int
) -> None:
    with (
        SharedBuffer.create(nbytes, "one", budget=NO_RESERVE) as one,
        SharedBuffer.create(nbytes, "two", budget=NO_RESERVE) as two,
    ):
        async with pair(transport, tmp_path) as (left, right):
            mine = left.agent.register_memory(one)
            theirs = right.agent.register_memory(two, Access.WRITE)
            introduce(left, right)
            one.data[:] = np.random.default_rng(1).integers(0, 256, nbytes)
            local = left.agent.prep_xfer_dlist(None, [XferDesc(mine.region, 0, nbytes)])
            remote = left.agent.prep_xfer_dlist(NodeId("decode"), [XferDesc(theirs.region, 0, nbytes)])
            xfer = left.agent.make_prepped_xfer(XferOp.WRITE, local, [0], remote, [0], notif=b"here it is")
            assert xfer.state is XferState.PENDING
            left.agent.transfer(xfer)
            with pytest.raises(XferActive):
                xfer.release()
            stats = await xfer.done(10_000)
            assert stats.nbytes == nbytes
            note = await anext(right.agent.notifs())
            assert (note.node, note.payload) == ("prefill", b"here it is")
            assert bytes(two.data_view) == bytes(one.data_view)

            one.data[:] = 0
            async with left.agent.make_prepped_xfer(XferOp.READ, local, [0], remote, [0]) as back:
                left.agent.transfer(back)
                await back.done(10_000)
                left.agent.transfer(back)  # posting again is what preparing is for
                await back.done(10_000)
            assert bytes(two.data_view) == bytes(one.data_view)
            assert back.state is XferState.RELEASED
            with pytest.raises(XferActive):
                left.agent.transfer(back)
            xfer.release()
            xfer.release()
            assert left.agent.inventory().work == right.agent.inventory().work == ()


async def test_scattered_pieces_go_where_they_are_told(transport: TransportName, tmp_path: Path) -> None:
    async with pair(transport, tmp_path, access=Access.WRITE) as (left, right):
        size = 4_000
        places = [(index * size, (9 - index) * size) for index in range(10)]
        left.arena.data[: 10 * size] = [index // size for index in range(10 * size)]
        local = [XferDesc(left.region, offset, size) for offset, _ in places]
        remote = [XferDesc(right.region, offset, size) for _, offset in places]
        xfer = left.agent.initialize_xfer(XferOp.WRITE, local, remote, right.agent.name.node)
        left.agent.transfer(xfer)
        await xfer.done(10_000)
        assert right.arena.data[: 10 * size : size].tolist() == list(reversed(range(10)))
        xfer.release()


async def test_descriptors_beyond_a_region_are_refused(tmp_path: Path) -> None:
    async with pair("shm", tmp_path, access=Access.WRITE) as (left, right):
        node_id, end = right.agent.name.node, right.arena.nbytes
        for offset, nbytes in [(0, 0), (-1, 8), (end, 1), (end - 7, 8), (0, end + 1)]:
            with pytest.raises(InvalidDescriptor):
                left.agent.prep_xfer_dlist(node_id, [XferDesc(right.region, offset, nbytes)])
            with pytest.raises(InvalidDescriptor):
                left.agent.prep_xfer_dlist(None, [XferDesc(left.region, offset, nbytes)])
        with pytest.raises(UnknownRegion):
            left.agent.prep_xfer_dlist(node_id, [XferDesc(RegionId(99), 0, 8)])
        with pytest.raises(UnknownPeer):
            left.agent.prep_xfer_dlist(NodeId("stranger"), [XferDesc(right.region, 0, 8)])
        mine = left.agent.prep_xfer_dlist(None, [XferDesc(left.region, 0, 8)])
        theirs = left.agent.prep_xfer_dlist(node_id, [XferDesc(right.region, 0, 8), XferDesc(right.region, 8, 9)])
        for mine_index, their_index in [([1], [0]), ([0], [2]), ([-1], [0]), ([0], [1]), ([], []), ([0], [0, 0])]:
            with pytest.raises(InvalidDescriptor):
                left.agent.make_prepped_xfer(XferOp.READ, mine, mine_index, theirs, their_index)


async def test_a_closed_region_cannot_be_touched_without_a_ticket(transport: TransportName, tmp_path: Path) -> None:
    async with pair(transport, tmp_path, access=Access.READ) as (left, right):
        # The sender is told before anything is sent; a sender that lies about what it was told is refused there.
        local, remote = [XferDesc(left.region, 0, 8)], [XferDesc(right.region, 0, 8)]
        with pytest.raises(GrantRefused):
            left.agent.initialize_xfer(XferOp.WRITE, local, remote, right.agent.name.node)
        xfer = left.agent.initialize_xfer(XferOp.READ, local, remote, right.agent.name.node)
        xfer.op = XferOp.WRITE
        left.agent.transfer(xfer)
        with pytest.raises(GrantRefused):
            await xfer.done(10_000)
        xfer.release()


async def test_notifications_are_bounded_and_end_with_the_agent(transport: TransportName, tmp_path: Path) -> None:
    async with pair(transport, tmp_path) as (left, right):
        for number in range(100):
            await left.agent.send_notif(right.agent.name.node, b"%d" % number)
        notes = right.agent.notifs()
        assert [(await anext(notes)).payload for _ in range(100)] == [b"%d" % number for number in range(100)]
        await right.agent.close()
        with pytest.raises(StopAsyncIteration):
            await anext(notes)
        with pytest.raises(AgentClosed):
            await right.agent.send_notif(left.agent.name.node, b"")


async def test_metadata_is_for_one_life_of_one_node(tmp_path: Path) -> None:
    settings = config("tcp", tmp_path)
    async with node("a", settings) as a, node("b", settings, incarnation=5) as b, node("c", settings) as c:
        a_name = a.agent.name
        with pytest.raises(InvalidDescriptor):
            c.agent.add_remote_agent(b.agent.get_agent_metadata(a_name.node, a_name.incarnation))
        with pytest.raises(StaleIncarnation):
            a.agent.add_remote_agent(b.agent.get_agent_metadata(a_name.node, Incarnation(9)))
        a.agent.add_remote_agent(b.agent.get_agent_metadata(a_name.node, a_name.incarnation))
        async with node("b2", settings) as twin:
            older = twin.agent.get_agent_metadata(a_name.node, a_name.incarnation)
            with pytest.raises(StaleIncarnation):
                a.agent.add_remote_agent(msgspec.structs.replace(older, node="b", incarnation=4))


async def test_close_is_idempotent_and_an_agent_that_never_started_can_be_closed(tmp_path: Path) -> None:
    agent = TransferAgent(NodeId("n"), Incarnation(1), config("auto", tmp_path / "s"))
    await agent.close()
    async with node("m", config("auto", tmp_path / "s")) as started:
        await started.agent.close()
        await started.agent.close()
        with pytest.raises(AgentClosed):
            started.agent.get_agent_metadata(NodeId("x"), Incarnation(1))
    assert list((tmp_path / "s").iterdir()) == []

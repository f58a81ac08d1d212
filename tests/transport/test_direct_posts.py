"""Few bytes over a standing link are moved by the caller's own call; what goes wrong is handled as for any transfer."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from kv_core.ids import NodeId
from kv_transport import Access, SharedBuffer, XferDesc, XferOp, XferState, doorbell, kernels, limits
from kv_transport.backends.base import Link
from kv_transport.config import TransportName
from kv_transport.errors import (
    AgentClosed,
    ChecksumMismatch,
    ConnectionLost,
    InvalidDescriptor,
    NoTransport,
    TransferTimeout,
    UnknownPeer,
    UnknownRegion,
    XferActive,
)
from kv_transport.frames import Acked, FromOwner
from kv_transport.peers import Peer
from kv_transport.regions import MemoryRegion
from kv_transport.xfer import Xfer
from tests.transport.helpers_transport import NO_RESERVE, Node, damage_shared_copies, eventually, introduce, pair

DECODE = NodeId("decode")
NBYTES = 4_096
LOST = ConnectionLost(peer="decode", transport="shm", cause="pulled out")


@dataclass
class Ready:
    """Two agents with a link of shm between them that has carried something, and a small put."""

    left: Node
    right: Node
    mine: MemoryRegion
    theirs: MemoryRegion
    put: Xfer
    held: list[FromOwner]

    @property
    def peer(self) -> Peer:
        return self.left.agent.peer(DECODE)

    @property
    def link(self) -> Link:
        (link,) = self.peer.links
        return link

    def xfer(self, op: XferOp, nbytes: int = NBYTES, payload: bytes = b"placed") -> Xfer:
        ours, others = [XferDesc(self.mine.region, 0, nbytes)], [XferDesc(self.theirs.region, 0, nbytes)]
        notif = payload if op is XferOp.WRITE else b""
        return self.left.agent.initialize_xfer(op, ours, others, DECODE, notif=notif)

    def fill(self, seed: int) -> None:
        self.mine.memory.data[:] = np.random.default_rng(seed).integers(0, 256, self.mine.nbytes, np.uint8)

    def arrived(self, nbytes: int = NBYTES) -> bool:
        return bytes(self.theirs.memory.data_view[:nbytes]) == bytes(self.mine.memory.data_view[:nbytes])

    def state(self) -> str:
        return self.put.state.value

    def notified(self) -> int:
        return len(self.right.agent._notifs)

    def hold_acks(self) -> None:
        """What the peer answers from now on stays on its way, in frames and in the page."""
        received, link = self.link._received, self.link

        def hold(frame: FromOwner) -> None:
            if isinstance(frame, Acked):
                self.held.append(frame)
            else:
                received(frame)

        link._received = hold  # type: ignore[method-assign]
        link.take_answers = lambda: None  # type: ignore[method-assign]

    def deliver_acks(self) -> None:
        link = self.link
        del link._received, link.take_answers
        link.take_answers()
        for frame in self.held:
            link._received(frame)


@contextlib.asynccontextmanager
async def ready(
    tmp_path: Path,
    transport: TransportName = "shm",
    *,
    window_size: int = 8,
    heartbeat_ms: int = 500,
    unit_bytes: int = limits.UNIT_BYTES_MAX,
) -> AsyncIterator[Ready]:
    with (
        SharedBuffer.create(4 << 20, "one", budget=NO_RESERVE) as one,
        SharedBuffer.create(4 << 20, "two", budget=NO_RESERVE) as two,
    ):
        async with pair(
            transport,
            tmp_path,
            window_size=window_size,
            heartbeat_ms=heartbeat_ms,
            silence_timeout_ms=6 * heartbeat_ms,
            unit_timeout_ms=10 * heartbeat_ms,
            unit_bytes=unit_bytes,
        ) as (left, right):
            mine = left.agent.register_memory(one)
            theirs = right.agent.register_memory(two, Access.WRITE)
            introduce(left, right)
            ours, others = [XferDesc(mine.region, 0, 64)], [XferDesc(theirs.region, 0, 64)]
            first = left.agent.initialize_xfer(XferOp.WRITE, ours, others, DECODE)
            left.agent.transfer(first)
            await first.done(20_000)
            found = Ready(left, right, mine, theirs, first, [])
            found.put = found.xfer(XferOp.WRITE)
            found.fill(1)
            yield found


async def test_a_small_put_is_moved_by_the_call_and_listed_until_it_is_acknowledged(tmp_path: Path) -> None:
    async with ready(tmp_path) as it:
        agent, before = it.left.agent, it.left.agent.stats()
        agent.transfer(it.put)
        assert it.arrived() and it.state() == "posted"
        assert it.peer.flows == [] and it.link.units_posted == 1
        (item,) = agent.inventory().work
        assert (item.kind, item.ident, item.owner) == ("transfer", it.put.name, "decode#1")
        with pytest.raises(InvalidDescriptor):
            agent.deregister_memory(it.mine.region)
        stats = await it.put.done(20_000)
        assert (stats.nbytes, stats.units, stats.retries, stats.transports) == (NBYTES, 1, 0, {"shm": NBYTES})
        assert it.state() == "done" and it.notified() == 1
        after = agent.stats()
        assert after.sent_bytes["shm"] - before.sent_bytes["shm"] == NBYTES
        assert after.transfers_done - before.transfers_done == 1
        assert agent.inventory().work == it.right.agent.inventory().work == ()
        agent.deregister_memory(it.mine.region)


async def test_a_small_get_is_over_when_the_call_returns(tmp_path: Path) -> None:
    async with ready(tmp_path) as it:
        get = it.xfer(XferOp.READ)
        it.left.agent.transfer(get)
        await get.done()  # maps the region for reading, or finds it mapped
        it.theirs.memory.data[:] = 9
        it.left.agent.transfer(get)
        assert get.state is XferState.DONE and it.arrived()
        stats = await get.done()
        assert stats.nbytes == NBYTES and stats.duration_ns > 0
        # Also while something older is on its way, whose answer has not been heard.
        it.hold_acks()
        it.left.agent.transfer(it.put)
        await asyncio.sleep(0.01)
        it.left.agent.transfer(get)
        assert (await get.done()).duration_ns > 0
        it.deliver_acks()
        await it.put.done(20_000)


@pytest.mark.parametrize("op", XferOp)
async def test_a_transfer_of_one_unit_needs_no_queue_and_one_of_several_does(tmp_path: Path, op: XferOp) -> None:
    async with ready(tmp_path, unit_bytes=1 << 20) as it:
        long = limits.INLINE_COPY_BYTES_MAX + 1
        for nbytes, direct in [(long - 1, True), (long, True), (1 << 20, True), ((1 << 20) + 1, False)]:
            it.fill(seed=nbytes)
            xfer = it.xfer(op, nbytes)
            for _ in range(2):
                it.left.agent.transfer(xfer)
                assert (it.peer.flows == []) is direct
                assert (await xfer.done(20_000)).nbytes == nbytes
                assert it.arrived(nbytes)
            assert it.left.agent.inventory().work == ()


async def test_nothing_is_overtaken(tmp_path: Path) -> None:
    """With the window full, a small put waits in the queue as everything else does."""
    async with ready(tmp_path, window_size=1) as it:
        other = it.xfer(XferOp.WRITE)
        it.hold_acks()
        it.left.agent.transfer(it.put)
        it.left.agent.transfer(other)
        assert it.link.units_posted == 1 and it.peer.units_waiting == 1
        await other_than_done(other)
        it.deliver_acks()
        await it.put.done(20_000)
        await other.done(20_000)


async def other_than_done(xfer: Xfer) -> None:
    with pytest.raises(TransferTimeout):
        await xfer.done(20)
    assert xfer.state is XferState.POSTED


async def test_waiting_with_a_timeout_leaves_it_at_work(tmp_path: Path) -> None:
    async with ready(tmp_path) as it:
        it.hold_acks()
        it.left.agent.transfer(it.put)
        await other_than_done(it.put)
        it.deliver_acks()
        assert (await it.put.done()).nbytes == NBYTES


@pytest.mark.parametrize("times", [1, limits.CHECKSUM_RETRIES_MAX, 1_000])
async def test_bytes_that_do_not_pass_are_put_again_and_never_announced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, times: int
) -> None:
    async with ready(tmp_path) as it:
        monkeypatch.setattr(doorbell, "put", doorbell.plain_put)  # its twin copies with the kernel that is torn here
        whole, left = kernels.copy_unsealed_cells, [1]

        def torn(to: memoryview, source: memoryview, cells: kernels.CellTable) -> tuple[list[int], list[int]]:
            arrived, read = whole(to, source, cells)
            if not left[0]:
                return arrived, read
            left[0] -= 1
            return [arrived[0] ^ 1, *arrived[1:]], read

        monkeypatch.setattr(kernels, "copy_unsealed_cells", torn)
        damage_shared_copies(monkeypatch, times - 1)  # the later attempts
        it.left.agent.transfer(it.put)
        assert it.notified() == 0 and it.state() == "posted"
        if times > limits.CHECKSUM_RETRIES_MAX:
            with pytest.raises(ChecksumMismatch):
                await it.put.done(20_000)
            assert it.state() == "failed" and it.notified() == 0
            assert it.left.agent.stats().transfers_failed == 1
        else:
            stats = await it.put.done(20_000)
            assert stats.retries == times and it.arrived() and it.notified() == 1
        failures = min(times, 1 + limits.CHECKSUM_RETRIES_MAX)
        assert it.left.agent.stats().checksum_failures == failures == it.peer.failed_units
        assert it.left.agent.inventory().work == ()
        monkeypatch.undo()
        it.left.agent.transfer(it.put)
        await it.put.done(20_000)


async def test_what_the_owner_refuses_fails_with_its_reason(tmp_path: Path) -> None:
    async with ready(tmp_path) as it:
        it.right.agent.deregister_memory(it.theirs.region)
        it.left.agent.transfer(it.put)
        with pytest.raises(UnknownRegion):
            await it.put.done(20_000)
        assert it.put.state is XferState.FAILED and it.notified() == 0
        assert it.right.agent.stats().units_refused == 1
        assert it.left.agent.inventory().work == ()
        it.left.agent.deregister_memory(it.mine.region)


async def test_a_link_that_breaks_before_the_answer_is_followed_by_the_next_transport(tmp_path: Path) -> None:
    async with ready(tmp_path, "auto") as it:
        it.hold_acks()
        it.left.agent.transfer(it.put)
        it.link.fail(LOST)
        stats = await it.put.done(20_000)
        assert stats.transports == {"tcp": NBYTES} and stats.retries == 1 and it.arrived()
        # It was announced before the link broke, and is not announced again.
        assert it.notified() == 1
        assert it.left.agent.stats().peers[0].transports == ("tcp",)
        assert it.left.agent.inventory().work == ()


async def test_a_peer_that_is_gone_for_good_is_an_error(tmp_path: Path) -> None:
    async with ready(tmp_path) as it:
        it.hold_acks()
        it.left.agent.transfer(it.put)
        await it.right.agent.close()
        with pytest.raises((ConnectionLost, NoTransport)):
            await it.put.done(20_000)
        assert it.put.state is XferState.FAILED
        assert it.left.agent.inventory().work == ()


async def test_closing_the_agent_answers_what_is_on_its_way(tmp_path: Path) -> None:
    async with ready(tmp_path) as it:
        it.hold_acks()
        it.left.agent.transfer(it.put)
        await it.left.agent.close()
        with pytest.raises(AgentClosed):
            await it.put.done(20_000)
        it.put.release()


async def test_memory_that_is_closed_is_not_read(tmp_path: Path) -> None:
    async with ready(tmp_path) as it:
        it.left.agent.deregister_memory(it.mine.region)
        with pytest.raises(UnknownRegion):
            it.left.agent.transfer(it.put)
        assert it.notified() == 0 and it.left.agent.inventory().work == ()


# Posted again.


async def test_a_put_is_posted_again_with_what_was_made_for_it(tmp_path: Path) -> None:
    async with ready(tmp_path) as it:
        it.left.agent.transfer(it.put)
        await it.put.done(20_000)
        made = it.put.direct
        assert made is not None
        for seed in range(2, 12):
            it.fill(seed)
            it.left.agent.transfer(it.put)
            assert it.put.direct is made and it.arrived()
            assert (await it.put.done(20_000)).nbytes == NBYTES
        assert it.notified() == 11 and it.left.agent.stats().transfers_done == 12
        assert it.left.agent.inventory().work == ()


async def test_what_is_in_flight_is_not_posted_again(tmp_path: Path) -> None:
    async with ready(tmp_path) as it:
        it.left.agent.transfer(it.put)
        await it.put.done(20_000)
        it.hold_acks()
        it.left.agent.transfer(it.put)
        with pytest.raises(XferActive):
            it.left.agent.transfer(it.put)
        with pytest.raises(InvalidDescriptor):
            it.left.agent.deregister_memory(it.mine.region)
        it.deliver_acks()
        await it.put.done(20_000)
        it.put.release()
        with pytest.raises(XferActive):
            it.left.agent.transfer(it.put)
        assert it.notified() == 2
        it.left.agent.deregister_memory(it.mine.region)


@pytest.mark.parametrize("timeout_ms", [None, 20_000])
async def test_who_waited_hears_of_the_put_that_was_waited_for(tmp_path: Path, timeout_ms: int | None) -> None:
    """Though it is posted again before the loop comes back to who waited."""
    async with ready(tmp_path) as it:
        it.hold_acks()
        it.left.agent.transfer(it.put)
        waiting = asyncio.create_task(it.put.done(timeout_ms))
        await eventually(lambda: it.notified() == 1)
        await asyncio.sleep(0)
        it.deliver_acks()
        assert not waiting.done()
        it.hold_acks()
        it.left.agent.transfer(it.put)
        assert (await waiting).nbytes == NBYTES
        assert it.state() == "posted"
        it.deliver_acks()
        await it.put.done(20_000)
        assert it.notified() == 2


@pytest.mark.parametrize("how", ["deregistered", "closed"])
async def test_memory_that_went_after_the_last_time_is_not_read(tmp_path: Path, how: str) -> None:
    async with ready(tmp_path) as it:
        it.left.agent.transfer(it.put)
        await it.put.done(20_000)
        if how == "closed":
            it.mine.memory.close()
        else:
            it.left.agent.deregister_memory(it.mine.region)
        for _ in range(2):
            with pytest.raises(UnknownRegion):
                it.left.agent.transfer(it.put)
        assert it.notified() == 1 and it.left.agent.inventory().work == () and it.put.state is XferState.DONE


async def test_a_peer_that_was_removed_or_an_agent_that_is_closed_gets_nothing_more(tmp_path: Path) -> None:
    async with ready(tmp_path) as it:
        it.left.agent.transfer(it.put)
        await it.put.done(20_000)
        going = asyncio.create_task(it.left.agent.remove_remote_agent(DECODE))
        await asyncio.sleep(0)
        with pytest.raises(UnknownPeer):
            it.left.agent.transfer(it.put)
        await going
        introduce(it.left, it.right)
        it.left.agent.transfer(it.put)
        assert (await it.put.done(20_000)).nbytes == NBYTES
        it.left.agent.transfer(it.put)
        await it.put.done(20_000)
        await it.left.agent.close()
        with pytest.raises(AgentClosed):
            it.left.agent.transfer(it.put)


async def test_a_link_that_broke_since_is_not_posted_to(tmp_path: Path) -> None:
    async with ready(tmp_path) as it:
        it.left.agent.transfer(it.put)
        await it.put.done(20_000)
        it.link.fail(LOST)
        it.fill(3)
        it.left.agent.transfer(it.put)
        assert (await it.put.done(20_000)).retries == 0 and it.arrived()

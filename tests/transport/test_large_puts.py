"""Puts of many bytes over shared memory: copied by all threads together, told by the same message as small ones."""

import random
from collections.abc import Sequence
from pathlib import Path

import pytest

from kv_transport import XferDesc, XferOp, XferState, limits
from kv_transport.backends.shm_link import ShmLink
from kv_transport.backends.shm_session import ShmSession
from kv_transport.doorbell import PLACES
from kv_transport.errors import ChecksumMismatch, UnknownRegion
from kv_transport.frames import Placed
from kv_transport.xfer import Xfer
from tests.transport.helpers_transport import damage_shared_copies
from tests.transport.test_direct_posts import DECODE, LOST, Ready, ready
from tests.transport.test_quiet_puts import take_page_from

NBYTES = (3 << 20) + 17
PIECE = 100_000


def told(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """How the owner is told of each put from now on."""
    heard: list[str] = []
    message, frames = ShmSession._put, ShmSession._placed

    def put(self: ShmSession, data: memoryview) -> None:
        heard.append("message")
        message(self, data)

    def placed(self: ShmSession, units: list[Placed]) -> None:
        heard.extend("frame" for _ in units)
        frames(self, units)

    monkeypatch.setattr(ShmSession, "_put", put)
    monkeypatch.setattr(ShmSession, "_placed", placed)
    return heard


def in_pieces(it: Ready, order: Sequence[int]) -> Xfer:
    ours = [XferDesc(it.mine.region, index * PIECE, PIECE) for index in range(len(order))]
    theirs = [XferDesc(it.theirs.region, index * PIECE, PIECE) for index in order]
    return it.left.agent.initialize_xfer(XferOp.WRITE, ours, theirs, DECODE, notif=b"pieces")


async def test_a_put_of_one_run_is_told_by_a_message_and_posted_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with ready(tmp_path) as it:
        heard, put = told(monkeypatch), it.xfer(XferOp.WRITE, NBYTES)
        for turn in range(1, 2 * PLACES):
            it.fill(turn)
            it.left.agent.transfer(put)
            assert put.direct is not None
            stats = await put.done(20_000)
            assert (stats.nbytes, stats.units, stats.retries) == (NBYTES, 1, 0)
            assert it.arrived(NBYTES) and it.notified() == turn
        assert set(heard) == {"message"} and len(heard) == turn
        assert it.left.agent.inventory().work == it.right.agent.inventory().work == ()


async def test_neighbours_are_one_run_and_pieces_in_another_order_have_a_frame(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with ready(tmp_path) as it:
        heard, count = told(monkeypatch), 30
        mixed = random.Random(1).sample(range(count), count)
        for order, by in ((range(count), "message"), (mixed, "frame"), (range(count), "message")):
            put = in_pieces(it, order)
            it.fill(len(heard) + 5)
            it.left.agent.transfer(put)
            await put.done(20_000)
            assert heard.pop() == by and not heard
            for index, other in enumerate(order):
                theirs = it.theirs.memory.data[other * PIECE : (other + 1) * PIECE]
                assert bytes(theirs) == bytes(it.mine.memory.data[index * PIECE : (index + 1) * PIECE])
        assert it.notified() == 3


async def test_a_put_whose_place_in_the_page_is_taken_has_a_frame(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with ready(tmp_path) as it:
        heard, link = told(monkeypatch), it.link
        assert isinstance(link, ShmLink)
        monkeypatch.setattr(link, "_takes_place", lambda seq: False)
        put = it.xfer(XferOp.WRITE, NBYTES)
        it.left.agent.transfer(put)
        await put.done(20_000)
        assert heard == ["frame"] and it.arrived(NBYTES) and it.notified() == 1


@pytest.mark.parametrize("without", ["writer", "owner"])
async def test_a_side_without_a_page_is_answered_by_frames(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, without: str
) -> None:
    take_page_from(without, monkeypatch)
    async with ready(tmp_path) as it:
        heard, put = told(monkeypatch), it.xfer(XferOp.WRITE, NBYTES)
        for _ in range(3):
            it.left.agent.transfer(put)
            await put.done(20_000)
        assert heard == ["message"] * 3 and it.arrived(NBYTES) and it.notified() == 3


@pytest.mark.parametrize("cell", [0, NBYTES // limits.COPY_PIECE_BYTES])
@pytest.mark.parametrize("times", [1, limits.CHECKSUM_RETRIES_MAX, 1_000])
async def test_bytes_that_do_not_pass_are_put_again_and_never_announced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cell: int, times: int
) -> None:
    async with ready(tmp_path) as it:
        damage_shared_copies(monkeypatch, times, of_cell=cell)
        put = it.xfer(XferOp.WRITE, NBYTES)
        it.left.agent.transfer(put)
        if times > limits.CHECKSUM_RETRIES_MAX:
            with pytest.raises(ChecksumMismatch):
                await put.done(20_000)
            assert put.state is XferState.FAILED and it.notified() == 0
        else:
            assert (await put.done(20_000)).retries == times
            assert it.arrived(NBYTES) and it.notified() == 1
        failures = min(times, 1 + limits.CHECKSUM_RETRIES_MAX)
        assert it.left.agent.stats().checksum_failures == failures == it.peer.failed_units
        assert it.left.agent.inventory().work == ()


async def test_a_read_that_does_not_pass_is_made_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with ready(tmp_path) as it:
        damage_shared_copies(monkeypatch, times=2, of_cell=1)
        read = it.xfer(XferOp.READ, NBYTES)
        it.left.agent.transfer(read)
        assert (await read.done(20_000)).retries == 2
        assert it.arrived(NBYTES) and it.left.agent.inventory().work == ()


async def test_what_the_owner_refuses_fails_with_its_reason(tmp_path: Path) -> None:
    async with ready(tmp_path) as it:
        it.right.agent.deregister_memory(it.theirs.region)
        put = it.xfer(XferOp.WRITE, NBYTES)
        it.left.agent.transfer(put)
        with pytest.raises(UnknownRegion):
            await put.done(20_000)
        assert put.state is XferState.FAILED and it.notified() == 0
        assert it.right.agent.stats().units_refused == 1
        assert it.left.agent.inventory().work == ()
        it.left.agent.deregister_memory(it.mine.region)


@pytest.mark.parametrize("op", XferOp)
async def test_a_link_that_breaks_meanwhile_is_followed_by_the_next_transport(tmp_path: Path, op: XferOp) -> None:
    async with ready(tmp_path, "auto") as it:
        xfer = it.xfer(op, NBYTES)
        it.left.agent.transfer(xfer)
        it.link.fail(LOST)
        stats = await xfer.done(20_000)
        assert stats.nbytes == NBYTES and it.arrived(NBYTES)
        assert it.notified() == (1 if op is XferOp.WRITE else 0)
        assert it.left.agent.inventory().work == ()
        (link,) = it.peer.links
        assert link.scheme == "tcp"

"""Units over shm are told several together: none is lost, none told before its bytes are there, none waits for ever."""

from pathlib import Path
from types import SimpleNamespace
from typing import cast

import numpy as np
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kv_core.ids import RequestId
from kv_transport import Access, SharedBuffer, XferDesc, XferOp
from kv_transport.backends.shm_jobs import Jobs, Moved
from kv_transport.backends.shm_link import ShmLink, _together
from kv_transport.backends.shm_session import ShmSession
from kv_transport.errors import GrantRefused
from kv_transport.frames import AckedMany, Frame, Placed, PlacedMany, UnitHead, decode_from_initiator, encode
from kv_transport.types import TransferPriority
from kv_transport.units import Unit
from tests.transport.helpers_transport import LARGE, NO_RESERVE, damage_shared_copies, eventually, pair

TOGETHER = 3
UNIT_BYTES = 128 * 1024
UNITS = 12
PIECE = UNIT_BYTES // 2
CELL = LARGE.slot_layer_nbytes


def unit_of(ticket: int, priority: TransferPriority = TransferPriority.HIGH) -> Unit:
    """As much of a unit as the books look at."""
    grant = SimpleNamespace(ticket=ticket) if ticket else None
    return cast(Unit, SimpleNamespace(ticket=grant, priority=priority))


class JobsMachine(RuleBasedStateMachine):
    """Against plain lists: what is being moved, what waits, what is being told."""

    def __init__(self) -> None:
        super().__init__()
        self.jobs = Jobs(TOGETHER)
        self.moving: list[tuple[int, Unit]] = []
        self.waiting: list[int] = []
        self.handed: list[Moved] = []
        self.seq = 0

    @rule(ticket=st.integers(0, 2), priority=st.sampled_from(TransferPriority))
    def begin(self, ticket: int, priority: TransferPriority) -> None:
        self.seq += 1
        unit = unit_of(ticket, priority)
        self.jobs.begin(unit)
        self.moving.append((self.seq, unit))

    @precondition(lambda self: self.moving)
    @rule(pick=st.integers(0, 99), fails=st.booleans())
    def moved(self, pick: int, fails: bool) -> None:
        seq, unit = self.moving.pop(pick % len(self.moving))
        error = GrantRefused(ticket=1, reason="no") if fails else None
        handed = self.jobs.moved(Moved(seq, unit, error, None))
        self.waiting.append(seq)
        urgent = fails or unit.priority is TransferPriority.CRITICAL
        if urgent or not self.moving or len(self.waiting) >= TOGETHER:
            self.hand_out(handed)
        else:
            assert not handed

    @precondition(lambda self: self.handed)
    @rule(count=st.integers(1, 4))
    def told(self, count: int) -> None:
        over, self.handed = self.handed[:count], self.handed[count:]
        self.jobs.told(over)

    def hand_out(self, jobs: list[Moved]) -> None:
        assert [job.seq for job in jobs] == self.waiting
        self.waiting = []
        self.handed += jobs

    @invariant()
    def what_is_not_told_is_busy(self) -> None:
        units = [unit for _, unit in self.moving] + [job.unit for job in self.handed]
        tickets = {unit.ticket.ticket if unit.ticket is not None else 0 for unit in units}
        if not self.waiting:
            assert {ticket for ticket in range(3) if self.jobs.busy(ticket)} == tickets
        assert self.jobs.busy() is bool(units or self.waiting)
        assert self.moving or not self.waiting, "nobody is left to tell of them"


TestJobs = JobsMachine.TestCase


def buffers() -> tuple[SharedBuffer, SharedBuffer]:
    mine, theirs = (SharedBuffer.create(UNITS * UNIT_BYTES, budget=NO_RESERVE) for _ in range(2))
    mine.data[:] = np.random.default_rng(6).integers(0, 256, len(mine.data), np.uint8)
    return mine, theirs


@pytest.mark.parametrize("spoilt", [0, 1])
async def test_a_put_of_many_units_is_told_in_fewer_frames_and_a_unit_that_went_wrong_goes_again(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, spoilt: int
) -> None:
    """Two workers and a window of 8: told by twos, at least where the pair had time to.

    No unit is a run, which would have a message of its own: its pieces have another order there.
    """
    heard: list[int] = []
    acked: list[int] = []
    left = damage_shared_copies(monkeypatch, spoilt)
    receive, send = ShmSession._placed, ShmSession._send

    def placed(self: ShmSession, frames: list[Placed]) -> None:
        heard.append(len(frames))
        receive(self, frames)

    def sent(self: ShmSession, frame: Frame) -> None:
        acked.append(len(frame.seqs) if isinstance(frame, AckedMany) else 1)
        send(self, frame)

    monkeypatch.setattr(ShmSession, "_placed", placed)
    monkeypatch.setattr(ShmSession, "_send", sent)
    mine, theirs = buffers()
    pieces = range(0, len(mine.data), PIECE)
    with mine, theirs:
        async with pair("shm", tmp_path, unit_bytes=UNIT_BYTES) as (sender, receiver):
            ours = sender.agent.register_memory(mine, Access.NONE).region
            there = receiver.agent.register_memory(theirs, Access.WRITE).region
            metadata = receiver.agent.get_agent_metadata(sender.agent.name.node, sender.agent.name.incarnation)
            sender.agent.add_remote_agent(metadata)
            xfer = sender.agent.initialize_xfer(
                XferOp.WRITE,
                [XferDesc(ours, at, PIECE) for at in pieces],
                [XferDesc(there, at ^ PIECE, PIECE) for at in pieces],
                receiver.agent.name.node,
            )
            for _ in range(10):
                sender.agent.transfer(xfer)
                stats = await xfer.done(20_000)
                assert stats.nbytes == len(mine.data)
                swapped = theirs.data.reshape(-1, 2, PIECE)[:, ::-1]
                assert bytes(swapped.ravel()) == bytes(mine.data)
                theirs.data[:] = 0
            assert sum(heard) == 10 * UNITS and max(heard) == 2
            assert left == [0] and sender.agent.stats().checksum_failures == spoilt
            assert max(acked) == 2
            xfer.release()
            await eventually(lambda: not sender.agent.inventory().work)


async def test_what_is_refused_does_not_take_the_others_with_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """One of two that are told together: the owner answers for each."""
    together: list[int] = []
    receive = ShmSession._placed

    def spoil(self: ShmSession, frames: list[Placed]) -> None:
        if len(frames) == 2 and not together:
            together.append(1)
            checks = bytearray(frames[1].unit.checks)
            checks[0] ^= 1
            head = {name: getattr(frames[1].unit, name) for name in UnitHead.__struct_fields__}
            frames = [frames[0], Placed(frames[1].seq, UnitHead(**{**head, "checks": bytes(checks)}))]
        receive(self, frames)

    monkeypatch.setattr(ShmSession, "_placed", spoil)
    async with pair("shm", tmp_path, geometry=LARGE, slots=32, unit_bytes=CELL) as (sender, receiver):
        count = 16
        source, target = sender.filled(count, seed=1), receiver.blocks(count)
        grant = receiver.engine.grant_writes(
            RequestId("request-1"), target, seq_start=0, seq_end=count * LARGE.block_size
        )
        inbound = receiver.engine.expect(RequestId("request-1"), grant)
        handover = sender.engine.open_handover(RequestId("request-1"), grant)
        for layer in range(LARGE.num_layers):
            handover.submit(layer, source)
        stats = await handover.finish(20_000)
        await inbound.done()
        assert sender.content(source) == receiver.content(target)
        assert stats.retries == 1 == len(together)


def test_units_that_one_frame_cannot_hold_are_told_one_by_one() -> None:
    head = UnitHead(0, 1, runs=[0, 1], notif=bytes(60_000))
    placed = [Placed(seq, head) for seq in range(3)]
    assert _together(placed) == [encode(one) for one in placed]
    (both,) = _together(placed[:2])
    assert decode_from_initiator(both, "peer") == PlacedMany(placed[:2])
    assert _together([]) == []


def test_messages_are_told_as_they_are() -> None:
    placed = [Placed(seq, UnitHead(0, 1, runs=[0, 1])) for seq in range(2)]
    one, both = _together([placed[0], b"message", placed[1]])
    assert one == b"message" and decode_from_initiator(both, "peer") == PlacedMany(placed)


async def test_a_fence_is_confirmed_after_what_was_placed_was_told(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A unit that waits to be told with others is told before its owner hears that nothing is written any more."""
    said: list[str] = []
    whole, confirm = ShmLink._tell, ShmLink._confirm_fences

    def tell(self: ShmLink, jobs: list[Moved]) -> None:
        said.extend("placed" for job in jobs if job.placed is not None)
        whole(self, jobs)

    def confirmed(self: ShmLink) -> None:
        before = set(self._unconfirmed)
        confirm(self)
        said.extend("fenced" for _ in before - self._unconfirmed)

    monkeypatch.setattr(ShmLink, "_tell", tell)
    monkeypatch.setattr(ShmLink, "_confirm_fences", confirmed)
    async with pair("shm", tmp_path, geometry=LARGE, slots=32, unit_bytes=CELL) as (sender, receiver):
        source = sender.filled(16, seed=1)
        for turn in range(6):
            target, request = receiver.blocks(16), RequestId(f"request-{turn}")
            grant = receiver.engine.grant_writes(request, target, seq_start=0, seq_end=16 * LARGE.block_size)
            inbound = receiver.engine.expect(request, grant)
            handover = sender.engine.open_handover(request, grant)
            for layer in range(LARGE.num_layers):
                handover.submit(layer, source)
            await inbound.layer_ready(0)
            inbound.cancel()
            await inbound.released()
            with pytest.raises(GrantRefused):
                await handover.finish(20_000)
            if "fenced" in said:
                assert "placed" not in said[said.index("fenced") :], "told of a ticket that was over"
            said.clear()

"""A link that breaks in mid-transfer: the next transport goes on at the first unit that was not acknowledged."""

from pathlib import Path

import pytest

from kv_core.ids import NodeId, RequestId
from kv_transport import TransferPriority
from kv_transport.backends.base import Link
from kv_transport.errors import ConnectionLost, GrantRefused, TransferCancelled
from kv_transport.frames import Acked, Fence, FromOwner
from kv_transport.types import PeerName
from tests.transport.helpers_transport import LARGE, SMALL, Node, eventually, pair

REQUEST = RequestId("request-1")
LOST = ConnectionLost(peer="decode", transport="shm", cause="pulled out")


def link_of(sender: Node, receiver: Node) -> Link:
    (link,) = sender.agent.peer(receiver.agent.name.node).links
    return link


async def test_tcp_goes_on_where_shm_stopped_and_sends_nothing_twice(tmp_path: Path) -> None:
    async with pair("auto", tmp_path, resume_grace_ms=20_000) as (sender, receiver):
        source, target = sender.filled(6, seed=1), receiver.blocks(6)
        grant = receiver.engine.grant_writes(REQUEST, target, seq_start=0, seq_end=48)
        inbound = receiver.engine.expect(REQUEST, grant, timeout_ms=20_000)
        handover = sender.engine.open_handover(REQUEST, grant)
        handover.submit(0, source)
        await eventually(lambda: 0 not in handover.missing_layers)
        link = link_of(sender, receiver)
        assert link.scheme == "shm"
        received = link._received

        def deaf(frame: FromOwner) -> None:
            # Layer 1 arrives, and the word of it is lost.
            if not isinstance(frame, Acked):
                received(frame)

        link._received = deaf  # type: ignore[method-assign]
        handover.submit(1, source)
        await inbound.layer_ready(1)
        assert handover.missing_layers == [1, 2, 3]
        link.fail(LOST)
        handover.submit(2, source)
        handover.submit(3, source)
        stats = await handover.finish(20_000)
        layer = grant.total_bytes // SMALL.num_layers
        assert stats.transports == {"shm": layer, "tcp": 2 * layer}
        assert stats.transport == "shm+tcp"
        assert stats.nbytes == stats.wire_nbytes == grant.total_bytes
        assert (await inbound.done()).transports == {"shm": 2 * layer, "tcp": 2 * layer}
        assert receiver.content(target) == sender.content(source)
        await inbound.released()
        assert sender.agent.inventory().work == receiver.agent.inventory().work == ()


@pytest.mark.parametrize("breaks", range(3))
async def test_a_link_that_breaks_with_units_in_flight_loses_nothing(tmp_path: Path, breaks: int) -> None:
    async with pair(
        "auto",
        tmp_path,
        geometry=LARGE,
        slots=16,
        unit_bytes=1 << 18,
        connect_timeout_ms=20_000,
        resume_grace_ms=20_000,
    ) as (
        sender,
        receiver,
    ):
        source, target = sender.filled(12, seed=breaks), receiver.blocks(12)
        grant = receiver.engine.grant_writes(REQUEST, target, seq_start=0, seq_end=12 * LARGE.block_size)
        inbound = receiver.engine.expect(REQUEST, grant, timeout_ms=20_000)
        handover = sender.engine.open_handover(REQUEST, grant)
        handover.submit(0, source)
        await inbound.layer_ready(0)
        handover.submit(1, source)
        handover.submit(2, source)
        if breaks:
            link_of(sender, receiver).fail(LOST)
        if breaks == 2:
            await eventually(lambda: any(link.scheme == "tcp" for link in sender.agent.peer(NodeId("decode")).links))
            link_of(sender, receiver).fail(LOST)
        stats = await handover.finish(20_000)
        assert stats.nbytes == grant.total_bytes == (await inbound.done()).nbytes
        assert receiver.content(target) == sender.content(source)
        assert receiver.sealed_and_right(target)
        assert sender.agent.inventory().work == receiver.agent.inventory().work == ()


async def test_a_fetch_goes_on_over_tcp_too(tmp_path: Path) -> None:
    async with pair("auto", tmp_path, geometry=LARGE, slots=16, unit_bytes=1 << 18) as (reader, holder):
        blocks, into = holder.filled(8, seed=3), reader.blocks(8)
        tokens = 8 * LARGE.block_size
        grant = holder.engine.lease_reads(REQUEST, blocks, seq_start=0, seq_end=tokens, lease_ms=60_000)
        future = reader.engine.fetch(grant, into, TransferPriority.CRITICAL)
        await future.layer_ready(0)
        link_of(reader, holder).fail(LOST)
        await future.wait(20_000)
        assert reader.content(into) == holder.content(blocks)
        assert reader.sealed_and_right(into)


async def test_at_the_cap_on_quarantine_a_writer_is_offered_tcp_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with pair("auto", tmp_path, quarantine_slots_max=4, fence_timeout_ms=20) as (sender, receiver):
        writer = sender.agent.name.node
        source = sender.filled(3, seed=4)
        first = receiver.engine.grant_writes(REQUEST, receiver.blocks(3), seq_start=0, seq_end=24)
        inbound = receiver.engine.expect(REQUEST, first)
        # Given out before anybody knew better, to whoever comes.
        early = receiver.engine.grant_writes(RequestId("early"), receiver.blocks(3), seq_start=0, seq_end=24)
        assert early.transports == []
        handover = sender.engine.open_handover(REQUEST, first)
        handover.submit(0, source)
        await inbound.layer_ready(0)
        link = link_of(sender, receiver)
        received = link._received
        fences: list[Fence] = []

        def slow(frame: FromOwner) -> None:
            # A writer that does not answer to a fence, as one that is stopped.
            if isinstance(frame, Fence):
                fences.append(frame)
            else:
                received(frame)

        with monkeypatch.context() as patched:
            patched.setattr(link, "_received", slow)
            inbound.cancel()
            await inbound.settled()
            assert not inbound.slots_free
            assert receiver.agent.stats().quarantined_slots == 3

            asked = receiver.engine.grant_writes(
                RequestId("late"), receiver.blocks(3), seq_start=0, seq_end=24, writer=writer
            )
            assert asked.transports == ["tcp"]
            other = receiver.engine.grant_writes(
                RequestId("other"), receiver.blocks(3), seq_start=0, seq_end=24, writer=NodeId("another")
            )
            assert other.transports == []
            few = receiver.engine.grant_writes(
                RequestId("few"), receiver.blocks(1), seq_start=0, seq_end=8, writer=writer
            )
            assert few.transports == []

            going_on = sender.engine.open_handover(RequestId("early"), early)
            for layer in range(SMALL.num_layers):
                going_on.submit(layer, source)
            # Refused over shm by the cap, and done all the same.
            assert (await going_on.finish(20_000)).transports == {"tcp": early.total_bytes}
        (fence,) = fences
        received(fence)
        await inbound.released()
        assert receiver.agent.stats().quarantined_slots == 0
        with pytest.raises(TransferCancelled):
            await inbound.done()
        await handover.cancel()


class LateSession:
    """A link of the same writer that broke before its question was read."""

    scheme = "tcp"
    one_sided = may_lag = False

    def __init__(self, peer: PeerName) -> None:
        self.peer = peer

    def supersede(self) -> None: ...

    def send_fence(self, ticket: int) -> None: ...


async def test_what_a_broken_link_asks_late_takes_nothing_over(tmp_path: Path) -> None:
    async with pair("tcp", tmp_path) as (sender, receiver):
        source, target = sender.filled(2, seed=5), receiver.blocks(2)
        grant = receiver.engine.grant_writes(REQUEST, target, seq_start=0, seq_end=16)
        handover = sender.engine.open_handover(REQUEST, grant)
        handover.submit(0, source)
        await eventually(lambda: 0 not in handover.missing_layers)
        with pytest.raises(GrantRefused, match="come back by another link"):
            receiver.agent.ledger.open(LateSession(sender.agent.name), grant.ticket, attempt=0)
        for layer in range(1, SMALL.num_layers):
            handover.submit(layer, source)
        await handover.finish(20_000)
        assert receiver.content(target) == sender.content(source)

"""A peer that is killed, stopped or restarted: the other side gets a typed error in time, and its memory back."""

import asyncio
import base64
from pathlib import Path

import pytest

from kv_core.errors import KVError
from kv_core.ids import NodeId, RequestId
from kv_transport import ReadGrant, WriteGrant
from kv_transport.config import TransportName
from kv_transport.errors import ConnectionLost, StaleIncarnation, TransferTimeout, UnknownPeer
from tests.transport.helpers_process import PeerProcess, peer_process
from tests.transport.helpers_proxy import proxied
from tests.transport.helpers_transport import LARGE, SMALL, Node, config, eventually, introduce, node

REQUEST = RequestId("request-1")
QUICK: dict[str, int] = {
    "heartbeat_ms": 50,
    "silence_timeout_ms": 400,
    "fence_timeout_ms": 100,
    "connect_timeout_ms": 500,
}
INSIDE_THE_FIRST_UNIT = 100_000
"""Of a stream: far behind the handshake and the heads."""

BLOCKS = 4
TOKENS = BLOCKS * SMALL.block_size


def grant_to(peer: PeerProcess, me: Node, **push: object) -> WriteGrant:
    """Reserve slots here and let the process fill them."""
    grant = me.engine.grant_writes(REQUEST, me.blocks(BLOCKS), seq_start=0, seq_end=TOKENS)
    text = base64.b64encode(grant.to_bytes()).decode()
    peer.tell("push", grant=text, seed=1, timeout_ms=20_000, **push)
    return grant


async def nothing_left(me: Node) -> None:
    await eventually(lambda: not me.agent.inventory().work)


async def test_two_processes_hand_over(transport: TransportName, tmp_path: Path) -> None:
    async with (
        node("decode", config(transport, tmp_path / "sockets")) as me,
        peer_process("prefill", transport, tmp_path) as peer,
    ):
        await peer.meet(me)
        grant = grant_to(peer, me)
        inbound = me.engine.expect(REQUEST, grant, timeout_ms=20_000)
        stats = await inbound.done()
        assert stats.transport == transport
        assert me.sealed_and_right(grant.blocks())
        assert (await peer.outcome())["event"] == "pushed"
        peer.tell("inventory")
        assert (await peer.hear("inventory"))["work"] == []


async def test_a_killed_sender_fails_the_handover_and_frees_the_slots(transport: TransportName, tmp_path: Path) -> None:
    """Slots reserved for a push must not stay reserved when its sender dies."""
    patient = {"silence_timeout_ms": 100_000, "unit_timeout_ms": 100_000}
    async with (
        node("decode", config(transport, tmp_path / "sockets", **patient)) as me,
        peer_process("prefill", transport, tmp_path) as peer,
    ):
        await peer.meet(me)
        inbound = me.engine.expect(REQUEST, grant_to(peer, me, pause_ms=100_000), timeout_ms=60_000)
        await inbound.layer_ready(0)
        await peer.kill()
        # Well within the time that silence is borne: it is the death that is seen.
        async with asyncio.timeout(50):
            with pytest.raises(ConnectionLost):
                await inbound.layer_ready(1)
            with pytest.raises(ConnectionLost):
                await asyncio.to_thread(inbound.wait_layer, 1)
            await inbound.released()
        assert me.agent.inventory().work == ()


async def test_a_stopped_sender_is_fenced_before_its_slots_are_free(transport: TransportName, tmp_path: Path) -> None:
    """A sender that is only late must not write into blocks that have been given to somebody else."""
    async with (
        node("decode", config(transport, tmp_path / "sockets", **QUICK)) as me,
        peer_process("prefill", transport, tmp_path, 1, **QUICK) as peer,
    ):
        await peer.meet(me)
        inbound = me.engine.expect(REQUEST, grant_to(peer, me, pause_ms=100_000), timeout_ms=60_000)
        await inbound.layer_ready(0)
        peer.stop()
        with pytest.raises(TransferTimeout):
            await inbound.layer_ready(1)
        if transport == "shm":
            # It might go on writing the moment it is continued: its slots are not given out.
            await inbound.settled()
            assert [item.detail for item in me.agent.inventory().of("quarantine")] == ["4 slots, writer prefill#1"]
            assert not inbound.slots_free
            assert me.agent.stats().quarantined_slots == BLOCKS
            peer.go_on()
        await asyncio.wait_for(inbound.released(), 10)
        assert me.agent.inventory().work == ()


async def test_a_stopped_sender_that_is_killed_leaves_no_quarantine(tmp_path: Path) -> None:
    async with (
        node("decode", config("shm", tmp_path / "sockets", **QUICK)) as me,
        peer_process("prefill", "shm", tmp_path, 1, **QUICK) as peer,
    ):
        await peer.meet(me)
        inbound = me.engine.expect(REQUEST, grant_to(peer, me, pause_ms=100_000), timeout_ms=60_000)
        await inbound.layer_ready(0)
        peer.stop()
        await inbound.settled()
        assert me.agent.inventory().of("quarantine")
        await peer.kill()
        await asyncio.wait_for(inbound.released(), 10)
        await nothing_left(me)


async def test_a_host_that_vanishes_in_the_middle_of_a_unit_leaves_neither_quarantine_nor_connection(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def vanish(start: int, piece: bytearray) -> None:
        """What comes behind is lost, and the connection stays: nobody is there to end it."""
        del piece[max(0, INSIDE_THE_FIRST_UNIT - start) :]

    waits = {"silence_timeout_ms": 100_000, "unit_timeout_ms": 100_000}
    patient = config("tcp", tmp_path, tcp_streams=1, heartbeat_ms=50, **waits)
    async with (
        node("prefill", patient, geometry=LARGE, slots=8) as sender,
        node("decode", config("tcp", tmp_path, tcp_streams=1, **QUICK), geometry=LARGE, slots=8) as me,
    ):
        introduce(sender, me)
        name = sender.agent.name
        metadata = me.agent.get_agent_metadata(name.node, name.incarnation)
        async with proxied(metadata, vanish) as through:
            sender.agent.add_remote_agent(through)
            grant = me.engine.grant_writes(REQUEST, me.blocks(1), seq_start=0, seq_end=LARGE.block_size)
            inbound = me.engine.expect(REQUEST, grant, timeout_ms=60_000)
            handover = sender.engine.open_handover(REQUEST, grant)
            handover.submit(0, sender.filled(1, seed=1))
            with pytest.raises(TransferTimeout):
                await inbound.done()
            await asyncio.wait_for(inbound.released(), 10)
            # The sender may have come again meanwhile; the connection that was cut is over.
            assert me.agent.inventory().work == () and "peer is silent transport=tcp" in caplog.text
            await handover.cancel()
            await sender.agent.remove_remote_agent(me.agent.name.node)
            await eventually(lambda: not me.agent.inventory().of("session"))


@pytest.mark.parametrize("how", ["kill", "stop"])
async def test_a_receiver_that_dies_or_stops_fails_the_sender(
    transport: TransportName, tmp_path: Path, how: str
) -> None:
    """A dead peer ends the transfer in bounded time instead of a request that hangs."""
    async with (
        node("prefill", config(transport, tmp_path / "sockets", **QUICK)) as me,
        peer_process("decode", transport, tmp_path, 1, **QUICK) as peer,
    ):
        await peer.meet(me)
        peer.tell("expect", blocks=BLOCKS, tokens=TOKENS, request=REQUEST, timeout_ms=60_000)
        grant = WriteGrant.from_bytes(base64.b64decode(str((await peer.hear("granted"))["grant"])))
        handover = me.engine.open_handover(REQUEST, grant)
        source = me.filled(BLOCKS, seed=1)
        handover.submit(0, source)
        await eventually(lambda: 0 not in handover.missing_layers)
        if how == "kill":
            await peer.kill()
        else:
            peer.stop()
        with pytest.raises((ConnectionLost, TransferTimeout)):
            for layer in range(1, SMALL.num_layers):
                handover.submit(layer, source)
            await handover.finish(30_000)
        assert me.agent.inventory().work == ()


@pytest.mark.parametrize("how", ["kill", "stop"])
async def test_a_holder_that_dies_or_stops_fails_the_reader_or_does_not_matter(
    transport: TransportName, tmp_path: Path, how: str
) -> None:
    async with (
        node("decode", config(transport, tmp_path / "sockets", **QUICK)) as me,
        peer_process("store", transport, tmp_path, 1, **QUICK) as peer,
    ):
        await peer.meet(me)
        peer.tell("lease", blocks=BLOCKS, seed=3, lease_ms=60_000)
        grant = ReadGrant.from_bytes(base64.b64decode(str((await peer.hear("leased"))["grant"])))
        await me.engine.fetch(grant, me.blocks(BLOCKS)).wait(10_000)
        if how == "kill":
            await peer.kill()
        else:
            peer.stop()
        target = me.blocks(BLOCKS)
        try:
            await me.engine.fetch(grant, target).wait(20_000)
        except KVError as error:
            assert isinstance(error, ConnectionLost | TransferTimeout)
        else:
            # Memory that is mapped can be read whatever its owner does, and proves itself.
            assert transport == "shm" and me.sealed_and_right(target)
        assert me.agent.inventory().work == ()


async def test_a_restarted_peer_is_another_peer(transport: TransportName, tmp_path: Path) -> None:
    """Cached metadata of a peer's former life is told from the new one's, which is met once and then works."""
    async with node("prefill", config(transport, tmp_path / "sockets", **QUICK)) as me:
        async with peer_process("decode", transport, tmp_path, 1, **QUICK) as peer:
            await peer.meet(me)
            peer.tell("expect", blocks=BLOCKS, tokens=TOKENS, request=REQUEST, timeout_ms=60_000)
            old = WriteGrant.from_bytes(base64.b64decode(str((await peer.hear("granted"))["grant"])))
            await peer.kill()
        async with peer_process("decode", transport, tmp_path, 2, **QUICK) as peer:
            await peer.meet(me)
            with pytest.raises(StaleIncarnation):
                me.engine.open_handover(REQUEST, old)
            peer.tell("expect", blocks=BLOCKS, tokens=TOKENS, request=REQUEST, timeout_ms=60_000)
            new = WriteGrant.from_bytes(base64.b64decode(str((await peer.hear("granted"))["grant"])))
            handover = me.engine.open_handover(REQUEST, new)
            source = me.filled(BLOCKS, seed=1)
            for layer in range(SMALL.num_layers):
                handover.submit(layer, source)
            await handover.finish(10_000)
            heard = await peer.outcome()
            assert heard["event"] == "received" and heard["right"]


async def test_one_peer_that_answers_nothing_does_not_hold_up_another_one(
    transport: TransportName, tmp_path: Path
) -> None:
    """A handshake with an unreachable peer must not block those with healthy ones."""
    async with (
        node("prefill", config(transport, tmp_path / "sockets")) as me,
        peer_process("stopped", transport, tmp_path) as stopped,
        node("decode", config(transport, tmp_path / "sockets")) as other,
    ):
        await stopped.meet(me)
        stopped.tell("expect", blocks=BLOCKS, tokens=TOKENS, request=REQUEST, timeout_ms=60_000)
        grant = WriteGrant.from_bytes(base64.b64decode(str((await stopped.hear("granted"))["grant"])))
        stopped.stop()
        stuck = me.engine.open_handover(REQUEST, grant)
        name = me.agent.name
        me.agent.add_remote_agent(other.agent.get_agent_metadata(name.node, name.incarnation))
        grant = other.engine.grant_writes(REQUEST, other.blocks(BLOCKS), seq_start=0, seq_end=TOKENS)
        handover = me.engine.open_handover(REQUEST, grant)
        source = me.filled(BLOCKS, seed=1)
        for layer in range(SMALL.num_layers):
            handover.submit(layer, source)
        await handover.finish(1_500)  # less than the connect timeout of the other one
        assert not stuck.missing_layers == []
        await stuck.cancel()


async def test_a_stranger_is_unknown(tmp_path: Path) -> None:
    async with node("prefill", config("tcp", tmp_path)) as me:
        with pytest.raises(UnknownPeer):
            await me.agent.send_notif(NodeId("nobody"), b"")

"""How much is on its way at once, and how soon it starts."""

import asyncio
import base64
import os
import socket
from pathlib import Path

import pytest

from kv_core.ids import NodeId, RequestId
from kv_transport import Access, SharedBuffer, XferDesc, XferOp, XferState, limits
from kv_transport.backends.seqpacket import FrameSocket
from kv_transport.config import TransportName
from kv_transport.errors import TransferCancelled
from kv_transport.poster import LoopPoster
from kv_transport.tickets import WriteGrant
from tests.transport.helpers_process import peer_process
from tests.transport.helpers_transport import NO_RESERVE, SMALL, config, eventually, introduce, node, pair

REQUEST = RequestId("windowed")
BLOCKS, TOKENS = 8, 64
UNIT_BYTES = 4096
UNITS = SMALL.num_layers * BLOCKS * SMALL.slot_layer_nbytes // UNIT_BYTES


async def test_a_window_of_units_is_on_its_way_before_the_first_answer(tmp_path: Path) -> None:
    """The peer is stopped, so nothing is answered: what waits for it is the window, and no more than the window."""
    window = 3
    settings = config("tcp", tmp_path / "sockets", window_size=window, unit_bytes=UNIT_BYTES)
    async with (
        node("prefill", settings) as me,
        peer_process("decode", "tcp", tmp_path) as peer,
    ):
        await peer.meet(me)
        peer.tell("expect", blocks=BLOCKS, tokens=TOKENS, request=REQUEST, timeout_ms=60_000)
        grant = WriteGrant.from_bytes(base64.b64decode(str((await peer.hear("granted"))["grant"])))
        handover = me.engine.open_handover(REQUEST, grant)
        state = me.agent.peer(NodeId("decode"))
        source = me.filled(BLOCKS, seed=1)
        await eventually(lambda: state.flows[0].link is not None)
        peer.stop()
        for layer in range(SMALL.num_layers):
            handover.submit(layer, source)
        assert state.links[0].units_posted == window
        assert state.units_waiting == UNITS - window
        peer.go_on()
        stats = await handover.finish(20_000)
        assert stats.units == UNITS
        assert (await peer.outcome())["right"]


async def test_over_a_standing_link_a_transfer_is_posted_before_anybody_waits(
    transport: TransportName, tmp_path: Path
) -> None:
    with (
        SharedBuffer.create(4096, "one", budget=NO_RESERVE) as one,
        SharedBuffer.create(4096, "two", budget=NO_RESERVE) as two,
    ):
        async with pair(transport, tmp_path) as (left, right):
            mine = left.agent.register_memory(one)
            theirs = right.agent.register_memory(two, Access.WRITE)
            introduce(left, right)
            ours, others = [XferDesc(mine.region, 0, 4096)], [XferDesc(theirs.region, 0, 4096)]
            xfer = left.agent.initialize_xfer(XferOp.WRITE, ours, others, NodeId("decode"))
            left.agent.transfer(xfer)
            await xfer.done(10_000)
            (link,) = left.agent.peer(NodeId("decode")).links
            for turn in range(3):
                one.data[:] = turn + 1
                left.agent.transfer(xfer)
                assert xfer.state is XferState.POSTED and link.units_posted == 1
                await xfer.done(10_000)
                assert bytes(two.data_view) == bytes([turn + 1]) * 4096


async def test_what_is_given_up_while_it_is_announced_is_told(transport: TransportName, tmp_path: Path) -> None:
    """Over a standing link the grant is asked for before anybody waits; who takes that back must say so."""
    async with pair(transport, tmp_path) as (sender, receiver):
        await sender.agent.send_notif(NodeId("decode"), b"a link")
        (link,) = sender.agent.peer(NodeId("decode")).links
        grant = receiver.engine.grant_writes(REQUEST, receiver.blocks(BLOCKS), seq_start=0, seq_end=TOKENS)
        inbound = receiver.engine.expect(REQUEST, grant, timeout_ms=60_000)
        handover = sender.engine.open_handover(REQUEST, grant)
        await handover.cancel()
        with pytest.raises(TransferCancelled):
            await asyncio.wait_for(inbound.done(), 20)
        await asyncio.wait_for(inbound.released(), 20)
        assert not link._open
        await eventually(lambda: not sender.agent.inventory().work and not receiver.agent.inventory().work)


async def test_two_clusters_of_the_same_names_live_on_one_host(transport: TransportName, tmp_path: Path) -> None:
    async with pair(transport, tmp_path / "a") as first, pair(transport, tmp_path / "b") as second:

        async def hand_over(cluster: int) -> bool:
            sender, receiver = (first, second)[cluster]
            into = receiver.blocks(BLOCKS)
            grant = receiver.engine.grant_writes(REQUEST, into, seq_start=0, seq_end=TOKENS)
            inbound = receiver.engine.expect(REQUEST, grant)
            handover, source = sender.engine.open_handover(REQUEST, grant), sender.filled(BLOCKS, seed=cluster)
            for layer in range(SMALL.num_layers):
                handover.submit(layer, source)
            await handover.finish(10_000)
            await inbound.done()
            return receiver.content(into) == sender.content(source)

        assert all(await asyncio.gather(hand_over(0), hand_over(1)))


async def test_a_cancelled_hand_over_leaves_the_window_to_others(transport: TransportName, tmp_path: Path) -> None:
    async with pair(transport, tmp_path, window_size=1, unit_bytes=UNIT_BYTES) as (sender, receiver):
        grants = [
            receiver.engine.grant_writes(RequestId(f"r{turn}"), receiver.blocks(BLOCKS), seq_start=0, seq_end=TOKENS)
            for turn in range(2)
        ]
        one, other = (sender.engine.open_handover(RequestId(grant.request_id), grant) for grant in grants)
        source = sender.filled(BLOCKS, seed=1)
        for handover in (one, other):
            for layer in range(SMALL.num_layers):
                handover.submit(layer, source)
        await one.cancel()
        stats = await other.finish(10_000)
        assert stats.units == UNITS
        with pytest.raises(TransferCancelled):
            await one.finish(1_000)


async def test_descriptors_that_nobody_asked_for_are_dropped_and_the_frame_counts() -> None:
    """An owner takes none: what a peer sends beside its frame must not pile up here."""
    loop, heard = asyncio.get_running_loop(), asyncio.Queue[bytes]()
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    ours.setblocking(False)
    ended: list[str] = []
    frames = FrameSocket(
        ours,
        loop,
        LoopPoster(loop),
        lambda data, fds: heard.put_nowait(bytes(data) + bytes(len(fds))),
        ended.append,
    )
    with theirs:
        before = len(os.listdir("/proc/self/fd"))
        for _ in range(5):
            socket.send_fds(theirs, [b"frame"], [theirs.fileno()])
            assert await asyncio.wait_for(heard.get(), 10) == b"frame"
        assert len(os.listdir("/proc/self/fd")) == before
        theirs.send(bytes(limits.CONTROL_FRAME_BYTES_MAX + 500))
        await eventually(lambda: ended == ["frame too long"])
    frames.close()

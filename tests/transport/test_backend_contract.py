"""What every transport promises, whichever it is: run over each of them, with one body.

The contract is stated in `backends/base.py`. Peers of their own process, which can be killed and stopped, are in
`test_backend_contract_processes.py`.
"""

import asyncio
import os
import threading
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import numpy as np
import pytest

from kv_core.block import BlockGeometry
from kv_core.errors import KVError
from kv_core.ids import NodeId, RegionId, RequestId
from kv_transport import Access, SharedBuffer, TransferAgent, WriteGrant, XferDesc, XferOp, XferState
from kv_transport.backends.base import Link
from kv_transport.backends.memory_network import MemoryFaults, MemoryNetwork
from kv_transport.backends.shm_link import ShmLink
from kv_transport.backends.ucx_link import UcxLink
from kv_transport.config import TransportName
from kv_transport.errors import (
    AgentClosed,
    AuthenticationFailed,
    ConnectionLost,
    GrantRefused,
    InvalidDescriptor,
    LeaseEnded,
    NoTransport,
    ReplayedNonce,
    StaleGeneration,
    StaleIncarnation,
    TransferCancelled,
    TransferTimeout,
)
from kv_transport.frames import Fence, Fenced, Frame, FromOwner, Keyed, Mapped
from kv_transport.handover import Handover
from kv_transport.inbound import Inbound
from tests.transport.helpers_backends import BACKENDS, Place
from tests.transport.helpers_transport import LARGE, NO_RESERVE, SMALL, Node, eventually, introduce
from tests.transport.helpers_ucp import only_ucp, replace_opener

REQUEST = RequestId("request-1")
BLOCKS = 4
DECODE = NodeId("decode")
QUICK: dict[str, int] = {
    "heartbeat_ms": 50,
    "silence_timeout_ms": 400,
    "fence_timeout_ms": 100,
    "connect_timeout_ms": 500,
}


BY_UCP = "ucx by ucp"
"""`ucx` over the older binding, as far as its stand-in goes."""


@pytest.fixture(params=[*BACKENDS, BY_UCP])
def place(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Place:
    name: TransportName = request.param
    if request.param == BY_UCP:
        if "asyncio" in request.node.name:
            pytest.skip("runs on uvloop")  # a binding opens UCX and does nothing on a loop
        replace_opener(monkeypatch, only_ucp)
        name = "ucx"
    return Place(name, tmp_path, MemoryNetwork(1))


@pytest.fixture(autouse=True)
async def nothing_leaks() -> AsyncIterator[None]:
    """No thread and no descriptor outlives the agents of a test."""
    before = len(os.listdir("/proc/self/fd"))
    yield
    await eventually(lambda: not any(thread.name.startswith("kv-") for thread in threading.enumerate()))
    await eventually(lambda: len(os.listdir("/proc/self/fd")) <= before)


def granted(receiver: Node, blocks: int = BLOCKS, timeout_ms: int = 20_000) -> tuple[WriteGrant, Inbound]:
    tokens = blocks * receiver.arena.geometry.block_size
    grant = receiver.engine.grant_writes(REQUEST, receiver.blocks(blocks), seq_start=0, seq_end=tokens)
    return grant, receiver.engine.expect(REQUEST, grant, timeout_ms=timeout_ms)


async def send_all(sender: Node, grant: WriteGrant, seed: int = 1) -> tuple[Handover, list[bytes]]:
    """Everything under a grant; returns when it is over."""
    source = sender.filled(grant.num_positions, seed)
    handover = sender.engine.open_handover(REQUEST, grant)
    for layer in range(grant.layer_end):
        handover.submit(layer, source)
    await handover.finish(20_000)
    return handover, sender.content(source)


def idle(*nodes: Node) -> bool:
    return not any(node.agent.inventory().work for node in nodes)


# Put, get, notify.


@pytest.mark.parametrize("sizes", [[1], [4096], [65_537, 3, 1 << 20], [7] * 300, [9 << 20]])
async def test_put_and_get_bring_every_byte_and_no_other(place: Place, sizes: list[int]) -> None:
    gap, total = 5, sum(sizes) + 5 * len(sizes)
    with (
        SharedBuffer.create(total, "one", budget=NO_RESERVE) as one,
        SharedBuffer.create(total, "two", budget=NO_RESERVE) as two,
        SharedBuffer.create(total, "back", budget=NO_RESERVE) as back,
    ):
        async with place.pair() as (left, right):
            one.data[:] = np.random.default_rng(3).integers(1, 256, total)
            mine, again = left.agent.register_memory(one), left.agent.register_memory(back)
            theirs = right.agent.register_memory(two, Access.WRITE)
            introduce(left, right)
            starts = np.cumsum([0, *(size + gap for size in sizes[:-1])]).tolist()
            pieces = list(zip(starts, sizes, strict=True))
            local = [XferDesc(mine.region, start, size) for start, size in pieces]
            remote = [XferDesc(theirs.region, start, size) for start, size in pieces]
            async with left.agent.initialize_xfer(XferOp.WRITE, local, remote, DECODE, notif=b"done") as put:
                left.agent.transfer(put)
                note = await asyncio.wait_for(anext(right.agent.notifs()), 10)
                expected = np.zeros(total, np.uint8)
                for start, size in pieces:
                    expected[start : start + size] = one.data[start : start + size]
                # The notification tells of bytes that are there and verified.
                assert note.payload == b"done" and np.array_equal(two.data, expected)
                stats = await put.done(20_000)
            assert stats.transport == place.transport and stats.nbytes == sum(sizes)
            into = [XferDesc(again.region, start, size) for start, size in pieces]
            async with left.agent.initialize_xfer(XferOp.READ, into, remote, DECODE) as get:
                left.agent.transfer(get)
                await get.done(20_000)
            assert np.array_equal(back.data, expected)
            assert idle(left, right)


async def test_notifications_keep_their_order(place: Place) -> None:
    async with place.pair() as (left, right):
        sent = [f"note {number}".encode() * (1 + number % 50) for number in range(200)] + [b"x" * 60_000, b"last"]
        for payload in sent:
            await left.agent.send_notif(DECODE, payload)
        notes = right.agent.notifs()
        async with asyncio.timeout(20):
            assert [(await anext(notes)).payload for _ in sent] == sent


@pytest.mark.parametrize("geometry", [SMALL, LARGE])
async def test_a_handover_completes_on_both_sides_with_every_layer_in_order(place: Place, geometry: object) -> None:
    geometry = LARGE if geometry is LARGE else SMALL
    async with place.pair(geometry=geometry, slots=16) as (sender, receiver):
        for seed in range(3):
            grant, inbound = granted(receiver)
            _, sent = await send_all(sender, grant, seed)
            stats = await inbound.done()
            await inbound.released()
            assert receiver.content(grant.blocks()) == sent
            assert receiver.sealed_and_right(grant.blocks())
            assert stats.transport == place.transport and stats.nbytes == grant.total_bytes
            lease = sender.engine.lease_reads(
                REQUEST, sender.filled(2, seed), seq_start=0, seq_end=2 * geometry.block_size, lease_ms=60_000
            )
            into = receiver.blocks(2)
            await receiver.engine.fetch(lease, into).wait(20_000)
            assert receiver.content(into) == sender.content(lease.blocks())
            sender.engine.release_lease(lease.ticket)
        await eventually(lambda: idle(sender, receiver))


# Who and what is refused.


async def test_pieces_outside_a_region_are_refused_whoever_is_asked(place: Place) -> None:
    with (
        SharedBuffer.create(4096, "one", budget=NO_RESERVE) as one,
        SharedBuffer.create(4096, "two", budget=NO_RESERVE) as two,
    ):
        async with place.pair() as (left, right):
            mine, theirs = left.agent.register_memory(one), right.agent.register_memory(two, Access.WRITE)
            shut = right.agent.register_memory(two)
            name = left.agent.name
            honest = right.agent.get_agent_metadata(name.node, name.incarnation)
            left.agent.add_remote_agent(honest)
            with pytest.raises(InvalidDescriptor):
                left.agent.prep_xfer_dlist(DECODE, [XferDesc(theirs.region, 4000, 97)])
            # Our own idea of the peer's regions may be wrong, or forged: the peer must not believe it.
            lies = [
                msgspec.structs.replace(info, nbytes=1 << 20, access="write") if info.region != right.region else info
                for info in honest.regions
            ]
            left.agent.add_remote_agent(msgspec.structs.replace(honest, regions=lies))
            for region, offset, op in [
                (theirs.region, 4090, XferOp.WRITE),
                (theirs.region, 4090, XferOp.READ),
                (shut.region, 0, XferOp.WRITE),
                (shut.region, 0, XferOp.READ),
                (RegionId(77), 0, XferOp.WRITE),
            ]:
                local, remote = [XferDesc(mine.region, 0, 64)], [XferDesc(region, offset, 64)]
                if region == 77:
                    extra = msgspec.structs.replace(lies[-1], region=77)
                    left.agent.add_remote_agent(msgspec.structs.replace(honest, regions=[*lies, extra]))
                async with left.agent.initialize_xfer(op, local, remote, DECODE) as xfer:
                    left.agent.transfer(xfer)
                    with pytest.raises(KVError) as refused:
                        await xfer.done(10_000)
                    assert not isinstance(refused.value, TransferTimeout), (region, op)
            assert not two.data.any() and idle(left, right)


async def test_references_to_an_earlier_use_of_a_slot_bring_no_byte(place: Place) -> None:
    async with place.pair() as (sender, receiver):
        grant, inbound = granted(receiver)
        receiver.arena.raise_generation(grant.slots[1])
        before = receiver.content(grant.blocks())
        with pytest.raises(StaleGeneration):
            await send_all(sender, grant)
        with pytest.raises(StaleGeneration):
            await inbound.done()
        await inbound.released()
        assert receiver.content(grant.blocks()) == before
        held = sender.filled(2, seed=4)
        lease = sender.engine.lease_reads(REQUEST, held, seq_start=0, seq_end=16, lease_ms=60_000)
        sender.arena.raise_generation(held[0].slot)
        into = receiver.blocks(2)
        with pytest.raises(StaleGeneration):
            await receiver.engine.fetch(lease, into).wait(10_000)
        assert not receiver.sealed_and_right(into)
        sender.engine.release_lease(lease.ticket)
        lease = sender.engine.lease_reads(REQUEST, sender.filled(2, 5), seq_start=0, seq_end=16, lease_ms=60_000)
        sender.engine.release_lease(lease.ticket)
        with pytest.raises(LeaseEnded):
            await receiver.engine.fetch(lease, into).wait(10_000)
        await eventually(lambda: idle(sender, receiver))


async def test_a_peer_without_the_right_key_gets_nowhere(place: Place) -> None:
    async with place.pair(settings=QUICK) as (sender, receiver):
        name = sender.agent.name
        honest = receiver.agent.get_agent_metadata(name.node, name.incarnation)
        sender.agent.add_remote_agent(msgspec.structs.replace(honest, session_key=bytes(32)))
        grant, inbound = granted(receiver)
        # Over ucx such a peer is not even answered, since that would need an endpoint to it.
        silent = (TransferTimeout, ConnectionLost) if place.transport == "ucx" else (AuthenticationFailed,)
        with pytest.raises(silent):
            await send_all(sender, grant)
        assert receiver.agent.inventory().of("session") == ()
        assert inbound.missing_layers == list(range(SMALL.num_layers))
        inbound.cancel()
        await inbound.released()


async def test_a_grant_is_for_its_writer_only(place: Place) -> None:
    async with place.pair() as (sender, receiver), place.node("thief") as thief:
        introduce(sender, receiver, thief)
        tokens = BLOCKS * SMALL.block_size
        target = receiver.blocks(BLOCKS)
        grant = receiver.engine.grant_writes(
            REQUEST, target, seq_start=0, seq_end=tokens, writer=sender.agent.name.node
        )
        inbound = receiver.engine.expect(REQUEST, grant)
        before = receiver.content(target)
        with pytest.raises(GrantRefused):
            await send_all(thief, grant)
        assert receiver.content(target) == before
        _, sent = await send_all(sender, grant)
        await inbound.done()
        assert receiver.content(target) == sent


async def test_a_nonce_is_good_for_one_unit(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TransferAgent, "_next_nonce", lambda self: 7)
    async with place.pair(settings={"window_size": 1}) as (sender, receiver):
        grant, inbound = granted(receiver)
        with pytest.raises(ReplayedNonce):
            await send_all(sender, grant)
        with pytest.raises(KVError):
            await inbound.done()
        await inbound.released()
        assert receiver.agent.stats().units_refused >= 1


async def test_a_peer_that_went_away_is_a_lost_connection_and_its_next_life_is_another_peer(place: Place) -> None:
    async with place.node("prefill", settings=QUICK) as sender:
        async with place.node("decode", settings=QUICK) as receiver:
            introduce(sender, receiver)
            old, _ = granted(receiver)
            await send_all(sender, old)
            old, _ = granted(receiver)
        with pytest.raises((ConnectionLost, TransferTimeout, NoTransport)):
            await send_all(sender, old)
        async with place.node("decode", incarnation=2, settings=QUICK) as receiver:
            introduce(sender, receiver)
            with pytest.raises(StaleIncarnation):
                sender.engine.open_handover(REQUEST, old)
            grant, inbound = granted(receiver)
            _, sent = await send_all(sender, grant)
            await inbound.done()
            assert receiver.content(grant.blocks()) == sent
        assert idle(sender)


# Ends.


async def test_a_sender_that_cancels_frees_both_sides(place: Place) -> None:
    async with place.pair() as (sender, receiver):
        grant, inbound = granted(receiver)
        handover = sender.engine.open_handover(REQUEST, grant)
        handover.submit(0, sender.filled(BLOCKS, seed=1))
        await inbound.layer_ready(0)
        await handover.cancel()
        with pytest.raises(TransferCancelled):
            await inbound.done()
        await asyncio.wait_for(inbound.released(), 10)
        await eventually(lambda: idle(sender, receiver))
        grant, inbound = granted(receiver)
        _, sent = await send_all(sender, grant)
        await inbound.done()
        assert receiver.content(grant.blocks()) == sent


async def test_after_a_fence_nothing_lands(place: Place) -> None:
    """The receiver gives up while units are on their way: once the slots are free, no byte of them changes."""
    place.network.faults = MemoryFaults(delay_ns=3_000_000, jitter_ns=3_000_000)
    async with place.pair(geometry=LARGE, slots=16, settings={"unit_bytes": 256 << 10}) as (sender, receiver):
        for number in range(6):
            grant, inbound = granted(receiver)
            source = sender.filled(BLOCKS, seed=number)
            handover = sender.engine.open_handover(REQUEST, grant)
            for layer in range(LARGE.num_layers - 1):  # one is missing, so it cannot be complete
                handover.submit(layer, source)
            if number % 3:
                await asyncio.sleep(0.004 * (number % 3))
            else:
                await inbound.layer_ready(0)
            inbound.cancel()
            await asyncio.wait_for(inbound.released(), 10)
            for ref in grant.blocks():
                receiver.arena.raise_generation(ref.slot)
                for layer in range(LARGE.num_layers):
                    receiver.arena.cell(ref.slot, layer)[:] = bytes([number]) * LARGE.slot_layer_nbytes
            await handover.cancel()
            assert handover.state is XferState.FAILED
            assert all(set(cell) == {number} for cell in receiver.content(grant.blocks()))
        await eventually(lambda: idle(sender, receiver))


@pytest.mark.parametrize("geometry", [SMALL, LARGE])
async def test_a_fence_that_comes_before_the_memory_can_be_reached_is_for_all_that_waits(
    place: Place, geometry: BlockGeometry, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not only for the first of the units: what was confirmed is kept, and no byte comes after it."""
    received, held = Link._received, list[tuple[Link, FromOwner]]()

    def fence_first(link: Link, frame: FromOwner) -> None:
        if isinstance(frame, Mapped | Keyed):
            held.append((link, frame))
            return
        received(link, frame)
        if isinstance(frame, Fence):
            for item in held:
                received(*item)

    monkeypatch.setattr(Link, "_received", fence_first)
    async with place.pair(geometry=geometry, slots=16, settings={"unit_bytes": 256 << 10}) as (sender, receiver):
        grant, inbound = granted(receiver)
        source = sender.filled(BLOCKS, seed=1)
        handover = sender.engine.open_handover(REQUEST, grant)
        for layer in range(geometry.num_layers - 1):
            for ref in source:
                handover.submit(layer, [ref], source.index(ref))
        peer = sender.agent.peer(DECODE)
        await eventually(lambda: bool(peer.links))
        (link,) = peer.links
        send, confirmed = link._send, list[Frame]()

        def note(frame: Frame) -> None:
            if isinstance(frame, Fenced):
                confirmed.append(frame)
                receiver.arena.data_view[:] = bytes(len(receiver.arena.data_view))
            send(frame)

        link._send = note  # type: ignore[method-assign]
        await eventually(lambda: bool(held) or not isinstance(link, ShmLink | UcxLink))
        inbound.cancel()
        await asyncio.wait_for(inbound.released(), 10)
        await handover.cancel()
        assert handover.state is XferState.FAILED
        if held:
            assert len(confirmed) == 1 and not any(map(any, receiver.content(grant.blocks())))
        await eventually(lambda: idle(sender, receiver))


@pytest.mark.parametrize("who", ["sender", "receiver"])
async def test_closing_an_agent_ends_what_is_under_way_with_a_typed_error(place: Place, who: str) -> None:
    place.network.faults = MemoryFaults(delay_ns=5_000_000)
    async with place.pair(geometry=LARGE, slots=16, settings=QUICK) as (sender, receiver):
        grant, inbound = granted(receiver)
        source = sender.filled(BLOCKS, seed=1)
        handover = sender.engine.open_handover(REQUEST, grant)
        handover.submit(0, source)
        await inbound.layer_ready(0)
        async with asyncio.timeout(10):
            await (sender if who == "sender" else receiver).agent.close()
            with pytest.raises((AgentClosed, ConnectionLost, TransferTimeout, NoTransport, GrantRefused)):
                for layer in range(1, LARGE.num_layers):
                    handover.submit(layer, source)
                await handover.finish(5_000)
            if who == "sender":
                with pytest.raises((AgentClosed, ConnectionLost, TransferCancelled)):
                    await inbound.done()
                await inbound.released()
        assert idle(sender)
        if who == "sender":
            await eventually(lambda: receiver.agent.inventory().of("session") == () and idle(receiver))


async def test_what_is_there_is_listed_with_its_owner(place: Place, request: pytest.FixtureRequest) -> None:
    async with place.pair() as (sender, receiver):
        grant, inbound = granted(receiver)
        handover = sender.engine.open_handover(REQUEST, grant)
        handover.submit(0, sender.filled(BLOCKS, seed=1))
        await inbound.layer_ready(0)
        (link,), (transfer,) = sender.agent.inventory().of("link"), sender.agent.inventory().of("transfer")
        (session,), (held,) = receiver.agent.inventory().of("session"), receiver.agent.inventory().of("grant")
        (mine,) = sender.agent.inventory().of("transport")
        assert (link.ident, link.owner, link.state) == (place.transport, "decode#1", "open")
        assert transfer.owner == "decode#1" and REQUEST in transfer.ident
        assert (session.ident, session.owner) == (place.transport, "prefill#1")
        assert (held.owner, held.state) == (REQUEST, "open")
        assert mine.ident == place.transport and mine.state
        assert mine.state.startswith("ucp ") is (BY_UCP in request.node.name)
        (peer,) = sender.agent.stats().peers
        assert peer.transports == (place.transport,) and peer.preferred == place.transport
        await handover.cancel()
        await inbound.released()
        await sender.agent.remove_remote_agent(DECODE)
        assert sender.agent.inventory().of("link") == ()
        await eventually(lambda: receiver.agent.inventory().of("session") == ())


def open_here() -> tuple[int, int]:
    """Descriptors of this process, and mappings of shared memory."""
    maps = Path("/proc/self/maps").read_text().splitlines()
    return len(os.listdir("/proc/self/fd")), sum("/memfd:" in line for line in maps)


async def test_whoever_comes_and_goes_leaves_no_session_descriptor_or_mapping_at_one_who_stays(place: Place) -> None:
    """Lives of one peer and peers of other names, that write, are written to and are read from, and say no goodbye."""
    async with place.node("decode", settings=QUICK) as stays:
        seen: list[tuple[int, int]] = []
        for name, life in [("a", 1), ("a", 2), ("b", 1), ("c", 1), ("c", 2), ("c", 3)]:
            async with place.node(name, incarnation=life, settings=QUICK) as comes:
                introduce(stays, comes)
                for sender, receiver in ((comes, stays), (stays, comes)):
                    grant, inbound = granted(receiver)
                    await send_all(sender, grant, seed=life)
                    await inbound.done()
                lease = comes.engine.lease_reads(
                    REQUEST, comes.filled(2, seed=life), seq_start=0, seq_end=2 * SMALL.block_size, lease_ms=60_000
                )
                await stays.engine.fetch(lease, stays.blocks(2)).wait(20_000)
            await eventually(lambda: stays.agent.inventory().of("session") == ())
            await eventually(lambda: stays.agent.inventory().of("link") == ())
            assert idle(stays)
            if seen:
                await eventually(lambda: all(now <= then for now, then in zip(open_here(), seen[0], strict=True)))
            seen.append(open_here())
        assert len(stays.agent.inventory().of("peer")) == 3

"""Peers that answer nothing, come back, or split the model otherwise: faults that other systems' users met."""

import asyncio
import contextlib
import socket
from pathlib import Path

import msgspec
import numpy as np
import pytest

from kv_core.hashing import hash_tokens
from kv_core.ids import Incarnation, NodeId, RequestId
from kv_core.namespace import Namespace
from kv_core.testing.loop import LoopClock, run_virtual
from kv_prefix.block_pool import BlockPool
from kv_transport import HeadSplit, TransportConfig
from kv_transport.backends.memory_network import MemoryFaults, MemoryNetwork
from kv_transport.errors import ConnectionLost, InvalidDescriptor, NoTransport, ReplayedNonce, TransferTimeout
from kv_transport.types import PeerName
from kv_transport.units import Unit
from tests.transport.helpers_memory import memory_node
from tests.transport.helpers_reshard import filled_ranks, geometry, ranks
from tests.transport.helpers_transport import SMALL, Node, config, eventually, introduce, node, pair

REQUEST = RequestId("request-1")


async def push(sender: Node, receiver: Node, seed: int) -> bool:
    source, target = sender.filled(2, seed), receiver.blocks(2)
    request = RequestId(f"request-{seed}")
    grant = receiver.engine.grant_writes(request, target, seq_start=0, seq_end=2 * SMALL.block_size)
    inbound = receiver.engine.expect(request, grant)
    handover = sender.engine.open_handover(request, grant)
    for layer in range(SMALL.num_layers):
        handover.submit(layer, source)
    await handover.finish(20_000)
    await inbound.done()
    return receiver.content(target) == sender.content(source)


async def test_a_connect_that_nobody_accepts_holds_nobody_up_and_ends_in_time(tmp_path: Path) -> None:
    """A connect that blocks the loop, or has no timeout, stalls every other peer (two minutes, elsewhere)."""
    with contextlib.ExitStack() as stack:
        hole = stack.enter_context(socket.socket())
        hole.bind(("127.0.0.1", 0))
        hole.listen(0)
        for _ in range(4):  # its backlog is full: further connections are not even refused
            filler = stack.enter_context(socket.socket())
            filler.setblocking(False)
            filler.connect_ex(hole.getsockname())
        async with pair("tcp", tmp_path, connect_timeout_ms=700) as (sender, receiver):
            honest = receiver.agent.get_agent_metadata(sender.agent.name.node, sender.agent.name.incarnation)
            address = f"127.0.0.1:{hole.getsockname()[1]}".encode()
            (tcp,) = honest.addresses
            silent = msgspec.structs.replace(
                honest, node="hole", addresses=[msgspec.structs.replace(tcp, address=address)]
            )
            sender.agent.add_remote_agent(silent)
            stuck = asyncio.create_task(sender.agent.send_notif(NodeId("hole"), b"anybody?"))
            await asyncio.sleep(0.05)
            assert await push(sender, receiver, 1) and not stuck.done()
            with pytest.raises((ConnectionLost, NoTransport)):
                await stuck
            await sender.agent.remove_remote_agent(NodeId("hole"))


async def test_nonces_are_remembered_for_each_life_of_each_peer(tmp_path: Path) -> None:
    """A sender that restarts counts from the beginning again; what its former life used up is not held against it."""
    settings = config("tcp", tmp_path)
    async with node("decode", settings) as receiver, node("other", settings) as other:
        for incarnation in (1, 2):
            async with node("prefill", settings, incarnation=incarnation) as sender:
                introduce(sender, receiver)
                assert await push(sender, receiver, incarnation)
                window = receiver.agent.ledger._history(PeerName(NodeId("prefill"), Incarnation(incarnation))).nonces
                for used in range(2, 2 + SMALL.num_layers):  # the first number told this opening from later ones
                    with pytest.raises(ReplayedNonce):
                        window.use(used)
        introduce(other, receiver)
        assert await push(other, receiver, 3)
        assert set(receiver.agent.ledger._histories) == {
            PeerName(NodeId("prefill"), Incarnation(2)),
            PeerName(NodeId("other"), Incarnation(1)),
        }


def test_a_hand_over_lives_as_long_as_its_sender_however_long_it_computes() -> None:
    """Heartbeats keep it alive far beyond every timeout on silence, without a byte being sent."""

    async def main(clock: LoopClock) -> None:
        network = MemoryNetwork(1, MemoryFaults(delay_ns=100_000))
        settings = TransportConfig(transport="memory", heartbeat_ms=100, silence_timeout_ms=300, unit_timeout_ms=300)
        async with (
            memory_node("prefill", network, clock, settings=settings) as sender,
            memory_node("decode", network, clock, settings=settings) as receiver,
        ):
            introduce(sender, receiver)
            source, target = sender.filled(2, 1), receiver.blocks(2)
            grant = receiver.engine.grant_writes(REQUEST, target, seq_start=0, seq_end=16)
            inbound = receiver.engine.expect(REQUEST, grant)
            handover = sender.engine.open_handover(REQUEST, grant)
            for layer in range(SMALL.num_layers):
                await asyncio.sleep(3)  # ten times the silence that counts as death
                handover.submit(layer, source)
            await handover.finish(1_000)
            await inbound.done()
            assert receiver.content(target) == sender.content(source)
            assert clock.monotonic_ns() > 4 * 3_000_000_000

    run_virtual(main)


async def test_references_past_the_end_are_refused_before_a_byte_moves(tmp_path: Path) -> None:
    async with pair("tcp", tmp_path) as (sender, receiver):
        source = sender.filled(2, 1)
        grant = receiver.engine.grant_writes(REQUEST, receiver.blocks(2), seq_start=0, seq_end=16)
        for wrong in ({"slots": [0, receiver.arena.num_slots]}, {"slots": [0, -1]}, {"slots": [3, 3]}):
            with pytest.raises(InvalidDescriptor):
                msgspec.structs.replace(grant, **wrong)
        handover = sender.engine.open_handover(REQUEST, grant)
        for layer, blocks, start in ((0, source, 1), (0, [], 0), (SMALL.num_layers, source, 0), (-1, source, 0)):
            with pytest.raises(InvalidDescriptor):
                handover.submit(layer, blocks, start)
        await handover.cancel()
        assert handover.stats().nbytes == 0


async def test_a_wait_keeps_its_timeout_and_says_which_layers_are_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The transfer itself goes on: a deadline of the caller frees no memory."""
    async with pair("tcp", tmp_path) as (sender, receiver):
        source, target = sender.filled(2, 1), receiver.blocks(2)
        lease = sender.engine.lease_reads(REQUEST, source, seq_start=0, seq_end=16, lease_ms=60_000)
        reached = receiver.agent.peer(NodeId("prefill"))
        await reached.connect()
        link = next(iter(reached._links.values()))
        real = link._begin
        held: list[tuple[int, Unit]] = []

        def begin(seq: int, unit: Unit) -> None:
            if unit.layer == 2:
                held.append((seq, unit))
            else:
                real(seq, unit)

        monkeypatch.setattr(link, "_begin", begin)
        future = receiver.engine.fetch(lease, target)
        with pytest.raises(TransferTimeout) as caught:
            await future.wait(300)
        assert caught.value.fields["missing_layers"] == future.missing_layers == [2]
        assert caught.value.fields["timeout_ms"] == 300
        for seq, unit in held:
            real(seq, unit)
        await future.wait(20_000)
        assert receiver.content(target) == sender.content(source)
        sender.engine.release_lease(lease.ticket)


async def test_what_four_ranks_hold_alike_is_found_and_read_by_one(tmp_path: Path) -> None:
    """One latent head that every rank has: a look-up with another number of ranks missed it elsewhere.

    Names say nothing of ranks, so each rank's pool finds what one process asks for, and any of them can serve it.
    """
    model, tokens = geometry(1, planes=1), np.arange(9, dtype="<u4").tobytes()
    namespace = Namespace("latent", "main", block_size=model.block_size)
    names = hash_tokens(namespace, tokens[: 8 * 4])
    whole = np.random.default_rng(5).integers(0, 1 << 16, (2, 2, 1, 1, 4, 8), dtype=np.uint16)
    async with ranks(config("tcp", tmp_path), model, 4, 1, slots=4) as (sources, (target,)):
        pools = []
        for source, refs in zip(sources, filled_ranks(sources, whole), strict=True):
            pool = BlockPool(4, model.block_size, region=source.region)
            opened = pool.open(REQUEST, pool.match(namespace.digest, names, tokens), 2)
            assert [ref.slot for ref in opened.refs] == [ref.slot for ref in refs]
            pool.commit(opened.table, namespace.digest, 0, names, tokens[: 8 * 4])
            pools.append(pool)
        asked = hash_tokens(Namespace("latent", "main", block_size=model.block_size), tokens[: 8 * 4])
        matches = [pool.match(namespace.digest, asked, tokens) for pool in pools]
        assert [len(match.refs) for match in matches] == [2, 2, 2, 2]
        grants = [
            source.engine.lease_reads(
                REQUEST, [source.arena.ref(source.region, ref.slot) for ref in match.refs],
                seq_start=0, seq_end=8, lease_ms=60_000,
            )
            for source, match in zip(sources, matches, strict=True)
        ]  # fmt: skip
        into = target.blocks(2)
        await target.engine.fetch_heads(grants, into, HeadSplit(1, 0, 1)).wait(20_000)
        assert np.array_equal([target.arena.array[ref.slot] for ref in into], whole)
        for source, grant in zip(sources, grants, strict=True):
            source.engine.release_lease(grant.ticket)
        await eventually(lambda: target.agent.inventory().work == ())

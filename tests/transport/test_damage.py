"""Bytes that change on their way: never shown, tried again, counted, and given up on after a stated number."""

from pathlib import Path

import pytest

from kv_core.block import BlockGeometry, BlockRef
from kv_core.ids import RequestId
from kv_transport import Handover, Inbound, limits
from kv_transport.errors import ChecksumMismatch, ConnectionLost, StaleGeneration
from tests.transport.helpers_proxy import flip_at, proxied
from tests.transport.helpers_transport import LARGE, SMALL, Node, damage_shared_copies, eventually, introduce, pair

REQUEST = RequestId("request-1")
COUNT = 4
TOKENS = COUNT * LARGE.block_size
INSIDE_THE_FIRST_PAYLOAD = 400_000
"""Of a stream: far behind the handshake and the heads, before the end of the first 1 MiB unit."""


def opened(
    sender: Node, receiver: Node, target: list[BlockRef], request: RequestId = REQUEST
) -> tuple[Inbound, Handover]:
    """A hand-over into these blocks to which nothing is submitted yet, from both sides."""
    tokens = len(target) * receiver.arena.geometry.block_size
    grant = receiver.engine.grant_writes(request, target, seq_start=0, seq_end=tokens)
    inbound = receiver.engine.expect(request, grant)
    return inbound, sender.engine.open_handover(request, grant)


async def hand_over(sender: Node, receiver: Node) -> tuple[list[bytes], list[bytes], int]:
    """Everything, layer by layer: what was sent, what arrived, how many units were posted again."""
    source, target = sender.filled(COUNT, seed=1), receiver.blocks(COUNT)
    inbound, handover = opened(sender, receiver, target)
    for layer in range(LARGE.num_layers):
        handover.submit(layer, source)
    stats = await handover.finish(20_000)
    await inbound.done()
    return sender.content(source), receiver.content(target), stats.retries


async def test_a_copy_that_goes_wrong_is_made_again(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    async with pair("shm", tmp_path, geometry=LARGE, slots=8) as (sender, receiver):
        left = damage_shared_copies(monkeypatch, times=limits.CHECKSUM_RETRIES_MAX)
        sent, arrived, retries = await hand_over(sender, receiver)
        assert left == [0] and sent == arrived
        assert 1 <= retries <= limits.CHECKSUM_RETRIES_MAX
        assert sender.agent.stats().checksum_failures == sender.agent.stats().retries == retries


async def test_a_payload_that_changes_on_the_wire_is_sent_again(tmp_path: Path) -> None:
    async with pair("tcp", tmp_path, geometry=LARGE, slots=8, tcp_streams=1) as (sender, receiver):
        name = sender.agent.name
        metadata = receiver.agent.get_agent_metadata(name.node, name.incarnation)
        async with proxied(metadata, flip_at(INSIDE_THE_FIRST_PAYLOAD, times=1)) as through:
            sender.agent.add_remote_agent(through)
            sent, arrived, retries = await hand_over(sender, receiver)
            assert sent == arrived
            assert retries == 1 == receiver.agent.stats().checksum_failures
            await sender.agent.remove_remote_agent(receiver.agent.name.node)


async def test_a_head_that_changes_on_the_wire_ends_the_connection_and_another_one_goes_on(tmp_path: Path) -> None:
    async with pair("tcp", tmp_path, geometry=LARGE, slots=8, tcp_streams=1) as (sender, receiver):
        name = sender.agent.name
        metadata = receiver.agent.get_agent_metadata(name.node, name.incarnation)
        heads: list[int] = []

        def damage(start: int, piece: bytearray) -> None:
            # The first piece behind the handshake is the frame that announces the grant.
            if start > 150 and not heads:
                heads.append(start)
                piece[30] ^= 1

        async with proxied(metadata, damage) as through:
            sender.agent.add_remote_agent(through)
            sent, arrived, _ = await hand_over(sender, receiver)
            assert heads and sent == arrived
            await sender.agent.remove_remote_agent(receiver.agent.name.node)


@pytest.mark.parametrize("scheme", ["shm", "tcp"])
async def test_bytes_that_never_pass_fail_both_sides_and_are_never_shown(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, scheme: str
) -> None:
    async with pair("shm" if scheme == "shm" else "tcp", tmp_path, geometry=LARGE, slots=8, window_size=1) as (
        sender,
        receiver,
    ):
        source, target = sender.filled(COUNT, seed=1), receiver.blocks(COUNT)
        if scheme == "shm":
            damage_shared_copies(monkeypatch, times=1_000)
        else:
            # What was sealed is no longer what lies there: the sender's memory itself is bad.
            sender.arena.cell(source[0].slot, 0)[7] ^= 1
        inbound, handover = opened(sender, receiver, target)
        handover.submit(0, source)
        with pytest.raises(ChecksumMismatch):
            await inbound.layer_ready(0)
        await inbound.released()
        with pytest.raises(ChecksumMismatch) as caught:
            for layer in range(1, LARGE.num_layers):
                handover.submit(layer, source)
            await handover.finish(20_000)
        assert caught.value.fields["layer"] == 0
        failures = (sender if scheme == "shm" else receiver).agent.stats().checksum_failures
        assert failures == 1 + limits.CHECKSUM_RETRIES_MAX
        assert all(receiver.arena.block_checks(ref.slot) == [0] * LARGE.num_layers for ref in target)
        await eventually(lambda: not sender.agent.inventory().work and not receiver.agent.inventory().work)


@pytest.mark.parametrize("geometry", [SMALL, LARGE], ids=["on the loop", "in a worker"])
async def test_a_byte_that_changed_since_it_was_sealed_is_refused_over_shm(
    tmp_path: Path, geometry: BlockGeometry
) -> None:
    """The source is not summed again: what arrived is compared with what was recorded when it was sealed."""
    async with pair("shm", tmp_path, geometry=geometry, slots=8) as (sender, receiver):
        source, target = sender.filled(COUNT, seed=1), receiver.blocks(COUNT)
        sender.arena.cell(source[1].slot, 0)[7] ^= 1
        inbound, handover = opened(sender, receiver, target)
        handover.submit(0, source)
        with pytest.raises(ChecksumMismatch):
            await inbound.done()
        await inbound.released()
        assert sender.agent.stats().checksum_failures == 1 + limits.CHECKSUM_RETRIES_MAX
        assert all(receiver.arena.block_checks(ref.slot) == [0] * geometry.num_layers for ref in target)
        await eventually(lambda: not sender.agent.inventory().work and not receiver.agent.inventory().work)


async def test_a_reader_does_not_believe_what_does_not_pass(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    async with pair("shm", tmp_path, geometry=LARGE, slots=8) as (holder, reader):
        blocks, into = holder.filled(COUNT, seed=2), reader.blocks(COUNT)
        grant = holder.engine.lease_reads(REQUEST, blocks, seq_start=0, seq_end=TOKENS, lease_ms=60_000)
        damage_shared_copies(monkeypatch, times=1_000)
        with pytest.raises(ChecksumMismatch):
            await reader.engine.fetch(grant, into).wait(20_000)
        assert all(reader.arena.block_checks(ref.slot) == [0] * LARGE.num_layers for ref in into)
        monkeypatch.undo()
        await reader.engine.fetch(grant, into).wait(20_000)
        assert reader.content(into) == holder.content(blocks)


async def test_a_connection_that_is_cut_within_a_unit_leaves_nothing_shown(tmp_path: Path) -> None:
    async with pair("tcp", tmp_path, geometry=LARGE, slots=8, tcp_streams=1) as (sender, receiver):
        name = sender.agent.name
        metadata = receiver.agent.get_agent_metadata(name.node, name.incarnation)

        def cut(start: int, piece: bytearray) -> None:
            if start + len(piece) > INSIDE_THE_FIRST_PAYLOAD:
                raise ConnectionResetError

        introduce(receiver, sender)
        async with proxied(metadata, cut) as through:
            sender.agent.add_remote_agent(through)
            source, target = sender.filled(COUNT, seed=1), receiver.blocks(COUNT)
            inbound, handover = opened(sender, receiver, target)
            for layer in range(LARGE.num_layers):
                handover.submit(layer, source)
            with pytest.raises(ConnectionLost):
                await handover.finish(20_000)
            with pytest.raises(ConnectionLost):
                await inbound.done()
            await inbound.released()
            assert all(receiver.arena.block_checks(ref.slot) == [0] * LARGE.num_layers for ref in target)
            assert sender.agent.inventory().work == receiver.agent.inventory().work == ()


@pytest.mark.parametrize("geometry", [SMALL, LARGE], ids=["on the loop", "in a worker"])
async def test_a_slot_that_was_given_to_other_content_is_not_written_though_it_is_mapped(
    tmp_path: Path, geometry: BlockGeometry
) -> None:
    """The owner would refuse the unit, but its bytes would lie there already."""
    async with pair("shm", tmp_path, geometry=geometry, slots=8) as (sender, receiver):
        source, target = sender.filled(COUNT, seed=1), receiver.blocks(COUNT)
        for attempt in ("mapped by this", "refused"):
            inbound, handover = opened(sender, receiver, target, RequestId(attempt))
            if attempt == "refused":
                receiver.arena.raise_generation(target[1].slot)
                receiver.arena.data[:] = 7
            for layer in range(geometry.num_layers):
                handover.submit(layer, source)
            if attempt == "refused":
                with pytest.raises(StaleGeneration):
                    await handover.finish(20_000)
                inbound.cancel()
                await inbound.released()
            else:
                await handover.finish(20_000)
                await inbound.done()
        assert set(bytes(receiver.arena.data)) == {7}

"""A hand-over between two agents, over each transport: right bytes, layer by layer, nothing left behind."""

import asyncio
import dataclasses
import gc
import weakref
from pathlib import Path

import pytest

from kv_core.block import BlockGeometry, BlockRef, Layout
from kv_core.errors import LocalProtocolError
from kv_core.ids import Generation, RequestId
from kv_transport import Arena, TransferPriority, XferState
from kv_transport.config import TransportName
from kv_transport.errors import (
    GeometryMismatch,
    GrantRefused,
    StaleGeneration,
    TransferCancelled,
    TransferTimeout,
)
from kv_transport.inbound import Inbound
from tests.transport.helpers_transport import LARGE, NO_RESERVE, SMALL, eventually, pair

REQUEST = RequestId("request-1")


@pytest.mark.parametrize("geometry", [SMALL, LARGE], ids=["small", "large"])
@pytest.mark.parametrize(
    "layouts", [(Layout.LAYER_FIRST, Layout.LAYER_FIRST), (Layout.LAYER_FIRST, Layout.BLOCK_FIRST)], ids=["lf", "mixed"]
)
async def test_a_handover_brings_every_byte(
    transport: TransportName, tmp_path: Path, geometry: BlockGeometry, layouts: tuple[Layout, Layout]
) -> None:
    """Also between arenas of another layout: cells are the same wherever they lie."""
    async with pair(transport, tmp_path, geometry=geometry, layouts=layouts) as (sender, receiver):
        source, target = sender.filled(9, seed=1), receiver.blocks(9)
        tokens = 9 * geometry.block_size - 3
        grant = receiver.engine.grant_writes(REQUEST, target, seq_start=0, seq_end=tokens)
        inbound = receiver.engine.expect(REQUEST, grant, timeout_ms=10_000)
        handover = sender.engine.open_handover(REQUEST, grant)
        for layer in range(geometry.num_layers):
            handover.submit(layer, source)
            await inbound.layer_ready(layer)
            assert inbound.arrival.layer_ready(layer)
        sent = await handover.finish(10_000)
        received = await inbound.done()
        await inbound.released()
        assert receiver.content(target) == sender.content(source)
        assert receiver.sealed_and_right(target)
        assert sent.nbytes == received.nbytes == inbound.total_bytes == handover.total_bytes
        assert sent.transport == received.transport == transport
        assert sent.retries == 0
        assert sender.agent.inventory().work == receiver.agent.inventory().work == ()


async def test_pieces_of_a_layer_may_come_in_any_order(transport: TransportName, tmp_path: Path) -> None:
    async with pair(transport, tmp_path) as (sender, receiver):
        source, target = sender.filled(10, seed=2), receiver.blocks(10)
        grant = receiver.engine.grant_writes(REQUEST, target, seq_start=16, seq_end=96)
        inbound = receiver.engine.expect(REQUEST, grant)
        handover = sender.engine.open_handover(REQUEST, grant)
        for layer in reversed(range(SMALL.num_layers)):
            handover.submit(layer, source[6:], start=6)
            handover.submit(layer, source[:6])
        await handover.finish(10_000)
        await inbound.done()
        assert receiver.content(target) == sender.content(source)


async def test_cells_that_were_not_sealed_are_sealed_on_the_way(transport: TransportName, tmp_path: Path) -> None:
    async with pair(transport, tmp_path, geometry=LARGE) as (sender, receiver):
        source, target = sender.filled(3, seed=3, sealed=False), receiver.blocks(3)
        grant = receiver.engine.grant_writes(REQUEST, target, seq_start=0, seq_end=3 * LARGE.block_size)
        handover = sender.engine.open_handover(REQUEST, grant)
        for layer in range(LARGE.num_layers):
            handover.submit(layer, source)
        await handover.finish(10_000)
        assert receiver.content(target) == sender.content(source)
        assert sender.sealed_and_right(source) and receiver.sealed_and_right(target)


async def test_a_compute_thread_feeds_and_another_one_waits(transport: TransportName, tmp_path: Path) -> None:
    async with pair(transport, tmp_path, geometry=LARGE) as (sender, receiver):
        source, target = sender.filled(4, seed=4, sealed=False), receiver.blocks(4)
        grant = receiver.engine.grant_writes(REQUEST, target, seq_start=0, seq_end=4 * LARGE.block_size)
        inbound = receiver.engine.expect(REQUEST, grant)
        handover = sender.engine.open_handover(REQUEST, grant)

        def prefill() -> None:
            for layer in range(LARGE.num_layers):
                handover.submit_threadsafe(layer, source)

        def decode() -> bytes:
            seen = b""
            for layer in range(LARGE.num_layers):
                inbound.wait_layer(layer, timeout_ms=10_000)
                seen += b"".join(bytes(receiver.arena.cell(ref.slot, layer)) for ref in target)
            return seen

        reading = asyncio.create_task(asyncio.to_thread(decode))
        await asyncio.to_thread(prefill)
        await handover.finish(10_000)
        sent = [bytes(sender.arena.cell(ref.slot, layer)) for layer in range(LARGE.num_layers) for ref in source]
        assert await reading == b"".join(sent)


async def test_transfer_for_decode_takes_blocks_by_tokens_and_bytes(transport: TransportName, tmp_path: Path) -> None:
    for layout in Layout:
        async with pair(transport, tmp_path / layout.value, layouts=(layout, Layout.LAYER_FIRST)) as (sender, receiver):
            source, target = sender.filled(5, seed=5), receiver.blocks(5)
            grant = receiver.engine.grant_writes(REQUEST, target, seq_start=8, seq_end=46)
            sender.engine.add_grant(grant)
            blocks = sender.arena.kv_blocks(sender.region, [ref.slot for ref in source], 8, 46)
            future = sender.engine.transfer_for_decode(
                REQUEST, blocks, receiver.agent.name.node, TransferPriority.CRITICAL
            )
            await future.layer_ready(0)
            assert 0 not in future.missing_layers
            stats = await future.wait(10_000)
            assert stats.nbytes == future.total_bytes == grant.total_bytes
            assert future.state is XferState.DONE
            assert receiver.content(target) == sender.content(source)


async def test_a_grant_serves_one_request_once(transport: TransportName, tmp_path: Path) -> None:
    async with pair(transport, tmp_path) as (sender, receiver):
        source, target = sender.filled(2, seed=6), receiver.blocks(2)
        grant = receiver.engine.grant_writes(REQUEST, target, seq_start=0, seq_end=16)
        with pytest.raises(GrantRefused):
            sender.engine.open_handover(RequestId("another"), grant)
        handover = sender.engine.open_handover(REQUEST, grant)
        for layer in range(SMALL.num_layers):
            handover.submit(layer, source)
        await handover.finish(10_000)
        before = receiver.content(target)
        # The ticket is used up: what is sent again is not written, whatever it holds now.
        sender.arena.cell(source[0].slot, 0)[:4] = b"new!"
        sender.arena.seal_block(source[0].slot)
        again = sender.engine.open_handover(REQUEST, grant)
        for layer in range(SMALL.num_layers):
            again.submit(layer, source)
        await again.finish(10_000)
        assert receiver.content(target) == before


async def test_what_was_never_submitted_fails_the_handover(transport: TransportName, tmp_path: Path) -> None:
    async with pair(transport, tmp_path) as (sender, receiver):
        source, target = sender.filled(2, seed=7), receiver.blocks(2)
        grant = receiver.engine.grant_writes(REQUEST, target, seq_start=0, seq_end=16)
        inbound = receiver.engine.expect(REQUEST, grant)
        handover = sender.engine.open_handover(REQUEST, grant)
        handover.submit(0, source)
        await inbound.layer_ready(0)
        with pytest.raises(LocalProtocolError, match=r"\[1, 2, 3\]"):
            await handover.finish(10_000)
        with pytest.raises(LocalProtocolError):
            await inbound.done()
        await inbound.released()
        assert sender.agent.inventory().work == receiver.agent.inventory().work == ()


async def test_a_receiver_that_gives_up_tells_the_sender(transport: TransportName, tmp_path: Path) -> None:
    async with pair(transport, tmp_path) as (sender, receiver):
        source, target = sender.filled(2, seed=8), receiver.blocks(2)
        grant = receiver.engine.grant_writes(REQUEST, target, seq_start=0, seq_end=16)
        inbound = receiver.engine.expect(REQUEST, grant)
        handover = sender.engine.open_handover(REQUEST, grant)
        handover.submit(0, source)
        await inbound.layer_ready(0)
        inbound.cancel()
        await inbound.released()
        with pytest.raises(TransferCancelled):
            await inbound.done()
        with pytest.raises(GrantRefused):
            # Whether it hears of it before it sends on, or by having sent on.
            for layer in range(1, SMALL.num_layers):
                handover.submit(layer, source)
            await handover.finish(10_000)
        assert sender.agent.inventory().work == receiver.agent.inventory().work == ()


async def test_what_is_given_up_between_its_last_unit_and_the_news_of_it_is_free_at_once(
    transport: TransportName, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The grant is complete by then, so no fence comes: the slots must not wait for one."""
    news: list[int] = []
    tell = Inbound.layer_done
    monkeypatch.setattr(Inbound, "layer_done", lambda inbound, layer: news.append(layer))
    async with pair(transport, tmp_path) as (sender, receiver):
        source, target = sender.filled(4, seed=5), receiver.blocks(4)
        grant = receiver.engine.grant_writes(REQUEST, target, seq_start=0, seq_end=4 * SMALL.block_size)
        inbound = receiver.engine.expect(REQUEST, grant)
        handover = sender.engine.open_handover(REQUEST, grant)
        for layer in range(SMALL.num_layers):
            handover.submit(layer, source)
        await handover.finish(10_000)
        await eventually(lambda: len(news) == SMALL.num_layers)
        inbound.cancel()
        with pytest.raises(TransferCancelled):
            await inbound.done()
        assert inbound.slots_free
        for layer in news:
            tell(inbound, layer)  # late, and of no consequence
        assert inbound.error is not None
        assert receiver.agent.inventory().work == ()


async def test_a_sender_that_gives_up_tells_the_receiver(transport: TransportName, tmp_path: Path) -> None:
    async with pair(transport, tmp_path) as (sender, receiver):
        source, target = sender.filled(2, seed=9), receiver.blocks(2)
        grant = receiver.engine.grant_writes(REQUEST, target, seq_start=0, seq_end=16)
        inbound = receiver.engine.expect(REQUEST, grant)
        handover = sender.engine.open_handover(REQUEST, grant)
        handover.submit(0, source)
        await inbound.layer_ready(0)
        await handover.cancel()
        with pytest.raises(TransferCancelled):
            await inbound.layer_ready(1)
        with pytest.raises(TransferCancelled):
            inbound.wait_layer(1)
        await inbound.released()
        assert sender.agent.inventory().work == receiver.agent.inventory().work == ()


async def test_a_receiver_does_not_wait_for_ever_for_a_sender_that_never_comes(tmp_path: Path) -> None:
    async with pair("shm", tmp_path) as (_, receiver):
        grant = receiver.engine.grant_writes(REQUEST, receiver.blocks(2), seq_start=0, seq_end=16)
        inbound = receiver.engine.expect(REQUEST, grant, timeout_ms=20)
        with pytest.raises(TransferTimeout) as caught:
            await inbound.done()
        assert caught.value.fields["missing_layers"] == [0, 1, 2, 3]
        await inbound.released()
        assert receiver.agent.inventory().work == ()


async def test_blocks_of_another_arena_than_the_grant_is_for_are_refused_with_both_values(tmp_path: Path) -> None:
    other = dataclasses.replace(SMALL, block_size=16)
    async with pair("tcp", tmp_path) as (sender, receiver):
        with Arena.create(other, 4, budget=NO_RESERVE) as arena:
            region = sender.agent.register_memory(arena).region
            grant = receiver.engine.grant_writes(REQUEST, receiver.blocks(1), seq_start=0, seq_end=8)
            handover = sender.engine.open_handover(REQUEST, grant)
            with pytest.raises(GeometryMismatch) as caught:
                handover.submit(0, [BlockRef(region, 0, arena.raise_generation(0))])
            assert caught.value.fields == {"field": "block_size", "ours": 16, "theirs": 8}
            await handover.cancel()
            sender.agent.deregister_memory(region)


async def test_a_slot_that_was_reused_is_never_written(transport: TransportName, tmp_path: Path) -> None:
    async with pair(transport, tmp_path) as (sender, receiver):
        source, target = sender.filled(2, seed=10), receiver.blocks(2)
        grant = receiver.engine.grant_writes(REQUEST, target, seq_start=0, seq_end=16)
        receiver.arena.raise_generation(target[1].slot)
        before = receiver.content(target)
        handover = sender.engine.open_handover(REQUEST, grant)
        with pytest.raises(StaleGeneration):
            handover.submit(0, [BlockRef(sender.region, source[0].slot, Generation(7))])
        for layer in range(SMALL.num_layers):
            handover.submit(layer, source)
        with pytest.raises(StaleGeneration):
            await handover.finish(10_000)
        assert receiver.content(target) == before


async def test_a_handover_that_is_over_is_gone_without_a_collection(transport: TransportName, tmp_path: Path) -> None:
    async with pair(transport, tmp_path) as (sender, receiver):
        source, target = sender.filled(2, seed=3), receiver.blocks(2)
        grant = receiver.engine.grant_writes(REQUEST, target, seq_start=0, seq_end=2 * SMALL.block_size)
        inbound = receiver.engine.expect(REQUEST, grant)
        handover = sender.engine.open_handover(REQUEST, grant)
        for layer in range(SMALL.num_layers):
            handover.submit(layer, source)
        await handover.finish(10_000)
        await inbound.done()
        await inbound.released()
        gone = weakref.ref(inbound)
        gc.disable()
        try:
            del inbound
            await eventually(lambda: gone() is None)
        finally:
            gc.enable()

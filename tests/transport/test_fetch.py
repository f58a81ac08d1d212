"""Leased reads between two agents, over each transport."""

import asyncio
from pathlib import Path

import pytest

from kv_core.block import BlockGeometry, Layout
from kv_core.ids import RequestId
from kv_transport import XferState
from kv_transport.config import TransportName
from kv_transport.errors import InvalidDescriptor, LeaseEnded, StaleGeneration, TransferCancelled
from tests.transport.helpers_transport import LARGE, SMALL, eventually, pair

REQUEST = RequestId("shared-prefix")


@pytest.mark.parametrize("geometry", [SMALL, LARGE], ids=["small", "large"])
async def test_a_fetch_brings_every_byte_with_its_checksum(
    transport: TransportName, tmp_path: Path, geometry: BlockGeometry
) -> None:
    layouts = (Layout.BLOCK_FIRST, Layout.LAYER_FIRST)
    async with pair(transport, tmp_path, geometry=geometry, layouts=layouts) as (holder, reader):
        source, target = holder.filled(7, seed=1), reader.blocks(7)
        grant = holder.engine.lease_reads(
            REQUEST, source, seq_start=0, seq_end=7 * geometry.block_size, lease_ms=60_000
        )
        future = reader.engine.fetch(grant, target)
        await future.layer_ready(0)
        stats = await future.wait(10_000)
        assert reader.content(target) == holder.content(source)
        assert reader.sealed_and_right(target)
        assert stats.nbytes == future.total_bytes == grant.total_bytes
        assert stats.transport == transport
        assert len(holder.agent.inventory().of("lease")) == 1
        holder.engine.release_lease(grant.ticket)
        holder.engine.release_lease(grant.ticket)
        assert holder.agent.inventory().work == reader.agent.inventory().work == ()


async def test_some_layers_can_be_fetched_alone(transport: TransportName, tmp_path: Path) -> None:
    async with pair(transport, tmp_path) as (holder, reader):
        source, target = holder.filled(3, seed=2), reader.blocks(3)
        grant = holder.engine.lease_reads(REQUEST, source, seq_start=0, seq_end=24, lease_ms=60_000)
        stats = await reader.engine.fetch(grant, target, layers=(1, 3)).wait(10_000)
        assert stats.nbytes == 2 * 3 * SMALL.slot_layer_nbytes
        for mine, theirs in zip(target, source, strict=True):
            assert reader.arena.verify(mine.slot, range(1, 3))
            assert reader.arena.cell(mine.slot, 2) == holder.arena.cell(theirs.slot, 2)
            assert reader.arena.block_checks(mine.slot)[0] == reader.arena.block_checks(mine.slot)[3] == 0


async def test_a_lease_ends_by_release_and_by_time(transport: TransportName, tmp_path: Path) -> None:
    async with pair(transport, tmp_path) as (holder, reader):
        source = holder.filled(2, seed=3)
        released = holder.engine.lease_reads(REQUEST, source, seq_start=0, seq_end=16, lease_ms=60_000)
        timed = holder.engine.lease_reads(REQUEST, source, seq_start=0, seq_end=16, lease_ms=10)
        await reader.engine.fetch(released, reader.blocks(2)).wait(10_000)
        holder.engine.release_lease(released.ticket)
        await eventually(lambda: not holder.agent.inventory().of("lease"))
        for grant in (released, timed):
            target = reader.blocks(2)
            with pytest.raises(LeaseEnded):
                await reader.engine.fetch(grant, target).wait(10_000)
            assert reader.arena.block_checks(target[0].slot) == [0] * SMALL.num_layers
        with pytest.raises(LeaseEnded):
            holder.engine.renew_lease(timed.ticket, 1_000)


async def test_renewal_keeps_a_lease_alive(transport: TransportName, tmp_path: Path) -> None:
    async with pair(transport, tmp_path) as (holder, reader):
        grant = holder.engine.lease_reads(REQUEST, holder.filled(2, seed=4), seq_start=0, seq_end=16, lease_ms=30)
        holder.engine.renew_lease(grant.ticket, 60_000)
        await asyncio.sleep(0.06)
        await reader.engine.fetch(grant, reader.blocks(2)).wait(10_000)


async def test_a_reused_slot_is_a_typed_error_and_no_bytes(transport: TransportName, tmp_path: Path) -> None:
    async with pair(transport, tmp_path) as (holder, reader):
        source = holder.filled(2, seed=5)
        grant = holder.engine.lease_reads(REQUEST, source, seq_start=0, seq_end=16, lease_ms=60_000)
        holder.arena.raise_generation(source[1].slot)
        target = reader.blocks(2)
        with pytest.raises(StaleGeneration) as caught:
            await reader.engine.fetch(grant, target).wait(10_000)
        assert caught.value.fields["slot"] == source[1].slot
        assert reader.arena.block_checks(target[1].slot) == [0] * SMALL.num_layers


async def test_blocks_without_checksums_cannot_be_leased(tmp_path: Path) -> None:
    async with pair("shm", tmp_path) as (holder, _):
        refs = holder.filled(1, seed=6, sealed=False)
        with pytest.raises(InvalidDescriptor, match="not sealed"):
            holder.engine.lease_reads(REQUEST, refs, seq_start=0, seq_end=8, lease_ms=1_000)


async def test_a_fetch_that_is_cancelled_says_so_and_lets_its_memory_go(
    transport: TransportName, tmp_path: Path
) -> None:
    async with pair(transport, tmp_path, geometry=LARGE, slots=16, unit_bytes=1 << 18) as (holder, reader):
        source = holder.filled(4, seed=6)
        tokens = 4 * LARGE.block_size
        grant = holder.engine.lease_reads(REQUEST, source, seq_start=0, seq_end=tokens, lease_ms=60_000)
        future = reader.engine.fetch(grant, reader.blocks(4))
        future.cancel()
        future.cancel()
        with pytest.raises(TransferCancelled):
            await future.wait(10_000)
        with pytest.raises(TransferCancelled):
            await future.layer_ready(0)
        assert future.state is XferState.FAILED and not reader.agent.inventory().work
        into = reader.blocks(4)
        again = reader.engine.fetch(grant, into)
        stats = await again.wait(10_000)
        again.cancel()  # it is over
        assert again.state is XferState.DONE and await again.wait() == stats
        assert reader.content(into) == holder.content(source)
        holder.engine.release_lease(grant.ticket)

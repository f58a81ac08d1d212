"""Hand-overs between other tensor-parallel sizes: every rank is sent exactly its heads, and a layer at a time."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from kv_core.block import BlockRef
from kv_core.ids import RequestId
from kv_core.testing.loop import LoopClock, run_virtual
from kv_transport import HeadInbound, HeadLanding, TransferPriority
from kv_transport.backends.memory_network import MemoryFaults, MemoryNetwork
from kv_transport.codecs import Codec
from kv_transport.config import TransportConfig, TransportName
from kv_transport.errors import (
    ChecksumMismatch,
    GeometryMismatch,
    GrantRefused,
    LandingFull,
    StaleGeneration,
    TransferCancelled,
    TransferTimeout,
    TransportError,
)
from kv_transport.reshard import heads_of, source_geometry
from kv_transport.reshard_fetch import HeadSplit
from tests.transport.helpers_memory import memory_node
from tests.transport.helpers_reshard import filled_ranks, geometry, ranks
from tests.transport.helpers_transport import NO_RESERVE, Node, config, eventually, introduce

REQUEST = RequestId("request-1")


@contextlib.asynccontextmanager
async def landing(
    target: Node, rank: int, after: int, heads: int, before: int, slots: int = 8
) -> AsyncIterator[HeadLanding]:
    made = HeadLanding(
        target.engine, target.arena.geometry, HeadSplit(heads, rank, after), before, slots, budget=NO_RESERVE
    )
    regions = len(target.agent.regions.all())
    free = made.free_slots
    try:
        yield made
        await eventually(lambda: made.free_slots == free)
    finally:
        await made.close()
    assert len(target.agent.regions.all()) < regions


def send(
    source: Node, inbound: HeadInbound, rank: int, refs: list[BlockRef], codec: Codec | None = None
) -> "asyncio.Task[object]":
    """Hand over every layer under this rank's grant, as to any receiver."""
    grant = inbound.grants[rank]
    handover = source.engine.open_handover(RequestId(grant.request_id), grant, TransferPriority.HIGH, codec=codec)
    for layer in range(grant.layer_start, grant.layer_end):
        handover.submit(layer, refs)
    return asyncio.create_task(handover.finish(20_000))


def content(target: Node, into: list[BlockRef]) -> NDArray[np.uint16]:
    return np.array([target.arena.array[ref.slot] for ref in into])


@pytest.mark.parametrize(
    ("heads", "planes", "before", "after"),
    [(8, 2, 2, 4), (8, 2, 4, 2), (8, 2, 2, 1), (8, 2, 1, 3), (8, 2, 4, 4), (1, 1, 4, 1), (2, 2, 1, 4)],
)
async def test_ranks_are_sent_their_heads_by_ranks_of_another_size(
    transport: TransportName, tmp_path: Path, heads: int, planes: int, before: int, after: int
) -> None:
    """Wrong text came of prefill and decode with different sizes: what is joined again must equal what was split.

    Also the same size on both sides, where rank r must get rank r's and not rank 0's.
    """
    whole = np.random.default_rng(1).integers(0, 1 << 16, (3, 2, planes, heads, 4, 8), dtype=np.uint16)
    async with ranks(config(transport, tmp_path / "sockets"), geometry(heads, planes), before, after, slots=4) as (
        sources,
        targets,
    ):
        refs = filled_ranks(sources, whole)

        async def receive(rank: int, target: Node) -> None:
            async with landing(target, rank, after, heads, before) as made:
                into = target.blocks(3)
                inbound = made.grant(REQUEST, into, seq_start=0, seq_end=12, timeout_ms=20_000)
                sending = [send(sources[source], inbound, source, refs[source]) for source in inbound.grants]
                await inbound.layer_ready(0)
                assert inbound.arrival.layer_ready(0)
                stats = await inbound.done()
                await asyncio.gather(*sending)
                assert stats.nbytes == inbound.total_bytes and stats.transport == transport
                assert inbound.missing_layers == [] and inbound.fidelity.is_exact
                expected = whole[:, :, :, heads_of(heads, rank, after)]
                assert np.array_equal(content(target, into), expected)
                assert target.sealed_and_right(into)

        await asyncio.gather(*(receive(rank, target) for rank, target in enumerate(targets)))


@settings(max_examples=60)
@given(
    heads=st.integers(1, 8), before=st.integers(1, 5), after=st.integers(1, 5), rank=st.integers(0, 4),
    seed=st.integers(0, 2**32), lose=st.booleans(),
)  # fmt: skip
def test_whatever_the_sizes_the_result_is_the_plain_reslice(
    heads: int, before: int, after: int, rank: int, seed: int, lose: bool
) -> None:
    """In virtual time, with units that are lost or torn on their way."""
    rank %= after
    faults = MemoryFaults(delay_ns=1_000_000, torn=0.1, loss=0.05) if lose else MemoryFaults(delay_ns=1_000_000)
    whole = np.random.default_rng(seed).integers(0, 1 << 16, (2, 2, 2, heads, 4, 8), dtype=np.uint16)
    model = geometry(heads)

    async def main(clock: LoopClock) -> None:
        network = MemoryNetwork(seed, faults)
        quick = TransportConfig(transport="memory", unit_bytes=4096)
        async with contextlib.AsyncExitStack() as stack:
            sources = [
                await stack.enter_async_context(
                    memory_node(
                        f"p{number}", network, clock, settings=quick,
                        geometry=source_geometry(model, heads, number, before),
                    )
                )
                for number in range(before)
            ]  # fmt: skip
            own = source_geometry(model, heads, rank, after)
            target = await stack.enter_async_context(memory_node("d", network, clock, settings=quick, geometry=own))
            introduce(*sources, target)
            refs = filled_ranks(sources, whole)
            made = HeadLanding(target.engine, own, HeadSplit(heads, rank, after), before, 2 * before, budget=NO_RESERVE)
            into = target.blocks(2)
            inbound = made.grant(REQUEST, into, seq_start=0, seq_end=8)
            sending = [send(sources[source], inbound, source, refs[source]) for source in inbound.grants]
            ends = await asyncio.gather(*sending, return_exceptions=True)
            if any(isinstance(end, BaseException) for end in ends):
                assert lose and all(
                    not isinstance(end, BaseException) or isinstance(end, TransportError) for end in ends
                )
                inbound.cancel()
                with pytest.raises(TransportError):
                    await inbound.done()
            else:
                await inbound.done()
                assert np.array_equal(content(target, into), whole[:, :, :, heads_of(heads, rank, after)])
                assert target.sealed_and_right(into)
            await inbound.released()
            await made.close()

    run_virtual(main)


async def test_sixty_four_reshards_at_once_do_not_mix(tmp_path: Path) -> None:
    """Two ranks that hand over to one crashed under load elsewhere."""
    async with ranks(config("tcp", tmp_path), geometry(4, layers=1), 2, 1, slots=64) as (sources, (target,)):
        async with landing(target, 0, 1, 4, 2, slots=128) as made:

            async def receive(index: int) -> None:
                whole = np.random.default_rng(index).integers(0, 1 << 16, (1, 1, 2, 4, 4, 8), dtype=np.uint16)
                refs, into = filled_ranks(sources, whole), target.blocks(1)
                inbound = made.grant(RequestId(f"request-{index}"), into, seq_start=0, seq_end=4)
                sending = [send(source, inbound, rank, refs[rank]) for rank, source in enumerate(sources)]
                await inbound.done()
                await asyncio.gather(*sending)
                assert np.array_equal(content(target, into), whole)

            await asyncio.gather(*(receive(index) for index in range(64)))


async def test_a_layer_is_ready_before_deeper_ones_were_sent(tmp_path: Path) -> None:
    whole = np.random.default_rng(3).integers(0, 1 << 16, (1, 2, 2, 4, 4, 8), dtype=np.uint16)
    async with ranks(config("shm", tmp_path / "s"), geometry(4), 2, 1, slots=2) as (sources, (target,)):
        refs = filled_ranks(sources, whole)
        async with landing(target, 0, 1, 4, 2) as made:
            into = target.blocks(1)
            inbound = made.grant(REQUEST, into, seq_start=0, seq_end=4)
            handovers = [
                source.engine.open_handover(REQUEST, inbound.grants[rank]) for rank, source in enumerate(sources)
            ]
            handovers[0].submit(0, refs[0])
            handovers[0].submit(1, refs[0])
            handovers[1].submit(0, refs[1])
            await inbound.layer_ready(0)
            assert inbound.missing_layers == [1] and not inbound.arrival.layer_ready(1)
            assert np.array_equal(content(target, into)[:, 0], whole[:, 0])
            handovers[1].submit(1, refs[1])
            await asyncio.gather(*(handover.finish(10_000) for handover in handovers), inbound.done())


async def test_a_damaged_source_fails_the_whole_and_no_cell_of_it_is_sealed(tmp_path: Path) -> None:
    whole = np.random.default_rng(2).integers(0, 1 << 16, (2, 2, 2, 4, 4, 8), dtype=np.uint16)
    async with ranks(config("tcp", tmp_path), geometry(4), 2, 1, slots=2) as (sources, (target,)):
        refs = filled_ranks(sources, whole)
        sources[1].arena.array[refs[1][1].slot, 1, 0, 0, 0, 0] ^= 1
        async with landing(target, 0, 1, 4, 2) as made:
            into = target.blocks(2)
            inbound = made.grant(REQUEST, into, seq_start=0, seq_end=8)
            sending = [send(source, inbound, rank, refs[rank]) for rank, source in enumerate(sources)]
            with pytest.raises(TransportError):
                await inbound.layer_ready(1)
            with pytest.raises(TransportError):
                await inbound.done()
            with pytest.raises(TransportError):
                inbound.arrival.layer_ready(1)
            ends = await asyncio.gather(*sending, return_exceptions=True)
            assert isinstance(ends[1], ChecksumMismatch)
            await inbound.released()
            assert [target.arena.block_checks(ref.slot)[1] for ref in into] == [0, 0]


async def test_lossy_units_of_one_source_make_the_whole_lossy(tmp_path: Path) -> None:
    whole = np.full((1, 2, 2, 4, 4, 8), 0x3F80, np.uint16)
    async with ranks(config("tcp", tmp_path), geometry(4), 2, 1, slots=1) as (sources, (target,)):
        refs = filled_ranks(sources, whole)
        async with landing(target, 0, 1, 4, 2) as made:
            accept = [Codec.LZ4, Codec.FP8_E4M3, Codec.FP8_CAST]
            inbound = made.grant(REQUEST, target.blocks(1), seq_start=0, seq_end=4, accept=accept)
            assert inbound.grants[0].codecs == ["lz4", "fp8_e4m3"]  # values of parts of a cell are not cast
            sending = [send(sources[0], inbound, 0, refs[0], Codec.FP8_E4M3), send(sources[1], inbound, 1, refs[1])]
            await asyncio.gather(*sending, inbound.done())
            assert inbound.fidelity == Codec.FP8_E4M3.fidelity


async def test_what_ends_badly_gives_every_slot_back(tmp_path: Path) -> None:
    """No source, a source that comes too late, slots that moved on, and an end in the middle."""
    whole = np.zeros((1, 2, 2, 4, 4, 8), np.uint16)
    async with ranks(config("tcp", tmp_path), geometry(4), 2, 1, slots=4) as (sources, (target,)):
        refs = filled_ranks(sources, whole)
        async with landing(target, 0, 1, 4, 2, slots=2) as made:
            inbound = made.grant(REQUEST, target.blocks(1), seq_start=0, seq_end=4, timeout_ms=50)
            with pytest.raises(LandingFull, match="2 landing slots are needed, 0 are free"):
                made.grant(REQUEST, target.blocks(1), seq_start=0, seq_end=4)
            with pytest.raises(TransferTimeout):
                await inbound.done()
            await eventually(lambda: made.free_slots == 2)
            with pytest.raises(GrantRefused):
                await send(sources[0], inbound, 0, refs[0])

            into = target.blocks(1)
            inbound = made.grant(REQUEST, into, seq_start=0, seq_end=4)
            target.arena.raise_generation(into[0].slot)
            sending = [send(source, inbound, rank, refs[rank]) for rank, source in enumerate(sources)]
            with pytest.raises(StaleGeneration):
                await inbound.done()
            await asyncio.gather(*sending, return_exceptions=True)
            await eventually(lambda: made.free_slots == 2)

        made = HeadLanding(target.engine, target.arena.geometry, HeadSplit(4, 0, 1), 2, 2, budget=NO_RESERVE)
        inbound = made.grant(REQUEST, target.blocks(1), seq_start=0, seq_end=4)
        await made.close()
        await made.close()
        with pytest.raises(TransferCancelled):
            await inbound.done()
        with pytest.raises(LandingFull):
            made.grant(REQUEST, target.blocks(1), seq_start=0, seq_end=4)
        with pytest.raises(GeometryMismatch, match="num_kv_heads differs: ours is 4, theirs is 2"):
            HeadLanding(target.engine, target.arena.geometry, HeadSplit(4, 0, 2), 2, 1, budget=NO_RESERVE)

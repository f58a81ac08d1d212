"""Faults that users of other systems met while moving KV, as scenarios for this one."""

import asyncio
import random
from pathlib import Path

import numpy as np
import pytest

from kv_core.block import BlockGeometry
from kv_core.dtypes import DType
from kv_core.errors import KVError
from kv_core.ids import NodeId, RequestId
from kv_core.testing.loop import LoopClock, run_virtual
from kv_prefix.block_pool import BlockPool
from kv_prefix.pins import Receipt
from kv_transport import TransferPriority, TransportConfig
from kv_transport.backends.memory_network import MemoryFaults, MemoryNetwork
from kv_transport.errors import ChecksumMismatch, GrantRefused, LeaseEnded, StaleGeneration
from tests.transport.helpers_memory import hand_over, memory_node
from tests.transport.helpers_transport import SMALL, Node, config, introduce, node, pair

REQUEST = RequestId("request-1")
ONE_KIB = BlockGeometry(num_layers=1, num_kv_heads=2, head_dim=16, dtype=DType.BF16, block_size=8)


async def push(sender: Node, receiver: Node, count: int, seed: int, name: str = "request-1") -> bool:
    source, target = sender.filled(count, seed), receiver.blocks(count)
    tokens = count * sender.arena.geometry.block_size
    grant = receiver.engine.grant_writes(RequestId(name), target, seq_start=0, seq_end=tokens)
    inbound = receiver.engine.expect(RequestId(name), grant)
    handover = sender.engine.open_handover(RequestId(name), grant)
    for layer in range(sender.arena.geometry.num_layers):
        handover.submit(layer, source)
    await handover.finish(20_000)
    await inbound.done()
    return sender.content(source) == receiver.content(target) and receiver.sealed_and_right(target)


async def test_five_hundred_transfers_are_equal_to_the_last_byte(
    tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """Output that degrades after some hundred hand-overs, elsewhere: every one of them is compared here."""
    if "asyncio" in request.node.name:
        pytest.skip("runs on uvloop")  # 500 transfers: what kind of loop drives them is the contract suite's matter
    rng = random.Random(31)
    async with pair("shm", tmp_path) as (sender, receiver):
        assert all([await push(sender, receiver, rng.randint(1, 6), seed) for seed in range(500)])
        assert not sender.agent.inventory().work and not receiver.agent.inventory().work


async def test_one_bad_transfer_of_a_hundred_fails_alone(tmp_path: Path) -> None:
    """A failure under load surfaced as a stuck request: it ends with an error, and the rest with their bytes."""
    async with pair("tcp", tmp_path, geometry=SMALL, slots=256) as (sender, receiver):
        started = []
        for number in range(100):
            request, source, target = RequestId(f"r{number}"), sender.filled(2, number), receiver.blocks(2)
            if number == 61:
                sender.arena.cell(source[1].slot, 2)[5] ^= 1  # its memory is bad
            grant = receiver.engine.grant_writes(request, target, seq_start=0, seq_end=2 * SMALL.block_size)
            inbound = receiver.engine.expect(request, grant, timeout_ms=20_000)
            handover = sender.engine.open_handover(request, grant)
            for layer in range(SMALL.num_layers):
                handover.submit(layer, source)
            started.append((handover, inbound, source, target))
        ends = await asyncio.gather(*(one[0].finish(20_000) for one in started), return_exceptions=True)
        assert [number for number, end in enumerate(ends) if isinstance(end, BaseException)] == [61]
        assert isinstance(ends[61], ChecksumMismatch)
        for number, (_, inbound, source, target) in enumerate(started):
            if number != 61:
                await inbound.done()
                assert sender.content(source) == receiver.content(target)
            await inbound.released()
        assert not sender.agent.inventory().work and not receiver.agent.inventory().work


async def test_a_ticket_that_was_used_up_brings_no_byte(tmp_path: Path) -> None:
    """Neither again by its writer, with other bytes, nor by a reader after the lease, nor past its end."""
    async with pair("tcp", tmp_path) as (sender, receiver):
        target = receiver.blocks(2)
        grant = receiver.engine.grant_writes(REQUEST, target, seq_start=0, seq_end=2 * SMALL.block_size)
        inbound = receiver.engine.expect(REQUEST, grant)
        first: list[bytes] = []
        for seed in (1, 2):
            source = sender.filled(2, seed)
            handover = sender.engine.open_handover(REQUEST, grant)
            for layer in range(SMALL.num_layers):
                handover.submit(layer, source)
            try:
                await handover.finish(10_000)
            except KVError as error:
                assert seed == 2 and isinstance(error, GrantRefused)
            await inbound.done()
            if seed == 1:
                first = receiver.content(target)
        assert receiver.content(target) == first
        held = sender.filled(2, seed=3)
        lease = sender.engine.lease_reads(REQUEST, held, seq_start=0, seq_end=2 * SMALL.block_size, lease_ms=60_000)
        sender.engine.release_lease(lease.ticket)
        into = receiver.blocks(2)
        with pytest.raises(LeaseEnded):
            await receiver.engine.fetch(lease, into).wait(10_000)
        assert not receiver.sealed_and_right(into)


@pytest.mark.parametrize("renew", [False, True])
def test_a_read_longer_than_its_lease_ends_with_it_or_lives_on_renewals(renew: bool) -> None:
    """The holder gives the slots to other content the moment the lease is over; no reader sees a mixture."""

    async def main(clock: LoopClock) -> None:
        # 32 KiB at 40 KiB/s take 0.8 s, three times the lease.
        network = MemoryNetwork(1, MemoryFaults(bytes_per_s=40 << 10))
        settings = TransportConfig(transport="memory", unit_bytes=4096)
        async with (
            memory_node("store", network, clock, settings=settings) as holder,
            memory_node("decode", network, clock, settings=settings) as reader,
        ):
            introduce(holder, reader)
            held = holder.filled(8, seed=1)
            lease = holder.engine.lease_reads(REQUEST, held, seq_start=0, seq_end=64, lease_ms=260)
            future = reader.engine.fetch(lease, into := reader.blocks(8))
            over = False

            async def keep() -> None:
                nonlocal over
                while renew and not over:
                    await asyncio.sleep(0.1)
                    holder.engine.renew_lease(lease.ticket, 260)
                await asyncio.sleep(0.26)
                if not renew:
                    for ref in held:
                        holder.arena.raise_generation(ref.slot)
                        holder.arena.array[ref.slot] = 7

            keeping = asyncio.create_task(keep())
            if renew:
                await future.wait(20_000)
                assert reader.content(into) == holder.content(held) and clock.monotonic_ns() > 3 * 260_000_000
            else:
                with pytest.raises((LeaseEnded, StaleGeneration)):
                    await future.wait(20_000)
                assert not reader.sealed_and_right(into)
            over = True
            await keeping
            holder.engine.release_lease(lease.ticket)
            assert not holder.agent.inventory().work and not reader.agent.inventory().work

    run_virtual(main)


def test_throughput_grows_with_the_window_where_the_way_is_long() -> None:
    """One slice in flight on a long way wastes most of it."""

    def seconds(window: int) -> float:
        took: list[float] = []

        async def main(clock: LoopClock) -> None:
            network = MemoryNetwork(1, MemoryFaults(delay_ns=1_000_000))
            settings = TransportConfig(transport="memory", window_size=window, unit_bytes=4096)
            async with (
                memory_node("prefill", network, clock, settings=settings) as sender,
                memory_node("decode", network, clock, settings=settings) as receiver,
            ):
                introduce(sender, receiver)
                await hand_over(sender, receiver, 0, 1, 20_000)
                took.append((await hand_over(sender, receiver, 1, 32, 20_000)).seconds)

        run_virtual(main)
        return took[0]

    one, four, sixteen = seconds(1), seconds(4), seconds(16)
    assert one / four > 3 and four / sixteen > 1.5


async def test_two_clusters_with_equal_names_work_on_one_host(tmp_path: Path) -> None:
    """Fixed socket paths and ports of two clusters collide; here nothing is fixed."""
    async with (
        node("prefill", config("auto", tmp_path / "a")) as one,
        node("decode", config("auto", tmp_path / "a")) as two,
        node("prefill", config("auto", tmp_path / "b")) as other,
        node("decode", config("auto", tmp_path / "b")) as fourth,
    ):
        introduce(one, two)
        introduce(other, fourth)
        assert all(await asyncio.gather(push(one, two, 4, 1), push(other, fourth, 4, 2)))


def test_a_black_hole_of_a_peer_does_not_slow_the_others() -> None:
    """One unreachable peer, and transfers with healthy ones take their normal time."""

    async def main(clock: LoopClock) -> None:
        network = MemoryNetwork(1, MemoryFaults(delay_ns=100_000))
        async with (
            memory_node("prefill", network, clock) as sender,
            memory_node("hole", network, clock) as hole,
            memory_node("decode", network, clock) as receiver,
        ):
            introduce(sender, hole, receiver)
            network.cut(NodeId("prefill"), NodeId("hole"))
            stuck = asyncio.create_task(hand_over(sender, hole, 1, 4, 20_000))
            await asyncio.sleep(0)
            assert (outcome := await hand_over(sender, receiver, 2, 4, 20_000)).right
            assert outcome.seconds < 0.1 and not stuck.done()
            assert (await stuck).sent is not None

    run_virtual(main)


async def test_a_long_block_fits_into_a_fragmented_arena(tmp_path: Path) -> None:
    """1 KiB and 1 MiB blocks mixed to 90 %, a random half freed: a 1 MiB block still fits, and moves as it lies.

    It needs no compaction, because what a request gets is slots and never a run of them; those that do adjoin on both
    sides are merged on their way.
    """
    rng, slots = random.Random(8), 8 * 1024
    async with pair("shm", tmp_path, geometry=ONE_KIB, slots=slots) as (sender, receiver):
        pool = BlockPool(slots, ONE_KIB.block_size, region=sender.region)
        tables: list[tuple[Receipt, int]] = []
        used = 0

        def take(blocks: int) -> Receipt:
            nothing = pool.match(b"n" * 16, [], [])
            return pool.open(RequestId(f"{len(tables)}-{blocks}"), nothing, blocks).table

        while used < slots * 9 // 10:
            blocks = 1024 if rng.random() < 0.001 and used + 1024 < slots * 9 // 10 else 1
            tables.append((take(blocks), blocks))
            used += blocks
        assert {blocks for _, blocks in tables} == {1, 1024}
        for table, _ in rng.sample(tables, len(tables) // 2):
            pool.release(table)
        opened = pool.open(REQUEST, pool.match(b"n" * 16, [], []), 1024)
        numbers = np.array([ref.slot for ref in opened.refs])
        assert (np.diff(np.sort(numbers)) > 1).any(), "they lie in many places"
        for ref in opened.refs:
            sender.arena.raise_generation(ref.slot, ref.generation)
            sender.arena.array[ref.slot] = rng.randrange(1, 1 << 16)
            sender.arena.seal_block(ref.slot)
        target = receiver.blocks(1024)
        tokens = 1024 * ONE_KIB.block_size
        grant = receiver.engine.grant_writes(REQUEST, target, seq_start=0, seq_end=tokens)
        inbound = receiver.engine.expect(REQUEST, grant)
        handover = sender.engine.open_handover(REQUEST, grant, TransferPriority.HIGH)
        handover.submit(0, opened.refs)
        await handover.finish(20_000)
        await inbound.done()
        assert grant.total_bytes == 1 << 20
        assert receiver.content(target) == sender.content(list(opened.refs))

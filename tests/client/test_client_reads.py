"""A client of a holder in the same process, over the real bus and tcp: what a read may end with, and what stays."""

import asyncio
from pathlib import Path

import pytest

from kv_client import (
    AlreadyReleased,
    CheckFailed,
    Client,
    DeadlineExceeded,
    HolderLost,
    InvalidRead,
    LayerNotReady,
    Miss,
    NoRoom,
)
from kv_client.runs import SlotRuns
from kv_core.dtypes import DType
from kv_core.namespace import Namespace
from tests.client.helpers_client import GEOMETRY, HOLDER, NAMESPACE, NUM_BLOCKS, READER, TOKENS, Pair, eventually


async def test_every_byte_arrives_and_the_lease_ends_with_the_blocks(tmp_path: Path) -> None:
    pair = Pair(tmp_path)
    async with pair.holder() as holder, Client(pair.config()) as client:
        blocks = await client.get_blocks(NAMESPACE, TOKENS, NUM_BLOCKS)
        await blocks.layer_ready(0)
        stats = await blocks.wait()
        assert stats.nbytes == NUM_BLOCKS * GEOMETRY.block_nbytes
        for layer in range(GEOMETRY.num_layers):
            assert (blocks.array(layer) == holder.arena.kv(layer)[:NUM_BLOCKS]).all()
            assert not blocks.array(layer).flags.writeable
        assert len(holder.leased) == 1
        blocks.release()
        blocks.release()
        await eventually(lambda: not holder.leased and client.num_free_slots == 6)
        with pytest.raises(AlreadyReleased):
            blocks.array(0)
        with pytest.raises(AlreadyReleased):
            await blocks.wait()


async def test_slots_that_come_back_are_waited_for_and_those_held_are_not(tmp_path: Path) -> None:
    pair = Pair(tmp_path)
    async with pair.holder() as holder, Client(pair.config()) as client:
        first = await client.get_blocks(NAMESPACE, TOKENS, NUM_BLOCKS)
        with pytest.raises(NoRoom) as caught:
            await client.get_blocks(NAMESPACE, TOKENS, 2)
        assert caught.value.fields["longest"] == 1
        assert holder.asked == 1
        first.release()
        with await client.get_blocks(NAMESPACE, TOKENS, NUM_BLOCKS) as again:
            await again.wait()
            assert (again.array(2) == holder.arena.kv(2)[:NUM_BLOCKS]).all()


async def test_closing_releases_what_is_held(tmp_path: Path) -> None:
    pair = Pair(tmp_path)
    async with pair.holder() as holder:
        async with Client(pair.config()) as client:
            await client.get_blocks(NAMESPACE, TOKENS, NUM_BLOCKS)
            await (await client.get_blocks(NAMESPACE, TOKENS, 1)).wait()
            assert len(holder.leased) == 2
        await eventually(lambda: not holder.leased)
        with pytest.raises(AlreadyReleased):
            await client.get_blocks(NAMESPACE, TOKENS, 1)


@pytest.mark.parametrize("mismatch", [False, True], ids=["not held", "other tokens"])
async def test_a_miss_is_a_miss_and_leaves_nothing(tmp_path: Path, mismatch: bool) -> None:
    pair = Pair(tmp_path)
    async with pair.holder() as holder, Client(pair.config()) as client:
        holder.mismatch = mismatch
        with pytest.raises(Miss):
            await client.get_blocks(NAMESPACE, [*TOKENS, *range(8)], NUM_BLOCKS + 1)
        assert client.num_free_slots == 6 and not holder.leased


async def test_damaged_bytes_are_a_failed_check_and_are_not_given_out(tmp_path: Path) -> None:
    pair = Pair(tmp_path)
    async with pair.holder() as holder, Client(pair.config()) as client:
        holder.arena.cell(3, 1)[7] ^= 1
        blocks = await client.get_blocks(NAMESPACE, TOKENS, NUM_BLOCKS)
        with pytest.raises(CheckFailed):
            await blocks.wait()
        with pytest.raises(CheckFailed):
            await blocks.layer_ready(1)
        with pytest.raises(LayerNotReady):
            blocks.array(1)
        blocks.release()
        await eventually(lambda: not holder.leased and client.num_free_slots == 6)


async def test_a_grant_for_something_else_is_a_failed_check(tmp_path: Path) -> None:
    pair = Pair(tmp_path)
    async with pair.holder() as holder, Client(pair.config()) as client:
        holder.wrong_range = True
        with pytest.raises(CheckFailed):
            await client.get_blocks(NAMESPACE, TOKENS, NUM_BLOCKS)
        await eventually(lambda: not holder.leased)
        assert client.num_free_slots == 6


async def test_a_silent_holder_costs_the_deadline_and_no_slot(tmp_path: Path) -> None:
    pair = Pair(tmp_path)
    async with pair.holder() as holder, Client(pair.config()) as client:
        holder.silent = True
        with pytest.raises(DeadlineExceeded):
            await client.get_blocks(NAMESPACE, TOKENS, NUM_BLOCKS, timeout_ms=300)
        assert client.num_free_slots == 6


async def test_a_cancelled_read_gives_its_slots_back(tmp_path: Path) -> None:
    pair = Pair(tmp_path)
    async with pair.holder() as holder, Client(pair.config()) as client:
        holder.silent = True
        reading = asyncio.ensure_future(client.get_blocks(NAMESPACE, TOKENS, NUM_BLOCKS))
        await eventually(lambda: holder.asked == 1)
        assert client.num_free_slots == 1
        reading.cancel()
        with pytest.raises(asyncio.CancelledError):
            await reading
        assert client.num_free_slots == 6


async def test_no_holder_is_a_lost_holder_and_its_next_life_is_read_again(tmp_path: Path) -> None:
    pair = Pair(tmp_path)
    async with Client(pair.config()) as client:
        with pytest.raises(HolderLost):
            await client.get_blocks(NAMESPACE, TOKENS, NUM_BLOCKS, timeout_ms=300)
        for incarnation in (1, 2):
            async with pair.holder(incarnation) as holder:
                with await client.get_blocks(NAMESPACE, TOKENS, NUM_BLOCKS) as blocks:
                    await blocks.wait()
                    assert (blocks.array(0) == holder.arena.kv(0)[:NUM_BLOCKS]).all()
                await eventually(lambda: not holder.leased)
        assert client.num_free_slots == 6


async def test_a_client_that_its_holder_forgot_introduces_itself_again(tmp_path: Path) -> None:
    """It makes room for others while a client is without a session; the next call of one that lives is answered."""
    pair = Pair(tmp_path)
    async with pair.holder() as holder, Client(pair.config()) as client:
        for _ in range(2):
            with await client.get_blocks(NAMESPACE, TOKENS, NUM_BLOCKS) as blocks:
                await blocks.wait()
                assert (blocks.array(0) == holder.arena.kv(0)[:NUM_BLOCKS]).all()
            for link in client._agent.peer(HOLDER).links:
                await link.close()
            await holder.agent.remove_remote_agent(READER)


async def test_arguments_that_cannot_be_are_refused_before_anything_is_asked(tmp_path: Path) -> None:
    pair = Pair(tmp_path)
    async with Client(pair.config()) as client:
        for count in (0, -1, 6, 7):
            with pytest.raises(InvalidRead):
                await client.get_blocks(NAMESPACE, TOKENS, count)
        with pytest.raises(InvalidRead):
            await client.get_blocks(Namespace("model", "weights", dtype=DType.FP32, block_size=8), TOKENS, 1)
        with pytest.raises(InvalidRead):
            await client.get_blocks(NAMESPACE, TOKENS, 1, timeout_ms=0)
        assert client.num_free_slots == 6


def test_runs_adjoin_again_in_whatever_order_they_come_back() -> None:
    for order in ((0, 1, 2), (2, 1, 0), (0, 2, 1), (1, 2, 0)):
        slots = SlotRuns(7)
        runs = [slots.take(count) for count in (2, 3, 2)]
        assert slots.take(1) is None and slots.longest == 0
        assert runs == [range(2), range(2, 5), range(5, 7)]
        for index in order:
            run = runs[index]
            assert run is not None
            slots.give_back(run)
        assert slots.longest == slots.num_free == 7

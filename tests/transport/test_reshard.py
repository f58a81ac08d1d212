"""Other tensor-parallel sizes on the two sides: every rank ends with exactly its heads."""

import asyncio
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from kv_core.block import BlockRef
from kv_core.ids import RequestId
from kv_transport import ReadGrant
from kv_transport.config import TransportName
from kv_transport.errors import ChecksumMismatch, GeometryMismatch, InvalidDescriptor, LeaseEnded
from kv_transport.reshard import heads_of, reshard_runs
from kv_transport.reshard_fetch import HeadSplit
from tests.transport.helpers_reshard import filled_ranks, geometry, ranks
from tests.transport.helpers_transport import Node, config

SIZES = st.integers(1, 9)


def split(whole: NDArray[np.uint16], size: int) -> list[NDArray[np.uint16]]:
    """A cell `[plane][head][token][dim]` as each rank stores it: a plain re-slice."""
    heads = whole.shape[1]
    return [np.ascontiguousarray(whole[:, heads_of(heads, rank, size)]) for rank in range(size)]


@given(st.integers(1, 12), SIZES)
def test_the_ranks_hold_all_heads_evenly_and_in_order(heads: int, size: int) -> None:
    held = [heads_of(heads, rank, size) for rank in range(size)]
    assert sorted({head for part in held for head in part}) == list(range(heads))
    assert [part.start for part in held] == sorted(part.start for part in held)
    counts = [len(part) for part in held]
    assert max(counts) - min(counts) <= 1
    if size <= heads:
        assert sum(counts) == heads, "no head twice"
    else:
        repeated = [sum(head in part for part in held) for head in range(heads)]
        assert max(repeated) - min(repeated) <= 1


@given(st.integers(1, 12), SIZES, SIZES, st.integers(1, 2), st.integers(0, 2**32))
def test_a_reshard_is_the_plain_reslice(heads: int, before: int, after: int, planes: int, seed: int) -> None:
    """Sharded over some ranks and read over others, the tensor that is joined again is equal."""
    whole = np.random.default_rng(seed).integers(0, 1 << 16, (planes, heads, 4, 8), dtype=np.uint16)
    sources, expected = split(whole, before), split(whole, after)
    for rank in range(after):
        target = np.zeros_like(expected[rank])
        taken = np.zeros(target.nbytes, bool)
        flat = target.view(np.uint8).reshape(-1)
        for run in reshard_runs(geometry(target.shape[1], planes), heads, rank, after, before):
            source = sources[run.source_rank].view(np.uint8).reshape(-1)
            into = slice(run.target_offset, run.target_offset + run.nbytes)
            assert not taken[into].any(), "a byte comes from two places"
            taken[into] = True
            flat[into] = source[run.source_offset : run.source_offset + run.nbytes]
        assert taken.all()
        assert np.array_equal(target, expected[rank])


@pytest.mark.parametrize(
    ("heads", "before", "after", "runs"),
    [(8, 2, 4, 2), (8, 4, 2, 4), (8, 2, 1, 4), (8, 1, 3, 2), (8, 2, 2, 1), (1, 4, 1, 1), (2, 1, 8, 2)],
)
def test_runs_are_as_few_as_can_be(heads: int, before: int, after: int, runs: int) -> None:
    target = geometry(len(heads_of(heads, 0, after)))
    assert len(reshard_runs(target, heads, 0, after, before)) == runs


def test_repeated_heads_are_read_from_all_who_hold_them() -> None:
    read = {reshard_runs(geometry(1), 1, rank, 4, 4)[0].source_rank for rank in range(4)}
    assert read == {0, 1, 2, 3}


def test_numbers_that_cannot_be_are_refused() -> None:
    for numbers in ((0, 0, 1), (8, 2, 2), (8, -1, 2), (8, 0, 0), (8, 0, 2048)):
        with pytest.raises(InvalidDescriptor):
            heads_of(*numbers)
    with pytest.raises(GeometryMismatch) as caught:
        reshard_runs(geometry(8), 8, 0, 2, 1)
    assert caught.value.fields == {"field": "num_kv_heads", "ours": 8, "theirs": 4}


# Between agents.


def leases(sources: list[Node], refs: list[list[BlockRef]], name: str = "request-1") -> list[ReadGrant]:
    tokens = len(refs[0]) * sources[0].arena.geometry.block_size
    return [
        source.engine.lease_reads(RequestId(name), blocks, seq_start=0, seq_end=tokens, lease_ms=60_000)
        for source, blocks in zip(sources, refs, strict=True)
    ]


def release(sources: list[Node], grants: list[ReadGrant]) -> None:
    for source, grant in zip(sources, grants, strict=True):
        source.engine.release_lease(grant.ticket)


@pytest.mark.parametrize(
    ("heads", "planes", "before", "after"),
    [(8, 2, 2, 4), (8, 2, 4, 2), (8, 2, 2, 1), (8, 2, 1, 3), (8, 2, 4, 4), (1, 1, 4, 1), (2, 2, 1, 4)],
)
async def test_ranks_read_their_heads_from_ranks_of_another_size(
    transport: TransportName, tmp_path: Path, heads: int, planes: int, before: int, after: int
) -> None:
    """Also the same size on both sides: rank r gets rank r's; and one latent head that every rank holds."""
    model = geometry(heads, planes)
    whole = np.random.default_rng(1).integers(0, 1 << 16, (3, 2, planes, heads, 4, 8), dtype=np.uint16)
    async with ranks(config(transport, tmp_path / "sockets"), model, before, after, slots=4) as (sources, targets):
        grants = leases(sources, filled_ranks(sources, whole))

        async def read(rank: int, target: Node) -> None:
            into = target.blocks(3)
            future = target.engine.fetch_heads(grants, into, HeadSplit(heads, rank, after))
            await future.layer_ready(1)
            stats = await future.wait(20_000)
            assert stats.nbytes == future.total_bytes and stats.transport == transport
            assert future.missing_layers == [] and future.fidelity.is_exact
            for ref, block in zip(into, whole, strict=True):
                assert np.array_equal(target.arena.array[ref.slot], block[:, :, heads_of(heads, rank, after)])
            assert target.sealed_and_right(into)

        await asyncio.gather(*(read(rank, target) for rank, target in enumerate(targets)))
        release(sources, grants)


async def test_many_reshards_at_once_do_not_mix(tmp_path: Path) -> None:
    """Two ranks read by one, under load."""
    model = geometry(4, layers=1)
    async with ranks(config("tcp", tmp_path), model, 2, 1, slots=64) as (sources, (target,)):

        async def read(index: int) -> None:
            whole = np.random.default_rng(index).integers(0, 1 << 16, (1, 1, 2, 4, 4, 8), dtype=np.uint16)
            grants = leases(sources, filled_ranks(sources, whole), f"request-{index}")
            into = target.blocks(1)
            await target.engine.fetch_heads(grants, into, HeadSplit(4, 0, 1)).wait(20_000)
            assert np.array_equal(target.arena.array[into[0].slot], whole[0])
            release(sources, grants)

        await asyncio.gather(*(read(index) for index in range(64)))


async def test_heads_of_a_damaged_cell_are_not_sealed(transport: TransportName, tmp_path: Path) -> None:
    whole = np.random.default_rng(2).integers(0, 1 << 16, (2, 2, 2, 4, 4, 8), dtype=np.uint16)
    async with ranks(config(transport, tmp_path / "sockets"), geometry(4), 2, 1, slots=2) as (sources, (target,)):
        refs = filled_ranks(sources, whole)
        grants = leases(sources, refs)
        sources[1].arena.array[refs[1][1].slot, 1, 0, 0, 0, 0] ^= 1
        into = target.blocks(2)
        with pytest.raises(ChecksumMismatch):
            await target.engine.fetch_heads(grants, into, HeadSplit(4, 0, 1)).wait(20_000)
        assert target.arena.block_checks(into[1].slot)[1] == 0
        release(sources, grants)


async def test_a_source_that_ends_its_lease_ends_the_whole_read(tmp_path: Path) -> None:
    whole = np.zeros((1, 2, 2, 4, 4, 8), np.uint16)
    async with ranks(config("tcp", tmp_path), geometry(4), 2, 1, slots=1) as (sources, (target,)):
        grants = leases(sources, filled_ranks(sources, whole))
        release(sources[1:], grants[1:])
        with pytest.raises(LeaseEnded):
            await target.engine.fetch_heads(grants, target.blocks(1), HeadSplit(4, 0, 1)).wait(20_000)
        release(sources, grants)


async def test_leases_that_do_not_fit_together_are_refused(tmp_path: Path) -> None:
    whole = np.zeros((2, 2, 2, 4, 4, 8), np.uint16)
    async with ranks(config("tcp", tmp_path), geometry(4), 2, 1, slots=4) as (sources, (target,)):
        refs = filled_ranks(sources, whole)
        grants, into = leases(sources, refs), target.blocks(2)
        shorter = leases(sources, [blocks[:1] for blocks in refs])
        with pytest.raises(InvalidDescriptor, match="the same tokens and layers"):
            target.engine.fetch_heads([grants[0], shorter[1]], into, HeadSplit(4, 0, 1))
        with pytest.raises(GeometryMismatch, match="num_kv_heads differs: ours is 4, theirs is 2"):
            target.engine.fetch_heads(grants[:1], into, HeadSplit(4, 0, 1))
        with pytest.raises(GeometryMismatch, match="num_kv_heads differs: ours is 4, theirs is 2"):
            target.engine.fetch_heads(grants, into, HeadSplit(4, 0, 2))
        release(sources, grants)
        release(sources, shorter)

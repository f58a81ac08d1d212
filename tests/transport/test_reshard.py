"""Other tensor-parallel sizes on the two sides: every rank ends with exactly its heads."""

import asyncio
import contextlib
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from kv_core.block import BlockGeometry, Layout
from kv_core.dtypes import DType
from kv_transport import Access, XferDesc, XferOp
from kv_transport.config import TransportName
from kv_transport.errors import GeometryMismatch, InvalidDescriptor
from kv_transport.reshard import heads_of, reshard_runs, source_geometry
from tests.transport.helpers_transport import Node, config, introduce, node

SIZES = st.integers(1, 9)


def geometry(heads: int, planes: int = 2, layers: int = 2, block_size: int = 4) -> BlockGeometry:
    return BlockGeometry(
        num_layers=layers, num_kv_heads=heads, head_dim=8, dtype=DType.BF16, block_size=block_size, num_planes=planes
    )


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


async def read_resharded(target: Node, sources: list[Node], heads: int, rank: int, size: int, slots: int) -> None:
    """Fill every cell of the target out of the sources' open arenas, one transfer a source."""
    runs = reshard_runs(target.arena.geometry, heads, rank, size, len(sources))
    pieces: dict[int, list[tuple[XferDesc, XferDesc]]] = {}
    for slot in range(slots):
        for layer in range(target.arena.geometry.num_layers):
            for run in runs:
                source = sources[run.source_rank]
                mine = target.arena.shape.offset(slot, layer) + run.target_offset
                theirs = source.arena.shape.offset(slot, layer) + run.source_offset
                pieces.setdefault(run.source_rank, []).append(
                    (XferDesc(target.region, mine, run.nbytes), XferDesc(source.region, theirs, run.nbytes))
                )
    for source_rank, pairs in pieces.items():
        name = sources[source_rank].agent.name.node
        xfer = target.agent.initialize_xfer(XferOp.READ, [a for a, _ in pairs], [b for _, b in pairs], name)
        async with xfer:
            target.agent.transfer(xfer)
            await xfer.done(20_000)


@pytest.mark.parametrize(("before", "after"), [(2, 4), (4, 2), (2, 1), (1, 3)])
async def test_ranks_read_their_heads_from_ranks_of_another_size(
    transport: TransportName, tmp_path: Path, before: int, after: int
) -> None:
    heads, slots = 8, 3
    settings = config(transport, tmp_path / "sockets")
    whole = np.random.default_rng(1).integers(0, 1 << 16, (slots, 2, 2, heads, 4, 8), dtype=np.uint16)
    async with contextlib.AsyncExitStack() as stack:
        sides: list[list[Node]] = []
        for side, size in (("p", before), ("d", after)):
            layout = Layout.LAYER_FIRST if side == "p" else Layout.BLOCK_FIRST
            sides.append(
                [
                    await stack.enter_async_context(
                        node(
                            f"{side}{rank}",
                            settings,
                            geometry=source_geometry(geometry(1), heads, rank, size),
                            slots=slots,
                            layout=layout,
                            access=Access.READ,
                        )
                    )
                    for rank in range(size)
                ]
            )
        sources, targets = sides
        introduce(*sources, *targets)
        for rank, source in enumerate(sources):
            source.arena.array[:] = whole[:, :, :, heads_of(heads, rank, before)]
        await asyncio.gather(
            *(read_resharded(target, sources, heads, rank, after, slots) for rank, target in enumerate(targets))
        )
        for rank, target in enumerate(targets):
            assert np.array_equal(target.arena.array, whole[:, :, :, heads_of(heads, rank, after)])
        for one in (*sources, *targets):
            assert one.agent.inventory().work == ()

"""All ranks of two sides that split the same model over different tensor-parallel sizes."""

import contextlib
from collections.abc import AsyncIterator

import numpy as np
from numpy.typing import NDArray

from kv_core.block import BlockGeometry, BlockRef, Layout
from kv_core.dtypes import DType
from kv_transport import TransportConfig
from kv_transport.reshard import heads_of, source_geometry
from tests.transport.helpers_transport import Node, introduce, node


def geometry(heads: int, planes: int = 2, layers: int = 2, block_size: int = 4) -> BlockGeometry:
    return BlockGeometry(
        num_layers=layers, num_kv_heads=heads, head_dim=8, dtype=DType.BF16, block_size=block_size, num_planes=planes
    )


@contextlib.asynccontextmanager
async def ranks(
    settings: TransportConfig, model: BlockGeometry, before: int, after: int, slots: int
) -> AsyncIterator[tuple[list[Node], list[Node]]]:
    """All ranks of both sides, introduced to each other; `model` has every head."""
    heads = model.num_kv_heads
    async with contextlib.AsyncExitStack() as stack:
        sides: list[list[Node]] = []
        for side, size, layout in (("p", before, Layout.LAYER_FIRST), ("d", after, Layout.BLOCK_FIRST)):
            sides.append(
                [
                    await stack.enter_async_context(
                        node(
                            f"{side}{rank}",
                            settings,
                            geometry=source_geometry(model, heads, rank, size),
                            slots=slots,
                            layout=layout,
                        )
                    )
                    for rank in range(size)
                ]
            )
        introduce(*sides[0], *sides[1])
        yield sides[0], sides[1]
        for one in (*sides[0], *sides[1]):
            assert one.agent.inventory().work == ()


def filled_ranks(sources: list[Node], whole: NDArray[np.uint16]) -> list[list[BlockRef]]:
    """The same blocks at every rank, `whole` being `[block][layer][plane][head][token][dim]`; sealed."""
    refs = [source.blocks(len(whole)) for source in sources]
    for rank, source in enumerate(sources):
        for ref, block in zip(refs[rank], whole, strict=True):
            source.arena.array[ref.slot] = block[:, :, heads_of(whole.shape[3], rank, len(sources))]
            source.arena.seal_block(ref.slot)
    return refs

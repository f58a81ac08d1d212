"""Two or more agents in one process, introduced to each other, with arenas full of known bytes."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest

from kv_core.block import BlockGeometry, BlockRef, Layout
from kv_core.dtypes import DType
from kv_core.ids import Incarnation, NodeId, RegionId
from kv_transport import Access, Arena, KVCacheTransferEngine, TransferAgent, TransportConfig, kernels
from kv_transport.config import TransportName
from kv_transport.memory_budget import MemoryBudget

SMALL = BlockGeometry(num_layers=4, num_kv_heads=2, head_dim=16, dtype=DType.BF16, block_size=8)
"""1 KiB per (slot, layer)."""

LARGE = BlockGeometry(num_layers=3, num_kv_heads=8, head_dim=128, dtype=DType.BF16, block_size=64)
"""256 KiB per (slot, layer): beyond what is copied on the loop."""

NO_RESERVE = MemoryBudget(reserve_nbytes=0)


@dataclass
class Node:
    """An agent, its engine and its arena."""

    agent: TransferAgent
    engine: KVCacheTransferEngine
    arena: Arena
    region: RegionId
    used: int = field(default=0)

    def blocks(self, count: int) -> list[BlockRef]:
        """The next `count` slots, raised to a new generation."""
        slots = [(self.used + index) % self.arena.num_slots for index in range(count)]
        self.used += count
        return [BlockRef(self.region, slot, self.arena.raise_generation(slot)) for slot in slots]

    def filled(self, count: int, seed: int, *, sealed: bool = True) -> list[BlockRef]:
        """The next `count` slots with random bytes."""
        rng = np.random.default_rng(seed)
        refs = self.blocks(count)
        for ref in refs:
            for layer in range(self.arena.geometry.num_layers):
                cell = self.arena.cell(ref.slot, layer)
                cell[:] = rng.bytes(len(cell))
            if sealed:
                self.arena.seal_block(ref.slot)
        return refs

    def content(self, refs: list[BlockRef]) -> list[bytes]:
        """Every byte of these blocks, layer by layer."""
        layers = range(self.arena.geometry.num_layers)
        return [bytes(self.arena.cell(ref.slot, layer)) for ref in refs for layer in layers]

    def sealed_and_right(self, refs: list[BlockRef]) -> bool:
        """Whether the checksum table agrees with the bytes."""
        return all(self.arena.verify(ref.slot) for ref in refs)


def config(transport: TransportName, folder: Path, **settings: int) -> TransportConfig:
    return TransportConfig(
        transport=transport,
        socket_folder=folder if transport in ("auto", "shm") else None,
        tcp_host="127.0.0.1" if transport in ("auto", "tcp", "ucx") else None,
        allow_ucx=transport == "ucx",
        **settings,  # type: ignore[arg-type]
    )


@contextlib.asynccontextmanager
async def node(
    name: str,
    settings: TransportConfig,
    *,
    incarnation: int = 1,
    geometry: BlockGeometry = SMALL,
    slots: int = 64,
    layout: Layout = Layout.LAYER_FIRST,
    access: Access = Access.NONE,
) -> AsyncIterator[Node]:
    arena = Arena.create(geometry, slots, layout, name=name, budget=NO_RESERVE)
    try:
        async with TransferAgent(NodeId(name), Incarnation(incarnation), settings) as agent:
            region = agent.register_memory(arena, access)
            engine = KVCacheTransferEngine(agent)
            yield Node(agent, engine, arena, region.region)
            await engine.close()
    finally:
        arena.close()


async def eventually(condition: Callable[[], bool], within_s: float = 10) -> None:
    """Wait until it holds."""
    async with asyncio.timeout(within_s):
        while not condition():  # noqa: ASYNC110 - nobody announces these states
            await asyncio.sleep(0.01)


def introduce(*nodes: Node) -> None:
    """Everybody to everybody."""
    for one in nodes:
        for other in nodes:
            if one is not other:
                name = one.agent.name
                one.agent.add_remote_agent(other.agent.get_agent_metadata(name.node, name.incarnation))


@contextlib.asynccontextmanager
async def pair(
    transport: TransportName,
    folder: Path,
    *,
    geometry: BlockGeometry = SMALL,
    slots: int = 64,
    layouts: tuple[Layout, Layout] = (Layout.LAYER_FIRST, Layout.LAYER_FIRST),
    access: Access = Access.NONE,
    **settings: int,
) -> AsyncIterator[tuple[Node, Node]]:
    """A sender and a receiver that know each other."""
    one = config(transport, folder / "sockets", **settings)
    async with (
        node("prefill", one, geometry=geometry, slots=slots, layout=layouts[0], access=access) as sender,
        node("decode", one, geometry=geometry, slots=slots, layout=layouts[1], access=access) as receiver,
    ):
        introduce(sender, receiver)
        yield sender, receiver


def damage_shared_copies(monkeypatch: pytest.MonkeyPatch, times: int, of_cell: int = 0) -> list[int]:
    """A memory bus that loses a bit in `times` copies; the list holds how often it has not happened yet."""
    whole, left = kernels.copy_shared, [times]

    def copy(
        state: bytearray,
        to: memoryview,
        source: memoryview,
        cells: kernels.CellTable,
        checks: bytearray,
        read: bytearray | None,
    ) -> bool | None:
        outcome = whole(state, to, source, cells, checks, read)
        if outcome and left[0]:
            left[0] -= 1
            to[int(cells[of_cell, 0])] ^= 1
            checks[8 * of_cell] ^= 1
        return outcome

    monkeypatch.setattr(kernels, "copy_shared", copy)
    return left

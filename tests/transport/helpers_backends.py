"""Two nodes over any transport, on real loops; what one transport cannot do is said here once."""

import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

from kv_core.block import BlockGeometry, Layout
from kv_core.ids import Incarnation, NodeId
from kv_transport import Access, Arena, KVCacheTransferEngine, TransferAgent, TransportConfig
from kv_transport.backends.memory_network import MemoryNetwork
from kv_transport.config import TransportName
from tests.transport.helpers_transport import NO_RESERVE, SMALL, Node, introduce

BACKENDS: list[TransportName] = ["shm", "tcp", "ucx", "memory"]


@dataclass
class Place:
    """Where agents of one test meet."""

    transport: TransportName
    folder: Path
    network: MemoryNetwork

    def config(self, **settings: int) -> TransportConfig:
        return TransportConfig(
            transport=self.transport,
            socket_folder=self.folder / "sockets",
            tcp_host="127.0.0.1",
            allow_ucx=True,
            **settings,  # type: ignore[arg-type]
        )

    @contextlib.asynccontextmanager
    async def node(
        self,
        name: str,
        *,
        incarnation: int = 1,
        geometry: BlockGeometry = SMALL,
        slots: int = 64,
        layout: Layout = Layout.LAYER_FIRST,
        access: Access = Access.NONE,
        settings: dict[str, int] | None = None,
    ) -> AsyncIterator[Node]:
        arena = Arena.create(geometry, slots, layout, name=name, budget=NO_RESERVE)
        config = self.config(**(settings or {}))
        try:
            async with TransferAgent(NodeId(name), Incarnation(incarnation), config, network=self.network) as agent:
                engine = KVCacheTransferEngine(agent)
                yield Node(agent, engine, arena, agent.register_memory(arena, access).region)
                await engine.close()
        finally:
            arena.close()

    @contextlib.asynccontextmanager
    async def pair(
        self,
        *,
        geometry: BlockGeometry = SMALL,
        slots: int = 64,
        access: Access = Access.NONE,
        settings: dict[str, int] | None = None,
    ) -> AsyncIterator[tuple[Node, Node]]:
        """A sender and a receiver that know each other."""
        async with (
            self.node("prefill", geometry=geometry, slots=slots, access=access, settings=settings) as sender,
            self.node("decode", geometry=geometry, slots=slots, access=access, settings=settings) as receiver,
        ):
            introduce(sender, receiver)
            yield sender, receiver

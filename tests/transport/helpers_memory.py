"""Agents over a `MemoryNetwork` in virtual time, and a hand-over between two of them."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass

from kv_core.block import BlockGeometry
from kv_core.clock import Clock
from kv_core.errors import KVError
from kv_core.ids import Incarnation, NodeId, RequestId
from kv_transport import Arena, KVCacheTransferEngine, TransferAgent, TransportConfig
from kv_transport.backends.memory_network import MemoryNetwork
from tests.transport.helpers_transport import NO_RESERVE, SMALL, Node

MEMORY = TransportConfig(transport="memory")


@contextlib.asynccontextmanager
async def memory_node(
    name: str,
    network: MemoryNetwork,
    clock: Clock,
    *,
    incarnation: int = 1,
    settings: TransportConfig = MEMORY,
    geometry: BlockGeometry = SMALL,
) -> AsyncIterator[Node]:
    arena = Arena.create(geometry, 64, name=name, budget=NO_RESERVE)
    try:
        async with TransferAgent(NodeId(name), Incarnation(incarnation), settings, clock, network) as agent:
            engine = KVCacheTransferEngine(agent)
            yield Node(agent, engine, arena, agent.register_memory(arena).region)
            await engine.close()
    finally:
        arena.close()


@dataclass
class Outcome:
    """How a hand-over ended for both sides: None is success."""

    sent: KVError | None
    received: KVError | None
    right: bool
    seconds: float


async def hand_over(sender: Node, receiver: Node, number: int, blocks: int, timeout_ms: int) -> Outcome:
    """One hand-over of known bytes; returns when the memory of both sides is free."""
    request = RequestId(f"request-{number}")
    source, target = sender.filled(blocks, seed=number), receiver.blocks(blocks)
    tokens = blocks * SMALL.block_size
    loop = asyncio.get_running_loop()
    began = loop.time()
    grant = receiver.engine.grant_writes(request, target, seq_start=0, seq_end=tokens)
    inbound = receiver.engine.expect(request, grant, timeout_ms=timeout_ms)
    sent = received = None
    try:
        handover = sender.engine.open_handover(request, grant)
        for layer in range(SMALL.num_layers):
            handover.submit(layer, source)
        await handover.finish(timeout_ms)
    except KVError as error:
        sent = error
    try:
        await inbound.done()
    except KVError as error:
        received = error
    seconds = loop.time() - began
    await inbound.released()
    right = sender.content(source) == receiver.content(target) and receiver.sealed_and_right(target)
    return Outcome(sent, received, right, seconds)


async def fetch(reader: Node, holder: Node, number: int, blocks: int, timeout_ms: int) -> Outcome:
    """One read under a lease."""
    request = RequestId(f"read-{number}")
    source, target = holder.filled(blocks, seed=number), reader.blocks(blocks)
    loop = asyncio.get_running_loop()
    began = loop.time()
    tokens = blocks * SMALL.block_size
    grant = holder.engine.lease_reads(request, source, seq_start=0, seq_end=tokens, lease_ms=3_600_000)
    error = None
    try:
        await reader.engine.fetch(grant, target).wait(timeout_ms)
    except KVError as caught:
        error = caught
    holder.engine.release_lease(grant.ticket)
    right = holder.content(source) == reader.content(target) and reader.sealed_and_right(target)
    return Outcome(error, error, right, loop.time() - began)

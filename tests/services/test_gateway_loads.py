"""What a gateway holds for a node's load goes with the request, however that ends: nothing shuns a node for ever."""

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from kv_bus.errors import HandlerFailed
from kv_consistency.errors import ReplicaFencedError
from kv_core.ids import NodeId
from kv_core.testing import LoopClock, run_virtual
from kv_services.errors import NodeOverloadedError
from tests.services.helpers_gateway_world import World

D1, D2, P1, P2 = (NodeId(name) for name in ("decode-1", "decode-2", "prefill-1", "prefill-2"))
BROKEN = HandlerFailed(node="n", message="m", exception="OSError")
FULL = NodeOverloadedError(node="n", waiting=1, limit=1)


def loads(world: World) -> int:
    """What is assigned to all nodes."""
    return sum(world.ctx.placer.load(node) for node in world.nodes)


async def right(world: World) -> None:
    assert (await world.ask()).tokens == [7]


async def one_attempt_more(world: World) -> None:
    for node in (D1, P1):
        world.nodes[node].refusal = BROKEN
    for _ in range(4):
        await world.ask()


async def everybody_is_full(world: World) -> None:
    for node in world.nodes.values():
        node.refusal = FULL
    assert (await world.ask()).error is not None


async def hand_overs_fail(world: World) -> None:
    for node in (P1, P2):
        world.nodes[node].fails_towards = D1
    for _ in range(4):
        await world.ask()


async def nobody_answers_in_time(world: World) -> None:
    for node in world.nodes.values():
        node._decode = lambda request_id, epoch: None  # type: ignore[method-assign]
    assert (await world.ask(timeout_s=0.5)).error is not None


async def the_client_leaves(world: World) -> None:
    for node in world.nodes.values():
        node._decode = lambda request_id, epoch: None  # type: ignore[method-assign]
    streams = [world.submit() for _ in range(4)]
    await asyncio.sleep(0.05)
    assert loads(world) > 0, "they are at work"
    for stream in streams:
        stream.cancel()


async def nodes_die(world: World) -> None:
    for node in world.nodes.values():
        node._decode = lambda request_id, epoch: None  # type: ignore[method-assign]
    asking = [asyncio.ensure_future(world.ask(timeout_s=3.0)) for _ in range(4)]
    await asyncio.sleep(0.05)
    assert loads(world) > 0, "they are at work"
    await world.nodes[D1].stop()
    await world.nodes[P1].stop()
    await asyncio.gather(*asking)


async def the_gateway_s_own_life_is_over(world: World) -> None:
    world.owners.refusal = ReplicaFencedError(node="gateway", seen=2)
    assert (await world.ask()).error is not None
    world.owners.refusal = None


@pytest.mark.parametrize(
    "ends",
    [
        right,
        one_attempt_more,
        everybody_is_full,
        hand_overs_fail,
        nobody_answers_in_time,
        the_client_leaves,
        nodes_die,
        the_gateway_s_own_life_is_over,
    ],
)
def test_however_a_request_ends_no_node_is_held_for_busy_with_it(ends: Callable[[World], Awaitable[None]]) -> None:
    async def run(clock: LoopClock) -> tuple[int, int]:
        world = World(clock, prefill=2, decode=2)
        try:
            await world.start()
            await asyncio.sleep(0.2)
            await ends(world)
            await asyncio.sleep(0.5)
            return loads(world), world.completer.num_open
        finally:
            await world.stop()

    assert run_virtual(run) == (0, 0)

"""Two requests with one beginning at once: it is computed once, whichever nodes they go to; a death ends the wait."""

import asyncio
from collections.abc import Sequence

import msgspec
import pytest

from kv_services.config import RoutingSection
from tests.integration.helpers_integration import BLOCK, MODEL, Fabric, prompt, running, until

pytestmark = [pytest.mark.integration, pytest.mark.timeout(240)]

SLOW = msgspec.structs.replace(MODEL, stub_token_us=6_000)
SHARED, REST = 40 * BLOCK, 2 * BLOCK
NODES = ("prefill-1", "prefill-2")


def pair(seed: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Two prompts that share their first 40 blocks with each other, and with no other pair."""
    beginning = tuple((token + seed) % 256 for token in prompt(seed, SHARED))
    return (*beginning, *prompt(seed + 1, REST + 1)), (*beginning, *prompt(seed + 2, REST + 1))


async def computed(fabric: Fabric, nodes: Sequence[str] = NODES) -> float:
    found = 0.0
    for node in nodes:
        _, text = await fabric.get(node, "/metrics")
        lines = (line.rsplit(" ", 1) for line in text.splitlines())
        found += sum(float(value) for key, value in lines if key == 'kv_tokens_total{phase="prefill"}')
    return found


async def working(fabric: Fabric, nodes: Sequence[str] = NODES) -> list[str]:
    """Those of the nodes that are at work."""
    return [node for node in nodes if (await fabric.status(node)).running]


async def learn(fabric: Fabric) -> None:
    """Let two nodes learn how slow they are: a measurement of a rate counts a quarter, and what they announce by it is
    waited for twice as long."""
    for seed in range(6):
        tokens = prompt(900 + seed, 4 * BLOCK + 1)
        assert (await fabric.ask(tokens, 1)).is_right(tokens, 1)


async def first_and_second(
    fabric: Fabric, seed: int, nodes: Sequence[str] = NODES
) -> "tuple[asyncio.Task[bool], asyncio.Task[bool], str]":
    """The second is asked for while a node computes the first; also which node that is."""
    first, second = pair(seed)

    async def right(tokens: tuple[int, ...]) -> bool:
        return (await fabric.ask(tokens, 2)).is_right(tokens, 2)

    one = asyncio.create_task(right(first))
    at: list[str] = []

    async def begun() -> bool:
        at[:] = await working(fabric, nodes)
        return bool(at)

    await until(begun)
    # A quarter of it is done by then: computing it takes four seconds.
    await asyncio.sleep(1.0)
    return one, asyncio.create_task(right(second)), at[0]


async def test_what_is_being_computed_is_waited_for_where_the_router_takes_turns() -> None:
    async with running(prefill=2, model=SLOW, routing=RoutingSection(policy="round_robin")) as fabric:
        await learn(fabric)
        before = await computed(fabric)
        one, two, _ = await first_and_second(fabric, 10)
        assert await one and await two
        assert await computed(fabric) - before == SHARED + 2 * REST, "the beginning was computed twice"
        waited = {node: await fabric.metric(node, "kv_prefix_waits_total") for node in NODES}
        assert sum(waited.values()) == 1

        # Its node dies in the middle: the wait ends with it, and both requests are computed where the second waits.
        one, two, node = await first_and_second(fabric, 20)

        async def waiting() -> bool:
            return any([(await fabric.status(other)).waiting for other in NODES if other != node])

        await until(waiting)
        await fabric.cluster.kill(node)
        assert await one and await two
        (survivor,) = [other for other in NODES if other != node]
        assert await fabric.metric(survivor, "kv_prefix_waits_total") > waited[survivor]
        await fabric.settle([survivor, "decode-1"])
        await fabric.cluster.restart(node)


async def test_the_router_sends_the_second_request_to_the_node_that_computes() -> None:
    async with running(prefill=2, model=SLOW) as fabric:
        before = await computed(fabric)
        one, two, _ = await first_and_second(fabric, 10)
        assert await one and await two
        assert await computed(fabric) - before == SHARED + 2 * REST, "the beginning was computed twice"
        assert not any([await fabric.metric(node, "kv_prefix_waits_total") for node in NODES])
        await fabric.settle()


async def test_where_decode_nodes_compute_a_second_request_waits_for_the_first() -> None:
    nodes = ("decode-1", "decode-2")
    async with running(prefill=0, decode=2, model=SLOW) as fabric:
        await learn(fabric)
        before = await computed(fabric, nodes)
        one, two, node = await first_and_second(fabric, 10, nodes)
        # It holds nothing meanwhile, and is where its beginning is being computed.
        await until(lambda: _waits_at(fabric, node))
        announced = (await fabric.status(node)).open["announcements"]
        assert await one and await two
        assert announced == 1 and await computed(fabric, nodes) - before == SHARED + 2 * REST
        await fabric.settle()


async def _waits_at(fabric: Fabric, node: str) -> bool:
    return (await fabric.status(node)).waiting == 1

"""Processes that die, stand still and come back: each request ends right, or with an error that says why."""

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Sequence

import aiohttp
import pytest
import pytest_asyncio

from tests.integration.helpers_integration import Answer, Fabric, prompt, running, until

pytestmark = [pytest.mark.integration, pytest.mark.timeout(300), pytest.mark.asyncio(loop_scope="module")]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def fabric() -> AsyncIterator[Fabric]:
    async with running(prefill=2, decode=2, monitor=True) as fabric:
        yield fabric


@pytest_asyncio.fixture(loop_scope="module", autouse=True)
async def whole(fabric: Fabric) -> None:
    """Each test begins with every process alive and idle."""
    names = {node.id for node in fabric.config.nodes}
    for name in sorted(names):
        await fabric.all_alive(name, names - {name})
    await fabric.settle()


async def at_work(fabric: Fabric, count: int) -> bool:
    return (await fabric.status("gateway")).running >= count


def check(prompts: Sequence[tuple[int, ...]], count: int, answers: Sequence[Answer]) -> None:
    for one, answer in zip(prompts, answers, strict=True):
        assert answer.is_right(one, count) or answer.is_clear_error(), answer
    assert any(answer.is_right(one, count) for one, answer in zip(prompts, answers, strict=True))


async def come_back(fabric: Fabric, name: str, before: int) -> None:
    """Restart a node on its old ports; see `lives_again`."""
    await fabric.cluster.restart(name)
    await lives_again(fabric, name, before)


async def lives_again(fabric: Fabric, name: str, before: int) -> None:
    """Wait until a node has begun another life, and the gateway works with it again."""
    await until(lambda: is_later_life(fabric, name, before))
    await fabric.all_alive("gateway", [name])
    role = "prefill_node" if name.startswith("prefill") else "decode_node"
    seen: list[str] = []

    async def served() -> bool:
        prompts = [prompt(1000 + len(seen) + i, 70) for i in range(4)]
        answers = await asyncio.gather(*(fabric.ask(one, 4) for one in prompts))
        for one, answer in zip(prompts, answers, strict=True):
            assert answer.is_right(one, 4), answer
        seen.extend(answer.fabric[role] for answer in answers)
        return name in seen

    await until(served, lambda: f"{name} not among {seen}")


async def under_way(fabric: Fabric, prompts: Sequence[tuple[int, ...]], count: int) -> list[asyncio.Task[Answer]]:
    """Streams of these prompts, of which one at least has begun to answer."""
    begun = asyncio.Event()

    async def on_text(text: bytes) -> None:
        if len(text) > 20:
            begun.set()

    asking = [asyncio.create_task(fabric.stream(one, count, on_text)) for one in prompts]
    await begun.wait()
    return asking


async def test_a_killed_prefill_node_costs_its_requests_time_and_the_decode_nodes_nothing(fabric: Fabric) -> None:
    before = (await fabric.status("prefill-1")).incarnation
    decode = {name: (await fabric.status(name)).incarnation for name in ("decode-1", "decode-2")}
    prompts = [prompt(seed, 150) for seed in range(8)]
    os.kill(fabric.cluster.pid("prefill-1"), signal.SIGSTOP)
    asking = [asyncio.ensure_future(fabric.ask(one, 10)) for one in prompts]
    await asyncio.sleep(0.3)
    await fabric.cluster.kill("prefill-1")
    check(prompts, 10, await asyncio.gather(*asking))
    for name, incarnation in decode.items():
        assert (await fabric.get(name, "/healthz"))[0] == 200
        assert (await fabric.status(name)).incarnation == incarnation
    await fabric.settle(["gateway", "prefill-2", "decode-1", "decode-2"])
    await come_back(fabric, "prefill-1", before)


async def test_a_stream_goes_on_at_another_node_with_no_token_lost_or_repeated(fabric: Fabric) -> None:
    count = 700
    prompts = [prompt(20 + seed, 50 + seed) for seed in range(4)]
    asking = await under_way(fabric, prompts, count)
    loads = {name: (await fabric.status(name)) for name in ("decode-1", "decode-2")}
    victim = max(loads, key=lambda name: loads[name].running)
    await fabric.cluster.kill(victim)
    answers = await asyncio.gather(*asking)
    for one, answer in zip(prompts, answers, strict=True):
        assert answer.is_right(one, count), (answer, answer.text)
    assert max(answer.fabric["attempts"] for answer in answers) > 1
    await fabric.settle(["gateway", "prefill-1", "prefill-2", *(loads.keys() - {victim})])
    await come_back(fabric, victim, loads[victim].incarnation)


async def test_what_a_decode_node_says_after_it_was_held_for_dead_reaches_no_client(fabric: Fabric) -> None:
    count = 700
    prompts = [prompt(120 + seed, 50 + seed) for seed in range(4)]
    asking = await under_way(fabric, prompts, count)
    loads = {name: (await fabric.status(name)) for name in ("decode-1", "decode-2")}
    victim = max(loads, key=lambda name: loads[name].running)
    pid = fabric.cluster.pid(victim)
    os.kill(pid, signal.SIGSTOP)
    try:
        await until(lambda: is_dead(fabric, victim))
    finally:
        os.kill(pid, signal.SIGCONT)
    # It goes on where it stood, in the middle of its answers, while others give them.
    for one, answer in zip(prompts, await asyncio.gather(*asking), strict=True):
        assert answer.is_right(one, count), (answer, answer.text)
    await lives_again(fabric, victim, loads[victim].incarnation)
    await fabric.settle()


async def test_a_prefill_node_that_stands_still_holds_nobody_up_for_good(fabric: Fabric) -> None:
    before = (await fabric.status("prefill-2")).incarnation
    prompts = [prompt(40 + seed, 120) for seed in range(6)]
    pid = fabric.cluster.pid("prefill-2")
    os.kill(pid, signal.SIGSTOP)
    try:
        answers = await asyncio.gather(*(fabric.ask(one, 8) for one in prompts))
        check(prompts, 8, answers)
        await until(lambda: is_dead(fabric, "prefill-2"))
    finally:
        os.kill(pid, signal.SIGCONT)
    again = [prompt(60 + seed, 120) for seed in range(6)]
    for one, answer in zip(again, await asyncio.gather(*(fabric.ask(one, 8) for one in again)), strict=True):
        assert answer.is_right(one, 8), answer
    # Nobody restarts it: told that its life is over, it begins another by itself.
    await lives_again(fabric, "prefill-2", before)


async def test_a_short_pause_is_no_death(fabric: Fabric) -> None:
    prompts = [prompt(80 + seed, 120) for seed in range(6)]
    pid = fabric.cluster.pid("prefill-1")
    os.kill(pid, signal.SIGSTOP)
    asking = [asyncio.ensure_future(fabric.ask(one, 8)) for one in prompts]
    try:
        await asyncio.sleep(0.5)
    finally:
        os.kill(pid, signal.SIGCONT)
    for one, answer in zip(prompts, await asyncio.gather(*asking), strict=True):
        assert answer.is_right(one, 8), answer
    await fabric.all_alive("gateway", ["prefill-1"])
    await fabric.settle()


async def test_nothing_depends_on_the_monitor(fabric: Fabric) -> None:
    await fabric.cluster.kill("monitor")
    prompts = [prompt(90 + seed, 60) for seed in range(4)]
    for one, answer in zip(prompts, await asyncio.gather(*(fabric.ask(one, 8) for one in prompts)), strict=True):
        assert answer.is_right(one, 8), answer
    await fabric.cluster.restart("monitor")


async def test_a_gateway_that_is_killed_knows_again_what_every_node_holds(fabric: Fabric) -> None:
    prompts = [prompt(2_000 + seed, 100) for seed in range(12)]
    answers = await asyncio.gather(*(fabric.ask(one, 4) for one in prompts))
    for one, answer in zip(prompts, answers, strict=True):
        assert answer.is_right(one, 4), answer
    worked = [(answer.fabric["prefill_node"], answer.fabric["decode_node"]) for answer in answers]
    for one, nodes in zip(prompts, worked, strict=True):
        await fabric.all_held(one, 6, nodes)
    before = (await fabric.status("gateway")).incarnation
    await fabric.cluster.kill("gateway")
    await fabric.cluster.restart("gateway")
    assert (await fabric.status("gateway")).incarnation > before
    for one, nodes in zip(prompts, worked, strict=True):
        await fabric.all_held(one, 6, nodes)
    for one, answer in zip(prompts, await asyncio.gather(*(fabric.ask(one, 4) for one in prompts)), strict=True):
        assert answer.is_right(one, 4) and answer.cached >= 96, answer


async def is_later_life(fabric: Fabric, name: str, before: int) -> bool:
    try:
        return (await fabric.status(name)).incarnation > before
    except aiohttp.ClientConnectionError:
        return False  # between two lives nobody listens


async def is_dead(fabric: Fabric, name: str) -> bool:
    return (await fabric.status("gateway")).members[name] == "dead"

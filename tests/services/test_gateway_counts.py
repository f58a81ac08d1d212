"""What happens to one request moves the counts that tell of it by one, and no others."""

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from kv_bus.errors import HandlerFailed
from kv_core.errors import KVError
from kv_core.testing import LoopClock, run_virtual
from kv_services.errors import RequestExpiredError
from tests.services.helpers_gateway_world import Answer, World

BROKEN = HandlerFailed(node="n", message="m", exception="OSError")
TOO_LATE = RequestExpiredError(request_id="r", node="n", state="waiting")


def counts(world: World) -> dict[str, float]:
    """Every counter that is not zero, with its label."""
    return {
        " ".join((sample.name, *sample.labels.values())): sample.value
        for family in world.metrics.registry.collect()
        if family.type == "counter"
        for sample in family.samples
        if sample.name.endswith("_total") and sample.value
    }


def refuse(world: World, error: KVError | None) -> None:
    for node in world.nodes.values():
        node.refusal = error


async def a_right_answer(world: World) -> Answer:
    return await world.ask()


async def a_failure_and_another_attempt(world: World) -> Answer:
    refuse(world, BROKEN)
    asking = asyncio.ensure_future(world.ask())
    while not any(node.asked for node in world.nodes.values()):  # noqa: ASYNC110  # virtual time, and nobody tells
        await asyncio.sleep(0.001)
    refuse(world, None)
    return await asking


async def a_refusal_for_good(world: World) -> Answer:
    refuse(world, TOO_LATE)
    return await world.ask()


async def a_client_that_leaves(world: World) -> Answer:
    for node in world.nodes.values():
        node._decode = lambda request_id, epoch: None  # type: ignore[method-assign]
    stream = world.submit()
    await asyncio.sleep(0.05)
    stream.cancel()
    await asyncio.sleep(0.05)
    return Answer()


async def a_time_that_passes(world: World) -> Answer:
    for node in world.nodes.values():
        node._decode = lambda request_id, epoch: None  # type: ignore[method-assign]
    return await world.ask(timeout_s=0.5)


@pytest.mark.parametrize(
    ("event", "moved"),
    [
        (a_right_answer, ["kv_requests_total ok"]),
        (
            a_failure_and_another_attempt,
            ["kv_requests_total ok", "kv_request_retries_total", "kv_recoveries_total another_attempt"],
        ),
        (a_refusal_for_good, ["kv_requests_total RequestExpiredError"]),
        (a_client_that_leaves, ["kv_requests_total disconnected"]),
        (a_time_that_passes, ["kv_requests_total DeadlineExceededError"]),
    ],
)
def test_one_event_moves_its_counts_by_one(event: Callable[[World], Awaitable[Answer]], moved: list[str]) -> None:
    async def run(clock: LoopClock) -> tuple[dict[str, float], dict[str, float]]:
        world = World(clock, decode=2)
        try:
            await world.start()
            await asyncio.sleep(0.2)
            before = counts(world)
            await event(world)
            return before, counts(world)
        finally:
            await world.stop()

    assert run_virtual(run) == ({}, dict.fromkeys(moved, 1.0))

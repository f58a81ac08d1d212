"""Too few slots, too many requests, and clients that leave: nothing hangs, nothing is lost, nothing stays taken."""

import asyncio
import os
import signal
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from kv_services.config import LimitsSection
from tests.integration.helpers_integration import Fabric, events, prompt, running, until

pytestmark = [pytest.mark.integration, pytest.mark.timeout(300), pytest.mark.asyncio(loop_scope="module")]

SLOTS = 24
QUEUE = 8


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def fabric() -> AsyncIterator[Fabric]:
    limits = LimitsSection(request_timeout_s=60.0, gateway_queue=QUEUE)
    async with running(slots=SLOTS, limits=limits) as fabric:
        yield fabric


async def test_requests_that_do_not_fit_together_give_way_and_all_end_right(fabric: Fabric) -> None:
    # Each ends up with 9 of the 24 blocks.
    prompts = [prompt(seed, 40) for seed in range(6)]
    answers = await asyncio.gather(*(fabric.ask(one, 100) for one in prompts))
    for one, answer in zip(prompts, answers, strict=True):
        assert answer.is_right(one, 100), answer
    await fabric.settle()
    assert await fabric.metric("decode-1", "kv_preemptions_total") > 0


async def test_a_request_that_no_node_could_ever_hold_is_refused_as_such(fabric: Fabric) -> None:
    for tokens, count in ((prompt(1, 16 * SLOTS + 40), 4), (prompt(1, 40), 16 * SLOTS)):
        answer = await fabric.ask(tokens, count)
        assert answer.status == 400, answer
        assert answer.error["code"] == "context_length_exceeded"
        assert str(SLOTS) in answer.error["message"]
    await fabric.settle()


async def test_a_full_gateway_says_when_to_come_again(fabric: Fabric) -> None:
    prompts = [prompt(seed, 60) for seed in range(20)]
    answers = await asyncio.gather(*(fabric.ask(one, 80) for one in prompts))
    refused = [answer for answer in answers if answer.status != 200]
    for one, answer in zip(prompts, answers, strict=True):
        assert answer.is_right(one, 80) or (answer.status == 429 and answer.is_clear_error()), answer
    assert 0 < len(refused) < len(prompts)
    assert all(int(answer.retry_after or 0) >= 1 for answer in refused)
    await fabric.settle()


async def test_full_nodes_refuse_with_a_time_to_come_again_and_never_hang() -> None:
    limits = LimitsSection(request_timeout_s=60.0, node_queue=1)
    async with running(slots=SLOTS, limits=limits) as fabric:
        prompts = [prompt(seed, 60) for seed in range(24)]
        answers = await asyncio.gather(*(fabric.ask(one, 120) for one in prompts))
        for one, answer in zip(prompts, answers, strict=True):
            if answer.status == 200:
                assert answer.is_right(one, 120), answer
            else:
                assert answer.status == 429 and answer.is_clear_error(), answer
                assert int(answer.retry_after or 0) >= 1
        assert 0 < sum(answer.status == 200 for answer in answers) < len(prompts)
        await fabric.settle()


async def test_a_client_that_leaves_in_mid_stream_leaves_nothing_behind(fabric: Fabric) -> None:
    before = await gone(fabric)
    async with fabric.opened(prompt(5, 40), 300) as response:
        async for _ in events(response):
            break
    await until(lambda: more_gone(fabric, before))
    await fabric.settle()


async def test_a_client_that_leaves_before_the_first_token_leaves_nothing_behind(fabric: Fabric) -> None:
    before = await gone(fabric)
    # Nothing comes while the prefill node stands still.
    os.kill(fabric.cluster.pid("prefill-1"), signal.SIGSTOP)
    try:
        asking = asyncio.ensure_future(fabric.ask(prompt(6, 90), 20))
        await until(lambda: at_work(fabric))
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)
        await until(lambda: more_gone(fabric, before))
    finally:
        os.kill(fabric.cluster.pid("prefill-1"), signal.SIGCONT)
    await fabric.settle()
    answer = await fabric.ask(prompt(8, 90), 5)
    assert answer.is_right(prompt(8, 90), 5), answer


async def at_work(fabric: Fabric) -> bool:
    return (await fabric.status("gateway")).running > 0


async def gone(fabric: Fabric) -> int:
    _, text = await fabric.get("gateway", "/metrics")
    lines = [line for line in text.splitlines() if line.startswith('kv_requests_total{outcome="disconnected"}')]
    return int(float(lines[0].rsplit(" ", 1)[1])) if lines else 0


async def more_gone(fabric: Fabric, before: int) -> bool:
    return await gone(fabric) > before

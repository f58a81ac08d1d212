"""Two hundred streams at once: each gets its own right tokens, and nothing is held when they are over."""

import asyncio

import pytest

from kv_services.config import LimitsSection
from tests.integration.helpers_integration import Answer, prompt, running

pytestmark = [pytest.mark.integration, pytest.mark.timeout(400), pytest.mark.asyncio]

STREAMS = 200
COUNT = 12
LIMITS = LimitsSection(request_timeout_s=120.0, gateway_queue=STREAMS + 1, node_queue=STREAMS, max_batch=64)


async def test_two_hundred_streams_at_once_all_end_well() -> None:
    prompts = [prompt(seed, 100 + seed % 50, shared=48 if seed % 3 else 0) for seed in range(STREAMS)]
    async with running(prefill=2, decode=2, slots=1024, limits=LIMITS) as fabric:
        first_token = asyncio.Barrier(STREAMS)

        async def ask(tokens: tuple[int, ...]) -> Answer:
            begun = False

            async def all_have_begun(_: bytes) -> None:
                nonlocal begun
                if not begun:
                    begun = True
                    await first_token.wait()

            return await fabric.stream(tokens, COUNT, all_have_begun)

        # No stream reads beyond its first piece before all have one: all two hundred are open at the same time.
        answers = await asyncio.gather(*(ask(tokens) for tokens in prompts))
        bad = [answer for tokens, answer in zip(prompts, answers, strict=True) if not answer.is_right(tokens, COUNT)]
        assert not bad, f"{len(bad)}, such as {bad[0]}\n{fabric.last_lines()}"
        for report in await fabric.settle():
            assert report.running == report.waiting == 0, report

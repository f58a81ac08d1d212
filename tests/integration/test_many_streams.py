"""Two hundred streams at once: each gets its own right tokens, and nothing is held when they are over."""

import asyncio

import pytest

from kv_services.config import BusSection, LimitsSection
from tests.integration.helpers_integration import Answer, prompt, running

pytestmark = [pytest.mark.integration, pytest.mark.timeout(400), pytest.mark.asyncio]

STREAMS = 200
COUNT = 12
LIMITS = LimitsSection(request_timeout_s=120.0, gateway_queue=STREAMS + 1, node_queue=STREAMS, max_batch=64)
BUS = BusSection(suspect_after_ms=30_000, dead_after_ms=60_000)
"""Two hundred requests at one instant keep a gateway on a busy machine from saying that it lives."""


async def test_two_hundred_streams_at_once_all_end_well() -> None:
    prompts = [prompt(seed, 100 + seed % 50, shared=48 if seed % 3 else 0) for seed in range(STREAMS)]
    async with running(prefill=2, decode=2, slots=1024, limits=LIMITS, bus=BUS) as fabric:
        begun: set[tuple[int, ...]] = set()
        all_begun = asyncio.Event()

        async def ask(tokens: tuple[int, ...]) -> Answer:
            async def begins(_: bytes) -> None:
                begun.add(tokens)
                if len(begun) == STREAMS:
                    all_begun.set()
                await all_begun.wait()

            answer = await fabric.stream(tokens, COUNT, begins)
            if tokens not in begun:
                all_begun.set()  # it failed: nobody waits for it
            return answer

        # No stream reads beyond its first piece before all have one: all two hundred are open at the same time.
        answers = await asyncio.gather(*(ask(tokens) for tokens in prompts))
        bad = [answer for tokens, answer in zip(prompts, answers, strict=True) if not answer.is_right(tokens, COUNT)]
        assert not bad, f"{len(bad)}, such as {bad[0]}\n{fabric.last_lines()}"
        assert len(begun) == STREAMS
        for report in await fabric.settle():
            assert report.running == report.waiting == 0, report

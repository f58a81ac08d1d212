"""`transport.backend = "ucx"` in a real cluster: right tokens, the transport shown, and a node that dies."""

import asyncio

import pytest

from tests.integration.helpers_integration import prompt, running

pytestmark = [pytest.mark.integration, pytest.mark.timeout(300)]


async def test_a_cluster_over_ucx_gives_right_tokens_and_says_what_carried_them() -> None:
    async with running(prefill=1, decode=2, backend="ucx") as fabric:
        prompts = [prompt(seed, 200 + seed, 64) for seed in range(6)]
        answers = await asyncio.gather(*(fabric.ask(one, 8) for one in prompts))
        for one, answer in zip(prompts, answers, strict=True):
            assert answer.is_right(one, 8), answer
        assert {answer.fabric["transport"] for answer in answers} == {"ucx"}
        reports = await fabric.settle()
        assert {way for report in reports for way in report.transports.values()} == {"ucx"}
        _, text = await fabric.get("prefill-1", "/metrics")
        assert 'kv_transfer_bytes_total{transport="ucx"}' in text
        await fabric.cluster.kill("decode-1")
        for seed in range(10, 14):
            one = prompt(seed, 150 + seed, 64)
            assert (await fabric.ask(one, 8)).is_right(one, 8)
        await fabric.settle(["prefill-1", "decode-2"])

"""Requests through gateway, prefill and decode processes: right tokens, shared prefixes, books that balance."""

import asyncio
from collections.abc import AsyncIterator, Sequence

import pytest
import pytest_asyncio

from tests.integration.helpers_integration import BLOCK, Answer, Fabric, prompt, running

pytestmark = [pytest.mark.integration, pytest.mark.timeout(300), pytest.mark.asyncio(loop_scope="module")]

SHARED = 320
COUNT = 12
NAMED_METRICS = (
    "kv_cache_hit_ratio",
    "kv_transfer_latency_p99",
    "kv_cache_utilization_ratio",
    "kv_replication_lag_seconds",
    "kv_transfer_throughput_gbps",
)


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=["shm 1+1", "tcp 1+1", "shm 2+2"])
async def fabric(request: pytest.FixtureRequest) -> AsyncIterator[Fabric]:
    backend, _, counts = request.param.partition(" ")
    prefill, decode = map(int, counts.split("+"))
    async with running(prefill=prefill, decode=decode, backend=backend, monitor=True) as fabric:
        yield fabric


def wave(first: int) -> list[tuple[int, ...]]:
    return [prompt(seed, SHARED + 30 + seed, SHARED) for seed in range(first, first + 8)]


async def ask_all(fabric: Fabric, prompts: Sequence[tuple[int, ...]]) -> list[Answer]:
    answers = await asyncio.gather(
        *(fabric.stream(one, COUNT) if i % 2 else fabric.ask(one, COUNT) for i, one in enumerate(prompts))
    )
    for one, answer in zip(prompts, answers, strict=True):
        assert answer.is_right(one, COUNT), answer
        assert answer.finish == "length"
        assert answer.usage["prompt_tokens"] == len(one) and answer.usage["completion_tokens"] == COUNT
    return answers


async def test_equal_beginnings_are_computed_and_moved_once_and_every_token_is_right(fabric: Fabric) -> None:
    backend = fabric.config.transport.backend
    await ask_all(fabric, [prompt(99, SHARED + 1, SHARED)])
    await fabric.settle()
    first = await ask_all(fabric, wave(0))
    reports = await fabric.settle()
    # Everything is where it was: the same prompts again have nothing to compute but their ends.
    second = await ask_all(fabric, wave(0))
    assert all(answer.cached >= SHARED for answer in second)
    assert sum(answer.moved for answer in second) < sum(answer.moved for answer in first)
    if len(fabric.kv_nodes) == 2:
        assert all(answer.cached >= SHARED // BLOCK * BLOCK for answer in first)
    assert {answer.fabric["transport"] for answer in first} == {backend}
    assert all(answer.fabric["handover_tail_ms"] > 0 and answer.fabric["prefill_ms"] > 0 for answer in first)
    used = {transport for report in reports for transport in report.transports.values()}
    assert used == {backend}


async def test_prompts_of_every_length_and_beginnings_of_each_other_are_right(fabric: Fabric) -> None:
    base = prompt(7, 200)
    # Longest first, so that the shorter ones end within blocks that are held; then each once more.
    lengths = (100, 97, 96, 90, 49, 48, 47, 33, 17, 16, 15, 2, 1)
    for length in (*lengths, *lengths):
        answer = await fabric.ask(base[:length], 3)
        assert answer.is_right(base[:length], 3), (length, answer)
    await fabric.settle()


async def test_a_chat_is_answered_too(fabric: Fabric) -> None:
    url = f"{fabric.cluster.url('gateway')}/v1/chat/completions"
    body = {"model": "stub", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 5, "temperature": 0}
    async with fabric.session.post(url, json=body) as response:
        got = await response.json()
        assert response.status == 200, got
    tokens = (*b"user\nhello", 256, *b"assistant\n")
    assert Answer(text=got["choices"][0]["message"]["content"].encode()).is_right(tokens, 5)
    await fabric.settle()


async def test_every_process_tells_of_itself(fabric: Fabric) -> None:
    await ask_all(fabric, wave(40))
    names = {node.id for node in fabric.config.nodes}
    for report in await fabric.settle():
        assert report.state in ("ready", "degraded"), report
        assert report.incarnation >= 1
        assert report.members.keys() == names - {report.node}
        await fabric.all_alive(report.node, names - {report.node})
        assert (report.slots is not None) == (report.node in fabric.kv_nodes)
        _, text = await fabric.get(report.node, "/metrics")
        names_there = {line.split("{")[0].split(" ")[0] for line in text.splitlines() if not line.startswith("#")}
        assert set(NAMED_METRICS) <= names_there
    for role, phase in (("prefill", 'phase="prefill"'), ("decode", 'phase="decode"')):
        texts = [(await fabric.get(name, "/metrics"))[1] for name in fabric.kv_nodes if name.startswith(role)]
        assert any(f"kv_tokens_total{{{phase}}}" in text for text in texts)
    ok, _ = await fabric.get("gateway", "/healthz")
    assert ok == 200

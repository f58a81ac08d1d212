"""Real processes, a tiny model, and pools so small that no node holds the requests: answers are those of one process.

By layer where that fits, by tokens where layers are too coarse: both happen in the first cluster by size alone.
The nodes of the second are in two groups.
"""

import asyncio
import codecs
import contextlib
import functools
import os
import signal
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import aiohttp
import msgspec
import numpy as np
import pytest
import pytest_asyncio

from kv_core.dtypes import DType
from kv_services.config import BusSection, LimitsSection, ModelSection, ShardingSection
from kv_services.engine.interface import SamplingParams
from kv_services.engine.llama import LlamaModel
from kv_services.engine.single import Generation, GenerationRequest, SingleProcess
from kv_services.engine.threads import set_blas_threads
from kv_services.engine.tokenizer import BpeTokenizer
from kv_services.engine.weights import open_weights
from kv_services.launch import LocalCluster, PortReservation, local_config
from tests.engine.helpers_engine import TinyLlama, arena
from tests.integration.helpers_integration import DEADLINE_S, Fabric, Json, events, until

pytestmark = [pytest.mark.integration, pytest.mark.timeout(300), pytest.mark.asyncio(loop_scope="module")]

BLOCK, SLOTS = 4, 20
NEVER = frozenset[int]()
BY_LAYER, BY_TOKENS = 150, 240
"""Prompts of 38 and 60 blocks: with their answers one layer of the first fits a node's 20 slots, not of the second."""


def prompt(seed: int, length: int) -> list[int]:
    return [int(token) for token in np.random.default_rng(seed).integers(4, 260, length)]


@dataclass
class Oracle:
    """The same model in this process, with room for everything."""

    folder: Path
    model: LlamaModel
    tokenizer: BpeTokenizer

    def generation(self, tokens: Sequence[int], count: int) -> Generation:
        single = SingleProcess(self.model, arena(self.model, 200, BLOCK, DType.FP32))
        params = SamplingParams(temperature=0.0, top_logprobs=0)
        (got,) = single.generate([GenerationRequest(tokens, count, params, NEVER)])
        return got

    def text(self, tokens: Sequence[int], count: int) -> str:
        return self.said(self.generation(tokens, count).ids)

    def said(self, ids: Sequence[int]) -> str:
        """As a gateway shows tokens: an incomplete character at the end is left out."""
        return codecs.getincrementaldecoder("utf-8")("replace").decode(b"".join(map(self.tokenizer.token_bytes, ids)))


@pytest.fixture(scope="module")
def oracle(tmp_path_factory: pytest.TempPathFactory) -> Oracle:
    set_blas_threads(1)
    folder = tmp_path_factory.mktemp("sharded")
    path = TinyLlama(context=512).write(folder / "tiny.gguf")
    weights = open_weights(path, folder / "kv-fabric" / "weights")
    return Oracle(folder, LlamaModel(weights), BpeTokenizer(weights.tokenizer_json, weights.text))


OPERATOR = "operator-key-of-the-test"


@contextlib.asynccontextmanager
async def tiny_cluster(folder: Path, *, prefill: int, decode: int, sharding: ShardingSection) -> AsyncIterator[Fabric]:
    """Processes that serve the oracle's model; what was unpacked for it serves them too."""
    patch = pytest.MonkeyPatch()
    patch.setenv("XDG_CACHE_HOME", str(folder))
    with PortReservation() as ports:
        config = local_config(
            ports,
            prefill=prefill,
            decode=decode,
            slots=SLOTS,
            monitor=False,
            limits=LimitsSection(request_timeout_s=DEADLINE_S - 5.0, max_prompt_tokens=500),
            bus=BusSection(heartbeat_interval_ms=100, suspect_after_ms=3_000, dead_after_ms=6_000),
            model=ModelSection(id="tiny", path=str(folder / "tiny.gguf"), kv_dtype="fp32", block_size=BLOCK),
        )
        section = msgspec.structs.replace(config.cluster, operator_keys=[OPERATOR])
        cluster = LocalCluster(msgspec.structs.replace(config, cluster=section, sharding=sharding))
        async with cluster, aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=DEADLINE_S)) as session:
            fabric = Fabric(cluster, session)
            names = {node.id for node in config.nodes}
            for name in sorted(names):
                await fabric.all_alive(name, names - {name})
            yield fabric
    patch.undo()
    assert cluster.leftovers == []


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def fabric(oracle: Oracle) -> AsyncIterator[Fabric]:
    async with tiny_cluster(oracle.folder, prefill=1, decode=3, sharding=ShardingSection()) as fabric:
        yield fabric


async def ask(fabric: Fabric, tokens: Sequence[int], count: int, **extra: Json) -> tuple[int, Json]:
    body = {"model": "tiny", "prompt": list(tokens), "max_tokens": count, "temperature": 0, **extra}
    async with fabric.session.post(f"{fabric.cluster.url('gateway')}/v1/completions", json=body) as response:
        return response.status, await response.json()


async def held(fabric: Fabric) -> dict[str, tuple[str, str]]:
    """Layers and tokens of the piece at each node that holds one."""
    found = {}
    for name in fabric.kv_nodes:
        for shard in (await fabric.status(name)).shards:
            found[name] = shard.layers, shard.tokens
    return found


@pytest.mark.parametrize("length", [BY_LAYER, BY_TOKENS, 81])
async def test_what_no_node_holds_is_answered_as_one_process_would(fabric: Fabric, oracle: Oracle, length: int) -> None:
    tokens = prompt(length, length)
    status, got = await ask(fabric, tokens, 12, logprobs=0)
    assert status == 200, (got, fabric.last_lines())
    choice, want = got["choices"][0], oracle.generation(tokens, 12)
    assert choice["text"] == oracle.said(want.ids)
    assert got["usage"]["completion_tokens"] == 12
    told = choice["logprobs"]["token_logprobs"]
    np.testing.assert_allclose(told, np.array([token.logprob for token in want.tokens], float), atol=1e-3)
    reports = await fabric.settle()
    assert all(report.slots is None or report.slots.pinned == 0 for report in reports)
    assert await held(fabric) == {}


async def calls(fabric: Fabric) -> float:
    """Calls on pieces so far, at all nodes."""
    return sum([await fabric.metric(name, "kv_shard_calls_total") for name in fabric.kv_nodes])


@dataclass
class Streamed:
    """What a client saw of a streamed answer."""

    text: str = ""
    finish: str = ""
    error: Json = None


async def stream(
    fabric: Fabric, tokens: Sequence[int], count: int, on_text: Callable[[str], Awaitable[None]]
) -> Streamed:
    """One streamed request; `on_text` hears of the text so far after each piece of it."""
    body = {"model": "tiny", "prompt": list(tokens), "max_tokens": count, "temperature": 0, "stream": True}
    seen = Streamed()
    async with fabric.session.post(f"{fabric.cluster.url('gateway')}/v1/completions", json=body) as response:
        assert response.status == 200, await response.text()
        async for message in events(response):
            seen.error = message.get("error") or seen.error
            for choice in message.get("choices", ()):
                seen.finish = choice["finish_reason"] or seen.finish
                seen.text += choice["text"]
                if choice["text"]:
                    await on_text(seen.text)
    return seen


async def back_again(fabric: Fabric, name: str) -> None:
    """Restart a node and wait until everybody works with it."""
    await fabric.cluster.restart(name)
    names = {node.id for node in fabric.config.nodes}
    for one in sorted(names):
        await fabric.all_alive(one, names - {one})
    await fabric.settle()


async def find_piece(fabric: Fabric, *, coordinator: bool) -> str:
    """A node that holds a piece and coordinates, or does not."""
    found: list[str] = []

    async def held_somewhere() -> bool:
        for name in fabric.kv_nodes:
            found.extend(
                name for shard in (await fabric.status(name)).shards if (shard.coordinator == name) is coordinator
            )
        return bool(found)

    await until(held_somewhere)
    return found[0]


@pytest.mark.parametrize("coordinator", [False, True])
async def test_a_stream_goes_on_with_the_right_tokens_when_a_holder_or_the_coordinator_is_killed(
    fabric: Fabric, oracle: Oracle, coordinator: bool
) -> None:
    tokens, count = prompt(31 + coordinator, BY_LAYER - 40), 120
    killed: list[str] = []

    async def on_text(text: str) -> None:
        if not killed and len(text) > 5:
            killed.append(await find_piece(fabric, coordinator=coordinator))
            await fabric.cluster.kill(killed[0])

    seen = await asyncio.wait_for(stream(fabric, tokens, count, on_text), DEADLINE_S)
    assert killed and not seen.error, (seen.error, fabric.last_lines())
    assert seen.finish == "length"
    assert seen.text == oracle.text(tokens, count)
    alive = [node.id for node in fabric.config.nodes if node.id != killed[0]]
    await fabric.settle(alive)
    if not coordinator:
        noted = [event for name in alive for event in (await fabric.status(name)).events if event.kind == "shard_lost"]
        assert any(killed[0] in event.link and event.cause for event in noted)
    assert any(event.kind == "another_attempt" for event in (await fabric.status("gateway")).events)
    await back_again(fabric, killed[0])


async def test_a_stream_that_needs_every_node_goes_on_when_the_one_that_died_is_back(oracle: Oracle) -> None:
    # On a machine that is busy a process takes its time to start.
    patient = ShardingSection(room_wait_s=DEADLINE_S)
    async with tiny_cluster(oracle.folder, prefill=1, decode=3, sharding=patient) as fabric:
        await goes_on_when_the_one_that_died_is_back(fabric, oracle)


async def goes_on_when_the_one_that_died_is_back(fabric: Fabric, oracle: Oracle) -> None:
    tokens, killed = prompt(41, BY_TOKENS), list[str]()

    async def on_text(text: str) -> None:
        if not killed and len(text) > 5:
            killed.append(await find_piece(fabric, coordinator=False))
            await fabric.cluster.kill(killed[0])
            await fabric.cluster.restart(killed[0])

    seen = await asyncio.wait_for(stream(fabric, tokens, 70, on_text), DEADLINE_S)
    assert killed and not seen.error, (seen.error, fabric.last_lines())
    assert (seen.text, seen.finish) == (oracle.text(tokens, 70), "length")
    names = {node.id for node in fabric.config.nodes}
    for name in sorted(names):
        await fabric.all_alive(name, names - {name})
    await fabric.settle()


async def test_when_the_nodes_left_cannot_hold_it_the_client_is_told_so_and_nothing_stays(
    fabric: Fabric, oracle: Oracle
) -> None:
    tokens, killed = prompt(51, BY_TOKENS), list[str]()

    async def on_text(text: str) -> None:
        if not killed and len(text) > 5:
            killed.append(await find_piece(fabric, coordinator=False))
            await fabric.cluster.kill(killed[0])

    seen = await asyncio.wait_for(stream(fabric, tokens, 70, on_text), DEADLINE_S)
    assert killed and seen.error, seen
    # Not that its time was over; which, by whether the gateway had heard of the death before its last attempt.
    assert seen.error["code"] in ("overloaded", "try_again"), seen.error
    assert oracle.text(tokens, 70).startswith(seen.text.rstrip("\ufffd"))
    await fabric.settle([node.id for node in fabric.config.nodes if node.id != killed[0]])
    await back_again(fabric, killed[0])


async def test_a_client_that_leaves_frees_every_piece(fabric: Fabric) -> None:
    async def left_in_the_middle(length: int) -> bool:
        """Whether there were pieces to free, and not an answer that had come to its end."""
        body = {"model": "tiny", "prompt": prompt(61, length), "max_tokens": 60, "temperature": 0, "stream": True}
        async with aiohttp.ClientSession() as session:
            async with session.post(f"{fabric.cluster.url('gateway')}/v1/completions", json=body) as response:
                await find_piece(fabric, coordinator=True)
                pieces = len(await held(fabric))
                response.close()
        await fabric.settle()
        assert await held(fabric) == {}
        return pieces >= 3

    for length in (BY_LAYER, BY_TOKENS):
        await until(functools.partial(left_in_the_middle, length))


async def shown_while(
    fabric: Fabric, tokens: Sequence[int], count: int, pieces: int, text: str = ""
) -> dict[str, tuple[str, str]]:
    """The pieces of a stream while it runs; asked for anew as long as it ends before all nodes have told of them.

    Args:
        text: what the answer has to be, if given.
    """
    shown: dict[str, tuple[str, str]] = {}

    async def on_text(_: str) -> None:
        if len(shown) != pieces:
            shown.clear()
            shown.update(await held(fabric))

    async def all_shown() -> bool:
        seen = await stream(fabric, tokens, count, on_text)
        assert seen.finish == "length" and (not text or seen.text == text), seen
        return len(shown) == pieces

    await until(all_shown, lambda: str(shown))
    return shown


async def test_pieces_cover_the_sequence_once_and_are_shown_while_it_runs(fabric: Fabric) -> None:
    shown = {
        length: await shown_while(fabric, prompt(71, length), 40, count)
        for length, count in ((BY_LAYER, 3), (BY_TOKENS, 4))
    }
    assert sorted(layers for layers, _ in shown[BY_LAYER].values()) == ["0-1", "1-2", "2-3"]
    assert {tokens for _, tokens in shown[BY_LAYER].values()} == {f"0-{BY_LAYER + 39}"}
    assert {layers for layers, _ in shown[BY_TOKENS].values()} == {"0-3"}
    ends = sorted((int(a), int(b)) for a, b in (t.split("-") for _, t in shown[BY_TOKENS].values()))
    assert [start for start, _ in ends] == [0, *(end for _, end in ends[:-1])]
    assert ends[-1][1] == BY_TOKENS + 39
    await fabric.settle()
    assert await calls(fabric) > 0


async def test_what_all_nodes_together_cannot_hold_is_refused_at_once_and_small_requests_go_to_one_node(
    fabric: Fabric, oracle: Oracle
) -> None:
    before = await calls(fabric)
    status, got = await ask(fabric, prompt(81, 400), 20)
    assert (status, got["error"]["code"]) == (400, "context_length_exceeded"), got
    status, got = await ask(fabric, prompt(82, 40), 10)
    assert status == 200 and got["choices"][0]["text"] == oracle.text(prompt(82, 40), 10)
    await fabric.settle()
    assert await calls(fabric) == before


async def test_many_at_once_are_right_or_told_that_the_cluster_is_full(fabric: Fabric, oracle: Oracle) -> None:
    prompts = [prompt(90 + i, length) for i, length in enumerate((100, 60, 30, 20, 90, 45))]
    answers = await asyncio.gather(*(ask(fabric, one, 8) for one in prompts))
    for one, (status, got) in zip(prompts, answers, strict=True):
        if status == 200:
            assert got["choices"][0]["text"] == oracle.text(one, 8), len(one)
        else:
            assert (status, got["error"]["code"]) == (429, "overloaded"), got
    assert any(status == 200 for status, _ in answers)
    await fabric.settle()


GROUPS = (["decode-1", "decode-2"], ["decode-3", "decode-4"])
ONE_GROUP, BOTH_GROUPS = 100, 200
"""Prompts of 25 and 50 blocks: a group holds 30, by layer."""


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def grouped(oracle: Oracle) -> AsyncIterator[Fabric]:
    # Room is waited for also while a busy machine has a node silent for a while.
    sharding = ShardingSection(mode="hybrid", groups=list(GROUPS), room_wait_s=30.0)
    async with tiny_cluster(oracle.folder, prefill=0, decode=4, sharding=sharding) as fabric:
        yield fabric


@pytest.mark.parametrize("length", [ONE_GROUP, BOTH_GROUPS])
async def test_a_request_lives_in_one_group_or_its_tokens_are_cut_between_groups(
    grouped: Fabric, oracle: Oracle, length: int
) -> None:
    tokens = prompt(length, length)
    pieces = 2 if length == ONE_GROUP else 4
    shown = await shown_while(grouped, tokens, 16, pieces, oracle.text(tokens, 16))
    spans = {group: {shown[name][1] for name in group if name in shown} for group in map(tuple, GROUPS)}
    if length == ONE_GROUP:
        assert sorted(map(len, spans.values())) == [0, 1]
    else:
        assert all(len(span) == 1 for span in spans.values())
        assert set.union(*spans.values()) == {"0-108", "108-215"}
    await grouped.settle()


@pytest.mark.parametrize("way", ["drained", "stopped"])
async def test_a_stream_goes_on_in_the_other_group_when_a_holder_is_drained_or_stands_still(
    grouped: Fabric, oracle: Oracle, way: str
) -> None:
    tokens, count, chosen = prompt(7, ONE_GROUP - 80), 96, list[str]()

    async def on_text(text: str) -> None:
        if chosen or len(text) < 6:
            return
        chosen.append(await find_piece(grouped, coordinator=False))
        if way == "drained":
            await operate(grouped, chosen[0], "drain")
        else:
            os.kill(grouped.cluster.pid(chosen[0]), signal.SIGSTOP)

    seen = await asyncio.wait_for(stream(grouped, tokens, count, on_text), DEADLINE_S)
    assert chosen and not seen.error, (seen.error, grouped.last_lines())
    assert (seen.text, seen.finish) == (oracle.text(tokens, count), "length")
    if way == "drained":
        await grouped.settle()
        await operate(grouped, chosen[0], "resume")
    else:
        os.kill(grouped.cluster.pid(chosen[0]), signal.SIGCONT)
    names = {node.id for node in grouped.config.nodes}
    for name in sorted(names):
        await grouped.all_alive(name, names - {name})
    await grouped.settle()
    assert await held(grouped) == {}


async def operate(fabric: Fabric, name: str, what: str) -> None:
    headers = {"Authorization": f"Bearer {OPERATOR}"}
    async with fabric.session.post(f"{fabric.cluster.url(name)}/{what}", headers=headers, data=b"{}") as response:
        assert response.status == 200, await response.text()

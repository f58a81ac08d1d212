"""Real processes, a tiny model, and pools so small that no node holds the requests: answers are those of one process.

By layer where that fits, by tokens where layers are too coarse; both happen in this cluster by size alone.
"""

from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass

import aiohttp
import numpy as np
import pytest
import pytest_asyncio

from kv_core.dtypes import DType
from kv_services.config import BusSection, LimitsSection, ModelSection
from kv_services.engine.interface import SamplingParams
from kv_services.engine.llama import LlamaModel
from kv_services.engine.single import Generation, GenerationRequest, SingleProcess
from kv_services.engine.threads import set_blas_threads
from kv_services.engine.tokenizer import BpeTokenizer
from kv_services.engine.weights import open_weights
from kv_services.launch import LocalCluster, PortReservation, local_config
from tests.engine.helpers_engine import TinyLlama, arena
from tests.integration.helpers_integration import DEADLINE_S, Fabric, Json

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

    model: LlamaModel
    tokenizer: BpeTokenizer

    def generation(self, tokens: Sequence[int], count: int) -> Generation:
        single = SingleProcess(self.model, arena(self.model, 200, BLOCK, DType.FP32))
        params = SamplingParams(temperature=0.0, top_logprobs=0)
        (got,) = single.generate([GenerationRequest(tokens, count, params, NEVER)])
        return got

    def text(self, tokens: Sequence[int], count: int) -> str:
        return self.tokenizer.decode(self.generation(tokens, count).ids)


@pytest.fixture(scope="module")
def oracle(tmp_path_factory: pytest.TempPathFactory) -> Oracle:
    set_blas_threads(1)
    folder = tmp_path_factory.mktemp("sharded")
    path = TinyLlama(context=512).write(folder / "tiny.gguf")
    weights = open_weights(path, folder / "kv-fabric" / "weights")
    return Oracle(LlamaModel(weights), BpeTokenizer(weights.tokenizer_json, weights.text))


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def fabric(oracle: Oracle, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Fabric]:
    folder = next(path for path in tmp_path_factory.getbasetemp().iterdir() if path.name.startswith("sharded"))
    patch = pytest.MonkeyPatch()
    patch.setenv("XDG_CACHE_HOME", str(folder))  # what was unpacked for the oracle serves the processes too
    with PortReservation() as ports, patch.context():
        config = local_config(
            ports,
            prefill=1,
            decode=3,
            slots=SLOTS,
            monitor=False,
            limits=LimitsSection(request_timeout_s=60.0, max_prompt_tokens=500),
            bus=BusSection(heartbeat_interval_ms=100, suspect_after_ms=1_000, dead_after_ms=2_500),
            model=ModelSection(id="tiny", path=str(folder / "tiny.gguf"), kv_dtype="fp32", block_size=BLOCK),
        )
        cluster = LocalCluster(config)
        async with cluster, aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=DEADLINE_S)) as session:
            fabric = Fabric(cluster, session)
            names = {node.id for node in config.nodes}
            for name in sorted(names):
                await fabric.all_alive(name, names - {name})
            yield fabric
    patch.undo()
    assert cluster.leftovers == []


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
    assert choice["text"] == oracle.tokenizer.decode(want.ids)
    assert got["usage"]["completion_tokens"] == 12
    told = choice["logprobs"]["token_logprobs"]
    np.testing.assert_allclose(told, np.array([token.logprob for token in want.tokens], float), atol=1e-3)
    reports = await fabric.settle()
    assert all(report.slots is None or report.slots.pinned == 0 for report in reports)
    assert await held(fabric) == {}

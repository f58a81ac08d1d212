"""Opens an engine by what the cluster file says: which kind, which weights, how long a context."""

import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final, Literal

from kv_core.geometry import Attention, ModelGeometry
from kv_services.engine.byte_tokenizer import ByteTokenizer
from kv_services.engine.interface import Model, ModelInfo, Tokenizer
from kv_services.engine.llama import LlamaModel
from kv_services.engine.llama_shards import LlamaShards
from kv_services.engine.sharding import ShardEngine
from kv_services.engine.stub import StubCost, StubModel
from kv_services.engine.tokenizer import BpeTokenizer
from kv_services.engine.weights import open_weights

STUB_GEOMETRY: Final = ModelGeometry("stub", 4, 4, 2, 16, Attention.GQA, max_tokens=1 << 17)
"""Small enough that moving its KV costs more than making it."""


@dataclass(frozen=True, slots=True)
class EngineSpec:
    """Which engine to open.

    Attributes:
        kind: "llama" computes with weights; "stub" makes tokens by arithmetic.
        path: GGUF of a Llama; None for the packaged SmolLM2-135M-Instruct. The stub has none.
        max_context: positions to serve at most; 0 for all the model can take.
        cache_root: folder of unpacked weights; None for the user's cache folder.
        stub_cost: what the stub spends, in real time.
    """

    kind: Literal["llama", "stub"] = "llama"
    path: Path | None = None
    max_context: int = 0
    cache_root: Path | None = None
    stub_cost: StubCost | None = None


def open_model(spec: EngineSpec) -> Model:
    """The model. Takes seconds on first use of a weights file, so never call it on a loop.

    Raises:
        WeightsMissingError, WeightsFormatError, UnsupportedModelError, WeightsCacheError.
    """
    if spec.kind == "stub":
        limit = spec.max_context or STUB_GEOMETRY.max_tokens
        return StubModel(STUB_GEOMETRY, max_context=limit, cost=spec.stub_cost, delay=_sleep)
    return LlamaModel(open_weights(spec.path, spec.cache_root), spec.max_context)


def shard_engine(model: Model) -> ShardEngine | None:
    """What computes that model on pieces of a sequence; None for an engine that cannot."""
    return LlamaShards(model.layers) if isinstance(model, LlamaModel) else None


def open_text(spec: EngineSpec) -> tuple[ModelInfo, Tokenizer]:
    """What a gateway needs of a model: its figures and its tokeniser, without computing anything.

    Raises:
        As `open_model`, and ChatTemplateError for a template that does not compile.
    """
    if spec.kind == "stub":
        return open_model(spec).info, ByteTokenizer()
    weights = open_weights(spec.path, spec.cache_root)
    info = replace(
        weights.info, max_context=min(spec.max_context or weights.info.max_context, weights.info.max_context)
    )
    return info, BpeTokenizer(weights.tokenizer_json, weights.text)


def _sleep(nanoseconds: int) -> None:
    time.sleep(nanoseconds / 1e9)

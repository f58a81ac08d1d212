"""Sequences in pieces against one node: the same tokens, logits within 1e-3, the same bits where layers are whole."""

import itertools
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kv_core.dtypes import DType
from kv_core.ids import NodeId, RequestId
from kv_core.sharding import InvalidPlanError, Placement
from kv_services.engine.errors import ContextLengthError, EngineInputError, KVRangeError
from kv_services.engine.interface import FloatArray, NoHooks
from kv_services.engine.llama import LlamaModel
from kv_services.engine.llama_shards import LlamaShards
from kv_services.engine.shard_kv import ShardKV
from kv_services.engine.weights import open_weights
from kv_services.sharded.plan import SequenceSize, ShardMode, pass_end, plan_pieces, stages_of
from tests.engine.helpers_engine import arena, blas_rows_are_stable, greedy, scattered, step
from tests.engine.helpers_shards import InProcessShards

BLOCK = 4
PROMPT = [int(token) for token in np.random.default_rng(3).integers(4, 270, 70)]
COUNT = 12
NODES = [NodeId(name) for name in "abcd"]


def one_node(model: LlamaModel, tokens: Sequence[int], num_prompt: int, dtype: DType, block: int) -> list[FloatArray]:
    count = -(-len(tokens) // block)
    kv = arena(model, count, block, dtype)
    table = scattered(count, count)
    model.prefill(kv, tokens[: num_prompt - 1], 0, table, NoHooks())
    return [step(model, kv, tokens[at], at, table) for at in range(num_prompt - 1, len(tokens))]


def cut(mode: ShardMode, num_layers: int, tokens: int, slots: dict[NodeId, int]) -> tuple[Placement, ...]:
    groups = (NODES[:2], NODES[2:])
    return plan_pieces(RequestId("r"), mode, SequenceSize(num_layers, tokens, BLOCK), slots, groups)


@pytest.mark.parametrize("dtype", [DType.FP32, DType.BF16])
@pytest.mark.parametrize(
    ("mode", "slots"),
    [
        (ShardMode.LAYER, (14, 14, 14)),
        (ShardMode.LAYER, (14, 8)),
        (ShardMode.SEQUENCE, (12, 12)),
        (ShardMode.SEQUENCE, (6, 6, 6, 6)),
        (ShardMode.HYBRID, (14, 14, 3, 3)),
        (ShardMode.HYBRID, (8, 8, 8, 8)),
        (ShardMode.AUTO, (14, 8)),
        (ShardMode.AUTO, (6, 6, 6, 6)),
    ],
)
def test_a_sequence_that_no_node_holds_has_the_tokens_and_logits_of_one_node(
    tiny: LlamaModel, mode: ShardMode, slots: tuple[int, ...], dtype: DType
) -> None:
    kv = arena(tiny, 64, BLOCK, dtype)
    answer = greedy(tiny, kv, PROMPT, scattered(30), COUNT)
    tokens = [*PROMPT, *answer[:-1]]
    expected = one_node(tiny, tokens, len(PROMPT), dtype, BLOCK)
    size = SequenceSize(tiny.info.geometry.num_layers, len(tokens), BLOCK)
    pieces = cut(mode, size.num_layers, len(tokens), dict(zip(NODES, slots, strict=False)))
    assert max(slots) < size.num_blocks  # no node could hold it alone
    shards = InProcessShards(tiny, pieces, size, dtype)
    by_layer = all(len(stage.pieces) == 1 for stage in shards.stages)
    for want, got, token in zip(expected, shards.logits(tokens, len(PROMPT), 24), answer, strict=True):
        assert int(got.argmax()) == token
        if dtype is DType.FP32:
            assert np.abs(got - want).max() < 1e-3
        if by_layer and blas_rows_are_stable():
            assert np.array_equal(got, want)


@settings(max_examples=25)
@given(data=st.data(), num_prompt=st.integers(2, 60), tokens_max=st.integers(1, 60))
def test_any_cut_into_layers_and_tokens_gives_the_logits_of_one_node(
    tiny: LlamaModel, data: st.DataObject, num_prompt: int, tokens_max: int
) -> None:
    """Each span of tokens has a cut of the layers of its own, as no plan makes them."""
    layers, tokens = tiny.info.geometry.num_layers, PROMPT[: num_prompt + 3]
    size = SequenceSize(layers, len(tokens), BLOCK)
    blocks = data.draw(st.sets(st.integers(1, max(size.num_blocks - 1, 1)), max_size=3))
    spans = sorted({0, len(tokens), *(block * BLOCK for block in blocks if block * BLOCK < len(tokens))})
    pieces: list[Placement] = []
    for start, end in itertools.pairwise(spans):
        inner = data.draw(st.sets(st.integers(1, layers - 1)))
        for first, last in itertools.pairwise(sorted({0, layers, *inner})):
            pieces.append(Placement(first, last, start, end, NodeId(f"n{len(pieces)}")))
    shards = InProcessShards(tiny, pieces, size, DType.FP32)
    expected = one_node(tiny, tokens, num_prompt, DType.FP32, BLOCK)
    for want, got in zip(expected, shards.logits(tokens, num_prompt, tokens_max), strict=True):
        assert np.abs(got - want).max() < 1e-3


@pytest.mark.parametrize("tokens_max", [1, 7, 24, 480])
@pytest.mark.parametrize("mode", [ShardMode.LAYER, ShardMode.SEQUENCE])
def test_how_a_prefill_is_cut_into_passes_does_not_show(tiny: LlamaModel, mode: ShardMode, tokens_max: int) -> None:
    size = SequenceSize(tiny.info.geometry.num_layers, len(PROMPT), BLOCK)
    pieces = cut(mode, size.num_layers, len(PROMPT), {NODES[0]: 13, NODES[1]: 13})
    (got,) = InProcessShards(tiny, pieces, size, DType.FP32).logits(PROMPT, len(PROMPT), tokens_max)
    (want,) = one_node(tiny, PROMPT, len(PROMPT), DType.FP32, BLOCK)
    assert np.abs(got - want).max() < 1e-4


def test_a_pass_is_refused_before_a_byte_is_written(tiny: LlamaModel) -> None:
    engine = LlamaShards(tiny.layers)
    kv = arena(tiny, 8, BLOCK)
    before = [kv.kv(layer).tobytes() for layer in range(3)]
    whole, later = ShardKV(kv, range(0, 2), range(0, 16), [0, 1, 2]), ShardKV(kv, range(0, 3), range(8, 16), [4, 5])
    hidden = engine.embed([5, 6])
    with pytest.raises(EngineInputError, match="token"):
        engine.embed([10**6])
    with pytest.raises(EngineInputError):
        engine.run_layers(later, hidden, 8, decoding=False)
    with pytest.raises(EngineInputError):
        engine.run_layers(whole, hidden, 3, decoding=True)
    with pytest.raises(ContextLengthError):
        engine.run_layers(whole, hidden, 255, decoding=False)
    with pytest.raises(KVRangeError):
        engine.run_layers(whole, np.full_like(hidden, np.nan), 3, decoding=False)
    with pytest.raises(EngineInputError):
        engine.run_layers(whole, hidden, 15, decoding=False)
    assert [kv.kv(layer).tobytes() for layer in range(3)] == before


@pytest.mark.model
@pytest.mark.parametrize("mode", [ShardMode.LAYER, ShardMode.SEQUENCE])
def test_the_real_model_gives_its_tokens_from_pieces(mode: ShardMode) -> None:
    model = LlamaModel(open_weights())
    prompt = [int(token) for token in np.random.default_rng(1).integers(100, 40_000, 90)]
    layers = model.info.geometry.num_layers
    answer = greedy(model, arena(model, 64, BLOCK), prompt, scattered(30), 4)
    tokens = [*prompt, *answer[:-1]]
    expected = one_node(model, tokens, len(prompt), DType.FP32, BLOCK)
    pieces = cut(mode, layers, len(tokens), dict.fromkeys(NODES, 14))
    size = SequenceSize(layers, len(tokens), BLOCK)
    shards = InProcessShards(model, pieces, size, DType.FP32)
    for want, got, token in zip(expected, shards.logits(tokens, len(prompt), 48), answer, strict=True):
        assert int(got.argmax()) == token
        assert np.abs(got - want).max() < 1e-3


def test_passes_end_at_pieces_at_products_and_at_the_prompts_end() -> None:
    size = SequenceSize(3, 100, BLOCK)
    stages = stages_of(plan_pieces(RequestId("r"), ShardMode.SEQUENCE, size, {NODES[0]: 13, NODES[1]: 13}), size)
    ends, at = [], 0
    while at < 99:
        at = pass_end(stages, at, 99, 24)
        ends.append(at)
    assert ends == [24, 48, 52, 72, 96, 99]
    with pytest.raises(InvalidPlanError):
        stages_of([Placement(0, 3, 0, 52, NODES[0]), Placement(0, 3, 48, 100, NODES[1])], size)

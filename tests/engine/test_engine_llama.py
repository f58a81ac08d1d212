"""The reference engine on tiny Llamas: against an oracle that shares no code, and the interface's invariants."""

import itertools
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kv_core.block import BlockGeometry, Layout
from kv_core.dtypes import DType
from kv_core.errors import KVError
from kv_services.engine import limits
from kv_services.engine.errors import (
    ComputeCancelledError,
    ContextLengthError,
    EngineInputError,
    GeometryMismatchError,
    KVRangeError,
)
from kv_services.engine.interface import DecodeInput, NoHooks, Parked, StepFailed, Stepped
from kv_services.engine.llama import LlamaModel
from kv_services.engine.llama_math import row_products
from kv_services.engine.paged_kv import BufferPagedKV
from kv_services.engine.weights import open_weights
from tests.engine.helpers_engine import (
    Arrival,
    RecordingHooks,
    TinyLlama,
    arena,
    blas_rows_are_stable,
    greedy,
    last_logits,
    scattered,
    slow_logits,
    step,
)

PROMPT = [int(token) for token in np.random.default_rng(5).integers(4, 270, 41)]


@pytest.mark.parametrize(
    "made",
    [
        TinyLlama(),
        TinyLlama(kv_heads=4, tied=False),
        TinyLlama(kv_heads=1, rope_divisors=True, theta=500_000.0),
        TinyLlama(layers=1, heads=2, kv_heads=2, head_dim=16, half=True),
    ],
    ids=["gqa", "mha-untied", "mqa-stretched", "one-layer-fp16-weights"],
)
def test_logits_are_those_of_the_definition(made: TinyLlama, tmp_path: Path) -> None:
    path = made.write(tmp_path / "model.gguf")
    model = LlamaModel(open_weights(path, cache_root=tmp_path / "cache"))
    expected = slow_logits(path, PROMPT)
    kv, table = arena(model), scattered(16)
    for position, token in enumerate(PROMPT):  # token by token
        assert step(model, kv, token, position, table) == pytest.approx(expected[position], abs=2e-3, rel=1e-4)
    for length in (1, 2, 5, 40, 41):  # by prefill
        assert last_logits(model, arena(model), PROMPT[:length], table) == pytest.approx(
            expected[length - 1], abs=2e-3, rel=1e-4
        )


@settings(deadline=None, max_examples=40)
@given(
    length=st.integers(2, 60),
    cuts=st.lists(st.integers(1, 59), max_size=4),
    block_size=st.integers(1, 17),
    layout=st.sampled_from(Layout),
    seed=st.integers(0, 9),
)
def test_cuts_blocks_and_layout_do_not_change_the_logits(
    tiny: LlamaModel, length: int, cuts: list[int], block_size: int, layout: Layout, seed: int
) -> None:
    tokens = [int(token) for token in np.random.default_rng(seed).integers(0, 270, length)]
    contiguous = arena(tiny, num_slots=1, block_size=64)
    expected = last_logits(tiny, contiguous, tokens, [0])
    kv, table = arena(tiny, 64, block_size, layout=layout), scattered(-(-length // block_size), seed=seed)
    borders = sorted({0, *(cut for cut in cuts if cut < length - 1), length - 1})
    for start, stop in itertools.pairwise(borders):
        tiny.prefill(kv, tokens[start:stop], start, table, NoHooks())
    assert step(tiny, kv, tokens[-1], length - 1, table) == pytest.approx(expected, abs=1e-4)


@settings(deadline=None, max_examples=25)
@given(
    length=st.integers(2, 120),
    cuts=st.lists(st.integers(1, 119), max_size=5),
    block_size=st.sampled_from([1, 4, 7, 16]),
    seed=st.integers(0, 9),
)
def test_kv_and_logits_are_the_same_bits_however_the_prompt_was_cut(
    tiny: LlamaModel, length: int, cuts: list[int], block_size: int, seed: int
) -> None:
    if not blas_rows_are_stable():
        pytest.skip("this BLAS rounds a row by its place in the product")
    tokens = [int(token) for token in np.random.default_rng(seed).integers(0, 270, length)]
    whole = arena(tiny, num_slots=1, block_size=128, dtype=DType.BF16)
    expected = last_logits(tiny, whole, tokens, [0])
    kv, table = arena(tiny, 120, block_size, DType.BF16), scattered(-(-length // block_size), num_slots=120, seed=seed)
    borders = sorted({0, *(cut for cut in cuts if cut < length - 1), length - 1})
    for start, stop in itertools.pairwise(borders):
        tiny.prefill(kv, tokens[start:stop], start, table, NoHooks())
    assert np.array_equal(step(tiny, kv, tokens[-1], length - 1, table), expected)
    for layer in range(3):
        blocks = kv.kv(layer)[table].transpose(1, 2, 0, 3, 4).reshape(2, 2, -1, 8)
        assert np.array_equal(blocks[:, :, :length], whole.kv(layer)[0][:, :, :length])


def test_a_prompt_of_several_chunks_gives_the_logits_of_one_chunk(
    tiny: LlamaModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = last_logits(tiny, arena(tiny), PROMPT, scattered(11))
    monkeypatch.setattr(limits, "PREFILL_CHUNK_TOKENS", 8)
    monkeypatch.setattr(limits, "ATTENTION_TILE_ROWS", 3)
    monkeypatch.setattr(limits, "PRODUCT_ROWS", 5)
    assert last_logits(tiny, arena(tiny), PROMPT, scattered(11)) == pytest.approx(expected, abs=1e-4)
    monkeypatch.setattr(limits, "ATTENTION_SCORES_MAX", 1)  # one head at a time
    assert last_logits(tiny, arena(tiny), PROMPT, scattered(11)) == pytest.approx(expected, abs=1e-4)


def test_the_last_positions_of_the_context_are_computed(tiny: LlamaModel) -> None:
    tokens = [int(token) for token in np.random.default_rng(1).integers(4, 270, 256)]
    logits = last_logits(tiny, arena(tiny), tokens, scattered(64))
    assert np.isfinite(logits).all()
    kv, table = arena(tiny), scattered(64, seed=3)
    assert last_logits(tiny, kv, tokens[:250], table).shape == logits.shape
    tiny.prefill(kv, tokens[250:255], 250, table, NoHooks())
    assert step(tiny, kv, tokens[255], 255, table) == pytest.approx(logits, abs=1e-4)


@pytest.mark.parametrize("dtype", [DType.FP32, DType.FP16, DType.BF16])
@pytest.mark.parametrize("layout", list(Layout))
def test_kv_handed_over_as_bytes_goes_on_with_the_same_tokens(tiny: LlamaModel, dtype: DType, layout: Layout) -> None:
    ours, theirs = scattered(20, seed=1), scattered(20, seed=2)
    geometry = tiny.info.geometry.block_geometry(dtype, 4)
    source, target = bytearray(64 * geometry.block_nbytes), bytearray(b"\xff" * (64 * geometry.block_nbytes))
    sender = BufferPagedKV(source, geometry, layout, 64)
    tiny.prefill(sender, PROMPT[:-1], 0, ours, NoHooks())
    for block in range(10):
        for layer in range(geometry.num_layers):
            begin = geometry.offset(layout, 64, ours[block], layer)
            there = geometry.offset(Layout.BLOCK_FIRST, 64, theirs[block], layer)
            piece = source[begin : begin + geometry.slot_layer_nbytes]
            target[there : there + geometry.slot_layer_nbytes] = piece
    receiver = BufferPagedKV(target, geometry, Layout.BLOCK_FIRST, 64)
    there_tokens = greedy(tiny, receiver, PROMPT, theirs, 24, start=len(PROMPT) - 1)
    assert there_tokens == greedy(tiny, sender, PROMPT, ours, 24, start=len(PROMPT) - 1)


@pytest.mark.parametrize("dtype", [DType.FP16, DType.BF16])
def test_a_narrower_store_stays_close_to_fp32(tiny: LlamaModel, dtype: DType) -> None:
    exact = last_logits(tiny, arena(tiny), PROMPT, scattered(11))
    narrow = last_logits(tiny, arena(tiny, dtype=dtype), PROMPT, scattered(11))
    cosine = float(exact @ narrow / np.linalg.norm(exact) / np.linalg.norm(narrow))
    assert 0.999 < cosine < 1.0
    assert not np.array_equal(exact, narrow)  # it was stored narrow at all


@pytest.mark.parametrize("kept", [1, 3, 4, 7, 16, 21, 39])
def test_a_prefix_of_any_length_is_reused_in_a_copied_block(tiny: LlamaModel, kept: int) -> None:
    other = [*PROMPT[:kept], *reversed(PROMPT)]
    kv, table, mine = arena(tiny), scattered(11), list(range(40, 62))
    mine = [slot for slot in mine if slot not in table] + [s for s in range(40) if s not in table][:22]
    tiny.prefill(kv, PROMPT[:-1], 0, table, NoHooks())
    shared = kept // 4
    mine = [*table[:shared], *mine][: -(-(len(other) + 12) // 4)]
    if kept % 4:
        for layer in range(tiny.info.geometry.num_layers):
            kv.kv(layer)[mine[shared]] = kv.kv(layer)[table[shared]]
    expected = greedy(tiny, arena(tiny), other, scattered(30, seed=7), 12)
    assert greedy(tiny, kv, other, mine, 12, start=kept) == expected
    # The donor's KV was not written to.
    assert greedy(tiny, kv, PROMPT, table, 3, start=len(PROMPT) - 1) == greedy(
        tiny, arena(tiny), PROMPT, scattered(11), 3
    )


def test_a_batch_of_mixed_lengths_gives_each_its_own_tokens(tiny: LlamaModel) -> None:
    rng = np.random.default_rng(3)
    prompts = [[int(t) for t in rng.integers(4, 270, n)] for n in (1, 2, 3, 9, 16, 17, 31, 40)]
    expected = [greedy(tiny, arena(tiny), prompt, scattered(16), 10) for prompt in prompts]
    kv, free = arena(tiny, num_slots=128), list(range(127, -1, -1))
    tables = [[free.pop() for _ in range(-(-(len(prompt) + 10) // 4))] for prompt in prompts]
    for prompt, table in zip(prompts, tables, strict=True):
        if len(prompt) > 1:
            tiny.prefill(kv, prompt[:-1], 0, table, NoHooks())
    answers: list[list[int]] = [[] for _ in prompts]
    for _ in range(10):
        batch = [
            DecodeInput((prompt + answer)[-1], len(prompt) + len(answer) - 1, table)
            for prompt, answer, table in zip(prompts, answers, tables, strict=True)
        ]
        for answer, output in zip(answers, tiny.decode(kv, batch), strict=True):
            assert isinstance(output, Stepped)
            answer.append(int(output.logits.argmax()))
    assert answers == expected


def test_a_batch_gives_each_sequence_the_bits_it_has_alone(tiny: LlamaModel) -> None:
    kv = arena(tiny)
    tables = [[2 * index, 2 * index + 1] for index in range(12)]
    for index, table in enumerate(tables):
        tiny.prefill(kv, PROMPT[index : index + 6], 0, table, NoHooks())
    batch = [DecodeInput(PROMPT[9 + index], 6, table) for index, table in enumerate(tables)]
    together = tiny.decode(kv, batch)
    for table, item, output in zip(tables, batch, together, strict=True):
        assert isinstance(output, Stepped)
        assert np.array_equal(step(tiny, kv, item.token, 6, table), output.logits)


@pytest.mark.parametrize("inputs", [33, 576, 1536])
def test_rows_multiplied_in_pieces_have_the_bits_of_rows_alone(inputs: int) -> None:
    rng = np.random.default_rng(0)
    weight, rows = rng.standard_normal((1000, inputs), np.float32), rng.standard_normal((5, inputs), np.float32)
    together = row_products(rows, weight)
    assert together == pytest.approx(rows @ weight.T, abs=1e-3)
    for row, result in zip(rows, together, strict=True):
        assert np.array_equal(row_products(row[None], weight)[0], result)


def test_each_block_is_announced_once_per_layer_in_layer_order(
    tiny: LlamaModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "PREFILL_CHUNK_TOKENS", 9)  # two blocks of 4
    hooks = RecordingHooks()
    kv, table = arena(tiny), scattered(11)
    tiny.prefill(kv, PROMPT[:6], 0, table, hooks)
    assert hooks.calls == [("written", layer, 0, 2) for layer in range(3)]  # nothing was needed
    hooks = RecordingHooks()
    tiny.prefill(kv, PROMPT[6:27], 6, table, hooks)
    expected = []
    for layer in range(3):
        expected.append(("needed", layer, 0, 0))
        expected += [("written", layer, *blocks) for blocks in ((1, 2), (2, 4), (4, 6), (6, 7))]
    assert hooks.calls == expected


def test_announced_kv_is_in_the_arena_and_final(tiny: LlamaModel) -> None:
    kv, table = arena(tiny), scattered(10)
    seen: dict[int, bytes] = {}

    class Hooks(RecordingHooks):
        def layer_written(self, layer: int, first_block: int, end_block: int) -> None:
            seen[layer] = kv.kv(layer)[table[first_block:end_block]].tobytes()

    tiny.prefill(kv, PROMPT[:40], 0, table, Hooks())
    assert seen == {layer: kv.kv(layer)[table].tobytes() for layer in range(3)}


def test_a_call_writes_no_byte_but_its_own_tokens(tiny: LlamaModel) -> None:
    kv, table = arena(tiny), [5, 60, 2, 33]
    before = [kv.kv(layer).copy() for layer in range(3)]
    tiny.prefill(kv, PROMPT[:7], 0, table, NoHooks())
    tiny.prefill(kv, PROMPT[7:10], 7, table, NoHooks())
    tiny.decode(kv, [DecodeInput(9, 10, table)])
    for layer in range(3):
        changed = np.argwhere((kv.kv(layer) != before[layer]).any(axis=(1, 2, 4)))
        assert {(int(slot), int(token)) for slot, token in changed} == {
            (table[position // 4], position % 4) for position in range(11)
        }


def test_kv_is_read_only_after_its_layer_was_needed(tiny: LlamaModel) -> None:
    kv, table = arena(tiny), scattered(11)
    tiny.prefill(kv, PROMPT[:20], 0, table, NoHooks())
    there = [kv.kv(layer).copy() for layer in range(3)]
    expected = last_logits(tiny, kv, PROMPT, table, start=20)
    for layer in range(3):
        kv.kv(layer)[...] = np.nan

    class Hooks(RecordingHooks):
        def layer_needed(self, layer: int) -> None:
            kv.kv(layer)[...] = there[layer]

    tiny.prefill(kv, PROMPT[20:-1], 20, table, Hooks())
    assert np.array_equal(step(tiny, kv, PROMPT[-1], 40, table), expected)


def test_cancelling_stops_before_the_next_chunk(tiny: LlamaModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "PREFILL_CHUNK_TOKENS", 16)
    hooks = RecordingHooks(cancel_at=4)
    with pytest.raises(ComputeCancelledError) as caught:
        tiny.prefill(arena(tiny), PROMPT[:40], 0, scattered(10), hooks)
    assert caught.value.fields == {"layer": 1, "token": 16}
    assert hooks.calls == [("written", 0, 0, 4), ("written", 0, 4, 8), ("written", 0, 8, 10), ("written", 1, 0, 4)]


def test_an_error_of_a_hook_ends_the_prefill_and_reaches_the_caller(tiny: LlamaModel) -> None:
    class Hooks(RecordingHooks):
        def layer_needed(self, layer: int) -> None:
            super().layer_needed(layer)
            if layer == 1:
                raise KVError(detail="holder lost")

    kv, table, hooks = arena(tiny), scattered(11), Hooks()
    tiny.prefill(kv, PROMPT[:8], 0, table, NoHooks())
    with pytest.raises(KVError, match="holder lost"):
        tiny.prefill(kv, PROMPT[8:20], 8, table, hooks)
    assert hooks.calls == [("needed", 0, 0, 0), ("written", 0, 2, 5), ("needed", 1, 0, 0)]


@pytest.mark.parametrize("ready_at_each_step", [[0, 1, 2, 3], [1, 1, 3], [0, 0, 0, 3], [2, 3], [3]])
def test_a_parked_sequence_goes_on_where_it_stopped_and_delays_no_other(
    tiny: LlamaModel, ready_at_each_step: list[int]
) -> None:
    kv, late, other = arena(tiny), [0, 1, 2, 3], [4, 5, 6, 7]
    tiny.prefill(kv, PROMPT[:13], 0, late, NoHooks())
    there = [kv.kv(layer)[late].copy() for layer in range(3)]
    expected = step(tiny, kv, PROMPT[13], 13, late)
    for layer in range(3):
        kv.kv(layer)[late] = np.nan
    tiny.prefill(kv, PROMPT[1:8], 0, other, NoHooks())
    expected_other = greedy(tiny, arena(tiny), PROMPT[1:9], scattered(11), len(ready_at_each_step))
    arrival, arrived, parked, answer = Arrival(), 0, None, list[int]()
    for ready in ready_at_each_step:
        for layer in range(arrived, ready):
            kv.kv(layer)[late] = there[layer]
        arrival.ready, arrived, arrival.asked = ready, ready, []
        first, second = tiny.decode(
            kv,
            [
                DecodeInput(PROMPT[13], 13, late, arrival, parked),
                DecodeInput(([PROMPT[8], *answer])[-1], 7 + len(answer), other),
            ],
        )
        assert isinstance(second, Stepped)
        answer.append(int(second.logits.argmax()))
        if ready < 3:
            assert isinstance(first, Parked)
            assert first.layer == ready
            assert arrival.asked[-1] == ready  # asked no further once it parked
            parked = first
        else:
            assert isinstance(first, Stepped)
            assert first.logits == pytest.approx(expected, abs=1e-4)
    assert answer == expected_other


def test_parking_in_one_step_and_failing_leaves_the_batch_alone(tiny: LlamaModel) -> None:
    kv = arena(tiny)
    tiny.prefill(kv, PROMPT[:5], 0, [0, 1], NoHooks())
    tiny.prefill(kv, PROMPT[:5], 0, [2, 3], NoHooks())
    expected = step(tiny, kv, 9, 5, [0, 1])
    lost = KVError(detail="holder lost")
    good, bad = tiny.decode(kv, [DecodeInput(9, 5, [0, 1]), DecodeInput(9, 5, [2, 3], Arrival(1, lost))])
    assert bad == StepFailed(lost)
    assert isinstance(good, Stepped)
    assert np.array_equal(good.logits, expected)


def test_nothing_is_asked_of_an_arrival_at_position_zero(tiny: LlamaModel) -> None:
    arrival = Arrival(0)
    (output,) = tiny.decode(arena(tiny), [DecodeInput(9, 0, [3], arrival)])
    assert isinstance(output, Stepped)
    assert arrival.asked == []


def test_kv_that_fp16_cannot_hold_is_refused_and_fails_one_sequence_alone(tmp_path: Path) -> None:
    # Only token 7 has a first component, and the values of layer 0 are 30,000 times that.
    table = np.random.default_rng(2).standard_normal((271, 32)).astype(np.float32)
    table[:, 0], table[7] = 0, 0
    table[7, 0] = 1
    values = np.random.default_rng(3).standard_normal((16, 32)).astype(np.float32)
    values[:, 0] = 30_000
    change = {
        "token_embd.weight": table,
        "blk.0.attn_v.weight": values,
        "blk.0.attn_norm.weight": np.ones(32, dtype=np.float32),
    }
    model = LlamaModel(open_weights(TinyLlama(change=change).write(tmp_path / "big.gguf"), cache_root=tmp_path))
    kv = arena(model, dtype=DType.FP16)
    hooks = RecordingHooks()
    with pytest.raises(KVRangeError, match="layer 0 does not fit fp16"):
        model.prefill(kv, [8, 7, 8], 0, [0], hooks)
    assert hooks.calls == []
    model.prefill(arena(model, dtype=DType.BF16), [8, 7, 8], 0, [0], NoHooks())
    expected = step(model, kv, 8, 0, [1])
    one, two = model.decode(kv, [DecodeInput(7, 0, [0]), DecodeInput(8, 0, [1])])
    assert isinstance(one, StepFailed)
    assert isinstance(one.error, KVRangeError)
    assert isinstance(two, Stepped)
    assert np.array_equal(two.logits, expected)


def _decode(model: LlamaModel, batch: list[DecodeInput], kv: BufferPagedKV) -> object:
    return model.decode(kv, batch)


def _refused(model: LlamaModel, call: Callable[[BufferPagedKV], object], error: type[KVError]) -> None:
    kv = arena(model, num_slots=80)
    before = [kv.kv(layer).tobytes() for layer in range(3)]
    with pytest.raises(error):
        call(kv)
    assert [kv.kv(layer).tobytes() for layer in range(3)] == before


@pytest.mark.parametrize(
    ("tokens", "start", "table", "error"),
    [
        ([], 0, [0], EngineInputError),
        ([1], -1, [0], EngineInputError),
        ([1, 271], 0, [0], EngineInputError),
        ([1, -1], 0, [0], EngineInputError),
        ([1] * 5, 0, [0], EngineInputError),
        ([1] * 5, 0, [0, 80], EngineInputError),
        ([1] * 5, 0, [0, -1], EngineInputError),
        ([1] * 5, 0, [3, 3], EngineInputError),
        ([1] * 2, 255, list(range(65)), ContextLengthError),
    ],
)
def test_an_impossible_call_is_refused_before_anything_is_written(
    tiny: LlamaModel, tokens: list[int], start: int, table: list[int], error: type[KVError]
) -> None:
    _refused(tiny, lambda kv: tiny.prefill(kv, tokens, start, table, NoHooks()), error)
    fine = DecodeInput(5, 0, [79])
    if len(tokens) != 1 or start < 0:
        last = DecodeInput(tokens[-1] if tokens else 1, start + max(len(tokens), 0) - 1, table)
        _refused(tiny, lambda kv: tiny.decode(kv, [fine, last]), error)


def test_a_batch_whose_sequences_would_write_the_same_block_is_refused(tiny: LlamaModel) -> None:
    batch = [DecodeInput(5, 4, [0, 1]), DecodeInput(5, 5, [2, 1])]
    _refused(tiny, lambda kv: tiny.decode(kv, batch), EngineInputError)


def test_a_batch_over_the_limit_and_a_foreign_parked_state_are_refused(tiny: LlamaModel) -> None:
    many = [DecodeInput(5, 0, [0])] * (limits.BATCH_SEQUENCES_MAX + 1)
    _refused(tiny, lambda kv: tiny.decode(kv, many), EngineInputError)
    for parked in (Parked(3, np.zeros(32, np.float32)), Parked(1, np.zeros(2, np.float32))):
        item = DecodeInput(5, 0, [0], None, parked)
        _refused(tiny, partial(_decode, tiny, [item]), EngineInputError)


@pytest.mark.parametrize(("field", "value"), [("num_layers", 2), ("num_kv_heads", 1), ("head_dim", 4)])
def test_an_arena_of_another_shape_is_refused(tiny: LlamaModel, field: str, value: int) -> None:
    shape = {"num_layers": 3, "num_kv_heads": 2, "head_dim": 8} | {field: value}
    kv = BufferPagedKV.allocate(BlockGeometry(**shape, dtype=DType.FP32, block_size=4), 4)
    with pytest.raises(GeometryMismatchError, match=field):
        tiny.prefill(kv, [1, 2], 0, [0], NoHooks())
    with pytest.raises(GeometryMismatchError, match=field):
        tiny.decode(kv, [DecodeInput(1, 0, [0])])


def test_a_shorter_context_may_be_served_than_the_model_has(tiny_path: Path) -> None:
    model = LlamaModel(open_weights(tiny_path, cache_root=tiny_path.parent / "cache"), max_context=16)
    assert model.info.max_context == 16
    with pytest.raises(ContextLengthError):
        model.decode(arena(model), [DecodeInput(1, 16, scattered(5))])


def test_an_empty_batch_is_no_work(tiny: LlamaModel) -> None:
    assert tiny.decode(arena(tiny), []) == []

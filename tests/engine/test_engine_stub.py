"""The stub: its tokens depend on every byte it reads, and its control path is the real one."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kv_core.block import BlockGeometry, Layout
from kv_core.dtypes import DType
from kv_core.errors import KVError
from kv_core.geometry import Attention, ModelGeometry
from kv_services.engine.errors import (
    ComputeCancelledError,
    EngineInputError,
    KVContentError,
    UnsupportedStoreError,
)
from kv_services.engine.interface import DecodeInput, NoHooks, Parked, StepFailed, Stepped
from kv_services.engine.paged_kv import BufferPagedKV
from kv_services.engine.stub import StubCost, StubModel
from tests.engine.helpers_engine import Arrival, RecordingHooks, arena, greedy, scattered, step

GEOMETRY = ModelGeometry("stub", 3, 4, 2, 8, Attention.GQA)
PROMPT = list(b"the keeper of the lighthouse wrote that")


@pytest.fixture(scope="module")
def stub() -> StubModel:
    return StubModel(GEOMETRY)


def slow_states(tokens: list[int]) -> list[int]:
    """The recurrence as it is written down, one token after the other."""
    state, states = 0x243F6A8885A308D3, []
    for token in tokens:
        state = (state * 0xD1342543DE82EF95 + (token + 1) * 0x9E3779B97F4A7C15) % (1 << 64)
        states.append(state)
    return states


@settings(deadline=None)
@given(
    tokens=st.lists(st.integers(0, 255), min_size=2, max_size=60),
    cut=st.integers(1, 59),
    block_size=st.integers(1, 9),
    layout=st.sampled_from(Layout),
    dtype=st.sampled_from([DType.FP32, DType.FP16, DType.BF16]),
)
def test_tokens_follow_from_the_whole_prefix_however_it_was_computed(
    stub: StubModel, tokens: list[int], cut: int, block_size: int, layout: Layout, dtype: DType
) -> None:
    kv, table = arena(stub, 80, block_size, dtype, layout), scattered(80, num_slots=80)
    cut = min(cut, len(tokens) - 1)
    stub.prefill(kv, tokens[:cut], 0, table, NoHooks())
    answer = greedy(stub, kv, tokens, table, 3, start=cut)
    for index, token in enumerate(answer):
        assert token == stub.expected_token(tokens + answer[:index], kv.geometry)
    stub.verify(kv, tokens + answer[:-1], table)


def test_the_stored_states_are_those_of_the_recurrence(stub: StubModel) -> None:
    kv, table = arena(stub), scattered(10)
    stub.prefill(kv, PROMPT, 0, table, NoHooks())
    for layer in range(3):
        words = kv.kv(layer)[table][:, 0, 0].reshape(40, -1)[: len(PROMPT), :2].copy().view(np.uint64)[:, 0]
        masks = {int(word) ^ state for word, state in zip(words, slow_states(PROMPT), strict=True)}
        assert len(masks) == 1


def test_every_single_byte_of_kv_changes_the_token(stub: StubModel) -> None:
    geometry = GEOMETRY.block_geometry(DType.BF16, 4)
    memory = bytearray(3 * geometry.block_nbytes)
    kv, table, tokens = BufferPagedKV(memory, geometry, Layout.LAYER_FIRST, 3), [2, 0, 1], PROMPT[:12]
    stub.prefill(kv, tokens[:-1], 0, table, NoHooks())
    digest, stepped, wrong = stub.digest(kv, tokens[-1], 11, table), 0, 0
    assert digest == stub.expected_digest(tokens, geometry)
    own = {(1, layer, 3) for layer in range(3)}  # the place that the step itself writes
    for offset in range(len(memory)):
        layer, rest = divmod(offset, 3 * geometry.slot_layer_nbytes)
        slot, inside = divmod(rest, geometry.slot_layer_nbytes)
        if (slot, layer, inside // 16 % 4) in own:
            continue
        memory[offset] ^= 0x40
        assert stub.digest(kv, tokens[-1], 11, table) != digest
        if offset % 16 == 0:
            stepped += 1
            wrong += int(step(stub, kv, tokens[-1], 11, table).argmax()) != stub.expected_token(tokens, geometry)
        memory[offset] ^= 0x40
    # 95 tokens to choose from: a wrong digest may meet the right token now and then.
    assert wrong > 0.9 * stepped > 0


def test_exchanged_blocks_and_stale_ones_change_the_token(stub: StubModel) -> None:
    kv, table = arena(stub), scattered(12)
    stub.prefill(kv, PROMPT[:-1], 0, table, NoHooks())
    right = stub.digest(kv, PROMPT[-1], len(PROMPT) - 1, table)
    swapped = [table[1], table[0], *table[2:]]
    assert stub.digest(kv, PROMPT[-1], len(PROMPT) - 1, swapped) != right
    stale = [*table[:3], scattered(20)[-1], *table[4:]]
    assert stub.digest(kv, PROMPT[-1], len(PROMPT) - 1, stale) != right


def test_verify_names_the_first_wrong_layer_and_token(stub: StubModel) -> None:
    kv, table = arena(stub), scattered(12)
    stub.prefill(kv, PROMPT, 0, table, NoHooks())
    stub.verify(kv, PROMPT, table)
    kv.kv(1)[table[2], 1, 1, 3, 7] += 1
    with pytest.raises(KVContentError, match="layer 1, token 11"):
        stub.verify(kv, PROMPT, table)


def test_hooks_cancelling_parking_and_refusals_are_those_of_the_real_engine(stub: StubModel) -> None:
    kv, table, hooks = arena(stub), scattered(12), RecordingHooks()
    stub.prefill(kv, PROMPT[:6], 0, table, NoHooks())
    stub.prefill(kv, PROMPT[6:20], 6, table, hooks)
    assert hooks.calls == [call for layer in range(3) for call in (("needed", layer, 0, 0), ("written", layer, 1, 5))]
    with pytest.raises(ComputeCancelledError):
        stub.prefill(kv, PROMPT[:6], 0, table, RecordingHooks(cancel_at=1))
    with pytest.raises(EngineInputError):
        stub.prefill(kv, [999], 0, table, NoHooks())
    arrival, tokens = Arrival(2), PROMPT[:21]
    (parked,) = stub.decode(kv, [DecodeInput(tokens[20], 20, table, arrival)])
    assert isinstance(parked, Parked)
    assert parked.layer == 2
    arrival.ready = 3
    (done,) = stub.decode(kv, [DecodeInput(tokens[20], 20, table, arrival, parked)])
    assert isinstance(done, Stepped)
    assert int(done.logits.argmax()) == stub.expected_token(tokens, kv.geometry)
    lost = KVError(detail="lost")
    assert stub.decode(kv, [DecodeInput(tokens[20], 20, table, Arrival(1, lost))]) == [StepFailed(lost)]


def test_a_batch_gives_each_sequence_its_own_token(stub: StubModel) -> None:
    kv = arena(stub)
    prompts = [PROMPT[:5], PROMPT[3:20], PROMPT[9:10]]
    tables = [[0, 1], [2, 3, 4, 5, 6], [7]]
    for prompt, table in zip(prompts, tables, strict=True):
        if len(prompt) > 1:
            stub.prefill(kv, prompt[:-1], 0, table, NoHooks())
    batch = [DecodeInput(p[-1], len(p) - 1, t) for p, t in zip(prompts, tables, strict=True)]
    for prompt, output in zip(prompts, stub.decode(kv, batch), strict=True):
        assert isinstance(output, Stepped)
        assert int(output.logits.argmax()) == stub.expected_token(prompt, kv.geometry)


def test_cost_is_spent_per_layer_through_the_given_delay() -> None:
    spent: list[int] = []
    stub = StubModel(GEOMETRY, cost=StubCost(10, 1000, 100), delay=spent.append)
    kv = arena(stub)
    stub.prefill(kv, PROMPT[:7], 0, [0, 1], NoHooks())
    assert spent == [70] * 3
    spent.clear()
    stub.decode(kv, [DecodeInput(1, 0, [3]), DecodeInput(1, 0, [4])])
    assert spent == [1200] * 3


def test_rows_that_hold_no_whole_word_are_refused(stub: StubModel) -> None:
    narrow = StubModel(ModelGeometry("narrow", 3, 4, 2, 2, Attention.GQA))
    with pytest.raises(UnsupportedStoreError, match="8"):
        narrow.prefill(arena(narrow, dtype=DType.BF16), [1, 2], 0, [0], NoHooks())
    with pytest.raises(UnsupportedStoreError):
        stub.expected_token([1], BlockGeometry(3, 2, 2, DType.BF16, 4))

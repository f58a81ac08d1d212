"""The real model, SmolLM2-135M-Instruct: against transformers, over a hand-over, with prefixes reused.

`reference_logits.json` was written by `make_reference_logits.py`, which says how. Floats are compared within 2e-4:
another order of summation moves a logit by about 1e-4.
"""

import itertools
import json
from pathlib import Path

import msgspec
import numpy as np
import pytest

from kv_core.block import Layout
from kv_core.dtypes import DType
from kv_services.engine.interface import ChatMessage, DecodeInput, NoHooks, Parked, Stepped
from kv_services.engine.llama import LlamaModel
from kv_services.engine.paged_kv import BufferPagedKV
from kv_services.engine.single import GenerationRequest, SingleProcess
from kv_services.engine.tokenizer import BpeTokenizer
from kv_services.engine.weights import Weights, open_weights
from tests.engine.helpers_engine import Arrival, arena, blas_rows_are_stable, greedy, scattered, step

pytestmark = pytest.mark.model


class Case(msgspec.Struct):
    """What transformers gave for one prompt: some logits by position and token, and the most likely tokens."""

    tokens: list[int]
    logits: dict[int, dict[int, float]]
    argmax: list[int]
    greedy: list[int]


class Reference(msgspec.Struct):
    cases: dict[str, Case]
    tokenised: list[tuple[str, list[int]]]


REFERENCE = msgspec.convert(
    json.loads(Path(__file__).with_name("reference_logits.json").read_text()), Reference, strict=False
)


@pytest.fixture(scope="module")
def weights() -> Weights:
    return open_weights()


@pytest.fixture(scope="module")
def model(weights: Weights) -> LlamaModel:
    return LlamaModel(weights)


def test_the_figures_are_those_of_the_model_card(model: LlamaModel) -> None:
    info = model.info
    assert (info.vocab_size, info.max_context, info.eos_ids[0]) == (49152, 8192, 2)
    assert info.geometry.bytes_per_token(DType.BF16) == 23_040


@pytest.mark.parametrize("name", REFERENCE.cases)
def test_logits_are_those_of_transformers(model: LlamaModel, name: str) -> None:
    case, kv, table = REFERENCE.cases[name], arena(model, 40, 16), scattered(40, num_slots=40)
    done = 0
    for position, expected in sorted(case.logits.items()):
        if done < position:
            model.prefill(kv, case.tokens[done:position], done, table, NoHooks())
        logits = step(model, kv, case.tokens[position], position, table)
        done = position + 1
        assert {token: float(logits[token]) for token in expected} == pytest.approx(expected, abs=2e-4)
        assert int(logits.argmax()) == case.argmax[position]


@pytest.mark.parametrize("dtype", [DType.FP32, DType.BF16, DType.FP16])
def test_greedy_tokens_are_those_of_transformers_in_one_batch(model: LlamaModel, dtype: DType) -> None:
    cases = [REFERENCE.cases[name] for name in ("capital", "count", "chat", "unicode")]
    single = SingleProcess(model, arena(model, 40, 16, dtype))
    answers = single.generate([GenerationRequest(case.tokens, 12, stop_ids=frozenset()) for case in cases])
    assert [answer.ids for answer in answers] == [case.greedy[:12] for case in cases]


def test_kv_handed_over_as_bytes_goes_on_with_the_tokens_of_transformers(model: LlamaModel) -> None:
    case, geometry = REFERENCE.cases["long"], model.info.geometry.block_geometry(DType.BF16, 16)
    source = bytearray(40 * geometry.block_nbytes)
    sender, table = BufferPagedKV(source, geometry, Layout.LAYER_FIRST, 40), scattered(40, num_slots=40)
    model.prefill(sender, case.tokens[:-1], 0, table, NoHooks())
    target, theirs = bytearray(36 * geometry.block_nbytes), scattered(36, num_slots=36, seed=4)
    for block in range(-(-len(case.tokens) // 16)):
        for layer in range(geometry.num_layers):
            begin = geometry.offset(Layout.LAYER_FIRST, 40, table[block], layer)
            there = geometry.offset(Layout.BLOCK_FIRST, 36, theirs[block], layer)
            nbytes = geometry.slot_layer_nbytes
            target[there : there + nbytes] = source[begin : begin + nbytes]
    receiver = BufferPagedKV(target, geometry, Layout.BLOCK_FIRST, 36)
    start = len(case.tokens) - 1
    assert greedy(model, receiver, case.tokens, theirs, 12, start=start) == case.greedy[:12]


def test_a_prefix_of_odd_length_is_reused_with_the_tokens_of_transformers(model: LlamaModel) -> None:
    case = REFERENCE.cases["long"]
    single = SingleProcess(model, arena(model, 80, 16))
    single.generate([GenerationRequest([*case.tokens[:333], 7, 7], 1)])
    (answer,) = single.generate([GenerationRequest(case.tokens, 4, stop_ids=frozenset())])
    assert (answer.reused, answer.ids) == (333, case.greedy[:4])


def test_bf16_kv_is_the_same_bits_however_the_prompt_was_cut(model: LlamaModel) -> None:
    if not blas_rows_are_stable():
        pytest.skip("this BLAS rounds a row by its place in the product")
    tokens = REFERENCE.cases["long"].tokens[:111]
    stored = []
    for cuts in ((0, 111), (0, 37, 80, 81, 111)):
        kv = arena(model, 1, 128, DType.BF16)
        for start, stop in itertools.pairwise(cuts):
            model.prefill(kv, tokens[start:stop], start, [0], NoHooks())
        stored.append([kv.kv(layer)[0, :, :, :111].copy() for layer in range(30)])
    assert all(np.array_equal(one, other) for one, other in zip(*stored, strict=True))


def test_a_first_step_overlaps_its_transfer(model: LlamaModel) -> None:
    case, table = REFERENCE.cases["chat"], scattered(4, num_slots=8)
    kv, position = arena(model, 8, 16), len(case.tokens) - 1
    model.prefill(kv, case.tokens[:-1], 0, table, NoHooks())
    arrival = Arrival()
    parked: Parked | None = None
    for ready in (0, 7, 7, 22):
        arrival.ready = ready
        (output,) = model.decode(kv, [DecodeInput(case.tokens[-1], position, table, arrival, parked)])
        assert isinstance(output, Parked)
        assert output.layer == ready
        parked = output
    arrival.ready = 30
    (done,) = model.decode(kv, [DecodeInput(case.tokens[-1], position, table, arrival, parked)])
    assert isinstance(done, Stepped)
    assert int(done.logits.argmax()) == case.greedy[0]


def test_text_is_cut_into_the_tokens_of_transformers(weights: Weights) -> None:
    tokenizer = BpeTokenizer(weights.tokenizer_json, weights.text)
    for text, expected in REFERENCE.tokenised:
        assert tokenizer.encode(text) == expected, text
        assert tokenizer.decode(expected) == text.replace("<|im_start|>", "").replace("<|im_end|>", "").replace(
            "<|endoftext|>", ""
        )
    chat = [
        ChatMessage("system", "You answer in one short sentence."),
        ChatMessage("user", "What is a lighthouse for?"),
    ]
    assert tokenizer.encode_chat(chat) == REFERENCE.cases["chat"].tokens
    for number in "½", "²", "٣":  # each numeric character is a word of its own, as the vocabulary's cut rule says
        assert tokenizer.encode(f"a {number}{number}") == [
            *tokenizer.encode("a"),
            *tokenizer.encode(" "),
            *tokenizer.encode(number) * 2,
        ]

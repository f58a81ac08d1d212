"""Single-process generation: equal to the interface used by hand, reuse, sharing, room."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kv_core.geometry import Attention, ModelGeometry
from kv_services.engine.errors import ContextLengthError, EngineInputError, NoSlotsError
from kv_services.engine.interface import SamplingParams
from kv_services.engine.llama import LlamaModel
from kv_services.engine.single import GenerationRequest, SingleProcess
from kv_services.engine.stub import StubModel
from tests.engine.helpers_engine import arena, greedy, scattered

SYSTEM = [int(token) for token in np.random.default_rng(8).integers(4, 270, 30)]
NEVER = frozenset[int]()


def stub() -> StubModel:
    return StubModel(ModelGeometry("stub", 2, 2, 1, 4, Attention.MQA))


def expected(model: StubModel, prompt: list[int], count: int) -> list[int]:
    tokens, geometry = list(prompt), model.info.geometry.block_geometry(arena(model).geometry.dtype, 4)
    for _ in range(count):
        tokens.append(model.expected_token(tokens, geometry))
    return tokens[len(prompt) :]


def test_a_batch_gives_the_tokens_of_the_interface_used_by_hand(tiny: LlamaModel) -> None:
    prompts = [[*SYSTEM, token, token + 1] for token in (40, 50, 60)] + [[7]]
    single = SingleProcess(tiny, arena(tiny))
    answers = single.generate([GenerationRequest(prompt, 8, stop_ids=NEVER) for prompt in prompts])
    for prompt, answer in zip(prompts, answers, strict=True):
        assert answer.ids == greedy(tiny, arena(tiny), prompt, scattered(20), 8)
    assert [answer.reused for answer in answers] == [0, 30, 30, 0]


@settings(deadline=None, max_examples=60)
@given(
    rounds=st.lists(
        st.lists(st.tuples(st.integers(0, 3), st.integers(0, 20), st.integers(1, 9)), min_size=1, max_size=3),
        min_size=1,
        max_size=6,
    )
)
def test_whatever_is_reused_and_given_up_the_tokens_are_right_and_no_slot_is_lost(
    rounds: list[list[tuple[int, int, int]]],
) -> None:
    model, prefixes = stub(), [[1] * 20, [1] * 9 + [2] * 11, [3] * 20, [1, 2, 3] * 7]
    kv = arena(model, num_slots=25)
    single = SingleProcess(model, kv)
    for batch in rounds:
        requests = [GenerationRequest([*prefixes[which][:length], 9], count) for which, length, count in batch]
        for request, answer in zip(requests, single.generate(requests), strict=True):
            assert answer.ids == expected(model, list(request.prompt), request.max_tokens)
            assert answer.reused < len(request.prompt)
    single.forget()
    assert single.free_slots == 25


def test_answers_are_reused_too_and_a_shared_block_is_never_written() -> None:
    model = stub()
    single = SingleProcess(model, arena(model))
    (first,) = single.generate([GenerationRequest([5] * 6, 7)])
    follow_up = [*[5] * 6, *first.ids, 4]
    (second,) = single.generate([GenerationRequest(follow_up, 4)])
    assert second.reused == 12  # the last token of an answer has no KV
    assert second.ids == expected(model, follow_up, 4)
    (again,) = single.generate([GenerationRequest([*[5] * 6, *first.ids[:3]], 6)])
    assert again.reused == 8
    assert again.ids == expected(model, [*[5] * 6, *first.ids[:3]], 6)


def test_a_full_arena_gives_up_the_oldest_and_says_when_that_is_not_enough() -> None:
    model = stub()
    single = SingleProcess(model, arena(model, num_slots=6))
    single.generate([GenerationRequest([1] * 8, 1)])
    single.generate([GenerationRequest([2] * 8, 1)])
    (other,) = single.generate([GenerationRequest([3] * 12, 5)])  # 4 blocks: the first of two must go
    assert other.reused == 0
    (kept,) = single.generate([GenerationRequest([2] * 8, 1)])
    assert kept.reused == 7
    with pytest.raises(NoSlotsError, match="7 blocks are needed"):
        single.generate([GenerationRequest([2] * 8, 20)])
    (whole,) = single.generate([GenerationRequest([2] * 8, 17)])  # all 6: what it could reuse is in the way
    assert whole.ids == expected(model, [2] * 8, 17)
    single.forget()
    assert single.free_slots == 6


def test_a_batch_that_fails_holds_nothing() -> None:
    model = stub()
    single = SingleProcess(model, arena(model, num_slots=6))
    for bad in (
        GenerationRequest([], 1),
        GenerationRequest([1], 0),
        GenerationRequest([300], 1),
        GenerationRequest([1] * 30, 1),
    ):
        with pytest.raises((EngineInputError, NoSlotsError)):
            single.generate([GenerationRequest([1] * 8, 1), bad])
        single.forget()
        assert single.free_slots == 6
    short = StubModel(model.info.geometry, max_context=8)
    with pytest.raises(ContextLengthError):
        SingleProcess(short, arena(short)).generate([GenerationRequest([1] * 8, 2)])


def test_an_answer_ends_at_a_stop_token_which_is_part_of_it() -> None:
    model = stub()
    whole = expected(model, [7, 7], 6)
    stop = frozenset({whole[3]})
    (answer,) = SingleProcess(model, arena(model)).generate([GenerationRequest([7, 7], 6, stop_ids=stop)])
    assert answer.ids == whole[: whole.index(whole[3]) + 1]
    assert answer.stopped
    (all_of_it,) = SingleProcess(model, arena(model)).generate([GenerationRequest([7, 7], 6)])
    assert (all_of_it.ids, all_of_it.stopped) == (whole, False)


def test_sampled_answers_are_the_same_alone_and_in_a_batch(tiny: LlamaModel) -> None:
    requests = [
        GenerationRequest([*SYSTEM[:4], 30 + seed], 10, SamplingParams(1.2, 0.9, seed, 2), NEVER) for seed in range(3)
    ]
    together = SingleProcess(tiny, arena(tiny)).generate(requests)
    alone = [SingleProcess(tiny, arena(tiny)).generate([request])[0] for request in requests]
    assert [answer.ids for answer in together] == [answer.ids for answer in alone]
    assert all(len(token.top_logprobs) == 2 for answer in alone for token in answer.tokens)

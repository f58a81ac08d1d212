"""Sampling: determinism by (seed, position), the distribution against plain arithmetic, the top-p rule, refusals."""

import math
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kv_services.engine.errors import SamplingError
from kv_services.engine.interface import FloatArray, SamplingParams
from kv_services.engine.sampling import sample

GOLDEN = [(0, 0), (0, 1), (1, 0), (-1, 7), (1 << 62, 8191)]
GOLDEN_TOKENS = [756, 32923, 19894, 44994, 52149]


def some_logits(size: int = 500, seed: int = 0) -> FloatArray:
    return np.random.default_rng(seed).standard_normal(size, dtype=np.float32) * 3


def test_draws_are_those_of_every_other_process_and_numpy() -> None:
    # Fixed for ever: a request that moves to a node with another version must go on with the same draws.
    logits = np.zeros(1 << 16, dtype=np.float32)
    drawn = [sample(logits, SamplingParams(seed=seed), position).token for seed, position in GOLDEN]
    assert drawn == GOLDEN_TOKENS
    program = (
        "import numpy as np; from kv_services.engine.sampling import sample; "
        "from kv_services.engine.interface import SamplingParams; "
        f"print([sample(np.zeros(1 << 16, np.float32), SamplingParams(seed=s), p).token for s, p in {GOLDEN}])"
    )
    other = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert other.stdout.strip() == str(GOLDEN_TOKENS)


@settings(deadline=None)
@given(
    seed=st.integers(-(1 << 63), (1 << 63) - 1),
    position=st.integers(0, 1 << 20),
    temperature=st.floats(0.01, 5),
    top_p=st.floats(0.01, 1),
)
def test_a_draw_depends_on_seed_and_position_alone(seed: int, position: int, temperature: float, top_p: float) -> None:
    params = SamplingParams(temperature, top_p, seed, 5)
    first = sample(some_logits(), params, position)
    sample(some_logits(seed=2), params, position + 1)  # nothing is carried along
    assert sample(some_logits(), params, position) == first


def test_greedy_takes_the_largest_and_the_lowest_among_equals() -> None:
    logits = np.array([1, 5, 3, 5], dtype=np.float32)
    assert sample(logits, SamplingParams(temperature=0, seed=9), 3).token == 1


@pytest.mark.parametrize("top_p", [1.0, 0.8])
def test_frequencies_follow_the_probabilities(top_p: float) -> None:
    logits = np.array([2.0, 0.0, 1.0, -1.0, 1.5, -9.0], dtype=np.float32)
    weights = np.exp(logits.astype(np.float64) / 0.7)
    weights /= weights.sum()
    if top_p < 1:
        order = np.argsort(-weights)
        head = order[: int(np.searchsorted(np.cumsum(weights[order]), top_p)) + 1]
        kept = np.zeros(6)
        kept[head] = weights[head]
        weights = kept / kept.sum()
    draws = 8_000
    counts = np.bincount(
        [sample(logits, SamplingParams(0.7, top_p, 11), position).token for position in range(draws)], minlength=6
    )
    assert counts[weights == 0].sum() == 0
    assert np.abs(counts / draws - weights).max() < 5 * math.sqrt(0.25 / draws)


@settings(deadline=None)
@given(
    values=st.lists(st.integers(-8, 8), min_size=1, max_size=600),
    top_p=st.floats(0.001, 1),
    seed=st.integers(0, 100),
)
def test_top_p_keeps_the_shortest_head_of_the_ranking(values: list[int], top_p: float, seed: int) -> None:
    logits = np.array(values, dtype=np.float32)
    weights = np.exp(logits.astype(np.float64) - max(values))
    ranking = sorted(range(len(values)), key=lambda token: (-values[token], token))
    head, mass = [], 0.0
    for token in ranking:
        head.append(token)
        mass += float(weights[token])
        if mass >= top_p * float(weights.sum()) * (1 - 1e-12):
            break
    # One more is allowed where rounding decides.
    assert sample(logits, SamplingParams(1.0, top_p, seed), 0).token in ranking[: len(head) + 1]


def test_a_head_longer_than_the_first_ranking_is_ranked_in_full() -> None:
    flat = np.zeros(5000, dtype=np.float32)
    drawn = {sample(flat, SamplingParams(1.0, 0.5, 3), position).token for position in range(3000)}
    assert max(drawn) < 2501
    assert len(drawn) > 1200


def test_logprobs_are_those_of_the_raw_distribution() -> None:
    logits = some_logits()
    exact = logits.astype(np.float64) - math.log(np.exp(logits.astype(np.float64)).sum())
    chosen = sample(logits, SamplingParams(0.3, 0.5, 1, 4), 0)
    assert chosen.logprob == pytest.approx(exact[chosen.token], abs=1e-9)
    best = np.argsort(-logits)[:4].tolist()
    assert list(chosen.top_logprobs) == best
    assert list(chosen.top_logprobs.values()) == pytest.approx(exact[best].tolist(), abs=1e-9)
    none = sample(logits, SamplingParams(0.3, 0.5, 1, 0), 0)
    assert (none.token, none.logprob, none.top_logprobs) == (chosen.token, chosen.logprob, {})
    assert sample(logits, SamplingParams(0.3, 0.5, 1), 0).logprob is None


def test_equals_are_ranked_by_token() -> None:
    logits = np.random.default_rng(4).integers(0, 3, 3000).astype(np.float32)
    logits[np.arange(5) * 611 + 7] = 3
    ranking = sorted(range(3000), key=lambda token: (-float(logits[token]), token))
    assert list(sample(logits, SamplingParams(top_logprobs=20), 0).top_logprobs) == ranking[:20]


def test_extreme_temperatures_and_logits_do_not_overflow() -> None:
    logits = np.array([1e30, -1e30, 9e29, -np.inf], dtype=np.float32)
    for cold in (1e-30, 5e-324):
        assert sample(logits, SamplingParams(cold), 0).token == 0
        assert sample(logits, SamplingParams(cold, 0.5), 0).token == 0
    assert sample(logits, SamplingParams(1e300), 0).token in range(3)
    hot = [sample(logits, SamplingParams(1e300, 0.9), position).token for position in range(50)]
    assert set(hot) <= {0, 1, 2}


@pytest.mark.parametrize(
    ("params", "field"),
    [
        (SamplingParams(temperature=-0.1), "temperature"),
        (SamplingParams(temperature=math.nan), "temperature"),
        (SamplingParams(temperature=math.inf), "temperature"),
        (SamplingParams(top_p=0), "top_p"),
        (SamplingParams(top_p=1.01), "top_p"),
        (SamplingParams(top_p=math.nan), "top_p"),
        (SamplingParams(top_logprobs=-1), "top_logprobs"),
        (SamplingParams(top_logprobs=21), "top_logprobs"),
    ],
)
def test_parameters_out_of_range_are_named(params: SamplingParams, field: str) -> None:
    with pytest.raises(SamplingError, match=field):
        sample(some_logits(), params, 0)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_logits_that_are_no_numbers_are_refused(bad: float) -> None:
    logits = some_logits()
    logits[77] = bad
    for params in (SamplingParams(temperature=0), SamplingParams()):
        with pytest.raises(SamplingError, match="logit"):
            sample(logits, params, 0)
    with pytest.raises(SamplingError, match="logit"):
        sample(np.full(4, -np.inf, dtype=np.float32), SamplingParams(), 0)
    with pytest.raises(SamplingError, match="position"):
        sample(some_logits(), SamplingParams(), -1)

"""Attention in parts against attention by its definition, in fp64 and one query at a time."""

import itertools
import random

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from kv_services.engine.interface import FloatArray
from kv_services.engine.shard_math import Partials, attend_part, merge_parts, mixed

HEADS, KV_HEADS, DIM = 4, 2, 8


def plain(queries: FloatArray, keys_values: FloatArray, start: int) -> NDArray[np.float64]:
    """`(rows, heads * dim)`: softmax over the keys at or before each query, by the definition."""
    out = np.zeros((len(queries), HEADS, DIM))
    for row, query in enumerate(queries.astype(np.float64)):
        for head in range(HEADS):
            keys, values = keys_values[:, head // (HEADS // KV_HEADS), : start + row + 1].astype(np.float64)
            scores = keys @ query[head] / np.sqrt(DIM)
            weights = np.exp(scores - scores.max())
            out[row, head] = weights @ values / weights.sum()
    return out.reshape(len(queries), -1)


def draw(seed: int, rows: int, tokens: int, spread: float) -> tuple[FloatArray, FloatArray]:
    rng = np.random.default_rng(seed)
    queries = rng.standard_normal((rows, HEADS, DIM), dtype=np.float32)
    keys_values = rng.standard_normal((2, KV_HEADS, tokens, DIM), dtype=np.float32)
    # Every score of a query becomes large, and so does what lies between the scores of two keys.
    keys_values[0] *= np.float32(spread)
    return queries, keys_values


@given(
    seed=st.integers(0, 2**32 - 1),
    rows=st.integers(1, 60),
    before=st.integers(0, 90),
    cuts=st.lists(st.integers(0, 150), max_size=6),
    spread=st.sampled_from([1.0, 1e-6, 30.0, 1e4, 1e15]),
    order=st.randoms(use_true_random=False),
)
def test_parts_of_any_split_in_any_order_are_the_whole(
    seed: int, rows: int, before: int, cuts: list[int], spread: float, order: random.Random
) -> None:
    queries, keys_values = draw(seed, rows, before + rows, spread)
    total = before + rows
    borders = sorted({0, total, *(min(cut, total) for cut in cuts)})
    spans = [*itertools.pairwise(borders), (0, 0), (total, total)]
    order.shuffle(spans)
    parts = [attend_part(queries, before, keys_values[:, :, low:high], low) for low, high in spans]
    whole = mixed(merge_parts(parts))
    if spread <= 30:
        # A score is off by 1e-7 of its size, its exponential by that amount: larger scores have no oracle.
        np.testing.assert_allclose(whole, plain(queries, keys_values, before), atol=2e-5, rtol=1e-4)
    assert np.isfinite(whole).all()
    # Joined two by two, the other way round, it is the same.
    joined = parts[-1]
    for part in reversed(parts[:-1]):
        joined = merge_parts([part, joined])
    np.testing.assert_allclose(mixed(joined), whole, atol=1e-5, rtol=1e-4)
    assert np.array_equal(joined.maxima, merge_parts(parts).maxima)


@given(
    low=st.floats(-(2.0**127), 2.0**127, width=32),
    high=st.floats(-(2.0**127), 2.0**127, width=32),
    sums=st.floats(1, 1e6, width=32),
)
def test_maxima_of_any_size_join_without_overflow(low: float, high: float, sums: float) -> None:
    def part(maximum: float, value: float) -> Partials:
        shape = (1, HEADS)
        return Partials(
            np.full(shape, maximum, np.float32),
            np.full(shape, sums, np.float32),
            np.full((*shape, DIM), value * sums, np.float32),
        )

    merged = mixed(merge_parts([part(low, 2.0), part(high, 4.0)]))
    weight = np.exp(min(0.0, float(np.float32(high)) - float(np.float32(low))))
    other = np.exp(min(0.0, float(np.float32(low)) - float(np.float32(high))))
    np.testing.assert_allclose(merged, (2.0 * other + 4.0 * weight) / (weight + other), rtol=1e-3)


def test_a_part_without_keys_and_one_that_no_query_may_see_change_nothing() -> None:
    queries, keys_values = draw(7, 3, 20, 1.0)
    seen = attend_part(queries, 10, keys_values[:, :, :13], 0)
    later = attend_part(queries, 10, keys_values[:, :, 13:], 13)
    assert (later.maxima == -np.inf).all() and not later.sums.any() and not later.outputs.any()
    none = Partials.empty(3, HEADS, DIM)
    for parts in ([seen, later, none], [none, none, seen], [later, seen]):
        merged = merge_parts(parts)
        assert np.array_equal(merged.maxima, seen.maxima)
        assert np.array_equal(mixed(merged), mixed(seen))
    nothing = merge_parts([none, later])
    assert (nothing.maxima == -np.inf).all() and not nothing.sums.any()


def test_minus_infinity_beside_the_smallest_number_keeps_the_number() -> None:
    tiny = Partials(
        np.full((1, HEADS), -3e38, np.float32), np.ones((1, HEADS), np.float32), np.ones((1, HEADS, DIM), np.float32)
    )
    merged = merge_parts([Partials.empty(1, HEADS, DIM), tiny])
    assert (merged.maxima == np.float32(-3e38)).all()
    assert (mixed(merged) == 1).all()

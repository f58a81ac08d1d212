"""Eviction ahead of need: against the marks, and on a real pool."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kv_core.hashing import hash_tokens
from kv_core.ids import RegionId
from kv_prefix.block_pool import BlockPool
from kv_prefix.errors import InvalidRequestError, NoSpaceError
from kv_prefix.pool_types import PoolStats
from kv_prefix.watermarks import EVICT_BATCH, Watermarks
from tests.prefix.helpers_prefix import BLOCK_SIZE, NAMESPACES

NS = NAMESPACES[0]


def stats(total: int, free: int, cached: int) -> PoolStats:
    return PoolStats(total, free, cached, total - free - cached, 0, 0, 0, 0, 0, 0, 0)


def serve(pool: BlockPool, seed: int, num_blocks: int) -> None:
    tokens = [seed * 1000 + i for i in range(num_blocks * BLOCK_SIZE)]
    opened = pool.open("request", None, num_blocks)
    pool.commit(opened.table, NS.digest, 0, hash_tokens(NS, tokens), tokens)
    pool.release(opened.table)


def tick(pool: BlockPool, marks: Watermarks) -> int:
    return pool.evict(marks.step(pool.stats()))


def test_below_the_low_mark_room_is_made_up_to_the_high_one_and_not_before() -> None:
    pool, marks = BlockPool(100, BLOCK_SIZE, region=RegionId(0)), Watermarks(0.1, 0.3)
    serve(pool, 1, 85)
    assert tick(pool, marks) == 0, "15 are free: not below the low mark"
    serve(pool, 2, 6)
    assert tick(pool, marks) == 21 and pool.stats().free == 30
    evicted = pool.stats().evicted
    serve(pool, 3, 20)
    assert pool.stats().evicted == evicted, "the request found its slots free"
    assert tick(pool, marks) == 0, "10 are free: the room is used before more is made"


def test_with_everything_pinned_nothing_is_asked_for_and_a_hand_out_fails_at_once() -> None:
    pool, marks = BlockPool(10, BLOCK_SIZE, region=RegionId(0)), Watermarks(0.5, 0.8)
    held = pool.open("request", None, 10)
    assert [tick(pool, marks) for _ in range(100)] == [0] * 100
    with pytest.raises(NoSpaceError):
        pool.open("other", None, 1)
    pool.release(held.table)
    serve(pool, 1, 10)
    assert tick(pool, marks) == 8
    pool.open("other", None, 8)


def test_what_is_on_its_way_down_is_waited_for() -> None:
    marks = Watermarks(0.5, 0.8)
    assert marks.step(stats(10, 0, 10), num_waiting=1) == 0
    assert marks.step(stats(10, 0, 10)) == 8


def test_without_marks_nothing_is_evicted_ahead() -> None:
    assert Watermarks().step(stats(10, 0, 10)) == 0


@given(
    st.floats(0.01, 1),
    st.floats(0.01, 1),
    st.lists(st.tuples(st.integers(0, 2000), st.integers(0, 2000)), max_size=20),
)
def test_it_asks_for_what_can_be_had_and_stops_at_the_high_mark(
    one: float, other: float, steps: list[tuple[int, int]]
) -> None:
    low, high = min(one, other), max(one, other)
    marks, filling = Watermarks(low, high), False
    for free, cached in steps:
        total = 2000
        free, cached = min(free, total), min(cached, total - min(free, total))
        filling = filling or free < low * total
        asked = marks.step(stats(total, free, cached))
        assert 0 <= asked <= min(cached, EVICT_BATCH)
        assert (asked > 0) == (filling and cached > 0 and free < high * total)
        assert not asked or free + asked < high * total + 1
        filling = filling and free + asked < high * total


@pytest.mark.parametrize(("low", "high"), [(0.5, 0.4), (-0.1, 0.5), (0.5, 1.5), (0.0, 0.5)])
def test_marks_that_cannot_be_are_refused(low: float, high: float) -> None:
    with pytest.raises(InvalidRequestError):
        Watermarks(low, high)

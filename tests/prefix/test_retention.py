"""Retained blocks against a plain sort; and through the pool."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kv_core.ids import RegionId
from kv_prefix.block_pool import BlockPool
from kv_prefix.errors import InvalidRequestError
from kv_prefix.eviction import make_eviction_policy
from kv_prefix.pool_types import PoolMatch
from kv_prefix.retention import RetentionPolicy
from tests.prefix.helpers_prefix import BLOCK_SIZE, NAMESPACES, hashes

STEPS = st.lists(
    st.tuples(st.sampled_from("uuuoorrrwextv"), st.integers(0, 4), st.integers(0, 2), st.integers(1, 40)),
    min_size=10,
    max_size=50,
)


@given(STEPS)
def test_victims_are_those_of_a_plain_sort(steps: list[tuple[str, int, int, int]]) -> None:
    """Use, offer, retain, withdraw, erase; let time pass; take a victim."""
    policy = RetentionPolicy(make_eviction_policy("lru", 5), 5)
    used: dict[int, int] = {}
    kept: dict[int, tuple[int, int, int]] = {}
    offered: set[int] = set()
    for now, (step, slot, priority, time) in enumerate([*steps, *[("v", 0, 0, 0)] * 6]):
        if step == "t":
            assert policy.expire(time) == len([one for one in kept.values() if one[1] <= time])
            kept = {one: said for one, said in kept.items() if said[1] > time}
        elif step == "v":
            plain = sorted(offered - set(kept), key=lambda one: used[one])
            expected = [*plain, *sorted(offered & set(kept), key=lambda one: (kept[one][0], kept[one][2]))]
            victim = policy.victim()
            assert victim == (expected[0] if expected else None)
            if victim is not None:
                policy.remove(victim, evicted=True)
                offered.discard(victim)
                kept.pop(victim, None)
                del used[victim]
        elif slot not in used:
            policy.insert(slot, slot)
            used[slot] = now
        elif step == "u":
            policy.touch(slot)
            used[slot] = now
            if slot in kept:
                kept[slot] = (*kept[slot][:2], now)
        elif step == "o":
            policy.offer(slot)
            offered.add(slot)
        elif step == "r":
            policy.retain(slot, priority, time)
            kept[slot] = (priority, time, now)
        elif step == "w":
            policy.withdraw(slot)
            offered.discard(slot)
        else:
            policy.remove(slot, evicted=False)
            offered.discard(slot)
            kept.pop(slot, None)
            del used[slot]
        assert policy.num_retained == len(kept)


def test_of_slots_kept_alike_the_least_recently_used_goes_first() -> None:
    policy = RetentionPolicy(make_eviction_policy("lru", 4), 4)
    policy.insert_all([0, 1, 2, 3], ["a", "b", "c", "d"])
    for slot in (0, 1, 2):
        policy.retain(slot, 5, 10)
        policy.offer(slot)
    policy.touch_all([1, 3, 0])
    assert [policy.victim() for _ in range(4)] == [2, 1, 0, None]


def store(pool: BlockPool, tokens: list[int]) -> PoolMatch:
    names = hashes(NAMESPACES[0], tokens)
    opened = pool.open("r", None, len(names))
    pool.commit(opened.table, NAMESPACES[0].digest, 0, names, tokens)
    pool.release(opened.table)
    return pool.match(NAMESPACES[0].digest, names, [*tokens, 0])


def held(pool: BlockPool, tokens: list[int]) -> int:
    return len(pool.match(NAMESPACES[0].digest, hashes(NAMESPACES[0], tokens), [*tokens, 0]).refs)


def test_a_retained_prefix_outlives_younger_ones_until_its_time() -> None:
    pool = BlockPool(6, BLOCK_SIZE, region=RegionId(0))
    keep, other = list(range(6)), list(range(100, 106))
    pool.retain(store(pool, keep), priority=50, until_ns=1_000)
    store(pool, other)
    store(pool, list(range(200, 212)))
    assert (held(pool, keep), held(pool, other)) == (2, 0)
    pool.expire(1_000)
    store(pool, list(range(300, 312)))
    assert held(pool, keep) == 0
    pool.check()


def test_retention_never_stands_in_a_requests_way() -> None:
    pool = BlockPool(4, BLOCK_SIZE, region=RegionId(0))
    pool.retain(store(pool, list(range(12))), priority=100, until_ns=1_000)
    opened = pool.open("r", None, 4)
    assert len(opened.refs) == 4
    assert held(pool, list(range(12))) == 0
    pool.check()


def test_the_lower_priority_goes_first() -> None:
    pool = BlockPool(4, BLOCK_SIZE, region=RegionId(0))
    high, low = list(range(6)), list(range(100, 106))
    pool.retain(store(pool, high), priority=2, until_ns=1_000)
    pool.retain(store(pool, low), priority=1, until_ns=1_000)
    pool.open("r", None, 2)
    assert (held(pool, high), held(pool, low)) == (2, 0)


@pytest.mark.parametrize(("priority", "until_ns"), [(-1, 5), (101, 5), (1, 0), (1, 1 << 63)])
def test_what_cannot_be_kept_is_refused_and_changes_nothing(priority: int, until_ns: int) -> None:
    pool = BlockPool(4, BLOCK_SIZE, region=RegionId(0))
    match = store(pool, list(range(6)))
    with pytest.raises(InvalidRequestError):
        pool.retain(match, priority=priority, until_ns=until_ns)
    pool.check()
    assert pool.stats().retained == 0

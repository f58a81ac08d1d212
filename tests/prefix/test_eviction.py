"""Each policy against a plain twin that sorts; and the default against LRU."""

import random
from collections.abc import Hashable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kv_prefix.errors import UnknownPolicyError
from kv_prefix.eviction import POLICIES, EvictionPolicy, make_eviction_policy

CAPACITY = 6
STEPS = st.lists(st.tuples(st.sampled_from("useoow"), st.integers(0, 11)), max_size=80)


class Sorting:
    """LRU, FIFO and LFU by sorting everything at each eviction."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self.history: dict[int, list[int]] = {}
        self.offered: set[int] = set()

    def victim(self) -> int | None:
        def rank(slot: int) -> tuple[int, ...]:
            uses = self.history[slot]
            return {"lru": (uses[-1],), "fifo": (uses[0],), "lfu": (len(uses), uses[-1])}[self.kind]

        return min(self.offered, key=rank, default=None)


@given(STEPS)
@pytest.mark.parametrize("kind", ["lru", "fifo", "lfu"])
def test_victims_are_those_of_a_plain_sort(kind: str, steps: list[tuple[str, int]]) -> None:
    policy, twin = make_eviction_policy(kind, CAPACITY), Sorting(kind)
    where: dict[int, int] = {}
    for now, (step, name) in enumerate(steps):
        if step in "us":
            if name in where:
                policy.touch(where[name])
                twin.history[where[name]].append(now)
                continue
            if len(where) == CAPACITY:
                expected = twin.victim()
                assert policy.victim() == expected
                if expected is None:
                    continue
                evict(policy, twin, where, expected)
            slot = min(set(range(CAPACITY)) - set(where.values()))
            where[name] = slot
            policy.insert(slot, name)
            twin.history[slot] = [now]
        elif name in where and step == "o":
            policy.offer(where[name])
            twin.offered.add(where[name])
        elif name in where and step == "w":
            policy.withdraw(where[name])
            twin.offered.discard(where[name])
        elif name in where and step == "e":
            slot = where.pop(name)
            policy.remove(slot, evicted=False)
            twin.offered.discard(slot)


def evict(policy: EvictionPolicy, twin: Sorting, where: dict[int, int], slot: int) -> None:
    policy.remove(slot, evicted=True)
    twin.offered.discard(slot)
    for name in [name for name, held in where.items() if held == slot]:
        del where[name]


@given(STEPS)
@pytest.mark.parametrize("kind", POLICIES)
def test_only_offered_slots_are_victims_and_all_of_them_come_out(kind: str, steps: list[tuple[str, int]]) -> None:
    policy = make_eviction_policy(kind, 12)
    stored: set[int] = set()
    offered: set[int] = set()
    for step, slot in steps:
        if slot not in stored:
            policy.insert(slot, slot)
            stored.add(slot)
        elif step == "o":
            policy.offer(slot)
            offered.add(slot)
        elif step == "w":
            policy.withdraw(slot)
            offered.discard(slot)
        elif step == "e" and slot in offered:
            victim = policy.victim()
            assert victim in offered
            policy.remove(victim, evicted=True)
            offered.discard(victim)
            stored.discard(victim)
        else:
            policy.touch(slot)
    seen = set()
    while (victim := policy.victim()) is not None:
        policy.remove(victim, evicted=True)
        seen.add(victim)
    assert seen == offered


def hit_rate(kind: str, capacity: int, accesses: list[int]) -> float:
    """Names accessed one by one in a cache of that policy; everything may be evicted at any time."""
    policy = make_eviction_policy(kind, capacity)
    where: dict[Hashable, int] = {}
    names: dict[int, int] = {}
    hits = 0
    for name in accesses:
        slot = where.get(name)
        if slot is not None:
            hits += 1
            policy.touch(slot)
            policy.offer(slot)
            continue
        if len(where) < capacity:
            slot = len(where)
        else:
            victim = policy.victim()
            assert victim is not None
            policy.remove(victim, evicted=True)
            slot = victim
            del where[names[slot]]
        where[name], names[slot] = slot, name
        policy.insert(slot, name)
        policy.offer(slot)
    return hits / len(accesses)


def test_s3fifo_keeps_the_popular_through_a_scan_and_fifo_does_not() -> None:
    popular = list(range(20)) * 3
    accesses = [*popular, *range(1000, 1150), *popular]
    assert hit_rate("s3fifo", 100, accesses) > hit_rate("fifo", 100, accesses)


def test_s3fifo_puts_a_name_that_returns_straight_into_the_main_queue() -> None:
    returning = [n for i in range(50) for n in (*range(10), *range(1000 + 40 * i, 1040 + 40 * i))]
    assert hit_rate("s3fifo", 30, returning) > hit_rate("lru", 30, returning) == 0


@settings(max_examples=10)
@given(st.integers(0, 1_000))
def test_the_default_beats_lru_where_some_names_are_popular(seed: int) -> None:
    draw = random.Random(seed)
    accesses = [min(int(draw.paretovariate(0.8)), 5_000) for _ in range(6_000)]
    assert hit_rate("adaptive", 200, accesses) > hit_rate("lru", 200, accesses) - 0.002


def test_an_unknown_policy_is_refused_with_the_known_ones() -> None:
    with pytest.raises(UnknownPolicyError, match="adaptive, lru, fifo, lfu, s3fifo"):
        make_eviction_policy("arc", 1)

"""Each policy against a plain twin that sorts; and the default against LRU."""

import random
from collections.abc import Hashable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kv_prefix.adaptive_eviction import AdaptivePolicy
from kv_prefix.errors import UnknownPolicyError
from kv_prefix.eviction import POLICIES, make_eviction_policy

STEPS = st.lists(st.tuples(st.sampled_from("uuuuooowev"), st.integers(0, 5)), min_size=25, max_size=60)
"""Use, offer, withdraw or erase the content of a slot; or take a victim."""


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
    policy, twin = make_eviction_policy(kind, 6), Sorting(kind)
    for now, (step, slot) in enumerate([*steps, *[("v", 0)] * 7]):
        if step == "v":
            expected = twin.victim()
            assert policy.victim() == expected
            if expected is not None:
                policy.remove(expected, evicted=True)
                twin.offered.discard(expected)
                del twin.history[expected]
        elif slot not in twin.history:
            policy.insert(slot, slot)
            twin.history[slot] = [now]
        elif step == "u":
            policy.touch(slot)
            twin.history[slot].append(now)
        elif step == "o":
            policy.offer(slot)
            twin.offered.add(slot)
        elif step == "w":
            policy.withdraw(slot)
            twin.offered.discard(slot)
        else:
            policy.remove(slot, evicted=False)
            twin.offered.discard(slot)
            del twin.history[slot]


@given(STEPS)
@pytest.mark.parametrize("kind", POLICIES)
def test_only_offered_slots_are_victims_and_all_of_them_come_out(kind: str, steps: list[tuple[str, int]]) -> None:
    policy = make_eviction_policy(kind, 6)
    stored, offered = set[int](), set[int]()
    for step, slot in [*steps, *[("v", 0)] * 7]:
        if step == "v":
            victim = policy.victim()
            assert victim in offered if offered else victim is None
            if victim is not None:
                policy.remove(victim, evicted=True)
                offered.discard(victim)
                stored.discard(victim)
        elif slot not in stored:
            policy.insert(slot, slot)
            stored.add(slot)
        elif step == "u":
            policy.touch(slot)
        elif step == "o":
            policy.offer(slot)
            offered.add(slot)
        elif step == "w":
            policy.withdraw(slot)
            offered.discard(slot)
        else:
            policy.remove(slot, evicted=False)
            offered.discard(slot)
            stored.discard(slot)
    assert not offered


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
        policy.insert(slot, b"%d" % name)
        policy.offer(slot)
    return hits / len(accesses)


def test_s3fifo_keeps_the_popular_through_a_scan_and_fifo_does_not() -> None:
    popular = list(range(20)) * 3
    accesses = [*popular, *range(1000, 1150), *popular]
    assert hit_rate("s3fifo", 100, accesses) > hit_rate("fifo", 100, accesses)


def test_s3fifo_puts_a_name_that_returns_straight_into_the_main_queue() -> None:
    returning = [n for i in range(50) for n in (*range(10), *range(1000 + 40 * i, 1040 + 40 * i))]
    assert hit_rate("s3fifo", 30, returning) > hit_rate("lru", 30, returning) == 0


@pytest.mark.parametrize("seed", range(5))
def test_the_default_beats_lru_where_some_names_are_popular(seed: int) -> None:
    draw = random.Random(seed)
    accesses = [int(20_000 ** draw.random()) for _ in range(12_000)]
    assert hit_rate("adaptive", 200, accesses) > hit_rate("lru", 200, accesses) + 0.01


@pytest.mark.parametrize("seed", range(5))
def test_the_default_is_not_worse_than_lru_where_popularity_moves(seed: int) -> None:
    draw = random.Random(seed)
    accesses = [i // 20 + int(draw.expovariate(0.01)) for i in range(6_000)]
    assert hit_rate("adaptive", 200, accesses) > hit_rate("lru", 200, accesses) - 0.002


@pytest.mark.parametrize("seed", range(5))
def test_the_default_chooses_as_if_its_miniatures_had_heard_of_each_access_at_once(seed: int) -> None:
    # One policy has its boost asked for after each access, for which everything must have been heard.
    policies = [AdaptivePolicy(200), AdaptivePolicy(200)]
    draw = random.Random(seed)
    where: dict[int, int] = {}
    names: dict[int, int] = {}
    boosts = set()
    for _ in range(400):
        prompt = {int(20_000 ** draw.random()) for _ in range(draw.randrange(1, 90))}
        for name in prompt:
            if (slot := where.get(name)) is None and len(where) == 200:
                slot, twin = (policy.victim() for policy in policies)
                assert slot == twin
                if slot is None:
                    continue
                for policy in policies:
                    policy.remove(slot, evicted=True)
                del where[names[slot]]
            slot = len(where) if slot is None else slot
            for policy in policies:
                if where.get(name) == slot:
                    policy.withdraw(slot)
                    policy.touch(slot)
                else:
                    policy.insert(slot, b"%d" % name)
            where[name], names[slot] = slot, name
            boosts.add(policies[1].boost)
        for name in sorted(prompt & where.keys()):
            for policy in policies:
                policy.offer(where[name])
        assert policies[0].boost == policies[1].boost
    assert len(boosts) > 1


def test_an_unknown_policy_is_refused_with_the_known_ones() -> None:
    with pytest.raises(UnknownPolicyError, match="adaptive, lru, fifo, lfu, s3fifo"):
        make_eviction_policy("arc", 1)

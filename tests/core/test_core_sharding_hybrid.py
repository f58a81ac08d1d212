"""Hybrid sharding: balance between groups of unequal requests, with no more moved than brute force needs."""

import itertools
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kv_core import sharding_hybrid
from kv_core.ids import NodeId, RequestId
from kv_core.sharding import InvalidPlanError
from kv_core.sharding_hybrid import HybridPlan, smallest_subset


def group(name: str, size: int) -> list[NodeId]:
    return [NodeId(f"{name}{i}") for i in range(size)]


def groups_of(sizes: dict[str, int]) -> dict[str, list[NodeId]]:
    return {name: group(name, size) for name, size in sizes.items()}


def within_bounds(load: dict[str, int], sizes: dict[str, int], requests: list[int]) -> bool:
    """The promise, from its words: below the share by weight plus the largest request."""
    total, whole = sum(requests), sum(sizes.values())
    return all(
        held < Fraction(total * sizes[name], whole) + max(requests, default=0) or held == 0
        for name, held in load.items()
    )


group_sizes = st.dictionaries(st.sampled_from("wxyz"), st.integers(1, 3), min_size=1, max_size=3)


@given(group_sizes, group_sizes, st.lists(st.integers(1, 9), max_size=6))
def test_rebalance_keeps_the_promise_and_moves_as_little_as_brute_force(
    old: dict[str, int], new: dict[str, int], lengths: list[int]
) -> None:
    plan = HybridPlan(4, 1, groups_of(old))
    ids = [RequestId(f"r{i}") for i in range(len(lengths))]
    before = [plan.place(request, length) for request, length in zip(ids, lengths, strict=True)]
    assert within_bounds(plan.load(), old, lengths)
    plan.rebalance(groups_of(new))
    after = [plan.group_of(request) for request in ids]
    assert within_bounds(plan.load(), new, lengths)

    def moved(candidate: tuple[str, ...] | list[str]) -> int:
        return sum(n for n, was, now in zip(lengths, before, candidate, strict=True) if was != now)

    def load_of(candidate: tuple[str, ...]) -> dict[str, int]:
        load = dict.fromkeys(new, 0)
        for length, name in zip(lengths, candidate, strict=True):
            load[name] += length
        return load

    candidates = itertools.product(new, repeat=len(lengths))
    best = min(moved(candidate) for candidate in candidates if within_bounds(load_of(candidate), new, lengths))
    assert moved(after) == best


class Life(RuleBasedStateMachine):
    """Requests and groups come and go; a dictionary of owners is moved by the moves alone and must stay true."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes = {"w": 2, "x": 1}
        self.plan = HybridPlan(5, 4, groups_of(self.sizes))
        self.lengths: dict[RequestId, int] = {}
        self.owners: dict[tuple[RequestId, int], NodeId] = {}
        self.count = 0

    @rule(num_tokens=st.integers(1, 60))
    def place(self, num_tokens: int) -> None:
        request = RequestId(f"r{self.count}")
        self.count += 1
        self.plan.place(request, num_tokens)
        self.lengths[request] = num_tokens
        self.owners.update({(request, layer): self.plan.locate(request, layer) for layer in range(5)})

    @precondition(lambda self: self.lengths)
    @rule(pick=st.integers(0, 1000))
    def release(self, pick: int) -> None:
        request = list(self.lengths)[pick % len(self.lengths)]
        self.plan.release(request)
        del self.lengths[request]
        self.owners = {key: node for key, node in self.owners.items() if key[0] != request}

    @rule(sizes=group_sizes, lose=st.booleans())
    def change(self, sizes: dict[str, int], lose: bool) -> None:
        old_nodes = {node for nodes in groups_of(self.sizes).values() for node in nodes}
        new_nodes = {node for nodes in groups_of(sizes).values() for node in nodes}
        lost = sorted(old_nodes - new_nodes) if lose else []
        for step in self.plan.rebalance(groups_of(sizes), lost):
            move = step.move
            assert (move.token_start, move.token_end) == (0, self.lengths[step.request_id])
            for layer in range(move.layer_start, move.layer_end):
                held_by = self.owners[step.request_id, layer]
                assert move.source == (None if held_by in lost else held_by)
                self.owners[step.request_id, layer] = move.target
        self.sizes = sizes
        assert within_bounds(self.plan.load(), sizes, self.blocks())

    def blocks(self) -> list[int]:
        return [-(-length // 4) for length in self.lengths.values()]

    @invariant()
    def every_layer_lies_where_the_moves_brought_it(self) -> None:
        for (request, layer), node in self.owners.items():
            assert self.plan.locate(request, layer) == node
        assert sum(self.plan.load().values()) == sum(self.blocks())


TestLife = Life.TestCase
TestLife.settings = settings(max_examples=30, stateful_step_count=25, deadline=None)


@given(st.lists(st.integers(1, 30), min_size=1, max_size=8), st.data())
def test_the_subset_given_away_is_the_smallest(sizes: list[int], data: st.DataObject) -> None:
    least = data.draw(st.integers(1, sum(sizes)))
    chosen = smallest_subset(sizes, least)
    sums = {
        sum(s for s, keep in zip(sizes, mask, strict=True) if keep)
        for mask in itertools.product((0, 1), repeat=len(sizes))
    }
    assert len(set(chosen)) == len(chosen)
    assert sum(sizes[i] for i in chosen) == min(total for total in sums if total >= least)


@given(st.lists(st.integers(1, 30), min_size=1, max_size=20), st.data())
def test_beyond_the_exact_limit_the_subset_still_suffices(sizes: list[int], data: st.DataObject) -> None:
    least = data.draw(st.integers(1, sum(sizes)))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sharding_hybrid, "_EXACT_WORK_MAX", 0)
        chosen = smallest_subset(sizes, least)
    assert least <= sum(sizes[i] for i in chosen) < least + max(sizes)


def test_inside_a_group_a_request_lies_by_layer() -> None:
    plan = HybridPlan(8, 16, {"left": group("l", 2), "right": group("r", 4)})
    assert plan.groups == ("left", "right")
    name = plan.place(RequestId("one"), 100)
    places = plan.placements(RequestId("one"))
    assert [place.node for place in places] == group(name[0], len(places))
    assert all((place.token_start, place.token_end) == (0, 100) for place in places)
    assert sum(place.num_cells for place in places) == 8 * 100


def test_requests_spread_by_weight() -> None:
    plan = HybridPlan(8, 16, {"left": group("l", 1), "right": group("r", 3)})
    for i in range(40):
        plan.place(RequestId(f"r{i}"), 160)
    assert plan.load() == {"left": 100, "right": 300}


def test_a_refused_change_leaves_the_plan_as_it_was() -> None:
    plan = HybridPlan(8, 16, {"left": group("l", 2)})
    plan.place(RequestId("one"), 100)
    for groups, lost in (
        ({}, []),
        ({"left": []}, []),
        ({"left": group("l", 1), "right": group("l", 1)}, []),
        ({"left": group("l", 2)}, group("l", 1)),
    ):
        with pytest.raises(InvalidPlanError):
            plan.rebalance(groups, lost)
    assert plan.load() == {"left": 7}


def test_requests_that_are_not_there_and_sizes_that_cannot_be_are_refused() -> None:
    plan = HybridPlan(8, 16, {"left": group("l", 2)})
    plan.place(RequestId("one"), 1)
    for attempt in (
        lambda: plan.place(RequestId("one"), 1),
        lambda: plan.place(RequestId("two"), 0),
        lambda: plan.place(RequestId("two"), (1 << 20) + 1),
        lambda: plan.release(RequestId("two")),
        lambda: plan.group_of(RequestId("two")),
        lambda: plan.locate(RequestId("one"), 8),
        lambda: plan.placements(RequestId("two")),
        lambda: HybridPlan(0, 16, {"left": group("l", 2)}),
        lambda: HybridPlan(8, 0, {"left": group("l", 2)}),
    ):
        with pytest.raises(InvalidPlanError):
            attempt()

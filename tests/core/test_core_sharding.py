"""Sharding plans: complete, balanced, and with no more moves than brute force needs."""

import itertools
from collections.abc import Iterable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kv_core.dtypes import DType
from kv_core.ids import NodeId
from kv_core.presets import preset
from kv_core.sharding import InvalidPlanError, Move, ShardPlan, plan_by_layer, plan_by_sequence, spread

NAMES = [NodeId(name) for name in "abcdefg"]
weightings = st.dictionaries(st.sampled_from(NAMES[:4]), st.integers(1, 5), min_size=1, max_size=4)


def nodes(names: str) -> list[NodeId]:
    return [NodeId(name) for name in names]


def is_balanced(owners: Iterable[NodeId], weights: dict[NodeId, int]) -> bool:
    owners = list(owners)
    total = sum(weights.values())
    shares = [(owners.count(node) * total, len(owners) * weight) for node, weight in weights.items()]
    return all(abs(held - ideal) < total for held, ideal in shares)


@given(st.lists(st.none() | st.sampled_from(NAMES[:5]), max_size=6), weightings)
def test_spread_is_balanced_and_moves_as_little_as_brute_force(
    owners: list[NodeId | None], weights: dict[NodeId, int]
) -> None:
    result = spread(owners, weights)
    assert len(result) == len(owners)
    assert set(result) <= set(weights)
    assert is_balanced(result, weights)
    best = min(
        sum(old != new for old, new in zip(owners, candidate, strict=True))
        for candidate in itertools.product(weights, repeat=len(owners))
        if is_balanced(candidate, weights)
    )
    assert sum(old != new for old, new in zip(owners, result, strict=True)) == best


def held_by(plan: ShardPlan) -> dict[tuple[int, int], NodeId]:
    """The owner of every cell, read from the placements; fails on overlap."""
    cells: dict[tuple[int, int], NodeId] = {}
    for place in plan.placements:
        for cell in itertools.product(
            range(place.layer_start, place.layer_end), range(place.token_start, place.token_end)
        ):
            assert cell not in cells
            cells[cell] = place.node
    return cells


plans = st.builds(plan_by_layer, st.integers(1, 7), st.integers(1, 9), weightings) | st.builds(
    plan_by_sequence, st.integers(1, 3), st.integers(1, 30), st.integers(1, 4), weightings
)


@given(plans)
def test_every_cell_has_one_owner_and_locate_knows_it(plan: ShardPlan) -> None:
    cells = held_by(plan)
    assert len(cells) == plan.num_layers * plan.num_tokens
    assert all(plan.locate(layer, token) == node for (layer, token), node in cells.items())
    assert sum(plan.cells_by_node().values()) == len(cells)


@given(plans, weightings, st.integers(0, 9), st.data())
def test_moves_lead_from_the_old_plan_to_the_new_one(
    plan: ShardPlan, weights: dict[NodeId, int], growth: int, data: st.DataObject
) -> None:
    gone = sorted(set(plan.cells_by_node()) - set(weights))
    lost = data.draw(st.lists(st.sampled_from(gone), unique=True)) if gone else []
    before = held_by(plan)
    after_plan, moves = plan.rebalance(weights, plan.num_tokens + growth, lost)
    after = held_by(after_plan)
    state: dict[tuple[int, int], NodeId] = dict(before)
    for move in moves:
        for cell in itertools.product(range(move.layer_start, move.layer_end), range(move.token_start, move.token_end)):
            assert move.source == (None if before[cell] in lost else before[cell])
            assert state[cell] != move.target
            state[cell] = move.target
    assert state == {cell: after[cell] for cell in before}
    assert sum(move.num_cells for move in moves) == sum(before[cell] != after[cell] for cell in before)


def test_a_fresh_plan_gives_each_node_one_run_in_order() -> None:
    plan = plan_by_layer(80, 1000, nodes("abc"))
    assert [(p.layer_start, p.layer_end, p.node) for p in plan.placements] == [
        (0, 27, "a"),
        (27, 54, "b"),
        (54, 80, "c"),
    ]


def test_a_joining_node_receives_its_share_and_nothing_else_moves() -> None:
    plan = plan_by_layer(80, 1000, nodes("abcd"))
    grown, moves = plan.rebalance(nodes("abcde"))
    assert {move.target for move in moves} == {"e"}
    assert sum(move.layer_end - move.layer_start for move in moves) == 16
    assert set(grown.cells_by_node().values()) == {16 * 1000}


def test_what_a_leaving_node_held_is_all_that_moves() -> None:
    plan = plan_by_sequence(2, 4096, 16, nodes("abcd"))
    _, moves = plan.rebalance(nodes("abc"))
    assert {move.source for move in moves} == {"d"}
    assert sum(move.num_cells for move in moves) == 2 * 1024


def test_a_lost_node_leaves_nothing_to_copy_from() -> None:
    _, moves = plan_by_layer(4, 10, nodes("ab")).rebalance(nodes("a"), lost=nodes("b"))
    assert moves == (Move(2, 4, 0, 10, None, NodeId("a")),)


def test_growing_a_sequence_moves_nothing_and_keeps_the_balance() -> None:
    plan = plan_by_sequence(2, 64, 16, nodes("abcd"))
    for length in (65, 100, 128, 200):
        plan, moves = plan.rebalance(nodes("abcd"), length)
        assert moves == ()
        assert max(plan.cells_by_node().values()) <= 2 * 16 * -(-length // 64)


def test_weights_are_shares_of_the_bytes() -> None:
    model = preset("llama-3-70b")
    plan = plan_by_layer(model.num_layers, 131_072, {NodeId("a"): 3, NodeId("b"): 1})
    cell_nbytes = model.bytes_per_token_per_layer(DType.FP16)
    assert {node: cells * cell_nbytes for node, cells in plan.cells_by_node().items()} == {"a": 30 << 30, "b": 10 << 30}


def test_more_nodes_than_units_leaves_some_with_nothing() -> None:
    plan = plan_by_layer(2, 10, nodes("abc"))
    assert set(plan.cells_by_node().values()) == {10}
    assert len(plan.cells_by_node()) == 2


def test_a_plan_of_a_million_blocks_is_made_in_one_pass() -> None:
    plan = plan_by_sequence(1, 1 << 20, 1, nodes("abcd"))
    _, moves = plan.rebalance(nodes("abcde"))
    assert sum(move.num_cells for move in moves) == (1 << 20) // 5
    assert len(moves) == 4


@pytest.mark.parametrize("place", [(-1, 0), (4, 0), (0, -1), (0, 10)])
def test_a_place_outside_the_plan_is_refused(place: tuple[int, int]) -> None:
    with pytest.raises(InvalidPlanError, match="outside"):
        plan_by_layer(4, 10, nodes("ab")).locate(*place)


def test_plans_that_cannot_be_are_refused() -> None:
    plan = plan_by_layer(4, 10, nodes("ab"))
    for attempt in (
        lambda: plan_by_layer(4, 10, []),
        lambda: plan_by_layer(4, 10, nodes("aa")),
        lambda: plan_by_layer(4, 10, {NodeId("a"): 0}),
        lambda: plan_by_layer(4, 10, {NodeId("a"): True}),
        lambda: plan_by_layer(0, 10, nodes("a")),
        lambda: plan_by_layer(4, 0, nodes("a")),
        lambda: plan_by_sequence(4, 10, 0, nodes("a")),
        lambda: plan_by_sequence(0, 10, 1, nodes("a")),
        lambda: plan_by_sequence(1, (1 << 20) + 1, 1, nodes("a")),
        lambda: plan.rebalance([]),
        lambda: plan.rebalance(nodes("a"), 9),
        lambda: plan.rebalance(nodes("a"), lost=nodes("a")),
    ):
        with pytest.raises(InvalidPlanError):
            attempt()

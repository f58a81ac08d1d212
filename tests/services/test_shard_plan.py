"""Plans for sequences that no node can hold: every cell once, within each node's room, over as few nodes as can be."""

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from kv_core.ids import NodeId, RequestId
from kv_core.sharding import InvalidPlanError, Placement
from kv_services.sharded.errors import ClusterTooSmallError
from kv_services.sharded.plan import SequenceSize, ShardMode, piece_slots, plan_pieces, stages_of

R = RequestId("r")
A, B, C, D = (NodeId(name) for name in "abcd")

sizes = st.builds(
    SequenceSize, num_layers=st.integers(1, 8), num_tokens=st.integers(1, 120), block_size=st.sampled_from([1, 4, 16])
)
rooms = st.lists(st.integers(0, 40), min_size=1, max_size=5).map(
    lambda slots: {NodeId(f"n{i}"): count for i, count in enumerate(slots)}
)


@given(size=sizes, room=rooms, mode=st.sampled_from([m for m in ShardMode if m is not ShardMode.NONE]))
def test_every_cell_has_one_holder_with_room_for_it(
    size: SequenceSize, room: dict[NodeId, int], mode: ShardMode
) -> None:
    names = list(room)
    groups = (names[:2], names[2:])
    try:
        pieces = plan_pieces(R, mode, size, room, groups)
    except ClusterTooSmallError:
        return
    cells = [
        (layer, token)
        for piece in pieces
        for layer in range(piece.layer_start, piece.layer_end)
        for token in range(piece.token_start, piece.token_end)
    ]
    assert sorted(cells) == [(layer, token) for layer in range(size.num_layers) for token in range(size.num_tokens)]
    assert all(piece_slots(piece, size.num_layers, size.block_size) <= room[piece.node] for piece in pieces)
    assert len(pieces) >= 2
    assert plan_pieces(R, mode, size, dict(reversed(room.items())), groups) == pieces
    stages = stages_of(pieces, size)
    assert [(s.layer_start, s.layer_end) for s in stages] == sorted({(s.layer_start, s.layer_end) for s in stages})
    assert sum(s.layer_end - s.layer_start for s in stages) == size.num_layers


@given(size=sizes, room=rooms)
def test_by_sequence_fits_whenever_the_rooms_together_do_and_over_the_fewest_nodes(
    size: SequenceSize, room: dict[NodeId, int]
) -> None:
    assume(max(room.values()) < size.num_blocks)
    ordered = sorted(room.values(), reverse=True)
    least = next((n for n in range(len(ordered) + 1) if sum(ordered[:n]) >= size.num_blocks), None)
    if least is None:
        for mode in (ShardMode.SEQUENCE, ShardMode.AUTO):
            with pytest.raises(ClusterTooSmallError):
                plan_pieces(R, mode, size, room)
        return
    assert len(plan_pieces(R, ShardMode.SEQUENCE, size, room)) == least
    assert plan_pieces(R, ShardMode.AUTO, size, room)


def test_auto_cuts_by_layer_where_that_fits_and_by_sequence_where_layers_are_too_coarse() -> None:
    size = SequenceSize(3, 40, 4)
    assert {p.token_end - p.token_start for p in plan_pieces(R, ShardMode.AUTO, size, {A: 7, B: 7})} == {40}
    by_tokens = plan_pieces(R, ShardMode.AUTO, size, {A: 5, B: 5})
    assert {p.layer_end - p.layer_start for p in by_tokens} == {3}
    with pytest.raises(ClusterTooSmallError):
        plan_pieces(R, ShardMode.LAYER, size, {A: 5, B: 5})
    with pytest.raises(ClusterTooSmallError):
        plan_pieces(R, ShardMode.NONE, size, {A: 7, B: 7})


def test_hybrid_keeps_a_request_in_one_group_where_it_fits_and_cuts_its_tokens_between_groups_where_not() -> None:
    size = SequenceSize(4, 40, 4)
    groups = ((A, B), (C, D))
    one = plan_pieces(R, ShardMode.HYBRID, size, {A: 5, B: 5, C: 6, D: 6}, groups)
    assert {piece.node for piece in one} == {C, D}
    both = plan_pieces(R, ShardMode.HYBRID, size, {A: 4, B: 4, C: 4, D: 4}, groups)
    assert [len(stage.pieces) for stage in stages_of(both, size)] == [2, 2]
    assert {piece.node for piece in both} == {A, B, C, D}
    # A group that lost all but one node is none.
    with pytest.raises(ClusterTooSmallError):
        plan_pieces(R, ShardMode.HYBRID, size, {A: 8, C: 4, D: 4}, groups)


def test_stages_refuse_a_plan_with_holes_overlaps_or_cuts_inside_blocks() -> None:
    size = SequenceSize(4, 40, 4)
    for pieces in (
        [],
        [Placement(0, 2, 0, 40, A)],
        [Placement(0, 4, 0, 20, A), Placement(0, 4, 24, 40, B)],
        [Placement(0, 4, 0, 20, A), Placement(0, 4, 16, 40, B)],
        [Placement(0, 4, 0, 18, A), Placement(0, 4, 18, 40, B)],
        [Placement(0, 3, 0, 40, A), Placement(2, 4, 0, 40, B)],
        [Placement(0, 5, 0, 40, A)],
        [Placement(0, 4, 0, 44, A)],
        [Placement(0, 2, 0, 40, A), Placement(2, 4, 0, 40, A)],
    ):
        with pytest.raises(InvalidPlanError):
            stages_of(pieces, size)


def test_layers_held_by_groups_that_are_cut_elsewhere_become_stages_of_their_own() -> None:
    size = SequenceSize(4, 40, 4)
    pieces = [
        Placement(0, 1, 0, 20, A), Placement(1, 4, 0, 20, B), Placement(0, 3, 20, 40, C), Placement(3, 4, 20, 40, D),
    ]  # fmt: skip
    got = [(s.layer_start, s.layer_end, [p.node for p in s.pieces]) for s in stages_of(pieces, size)]
    assert got == [(0, 1, [A, C]), (1, 3, [B, C]), (3, 4, [B, D])]

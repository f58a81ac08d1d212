"""The hybrid logical clock, invariant by invariant."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kv_consistency.errors import ClockBoundReachedError, ClockJumpedError, InvalidUpdateError, RemoteClockAheadError
from kv_consistency.hlc import HybridLogicalClock, Timestamp
from kv_consistency.limits import MAX_LOGICAL
from kv_core.ids import NodeId

A, B, C = NodeId("a"), NodeId("b"), NodeId("c")
NODES = (A, B, C)
SECOND = 1_000_000_000

steps = st.tuples(
    st.sampled_from(("tick", "send", "deliver", "repeat")),
    st.sampled_from(NODES),
    st.integers(-5_000, 5_000),
    st.integers(0, 50),
)


@settings(deadline=None)
@given(st.lists(steps, max_size=60))
def test_a_stamp_exceeds_every_stamp_in_its_causal_past(run: list[tuple[str, NodeId, int, int]]) -> None:
    """I1, I2, I3 against explicit causal histories, with walls that stall, jump and step back."""
    clocks = {node: HybridLogicalClock(node, offset_max_ns=10**9) for node in NODES}
    wall = dict.fromkeys(NODES, 1_000_000)
    past: dict[NodeId, set[Timestamp]] = {node: set() for node in NODES}
    in_flight: list[tuple[Timestamp, set[Timestamp]]] = []
    for kind, node, wall_step, pick in run:
        wall[node] += wall_step
        if kind in ("deliver", "repeat") and in_flight:
            index = pick % len(in_flight)
            sent, seen = in_flight[index] if kind == "repeat" else in_flight.pop(index)
            stamp = clocks[node].merge(sent, wall[node])
            past[node] |= seen
        else:
            stamp = clocks[node].tick(wall[node])
        assert all(earlier < stamp for earlier in past[node])
        assert stamp.wall_ns >= wall[node]
        past[node].add(stamp)
        if kind == "send":
            in_flight.append((stamp, set(past[node])))


@given(st.lists(st.integers(0, 10**6), min_size=1, max_size=30))
def test_logical_is_zero_exactly_when_the_reading_leads(walls: list[int]) -> None:
    """I4, first half."""
    clock = HybridLogicalClock(A)
    highest = 0
    for wall in walls:
        stamp = clock.tick(wall)
        assert (stamp.logical == 0) == (wall > highest)
        highest = max(highest, wall)
        assert stamp.wall_ns == highest


def test_an_overflow_of_logical_carries_into_the_wall() -> None:
    """I4, second half."""
    clock = HybridLogicalClock(A)
    clock.merge(Timestamp(500, MAX_LOGICAL, B), 100)
    assert clock.last == Timestamp(501, 0, A)
    clock.merge(Timestamp(501, MAX_LOGICAL - 1, B), 100)
    assert clock.last == Timestamp(501, MAX_LOGICAL, A)
    assert clock.tick(100) == Timestamp(502, 0, A)


@given(st.integers(0, 10**12), st.integers(0, 10**12), st.integers(1, 10**12), st.integers(0, MAX_LOGICAL))
def test_a_refused_remote_stamp_changes_nothing(own: int, wall: int, beyond: int, logical: int) -> None:
    """I5: what follows is as if it had never come."""
    offset = 1_000
    refusing, untouched = (HybridLogicalClock(A, offset_max_ns=offset) for _ in range(2))
    for clock in (refusing, untouched):
        clock.tick(own)
    remote = Timestamp(max(own, wall) + offset + beyond, logical, B)
    with pytest.raises(RemoteClockAheadError) as caught:
        refusing.merge(remote, wall)
    assert caught.value.fields["ahead_ns"] == offset + beyond
    assert refusing.last == untouched.last
    assert refusing.tick(wall) == untouched.tick(wall)
    assert refusing.stats().refused == 1


def test_a_remote_stamp_is_measured_against_the_clock_state_and_not_the_wall() -> None:
    """A cluster that lives ahead of walls which were set back goes on."""
    clock = HybridLogicalClock(A, offset_max_ns=10)
    clock.tick(1_000)
    assert clock.merge(Timestamp(1_010, 0, B), 5) > Timestamp(1_010, 0, B)
    with pytest.raises(RemoteClockAheadError):
        clock.merge(Timestamp(1_021, 0, B), 5)


def test_a_wall_that_steps_back_never_moves_the_clock_and_is_counted() -> None:
    """I6."""
    clock = HybridLogicalClock(A)
    first = clock.tick(10_000)
    stamps = [clock.tick(wall) for wall in (9_000, 9_001, 4_000, 10_000)]
    assert [first, *stamps] == sorted([first, *stamps])
    assert {stamp.wall_ns for stamp in stamps} == {10_000}
    assert clock.stats().back_steps == 2


def test_a_forward_jump_is_raised_and_not_absorbed() -> None:
    """I7; idleness is no jump."""
    clock = HybridLogicalClock(A, jump_max_ns=SECOND // 2)
    clock.tick(100 * SECOND, now_ns=0)
    assert clock.tick(200 * SECOND, now_ns=100 * SECOND).wall_ns == 200 * SECOND
    before = clock.last
    with pytest.raises(ClockJumpedError) as caught:
        clock.tick(202 * SECOND, now_ns=101 * SECOND)
    assert caught.value.fields["ahead_ns"] == SECOND
    with pytest.raises(ClockJumpedError):
        clock.merge(Timestamp(200 * SECOND, 0, B), 202 * SECOND, now_ns=101 * SECOND)
    assert clock.last == before
    assert clock.stats().jumps == 2
    assert clock.expected_wall_ns(102 * SECOND) == 202 * SECOND
    clock.accept_wall(203 * SECOND, 102 * SECOND)
    assert clock.tick(204 * SECOND, now_ns=103 * SECOND).wall_ns == 204 * SECOND


def test_small_jumps_add_up_until_they_are_raised() -> None:
    clock = HybridLogicalClock(A, jump_max_ns=SECOND // 2)
    clock.tick(0, now_ns=0)
    with pytest.raises(ClockJumpedError):
        for i in range(1, 20):
            clock.tick(i * (SECOND + SECOND // 10), now_ns=i * SECOND)
    assert clock.last.wall_ns <= 6 * (SECOND + SECOND // 10)


def test_a_wall_that_is_slewed_as_ntp_does_is_followed() -> None:
    clock = HybridLogicalClock(A, jump_max_ns=SECOND // 2)
    for i in range(10_000):
        clock.tick(i * (SECOND + SECOND // 2_000), now_ns=i * SECOND)
    assert clock.stats().jumps == 0


def test_a_wall_that_returns_from_a_step_back_is_no_jump() -> None:
    clock = HybridLogicalClock(A, jump_max_ns=SECOND // 2)
    clock.tick(5_000 * SECOND, now_ns=0)
    clock.tick(1_401 * SECOND, now_ns=SECOND)
    stamp = clock.tick(5_002 * SECOND, now_ns=2 * SECOND)
    assert stamp.wall_ns == 5_002 * SECOND


@given(st.lists(st.integers(0, 300), max_size=30), st.integers(1, 200))
def test_no_stamp_passes_the_bound_and_a_restart_begins_at_it(walls: list[int], bound: int) -> None:
    """I8."""
    clock = HybridLogicalClock(A, bound_ns=bound, floor_ns=0)
    issued = []
    for wall in walls:
        try:
            issued.append(clock.tick(wall))
        except ClockBoundReachedError:
            assert wall >= bound
        try:
            issued.append(clock.merge(Timestamp(wall, 3, B), wall // 2))
        except ClockBoundReachedError:
            assert wall >= bound
    assert all(stamp.wall_ns < bound for stamp in issued)
    restarted = HybridLogicalClock(A, floor_ns=bound, bound_ns=bound)
    with pytest.raises(ClockBoundReachedError):
        restarted.tick(0)
    restarted.extend_bound(bound + 1_000)
    restarted.extend_bound(1)
    assert all(stamp < restarted.tick(0) for stamp in issued)
    assert restarted.bound_ns == bound + 1_000


@given(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 2), st.sampled_from(NODES)), min_size=3, max_size=3))
def test_order_is_total_by_wall_logical_node(parts: list[tuple[int, int, NodeId]]) -> None:
    """I9."""
    x, y, z = (Timestamp(*part) for part in parts)
    assert (x < y) + (y < x) + (x == y) == 1
    assert (x < y) == (parts[0] < parts[1])
    if x < y and y < z:
        assert x < z


def test_a_newcomer_takes_its_floor_from_a_cluster_ahead_of_the_walls() -> None:
    clock = HybridLogicalClock(A)
    ahead = Timestamp(5_000 * SECOND, 7, B)
    with pytest.raises(RemoteClockAheadError):
        clock.merge(ahead, 1_400 * SECOND)
    clock.adopt_floor(ahead, 1_400 * SECOND)
    assert clock.tick(1_400 * SECOND) > ahead
    clock.adopt_floor(Timestamp(1, 0, B), 1_400 * SECOND)
    assert clock.last > ahead, "a floor never lowers"
    with pytest.raises(RemoteClockAheadError):
        clock.adopt_floor(Timestamp(200_000 * SECOND, 0, B), 1_400 * SECOND)
    bounded = HybridLogicalClock(A, bound_ns=2_000 * SECOND)
    with pytest.raises(ClockBoundReachedError):
        bounded.adopt_floor(ahead, 1_400 * SECOND)


def test_negative_settings_are_refused() -> None:
    with pytest.raises(InvalidUpdateError):
        HybridLogicalClock(A, offset_max_ns=-1)

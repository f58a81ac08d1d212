"""Invariants of the hybrid logical clock as properties of one clock under any readings and any remote stamps.

The twin is a single integer, `wall << 32 | logical`, that only ever takes the maximum of what it must exceed.
I5, I8 and I9 have theirs in test_hlc.py, as have I1 to I3 over several clocks with explicit causal histories.
"""

import itertools
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kv_consistency.errors import ClockJumpedError, RemoteClockAheadError
from kv_consistency.hlc import HybridLogicalClock, Timestamp
from kv_consistency.limits import MAX_LOGICAL
from kv_core.ids import NodeId

A, B = NodeId("a"), NodeId("b")
SECOND = 1_000_000_000
OFFSET_MAX = 1_000
JUMP_MAX = 50

readings = st.integers(0, 3_000)
logicals = st.one_of(st.integers(0, 3), st.integers(MAX_LOGICAL - 2, MAX_LOGICAL))
stamps = st.builds(Timestamp, readings, logicals, st.just(B))
steps = st.tuples(readings, st.none() | stamps)
"""A reading, and what was received with it; None: a local event."""


@dataclass
class Step:
    """One step that was not refused: what was given, what came out, and the clock before."""

    before: Timestamp
    wall_ns: int
    remote: Timestamp | None
    stamp: Timestamp


def taken(run: list[tuple[int, Timestamp | None]]) -> list[Step]:
    clock = HybridLogicalClock(A, offset_max_ns=OFFSET_MAX)
    done: list[Step] = []
    for wall_ns, remote in run:
        before = clock.last
        try:
            stamp = clock.tick(wall_ns) if remote is None else clock.merge(remote, wall_ns)
        except RemoteClockAheadError:
            continue
        done.append(Step(before, wall_ns, remote, stamp))
    return done


def packed(stamp: Timestamp) -> int:
    return stamp.wall_ns << 32 | stamp.logical


@given(st.lists(steps, max_size=30))
def test_i1_each_stamp_of_a_node_exceeds_its_last(run: list[tuple[int, Timestamp | None]]) -> None:
    issued = [step.stamp for step in taken(run)]
    assert all(earlier < later for earlier, later in itertools.pairwise(issued))


@given(st.lists(steps, max_size=30))
def test_i2_a_receipt_exceeds_what_was_received(run: list[tuple[int, Timestamp | None]]) -> None:
    for step in taken(run):
        assert step.remote is None or step.stamp > step.remote


@given(st.lists(steps, max_size=30))
def test_i3_a_stamp_is_not_before_the_reading_given(run: list[tuple[int, Timestamp | None]]) -> None:
    assert all(step.stamp.wall_ns >= step.wall_ns for step in taken(run))


@given(st.lists(steps, max_size=30))
def test_i4_a_stamp_is_the_least_that_exceeds_its_past_and_carries_on_overflow(
    run: list[tuple[int, Timestamp | None]],
) -> None:
    for step in taken(run):
        past = [packed(step.before)] + ([] if step.remote is None else [packed(step.remote)])
        least = max(step.wall_ns << 32, max(past) + 1)
        assert packed(step.stamp) == least
        leads = all(step.wall_ns > stamp.wall_ns for stamp in (step.before, step.remote) if stamp is not None)
        assert not leads or step.stamp.logical == 0


@given(st.lists(steps, max_size=30))
def test_i5_whatever_is_refused_might_as_well_not_have_come(run: list[tuple[int, Timestamp | None]]) -> None:
    clock, spared = (HybridLogicalClock(A, offset_max_ns=OFFSET_MAX) for _ in range(2))
    refused = 0
    for wall_ns, remote in run:
        try:
            stamp = clock.tick(wall_ns) if remote is None else clock.merge(remote, wall_ns)
        except RemoteClockAheadError:
            refused += 1
            continue
        assert stamp == (spared.tick(wall_ns) if remote is None else spared.merge(remote, wall_ns))
    assert clock.last == spared.last
    assert clock.stats().refused == refused and spared.stats().refused == 0


@given(st.lists(readings, max_size=30))
def test_i6_a_wall_that_steps_back_never_moves_the_clock_back_and_each_time_is_counted(walls: list[int]) -> None:
    clock = HybridLogicalClock(A)
    reached = 0
    for wall_ns in walls:
        reached = max(reached, wall_ns)
        assert clock.tick(wall_ns).wall_ns == reached
    assert clock.stats().back_steps == sum(later < earlier for earlier, later in itertools.pairwise(walls))


elapsed_ns = st.one_of(st.integers(0, 5), st.integers(0, 2_000))
jump_ns = st.one_of(st.integers(1, JUMP_MAX), st.integers(-2 * JUMP_MAX, 3 * JUMP_MAX))
jumps = st.tuples(elapsed_ns, jump_ns, st.booleans())


@given(st.lists(jumps, max_size=30))
def test_i7_a_forward_jump_is_raised_and_no_stamp_runs_ahead_of_true_time(run: list[tuple[int, int, bool]]) -> None:
    """However many small jumps make it; a wall may gain a thousandth of the time that passed."""
    clock = HybridLogicalClock(A, jump_max_ns=JUMP_MAX)
    now_ns = 0
    wall_ns = true_ns = 10_000
    clock.tick(wall_ns, now_ns)
    for elapsed, jump, merges in run:
        now_ns, true_ns, wall_ns = now_ns + elapsed, true_ns + elapsed, max(0, wall_ns + elapsed + jump)
        before, ahead = clock.last, wall_ns - true_ns
        try:
            stamp = clock.merge(Timestamp(0, 0, B), wall_ns, now_ns) if merges else clock.tick(wall_ns, now_ns)
        except ClockJumpedError as error:
            assert error.fields["ahead_ns"] == ahead > JUMP_MAX
            assert clock.last == before, "nothing was absorbed"
        else:
            assert ahead <= JUMP_MAX + now_ns // 1_000
            assert stamp.wall_ns <= true_ns + JUMP_MAX + now_ns // 1_000


@given(st.integers(1, 10_000), st.lists(st.integers(0, 100_000), max_size=20))
def test_i7_idleness_is_no_jump_and_neither_is_a_drift_as_of_ntp(period_ms: int, drifts_ppm: list[int]) -> None:
    clock = HybridLogicalClock(A, jump_max_ns=SECOND // 2)
    now_ns, wall_ns = 0, 10 * SECOND
    clock.tick(wall_ns, now_ns)
    for drift in drifts_ppm:
        elapsed = period_ms * 1_000_000 * 100
        now_ns += elapsed
        wall_ns += elapsed + elapsed * (drift % 1_000) // 1_000_000
        assert clock.tick(wall_ns, now_ns).wall_ns == wall_ns
    assert clock.stats().jumps == 0


def test_i7_a_wall_that_follows_where_peers_have_led_is_no_news() -> None:
    clock = HybridLogicalClock(A, offset_max_ns=10 * SECOND, jump_max_ns=SECOND // 2)
    clock.tick(100 * SECOND, 0)
    clock.merge(Timestamp(105 * SECOND, 0, B), 100 * SECOND, 0)
    assert clock.tick(105 * SECOND + 1, 1).wall_ns == 105 * SECOND + 1
    with pytest.raises(ClockJumpedError):
        clock.tick(106 * SECOND, 2)

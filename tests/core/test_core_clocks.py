"""Clocks: the machine's, one by hand, and one that is wrong in a known way."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kv_core.clock import Clock, SystemClock
from kv_core.testing import ManualClock, SkewedClock

SECOND = 1_000_000_000


def test_the_machines_clocks_are_whole_nanoseconds_and_the_monotonic_one_does_not_go_back() -> None:
    clock: Clock = SystemClock()
    first, second = clock.monotonic_ns(), clock.monotonic_ns()
    assert type(first) is type(clock.wall_ns()) is int
    assert second >= first
    assert clock.wall_ns() > 1_600_000_000 * SECOND


def test_a_manual_clock_moves_only_when_told() -> None:
    clock = ManualClock(wall_ns=100)
    clock.advance(5)
    assert (clock.wall_ns(), clock.monotonic_ns()) == (105, 5)
    clock.step_wall(-50)
    assert (clock.wall_ns(), clock.monotonic_ns()) == (55, 5)
    clock.set_wall(7)
    assert (clock.wall_ns(), clock.monotonic_ns()) == (7, 5)
    with pytest.raises(ValueError, match="backwards"):
        clock.advance(-1)


def test_a_skewed_clock_is_off_drifts_and_steps() -> None:
    base = ManualClock(wall_ns=1000 * SECOND)
    clock = SkewedClock(base, offset_ns=-2 * SECOND, drift_ppm=500)
    assert clock.wall_ns() == 998 * SECOND
    base.advance(1000 * SECOND)
    assert clock.wall_ns() == 1998 * SECOND + SECOND // 2
    assert clock.monotonic_ns() == 1000 * SECOND + SECOND // 2
    clock.set_drift(0)
    clock.step_wall(-10 * SECOND)
    base.advance(SECOND)
    assert clock.wall_ns() == 1989 * SECOND + SECOND // 2
    assert clock.monotonic_ns() == 1001 * SECOND + SECOND // 2


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["advance", "drift", "step"]),
            st.integers(0, 10 * SECOND),
            st.integers(-999_999, 2_000_000),
        ),
        max_size=20,
    )
)
def test_its_monotonic_clock_never_goes_back(steps: list[tuple[str, int, int]]) -> None:
    base = ManualClock()
    clock, last = SkewedClock(base), 0
    for kind, delta_ns, ppm in steps:
        if kind == "advance":
            base.advance(delta_ns)
        elif kind == "drift":
            clock.set_drift(ppm)
        else:
            clock.step_wall(-delta_ns)
        assert clock.monotonic_ns() >= last
        last = clock.monotonic_ns()


def test_a_drift_that_stops_time_is_refused() -> None:
    with pytest.raises(ValueError, match="stop time"):
        SkewedClock(ManualClock(), drift_ppm=-1_000_000)

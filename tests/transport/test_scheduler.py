"""The order of work: urgent first, shallow first, nobody starves, never more than the window."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kv_transport import TransferPriority, limits
from kv_transport.errors import InvalidDescriptor, InvalidTransition, TransferTooLarge
from kv_transport.scheduler import AGEING_PICKS, Scheduler

CRITICAL, HIGH, LOW = TransferPriority
PRIORITIES = st.sampled_from(list(TransferPriority))
UNITS = st.lists(st.tuples(PRIORITIES, st.integers(0, 40)), max_size=60)


def drain(scheduler: Scheduler) -> list[int]:
    order = []
    while picked := scheduler.pick():
        scheduler.check()
        order += picked
        for key in picked:
            scheduler.settle(key)
    return order


@given(UNITS, st.integers(1, 9))
def test_without_ageing_the_order_is_priority_then_layer_then_arrival(
    units: list[tuple[TransferPriority, int]], window: int
) -> None:
    scheduler = Scheduler(window, ageing=1 << 30)
    for key, (priority, layer) in enumerate(units):
        scheduler.add(key, priority, layer, 1)
    expected = sorted(range(len(units)), key=lambda key: (units[key], key))
    assert drain(scheduler) == expected


@given(
    st.lists(
        st.one_of(
            st.tuples(PRIORITIES, st.integers(0, 3), st.integers(1, 6)),
            st.tuples(st.just("pass"), st.integers(1, 6)),
            st.sampled_from(["pick", "settle", "remove", "passed"]),
        )
    )
)
def test_each_unit_is_waiting_or_in_flight_or_unknown(steps: list[object]) -> None:
    """At most three of them in flight, and no further one beside ten bytes or more."""
    scheduler, waiting, flying, passing = Scheduler(3, window_bytes=10), dict[int, int](), dict[int, int](), list[int]()

    def has_room() -> bool:
        return len(flying) + len(passing) < 3 and sum(flying.values()) + sum(passing) < 10

    for key, step in enumerate(steps):
        match step:
            case "pick":
                for picked in scheduler.pick():
                    assert has_room()
                    flying[picked] = waiting.pop(picked)
                assert not (waiting and has_room())
            case "settle" if flying:
                settled = min(flying)
                scheduler.settle(settled)
                del flying[settled]
            case "remove":
                victim = min(waiting, default=-1)
                assert scheduler.remove(victim) is (victim in waiting)
                waiting.pop(victim, None)
            case ("pass", int(nbytes)):
                may = not waiting and has_room()
                assert scheduler.pass_through(nbytes) is may
                passing += [nbytes] * may
            case "passed" if passing:
                scheduler.passed(passing.pop())
            case (TransferPriority() as priority, int(layer), int(nbytes)):
                scheduler.add(key, priority, layer, nbytes)
                waiting[key] = nbytes
            case _:
                pass  # nothing to settle
        scheduler.check()
        assert (len(scheduler), scheduler.in_flight) == (len(waiting), len(flying) + len(passing))
        assert scheduler.nbytes_in_flight == sum(flying.values()) + sum(passing)


@given(st.lists(st.tuples(PRIORITIES, st.integers(0, 9)), min_size=1, max_size=8), st.integers(2, 6), st.data())
def test_no_class_and_no_deep_layer_starves(
    units: list[tuple[TransferPriority, int]], ageing: int, data: st.DataObject
) -> None:
    """Whatever urgent and shallow work keeps coming, the first units leave within a bound."""
    scheduler = Scheduler(window=1, ageing=ageing)
    serial = len(units)
    for key, (priority, layer) in enumerate(units):
        scheduler.add(key, priority, layer, 1)
    left, passed = set(range(len(units))), dict.fromkeys(TransferPriority, 0)
    classes = {key: priority for key, (priority, _) in enumerate(units)}
    # A class gets one of every `ageing + 2` picks, and its oldest unit one of every `ageing` of those.
    for _ in range(len(units) * ageing * (ageing + 2)):
        newcomer = data.draw(PRIORITIES)
        scheduler.add(serial, newcomer, 0, 1)
        classes[serial] = newcomer
        serial += 1
        (key,) = scheduler.pick()
        scheduler.settle(key)
        left.discard(key)
        chosen = classes.pop(key)
        present = set(classes.values())
        for priority in TransferPriority:
            passed[priority] = 0 if priority is chosen or priority not in present else passed[priority] + 1
            assert passed[priority] <= ageing + 1
        if not left:
            return
    raise AssertionError(f"units {left} never left")


def test_critical_work_overtakes_what_is_queued_already() -> None:
    scheduler = Scheduler(window=1)
    for key in range(20):
        scheduler.add(key, LOW, 0, 1)
    assert scheduler.pick() == [0]
    scheduler.add(100, CRITICAL, 31, 1)
    scheduler.settle(0)
    assert scheduler.pick() == [100]


def test_low_work_gets_its_turn_among_critical_work_that_never_ends() -> None:
    scheduler = Scheduler(window=1)
    scheduler.add(-1, LOW, 0, 1)
    for key in range(AGEING_PICKS + 1):
        scheduler.add(key, CRITICAL, 0, 1)
    assert -1 in drain(scheduler)[: AGEING_PICKS + 1]


def test_misuse_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "QUEUED_UNITS_MAX", 2)
    scheduler = Scheduler()
    scheduler.add(1, HIGH, 0, 1)
    with pytest.raises(InvalidTransition):
        scheduler.add(1, LOW, 0, 1)
    with pytest.raises(InvalidTransition):
        scheduler.settle(1)
    with pytest.raises(InvalidTransition):
        scheduler.passed(1)
    scheduler.add(2, HIGH, 0, 1)
    with pytest.raises(TransferTooLarge):
        scheduler.add(3, HIGH, 0, 1)
    for wrong in ({"ageing": 1}, {"window": 0}, {"window_bytes": 0}):
        with pytest.raises(InvalidDescriptor):
            Scheduler(**wrong)


def test_the_queues_do_not_grow_with_units_that_were_removed() -> None:
    scheduler = Scheduler(window=1)
    scheduler.add(0, LOW, 0, 1)
    for key in range(1, 5_000):
        scheduler.add(key, LOW, 1, 1)
        scheduler.remove(key)
    scheduler.add(5_000, LOW, 2, 1)
    assert scheduler.pick() == [0]
    waiting = scheduler._classes[LOW]
    assert len(waiting.by_layer) + len(waiting.by_age) < 200

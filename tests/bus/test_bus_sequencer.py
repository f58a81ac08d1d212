"""What a subscriber can know from the numbers of events."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kv_bus.sequencer import NO_LIFE, Accept, GapDetected, OriginRestarted, Sequencer
from kv_core.errors import LocalProtocolError
from kv_core.ids import Incarnation, NodeId

ORIGIN = NodeId("origin")

arrivals = st.lists(
    st.tuples(st.sampled_from(["event", "head", "lost"]), st.integers(1, 4), st.integers(1, 25)), max_size=60
)


@given(arrivals, st.integers(0, 5))
@settings(deadline=None)
def test_every_number_up_to_the_highest_is_delivered_or_missing_exactly_once(
    run: list[tuple[str, int, int]], after: int
) -> None:
    sequencer = Sequencer(ORIGIN, Incarnation(1) if after else NO_LIFE, after)
    delivered: dict[int, list[int]] = {}
    missing: dict[int, list[int]] = {}
    highest: dict[int, int] = {1: after}
    life = 1 if after else 0
    for kind, incarnation, sequence in run:
        step = {"event": sequencer.event_seen, "head": sequencer.head_seen, "lost": sequencer.event_lost}[kind]
        effects = step(Incarnation(incarnation), sequence)
        if incarnation < life:
            assert effects == []  # S1
            continue
        if incarnation > life:
            restarted = [OriginRestarted(ORIGIN, Incarnation(incarnation), Incarnation(life))]
            assert effects[: 1 if life else 0] == (restarted if life else [])
            life = incarnation
        for effect in effects:
            match effect:
                case Accept(number):
                    assert kind == "event" and number == sequence
                    delivered.setdefault(life, []).append(number)
                case GapDetected(origin, found, first, last):
                    assert (origin, found) == (ORIGIN, life)
                    missing.setdefault(life, []).extend(range(first, last + 1))
                case OriginRestarted():
                    pass
        highest[life] = max(highest.get(life, 0), sequence)
        got, gone = delivered.get(life, []), missing.get(life, [])
        start = after + 1 if life == 1 else 1
        assert got == sorted(set(got))  # S2
        assert sorted(got + gone) == list(range(start, highest[life] + 1))  # S3, S4
    stats = sequencer.stats()
    assert stats.delivered == sum(map(len, delivered.values()))
    assert stats.missing == sum(map(len, missing.values()))


def test_a_gap_is_named_before_the_event_behind_it() -> None:
    sequencer = Sequencer(ORIGIN)
    life = Incarnation(7)
    assert sequencer.event_seen(life, 1) == [Accept(1)]
    assert sequencer.event_seen(life, 4) == [GapDetected(ORIGIN, life, 2, 3), Accept(4)]
    assert sequencer.event_seen(life, 3) == []
    assert sequencer.event_seen(life, 4) == []
    assert sequencer.head_seen(life, 6) == [GapDetected(ORIGIN, life, 5, 6)]
    assert sequencer.event_seen(Incarnation(8), 2) == [
        OriginRestarted(ORIGIN, Incarnation(8), life),
        GapDetected(ORIGIN, Incarnation(8), 1, 1),
        Accept(2),
    ]
    assert sequencer.event_seen(life, 9) == []
    assert (sequencer.stats().repeats, sequencer.stats().stale) == (2, 1)


def test_impossible_numbers_are_our_own_bug() -> None:
    with pytest.raises(LocalProtocolError):
        Sequencer(ORIGIN, NO_LIFE, after=3)
    with pytest.raises(LocalProtocolError):
        Sequencer(ORIGIN).event_seen(Incarnation(1), 0)

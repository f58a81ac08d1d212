"""The membership view against its four rules."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kv_core.errors import LocalProtocolError
from kv_core.ids import Incarnation, NodeId
from kv_services.membership.state import (
    Effect,
    Event,
    HeartbeatSeen,
    LeaveSeen,
    LinkLost,
    Liveness,
    MemberDied,
    MemberRecovered,
    MembershipView,
    MemberSuspected,
    MemberUp,
    TimePassed,
)

A, B = NodeId("a"), NodeId("b")
ONE, TWO = Incarnation(1), Incarnation(2)


def view() -> MembershipView:
    made = MembershipView(suspect_after_ns=100, dead_after_ns=300)
    made.add(A)
    made.add(B)
    return made


def test_a_member_that_never_spoke_is_unseen_however_long_it_is_silent() -> None:
    v = view()
    assert v.step(TimePassed(10_000)) == []
    assert v.members[A].liveness is Liveness.UNSEEN
    assert v.alive() == []


def test_silence_makes_a_suspect_then_a_death() -> None:
    v = view()
    assert v.step(HeartbeatSeen(0, A, ONE)) == [MemberUp(A, ONE)]
    assert v.step(TimePassed(99)) == []
    assert v.step(TimePassed(100)) == [MemberSuspected(A, ONE, 100)]
    assert v.alive() == [A]
    assert v.step(TimePassed(300)) == [MemberDied(A, ONE, "silent for 0 ms")]
    assert v.alive() == []


def test_a_suspect_that_speaks_recovers() -> None:
    v = view()
    v.step(HeartbeatSeen(0, A, ONE))
    v.step(TimePassed(150))
    assert v.step(HeartbeatSeen(160, A, ONE)) == [MemberRecovered(A, ONE)]
    assert v.step(TimePassed(200)) == []


def test_a_restart_quicker_than_a_heartbeat_is_seen() -> None:
    v = view()
    v.step(HeartbeatSeen(0, A, ONE))
    assert v.step(HeartbeatSeen(1, A, TWO)) == [MemberDied(A, ONE, "replaced by incarnation 2"), MemberUp(A, TWO)]


def test_a_dead_incarnation_never_comes_back() -> None:
    v = view()
    v.step(HeartbeatSeen(0, A, ONE))
    v.step(TimePassed(400))
    assert v.step(HeartbeatSeen(401, A, ONE)) == []
    assert not v.is_current(A, ONE)
    assert v.step(HeartbeatSeen(402, A, TWO)) == [MemberUp(A, TWO)]
    assert v.step(HeartbeatSeen(403, A, ONE)) == []
    assert v.is_current(A, TWO)


def test_a_lost_link_is_a_hint_not_a_verdict() -> None:
    v = view()
    v.step(HeartbeatSeen(0, A, ONE))
    assert v.step(LinkLost(10, A)) == [MemberSuspected(A, ONE, 10)]
    assert v.alive() == [A]


def test_strangers_are_not_counted() -> None:
    v = view()
    assert v.step(HeartbeatSeen(0, NodeId("stranger"), ONE)) == []
    assert NodeId("stranger") not in v.members


def test_thresholds_in_the_wrong_order_are_refused() -> None:
    with pytest.raises(LocalProtocolError):
        MembershipView(suspect_after_ns=300, dead_after_ns=300)


steps = st.one_of(
    st.builds(HeartbeatSeen, st.just(0), st.sampled_from([A, B]), st.integers(1, 4).map(Incarnation)),
    st.builds(LinkLost, st.just(0), st.sampled_from([A, B])),
    st.builds(TimePassed, st.just(0)),
    st.builds(LeaveSeen, st.sampled_from([A, B]), st.integers(1, 4).map(Incarnation)),
)


def _at(event: Event, now_ns: int) -> Event:
    match event:
        case HeartbeatSeen(_, node_id, incarnation):
            return HeartbeatSeen(now_ns, node_id, incarnation)
        case LinkLost(_, node_id):
            return LinkLost(now_ns, node_id)
        case TimePassed():
            return TimePassed(now_ns)
        case LeaveSeen():
            return event


@given(st.lists(st.tuples(steps, st.integers(0, 200)), max_size=60))
def test_every_life_begins_once_and_ends_at_most_once(run: list[tuple[Event, int]]) -> None:
    v, now = view(), 0
    born: set[tuple[NodeId, Incarnation]] = set()
    dead: set[tuple[NodeId, Incarnation]] = set()
    for event, pause in run:
        now += pause
        effects: list[Effect] = v.step(_at(event, now))
        v.check()
        for effect in effects:
            life = (effect.node_id, effect.incarnation)
            if isinstance(effect, MemberUp):
                assert life not in born
                assert all(life[1] > other for node, other in born if node == life[0])
                born.add(life)
            else:
                assert life in born
                assert life not in dead
                if isinstance(effect, MemberDied):
                    dead.add(life)
    for node in v.alive():
        life = (node, v.members[node].incarnation)
        assert life in born and life not in dead


def test_who_stood_still_himself_does_not_hold_it_against_the_others() -> None:
    v = MembershipView(suspect_after_ns=100, dead_after_ns=300, standstill_ns=60)
    for node in (A, B):
        v.add(node)
        v.step(HeartbeatSeen(0, node, ONE))
    v.step(TimePassed(20))
    assert v.step(TimePassed(10_000)) == []
    assert v.step(TimePassed(10_050)) == []
    # From here on silence counts again: B is as silent as before the pause, and 20 of it were before.
    died: dict[NodeId, int] = {}
    for now in range(10_060, 10_400, 20):
        v.step(HeartbeatSeen(now, A, ONE))
        died |= {e.node_id: now for e in v.step(TimePassed(now)) if isinstance(e, MemberDied)}
    assert died == {B: 10_280}


def test_who_hears_less_than_half_declares_nobody_dead_and_who_hears_half_does() -> None:
    nodes = [NodeId(f"n{i}") for i in range(4)]
    v = view()
    for node in nodes:
        v.add(node)
        v.step(HeartbeatSeen(0, node, ONE))
    v.step(HeartbeatSeen(950, nodes[0], ONE))
    # Two of five are heard: this one is cut off, and says of nobody that he is dead.
    effects = v.step(TimePassed(1_000))
    assert {type(e) for e in effects} == {MemberSuspected} and len(effects) == 3
    assert v.step(HeartbeatSeen(1_001, nodes[1], ONE)) == [MemberRecovered(nodes[1], ONE)]
    v.step(HeartbeatSeen(1_001, nodes[0], ONE))
    # Three of five are: the others are gone.
    died = [e for e in v.step(TimePassed(1_002)) if isinstance(e, MemberDied)]
    assert [e.node_id for e in died] == nodes[2:]


@given(
    last=st.lists(st.integers(0, 40), min_size=2, max_size=8),
    lasts_ns=st.integers(0, 2_000),
    again=st.lists(st.integers(0, 150), min_size=8, max_size=8),
    step_ns=st.integers(5, 40),
)
def test_who_was_cut_off_from_all_comes_back_alone_however_they_were_last_heard_and_are_heard_again(
    last: list[int], lasts_ns: int, again: list[int], step_ns: int
) -> None:
    v = MembershipView(suspect_after_ns=100, dead_after_ns=300)
    nodes = [NodeId(f"n{i}") for i in range(len(last))]
    healed_ns = 40 + lasts_ns
    heard_ns = {node: healed_ns + late_ns for node, late_ns in zip(nodes, again, strict=False)}
    for node, at_ns in zip(nodes, last, strict=True):
        v.add(node)
        v.step(HeartbeatSeen(at_ns, node, ONE))
    for now_ns in range(40, healed_ns + 600, step_ns):
        for node in nodes:
            if heard_ns[node] <= now_ns:
                v.step(HeartbeatSeen(now_ns, node, ONE))
        assert not [e for e in v.step(TimePassed(now_ns)) if isinstance(e, MemberDied)], now_ns
    assert all(member.liveness is Liveness.ALIVE for member in v.members.values())


def test_members_that_are_lost_together_with_their_connections_are_not_judged_one_by_one() -> None:
    nodes = [NodeId(f"n{i}") for i in range(4)]
    v = view()
    for number, node in enumerate(nodes):
        v.add(node)
        v.step(HeartbeatSeen(10 * number, node, ONE))
    effects = [effect for now_ns in range(100, 2_000, 10) for effect in v.step(TimePassed(now_ns))]
    assert {type(e) for e in effects} == {MemberSuspected} and len(effects) == 4


def test_a_majority_that_is_gone_for_good_is_dead_once_a_directory_lists_it_no_longer() -> None:
    """Silence alone would leave it suspected for ever: whoever hears so few may be the one that is cut off."""
    nodes = [NodeId(f"n{i}") for i in range(5)]
    unlisted: set[tuple[NodeId, Incarnation]] = set()
    v = view()
    v.is_unlisted = lambda node_id, incarnation: (node_id, incarnation) in unlisted
    for node in nodes:
        v.add(node)
        v.step(HeartbeatSeen(0, node, ONE))

    def died_until(end_ns: int, first_ns: int) -> dict[NodeId, int]:
        died = {}
        for now_ns in range(first_ns, end_ns, 10):
            v.step(HeartbeatSeen(now_ns, nodes[0], ONE))
            for effect in v.step(TimePassed(now_ns)):
                if isinstance(effect, MemberDied):
                    assert effect.cause.endswith("and listed no longer")
                    died[effect.node_id] = now_ns
        return died

    assert died_until(2_000, 10) == {}
    unlisted |= {(node, ONE) for node in nodes[1:4]}
    # A life of that name that is over says nothing of the one that is waited for.
    unlisted.add((nodes[4], TWO))
    # One comes back to the list at once: nobody is dead by a hiccup of the directory.
    assert died_until(2_200, 2_000) == {}
    unlisted.discard((nodes[3], ONE))
    assert died_until(2_320, 2_200) == {nodes[1]: 2_300, nodes[2]: 2_300}
    # One of two others is heard now, which is enough to judge by; but while so few were, no time counted against them.
    assert v.members[nodes[3]].liveness is v.members[nodes[4]].liveness is Liveness.SUSPECT
    assert v.step(HeartbeatSeen(2_330, nodes[3], ONE)) == [MemberRecovered(nodes[3], ONE)]


@given(
    last=st.lists(st.integers(0, 40), min_size=3, max_size=8),
    listed_again=st.lists(st.integers(0, 280), min_size=8, max_size=8),
)
def test_an_emptied_directory_alone_has_nobody_declared_dead_who_is_listed_again_in_time(
    last: list[int], listed_again: list[int]
) -> None:
    """Everybody is silent and unlisted, and comes back to the list before `dead_after`: nobody dies while cut off."""
    v = MembershipView(suspect_after_ns=100, dead_after_ns=300)
    nodes = [NodeId(f"n{i}") for i in range(len(last))]
    back_ns = {node: 200 + late_ns for node, late_ns in zip(nodes, listed_again, strict=False)}
    now = 0
    v.is_unlisted = lambda node_id, incarnation: 200 <= now < back_ns[node_id]
    for node, at_ns in zip(nodes, last, strict=True):
        v.add(node)
        v.step(HeartbeatSeen(at_ns, node, ONE))
    for now in range(40, 2_000, 10):
        assert not [e for e in v.step(TimePassed(now)) if isinstance(e, MemberDied)], now


def test_who_was_not_heard_in_the_first_dead_after_had_its_time_unless_this_process_stood_still_in_it() -> None:
    v = MembershipView(suspect_after_ns=100, dead_after_ns=300, standstill_ns=150)
    v.add(A)
    for now_ns in (1_000, 1_100, 1_200, 1_299):
        v.step(TimePassed(now_ns))
        assert not v.listened_enough
    v.step(TimePassed(9_000))
    assert not v.listened_enough, "nobody could be heard in a standstill"
    v.step(TimePassed(9_001))
    assert v.listened_enough

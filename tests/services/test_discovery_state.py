"""Who is a member, from what is listed and who lives, without a service or a clock."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kv_core.errors import LocalProtocolError
from kv_core.ids import Incarnation, NodeId
from kv_services.config import NodeConfig, Role
from kv_services.membership.discovery_state import (
    AddMember,
    Directory,
    Event,
    LifeBegan,
    LifeEnded,
    Listing,
    ListingLost,
    RecordGone,
    RecordPut,
    RemoveMember,
)
from kv_services.membership.records import NodeRecord, RecordError, decode_record, encode_record, record_of
from kv_services.membership.state import HeartbeatSeen, Liveness, MembershipView, TimePassed

NAMES = ("a", "b", "c", "d")
IN_FILE = frozenset({NodeId("b")})


def record(name: str, incarnation: int = 1, port: int = 1000) -> NodeRecord:
    return NodeRecord(name, Role.DECODE, "127.0.0.1", port, port + 1, port + 2, incarnation)


def directory() -> Directory:
    return Directory(NodeId("a"), IN_FILE)


def test_a_listed_process_is_added_once_and_again_only_at_other_addresses() -> None:
    here = directory()
    assert here.step(RecordPut(record("c"))) == [AddMember(record("c"))]
    assert here.step(RecordPut(record("c", incarnation=2))) == []
    assert here.step(RecordPut(record("c", 3, port=2000))) == [AddMember(record("c", 3, port=2000))]


def test_a_record_of_a_former_life_moves_nobody_back() -> None:
    here = directory()
    here.step(RecordPut(record("c", 5, port=2000)))
    assert here.step(RecordPut(record("c", 4, port=1000))) == []
    assert here.members() == [record("c", 5, port=2000)]


def test_an_emptied_service_takes_nobody_away_who_lives() -> None:
    here = directory()
    for name in ("c", "d"):
        here.step(RecordPut(record(name)))
    here.step(LifeBegan(NodeId("c")))
    assert here.step(Listing(())) == [RemoveMember(NodeId("d"))]
    assert here.step(LifeEnded(NodeId("c"))) == [RemoveMember(NodeId("c"))]


def test_a_life_is_unlisted_from_when_its_record_goes_until_another_comes_or_the_service_is_lost() -> None:
    here, c = directory(), NodeId("c")
    assert not here.is_unlisted(c, Incarnation(1))
    here.step(RecordPut(record("c")))
    here.step(LifeBegan(c))
    for gone in (RecordGone(c), Listing((record("d"),))):
        here.step(gone)
        assert here.is_unlisted(c, Incarnation(1)) and not here.is_unlisted(c, Incarnation(2))
        here.step(RecordPut(record("c")))
        assert not here.is_unlisted(c, Incarnation(1))
    here.step(RecordGone(c))
    here.step(ListingLost())
    assert not here.is_unlisted(c, Incarnation(1)) and here.members()[0] == record("c")
    # What a listing never had before is not missing from it; what it had when it could be read last is.
    here.step(Listing((record("d"),)))
    assert not here.is_unlisted(c, Incarnation(1))
    here.step(ListingLost())
    here.step(Listing(()))
    assert [one.node for one in here.members()] == ["c"], "who lives stays a member, whatever is listed"


def test_a_member_that_dies_stays_listed_and_is_waited_for() -> None:
    here = directory()
    here.step(RecordPut(record("c")))
    here.step(LifeBegan(NodeId("c")))
    assert here.step(LifeEnded(NodeId("c"))) == []
    assert here.step(RecordGone(NodeId("c"))) == [RemoveMember(NodeId("c"))]


names = st.sampled_from(NAMES)
records = st.builds(record, names, st.integers(1, 5), st.sampled_from((1000, 2000)))
events = st.one_of(
    st.builds(RecordPut, records),
    st.builds(RecordGone, names.map(NodeId)),
    st.builds(LifeBegan, names.map(NodeId)),
    st.builds(LifeEnded, names.map(NodeId)),
    st.lists(records, max_size=4, unique_by=lambda r: r.node_id).map(lambda rs: Listing(tuple(rs))),
)


@given(st.lists(events, max_size=40))
def test_after_any_history_a_whole_listing_makes_the_view_the_truth(history: list[Event]) -> None:
    here, members, alive = directory(), set[NodeId](), set[NodeId]()
    for event in [*history, *(LifeEnded(NodeId(name)) for name in NAMES), Listing((record("a"), record("d", 9)))]:
        match event:
            case LifeBegan(node_id):
                alive.add(node_id)
            case LifeEnded(node_id):
                alive.discard(node_id)
            case _:
                pass
        for effect in here.step(event):
            match effect:
                case AddMember(added):
                    members.add(added.node)
                case RemoveMember(node_id):
                    assert node_id not in alive | IN_FILE
                    members.remove(node_id)
        here.check()
        assert {r.node for r in here.members()} == members
    assert members - IN_FILE == {NodeId("d")}


def test_a_member_that_went_and_came_back_does_not_bring_its_dead_life_with_it() -> None:
    view, node = MembershipView(10, 20), NodeId("c")
    view.add(node)
    view.step(HeartbeatSeen(0, node, Incarnation(7)))
    with pytest.raises(LocalProtocolError):
        view.remove(node)
    view.step(TimePassed(100))
    view.remove(node)
    assert node not in view.members
    view.add(node)
    assert view.step(HeartbeatSeen(101, node, Incarnation(7))) == []
    assert view.members[node].liveness is Liveness.DEAD
    view.step(HeartbeatSeen(102, node, Incarnation(8)))
    assert view.members[node].liveness is Liveness.ALIVE
    view.check()


def test_a_record_comes_back_as_it_went() -> None:
    node = NodeConfig(id="n", role=Role.PREFILL, bus_port=1, events_port=2, http_port=3)
    one = record_of(node, Incarnation(5))
    assert decode_record("n", encode_record(one), allow_remote=False) == one
    assert one.config() == node


@pytest.mark.parametrize(
    ("name", "value", "reason"),
    [
        ("n", b"", "truncated"),
        ("n", b"\xff\xfe", "malformed"),
        ("n", b"[]", "object"),
        ("n", b"x" * 5000, "at most"),
        ("m", encode_record(record("n")), "it names 'n'"),
        ("n", encode_record(record("n")).replace(b"127.0.0.1", b"10.0.0.9"), "allow_remote"),
        ("n", encode_record(record("n")).replace(b"127.0.0.1", b"0.0.0.0"), "one host"),
        ("n", encode_record(record("n")).replace(b"127.0.0.1", b"somewhere"), "no IP address"),
        ("n", encode_record(record("n")).replace(b'"decode"', b'"king"'), "king"),
        ("n", encode_record(record("n")).replace(b":1000", b":0"), "bus_port"),
    ],
)
def test_what_is_no_record_is_refused_with_the_reason(name: str, value: bytes, reason: str) -> None:
    with pytest.raises(RecordError, match=reason):
        decode_record(name, value, allow_remote=False)

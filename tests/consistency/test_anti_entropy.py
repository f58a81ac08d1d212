"""Lost messages are found and fetched, once, in bounded answers, and cheaply."""

import msgspec

from kv_consistency.effects import ReportResync, SendTo
from kv_consistency.events import GapNoticed
from kv_consistency.messages import Digest, RangeReply, RangeRequest, SyncPage, SyncRequest, UpdateBatch
from kv_consistency.replica import ReplicaConfig
from kv_consistency.version_vector import Dot
from kv_core.ids import NodeId
from tests.consistency.helpers_consistency import MS, Cluster, Flight, block, life, node, readable_state

ENCODE = msgspec.msgpack.encode


def is_update(flight: Flight) -> bool:
    return isinstance(flight.message, UpdateBatch)


def sent(cluster: Cluster, name: str, kind: type) -> list[SendTo]:
    given = cluster.members[node(name)].given
    return [effect for effect in given if isinstance(effect, SendTo) and isinstance(effect.message, kind)]


def test_each_gap_is_asked_for_exactly_once() -> None:
    """Events 1 to 3 are lost and 4 comes; later 7 is lost."""
    cluster = Cluster("a", "b")
    for i in range(3):
        cluster.store("a", [i])
    cluster.lose(is_update)
    cluster.store("a", [3])
    cluster.deliver_all()
    cluster.advance(30 * MS)
    cluster.deliver_all()
    asked = [effect.message for effect in sent(cluster, "b", RangeRequest)]
    assert asked == [RangeRequest(life("a"), 1, 3)]
    assert cluster.manager("b").find_prefix_match([block(i) for i in range(4)]) is not None
    for i in range(4, 8):
        cluster.store("a", [i])
        if i == 6:
            cluster.lose(lambda flight: is_update(flight) and flight.message.head == 7)  # type: ignore[union-attr]
    cluster.deliver_all()
    cluster.settle(rounds=10)
    asked = [effect.message for effect in sent(cluster, "b", RangeRequest)]
    assert asked == [RangeRequest(life("a"), 1, 3), RangeRequest(life("a"), 7, 7)]
    assert readable_state(cluster.members[node("a")]) == readable_state(cluster.members[node("b")])


def test_reordering_alone_asks_for_nothing() -> None:
    cluster = Cluster("a", "b")
    for i in range(64):
        cluster.store("a", [i])
    cluster.flights.reverse()
    cluster.deliver_all()
    cluster.advance(10 * MS)
    assert sent(cluster, "b", RangeRequest) == []
    assert cluster.manager("b").vector().covers(Dot(life("a"), 64))


def test_an_unanswered_request_goes_to_another_peer_that_has_it() -> None:
    cluster = Cluster("a", "b", "c")
    cluster.store("a", [0])
    cluster.store("a", [1])
    cluster.lose(lambda flight: is_update(flight) and flight.receiver == "c" and flight.message.head == 1)  # type: ignore[union-attr]
    cluster.deliver_all()
    for _ in range(100):
        cluster.advance(50 * MS)
        while cluster.flights:
            cluster.lose(lambda flight: flight.sender == "a")
            if cluster.flights:
                cluster.deliver()
    assert {effect.peer for effect in sent(cluster, "c", RangeRequest)} == {"a", "b"}
    assert cluster.manager("c").vector().covers(Dot(life("a"), 2))


def test_a_peer_that_says_what_it_has_but_never_gives_it_is_not_asked_for_ever() -> None:
    cluster = Cluster("a", "b", "c")
    cluster.store("a", [0])
    cluster.lose(lambda flight: is_update(flight) and flight.receiver == "c")
    asking = cluster.manager("c")._replica.anti_entropy
    for _ in range(200):
        while cluster.flights:
            flight = cluster.flights[0]
            known = asking.known(NodeId("b"))
            told = isinstance(flight.message, Digest) and flight.sender == "a"
            if flight.receiver != "c" or told or known is None or not known.covers(Dot(life("a"), 1)):
                cluster.deliver()
            else:
                cluster.flights.pop(0)  # b has said that it has the update: from then on c hears only what a says
        cluster.advance(50 * MS)
    asked = [effect.peer for effect in sent(cluster, "c", RangeRequest)]
    assert set(asked[-4:]) == {"a", "b"}
    cluster.settle(rounds=60)
    assert cluster.manager("c").vector().covers(Dot(life("a"), 1))


def test_a_hint_of_the_bus_compares_at_once() -> None:
    cluster = Cluster("a", "b")
    cluster.store("a", [0])
    cluster.lose(is_update)
    cluster.flights.clear()
    cluster.step("b", GapNoticed(cluster.at(node("b")), NodeId("a")))
    cluster.step("b", GapNoticed(cluster.at(node("b")), NodeId("nobody")))
    cluster.now_ns += 21 * MS
    cluster.deliver_all()
    cluster.advance(21 * MS)
    cluster.deliver_all()
    assert cluster.manager("b").vector().covers(Dot(life("a"), 1))


def test_catching_up_on_ten_thousand_updates_sends_little_more_than_their_own_bytes() -> None:
    cluster = Cluster("a", "b")
    cluster.settle(rounds=4)
    own = 0
    for i in range(10_000):
        cluster.store("a", [i])
        own += len(ENCODE(cluster.flights.pop().message))
    largest = spent = 0
    for _ in range(60):
        while cluster.flights:
            size = len(ENCODE(cluster.flights[0].message))
            spent += size
            if isinstance(cluster.flights[0].message, RangeReply):
                largest = max(largest, size)
            cluster.deliver()
        cluster.advance(50 * MS)
    assert cluster.manager("b").vector().covers(Dot(life("a"), 10_000))
    assert spent <= 1.3 * own
    assert largest <= cluster.config.reply_bytes_max
    assert cluster.manager("b").stats().sessions == 1, "the first one, at the start"


def test_idle_replicas_send_next_to_nothing() -> None:
    cluster = Cluster("a", "b", "c")
    for name in ("a", "b", "c"):
        for i in range(20):
            cluster.store(name, [i])
    cluster.settle(rounds=30)
    sizes = []
    for _ in range(20):
        cluster.advance(50 * MS)
        sizes += [len(ENCODE(flight.message)) for flight in cluster.flights]
        cluster.deliver_all()
    assert sizes and max(sizes) < 60


def test_where_no_log_reaches_back_the_state_is_taken_in_bounded_pages() -> None:
    config = ReplicaConfig(log_bytes_max=20_000, reply_bytes_max=8_000)
    cluster = Cluster("a", "b", config=config)
    for i in range(1_500):
        cluster.store("a", range(i * 8, i * 8 + 8), start=0)
    cluster.lose(is_update)
    largest = pages = 0
    for _ in range(60):
        while cluster.flights:
            message = cluster.flights[0].message
            if isinstance(message, SyncPage | RangeReply):
                largest = max(largest, len(ENCODE(message)))
                pages += isinstance(message, SyncPage)
            cluster.deliver()
        cluster.advance(50 * MS)
    cluster.check()
    assert readable_state(cluster.members[node("a")]) == readable_state(cluster.members[node("b")])
    assert cluster.manager("b").stats().claims == 12_000
    assert pages > 20
    assert largest < 8_000 + 256 + 100 * 32, "a page ends with the part of a shelf that filled it"
    states = [e.state for e in cluster.members[node("b")].given if isinstance(e, ReportResync)]
    assert states[-2:] == ["started", "done"]


def test_the_server_goes_on_while_its_state_is_taken() -> None:
    """Claims change under the pages: what was sent, what was not sent yet, and what is sent a second time."""
    config = ReplicaConfig(log_bytes_max=30_000, reply_bytes_max=4_000)
    cluster = Cluster("a", "b", config=config)
    for i in range(1_000):
        cluster.store("a", range(i * 8, i * 8 + 8), start=0)
    cluster.lose(is_update)
    i = 0
    for _ in range(80):
        while cluster.flights:
            if isinstance(cluster.flights[0].message, SyncRequest):
                cluster.remove("a", range(i * 16, i * 16 + 16))
                cluster.store("a", range(i * 16 + 4, i * 16 + 8), start=0)
                cluster.store("a", range(20_000 + i, 20_003 + i), start=0)
                i += 1
            cluster.deliver()
        cluster.check()
        cluster.advance(50 * MS)
    assert i > 20
    assert readable_state(cluster.members[node("a")]) == readable_state(cluster.members[node("b")])


def test_a_synchronisation_whose_server_dies_goes_on_with_another() -> None:
    config = ReplicaConfig(log_bytes_max=3_000, reply_bytes_max=2_000)
    cluster = Cluster("a", "b", "c", config=config)
    for i in range(600):
        cluster.store("c", range(i * 8, i * 8 + 8), start=0)
        cluster.deliver_all()
    cluster.start("d")
    for _ in range(8):
        cluster.deliver()
    session = cluster.manager("d")._replica.session
    assert session is not None and session.started
    cluster.kill(session.peer)
    cluster.settle(rounds=80)
    assert cluster.manager("d").ready
    states = [readable_state(member) for member in cluster.members.values()]
    assert all(state == states[0] for state in states)
    cluster.check()


def test_replicas_that_forgot_each_others_digests_find_together_again() -> None:
    cluster = Cluster("a", "b")
    cluster.settle(rounds=10)
    for i in range(20):
        cluster.store("a", [i])
        cluster.advance(210 * MS)
        cluster.flights.clear()
    cluster.settle(rounds=20)
    assert cluster.manager("b").lag_of(NodeId("a")) == 0
    assert cluster.manager("a").lag_of(NodeId("b")) == 0
    assert cluster.manager("a").stats().log_bytes == 0, "all is known to be everywhere, so the log is cut"


def test_a_digest_against_what_is_forgotten_is_answered_in_full() -> None:
    cluster = Cluster("a", "b")
    cluster.store("a", [0])
    cluster.settle(rounds=10)
    stamp = cluster.manager("a").clock.last
    odd = Digest(10_000, 9_999, (), stamp.wall_ns, stamp.logical)
    cluster.flights = [Flight(node("a"), node("b"), odd, life("a").incarnation)]
    cluster.deliver()
    (answer,) = cluster.flights
    assert isinstance(answer.message, Digest)
    assert answer.message.base == 0 and [reach.n for reach in answer.message.seen] == [1]

"""A request that ended stays ended, also for a replica that missed the end and asks those who have forgotten it."""

import pytest

from kv_consistency.entries import EntryTable, Outcome
from kv_consistency.errors import NotFoundError
from kv_consistency.events import PeerJoined
from kv_consistency.messages import SyncPage
from kv_consistency.replica import ReplicaConfig
from kv_consistency.update import UNOWNED, EntryWritten, OwnerEpoch
from kv_consistency.version_vector import CausalToken, Dot, VersionVector
from kv_core.ids import RequestId
from tests.consistency.helpers_consistency import MS, Cluster, life, member_life, node

R = RequestId("r")
RETIRE_AFTER_NS = 5_000 * MS


def cluster_in_which_c_missed_an_end() -> Cluster:
    """Request "r" is known to "a", "b" and "c"; then "c" is cut off, "b" begins a new life that never met "c", and "a"
    ends the request. Nobody is told of any death."""
    cluster = Cluster("a", "b", "c", config=ReplicaConfig(retire_after_ns=RETIRE_AFTER_NS))
    cluster.store("c", [1])
    own(cluster, R)
    cluster.settle(rounds=6)
    assert cluster.manager("c").entry(R).seq_len == 8
    cluster.kill("b", tell=False)
    cluster.start("b", 2, join=False)
    meet(cluster, "a", "b")
    without_c(cluster, 6)
    cluster.manager("a").end_request(R, at=cluster.at(node("a")))
    cluster.drain("a")
    return cluster


def meet(cluster: Cluster, one: str, two: str) -> None:
    """Membership tells two nodes of each other."""
    for name, other in ((one, two), (two, one)):
        peer = node(other)
        cluster.step(name, PeerJoined(cluster.at(node(name)), peer, member_life(cluster, peer)))


def own(cluster: Cluster, request_id: RequestId) -> None:
    at = cluster.at(node("a"))
    cluster.manager("a").take_ownership(request_id, at=at)
    cluster.manager("a").register_update(request_id, 8, [node("a")], at=at)
    cluster.drain("a")


def without_c(cluster: Cluster, rounds: int) -> None:
    for _ in range(rounds):
        cluster.lose(lambda flight: "c" in (flight.sender, flight.receiver))
        cluster.deliver_all()
        cluster.advance(100 * MS)
    cluster.lose(lambda flight: "c" in (flight.sender, flight.receiver))


def entries_at(cluster: Cluster, name: str) -> int:
    return cluster.manager(name).stats().entries


def test_an_end_is_kept_for_a_life_that_was_heard_of_and_not_admitted_yet() -> None:
    cluster = cluster_in_which_c_missed_an_end()
    without_c(cluster, 30)
    assert entries_at(cluster, "b") == 1, "c may still write to the request"
    meet(cluster, "b", "c")
    cluster.settle(rounds=60)
    assert [entries_at(cluster, name) for name in "abc"] == [0, 0, 0]


def test_a_stranger_that_is_never_admitted_does_not_keep_ends_for_ever() -> None:
    cluster = cluster_in_which_c_missed_an_end()
    without_c(cluster, 1 + RETIRE_AFTER_NS // (100 * MS) + 12)
    assert entries_at(cluster, "b") == 0


def test_whoever_missed_an_end_learns_of_it_from_a_replica_that_has_forgotten_it() -> None:
    cluster = cluster_in_which_c_missed_an_end()
    end = Dot(life("a"), cluster.manager("a").vector()[life("a")])
    without_c(cluster, 70)
    assert entries_at(cluster, "b") == 0 and entries_at(cluster, "c") == 1
    own(cluster, RequestId("another"))
    without_c(cluster, 2)
    # Only b can be asked now, and its log begins with the state that it took from a.
    meet(cluster, "b", "c")
    for _ in range(40):
        cluster.lose(lambda flight: "a" in (flight.sender, flight.receiver))
        cluster.deliver_all()
        cluster.advance(50 * MS)
    cluster.manager("c").check()
    assert cluster.manager("c").vector().covers(end)
    with pytest.raises(NotFoundError):
        cluster.manager("c").verify_readable(R, 0, after=CausalToken((end,)))
    assert cluster.manager("c").entry(RequestId("another")).seq_len == 8, "what goes on is there"


def test_an_end_that_is_forgotten_between_two_pages_is_not_missed() -> None:
    """The server sends the entry alive, hears of its end and forgets it before its last page."""
    cluster = Cluster("a", "b", config=ReplicaConfig(reply_bytes_max=400))
    for i in range(40):
        own(cluster, RequestId(f"r{i}"))
    cluster.settle(rounds=6)
    cluster.start("n", join=False)
    cluster.step("n", PeerJoined(cluster.at(node("n")), node("a"), member_life(cluster, node("a"))))
    pages = 0
    while pages < 4:
        pages += isinstance(cluster.flights[0].message, SyncPage)
        cluster.deliver()
    session = cluster.manager("n")._replica.session
    assert session is not None and session.entries and session.target is None, "it is under way"
    for i in range(40):
        cluster.manager("a").end_request(RequestId(f"r{i}"), at=cluster.at(node("a")))
    # The news of the ends does not reach it, and nobody waits for it.
    cluster.manager("a").drain()
    state = cluster.manager("a")._replica.state
    state.entries.collect(state.buffer.vector())
    assert entries_at(cluster, "a") == 0
    cluster.settle(rounds=10)
    assert cluster.manager("n").ready
    assert cluster.manager("n").vector()[life("a")] == cluster.manager("a").vector()[life("a")]
    assert [i for i in range(40) if cluster.manager("n")._replica.state.entries.get(RequestId(f"r{i}"))] == []


def test_an_end_is_kept_for_a_newcomer_that_takes_the_state_before_it_is_admitted() -> None:
    cluster = Cluster("a", "b")
    own(cluster, R)
    cluster.settle(rounds=6)
    cluster.start("n", join=False)
    cluster.step("n", PeerJoined(cluster.at(node("n")), node("a"), member_life(cluster, node("a"))))
    cluster.deliver()
    cluster.lose(lambda flight: True)
    cluster.manager("a").end_request(R, at=cluster.at(node("a")))
    cluster.drain("a")
    for _ in range(30):
        cluster.lose(lambda flight: "n" in (flight.sender, flight.receiver))
        cluster.deliver_all()
        cluster.advance(100 * MS)
    assert entries_at(cluster, "a") == 1


def test_a_late_write_to_a_request_whose_end_is_forgotten_is_lost() -> None:
    table = EntryTable()
    owner = OwnerEpoch(2, life("a"))
    table.apply(Dot(life("a"), 1), 0, 0, EntryWritten(R, owner, 0, 5, ended=True), 0)
    covered = VersionVector({life("a"): 1})
    table.collect(covered)
    assert table.collected() == covered and table.forgotten(R)
    for epoch in (UNOWNED, OwnerEpoch(1, life("b")), owner):
        assert table.apply(Dot(life("b"), 1), 9, 0, EntryWritten(R, epoch, 0, 99), 0) is Outcome.LOST
    assert table.get(R) is None
    later = OwnerEpoch(3, life("b"))
    assert table.apply(Dot(life("b"), 2), 9, 0, EntryWritten(R, later, 0, 0), 0) is Outcome.WRITTEN
    table.check()


def test_a_newcomer_does_not_write_to_a_request_that_ended_before_it_came() -> None:
    """It is asked late, under an epoch of the past: what it took from its peers says nothing of the request."""
    cluster = Cluster("a", "b")
    own(cluster, R)
    epoch = cluster.manager("a").entry(R).epoch
    token = cluster.manager("a").token(R)
    cluster.manager("a").end_request(R, at=cluster.at(node("a")))
    cluster.drain("a")
    cluster.settle(rounds=60)
    cluster.start("n")
    cluster.settle(rounds=10)
    newcomer = cluster.manager("n")
    newcomer._replica.require(token)
    with pytest.raises(NotFoundError):
        newcomer.register_update(R, 4, [node("n")], epoch=epoch, after=token, at=cluster.at(node("n")))
    with pytest.raises(NotFoundError):
        newcomer.verify_readable(R, 0, after=token, epoch=epoch)

"""Births and deaths: sticky, passed on, and in the end forgotten."""

import pytest

from kv_consistency.effects import Effect, HolderDropped, ReplicaReady, RestartReplica
from kv_consistency.errors import ReplicaFencedError, StaleReplicaError
from kv_consistency.events import LocalStore, PeerDied, PeerJoined, Received, Tick
from kv_consistency.lives import Lives
from kv_consistency.messages import Digest, UpdateBatch
from kv_consistency.version_vector import Reach
from kv_core.ids import Incarnation, NodeId, RequestId
from tests.consistency.helpers_consistency import MS, Cluster, Flight, block, life, node, readable_state, run_of


def test_death_is_sticky() -> None:
    cluster = Cluster("a", "b")
    cluster.store("a", [0, 1])
    under_way = list(cluster.flights)
    cluster.step("b", PeerDied(cluster.at(node("b")), NodeId("a"), Incarnation(1)))
    cluster.flights = under_way
    cluster.deliver_all()
    assert cluster.manager("b").find_prefix_match([block(0)]) is None
    assert cluster.step("b", PeerJoined(cluster.at(node("b")), NodeId("a"), Incarnation(1))) == []
    assert cluster.step("b", PeerDied(cluster.at(node("b")), NodeId("a"), Incarnation(1))) == []
    cluster.check()


def test_a_newer_life_ends_the_one_before_without_being_told() -> None:
    cluster = Cluster("a", "b")
    cluster.store("a", [0])
    cluster.deliver_all()
    effects = cluster.step("b", PeerJoined(cluster.at(node("b")), NodeId("a"), Incarnation(2)))
    assert any(HolderDropped(life("a")) in getattr(effect, "changes", ()) for effect in effects)
    assert cluster.manager("b").find_prefix_match([block(0)]) is None
    assert cluster.step("b", PeerJoined(cluster.at(node("b")), NodeId("a"), Incarnation(1))) == []


def restarts(effects: list[Effect]) -> list[Effect]:
    return [effect for effect in effects if isinstance(effect, RestartReplica)]


@pytest.mark.parametrize("how", ["told", "later life", "its own dots", "digest"])
def test_a_life_that_the_cluster_holds_for_over_refuses_everything(how: str) -> None:
    cluster = Cluster("a", "b")
    at = cluster.at(node("a"))
    match how:
        case "told":
            effects = cluster.step("a", PeerDied(at, NodeId("a"), Incarnation(1)))
        case "later life":
            effects = cluster.step("a", PeerJoined(at, NodeId("a"), Incarnation(2)))
        case "its own dots":
            effects = cluster.step("a", Received(at, NodeId("a"), UpdateBatch(life("a"), 7, ())))
        case _:
            seen = (Reach(life("a", 3), 1),)
            effects = cluster.step("a", Received(at, NodeId("b"), Digest(999, 0, seen, 0, 0, True)))
    assert len(restarts(effects)) == 1
    with pytest.raises(ReplicaFencedError):
        cluster.step("a", Tick(at))
    with pytest.raises(ReplicaFencedError):
        cluster.manager("a").verify_readable(RequestId("r"), 0)


def test_an_older_life_of_this_node_does_not_end_this_one() -> None:
    cluster = Cluster("b")
    cluster.start("a", 2)
    cluster.settle(rounds=4)
    assert cluster.step("a", PeerDied(cluster.at(node("a")), NodeId("a"), Incarnation(1))) == []
    cluster.store("a", [0])


def test_who_is_over_is_passed_on_to_newcomers() -> None:
    """D joins after A's death and is never told of it by membership."""
    cluster = Cluster("a", "b", "c")
    cluster.store("a", [0])
    cluster.deliver_all()
    cluster.kill("a")
    cluster.start("d")
    cluster.settle(rounds=20)
    assert cluster.manager("d").find_prefix_match([block(0)]) is None
    assert cluster.manager("d")._replica.state.lives.is_over(life("a"))


def test_a_life_that_is_over_is_forgotten_once_all_have_the_same_of_it() -> None:
    cluster = Cluster("a", "b", "c")
    for incarnation in range(2, 12):
        cluster.store("a", [0])
        cluster.manager("a").raise_scopes([b"a scope!"])
        cluster.drain("a")
        cluster.deliver_all()
        cluster.kill("a")
        cluster.start("a", incarnation)
        cluster.deliver_all()
    cluster.settle(rounds=300)
    for member in cluster.members.values():
        assert list(member.manager.vector()) == []
        assert member.manager.stats().origins == 0
        assert member.manager._replica.state.lives.over() == []
        (row,) = {raised.scope: raised for raised in member.manager.raises()}.values()
        assert row.scope == b"a scope!"
        assert len(member.manager.raises()) == 10, "purges outlive who made them"
    cluster.check()


def test_what_only_some_have_of_a_dead_life_spreads_before_it_is_forgotten() -> None:
    cluster = Cluster("a", "b", "c")
    token = cluster.manager("a").raise_scopes([b"a scope!"])
    cluster.drain("a")
    cluster.lose(lambda flight: flight.receiver == "c")
    cluster.deliver_all()
    cluster.kill("a")
    cluster.settle(rounds=300)
    assert len(cluster.manager("c").raises()) == 1
    assert cluster.manager("c").vector() == cluster.manager("b").vector()
    cluster.manager("c")._replica.require(token)
    assert readable_state(cluster.members[node("b")]) == readable_state(cluster.members[node("c")])


def test_a_departed_member_no_longer_holds_back_truncation() -> None:
    cluster = Cluster("a", "b", "c")
    cluster.settle(rounds=10)
    for i in range(50):
        cluster.store("a", [i])
        cluster.lose(lambda flight: flight.receiver == "c")
        cluster.deliver_all()
    for _ in range(60):
        cluster.lose(lambda flight: "c" in (flight.sender, flight.receiver))
        cluster.deliver_all()
        cluster.advance(50 * MS)
    assert cluster.manager("a").stats().log_bytes > 0
    cluster.kill("c")
    cluster.settle(rounds=60)
    assert cluster.manager("a").stats().log_bytes == 0
    assert cluster.manager("a").stats().truncated == 0


def test_a_newcomer_answers_nothing_before_it_has_synchronised() -> None:
    cluster = Cluster("a", "b")
    cluster.store("a", [0])
    cluster.deliver_all()
    cluster.start("c")
    assert not cluster.manager("c").ready
    with pytest.raises(StaleReplicaError):
        cluster.manager("c").verify_readable(RequestId("r"), 0)
    with pytest.raises(StaleReplicaError):
        cluster.step("c", LocalStore(cluster.at(node("c")), (run_of([1]),)))
    cluster.settle(rounds=4)
    assert cluster.manager("c").ready
    ready = [effect for effect in cluster.members[node("c")].given if isinstance(effect, ReplicaReady)]
    assert len(ready) == 1


def test_replicas_that_all_begin_become_ready_without_waiting_for_each_other() -> None:
    cluster = Cluster("a", "b", "c", "d", join=False)
    for name in cluster.members:
        cluster.introduce(name)
    for _ in range(3):
        cluster.deliver_all()
        cluster.advance(10 * MS)
    assert all(member.manager.ready for member in cluster.members.values())


def test_a_node_that_is_alone_is_ready() -> None:
    cluster = Cluster("a")
    cluster.store("a", [0])
    assert cluster.manager("a").ready


def test_messages_of_a_former_life_are_left_alone() -> None:
    cluster = Cluster("a", "b")
    cluster.step("b", PeerJoined(cluster.at(node("b")), NodeId("a"), Incarnation(2)))
    message = UpdateBatch(life("a", 2), 3, ())
    cluster.flights = [Flight(node("a"), node("b"), message, Incarnation(1))]
    assert cluster.deliver() == []
    assert cluster.manager("b").lag().get(life("a", 2), 0) == 0


def test_lives_keep_to_their_invariants() -> None:
    lives = Lives()
    assert lives.seen(life("a", 2), 0) is None
    assert lives.joined(life("a", 2)) and not lives.joined(life("a", 2))
    assert not lives.joined(life("a", 1)), "an older life is over"
    assert lives.seen(life("a", 3), 5) == life("a", 2)
    assert lives.members == {} and lives.over() == [life("a", 2)] and lives.over_since(life("a", 2)) == 5
    assert lives.died(life("a", 3), 6) and not lives.died(life("a", 3), 7)
    assert lives.seen(life("a", 4), 8) is None, "the life before was over already"
    lives.check()
    lives.retire(NodeId("a"), Incarnation(4))
    assert lives.over() == [] and lives.is_over(life("a", 3)) and not lives.is_over(life("a", 4))
    lives.check()

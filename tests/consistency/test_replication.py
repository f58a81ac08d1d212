"""Replication end to end over a cluster without a network."""

from kv_consistency.effects import ClaimsChanged, HolderDropped
from kv_core.ids import RequestId
from tests.consistency.helpers_consistency import Cluster, block, node, readable_state


def assert_equal(cluster: Cluster) -> None:
    cluster.check()
    states = [readable_state(member) for member in cluster.members.values()]
    assert all(state == states[0] for state in states)


def test_what_one_node_stores_every_replica_finds() -> None:
    cluster = Cluster("a", "b", "c")
    cluster.store("a", range(64))
    cluster.deliver_all()
    match = cluster.manager("c").find_prefix_match([block(i) for i in range(100)])
    assert match is not None
    assert (match.num_blocks, match.num_tokens) == (64, 1024)
    assert [holder.holder.node for holder in match.holders] == ["a"]
    assert_equal(cluster)


def test_a_lost_tail_is_found_without_another_update() -> None:
    cluster = Cluster("a", "b", "c")
    cluster.store("a", range(64))
    assert cluster.lose(lambda flight: True) == 2
    cluster.settle(rounds=6)
    assert cluster.manager("b").find_prefix_match([block(0)]) is not None
    assert_equal(cluster)


def test_a_newcomer_takes_the_state_of_a_peer() -> None:
    cluster = Cluster("a", "b")
    cluster.store("a", range(64))
    cluster.manager("b").register_update(RequestId("r"), 100, [node("a")])
    cluster.drain("b")
    cluster.settle(rounds=4)
    cluster.start("c")
    cluster.settle(rounds=4)
    assert cluster.manager("c").verify_readable(RequestId("r"), 100) == cluster.manager("b").verify_readable(
        RequestId("r"), 100
    )
    assert_equal(cluster)


def test_a_dead_node_is_out_of_every_answer_at_once_and_its_next_life_starts_empty() -> None:
    cluster = Cluster("a", "b", "c")
    cluster.store("a", range(8))
    cluster.deliver_all()
    cluster.kill("a")
    assert cluster.manager("b").find_prefix_match([block(0)]) is None
    changed = [effect for effect in cluster.members[node("b")].given if isinstance(effect, ClaimsChanged)]
    assert isinstance(changed[-1].changes[-1], HolderDropped)
    cluster.start("a", 2)
    cluster.settle(rounds=6)
    assert cluster.manager("c").find_prefix_match([block(0)]) is None
    cluster.store("a", range(2))
    cluster.settle(rounds=6)
    match = cluster.manager("c").find_prefix_match([block(i) for i in range(8)])
    assert match is not None and match.num_blocks == 2
    assert_equal(cluster)

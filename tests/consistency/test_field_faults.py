"""Faults that users met in other systems' metadata, as scenarios; each name says what is right."""

from dataclasses import replace

import msgspec
import pytest

from kv_consistency import limits
from kv_consistency.effects import WaiterFailed
from kv_consistency.errors import LimitReachedError, MalformedUpdateError, StaleReplicaError
from kv_consistency.events import Instant, LocalStore, Received, WaitFor
from kv_consistency.messages import SyncPage, SyncRequest, UpdateBatch
from kv_consistency.replica import ReplicaConfig
from kv_consistency.update import RaiseCount, ScopesRestored, Tier
from kv_core.ids import RequestId
from tests.consistency.helpers_consistency import MS, NAMESPACE, Cluster, block, life, node, readable_state, run_of


def prefix(cluster: Cluster, name: str, upto: int, begin: int = 0) -> int:
    match = cluster.manager(name).find_prefix_match([block(i) for i in range(begin, upto)])
    return 0 if match is None else match.num_blocks


def test_a_metadata_process_that_restarts_empty_learns_everything_from_peers() -> None:
    cluster = Cluster("gateway", "n1", "n2")
    cluster.store("n1", range(100))
    cluster.store("n2", range(50))
    cluster.deliver_all()
    cluster.kill("gateway")
    cluster.start("gateway", 2)
    cluster.settle(rounds=6)
    assert prefix(cluster, "gateway", 200) == 100
    cluster.store("n1", range(100, 120), start=100)
    cluster.deliver_all()
    assert prefix(cluster, "gateway", 200) == 120


def test_losing_any_one_process_loses_no_acknowledged_update_of_the_others() -> None:
    cluster = Cluster("a", "b", "c")
    for i in range(1_000):
        cluster.manager("a").register_update(RequestId(f"r{i}"), 10, [node("b")])
        cluster.drain("a")
        cluster.deliver_all()
    cluster.kill("a")
    for name in ("b", "c"):
        found = sum(bool(cluster.manager(name).verify_readable(RequestId(f"r{i}"), 10)) for i in range(1_000))
        assert found == 1_000


def test_when_every_replica_restarts_nodes_announce_what_they_hold_and_lookups_recover() -> None:
    cluster = Cluster("gateway", "n1")
    cluster.store("n1", range(10))
    cluster.deliver_all()
    for name in ("gateway", "n1"):
        cluster.kill(name, tell=False)
    cluster.start("gateway", 2)
    cluster.start("n1", 2)
    cluster.settle(rounds=6)
    assert prefix(cluster, "gateway", 10) == 0
    cluster.store("n1", range(10), tier=Tier.DISK)
    cluster.settle(rounds=2)
    assert prefix(cluster, "gateway", 10) == 10


def test_a_node_that_restarts_quickly_announces_its_disk_again_and_nothing_of_its_memory_remains() -> None:
    cluster = Cluster("a", "b")
    cluster.store("a", range(8), tier=Tier.HOST)
    cluster.store("a", range(4), tier=Tier.DISK)
    late = [flight for flight in cluster.flights if flight.sender == "a"]
    cluster.deliver_all()
    cluster.kill("a", tell=False)
    cluster.start("a", 2)
    cluster.settle(rounds=4)
    assert prefix(cluster, "b", 8) == 0, "claims of the former life are gone with it"
    cluster.store("a", range(4), tier=Tier.DISK)
    cluster.settle(rounds=2)
    cluster.flights = late
    cluster.deliver_all()
    match = cluster.manager("b").find_prefix_match([block(i) for i in range(8)])
    assert match is not None and match.num_blocks == 4
    assert [(holder.holder, holder.tier) for holder in match.holders] == [(life("a", 2), Tier.DISK)]


def test_blocks_on_disk_that_were_purged_while_their_node_was_down_stay_unreadable() -> None:
    cluster = Cluster("a", "b")
    cluster.manager("b").raise_scopes([NAMESPACE.digest])
    cluster.drain("b")
    cluster.deliver_all()
    written_under = cluster.manager("a").namespace_epoch(NAMESPACE)
    persisted = cluster.manager("a").raises()
    cluster.store("a", range(4), tier=Tier.DISK)
    cluster.deliver_all()
    cluster.kill("a")
    cluster.manager("b").raise_scopes([NAMESPACE.scopes[1]])
    cluster.drain("b")
    cluster.start("a", 2, config=ReplicaConfig(raises=persisted))
    cluster.settle(rounds=6)
    run = run_of(range(4), tier=Tier.DISK)
    announced = type(run)(run.namespace, run.tier, run.start, run.hashes, run.checks, run.shape, written_under)
    cluster.step("a", LocalStore(cluster.at(node("a")), (announced,)))
    cluster.deliver_all()
    assert prefix(cluster, "b", 4) == 0
    assert cluster.members[node("a")].claims() == {}
    cluster.check()


def test_purges_survive_a_restart_of_the_whole_cluster_where_nodes_persist_them() -> None:
    cluster = Cluster("a", "b")
    cluster.manager("b").raise_scopes([NAMESPACE.digest])
    cluster.drain("b")
    cluster.deliver_all()
    persisted = cluster.manager("a").raises()
    for name in ("a", "b"):
        cluster.kill(name, tell=False)
    cluster.start("a", 2, config=ReplicaConfig(raises=persisted))
    cluster.start("b", 2)
    cluster.settle(rounds=10)
    run = run_of(range(4))
    old = type(run)(run.namespace, run.tier, run.start, run.hashes, run.checks, run.shape, 0)
    cluster.step("a", LocalStore(cluster.at(node("a")), (old,)))
    cluster.deliver_all()
    assert prefix(cluster, "b", 4) == 0
    assert cluster.manager("b").raises() == persisted, "a peer without a disk learned them"


def restart_all(cluster: Cluster, kept: dict[str, tuple[RaiseCount, ...]], config: ReplicaConfig) -> None:
    """Every process is gone at once; each begins again with what its disk kept."""
    for name in kept:
        cluster.kill(name, tell=False)
    for name, raises in kept.items():
        cluster.start(name, 2, config=replace(config, raises=raises))


def test_a_node_that_comes_back_last_still_brings_the_purges_that_only_it_kept() -> None:
    """Everybody else is ready, has stored, and has purges of its own by then."""
    cluster = Cluster("a", "b", "c")
    cluster.manager("b").raise_scopes([NAMESPACE.digest])
    cluster.drain("b")
    cluster.deliver_all()
    persisted = cluster.manager("a").raises()
    cluster.kill("a", tell=False)
    restart_all(cluster, {"b": (), "c": ()}, cluster.config)
    cluster.settle(rounds=10)
    cluster.store("b", range(4))
    cluster.deliver_all()
    assert prefix(cluster, "c", 4) == 4
    cluster.start("a", 2, config=replace(cluster.config, raises=persisted))
    cluster.settle(rounds=10)
    assert cluster.manager("c").raises() == cluster.manager("b").raises() == persisted
    assert prefix(cluster, "c", 4) == 0, "nobody can say that those blocks followed the purge"
    cluster.store("c", range(4))
    cluster.deliver_all()
    assert prefix(cluster, "b", 4) == 4
    cluster.start("late")
    cluster.settle(rounds=10)
    cluster.store("late", range(6))
    cluster.deliver_all()
    assert prefix(cluster, "b", 6) == 6, "what depends on a restored purge can be applied"
    cluster.check()


def test_many_kept_purges_are_told_in_bounded_pages_and_by_one_node() -> None:
    config = ReplicaConfig(reply_bytes_max=2_000)
    cluster = Cluster("a", "b", "c", config=config)
    for i in range(300):
        cluster.manager("c").raise_scopes([b"%8d" % i])
    cluster.drain("c")
    cluster.deliver_all()
    persisted = cluster.manager("a").raises()
    assert len(persisted) == 300
    told = 0
    restart_all(cluster, {"a": persisted, "b": (), "c": ()}, config)
    for _ in range(200):
        while cluster.flights:
            message = cluster.flights[0].message
            if isinstance(message, SyncPage):
                assert len(msgspec.msgpack.encode(message)) <= 2_000
            elif isinstance(message, UpdateBatch):
                told += sum(isinstance(op, ScopesRestored) for update in message.updates for op in update.ops)
            cluster.deliver()
        cluster.advance(10 * MS)
    assert told == 2 * 2, "one node told the other two, in two updates"
    for name in ("a", "b", "c"):
        assert cluster.manager(name).ready and cluster.manager(name).raises() == persisted
    cluster.check()


def test_purges_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = Cluster("a")
    monkeypatch.setattr(limits, "MAX_RAISES", 2)
    cluster.manager("a").raise_scopes([b"scope--1", b"scope--2"])
    with pytest.raises(LimitReachedError, match="purges: 2 of at most 2"):
        cluster.manager("a").raise_scopes([b"scope--3"])
    cluster.check()


def test_a_new_peer_that_tells_purges_without_end_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "MAX_RAISES", 3)
    cluster = Cluster("a", "b", join=False)
    cluster.introduce(node("a"))
    asked = cluster.flights.pop().message
    assert isinstance(asked, SyncRequest)
    rows = tuple(RaiseCount(b"scope-%2d" % i, life("c"), 1, i + 1) for i in range(4))
    endless = SyncPage(asked.session, asked.cursor, b"more", 1, 0, raises=rows, ready=False)
    with pytest.raises(MalformedUpdateError, match="do not end"):
        cluster.step("a", Received(cluster.at(node("a")), node("b"), endless))
    assert cluster.manager("a").raises() == ()
    cluster.step("a", Received(cluster.at(node("a")), node("b"), msgspec.structs.replace(endless, raises=rows[:3])))
    assert cluster.manager("a").raises() == rows[:3]
    cluster.check()


def test_an_index_that_starts_in_the_middle_asks_for_a_snapshot_and_ends_with_the_truth() -> None:
    config = ReplicaConfig(log_bytes_max=2_000)
    cluster = Cluster("a", "b", config=config)
    for i in range(100):
        cluster.store("a", [i, i + 1], start=i)
        if i % 3 == 0:
            cluster.remove("a", [i])
        cluster.deliver_all()
    cluster.start("index")
    cluster.store("a", range(200, 203))
    cluster.settle(rounds=10)
    assert cluster.members[node("index")].index == cluster.members[node("a")].index
    assert readable_state(cluster.members[node("index")]) == readable_state(cluster.members[node("a")])
    cluster.check()


def test_a_claim_on_a_slower_tier_counts_and_says_so() -> None:
    cluster = Cluster("a", "b")
    cluster.store("a", range(4), tier=Tier.REMOTE)
    cluster.deliver_all()
    match = cluster.manager("b").find_prefix_match([block(0)])
    assert match is not None and match.holders[0].tier is Tier.REMOTE


def test_one_holders_removal_leaves_the_others() -> None:
    cluster = Cluster("a", "b", "c")
    cluster.store("a", range(4))
    cluster.store("b", range(4))
    cluster.deliver_all()
    cluster.remove("a", range(4))
    cluster.deliver_all()
    match = cluster.manager("c").find_prefix_match([block(i) for i in range(4)])
    assert match is not None and [holder.holder.node for holder in match.holders] == ["b"]


def test_a_removal_from_one_tier_leaves_the_copy_in_another() -> None:
    cluster = Cluster("a", "b")
    cluster.store("a", range(4), tier=Tier.HOST)
    cluster.store("a", range(4), tier=Tier.DISK)
    cluster.remove("a", range(4), tier=Tier.HOST)
    cluster.deliver_all()
    match = cluster.manager("b").find_prefix_match([block(0)])
    assert match is not None and match.holders[0].tier is Tier.DISK


def test_a_match_ends_at_a_hole() -> None:
    cluster = Cluster("a", "b")
    cluster.store("a", range(8))
    cluster.remove("a", [2])
    cluster.deliver_all()
    assert prefix(cluster, "b", 8) == 2
    cluster.remove("a", [0])
    cluster.deliver_all()
    assert prefix(cluster, "b", 8) == 0


def test_a_store_delivered_after_the_removal_that_followed_it_does_not_come_back() -> None:
    cluster = Cluster("a", "b")
    cluster.store("a", range(4))
    cluster.remove("a", range(4))
    stored, removed = cluster.flights
    cluster.flights = [removed, stored, stored, removed, stored]
    cluster.deliver_all()
    assert prefix(cluster, "b", 4) == 0
    cluster.settle(rounds=4)
    assert prefix(cluster, "b", 4) == 0
    cluster.store("a", range(4))
    cluster.flights += [stored, removed]
    cluster.deliver_all()
    assert prefix(cluster, "b", 4) == 4, "and the next store is not undone by the old removal"


def test_a_lost_event_before_the_first_one_seen_is_recovered() -> None:
    cluster = Cluster("a", "b")
    for i in range(4):
        cluster.store("a", [i], start=i)
    cluster.flights = cluster.flights[3:]
    cluster.settle(rounds=4)
    assert prefix(cluster, "b", 4) == 4


def test_each_kind_of_event_moves_its_figure_by_one() -> None:
    cluster = Cluster("a", "b")
    cluster.settle(rounds=10)
    a = cluster.manager("a")

    def figures() -> tuple[int, int, int, int]:
        stats = a.stats()
        return stats.applied, stats.claims, stats.entries, stats.duplicates

    before = figures()
    cluster.store("b", [1])
    again = cluster.flights[0]
    cluster.deliver_all()
    cluster.manager("b").register_update(RequestId("r"), 1, [node("b")])
    cluster.drain("b")
    cluster.deliver_all()
    cluster.flights = [again]
    cluster.deliver_all()
    after = figures()
    assert [y - x for x, y in zip(before, after, strict=True)] == [2, 1, 1, 1]
    cluster.store("b", [5])
    cluster.store("b", [6])
    cluster.flights = cluster.flights[1:]
    cluster.deliver_all()
    assert a.stats().parked == 1 and a.stats().lag == 2
    cluster.settle(rounds=4)
    assert a.stats().ranges_asked == 1 and a.stats().parked == 0


def test_an_idle_replica_stays_a_member_and_knows_what_the_others_know() -> None:
    cluster = Cluster("a", "b")
    cluster.settle(rounds=10)
    cluster.settle(rounds=10, ns=60 * 1_000_000_000)
    cluster.store("a", [0])
    cluster.deliver_all()
    assert prefix(cluster, "b", 1) == 1
    assert cluster.manager("b").step(LocalStore(Instant(cluster.now_ns, cluster.wall_ns), (run_of([3]),)))


def test_when_every_peer_is_silent_local_service_goes_on_and_a_read_that_needs_them_ends_by_its_deadline() -> None:
    cluster = Cluster("a", "b")
    cluster.settle(rounds=4)
    ahead = cluster.manager("b")
    ahead.register_update(RequestId("far"), 4, [node("b")])
    cluster.drain("b")
    token = ahead.token(RequestId("far"))
    cluster.flights.clear()
    a = cluster.manager("a")
    deadline_ns = cluster.now_ns + 300 * MS
    cluster.step("a", WaitFor(cluster.at(node("a")), 7, token, deadline_ns))
    told: list[WaiterFailed] = []
    for i in range(1, 11):
        cluster.advance(50 * MS)
        cluster.flights.clear()
        version = a.register_update(RequestId("near"), i, [node("a")], at=cluster.at(node("a")))
        assert a.verify_readable(RequestId("near"), i) == version
        cluster.drain("a")
        told = [effect for effect in cluster.members[node("a")].given if isinstance(effect, WaiterFailed)]
        assert bool(told) == (cluster.now_ns >= deadline_ns)
    (failed,) = told
    assert isinstance(failed.error, StaleReplicaError) and failed.error.fields["need"] == str(token)


def test_many_entries_are_synchronised_in_bounded_pages() -> None:
    config = ReplicaConfig(log_bytes_max=500, reply_bytes_max=3_000)
    cluster = Cluster("a", "b", config=config)
    for i in range(500):
        cluster.manager("a").register_update(
            RequestId(f"request-{i}"), i, [node("a"), node("b")], checksum=(1 << 64) - 1 - i, namespace=NAMESPACE
        )
        cluster.drain("a")
        cluster.deliver_all()
    cluster.start("late")
    pages = []
    for _ in range(80):
        while cluster.flights:
            if isinstance(cluster.flights[0].message, SyncPage):
                pages.append(len(msgspec.msgpack.encode(cluster.flights[0].message)))
            cluster.deliver()
        cluster.advance(20 * MS)
    assert len(pages) > 10 and max(pages) <= 3_000
    assert cluster.manager("late").ready
    assert readable_state(cluster.members[node("late")]) == readable_state(cluster.members[node("a")])

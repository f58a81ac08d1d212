"""What a replica does when clocks are wrong, and what it has persisted."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kv_consistency import limits
from kv_consistency.effects import Effect, PersistClockBound, ReportClock
from kv_consistency.errors import ClockBoundReachedError, ClockJumpedError, RemoteClockAheadError
from kv_consistency.events import ClockAccepted, ClockBoundPersisted, Instant, LocalStore, Tick
from kv_consistency.hlc import HybridLogicalClock, Timestamp, restart_wait_ns
from kv_consistency.manager import KvCacheConsistencyManager
from kv_consistency.replica import ReplicaConfig
from kv_core.ids import Incarnation, NodeId, RequestId
from tests.consistency.helpers_consistency import MS, Cluster, block, node, readable_state, run_of

SECOND = 1000 * MS
R = RequestId("r")


def bounds(effects: list[Effect]) -> list[int]:
    return [effect.bound_ns for effect in effects if isinstance(effect, PersistClockBound)]


def reports(cluster: Cluster, name: str) -> list[ReportClock]:
    return [effect for effect in cluster.members[node(name)].given if isinstance(effect, ReportClock)]


def test_no_stamp_is_issued_before_its_bound_is_on_disk_and_a_restart_begins_above() -> None:
    config = ReplicaConfig(clock_horizon_ns=10 * SECOND)
    manager = KvCacheConsistencyManager(NodeId("a"), Incarnation(1), config)
    at = Instant(0, 100 * SECOND)
    (bound,) = bounds(manager.step(Tick(at)))
    assert bound == 110 * SECOND
    with pytest.raises(ClockBoundReachedError):
        manager.step(LocalStore(at, (run_of([1]),)))
    assert manager.stats().claims == 0
    manager.step(ClockBoundPersisted(bound))
    manager.step(LocalStore(at, (run_of([1]),)))
    assert bounds(manager.step(Tick(Instant(SECOND, 101 * SECOND)))) == []
    asked = bounds(manager.step(Tick(Instant(6 * SECOND, 106 * SECOND))))
    assert asked == [116 * SECOND], "asked for in good time"
    last = manager.register_update(R, 1, [NodeId("a")], at=Instant(9 * SECOND, 109 * SECOND))
    with pytest.raises(ClockBoundReachedError):
        manager.register_update(R, 2, [NodeId("a")], at=Instant(11 * SECOND, 111 * SECOND))

    # The wall is set back and the process restarts.
    config = ReplicaConfig(clock_horizon_ns=10 * SECOND, clock_floor_ns=bound)
    restarted = KvCacheConsistencyManager(NodeId("a"), Incarnation(2), config)
    (again,) = bounds(restarted.step(Tick(Instant(0, 50 * SECOND))))
    assert again > bound
    restarted.step(ClockBoundPersisted(again))
    assert restarted.register_update(R, 1, [NodeId("a")], at=Instant(0, 50 * SECOND)) > last


def test_a_jump_of_the_own_wall_is_reported_once_and_not_followed() -> None:
    cluster = Cluster("a", "b")
    cluster.store("a", [0])
    cluster.skew[node("a")] = 3_600 * SECOND
    for i in range(1, 4):
        cluster.store("a", [i])
        cluster.advance(50 * MS)
    cluster.deliver_all()
    (report,) = reports(cluster, "a")
    assert report.peer is None and isinstance(report.error, ClockJumpedError)
    assert reports(cluster, "b") == []
    assert cluster.manager("b").find_prefix_match([block(i) for i in range(4)]) is not None
    ahead = cluster.manager("a").clock.last.wall_ns - (cluster.wall_ns + cluster.now_ns)
    assert ahead < SECOND
    cluster.skew[node("a")] = 0
    cluster.advance(50 * MS)
    cluster.skew[node("a")] = 3_600 * SECOND
    cluster.advance(50 * MS)
    assert len(reports(cluster, "a")) == 2, "a new episode"
    cluster.step("a", ClockAccepted(cluster.at(node("a"))))
    cluster.store("a", [9])
    assert cluster.manager("a").clock.last.wall_ns >= cluster.wall_ns + 3_600 * SECOND


def test_a_peer_too_far_ahead_is_refused_and_reported_and_taken_again_when_it_is_right() -> None:
    cluster = Cluster("a", "b")
    cluster.step("a", ClockAccepted(Instant(cluster.now_ns, cluster.wall_ns + 60 * SECOND)))
    cluster.skew[node("a")] = 60 * SECOND
    cluster.step("a", ClockAccepted(cluster.at(node("a"))))
    cluster.store("a", [0])
    cluster.store("a", [1])
    before = cluster.manager("b").clock.last
    cluster.deliver_all()
    (report,) = reports(cluster, "b")
    assert report.peer == "a" and isinstance(report.error, RemoteClockAheadError)
    assert cluster.manager("b").clock.last == before
    assert cluster.manager("b").find_prefix_match([block(0)]) is None
    # A minute passes, and B's wall has come to where A's clock is.
    cluster.skew[node("a")] = 0
    cluster.settle(rounds=4, ns=20 * SECOND)
    cluster.settle(rounds=10)
    assert cluster.manager("b").find_prefix_match([block(0)]) is not None
    cluster.check()


def test_a_cluster_whose_walls_were_set_back_takes_newcomers_in() -> None:
    cluster = Cluster("a", "b")
    cluster.store("a", range(4))
    cluster.settle(rounds=4)
    cluster.wall_ns -= 900 * SECOND
    cluster.store("b", range(4))
    cluster.settle(rounds=4)
    cluster.start("c")
    cluster.settle(rounds=10)
    assert cluster.manager("c").ready
    assert reports(cluster, "c") == []
    cluster.store("c", range(4))
    cluster.settle(rounds=4)
    states = [readable_state(member) for member in cluster.members.values()]
    assert states[0] == states[1] == states[2]


def test_a_newcomer_does_not_follow_a_cluster_any_distance() -> None:
    cluster = Cluster("a", "b", config=ReplicaConfig(join_offset_max_ns=100 * SECOND))
    cluster.store("a", range(4))
    cluster.settle(rounds=4)
    cluster.wall_ns -= 900 * SECOND
    cluster.start("c")
    cluster.settle(rounds=30)
    assert not cluster.manager("c").ready
    assert {report.peer for report in reports(cluster, "c")} == {"a", "b"}


@given(st.integers(0, 4 * SECOND), st.integers(SECOND, 10 * SECOND), st.integers(-250 * MS, 250 * MS))
def test_after_its_wait_a_restarted_node_is_taken_by_peers_at_once(bound: int, wall: int, skew: int) -> None:
    """A peer's wall may differ by half of the tolerance; the wait itself is at most one horizon."""
    bound += wall  # a life ends at most one horizon before its bound, unless it lived ahead of its wall
    wait = restart_wait_ns(bound, wall)
    assert wait <= limits.CLOCK_HORIZON_NS
    restarted = HybridLogicalClock(NodeId("a"), floor_ns=bound)
    peer = HybridLogicalClock(NodeId("b"))
    first = restarted.tick(wall + wait)
    if bound - wall > limits.CLOCK_HORIZON_NS + limits.OFFSET_MAX_NS // 2:
        return
    peer.merge(first, wall + wait + skew)
    if wait:
        with pytest.raises(RemoteClockAheadError):
            HybridLogicalClock(NodeId("b")).merge(first, wall + wait - 251 * MS)


def test_a_jump_and_a_peer_ahead_are_reported_by_the_stamps_of_envelopes_too() -> None:
    manager = KvCacheConsistencyManager(NodeId("a"))
    manager.stamp(Instant(0, 100 * SECOND))
    for i in range(1, 4):
        assert manager.stamp(Instant(i, 200 * SECOND)).wall_ns == 100 * SECOND + i, "not absorbed"
    (jump,) = manager.drain()
    assert isinstance(jump, ReportClock) and isinstance(jump.error, ClockJumpedError) and jump.peer is None
    assert manager.stats().clock.jumps == 3
    right = Timestamp(100 * SECOND, 0, NodeId("b"))
    manager.follow(right, Instant(4, 100 * SECOND + 4))
    for _ in range(2):
        for _ in range(3):
            with pytest.raises(RemoteClockAheadError):
                manager.follow(Timestamp(101 * SECOND, 0, NodeId("b")), Instant(5, 100 * SECOND + 5))
        (ahead,) = manager.drain()
        assert isinstance(ahead, ReportClock) and ahead.peer == "b"
        manager.follow(right, Instant(6, 100 * SECOND + 6))
    assert manager.stamp(Instant(7, 100 * SECOND + 7)).wall_ns == 100 * SECOND + 7


def test_a_newcomer_follows_peers_that_are_all_ahead_but_not_one_among_right_ones() -> None:
    late = 1000 * MS
    for right_one in (False, True):
        manager = KvCacheConsistencyManager(NodeId("new"), config=ReplicaConfig(join_offset_max_ns=100 * SECOND))
        ahead = Timestamp(150 * SECOND, 0, NodeId("b"))
        with pytest.raises(RemoteClockAheadError):
            manager.follow(ahead, Instant(0, 100 * SECOND))
        with pytest.raises(RemoteClockAheadError):
            manager.follow(ahead, Instant(late - 1, 101 * SECOND - 1))
        if right_one:
            manager.follow(Timestamp(101 * SECOND, 0, NodeId("c")), Instant(late - 1, 101 * SECOND - 1))
            with pytest.raises(RemoteClockAheadError):
                manager.follow(ahead, Instant(late, 101 * SECOND))
        else:
            with pytest.raises(RemoteClockAheadError):
                manager.follow(Timestamp(300 * SECOND, 0, NodeId("b")), Instant(late, 101 * SECOND))
            assert manager.follow(ahead, Instant(late, 101 * SECOND)) > ahead
            assert manager.stamp(Instant(late, 101 * SECOND)) > ahead
            with pytest.raises(RemoteClockAheadError):
                manager.follow(Timestamp(160 * SECOND, 0, NodeId("b")), Instant(late, 101 * SECOND))


def test_a_jump_does_not_reach_the_bound_on_disk() -> None:
    """The next life would begin at it, and every peer would refuse its stamps."""
    manager = KvCacheConsistencyManager(NodeId("a"), config=ReplicaConfig(clock_horizon_ns=2 * SECOND))
    (bound,) = bounds(manager.step(Tick(Instant(0, 100 * SECOND))))
    manager.step(ClockBoundPersisted(bound))
    manager.stamp(Instant(0, 100 * SECOND))
    asked: list[int] = []
    for i in range(1, 60):
        at = Instant(i * 50 * MS, 5_000 * SECOND)
        effects = [*manager.step(Tick(at)), *manager.step(LocalStore(at, (run_of([i]),)))]
        for bound in bounds(effects):
            asked.append(bound)
            manager.step(ClockBoundPersisted(bound))
    assert asked and max(asked) <= 100 * SECOND + 60 * 50 * MS + 2 * SECOND


@pytest.mark.parametrize("others_are_right", [True, False])
def test_a_wall_that_was_slow_is_believed_after_its_jump_when_peers_confirm_it(others_are_right: bool) -> None:
    """Without that it would never hear its peers again; but it is they who decide, not the wall."""
    slow, right = 100 * SECOND, 160 * SECOND
    manager = KvCacheConsistencyManager(NodeId("was_slow"))
    manager.stamp(Instant(0, slow))
    for now in range(0, 1500 * MS, 100 * MS):
        stamp = Timestamp(right + now if others_are_right else slow + now, 0, NodeId("b"))
        try:
            manager.follow(stamp, Instant(now, right + now))
        except RemoteClockAheadError:
            assert others_are_right and now <= 1000 * MS
    now = 1500 * MS
    followed = manager.stamp(Instant(now, right + now)).wall_ns
    assert followed == (right + now if others_are_right else slow + now)

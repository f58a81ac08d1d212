"""When peers are followed that are ahead, and when a wall that jumped is believed: votes of those heard lately."""

import pytest

from kv_consistency import limits
from kv_consistency.effects import ReportWallAccepted
from kv_consistency.errors import RemoteClockAheadError
from kv_consistency.events import Instant
from kv_consistency.hlc import Timestamp
from kv_consistency.manager import KvCacheConsistencyManager
from kv_consistency.peer_clocks import PeerClocks
from kv_core.ids import NodeId
from tests.consistency.helpers_consistency import MS, Cluster, node

SECOND = 1000 * MS
SLOW = 100 * SECOND
RIGHT = 103 * SECOND


def _hear(manager: KvCacheConsistencyManager, walls: dict[str, int], wall_ns: int, seconds: int) -> None:
    """For so long, everybody is heard of ten times a second."""
    for now_ns in range(0, seconds * SECOND, 100 * MS):
        for name, peer_ns in walls.items():
            try:
                manager.follow(Timestamp(peer_ns + now_ns, 0, NodeId(name)), Instant(now_ns, wall_ns + now_ns))
            except RemoteClockAheadError:
                continue


@pytest.mark.parametrize(
    ("right", "slow", "believed"),
    [
        (("a", "b", "c"), ("e",), True),  # e was slow together with us, and must not keep us from the others
        (("a", "b"), ("e", "f"), True),
        (("a",), ("e", "f"), False),
        ((), ("e",), False),
    ],
)
def test_a_wall_that_jumped_is_believed_when_half_of_the_peers_agree(
    right: tuple[str, ...], slow: tuple[str, ...], believed: bool
) -> None:
    manager = KvCacheConsistencyManager(NodeId("d"))
    manager.stamp(Instant(0, SLOW))
    _hear(manager, dict.fromkeys(right, RIGHT) | dict.fromkeys(slow, SLOW), RIGHT, 2)
    now = 2 * SECOND
    assert manager.stamp(Instant(now, RIGHT + now)).wall_ns == (RIGHT + now if believed else SLOW + now)
    told = [effect for effect in manager.drain() if isinstance(effect, ReportWallAccepted)]
    assert told == ([ReportWallAccepted(RIGHT - SLOW)] if believed else [])


def test_a_newcomer_follows_most_of_its_peers() -> None:
    for ahead, others, follows in ((("a", "b"), ("c",), True), (("a",), ("c",), False), (("a",), ("b", "c"), False)):
        manager = KvCacheConsistencyManager(NodeId("new"))
        _hear(manager, dict.fromkeys(ahead, RIGHT) | dict.fromkeys(others, SLOW), SLOW, 2)
        stamp = manager.stamp(Instant(2 * SECOND, SLOW + 2 * SECOND)).wall_ns
        assert (stamp > RIGHT) == follows


def test_a_replica_that_has_synchronised_follows_nobody_too_far() -> None:
    cluster = Cluster("a", "b")
    manager = cluster.manager("a")
    walls = {"b": cluster.wall_ns + 9 * SECOND, "c": cluster.wall_ns + 9 * SECOND}
    for now_ns in range(0, 3 * SECOND, 100 * MS):
        at = Instant(cluster.now_ns + now_ns, cluster.wall_ns + cluster.now_ns + now_ns)
        for name, wall_ns in walls.items():
            with pytest.raises(RemoteClockAheadError):
                manager.follow(Timestamp(wall_ns + cluster.now_ns + now_ns, 0, NodeId(name)), at)


def test_a_whole_cluster_whose_walls_are_set_right_together_follows_them() -> None:
    """Nobody's stamps do so first: the readings that digests carry are what agrees."""
    cluster = Cluster("a", "b", "c")
    cluster.store("a", [0])
    cluster.settle(rounds=4)
    cluster.wall_ns += 60 * SECOND
    cluster.settle(rounds=60)
    for member in cluster.members.values():
        assert [type(effect) for effect in member.given].count(ReportWallAccepted) == 1
    cluster.store("b", [1])
    assert cluster.manager("b").clock.last.wall_ns >= cluster.wall_ns + cluster.now_ns - SECOND


def test_one_wall_of_three_that_jumps_is_not_believed_whatever_it_reads() -> None:
    cluster = Cluster("a", "b", "c")
    cluster.skew[node("a")] = 60 * SECOND
    cluster.settle(rounds=60)
    assert not any(isinstance(effect, ReportWallAccepted) for effect in cluster.members[node("a")].given)


def test_words_are_judged_after_the_wait_and_while_they_are_new() -> None:
    clocks = PeerClocks(near_ns=10, wait_ns=100)
    clocks.wall_jumped(1_000)
    clocks.told(NodeId("a"), 5_005, 5_000, 1_001)
    assert not clocks.wall_is_confirmed(1_099)
    assert clocks.wall_is_confirmed(1_100)
    clocks.heard(NodeId("a"), 900, 5_000, 1_101, ahead=False)
    assert clocks.wall_is_confirmed(1_102), "what it told says more of its wall than its stamps"
    assert not clocks.wall_is_confirmed(1_302), "its stamp is the newest word now"
    clocks.told(NodeId("a"), 5_020, 5_000, 1_303)
    assert not clocks.wall_is_confirmed(1_304)
    clocks.told(NodeId("b"), 5_000, 5_000, 1_304)
    assert clocks.wall_is_confirmed(1_305)
    clocks.forget(NodeId("b"))
    assert not clocks.wall_is_confirmed(1_305)
    clocks.heard(NodeId("b"), 9_000, 5_000, 2_000, ahead=True)
    assert not clocks.most_are_ahead(2_099)
    assert clocks.most_are_ahead(2_100)
    clocks.heard(NodeId("b"), 5_000, 5_000, 2_150, ahead=False)
    assert not clocks.most_are_ahead(2_151)


def test_peers_beyond_the_bound_have_no_vote(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "MAX_ORIGINS", 1)
    clocks = PeerClocks(near_ns=10, wait_ns=0)
    clocks.wall_jumped(0)
    clocks.told(NodeId("a"), 0, 5_000, 1)
    clocks.told(NodeId("b"), 5_000, 5_000, 1)
    assert not clocks.wall_is_confirmed(2)

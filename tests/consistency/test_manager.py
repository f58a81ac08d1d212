"""The facade: what may be read, what is refused, and what is said about it."""

import pytest

from kv_consistency.effects import EndCause, Issued, RequestEnded, RequestFenced
from kv_consistency.errors import (
    ConsistencyError,
    FencedError,
    HolderLostError,
    IncompleteError,
    InvalidUpdateError,
    LimitReachedError,
    NotFoundError,
    ShrinkingUpdateError,
    SkippingUpdateError,
    StaleReplicaError,
)
from kv_consistency.events import Instant, LocalRaise, LocalRegister, LocalRemove, LocalStore, Removal
from kv_consistency.manager import KvCacheConsistencyManager
from kv_consistency.replica import ReplicaConfig
from kv_consistency.update import OwnerEpoch, Run, Tier, pack_run
from kv_consistency.version_vector import CausalToken, Dot
from kv_core.errors import LocalProtocolError, RetryableError
from kv_core.hashing import BlockHash, hash_tokens
from kv_core.ids import NodeId, RequestId
from kv_core.limits import MAX_TOKENS_PER_REQUEST
from kv_core.namespace import Namespace
from tests.consistency.helpers_consistency import MS, NAMESPACE, OTHER, Cluster, block, life, node, run_of

R = RequestId("r")
A, B = NodeId("a"), NodeId("b")


def alone() -> KvCacheConsistencyManager:
    return KvCacheConsistencyManager(A)


def test_versions_only_grow_and_reads_return_them() -> None:
    manager = alone()
    versions = [manager.register_update(R, length, [A]) for length in (10, 10, 11, 500)]
    assert versions == sorted(set(versions))
    assert manager.verify_readable(R, 500) == versions[-1]
    assert manager.verify_readable(R, 0) == versions[-1]
    assert manager.entry(R).version == versions[-1]


def test_what_was_never_registered_is_not_found() -> None:
    with pytest.raises(NotFoundError) as caught:
        alone().verify_readable(R, 1)
    assert caught.value.fields == {"request_id": R}


def test_a_short_entry_says_what_it_has_and_what_is_needed() -> None:
    manager = alone()
    manager.register_update(R, 10, [A])
    with pytest.raises(IncompleteError) as caught:
        manager.verify_readable(R, 11)
    assert (caught.value.fields["have"], caught.value.fields["need"]) == (10, 11)
    assert isinstance(caught.value, RetryableError)


def test_an_entry_is_append_only() -> None:
    manager = alone()
    manager.register_update(R, 10, [A])
    with pytest.raises(ShrinkingUpdateError) as shrinking:
        manager.register_update(R, 9, [A])
    assert (shrinking.value.fields["have"], shrinking.value.fields["new"]) == (10, 9)
    with pytest.raises(SkippingUpdateError) as skipping:
        manager.register_update(R, 13, [A], start=11)
    assert (skipping.value.fields["have"], skipping.value.fields["start"]) == (10, 11)
    assert isinstance(skipping.value, LocalProtocolError)
    manager.register_update(R, 13, [A], start=10)
    assert manager.entry(R).seq_len == 13


def test_the_first_update_may_not_skip_either() -> None:
    with pytest.raises(SkippingUpdateError):
        alone().register_update(R, 13, [A], start=1)


def test_the_five_reasons_not_to_read_are_different_errors() -> None:
    kinds = {NotFoundError, IncompleteError, StaleReplicaError, FencedError, HolderLostError}
    assert len({kind.code for kind in kinds}) == 5
    assert all(issubclass(kind, ConsistencyError) and 4000 <= kind.code < 5000 for kind in kinds)
    assert {kind for kind in kinds if issubclass(kind, RetryableError)} == {IncompleteError, StaleReplicaError}


def test_a_new_owner_fences_the_writers_of_the_former() -> None:
    cluster = Cluster("g", "h", "d")
    first = cluster.manager("g").take_ownership(R)
    cluster.drain("g")
    cluster.deliver_all()
    cluster.manager("d").register_update(R, 10, [node("d")], epoch=first)
    cluster.drain("d")
    cluster.deliver_all()
    second = cluster.manager("h").take_ownership(R)
    assert (second.number, second.owner) == (2, life("h"))
    cluster.drain("h")
    # D has not heard of it yet: its write goes out, and loses everywhere.
    cluster.manager("d").register_update(R, 11, [node("d")], epoch=first)
    cluster.drain("d")
    cluster.deliver_all()
    for name in ("g", "h", "d"):
        assert cluster.manager(name).entry(R).seq_len == 0
        with pytest.raises(FencedError):
            cluster.manager(name).verify_readable(R, 10, epoch=first)
    with pytest.raises(FencedError) as caught:
        cluster.manager("d").register_update(R, 12, [node("d")], epoch=first)
    assert caught.value.fields["current"] == "2@h/1"
    assert RequestFenced(R, second) in cluster.members[node("d")].given
    cluster.manager("d").register_update(R, 5, [node("d")], epoch=second)
    assert cluster.manager("d").verify_readable(R, 5, epoch=second)
    cluster.check()


def test_of_two_owners_at_once_the_same_wins_everywhere() -> None:
    cluster = Cluster("g", "h", "d")
    epochs = [cluster.manager(name).take_ownership(R) for name in ("g", "h")]
    for name in ("g", "h"):
        cluster.drain(name)
    cluster.deliver_all()
    assert {cluster.manager(name).entry(R).epoch for name in ("g", "h", "d")} == {max(epochs)}
    with pytest.raises(FencedError):
        cluster.manager("g").register_update(R, 1, [A], epoch=min(epochs))


def test_ownership_can_keep_what_is_registered() -> None:
    cluster = Cluster("g", "h")
    cluster.manager("g").register_update(R, 64, [node("h")], checksum=7)
    cluster.drain("g")
    cluster.deliver_all()
    epoch = cluster.manager("h").take_ownership(R, keep=True)
    entry = cluster.manager("h").entry(R)
    assert (entry.seq_len, entry.checksum, entry.nodes, entry.epoch) == (64, 7, (node("h"),), epoch)


def test_a_write_for_an_owner_not_heard_of_yet_is_taken_from_its_beginning() -> None:
    manager = alone()
    epoch = OwnerEpoch(3, life("g"))
    with pytest.raises(SkippingUpdateError):
        manager.register_update(R, 10, [A], start=5, epoch=epoch)
    manager.register_update(R, 10, [A], start=0, epoch=epoch)
    assert manager.entry(R).epoch == epoch


def test_an_ended_request_is_over_everywhere_and_late_writers_are_told() -> None:
    cluster = Cluster("g", "d")
    cluster.manager("d").register_update(R, 10, [node("d")])
    cluster.drain("d")
    cluster.deliver_all()
    cluster.manager("g").end_request(R)
    cluster.manager("g").end_request(R)
    cluster.manager("g").end_request(RequestId("unknown"))
    cluster.drain("g")
    cluster.deliver_all()
    ended = [effect for effect in cluster.members[node("d")].given if isinstance(effect, RequestEnded)]
    assert [effect.cause for effect in ended] == [EndCause.ENDED]
    for _ in range(2):
        with pytest.raises(NotFoundError):
            cluster.manager("d").register_update(R, 11, [node("d")])
        with pytest.raises(NotFoundError):
            cluster.manager("d").take_ownership(R)
        with pytest.raises(NotFoundError):
            cluster.manager("g").verify_readable(R, 1)
        cluster.settle(rounds=50)  # until everybody is known to know, and the entry is forgotten
    assert cluster.manager("g").stats().entries == cluster.manager("d").stats().entries == 0


def test_a_lost_gateway_ends_its_requests_and_another_may_take_them() -> None:
    cluster = Cluster("g", "h", "d")
    epoch = cluster.manager("g").take_ownership(R)
    cluster.drain("g")
    cluster.deliver_all()
    cluster.manager("d").register_update(R, 10, [node("d")], epoch=epoch)
    cluster.drain("d")
    cluster.deliver_all()
    cluster.kill("g")
    assert RequestEnded(R, epoch, EndCause.OWNER_LOST) in cluster.members[node("d")].given
    with pytest.raises(NotFoundError):
        cluster.manager("d").verify_readable(R, 1)
    with pytest.raises(FencedError):
        cluster.manager("d").register_update(R, 11, [node("d")], epoch=epoch)
    taken = cluster.manager("h").take_ownership(R)
    assert taken > epoch
    cluster.drain("h")
    cluster.deliver_all()
    cluster.manager("d").register_update(R, 3, [node("d")], epoch=taken)
    assert cluster.manager("d").verify_readable(R, 3)


def test_requests_of_a_lost_gateway_end_even_when_there_are_many() -> None:
    cluster = Cluster("g", "d")
    for i in range(5000):
        cluster.manager("g").take_ownership(RequestId(f"r{i}"))
    cluster.drain("g")
    cluster.deliver_all()
    cluster.kill("g")
    for _ in range(20):
        cluster.advance(50 * MS)
    ended = {effect.request_id for effect in cluster.members[node("d")].given if isinstance(effect, RequestEnded)}
    assert len(ended) == 5000


def test_an_entry_whose_nodes_all_died_is_lost_and_not_missing() -> None:
    cluster = Cluster("a", "b", "c")
    cluster.manager("c").register_update(R, 10, [A, B])
    cluster.drain("c")
    cluster.deliver_all()
    cluster.kill("a")
    assert cluster.manager("c").entry(R).nodes == (B,)
    cluster.kill("b")
    with pytest.raises(HolderLostError) as caught:
        cluster.manager("c").verify_readable(R, 10)
    assert caught.value.fields["holders"] == "a/1, b/1"
    with pytest.raises(IncompleteError):
        cluster.manager("c").verify_readable(R, 11)


def test_a_restarted_node_no_longer_holds_what_its_former_life_held() -> None:
    cluster = Cluster("a", "c")
    cluster.manager("c").register_update(R, 10, [A])
    cluster.drain("c")
    cluster.kill("a")
    cluster.start("a", 2)
    with pytest.raises(HolderLostError):
        cluster.manager("c").verify_readable(R, 10)


def test_reading_and_writing_set_the_access_time() -> None:
    manager = alone()
    manager.register_update(R, 10, [A], at=Instant(5, 100))
    assert manager.entry(R).access_ns == 5
    manager.verify_readable(R, 10, at=Instant(77, 100))
    assert manager.entry(R).access_ns == 77
    manager.entry(R)
    assert manager.entry(R).access_ns == 77


def test_an_entry_carries_what_is_promised() -> None:
    manager = alone()
    version = manager.register_update(R, 10, [B, A, B], checksum=(1 << 64) - 1, namespace=NAMESPACE)
    entry = manager.entry(R)
    assert (entry.version, entry.seq_len, entry.checksum) == (version, 10, (1 << 64) - 1)
    assert (entry.nodes, entry.namespace) == ((A, B), NAMESPACE)
    assert entry.token == CausalToken((Dot(life("a"), 1),)) == manager.token(R)


def test_a_purge_makes_entries_unreadable_and_a_rewrite_begins_at_nothing() -> None:
    manager = alone()
    manager.register_update(R, 100, [A], namespace=NAMESPACE)
    manager.register_update(RequestId("other"), 100, [A], namespace=OTHER)
    manager.raise_scopes([NAMESPACE.scopes[0]])
    with pytest.raises(NotFoundError):
        manager.verify_readable(R, 1)
    assert manager.verify_readable(RequestId("other"), 100)
    with pytest.raises(SkippingUpdateError):
        manager.register_update(R, 101, [A], start=100)
    manager.register_update(R, 50, [A])
    assert manager.entry(R).seq_len == 50


def test_new_weights_make_every_entry_of_the_old_unreadable_everywhere_after_the_bump() -> None:
    cluster = Cluster("a", "b", "c")
    cluster.store("a", range(8))
    cluster.manager("a").register_update(R, 128, [A], namespace=NAMESPACE)
    cluster.drain("a")
    cluster.deliver_all()
    token = cluster.manager("b").raise_scopes([NAMESPACE.scopes[1]])
    cluster.drain("b")
    # A stores while the bump is under way: it did not follow it.
    cluster.store("a", range(8, 16))
    with pytest.raises(StaleReplicaError):
        cluster.manager("c").verify_readable(R, 128, after=token)
    cluster.deliver_all()
    for name in ("a", "b", "c"):
        with pytest.raises(NotFoundError):
            cluster.manager(name).verify_readable(R, 128, after=token)
        assert cluster.manager(name).find_prefix_match([block(i) for i in range(16)]) is None
    assert cluster.members[A].claims() == {}, "the node itself is told that its blocks are void"
    cluster.store("a", range(2))
    cluster.deliver_all()
    assert cluster.manager("c").find_prefix_match([block(0), block(1)]) is not None
    cluster.check()


def test_every_concurrent_purge_beats_a_store_that_followed_only_one_of_them() -> None:
    cluster = Cluster("a", "b", "c", "d")
    cluster.manager("b").raise_scopes([NAMESPACE.digest])
    cluster.drain("b")
    cluster.flights = [flight for flight in cluster.flights if flight.receiver != "c"]
    cluster.deliver_all()
    cluster.manager("c").raise_scopes([NAMESPACE.digest])
    cluster.drain("c")
    under_way = cluster.flights
    cluster.flights = []
    cluster.store("a", range(4))
    cluster.deliver_all()
    assert cluster.manager("d").find_prefix_match([block(0)]) is not None
    cluster.flights = under_way
    cluster.settle(rounds=10)
    for name in ("a", "b", "c", "d"):
        assert cluster.manager(name).find_prefix_match([block(0)]) is None
    cluster.check()


def test_a_store_is_not_applied_before_the_purges_that_it_followed() -> None:
    """Otherwise it could be counted as having followed another one: here c's own, which it did not."""
    cluster = Cluster("a", "b", "c")
    cluster.manager("a").raise_scopes([NAMESPACE.digest])
    cluster.drain("a")
    late = [flight for flight in cluster.flights if flight.receiver == "c"]
    cluster.flights = [flight for flight in cluster.flights if flight.receiver != "c"]
    cluster.deliver_all()
    cluster.manager("c").raise_scopes([NAMESPACE.scopes[0]])
    cluster.members[node("c")].manager.drain()
    cluster.store("b", range(4))
    cluster.deliver_all()
    assert cluster.manager("c").find_prefix_match([block(0)]) is None
    cluster.flights = late
    cluster.deliver_all()
    assert cluster.manager("c").vector()[life("b")] == 1
    assert cluster.manager("c").find_prefix_match([block(0)]) is None
    cluster.check()


def test_find_prefix_match_takes_the_longest_unbroken_run_and_not_the_first_that_is_long_enough() -> None:
    cluster = Cluster("a", "b", "c")
    cluster.store("a", range(6))
    cluster.store("b", range(3))
    cluster.store("b", range(4, 32), start=4)
    cluster.store("c", range(6), tier=Tier.DISK)
    cluster.deliver_all()
    prompt = [block(i) for i in range(40)]
    match = cluster.manager("b").find_prefix_match(prompt, min_overlap=16)
    assert match is not None
    assert (match.num_blocks, match.num_tokens) == (6, 96)
    assert [(holder.holder.node, holder.tier) for holder in match.holders] == [("a", Tier.HOST), ("c", Tier.DISK)]
    assert cluster.manager("b").find_prefix_match(prompt, min_overlap=97) is None
    assert cluster.manager("b").find_prefix_match(prompt[4:]) is not None, "whoever asks decides where a prompt begins"
    assert cluster.manager("b").find_prefix_match([block(999), *prompt]) is None
    assert cluster.manager("b").find_prefix_match([]) is None


def test_find_prefix_match_compares_both_hashes() -> None:
    manager = alone()
    namespace = Namespace("m", "1")
    hashes = hash_tokens(namespace, list(range(64)))
    manager.step(LocalStore(Instant(0, 0), (pack_run(NAMESPACE, Tier.DEVICE, 0, hashes),)))
    assert manager.find_prefix_match(hashes) is not None
    forged = [*hashes[:2], BlockHash(hashes[2].sequence, hashes[2].check ^ 1), hashes[3]]
    match = manager.find_prefix_match(forged)
    assert match is not None and match.num_blocks == 2


def test_a_run_over_two_tiers_is_read_as_slowly_as_its_slowest_block() -> None:
    cluster = Cluster("a", "b")
    cluster.store("a", range(2), tier=Tier.DEVICE)
    cluster.store("a", range(1, 4), tier=Tier.DISK, start=1)
    cluster.deliver_all()
    match = cluster.manager("b").find_prefix_match([block(i) for i in range(4)])
    assert match is not None and (match.num_blocks, match.holders[0].tier) == (4, Tier.DISK)
    match = cluster.manager("b").find_prefix_match([block(i) for i in range(2)])
    assert match is not None and match.holders[0].tier is Tier.DEVICE


def test_a_read_after_a_token_fails_with_what_is_there_and_what_is_needed() -> None:
    cluster = Cluster("a", "b")
    cluster.manager("a").register_update(R, 10, [A])
    cluster.drain("a")
    token = cluster.manager("a").token(R)
    with pytest.raises(StaleReplicaError) as caught:
        cluster.manager("b").verify_readable(R, 10, after=token)
    assert (caught.value.fields["have"], caught.value.fields["need"]) == ("a/1:0", "{a/1:1}")
    with pytest.raises(StaleReplicaError):
        cluster.manager("b").register_update(R, 11, [B], after=token)
    cluster.deliver_all()
    assert cluster.manager("b").verify_readable(R, 10, after=token)


def test_a_token_of_a_life_that_ended_before_it_replicated_is_lost_at_once() -> None:
    cluster = Cluster("a", "b")
    cluster.store("a", range(2))
    cluster.flights.clear()
    token = CausalToken((Dot(life("a"), 1),))
    cluster.kill("a")
    with pytest.raises(HolderLostError):
        cluster.manager("b").verify_readable(R, 0, after=token)


@pytest.mark.parametrize(
    "run",
    [
        Run(NAMESPACE, Tier.HOST, 0, b"", b""),
        Run(NAMESPACE, Tier.HOST, 0, b"x" * 17, b"c" * 4),
        Run(NAMESPACE, Tier.HOST, 0, b"x" * 16, b"c" * 8),
        Run(NAMESPACE, Tier.HOST, (1 << 24) - 1, b"x" * 32, b"c" * 8),
        Run(NAMESPACE, Tier.HOST, 0, b"x" * 16, b"c" * 4, epoch=1),
    ],
)
def test_runs_that_cannot_be_are_refused_and_change_nothing(run: Run) -> None:
    manager = alone()
    with pytest.raises(InvalidUpdateError):
        manager.step(LocalStore(Instant(0, 0), (run_of([1]), run)))
    assert manager.stats().claims == 0 and len(manager.vector()) == 0


def test_other_events_that_cannot_be_are_refused() -> None:
    manager = alone()
    at = Instant(0, 0)
    for event in (
        LocalStore(at, ()),
        LocalStore(at, (run_of([1]),) * 300),
        LocalRemove(at, (Removal(NAMESPACE.digest, Tier.HOST, b"x"),)),
        LocalRaise(at, ()),
        LocalRaise(at, (b"short",)),
        LocalRegister(at, RequestId(""), 1, ()),
        LocalRegister(at, RequestId("x" * 256), 1, ()),
        LocalRegister(at, R, MAX_TOKENS_PER_REQUEST + 1, ()),
        LocalRegister(at, R, 1, tuple(NodeId(str(i)) for i in range(65))),
        LocalRegister(at, R, 1, (), checksum=1 << 64),
        LocalRegister(at, R, 1, (), checksum=-1),
    ):
        with pytest.raises(InvalidUpdateError):
            manager.step(event)
    assert len(manager.vector()) == 0
    manager.check()


def test_bounds_are_errors_that_name_them() -> None:
    manager = KvCacheConsistencyManager(A, config=ReplicaConfig(entries_max=2))
    manager.register_update(R, 1, [A])
    manager.register_update(RequestId("s"), 1, [A])
    with pytest.raises(LimitReachedError) as caught:
        manager.register_update(RequestId("t"), 1, [A])
    assert caught.value.fields["limit"] == 2
    manager.register_update(R, 2, [A])
    big = tuple(run_of(range(4096), start=0) for _ in range(20))
    with pytest.raises(LimitReachedError):
        manager.step(LocalStore(Instant(0, 0), big))


def test_the_first_effect_of_a_local_event_says_what_became_of_it() -> None:
    effects = alone().step(LocalStore(Instant(3, 900), (run_of([1]),)))
    assert isinstance(effects[0], Issued)
    assert effects[0].dot == Dot(life("a"), 1)
    assert effects[0].stamp.wall_ns == 900


def test_lag_counts_the_versions_that_are_known_to_exist_and_not_applied() -> None:
    cluster = Cluster("a", "b")
    for i in range(5):
        cluster.store("a", [i])
    last = cluster.flights[-1]
    cluster.flights = [last]
    cluster.deliver()
    assert cluster.manager("b").lag()[life("a")] == 5
    assert cluster.manager("b").stats().lag == 5
    assert cluster.manager("a").lag_of(B) == 5
    cluster.settle(rounds=10)
    assert cluster.manager("b").lag()[life("a")] == 0
    assert cluster.manager("a").lag_of(B) == 0
    assert cluster.manager("a").lag_of(NodeId("nobody")) is None


def test_a_stamp_for_an_envelope_grows_with_those_of_updates_and_never_follows_a_jump() -> None:
    manager = alone()
    stamps = [
        manager.stamp(Instant(0, 100)),
        manager.register_update(R, 1, [A], at=Instant(1, 101)),
        manager.stamp(Instant(2, 3_600_000_000_000)),
    ]
    assert stamps == sorted(set(stamps))
    assert stamps[-1].wall_ns == 102

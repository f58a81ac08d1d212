"""All shards of a block or none: ranks with pools of unequal size and policy, against one plain set of prefixes."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kv_core.hashing import BlockHash, hash_tokens
from kv_core.ids import Incarnation, NodeId, RegionId
from kv_prefix import limits
from kv_prefix.block_pool import BlockPool
from kv_prefix.errors import (
    InvalidRequestError,
    LeaseLimitError,
    NoSpaceError,
    PinQuotaExceededError,
    StaleMatchError,
    UnknownReceiptError,
)
from kv_prefix.events import BlocksStored, Tier
from kv_prefix.eviction import make_eviction_policy
from kv_prefix.groups import GroupMatch, GroupPool, GroupReceipt, group_matches
from kv_prefix.prefix_index import Holder, PrefixIndex
from tests.prefix.helpers_prefix import BLOCK_SIZE, NAMESPACES

NS = NAMESPACES[0]
READER = NodeId("reader")


def rank_pool(rank: int, num_slots: int, policy: str = "lru", pin_quota: int | None = None) -> BlockPool:
    return BlockPool(
        num_slots,
        BLOCK_SIZE,
        region=RegionId(rank),
        policy=make_eviction_policy(policy, num_slots),
        pin_quota=pin_quota,
    )


def make_group(*sizes: int) -> GroupPool:
    policies = ("lru", "fifo", "adaptive", "s3fifo")
    return GroupPool([rank_pool(rank, size, policies[rank % 4]) for rank, size in enumerate(sizes)])


def text(seed: int, num_blocks: int) -> list[int]:
    return [seed * 100 + i for i in range(num_blocks * BLOCK_SIZE)]


def find(group: GroupPool, tokens: list[int]) -> GroupMatch:
    return group.match(NS.digest, hash_tokens(NS, tokens), [*tokens, 0])


def begin(group: GroupPool, tokens: list[int]) -> GroupReceipt:
    match, names = find(group, tokens), hash_tokens(NS, tokens)
    first = match.num_blocks
    opened = group.open("request", match, len(names) - first)
    group.commit(opened.receipt, NS.digest, first, names[first:], tokens[first * BLOCK_SIZE :])
    return opened.receipt


def test_a_shard_that_one_rank_evicts_is_gone_from_all() -> None:
    group = make_group(8, 4)
    group.release(begin(group, text(1, 4)))
    # The small rank gives two blocks up for these; the large one has room for all.
    group.release(begin(group, text(2, 2)))
    assert find(group, text(1, 4)).num_blocks == 2
    assert [pool.stats().cached for pool in group.pools] == [4, 4]
    group.check()


def test_ranks_that_were_asked_by_themselves_and_differ_take_the_shortest_match_and_nobody_hangs() -> None:
    group = make_group(8, 8, 8)
    group.release(begin(group, text(1, 5)))
    names = hash_tokens(NS, text(1, 5))
    # One rank loses a block behind the group's back.
    group.pools[1].drop(names[3])
    assert [len(p.match(NS.digest, names, [*text(1, 5), 0]).refs) for p in group.pools] == [5, 3, 5]
    match = find(group, text(1, 5))
    assert match.num_blocks == 3 and {len(part.refs) for part in match.ranks} == {3}
    opened = group.open("request", match, 2)
    assert all(len(one.refs) == 5 for one in opened.ranks)
    group.check()


def test_a_call_that_one_rank_refuses_changes_nothing_in_any(monkeypatch: pytest.MonkeyPatch) -> None:
    group = make_group(8, 4)
    held = begin(group, text(1, 2))
    before = group.stats()
    with pytest.raises(NoSpaceError):
        group.open("request", find(group, text(2, 3)), 3)
    assert group.stats() == before and group.take_events()
    match = find(group, text(1, 2))
    monkeypatch.setattr(limits, "MAX_LEASES", 1)
    other = group.pools[1].lease_match(READER, match.ranks[1], until_ns=5)
    with pytest.raises(LeaseLimitError):
        group.lease_match(READER, match, until_ns=5)
    assert group.pools[0].stats().leases == 0
    group.pools[1].release(other.receipt)
    small = GroupPool([rank_pool(0, 4, pin_quota=4), rank_pool(1, 4, pin_quota=1)])
    small.release(begin(small, text(1, 2)))
    with pytest.raises(PinQuotaExceededError):
        small.pin("operator", find(small, text(1, 2)))
    assert [pool.stats().operator_pins for pool in small.pools] == [0, 0]
    group.release(held)
    with pytest.raises(UnknownReceiptError):
        group.release(held)


def test_a_failed_check_of_one_shard_and_a_rank_that_begins_anew_make_groups_absent() -> None:
    group = make_group(8, 8)
    group.release(begin(group, text(1, 3)))
    group.drop(hash_tokens(NS, text(1, 3))[1])
    assert find(group, text(1, 3)).num_blocks == 1
    lease = group.lease_match(READER, find(group, text(1, 3)), until_ns=9)
    stale, running = find(group, text(1, 3)), group.open("request", None, 1)
    group.replace_rank(1, rank_pool(1, 8))
    with pytest.raises(StaleMatchError):
        group.pin("operator", stale)
    with pytest.raises(UnknownReceiptError):
        group.commit(running.receipt, NS.digest, 0, hash_tokens(NS, text(2, 1)), text(2, 1))
    # A hold of the new life has the same number as one of the old: it is not given back in its place.
    other = group.open("request", None, 1)
    group.release(running.receipt)
    assert group.pools[1].refs(other.receipt.receipts[1])
    group.release(other.receipt)
    assert find(group, text(1, 3)).num_blocks == 0
    group.check()
    # The other rank's reader keeps its shard until its time.
    assert group.pools[0].refs(lease.ranks[0].receipt)
    group.expire(9)
    assert group.stats()[0].pinned == 0


def test_content_that_one_rank_cannot_share_is_shared_by_none() -> None:
    group = make_group(8, 8)
    same = [BlockHash(bytes(16), 0)]
    other = group.pools[1].open("other", None, 1)
    opened = group.open("request", None, 1)
    # In one rank the name is taken, by content that the others never had.
    group.pools[1].commit(other.table, NS.digest, 0, same, [7] * BLOCK_SIZE)
    group.pools[1].take_events()
    group.commit(opened.receipt, NS.digest, 0, same, [1] * BLOCK_SIZE)
    assert group.match(NS.digest, same, [*[1] * BLOCK_SIZE, 0]).num_blocks == 0
    group.check()


def test_a_group_of_holders_holds_what_its_shortest_rank_does() -> None:
    names = hash_tokens(NS, text(1, 6))
    index = PrefixIndex()
    ranks = {name: Holder(NodeId(name), Incarnation(1)) for name in ("a0", "a1", "b0", "b1", "c0", "c1")}
    for name, count in (("a0", 6), ("a1", 4), ("b0", 6), ("b1", 6), ("c0", 6)):
        index.stored(ranks[name], Tier.HOST, names[:count])
    groups = [(ranks["a0"], ranks["a1"]), (ranks["b0"], ranks["b1"]), (ranks["c0"], ranks["c1"])]
    assert group_matches(index.lookup(names), groups) == [(groups[1], 6), (groups[0], 4)]


def test_ranks_of_unequal_block_size_are_no_group() -> None:
    for pools in ([], [rank_pool(0, 4), BlockPool(4, BLOCK_SIZE + 1, region=RegionId(1))]):
        with pytest.raises(InvalidRequestError):
            GroupPool(pools)


STEPS = st.lists(
    st.tuples(
        st.sampled_from(["begin", "begin", "serve", "end", "lease", "pin", "time", "drop", "purge", "anew"]),
        st.integers(0, 3),
        st.integers(1, 5),
    ),
    max_size=40,
)


@settings(max_examples=120, deadline=None)
@given(STEPS, st.permutations([7, 9, 12]))
def test_every_rank_holds_the_same_and_what_was_told_is_what_is_found(
    steps: list[tuple[str, int, int]], sizes: list[int]
) -> None:
    group = make_group(*sizes)
    live: list[GroupReceipt] = []
    told: set[BlockHash] = set()
    for now, (step, seed, size) in enumerate(steps, 1):
        tokens = text(seed, size)
        before = group.stats()
        try:
            if step in ("begin", "serve"):
                tables = begin(group, tokens)
                if step == "serve":
                    group.release(tables)
                else:
                    live.append(tables)
            elif step == "end" and live:
                group.release(live.pop(seed % len(live)))
            elif step == "lease":
                group.lease_match(READER, find(group, tokens), until_ns=now + size)
            elif step == "pin":
                live.append(group.pin("operator", find(group, tokens)))
            elif step == "time":
                group.expire(now)
            elif step == "drop":
                group.drop(hash_tokens(NS, tokens)[-1])
            elif step == "purge" and seed == 0:
                group.purge(NS.digest)
            elif step == "anew" and size == 1:
                group.replace_rank(seed % 3, rank_pool(seed % 3, sizes[seed % 3]))
        except (NoSpaceError, PinQuotaExceededError):
            assert group.stats() == before, "a refused call changed something"
        group.check()
        for event in group.take_events():
            if isinstance(event, BlocksStored):
                assert not told & set(event.block_hashes)
                told |= set(event.block_hashes)
            else:
                told.remove(event.block_hash)
        held = {name for run in group.pools[0].snapshot() for name in run.block_hashes}
        assert told == held
        for other in range(4):
            names = hash_tokens(NS, text(other, 5))
            walk = next((i for i, name in enumerate(names) if name not in held), 5)
            assert find(group, text(other, 5)).num_blocks == walk

"""What a node relies on when it uses the pool: one behaviour a test. Leases, pins and holds: `test_pool_holds`."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kv_core.block import BlockRef
from kv_core.hashing import BlockHash, Extra, hash_tokens
from kv_core.ids import RegionId
from kv_core.namespace import Namespace
from kv_prefix import limits
from kv_prefix.block_pool import BlockPool
from kv_prefix.errors import (
    BlockMismatchError,
    InvalidRequestError,
    NoSpaceError,
    NotHeldError,
)
from kv_prefix.events import BlockRemoved, BlocksStored, RemovalReason
from kv_prefix.matching import prefix_digest
from tests.prefix.helpers_pool import NS, READER, make_pool, match, open_committed, store, text
from tests.prefix.helpers_prefix import BLOCK_SIZE, NAMESPACES


def test_a_chain_under_pressure_keeps_its_head() -> None:
    pool = make_pool(8)
    store(pool, text(8)[:-1])
    pool.open("other", None, 4)
    assert len(match(pool, text(8)).refs) == 4
    removed = [event for event in pool.take_events() if isinstance(event, BlockRemoved)]
    assert [event.block_idx for event in removed] == [7, 6, 5, 4]
    assert {event.reason for event in removed} == {RemovalReason.EVICTED}


def test_a_dropped_block_ends_the_match_and_leaves_no_orphan() -> None:
    pool = make_pool(8)
    store(pool, text(8)[:-1])
    names = hash_tokens(NS, text(8))
    assert pool.drop(names[2]) == 6
    assert len(match(pool, text(8)).refs) == 2
    assert pool.stats().free == 6
    reasons = [event.reason for event in pool.take_events() if isinstance(event, BlockRemoved)]
    assert reasons == [RemovalReason.PARENT_REMOVED] * 5 + [RemovalReason.CHECK_FAILED]
    assert pool.drop(names[0]) == 2
    assert match(pool, text(8)).num_tokens == 0


def test_the_last_prompt_token_is_left_to_compute() -> None:
    pool = make_pool()
    tokens = text(2)[:-1]
    store(pool, tokens)
    found = match(pool, tokens)
    assert (len(found.refs), found.num_tokens) == (1, 2 * BLOCK_SIZE - 1)
    assert match(pool, []).num_tokens == match(pool, [0]).num_tokens == 0


def test_all_pinned_then_an_allocation_fails_at_once_and_works_after_a_release() -> None:
    pool = make_pool(4)
    first, second = open_committed(pool, text(1)), open_committed(pool, text(1, start=100))
    with pytest.raises(NoSpaceError) as raised:
        pool.open("third", None, 1)
    assert raised.value.fields == {"need": 1, "free": 0, "cached": 0, "pinned": 4, "total": 4}
    pool.release(second)
    assert len(pool.open("third", None, 2).refs) == 2
    with pytest.raises(NoSpaceError):
        pool.append(first, 1)


def test_an_allocation_that_does_not_fit_evicts_nothing() -> None:
    pool = make_pool(4)
    table = open_committed(pool, text(1))
    store(pool, text(1, start=100)[:-1])
    pool.take_events()
    with pytest.raises(NoSpaceError):
        pool.append(table, 3)
    assert pool.take_events() == []
    assert len(match(pool, text(1, start=100)).refs) == 1


def test_matched_blocks_are_not_evicted_to_make_room_for_the_rest_of_the_same_request() -> None:
    pool = make_pool(4)
    store(pool, text(3)[:-1])
    found = match(pool, text(3))
    with pytest.raises(NoSpaceError):
        pool.open("request", found, 2)
    opened = pool.open("request", found, 1)
    assert opened.refs[:3] == found.refs


def test_every_hand_out_raises_the_generation() -> None:
    pool = make_pool(1)
    seen = []
    for _ in range(3):
        opened = pool.open("request", None, 1)
        seen.append(opened.refs[0].generation)
        pool.release(opened.table)
    assert seen == sorted(set(seen))


def test_ten_thousand_aborted_requests_leak_nothing() -> None:
    pool = make_pool(8)
    for i in range(10_000):
        found = match(pool, text(2, start=i % 7))
        opened = pool.open("request", found, 3 - len(found.refs))
        if i % 3:
            tokens = text(2, start=i % 7)[: 2 * BLOCK_SIZE]
            pool.commit(opened.table, NS.digest, 0, hash_tokens(NS, tokens), tokens)
        if opened.copy is not None:
            pool.release(opened.copy.receipt)
        pool.release(opened.table)
        pool.take_events()
    stats = pool.stats()
    assert (stats.pinned, stats.free + stats.cached) == (0, 8)
    pool.check()
    store(pool, text(2))
    assert len(match(pool, text(2)).refs) == 2


def test_equal_content_is_stored_once_and_the_second_copy_is_given_back() -> None:
    pool = make_pool()
    tokens = text(2)[:-1]
    names = hash_tokens(NS, tokens)
    first, second = pool.open("a", None, 2), pool.open("b", None, 2)
    assert pool.commit(first.table, NS.digest, 0, names, tokens) == first.refs
    assert pool.commit(second.table, NS.digest, 0, names, tokens) == first.refs
    stats = pool.stats()
    assert (stats.pinned, stats.free, stats.deduplicated) == (2, 6, 2)
    assert len([event for event in pool.take_events() if isinstance(event, BlocksStored)]) == 1
    pool.release(first.table)
    assert pool.refs(second.table) == first.refs


def test_content_under_a_colliding_hash_stays_private_and_so_does_what_follows_it() -> None:
    pool = make_pool()
    same = [BlockHash(bytes(16), 0), BlockHash(bytes(15) + b"\x01", 0)]
    tokens, other = list(range(2 * BLOCK_SIZE)), list(range(100, 100 + 2 * BLOCK_SIZE))
    first, second = pool.open("a", None, 2), pool.open("b", None, 2)
    pool.commit(first.table, NS.digest, 0, same, tokens)
    assert pool.commit(second.table, NS.digest, 0, same, other) == second.refs
    assert (pool.stats().collisions, pool.stats().orphaned) == (1, 1)
    assert pool.match(NS.digest, same, [*other, 0]).num_tokens == 0
    assert pool.match(NS.digest, same, [*tokens, 0]).refs == first.refs


def test_equal_child_tokens_under_a_colliding_parent_do_not_match() -> None:
    """Both hashes of both blocks agree, and the second block's tokens do too; only the first block's differ."""
    pool = make_pool()
    names = [BlockHash(bytes(16), 0), BlockHash(bytes(15) + b"\x01", 0)]
    child = [9] * BLOCK_SIZE
    first = pool.open("a", None, 2)
    pool.commit(first.table, NS.digest, 0, names, [1] * BLOCK_SIZE + child)
    assert pool.match(NS.digest, names, [2] * BLOCK_SIZE + [*child, 0]).num_tokens == 0
    assert pool.match(NS.digest, names[1:], [*child, 0]).num_tokens == 0


def test_a_block_whose_check_hash_differs_is_a_miss() -> None:
    pool = make_pool()
    tokens = [1] * BLOCK_SIZE
    opened = pool.open("a", None, 1)
    pool.commit(opened.table, NS.digest, 0, [BlockHash(bytes(16), 7)], tokens)
    assert pool.match(NS.digest, [BlockHash(bytes(16), 8)], [*tokens, 0]).refs == ()
    assert pool.drop(BlockHash(bytes(16), 8)) == 0


@pytest.mark.parametrize(
    "other",
    [
        Namespace("model", "other weights", block_size=BLOCK_SIZE),
        Namespace("model", "main", lora_name="x", lora_revision="1", block_size=BLOCK_SIZE),
        Namespace("model", "main", salt="x", block_size=BLOCK_SIZE),
    ],
)
def test_other_namespaces_miss_even_if_all_hashes_collide(other: Namespace) -> None:
    pool = make_pool()
    tokens = [1] * BLOCK_SIZE
    name = [BlockHash(bytes(16), 0)]
    opened = pool.open("a", None, 1)
    pool.commit(opened.table, NS.digest, 0, name, tokens)
    pool.release(opened.table)
    assert pool.match(other.digest, name, [*tokens, 0]).num_tokens == 0
    with pytest.raises(NotHeldError):
        pool.lease(READER, other.digest, name[0], prefix_digest(tokens, (), BLOCK_SIZE), until_ns=1)


def test_a_purged_namespace_is_gone_and_others_stay() -> None:
    pool = make_pool()
    store(pool, text(2)[:-1])
    store(pool, text(2)[:-1], NAMESPACES[1])
    running = open_committed(pool, text(2))
    assert pool.purge(NS.digest) == 2
    assert match(pool, text(2)).num_tokens == 0
    assert len(match(pool, text(2), NAMESPACES[1]).refs) == 2
    # The running request keeps its bytes, and what it computes from now on is not shared.
    tokens = list(range(2 * BLOCK_SIZE, 3 * BLOCK_SIZE))
    pool.commit(running, NS.digest, 2, [BlockHash(b"x" * 16, 0)], tokens)
    assert pool.stats().orphaned == 1
    assert pool.purge() == 2


def test_two_pictures_behind_the_same_placeholders_do_not_match_each_other() -> None:
    pool = make_pool()
    tokens = text(3)
    cat, dog = (Extra(BLOCK_SIZE, b"cat", 2),), (Extra(BLOCK_SIZE, b"dog", 2),)
    store(pool, tokens, extras=cat)
    assert len(match(pool, tokens, extras=cat).refs) == 3
    assert (len(match(pool, tokens, extras=dog).refs), match(pool, tokens, extras=dog).num_tokens) == (1, BLOCK_SIZE)
    assert match(pool, tokens).num_tokens == BLOCK_SIZE


def test_a_picture_is_compared_even_if_all_hashes_collide() -> None:
    pool = make_pool()
    tokens = [5] * BLOCK_SIZE
    name = [BlockHash(bytes(16), 0)]
    opened = pool.open("a", None, 1)
    pool.commit(opened.table, NS.digest, 0, name, tokens, [Extra(1, b"cat")])
    assert pool.match(NS.digest, name, [*tokens, 0], [Extra(1, b"dog")]).num_tokens == 1
    assert len(pool.match(NS.digest, name, [*tokens, 0], [Extra(1, b"cat")]).refs) == 1


def test_the_partial_block_after_the_full_ones_is_matched_by_tokens() -> None:
    pool = make_pool()
    store(pool, [1, 2, 3, 4, 5, 6])
    for rest, expected in (([4, 5, 9], 2), ([4, 9], 1), ([9, 5, 6], 0), ([4, 5], 1), ([4], 0)):
        found = match(pool, [1, 2, 3, *rest])
        assert found.num_tokens == BLOCK_SIZE + expected, rest
        assert (found.partial is not None) == bool(expected)


def test_the_closest_of_many_continuations_is_found() -> None:
    pool = make_pool(16)
    for end in ([1, 1, 1], [1, 2, 1], [1, 2, 3], [2, 2, 3], [9, 9, 9]):
        store(pool, [0, 0, 0, *end])
    found = match(pool, [0, 0, 0, 1, 2, 7, 7])
    assert found.partial is not None and found.partial.num_tokens == 2
    assert match(pool, [0, 0, 0, 2, 7]).num_tokens == 4


def test_a_partial_match_is_less_than_a_block_even_without_hashes() -> None:
    pool = make_pool()
    store(pool, [1, 2, 3])
    found = pool.match(NS.digest, [], [1, 2, 3, 4])
    assert found.partial is not None and found.partial.num_tokens == BLOCK_SIZE - 1


def test_a_fork_of_a_full_block_is_a_copy_and_keeps_the_original() -> None:
    pool = make_pool()
    store(pool, [1, 2, 3])
    found = match(pool, [1, 2, 9])
    opened = pool.open("request", found, 1)
    assert found.partial is not None and opened.copy is not None
    assert (opened.copy.src, opened.copy.dst, opened.copy.num_tokens) == (found.partial.ref, opened.refs[0], 2)
    assert opened.num_matched_tokens == 2
    assert pool.stats().pinned == 2, "the source stays until the copy is done"
    pool.release(opened.copy.receipt)
    assert pool.stats().cached == 1


def test_a_partial_tail_nobody_holds_is_continued_in_place_and_a_held_one_is_copied() -> None:
    pool = make_pool()
    first = pool.open("first", None, 1)
    pool.commit_tail(first.table, NS.digest, [1, 2])
    pool.release(first.table)
    found = match(pool, [1, 2, 3, 4])
    assert found.num_tokens == 2 and found.partial is not None
    sending = pool.hold("spill", [found.partial.ref])
    copied = pool.open("second", found, 1)
    assert copied.copy is not None and copied.refs[0].slot != found.partial.ref.slot
    pool.release(copied.copy.receipt)
    pool.release(sending)
    adopted = pool.open("third", found, 1)
    assert adopted.copy is None and adopted.refs[0].slot == found.partial.ref.slot
    assert adopted.refs[0].generation > found.partial.ref.generation
    assert match(pool, [1, 2, 3, 4]).num_tokens == 0


def test_a_shorter_match_of_a_partial_tail_does_not_overwrite_it() -> None:
    pool = make_pool()
    first = pool.open("first", None, 1)
    pool.commit_tail(first.table, NS.digest, [1, 2])
    pool.release(first.table)
    opened = pool.open("second", match(pool, [1, 9, 9]), 1)
    assert opened.copy is not None and opened.copy.num_tokens == 1


def test_of_two_forks_whoever_writes_first_copies_and_the_other_writes_in_place() -> None:
    pool = make_pool()
    parent = pool.open("parent", None, 2)
    child = pool.fork(parent.table, "child", 2)
    assert child.refs == parent.refs[:1]
    copy = pool.prepare_append(child.table, 2)
    assert copy is not None and copy.src == parent.refs[0] and copy.num_tokens == 2
    assert pool.refs(child.table) == (copy.dst,)
    pool.release(copy.receipt)
    assert pool.prepare_append(parent.table, 2) is None
    assert pool.prepare_append(child.table, 2) is None


def test_a_copy_that_finds_no_room_changes_nothing() -> None:
    pool = make_pool(1)
    parent = pool.open("parent", None, 1)
    child = pool.fork(parent.table, "child", 2)
    with pytest.raises(NoSpaceError):
        pool.prepare_append(child.table, 2)
    pool.release(parent.table)
    assert pool.prepare_append(child.table, 2) is None


def test_what_does_not_fit_a_table_is_refused_before_anything_changes() -> None:
    pool = make_pool()
    table = open_committed(pool, text(1))
    names = hash_tokens(NS, text(2)[:-1])
    before = pool.stats()
    for first, hashed, tokens in (
        (0, names[:1], [1]),
        (2, names[:1], [1, 2, 3]),
        (1, names, list(range(6))),
        (-1, names[:1], [1, 2, 3]),
        (0, [BlockHash(b"x" * 16, 0)], [0, 1, 2]),
    ):
        with pytest.raises(BlockMismatchError):
            pool.commit(table, NS.digest, first, hashed, tokens)
    with pytest.raises(BlockMismatchError):
        pool.commit(table, NAMESPACES[1].digest, 1, names[1:], [3, 4, 5])
    with pytest.raises(BlockMismatchError):
        pool.commit_tail(table, NS.digest, [1, 2, 3])
    with pytest.raises(BlockMismatchError):
        pool.prepare_append(table, 2 * BLOCK_SIZE)
    with pytest.raises(BlockMismatchError):
        pool.fork(table, "fork", 2 * BLOCK_SIZE + 1)
    assert pool.stats() == before and pool.stats().collisions == 0


@pytest.mark.parametrize(("num_slots", "block_size"), [(0, 1), (limits.MAX_SLOTS + 1, 1), (1, 0)])
def test_impossible_sizes_are_refused(num_slots: int, block_size: int) -> None:
    with pytest.raises(InvalidRequestError):
        BlockPool(num_slots, block_size, region=RegionId(0))


def test_impossible_calls_are_refused() -> None:
    pool = make_pool()
    for act in (
        lambda: pool.open("", None, 1),
        lambda: pool.open("x" * 1000, None, 1),
        lambda: pool.open("a", None, -1),
        lambda: pool.append(pool.open("a", None, 0).table, -1),
    ):
        with pytest.raises(InvalidRequestError):
            act()


@given(st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=9), max_size=8))
def test_a_snapshot_rebuilds_the_same_blocks(prompts: list[list[int]]) -> None:
    pool = make_pool(32)
    for prompt in prompts:
        store(pool, prompt)
    told: dict[BlockHash, tuple[BlockRef, BlockHash | None]] = {}
    for events in (pool.take_events(), pool.snapshot()):
        seen = {}
        for event in events:
            assert isinstance(event, BlocksStored)
            parent = event.parent
            for name, ref in zip(event.block_hashes, event.refs, strict=True):
                assert parent is None or parent in seen, "parents come first"
                seen[name] = (ref, parent)
                parent = name
        assert not told or told == seen
        told = seen

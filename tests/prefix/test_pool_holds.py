"""Who keeps blocks in place: leases, pins, spills and their receipts; one behaviour a test."""

import pytest

from kv_core.block import BlockRef
from kv_core.hashing import BlockHash, Extra, hash_tokens
from kv_core.ids import Generation, NodeId, RegionId
from kv_prefix import limits
from kv_prefix.errors import (
    DigestMismatchError,
    InvalidRequestError,
    LeaseExpiredError,
    LeaseLimitError,
    NoSpaceError,
    NotHeldError,
    StaleMatchError,
    UnknownReceiptError,
)
from kv_prefix.matching import prefix_digest
from kv_prefix.pins import HoldKind, Receipt
from tests.prefix.helpers_pool import NS, READER, make_pool, match, open_committed, store, text
from tests.prefix.helpers_prefix import BLOCK_SIZE


def test_a_match_of_evicted_blocks_is_refused_and_changes_nothing() -> None:
    pool = make_pool(2)
    store(pool, text(2)[:-1])
    found = match(pool, text(2))
    pool.release(pool.open("other", None, 2).table)
    before = pool.stats()
    for act in (
        lambda: pool.open("request", found, 0),
        lambda: pool.pin("operator", found),
        lambda: pool.lease_match(READER, found, until_ns=1),
        lambda: pool.hold("spill", found.refs),
        lambda: pool.hold("spill", [BlockRef(RegionId(1), 99, Generation(1))]),
        lambda: pool.hold("spill", [BlockRef(RegionId(2), 0, Generation(2))]),
    ):
        with pytest.raises(StaleMatchError):
            act()
    assert pool.stats() == before


def test_a_receipt_is_given_back_once() -> None:
    pool = make_pool()
    table = open_committed(pool, text(2))
    pool.release(table)
    with pytest.raises(UnknownReceiptError):
        pool.release(table)
    with pytest.raises(UnknownReceiptError):
        pool.append(table)
    assert pool.stats().pinned == 0


def test_a_forged_receipt_of_another_owner_is_refused() -> None:
    pool = make_pool()
    table = open_committed(pool, text(2))
    with pytest.raises(UnknownReceiptError):
        pool.release(Receipt(table.receipt_id, HoldKind.TABLE, "somebody else"))


def test_lookups_pin_nothing() -> None:
    pool = make_pool()
    store(pool, text(2))
    before = pool.stats()
    for _ in range(1000):
        match(pool, text(2))
    assert pool.stats() == before


def test_a_duplicate_that_is_still_being_sent_keeps_its_slot() -> None:
    pool = make_pool()
    tokens = text(1)[:-1]
    store(pool, tokens)
    opened = pool.open("b", None, 1)
    sending = pool.hold("outgoing transfer", opened.refs)
    (ref,) = pool.commit(opened.table, NS.digest, 0, hash_tokens(NS, tokens), tokens)
    assert ref != opened.refs[0]
    assert pool.refs(sending) == opened.refs
    assert pool.stats().pinned == 2
    pool.release(sending)
    assert pool.stats().free == 7


def test_a_leased_prefix_is_not_evicted_until_its_time_and_neither_is_its_beginning() -> None:
    pool = make_pool(4)
    store(pool, text(3)[:-1])
    names = hash_tokens(NS, text(3))
    digest = prefix_digest(text(3), (), 3 * BLOCK_SIZE)
    lease = pool.lease(READER, NS.digest, names[2], digest, until_ns=100, first_block_idx=2)
    assert len(lease.refs) == 1 and lease.block_hashes == (names[2],)
    with pytest.raises(NoSpaceError):
        pool.open("request", None, 2)
    assert pool.expire(99) == []
    assert [receipt.receipt_id for receipt in pool.expire(100)] == [lease.receipt.receipt_id]
    pool.open("request", None, 4)
    with pytest.raises(UnknownReceiptError):
        pool.release(lease.receipt)


def test_a_renewed_lease_lives_on_and_an_ended_one_does_not_come_back() -> None:
    pool = make_pool()
    store(pool, text(1))
    lease = pool.lease_match(READER, match(pool, text(1)), until_ns=10)
    renewed = pool.renew(lease.receipt, now_ns=9, until_ns=20)
    assert pool.expire(10) == []
    with pytest.raises(LeaseExpiredError):
        pool.renew(renewed, now_ns=20, until_ns=30)
    assert pool.expire(20) == [renewed]
    with pytest.raises(LeaseExpiredError):
        pool.renew(renewed, now_ns=20, until_ns=30)
    assert pool.stats().pinned == 0


def test_a_reader_with_other_tokens_gets_no_lease() -> None:
    pool = make_pool()
    store(pool, text(2))
    names = hash_tokens(NS, text(2))
    for digest in (prefix_digest(text(2, start=1), (), 6), prefix_digest(text(2), (Extra(0, b"x"),), 6), b""):
        with pytest.raises(DigestMismatchError):
            pool.lease(READER, NS.digest, names[1], digest, until_ns=1)
    for name in (BlockHash(names[1].sequence, names[1].check ^ 1), BlockHash(b"?" * 16, 0), BlockHash(b"", 0)):
        with pytest.raises(NotHeldError):
            pool.lease(READER, NS.digest, name, b"", until_ns=1)
    with pytest.raises(InvalidRequestError):
        pool.lease(READER, NS.digest, names[1], prefix_digest(text(2), (), 6), until_ns=1, first_block_idx=2)
    assert pool.stats().leases == 0


def test_a_lease_covers_extras_that_reach_across_blocks() -> None:
    pool = make_pool()
    extras = (Extra(1, b"cat", BLOCK_SIZE), Extra(2 * BLOCK_SIZE + 1, b"dog", 50))
    store(pool, text(3), extras=extras)
    for num_blocks in (1, 2, 3):
        name = hash_tokens(NS, text(3), extras)[num_blocks - 1]
        digest = prefix_digest(text(3), extras, num_blocks * BLOCK_SIZE)
        assert len(pool.lease(READER, NS.digest, name, digest, until_ns=1).refs) == num_blocks


def test_one_reader_cannot_take_all_leases(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "MAX_LEASES_PER_READER", 2)
    monkeypatch.setattr(limits, "MAX_LEASES", 3)
    pool = make_pool()
    store(pool, text(1))
    found = match(pool, text(1))
    held = [pool.lease_match(READER, found, until_ns=1) for _ in range(2)]
    with pytest.raises(LeaseLimitError):
        pool.lease_match(READER, found, until_ns=1)
    pool.lease_match(NodeId("other"), found, until_ns=1)
    with pytest.raises(LeaseLimitError):
        pool.lease_match(NodeId("third"), found, until_ns=1)
    pool.release(held[0].receipt)
    pool.lease_match(NodeId("third"), found, until_ns=1)
    assert pool.stats().leases == 3


def test_a_block_is_not_freed_while_it_is_spilled() -> None:
    pool = make_pool(2)
    store(pool, text(1)[:-1])
    spill = pool.hold("spill", match(pool, text(1)).refs)
    with pytest.raises(NoSpaceError):
        pool.open("request", None, 2)
    assert pool.purge() == 1
    assert pool.stats().pinned == 1, "purged, but the bytes stay until the spill is over"
    pool.release(spill)
    assert pool.stats().free == 2


def test_every_hold_is_listed_with_its_owner_and_end() -> None:
    pool = make_pool()
    store(pool, text(2))
    found = match(pool, text(2))
    table = pool.open("request", found, 1, use_partial=False).table
    lease = pool.lease_match(READER, found, until_ns=5).receipt
    pin = pool.pin("operator", found)
    assert {(h.receipt.kind, h.receipt.owner, h.receipt.until_ns, h.num_slots) for h in pool.holds()} == {
        (HoldKind.TABLE, "request", None, 3),
        (HoldKind.LEASE, "reader", 5, 2),
        (HoldKind.PIN, "operator", None, 2),
    }
    assert pool.stats().operator_pins == 2
    for receipt in (table, lease, pin):
        pool.release(receipt)
    assert pool.holds() == [] and pool.stats().operator_pins == 0


def test_after_any_number_of_reads_the_counts_are_what_they_were() -> None:
    """A reference that a reader forgets pins a block for ever, elsewhere: here each is one receipt, given back once."""
    pool = make_pool()
    store(pool, text(2))
    found, before = match(pool, text(2)), pool.stats()
    for number in range(50):
        lease = pool.lease_match(READER, found, until_ns=number + 1)
        copy = pool.hold("transfer", found.refs)
        table = pool.open("request", found, 1, use_partial=False).table
        assert pool.stats().pinned == 3
        if number % 2:
            pool.release(lease.receipt)
        else:
            pool.expire(number + 1)
        pool.release(table)
        pool.release(copy)
    assert pool.stats() == before and pool.holds() == []
    pool.check()

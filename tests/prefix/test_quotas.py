"""Tenants within their quotas: against a plain count over what every receipt and every stored block occupies."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kv_core.hashing import hash_tokens
from kv_core.ids import RegionId
from kv_core.namespace import Namespace
from kv_prefix import limits
from kv_prefix.block_pool import BlockPool
from kv_prefix.errors import InvalidRequestError, NoSpaceError, TenantQuotaError
from kv_prefix.events import BlockRemoved, BlocksStored
from kv_prefix.pins import Receipt
from kv_prefix.pool_types import Opened, PoolMatch
from kv_prefix.quotas import AccountLimits, AccountSource
from tests.prefix.helpers_prefix import BLOCK_SIZE

NUM_SLOTS = 12
SPACES = {name: Namespace("model", "main", salt=name, block_size=BLOCK_SIZE) for name in ("a", "b", "free")}
LIMITS = {"a": AccountLimits(5, 2), "b": AccountLimits(None, None)}


def account_of(digest: bytes) -> str | None:
    return next((name for name, space in SPACES.items() if space.digest == digest), None)


def make_pool(num_slots: int = NUM_SLOTS, accounts: dict[str, AccountLimits] | None = None) -> BlockPool:
    source = AccountSource(LIMITS if accounts is None else accounts, account_of)
    return BlockPool(num_slots, BLOCK_SIZE, region=RegionId(0), retain_quota=num_slots, accounts=source)


def text(seed: int, num_blocks: int) -> list[int]:
    return [seed * 100 + i for i in range(num_blocks * BLOCK_SIZE)]


def find(pool: BlockPool, tenant: str, tokens: list[int]) -> PoolMatch:
    space = SPACES[tenant]
    return pool.match(space.digest, hash_tokens(space, tokens), [*tokens, 0])


def begin(pool: BlockPool, tenant: str, tokens: list[int]) -> Opened:
    """A request whose blocks are computed and shared."""
    space, match = SPACES[tenant], find(pool, tenant, tokens)
    names, first = hash_tokens(space, tokens), len(match.refs)
    opened = pool.open(f"request of {tenant}", match, len(names) - first, use_partial=False)
    pool.commit(opened.table, space.digest, first, names[first:], tokens[first * BLOCK_SIZE :])
    return opened


def serve(pool: BlockPool, tenant: str, tokens: list[int]) -> None:
    pool.release(begin(pool, tenant, tokens).table)


def test_over_its_quota_a_tenant_gives_up_its_own_blocks_and_nobody_elses() -> None:
    pool = make_pool()
    serve(pool, "free", text(1, 2))
    serve(pool, "a", text(2, 3))
    serve(pool, "b", text(3, 2))
    assert pool.stats().free == 5
    serve(pool, "a", text(4, 4))
    assert pool.accounts()["a"].used == 5
    assert (len(find(pool, "a", text(2, 3)).refs), len(find(pool, "a", text(4, 4)).refs)) == (1, 4)
    assert (len(find(pool, "free", text(1, 2)).refs), len(find(pool, "b", text(3, 2)).refs)) == (2, 2)
    pool.check()


def test_with_all_its_own_pinned_a_tenant_is_refused_at_once_by_name_and_others_are_not() -> None:
    pool = make_pool()
    held = begin(pool, "a", text(1, 4))
    before = pool.stats()
    with pytest.raises(TenantQuotaError, match="tenant 'a': 2 more blocks exceed its quota of 5, of which 4") as raised:
        begin(pool, "a", text(2, 2))
    assert raised.value.fields["evictable"] == 0
    assert pool.stats() == before
    serve(pool, "b", text(3, 6))
    pool.append(held.table)
    with pytest.raises(TenantQuotaError):
        pool.append(held.table)
    pool.release(held.table)
    serve(pool, "a", text(2, 5))
    pool.check()


def test_a_copy_before_writing_and_a_fork_are_charged_too() -> None:
    pool = make_pool(accounts={"a": AccountLimits(1, None)})
    parent = pool.open("parent", find(pool, "a", []), 1)
    child = pool.fork(parent.table, "child", 1)
    with pytest.raises(TenantQuotaError):
        pool.prepare_append(child.table, 1)
    pool.release(parent.table)
    assert pool.prepare_append(child.table, 1) is None


def test_what_is_retained_goes_last_among_its_own_and_only_so_much_can_be() -> None:
    pool = make_pool()
    serve(pool, "a", text(1, 3))
    assert pool.retain(find(pool, "a", text(1, 3)), priority=5, until_ns=100) == 2
    assert pool.accounts()["a"].retained == pool.stats().retained == 2
    serve(pool, "a", text(2, 2))
    # Five are used: the third block of the first prompt and both of the second go before the two that are kept.
    serve(pool, "a", text(3, 3))
    assert (len(find(pool, "a", text(1, 3)).refs), len(find(pool, "a", text(2, 2)).refs)) == (2, 0)
    pool.expire(100)
    assert pool.accounts()["a"].retained == 0
    serve(pool, "a", text(4, 2))
    assert len(find(pool, "a", text(1, 3)).refs) == 0, "retained no longer, and used least recently"
    pool.check()


def test_the_pool_as_a_whole_retains_within_its_quota() -> None:
    source = AccountSource(LIMITS, account_of)
    pool = BlockPool(8, BLOCK_SIZE, region=RegionId(0), retain_quota=3, accounts=source)
    serve(pool, "b", text(1, 4))
    assert pool.retain(find(pool, "b", text(1, 4)), priority=1, until_ns=9) == 3
    # What is said anew of the same blocks takes no more room.
    assert pool.retain(find(pool, "b", text(1, 3)), priority=2, until_ns=9) == 3


def test_a_namespace_that_becomes_known_later_is_charged_from_then_on() -> None:
    known: list[str] = []
    source = AccountSource(LIMITS, lambda digest: account_of(digest) if known else None)
    pool = BlockPool(8, BLOCK_SIZE, region=RegionId(0), accounts=source)
    serve(pool, "a", text(1, 2))
    assert pool.accounts()["a"].used == 0
    known.append("a")
    serve(pool, "a", text(2, 2))
    assert pool.accounts()["a"].used == 2
    pool.check()


def test_there_is_a_bound_on_accounts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "MAX_ACCOUNTS", 1)
    with pytest.raises(InvalidRequestError):
        make_pool()


STEPS = st.lists(
    st.tuples(
        st.sampled_from(["begin", "begin", "serve", "append", "end", "retain", "purge", "time"]),
        st.sampled_from(["a", "a", "a", "b", "free"]),
        st.integers(0, 3),
        st.integers(1, 5),
    ),
    max_size=40,
)


@settings(max_examples=150, deadline=None)
@given(STEPS)
def test_no_life_of_requests_takes_a_tenant_over_its_quota_or_another_s_blocks_for_it(
    steps: list[tuple[str, str, int, int]],
) -> None:
    pool = make_pool()
    live: list[tuple[str, Receipt]] = []
    stored: dict[bytes, tuple[str, int]] = {}

    def occupied(tenant: str) -> set[int]:
        held = {ref.slot for owner, table in live if owner == tenant for ref in pool.refs(table)}
        return held | {slot for owner, slot in stored.values() if owner == tenant}

    def pinned(tenant: str) -> set[int]:
        """Held, or the beginning of what is held: here always part of the same table."""
        return {ref.slot for owner, table in live if owner == tenant for ref in pool.refs(table)}

    def hear(asking: str, free_before: int, got: int) -> None:
        gone = []
        for event in pool.take_events():
            owner = account_of(event.namespace)
            assert owner is not None
            if isinstance(event, BlocksStored):
                for name, ref in zip(event.block_hashes, event.refs, strict=True):
                    stored[name.sequence] = owner, ref.slot
            else:
                assert isinstance(event, BlockRemoved)
                del stored[event.block_hash.sequence]
                gone.append(owner)
        if got <= free_before:
            assert set(gone) <= {asking}, "there was room: only its own quota can have cost blocks"

    for now, (step, tenant, seed, size) in enumerate(steps, 1):
        free, tokens = pool.stats().free, text(seed, size)
        got = 0
        try:
            if step in ("begin", "serve"):
                matched = find(pool, tenant, tokens)
                got = size - len(matched.refs)
                own = pinned(tenant) | {ref.slot for ref in matched.refs}
                try:
                    opened = begin(pool, tenant, tokens)
                except TenantQuotaError:
                    assert tenant == "a" and len(own) + got > 5
                    got = 0
                    raise
                assert tenant != "a" or len(own) + got <= 5
                if step == "serve":
                    pool.release(opened.table)
                else:
                    live.append((tenant, opened.table))
            elif step == "append" and live:
                tenant, table = live[seed % len(live)]
                got = 1
                pool.append(table)
            elif step == "end" and live:
                pool.release(live.pop(seed % len(live))[1])
            elif step == "retain":
                pool.retain(find(pool, tenant, tokens), priority=seed, until_ns=now + size)
            elif step == "purge" and size == 1:
                pool.purge(SPACES[tenant].digest)
                pool.take_events()
                stored = {name: one for name, one in stored.items() if one[0] != tenant}
            elif step == "time":
                pool.expire(now)
        except NoSpaceError:
            got = 0
        hear(tenant, free, got)
        pool.check()
        for name in ("a", "b"):
            assert pool.accounts()[name].used == len(occupied(name))
        assert pool.accounts()["a"].used <= 5 and pool.accounts()["a"].retained <= 2

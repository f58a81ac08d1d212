"""What is done for many blocks at once, against the same done for one after the other."""

from collections.abc import Iterator, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kv_core.block import BlockRef
from kv_core.hashing import Extra, hash_tokens
from kv_prefix.adaptive_eviction import BOOSTS, AdaptivePolicy, Duel, _Miniature
from kv_prefix.block_pool import BlockPool
from kv_prefix.events import BlockRemoved, BlocksStored, PoolEvent
from kv_prefix.eviction import POLICIES, EvictionPolicy, make_eviction_policy
from kv_prefix.quotas import AccountLimits, AccountSource, TenantQuotas
from kv_prefix.retention import RetentionPolicy
from tests.prefix.helpers_pool import NS, make_pool, store
from tests.prefix.helpers_prefix import BLOCK_SIZE, weak_hashes

NUM_SLOTS = 40
TEXTS = st.lists(st.integers(0, 1), min_size=1, max_size=8)
"""Prompts by block: each of three tokens alike, so that many begin alike."""


def tokens_of(blocks: Sequence[int]) -> list[int]:
    return [token for token in blocks for _ in range(BLOCK_SIZE)]


def by_block(events: Sequence[PoolEvent]) -> Iterator[object]:
    """Each block that was told of, with all that was told of it, however many an event held."""
    for event in events:
        if not isinstance(event, BlocksStored):
            yield event
            continue
        parent, nbytes = event.parent, len(event.tokens) // len(event.block_hashes)
        for i, (block_hash, ref) in enumerate(zip(event.block_hashes, event.refs, strict=True)):
            idx = event.first_block_idx + i
            start, end = idx * BLOCK_SIZE, (idx + 1) * BLOCK_SIZE
            extras = [e for e in event.extras if e.start < end and e.start + e.length > start]
            tokens = event.tokens[i * nbytes : (i + 1) * nbytes]
            yield event.namespace, idx, parent, block_hash, tokens, extras, ref
            parent = block_hash


def commit(
    pool: BlockPool, texts: Sequence[Sequence[int]], forked: int, extras: Sequence[Extra], *, weak: bool, at_once: bool
) -> list[object]:
    """Commit the last text over what the others left, after a fork of it committed `forked` blocks; all that shows."""
    for blocks in texts[:-1]:
        tokens = tokens_of(blocks)
        names = weak_hashes(NS, tokens) if weak else hash_tokens(NS, tokens)
        opened = pool.open("before", None, len(blocks))
        pool.commit(opened.table, NS.digest, 0, names, tokens)
        pool.release(opened.table)
    tokens = tokens_of(texts[-1])
    names = weak_hashes(NS, tokens) if weak else hash_tokens(NS, tokens, extras)
    opened = pool.open("request", None, len(names))
    other = pool.fork(opened.table, "fork", len(tokens))
    forked = min(forked, len(names))
    pool.commit(other.table, NS.digest, 0, names[:forked], tokens[: forked * BLOCK_SIZE], extras)
    refs: list[BlockRef] = []
    step = len(names) if at_once else 1
    for first in range(0, len(names), step):
        part = tokens[first * BLOCK_SIZE : (first + step) * BLOCK_SIZE]
        refs += pool.commit(opened.table, NS.digest, first, names[first : first + step], part, extras)
        pool.check()
    shown: list[object] = [refs, pool.refs(opened.table), pool.stats(), *by_block(pool.take_events())]
    shown += sorted(by_block(list(pool.snapshot())), key=repr)
    pool.release(opened.table)
    pool.release(other.table)
    pool.check()
    # What comes after: who goes first, and that everything goes.
    pool.evict(NUM_SLOTS)
    pool.check()
    return [*shown, *by_block(pool.take_events()), pool.stats()]


@given(
    st.lists(TEXTS, min_size=1, max_size=4),
    st.integers(0, 3),
    st.lists(st.builds(Extra, st.integers(0, 20), st.just(b"picture"), st.integers(1, 7)), max_size=2, unique=True),
    st.booleans(),
    st.sampled_from(POLICIES),
)
def test_blocks_committed_at_once_are_as_if_committed_one_by_one(
    texts: list[list[int]], forked: int, extras: list[Extra], weak: bool, policy: str
) -> None:
    extras = list({extra.start: extra for extra in extras}.values())
    together, alone = (
        commit(make_pool(NUM_SLOTS, policy), texts, forked, extras, weak=weak, at_once=at_once)
        for at_once in (True, False)
    )
    assert together == alone


def test_a_run_ends_where_a_hash_is_taken_within_it() -> None:
    pool = make_pool()
    tokens = tokens_of(range(4))
    names = hash_tokens(NS, tokens)
    names[2] = names[1]
    opened = pool.open("request", None, 4)
    pool.commit(opened.table, NS.digest, 0, names, tokens)
    pool.check()
    stats = pool.stats()
    assert (stats.collisions, stats.orphaned) == (1, 1)
    (event,) = pool.take_events()
    assert isinstance(event, BlocksStored)
    assert (event.block_hashes, event.refs) == (tuple(names[:2]), opened.refs[:2])


def make_policies(kind: str) -> tuple[TenantQuotas, RetentionPolicy, EvictionPolicy]:
    """A pool's policy as it stands in a pool with accounts, and what is in its wrappers, outermost first."""
    accounts = AccountSource({"a": AccountLimits(max_retained=3)}, lambda digest: "a")
    inner = make_eviction_policy(kind, 12)
    retention = RetentionPolicy(inner, 12)
    quotas = TenantQuotas(retention, 12, accounts)
    for slot in range(12):
        quotas.charge(slot, 1)
    return quotas, retention, inner


class Tree:
    """What a policy is told of: slots with content, each the child of the one below it or a root."""

    def __init__(self, kind: str, roots: frozenset[int]) -> None:
        self.policy, self.retention, self.inner = make_policies(kind)
        self.roots = roots
        self.offered: set[int] = set()
        self.stored: set[int] = set()
        self.gone: list[int] = []

    def offer(self, slot: int) -> None:
        """As the pool does: a slot with a child is not offered."""
        if slot + 1 in self.roots or slot + 1 not in self.stored:
            self.offered.add(slot)
            self.policy.offer(slot)

    def store(self, slots: Sequence[int]) -> None:
        self.stored.update(slots)
        for slot in slots:
            if slot not in self.roots and slot - 1 in self.offered:
                self.offered.discard(slot - 1)
                self.policy.withdraw(slot - 1)

    @property
    def state(self) -> list[object]:
        """What nobody asks for, but what later victims follow from."""
        ghosts = vars(self.inner).get("_ghosts")
        names: list[object] = [] if ghosts is None else list(vars(ghosts)["_numbers"].items())
        if isinstance(self.inner, AdaptivePolicy):
            # Asked for its boost, it has its miniatures hear of everything.
            names += [self.inner.boost, *vars(vars(self.inner)["_duel"])["_uses"].items()]
        return [names, *(vars(policy)["_offered"] for policy in (self.policy, self.retention))]

    def leave(self, slot: int) -> int:
        self.gone.append(slot)
        self.offered.discard(slot)
        self.stored.discard(slot)
        parent = slot - 1
        if slot in self.roots or parent not in self.stored or parent in self.offered:
            return -1
        self.offered.add(parent)
        return parent

    def evict_one_by_one(self, count: int) -> None:
        for _ in range(count):
            slot = self.policy.victim()
            assert slot is not None
            self.policy.remove(slot, evicted=True)
            following = self.leave(slot)
            if following >= 0:
                self.policy.offer(following)


@given(
    st.frozensets(st.integers(0, 11), min_size=1, max_size=4),
    st.lists(st.tuples(st.sampled_from("uuuoeer"), st.lists(st.integers(0, 11), min_size=1, unique=True)), max_size=40),
)
@pytest.mark.parametrize("kind", POLICIES)
def test_slots_used_and_evicted_at_once_are_as_if_one_by_one(
    kind: str, roots: frozenset[int], steps: list[tuple[str, list[int]]]
) -> None:
    together, alone = Tree(kind, roots), Tree(kind, roots)
    every = list(range(12))
    for step, slots in [("u", every), *steps, ("o", every), ("e", every)]:
        new, old = [s for s in slots if s not in alone.stored], [s for s in slots if s in alone.stored]
        if step == "u":
            names = [b"%d" % (slot // 2) for slot in new]
            together.policy.insert_all(new, names)
            together.policy.touch_all(old)
            for slot, name in zip(new, names, strict=True):
                alone.policy.insert(slot, name)
            for slot in old:
                alone.policy.touch(slot)
            for tree in (together, alone):
                tree.store(new)
        elif step == "o":
            for tree in (together, alone):
                for slot in old:
                    tree.offer(slot)
        elif step == "r":
            for tree in (together, alone):
                for slot in old:
                    tree.policy.retain(slot, slot % 2, 10)
        else:
            count = min(len(slots), len(alone.offered))
            together.policy.evict_all(count, together.leave)
            alone.evict_one_by_one(count)
        assert together.gone == alone.gone and together.state == alone.state
        for account in (0, 1):
            assert together.policy.own_victim(account) == alone.policy.own_victim(account)


class PlainDuel:
    """The miniatures by the letter of their module: ranks in dicts, the lowest found by looking at all of them."""

    def __init__(self, capacity: int, size: int) -> None:
        self.size = size
        self.steps = [boost * capacity for boost in BOOSTS]
        self.ranks: list[dict[bytes, float]] = [{} for _ in BOOSTS]

    def access(self, name: bytes, now: int, level: int) -> list[int]:
        """By candidate, whether the name was there."""
        hits = [int(name in ranks) for ranks in self.ranks]
        for ranks, step in zip(self.ranks, self.steps, strict=True):
            ranks[name] = max(now + step * level, ranks.get(name, 0))
            if len(ranks) > self.size:
                del ranks[min(ranks, key=lambda other: (ranks[other], other))]
        return hits


@given(
    st.integers(1, 5),
    st.lists(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 3)), min_size=1, max_size=9), max_size=20),
)
def test_a_miniature_drops_the_lowest_rank_of_all(size: int, parts: list[list[tuple[int, int]]]) -> None:
    # Small steps, so that ranks of different levels come to be equal.
    plain = PlainDuel(size, size)
    miniatures = [_Miniature(size, step) for step in plain.steps]
    now = 0
    for part in parts:
        names, levels = [b"%d" % name for name, _ in part], [level for _, level in part]
        numbers = list(range(now + 1, now + len(part) + 1))
        now += len(part)
        expected = [plain.access(*access) for access in zip(names, numbers, levels, strict=True)]
        hits = [miniature.access(names, numbers, levels) for miniature in miniatures]
        assert hits == [sum(column) for column in zip(*expected, strict=True)]


@given(st.lists(st.integers(0, 30), max_size=400), st.integers(1, 12), st.integers(1, 130))
def test_accesses_heard_together_decide_as_if_heard_one_by_one(accesses: list[int], capacity: int, many: int) -> None:
    together, alone = Duel(capacity), Duel(capacity)
    names = [b"%d" % name for name in accesses]
    for first in range(0, len(names), many):
        together.observe(names[first : first + many], first + 1)
        for at, name in enumerate(names[first : first + many], first + 1):
            alone.observe([name], at)
        assert vars(together)["_hits"] == vars(alone)["_hits"]
        assert vars(together)["_squares"] == vars(alone)["_squares"]
        assert (together.leader, vars(together)["_batch"]) == (alone.leader, vars(alone)["_batch"])


def test_a_long_prompt_is_told_in_one_event_and_leaves_tail_first() -> None:
    pool = make_pool(700, "adaptive")
    store(pool, list(range(600 * BLOCK_SIZE)))
    (stored,) = pool.take_events()
    assert isinstance(stored, BlocksStored) and len(stored.refs) == 600
    assert list(pool.snapshot()) == [stored]
    pool.evict(600)
    gone = [event.block_hash for event in pool.take_events() if isinstance(event, BlockRemoved)]
    assert gone == list(reversed(stored.block_hashes))


def test_neighbours_are_handed_out_together_in_ascending_order() -> None:
    pool = make_pool(9)
    first = pool.open("first", None, 4)
    assert [ref.slot for ref in first.refs] == [0, 1, 2, 3]
    assert pool.append(first.table, 0) == ()
    assert [ref.slot for ref in pool.append(first.table, 3)] == [4, 5, 6]
    pool.check()

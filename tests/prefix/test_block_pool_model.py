"""The pool against a naive one: random lives of requests, readers and operators, with the bytes simulated.

The naive pool is three plain collections: what every receipt holds, which prefixes were reported stored and not yet
removed, and what was written to each slot. Everything else about the pool is recomputed from these after every step.
"""

from dataclasses import dataclass, field

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kv_core.hashing import BlockHash
from kv_core.ids import NodeId, RegionId
from kv_core.namespace import Namespace
from kv_prefix.block_pool import BlockPool
from kv_prefix.errors import NoSpaceError, PinQuotaExceededError, UnknownReceiptError
from kv_prefix.events import BlockRemoved, BlocksStored, RemovalReason
from kv_prefix.eviction import POLICIES, make_eviction_policy
from kv_prefix.matching import prefix_digest
from kv_prefix.pins import Receipt
from kv_prefix.pool_types import CopyBlock
from tests.prefix.helpers_prefix import BLOCK_SIZE, NAMESPACES, Arena, Prefix, hashes, weak_hashes

NUM_SLOTS = 9
PIN_QUOTA = 3
PICK = st.integers(0, 1_000)


@st.composite
def prompts(draw: st.DrawFn) -> list[int]:
    """Prompts of 1 to 12 tokens that often begin alike: they differ in their last three tokens at most."""
    length, end = draw(st.integers(1, 12)), draw(st.integers(0, 7))
    return [0] * (length - 3) + [end >> bit & 1 for bit in range(min(length, 3))]


@dataclass
class Request:
    """A running request: its tokens, how many have KV, and where."""

    receipt: Receipt
    namespace: Namespace
    tokens: list[int]
    slots: list[int]
    written: int
    committed: int = 0


@dataclass
class Reader:
    """A lease or pin, and what its slots must go on holding."""

    receipt: Receipt
    slots: list[int]
    cells: list[list[Prefix | None]]
    until_ns: int | None = None


@dataclass
class Naive:
    """Stored blocks by the prefix they end, and what each slot holds of them."""

    stored: dict[Prefix, BlockHash] = field(default_factory=dict)
    tails: dict[int, tuple[Prefix, int]] = field(default_factory=dict)
    removed: list[Prefix] = field(default_factory=list)

    def walk(self, namespace: Namespace, tokens: list[int]) -> int:
        """Full blocks of the prompt that are stored without a hole, its last token left out."""
        count = 0
        while (count + 1) * BLOCK_SIZE < len(tokens):
            if (namespace.digest, tuple(tokens[: (count + 1) * BLOCK_SIZE])) not in self.stored:
                break
            count += 1
        return count


class PoolMachine(RuleBasedStateMachine):
    """Rules are what a node does; after every step the pool must agree with the naive one."""

    weak = False

    @initialize(policy=st.sampled_from(POLICIES))
    def start(self, policy: str) -> None:
        self.pool = BlockPool(
            NUM_SLOTS,
            BLOCK_SIZE,
            region=RegionId(7),
            policy=make_eviction_policy(policy, NUM_SLOTS),
            pin_quota=PIN_QUOTA,
        )
        self.arena = Arena(NUM_SLOTS)
        self.naive = Naive()
        self.now_ns = 0
        self.live: list[Request] = []
        self.held: list[Reader] = []
        self.by_slot_prefix: dict[Prefix, int] = {}

    def names(self, namespace: Namespace, tokens: list[int]) -> list[BlockHash]:
        return (weak_hashes if self.weak else hashes)(namespace, tokens)

    def usable(self, extra_pinned: set[int] = frozenset()) -> int:  # type: ignore[assignment]
        """Slots that can be had: those that are not held, nor the beginning of something held."""
        return NUM_SLOTS - len(self.pinned() | extra_pinned)

    def pinned(self) -> set[int]:
        held = {slot for request in self.live for slot in request.slots}
        held |= {slot for reader in self.held for slot in reader.slots}
        for prefix, slot in self.by_slot_prefix.items():
            if slot in held:
                held |= self.path(prefix)
        return held

    def path(self, prefix: Prefix) -> set[int]:
        digest, tokens = prefix
        return {self.by_slot_prefix[digest, tokens[:n]] for n in range(BLOCK_SIZE, len(tokens) + 1, BLOCK_SIZE)}

    def drain(self, before_pinned: set[int], *, may_evict: int) -> None:
        """Apply the pool's events to the naive pool; every eviction must have been legal and needed."""
        evicted = 0
        for event in self.pool.take_events():
            if isinstance(event, BlocksStored):
                self._apply_stored(event)
                continue
            assert isinstance(event, BlockRemoved)
            (prefix,) = [
                p
                for p, name in self.naive.stored.items()
                if name == event.block_hash and len(p[1]) == (event.block_idx + 1) * BLOCK_SIZE
            ]
            slot = self.by_slot_prefix.pop(prefix)
            del self.naive.stored[prefix]
            assert not any(p[0] == prefix[0] and p[1][: len(prefix[1])] == prefix[1] for p in self.naive.stored), (
                "a block was removed before what follows it"
            )
            if event.reason is RemovalReason.EVICTED:
                evicted += 1
                assert slot not in before_pinned, "a held block was evicted"
        assert evicted <= max(may_evict, 0), "more was evicted than was needed"

    def _apply_stored(self, event: BlocksStored) -> None:
        tokens = tuple(int.from_bytes(event.tokens[i : i + 4], "little") for i in range(0, len(event.tokens), 4))
        base: tuple[int, ...] = ()
        if event.parent is not None:
            (base,) = [
                p[1]
                for p, name in self.naive.stored.items()
                if name == event.parent
                and p[0] == event.namespace
                and len(p[1]) == event.first_block_idx * BLOCK_SIZE
                and self.by_slot_prefix[p] in self._parents_of(event)
            ]
        for i, (name, ref) in enumerate(zip(event.block_hashes, event.refs, strict=True)):
            prefix = event.namespace, base + tokens[: (i + 1) * BLOCK_SIZE]
            assert prefix not in self.naive.stored, "equal content was stored twice"
            self.naive.stored[prefix] = name
            self.by_slot_prefix[prefix] = ref.slot

    def _parents_of(self, event: BlocksStored) -> set[int]:
        return {
            request.slots[event.first_block_idx - 1]
            for request in self.live
            if len(request.slots) > event.first_block_idx > 0 and event.refs[0].slot in request.slots
        }

    def write(self, request: Request, num_tokens: int) -> None:
        """Write KV as an engine does, copying first when told to."""
        for position in range(request.written, num_tokens):
            before = self.pinned()
            copy = self.pool.prepare_append(request.receipt, position)
            if copy is not None:
                request.slots[position // BLOCK_SIZE] = copy.dst.slot
                request.committed = min(request.committed, position // BLOCK_SIZE)
                self.perform(copy)
                self.drain(before, may_evict=1)
            self.arena.write(request.slots[position // BLOCK_SIZE], request.namespace, request.tokens, position)
            request.written = position + 1

    def perform(self, copy: CopyBlock) -> None:
        self.arena.copy(copy.src.slot, copy.dst.slot, copy.num_tokens)
        self.pool.release(copy.receipt)

    @rule(namespace=st.sampled_from(NAMESPACES), tokens=prompts(), spare=st.integers(0, 1))
    @precondition(lambda self: len(self.live) < 3)
    def open(self, namespace: Namespace, tokens: list[int], spare: int) -> None:
        match = self.pool.match(namespace.digest, self.names(namespace, tokens), tokens)
        full = self.naive.walk(namespace, tokens)
        assert len(match.refs) == full
        assert [ref.slot for ref in match.refs] == [
            self.by_slot_prefix[namespace.digest, tuple(tokens[: (i + 1) * BLOCK_SIZE])] for i in range(full)
        ]
        assert full * BLOCK_SIZE <= match.num_tokens < len(tokens)
        num_new = -(-len(tokens) // BLOCK_SIZE) - full + spare
        before, free = self.pinned(), self.pool.stats().free
        matched = {ref.slot for ref in match.refs}
        try:
            opened = self.pool.open("request", match, num_new)
        except NoSpaceError:
            source = {match.partial.ref.slot} if match.partial else set()
            assert num_new > NUM_SLOTS - len(before | matched | source)
            return
        assert num_new - 1 <= NUM_SLOTS - len(before | matched)
        slots = [ref.slot for ref in opened.refs]
        assert opened.num_matched_tokens == match.num_tokens
        if opened.copy is not None:
            assert opened.copy.dst.slot == slots[full]
            self.perform(opened.copy)
        self.drain(before | matched, may_evict=num_new - free)
        request = Request(opened.table, namespace, list(tokens), slots, match.num_tokens, full)
        self.live.append(request)
        self.arena.expect(slots, namespace, tokens, match.num_tokens)

    @rule(namespace=st.sampled_from(NAMESPACES), tokens=prompts(), keep_tail=st.booleans())
    def serve(self, namespace: Namespace, tokens: list[int], keep_tail: bool) -> None:
        """A whole short life, so that the pool fills with content that nobody holds."""
        before = len(self.live)
        self.open(namespace, tokens, 0)
        if len(self.live) > before:
            self.compute_all_and_commit(before)
            self.finish(before, keep_tail)

    @rule(pick=PICK, num_tokens=st.integers(1, 4))
    @precondition(lambda self: self.live)
    def compute(self, pick: int, num_tokens: int) -> None:
        request = self.live[pick % len(self.live)]
        try:
            self.write(request, min(request.written + num_tokens, len(request.tokens)))
        except NoSpaceError:
            assert self.usable() == 0

    @rule(pick=PICK)
    @precondition(lambda self: self.live)
    def compute_all_and_commit(self, pick: int) -> None:
        self.compute(pick, 99)
        self.commit(pick)

    @rule(pick=PICK, token=st.integers(0, 1))
    @precondition(lambda self: self.live)
    def generate(self, pick: int, token: int) -> None:
        request = self.live[pick % len(self.live)]
        if len(request.tokens) == len(request.slots) * BLOCK_SIZE:
            before, free = self.pinned(), self.pool.stats().free
            try:
                (ref,) = self.pool.append(request.receipt)
            except NoSpaceError:
                assert self.usable() == 0
                return
            request.slots.append(ref.slot)
            self.drain(before, may_evict=1 - free)
        request.tokens.append(token)

    @rule(pick=PICK)
    @precondition(lambda self: self.live)
    def commit(self, pick: int) -> None:
        request = self.live[pick % len(self.live)]
        end = request.written // BLOCK_SIZE
        if request.committed == end:
            return
        first, before = request.committed, self.pinned()
        names = self.names(request.namespace, request.tokens)[first:end]
        tokens = request.tokens[first * BLOCK_SIZE : end * BLOCK_SIZE]
        refs = self.pool.commit(request.receipt, request.namespace.digest, first, names, tokens)
        request.slots[first:end] = [ref.slot for ref in refs]
        request.committed = end
        self.drain(before, may_evict=0)
        self.arena.expect(request.slots, request.namespace, request.tokens, request.written)

    @rule(pick=PICK)
    @precondition(lambda self: 0 < len(self.live) < 5)
    def fork(self, pick: int) -> None:
        request = self.live[pick % len(self.live)]
        forked = self.pool.fork(request.receipt, "fork", request.written)
        slots = [ref.slot for ref in forked.refs]
        tokens = request.tokens[: request.written]
        committed = min(request.committed, request.written // BLOCK_SIZE)
        self.live.append(Request(forked.table, request.namespace, tokens, slots, request.written, committed))

    @rule(pick=PICK)
    @precondition(lambda self: 0 < len(self.live) < 5)
    def fork_and_diverge(self, pick: int) -> None:
        parent = pick % len(self.live)
        del self.live[parent].tokens[self.live[parent].written :]
        self.fork(parent)
        for pick, token in ((parent, 0), (len(self.live) - 1, 1)):
            self.generate(pick, token)
            self.compute(pick, 1)

    @rule(pick=PICK, keep_tail=st.booleans())
    @precondition(lambda self: self.live)
    def finish(self, pick: int, keep_tail: bool) -> None:
        request = self.live.pop(pick % len(self.live))
        full = request.written // BLOCK_SIZE
        tail = request.tokens[full * BLOCK_SIZE : request.written]
        if keep_tail and tail and request.committed == full == len(request.slots) - 1:
            self.pool.commit_tail(request.receipt, request.namespace.digest, tail)
        self.pool.release(request.receipt)
        with pytest.raises(UnknownReceiptError):
            self.pool.release(request.receipt)
        self.drain(self.pinned(), may_evict=0)

    @rule(pick=PICK, first=st.integers(0, 2))
    @precondition(lambda self: self.naive.stored and len(self.held) < 3)
    def lease(self, pick: int, first: int) -> None:
        digest, tokens = sorted(self.naive.stored)[pick % len(self.naive.stored)]
        path = [self.naive.stored[digest, tokens[:n]] for n in range(BLOCK_SIZE, len(tokens) + 1, BLOCK_SIZE)]
        first = min(first, len(path) - 1)
        lease = self.pool.lease(
            NodeId("reader"),
            digest,
            path[-1],
            prefix_digest(tokens, (), len(tokens)),
            until_ns=self.now_ns + 10,
            first_block_idx=first,
        )
        assert lease.block_hashes == tuple(path[first:])
        self._add_reader(lease.receipt, [ref.slot for ref in lease.refs], self.now_ns + 10)

    @rule(pick=PICK)
    @precondition(lambda self: self.naive.stored and len(self.held) < 3)
    def pin(self, pick: int) -> None:
        digest, tokens = sorted(self.naive.stored)[pick % len(self.naive.stored)]
        namespace = next(n for n in NAMESPACES if n.digest == digest)
        match = self.pool.match(digest, self.names(namespace, list(tokens)), [*tokens, 9])
        already = {slot for reader in self.held if reader.until_ns is None for slot in reader.slots}
        slots = [ref.slot for ref in match.refs]
        try:
            receipt = self.pool.pin("operator", match)
        except PinQuotaExceededError:
            assert len(already | set(slots)) > PIN_QUOTA
            return
        assert len(already | set(slots)) <= PIN_QUOTA
        self._add_reader(receipt, slots, None)

    def _add_reader(self, receipt: Receipt, slots: list[int], until_ns: int | None) -> None:
        self.held.append(Reader(receipt, slots, [list(self.arena.cells[slot]) for slot in slots], until_ns))

    @rule(pick=PICK)
    @precondition(lambda self: self.held)
    def let_go(self, pick: int) -> None:
        reader = self.held.pop(pick % len(self.held))
        self.pool.release(reader.receipt)
        with pytest.raises(UnknownReceiptError):
            self.pool.release(reader.receipt)

    @rule(step_ns=st.integers(1, 8))
    @precondition(lambda self: self.held)
    def advance(self, step_ns: int) -> None:
        self.now_ns += step_ns
        ended = [reader for reader in self.held if reader.until_ns is not None and reader.until_ns <= self.now_ns]
        assert {r.receipt_id for r in self.pool.expire(self.now_ns)} == {r.receipt.receipt_id for r in ended}
        for reader in ended:
            self.held.remove(reader)

    @rule(pick=st.integers(0, 50))
    @precondition(lambda self: self.naive.stored)
    def drop(self, pick: int) -> None:
        prefixes = sorted(self.naive.stored)
        digest, tokens = prefixes[pick % len(prefixes)]
        below = {p for p in self.naive.stored if p[0] == digest and p[1][: len(tokens)] == tokens}
        assert self.pool.drop(self.naive.stored[digest, tokens]) == len(below)
        self.drain(self.pinned(), may_evict=0)
        assert not below & set(self.naive.stored)

    @rule(namespace=st.sampled_from((*NAMESPACES, None)), rarely=st.integers(0, 7))
    @precondition(lambda self: self.naive.stored)
    def purge(self, namespace: Namespace | None, rarely: int) -> None:
        if rarely < 7:
            return
        doomed = [p for p in self.naive.stored if namespace is None or p[0] == namespace.digest]
        assert self.pool.purge(namespace.digest if namespace else None) == len(doomed)
        self.drain(self.pinned(), may_evict=0)
        assert not set(doomed) & set(self.naive.stored)

    @invariant()
    def counts_agree(self) -> None:
        self.pool.check()
        stats = self.pool.stats()
        assert stats.free + stats.cached + stats.pinned == NUM_SLOTS
        assert stats.pinned == len(self.pinned())
        assert stats.cached >= len(set(self.by_slot_prefix.values()) - self.pinned())
        assert len(set(self.by_slot_prefix.values())) == len(self.by_slot_prefix)
        assert len(self.pool.holds()) == len(self.live) + len(self.held)

    @invariant()
    def nobody_reads_other_bytes(self) -> None:
        for request in self.live:
            self.arena.expect(request.slots, request.namespace, request.tokens, request.written)
        for reader in self.held:
            assert [self.arena.cells[slot] for slot in reader.slots] == reader.cells
        for (digest, tokens), slot in self.by_slot_prefix.items():
            expected = [(digest, tokens[:n]) for n in range(len(tokens) - BLOCK_SIZE + 1, len(tokens) + 1)]
            assert self.arena.cells[slot] == expected


class CollidingPoolMachine(PoolMachine):
    """The same with hashes that hardly distinguish anything: all that is left is the comparison of tokens."""

    weak = True


TestPool = PoolMachine.TestCase
TestCollidingPool = CollidingPoolMachine.TestCase
TestPool.settings = TestCollidingPool.settings = settings(deadline=None, stateful_step_count=50)

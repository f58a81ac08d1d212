"""The tiers below one node's pool: what goes down, what comes up, what is purged everywhere.

N1: a block is promoted only after its whole prefix was compared (`TierCatalog.match`), and becomes findable in memory
    only after every byte was checked; a load that failed or was short leaves what came before it.
N2: a load that does not come back holds its own slots, not its caller: the caller computes.
N3: a purged namespace is not in memory from the next tick on and not promoted before that either; it leaves the tiers
    from then on, no slice of which takes the loop longer than a few milliseconds.
"""

import asyncio
import functools
import itertools
import logging
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from kv_core.block import BlockRef
from kv_core.clock import Clock
from kv_core.hashing import TOKEN_BYTES, BlockHash, hash_tokens
from kv_core.namespace import Namespace
from kv_prefix.block_pool import BlockPool
from kv_prefix.errors import NoSpaceError, StaleMatchError
from kv_prefix.events import BlocksStored, PoolEvent, Tier
from kv_prefix.explain import RemovalLog
from kv_prefix.pool_types import PoolMatch
from kv_prefix.tiers.blocks import TierBlock, prefix_digests
from kv_prefix.tiers.catalog import TierEvent, TierRemoved, TierStored
from kv_services.node.orphans import Orphans
from kv_services.node.pull_cost import PullCost
from kv_services.node.purge_watch import PurgeWatch
from kv_services.node.tier import CLOSE_TIMEOUT_S, SLICE_BLOCKS, NodeTier, Opened
from kv_services.node.tier_claims import namespace_of, packed_removals, packed_runs
from kv_services.purge_file import PurgeFile, PurgeKeeper
from kv_services.replica.service import ReplicaService
from kv_services.status_report import TierCounts

LOAD_TIMEOUT_NS: Final = 2_000_000_000
"""How long a prompt waits for a load: a disk that answers later is slower than computing."""
OPEN_AGAIN_NS: Final = 30_000_000_000
PIECE_BLOCKS: Final = 512
"""Blocks of a prompt that are looked for in one turn of the loop."""
IN_FLIGHT_SHARE: Final = 4
"""At most one slot in so many is being loaded into."""

_log = logging.getLogger(__name__)


OpenStore = Callable[[], Opened]
MakeTier = Callable[[Opened], NodeTier]


@dataclass(slots=True)
class _Later:
    """A tier that is not open yet."""

    open_store: OpenStore
    make_tier: MakeTier
    opening: "asyncio.Future[Opened] | None" = None
    not_before_ns: int = 0
    problem: str = ""


@dataclass(frozen=True, slots=True)
class _Plan:
    """Blocks to bring up behind `match`, each with the tier to read it from."""

    match: PoolMatch
    blocks: tuple[tuple[NodeTier, TierBlock], ...]


class Tiers:
    """See the module. Everything on the loop, but for the tiers' own threads.

    Args:
        cost: what computing takes, as measured.
    """

    def __init__(
        self,
        pool: BlockPool,
        replica: ReplicaService,
        clock: Clock,
        num_slots: int,
        cost: PullCost,
    ) -> None:
        self._pool = pool
        self._replica = replica
        self._clock = clock
        self._cost = cost
        self._prepare: Callable[[Sequence[BlockRef]], None] = lambda refs: None
        self._flush: Callable[[], None] = lambda: None
        self._adopt: Callable[[Namespace, bytes], Awaitable[int]] | None = None
        self.removals = RemovalLog()
        """What left memory lately, for whoever asks why a prompt missed."""
        self._most_in_flight = max(1, num_slots // IN_FLIGHT_SHARE)
        self._in_flight = 0
        self._ids = itertools.count(1)
        self._promoting: dict[bytes, asyncio.Future[int]] = {}
        self.watch = PurgeWatch(replica.manager, self._holds)
        self._started = self._closed = False
        self._keep: Callable[[TierBlock], bool] = lambda block: True
        self._later: list[_Later] = []
        self._purges: PurgeKeeper | None = None
        self.tiers: list[NodeTier] = []
        self.orphans: Orphans | None = None
        """Who takes over what others left in the remote tier, once that is open."""

    def attach(
        self,
        prepare: Callable[[Sequence[BlockRef]], None],
        flush: Callable[[], None],
        adopt: Callable[[Namespace, bytes], Awaitable[int]] | None = None,
    ) -> None:
        """Say how the node's slots are used.

        Args:
            prepare: makes older references to slots void, before anything is written into them.
            flush: publishes what happened in the pool.
            adopt: brings in what other tenants share of a prompt.
        """
        self._prepare, self._flush, self._adopt = prepare, flush, adopt

    def add(self, tier: NodeTier) -> None:
        """Put a tier below those there are."""
        self.tiers.append(tier)

    def open_later(self, open_store: OpenStore, make_tier: MakeTier) -> None:
        """Open a tier that may take its time, off the loop; one that cannot be opened is tried again.

        Args:
            open_store: blocks; gives the medium and what it holds.
            make_tier: of what was opened, on the loop.
        """
        self._later.append(_Later(open_store, make_tier))

    def keep_only(self, keep: Callable[[TierBlock], bool]) -> None:
        """What of the last life's blocks may stay; said before the first tick."""
        self._keep = keep

    def keep_purges(self, file: PurgeFile) -> None:
        """Where purges outlive the process; they must, where blocks do."""
        self._purges = PurgeKeeper(file, self._replica.manager.raises)

    def may_serve(self, block: TierBlock) -> bool:
        """Whether a block that somebody stored may be handed out: its weights and tenant are there, no purge came."""
        return self._keep(block) and self._is_current(block)

    def observe(self, events: Sequence[PoolEvent]) -> None:
        """The pool stored or removed blocks."""
        self.removals.record(events, self._clock.wall_ns())
        for event in events:
            if isinstance(event, BlocksStored):
                self.watch.follow(self._replica.known(event.namespace, self._pool.block_size))
        for tier in self.tiers:
            tier.queue.observe(events)
            tier.pump()

    def scopes_of(self, namespace: bytes) -> tuple[bytes, int]:
        """What is stored beside a block: by what it can be purged, and how often its namespace was."""
        ref = self._replica.known(namespace, self._pool.block_size)
        return b"".join(ref.scopes), self.watch.followed(ref)

    def on_events(self, tier: NodeTier, events: Sequence[TierEvent]) -> None:
        """Publish what a tier gained and lost as claims."""
        for removed, group in itertools.groupby(events, lambda event: isinstance(event, TierRemoved)):
            if removed:
                gone = [event.block for event in group if isinstance(event, TierRemoved)]
                for removals in packed_removals(tier.tier, gone):
                    self._replica.unclaim(removals)
            else:
                stored = [block for event in group if isinstance(event, TierStored) for block in event.blocks]
                for block in stored:
                    self.watch.follow(namespace_of(block, self._pool.block_size), block.epoch)
                for runs in packed_runs(tier.tier, stored, self._pool.block_size):
                    self._replica.claim(runs)

    def tick(self) -> None:
        """Announce what outlived the last life, once peers can hear it; carry out purges; go on spilling."""
        if not self._started:
            if not self._replica.manager.ready:
                return
            self._start()
        self._purge_those_due()
        if self._purges is not None:
            self._purges.tick()
        self._open_those_due()
        if self.orphans is not None:
            self.orphans.tick()
        for tier in self.tiers:
            tier.pump()

    def _start(self) -> None:
        self._started = True
        for tier in self.tiers:
            self._begin(tier)

    def _begin(self, tier: NodeTier) -> None:
        tier.start(self.may_serve)
        stats = tier.catalog.stats()
        _log.info("tier opened tier=%s blocks=%d limit=%d", tier.name, stats.stored, stats.limit)

    def _open_those_due(self) -> None:
        now_ns = self._clock.monotonic_ns()
        for later in self._later:
            if later.opening is None and now_ns >= later.not_before_ns:
                later.opening = asyncio.get_running_loop().run_in_executor(None, later.open_store)
                later.opening.add_done_callback(functools.partial(self._opened, later))

    def _opened(self, later: "_Later", opening: "asyncio.Future[Opened]") -> None:
        later.opening = None
        error = None if opening.cancelled() else opening.exception()
        if error is not None or opening.cancelled():
            later.not_before_ns = self._clock.monotonic_ns() + OPEN_AGAIN_NS
            later.problem = str(error)
            _log.error("tier not opened, trying again in %d s cause=%s", OPEN_AGAIN_NS // 10**9, error)
            return
        self._later.remove(later)
        opened = opening.result()
        if self._closed:
            opened.store.close()
            return
        tier = later.make_tier(opened)
        # What memory holds already was told before this tier was there to hear it. What is purged must have left it by
        # then: the snapshot counts as stored now, after every purge that was heard of.
        self._purge_those_due()
        tier.queue.observe(self._pool.snapshot())
        self.tiers.append(tier)
        self._begin(tier)

    def _holds(self, namespace: bytes) -> bool:
        return self._pool.has_any(namespace) or any(tier.catalog.has_any(namespace) for tier in self.tiers)

    def _purge_those_due(self) -> None:
        if self.watch.is_due:
            # What was stored before the purge and is not told of yet counts with what was there.
            self._flush()
        for digest, epoch in self.watch.purged():
            self._purge(digest, epoch)

    def _purge(self, digest: bytes, epoch: int) -> None:
        count = self._pool.purge(digest)
        self._flush()
        for tier in self.tiers:
            tier.purge(lambda block: block.namespace == digest and block.epoch < epoch)
        _log.info("namespace purged epoch=%d blocks=%d", epoch, count)

    async def promote(self, namespace: Namespace, tokens: bytes, deadline_ns: int) -> int:
        """Bring up what lies below of a prompt, where that is cheaper than computing it; how many blocks came.

        Args:
            tokens: the prompt, uint32 little-endian; its last token is always computed.
        """
        if self._started and self._adopt is not None:
            await self._adopt(namespace, tokens)
        if not self._started or not any(tier.catalog.stats().stored for tier in self.tiers):
            return 0
        names = hash_tokens(namespace, tokens[:-4])
        plan = await self._plan(namespace, names, tokens)
        if plan is None:
            return 0
        return await self._bring_up(plan, deadline_ns)

    async def promote_named(self, block_hash: BlockHash, deadline_ns: int) -> int:
        """Bring up the prefix that ends in a block, for a reader that will prove that it knows the tokens."""
        if not self._started or self._pool.prefix(block_hash) is not None:
            return 0
        for tier in self.tiers:
            queue = tier.queue
            chain = tier.catalog.chain_to(block_hash, queue.holds)
            if not chain or not all(map(self._is_current, chain)):
                continue
            above = queue.in_pool(chain[0].parent) if chain[0].parent else None
            if chain[0].parent and above is None:
                continue
            match = self._pool.prefix(above) if above else PoolMatch(chain[0].namespace, (), (), None, 0)
            if match is None:
                continue
            return await self._bring_up(_Plan(match, tuple((tier, block) for block in chain)), deadline_ns)
        return 0

    async def bring_up(self, names: Sequence[BlockHash], deadline_ns: int) -> bool:
        """Bring up a whole prefix, whatever it costs, as many blocks at a time as may be; whether it is in memory."""
        step = self._most_in_flight
        for last in [*range(step - 1, len(names) - 1, step), len(names) - 1]:
            await self.promote_named(names[last], deadline_ns)
            if self._pool.prefix(names[last]) is None:
                return False
        return True

    async def everything(self) -> list[TierBlock]:
        """What the tiers hold and may serve."""
        found: list[TierBlock] = []
        for tier in self.tiers:
            for first in range(0, tier.catalog.num_places, SLICE_BLOCKS):
                places = range(first, min(first + SLICE_BLOCKS, tier.catalog.num_places))
                found += filter(self.may_serve, tier.catalog.blocks(places))
                await asyncio.sleep(0)
        return found

    def outlives(self, names: Sequence[BlockHash]) -> bool:
        """Whether the remote tier has all of these blocks, so that others find them when this node is gone."""
        return any(
            tier.tier is Tier.REMOTE and all(tier.catalog.get(name) is not None for name in names)
            for tier in self.tiers
        )

    def below(self, namespace: Namespace, names: Sequence[BlockHash], tokens: bytes, first: int) -> tuple[int, int]:
        """How many blocks of a prompt follow its first ones on disk and in the remote tier, without a hole."""
        found = {Tier.DISK: 0, Tier.REMOTE: 0}
        if first < len(names) and self.has(names[first]):
            digests = list(self._digests(namespace, tokens))
            for tier, run in self._runs(namespace, names, tokens, first, digests):
                found[tier.tier] += len(run)
        return found[Tier.DISK], found[Tier.REMOTE]

    def has(self, name: BlockHash) -> bool:
        """Whether some tier has a block of that name."""
        return any(tier.catalog.get(name) is not None for tier in self.tiers)

    def counts(self) -> dict[str, TierCounts]:
        """What `/status` says."""
        return {tier.name: tier.counts() for tier in self.tiers}

    def problems(self) -> list[str]:
        """What an operator should see to: configured tiers that cannot be opened, one sentence each."""
        return [f"a tier is not open, which is tried again: {later.problem}" for later in self._later if later.problem]

    async def close(self) -> None:
        """Send down what waits and give the media up."""
        if self._purges is not None:
            await self._purges.close()
        self._closed = True
        opening = [later.opening for later in self._later if later.opening is not None]
        try:
            if opening:
                await asyncio.wait(opening, timeout=CLOSE_TIMEOUT_S)
            if self.orphans is not None:
                await self.orphans.close()
            for tier in self.tiers:
                await tier.close()
        finally:
            # Also when whoever closes us has run out of time: a load that a medium holds up is waited for no longer.
            loads = list(self._promoting.values())
            for up in loads:
                up.cancel()
            await asyncio.gather(*loads, return_exceptions=True)

    async def _plan(self, namespace: Namespace, names: Sequence[BlockHash], tokens: bytes) -> _Plan | None:
        match = self._pool.match(namespace.digest, names, tokens)
        first = len(match.refs)
        if first == len(names) or not self.has(names[first]):
            return None
        if len(names) > PIECE_BLOCKS:
            # Of a long prompt that takes milliseconds, which the loop does not have.
            loop = asyncio.get_running_loop()
            digests = await loop.run_in_executor(None, lambda: list(self._digests(namespace, tokens)))
            match = self._pool.match(namespace.digest, names, tokens)
            first = len(match.refs)
        else:
            digests = list(self._digests(namespace, tokens))
        found: list[tuple[NodeTier, TierBlock]] = []
        for tier, run in self._runs(namespace, names, tokens, first, digests):
            found += [(tier, block) for block in run]
            if len(found) >= self._most_in_flight:
                break
            if len(run) == PIECE_BLOCKS:
                await asyncio.sleep(0)
        wanted = self._worth_it(found)
        return _Plan(match, wanted) if wanted else None

    def _digests(self, namespace: Namespace, tokens: bytes) -> Iterator[bytes]:
        return prefix_digests(namespace.digest, tokens, self._pool.block_size * TOKEN_BYTES, {})

    def _runs(
        self,
        namespace: Namespace,
        names: Sequence[BlockHash],
        tokens: bytes,
        first: int,
        digests: Sequence[bytes],
    ) -> Iterator[tuple[NodeTier, list[TierBlock]]]:
        """What the tiers have of a prompt from its block `first` on, without a hole, piece by piece, each from the
        fastest."""
        while first < len(names):
            for tier in self.tiers:
                run = tier.catalog.match(namespace.digest, names, tokens, {}, first, digests, PIECE_BLOCKS)
                run = list(itertools.takewhile(self._is_current, run))
                if run:
                    yield tier, run
                    first += len(run)
                    break
            else:
                return

    def _worth_it(self, found: Sequence[tuple[NodeTier, TierBlock]]) -> tuple[tuple[NodeTier, TierBlock], ...]:
        """The beginning of what was found that is cheaper to load than to compute."""
        wanted: list[tuple[NodeTier, TierBlock]] = []
        compute_ns = self._cost.compute_ns_per_token * self._pool.block_size
        for tier, group in itertools.groupby(found, lambda item: item[0]):
            run = list(group)
            choice = tier.cost.choose(len(run), compute_ns)
            tier.choice = choice.reason
            wanted += run[: choice.num_blocks]
            if choice.num_blocks < len(run):
                break
        return tuple(wanted[: self._most_in_flight])

    async def _bring_up(self, plan: _Plan, deadline_ns: int) -> int:
        count, head = len(plan.blocks), plan.blocks[0][1].sequence
        if head in self._promoting:
            # The same beginning is on its way up for somebody else.
            return await self._wait(self._promoting[head], plan, deadline_ns)
        if self._in_flight + count > self._most_in_flight:
            _log.info("nothing promoted cause=%d blocks are being loaded already", self._in_flight)
            return 0
        try:
            opened = self._pool.open(
                f"promotion-{next(self._ids)}", _without_partial(plan.match), count, use_partial=False
            )
        except (NoSpaceError, StaleMatchError) as error:
            _log.info("nothing promoted cause=%s", error)
            return 0
        first = len(plan.match.refs)
        refs = opened.refs[first:]
        self._flush()
        self._prepare(refs)
        self._in_flight += count
        up = asyncio.get_running_loop().create_task(self._load(plan, refs), name="promotion")
        self._promoting[head] = up

        def ended(task: "asyncio.Future[int]") -> None:
            # Also when nobody waits any more: what came is kept, the slots go back.
            self._promoting.pop(head, None)
            self._in_flight -= count
            if task.cancelled():
                return  # at the end of the node; a thread may still write to the slots, so they stay taken
            error = task.exception()
            if error is not None:
                _log.error("promotion failed cause=%r", error)
            got = 0 if error is not None else task.result()
            blocks = [block for _, block in plan.blocks[:got]]
            if blocks and all(map(self._is_current, blocks)):
                names, raw = [b.block_hash for b in blocks], b"".join([b.tokens for b in blocks])
                self._pool.commit(opened.table, blocks[0].namespace, first, names, raw)
            self._pool.release(opened.table)
            self._flush()

        up.add_done_callback(ended)
        return await self._wait(up, plan, deadline_ns)

    async def _load(self, plan: _Plan, refs: Sequence[BlockRef]) -> int:
        """Read every block; how many of the first are whole."""
        loads = []
        at = 0
        for tier, group in itertools.groupby(plan.blocks, lambda item: item[0]):
            blocks = [block for _, block in group]
            loads.append((tier.load(blocks, refs[at : at + len(blocks)]), len(blocks)))
            at += len(blocks)
        got, whole = 0, True
        for loading, wanted in loads:
            # All are awaited: no slot goes back while a thread may write it.
            count = await loading.done
            got += count if whole else 0
            whole = whole and count == wanted
        return got

    async def _wait(self, up: "asyncio.Future[int]", plan: _Plan, deadline_ns: int) -> int:
        began_ns = self._clock.monotonic_ns()
        timeout_ns = min(LOAD_TIMEOUT_NS, deadline_ns - began_ns)
        try:
            async with asyncio.timeout(max(0, timeout_ns) / 1e9):
                got = await asyncio.shield(up)
        except TimeoutError:
            tier = plan.blocks[0][0]
            tier.gave_up(len(plan.blocks), self._clock.monotonic_ns() - began_ns)
            _log.warning("load given up tier=%s blocks=%d: computing instead", tier.name, len(plan.blocks))
            return 0
        # The task's own callback, which commits what came, ran before whoever waited for it.
        return got

    def _is_current(self, block: TierBlock) -> bool:
        """Whether no purge of its namespace came after it."""
        namespace = namespace_of(block, self._pool.block_size)
        return block.epoch >= self._replica.manager.namespace_epoch(namespace)


def _without_partial(match: PoolMatch) -> PoolMatch:
    return PoolMatch(match.namespace, match.block_hashes, match.refs, None, match.num_tokens)

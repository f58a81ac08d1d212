"""One slower tier of a node: its contents, the way down to it, and the threads that move its bytes.

Everything but IO happens on the loop; the medium is written from one thread and read from two, so that no store waits
for a load and no load for a store. Memory is bounded: nothing is copied, blocks go from and to their slots.
"""

import asyncio
import logging
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Final, TypeVar

from kv_core.block import BlockRef
from kv_core.clock import Clock
from kv_prefix.events import Tier
from kv_prefix.tiers.blocks import PlacedBlock, TierBlock, pack_checks
from kv_prefix.tiers.catalog import TierCatalog, TierEvent, TierRemoved, TierStored
from kv_prefix.tiers.cost import TierCost
from kv_prefix.tiers.errors import TierFullError
from kv_prefix.tiers.spill import SpillBatch, SpillQueue, places_of
from kv_prefix.tiers.store import Cells, TierStore
from kv_services.metrics import Metrics
from kv_services.status_report import TierCounts
from kv_transport import Arena

BATCH_BYTES: Final = 4 << 20
"""Bytes of one write: long enough for a disk, short enough that the slots it holds are soon free again."""
READERS: Final = 2
SLICE_BLOCKS: Final = 256
SLICE_NS: Final = 1_000_000
"""How long one turn of the loop goes through blocks when there are many to announce or to purge."""
CLOSE_TIMEOUT_S: Final = 5.0

T = TypeVar("T")

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Opened:
    """A medium that was opened, and what it holds; `forget` are places whose records are void."""

    store: TierStore
    catalog: TierCatalog
    forget: tuple[int, ...]

    @classmethod
    def of(cls, store: TierStore, held: Sequence[PlacedBlock]) -> "Opened":
        """Takes a while where much is held: not for the loop."""
        catalog = TierCatalog(store.num_places)
        return cls(store, catalog, catalog.restore(held))


@dataclass(frozen=True, slots=True)
class Loading:
    """Blocks that are being read into slots. `done` gives how many of the first came whole, and never raises."""

    placed: tuple[PlacedBlock, ...]
    done: "asyncio.Future[int]"


class NodeTier:
    """See the module.

    Args:
        tier: which one.
        opened: the medium and what it holds already.
        queue: the way down; its catalog is that of the medium.
        on_events: told what can be loaded from now on, and what cannot any more.
    """

    def __init__(
        self,
        tier: Tier,
        opened: Opened,
        queue: SpillQueue,
        arena: Arena,
        clock: Clock,
        metrics: Metrics,
        cost: TierCost,
        on_events: Callable[["NodeTier", Sequence[TierEvent]], None],
    ) -> None:
        self.tier: Final = tier
        self.name: Final = tier.name.lower()
        self.catalog: Final[TierCatalog] = queue.catalog
        self.queue: Final = queue
        self.cost: Final = cost
        self.choice = ""
        self._store: Final = opened.store
        self._arena = arena
        self._clock = clock
        self._metrics = metrics
        self._on_events = on_events
        self._full = False
        self._closing = False
        self._jobs: set[asyncio.Future[Any]] = set()
        self._writer = ThreadPoolExecutor(1, thread_name_prefix=f"{self.name}-write")
        self._readers = ThreadPoolExecutor(READERS, thread_name_prefix=f"{self.name}-read")
        self._batch_blocks = max(1, BATCH_BYTES // arena.geometry.block_nbytes)
        self._used_bytes = self._store.used_bytes()
        self._forget_at_start = opened.forget

    def start(self, keep: Callable[[TierBlock], bool]) -> None:
        """Announce what outlived the last life and may stay, a slice at a time; the rest goes."""
        self._forget(self._forget_at_start)
        held = [
            block for event in self.catalog.take_events() if isinstance(event, TierStored) for block in event.blocks
        ]
        self._spread(self._announce_held(held, keep))

    def _announce_held(self, held: Sequence[TierBlock], keep: Callable[[TierBlock], bool]) -> Iterator[None]:
        yield from self._purging(lambda block: not keep(block))
        for at in range(0, len(held), SLICE_BLOCKS):
            # What left meanwhile was never announced, and what was stored anew is another.
            there = tuple(b for b in held[at : at + SLICE_BLOCKS] if self.catalog.get(b.block_hash) is b)
            if there:
                self._on_events(self, (TierStored(there),))
            yield

    def announce(self) -> None:
        """Say what changed in the catalog, while there is anybody to say it."""
        events = self.catalog.take_events()
        if not events or self._closing:
            return
        for event in events:
            if isinstance(event, TierRemoved):
                self._count(event.reason.value.replace(" ", "_"))
        self._on_events(self, events)

    def pump(self) -> None:
        """Send down what waits, as far as the bounds allow."""
        while not self._closing:
            batch = self.queue.next_batch(self._batch_blocks, self._checks_of)
            self.announce()
            if batch is None:
                return
            self._spill(batch)

    def load(self, blocks: Sequence[TierBlock], refs: Sequence[BlockRef]) -> Loading:
        """Read blocks into slots that are prepared and that nobody else writes."""
        placed = self.catalog.begin_load(blocks)
        done: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        began_ns = self._clock.monotonic_ns()

        def read() -> list[bool]:
            sound = self._store.read([(item, self._cells(ref)) for item, ref in zip(placed, refs, strict=False)])
            for item, ref, good in zip(placed, refs, sound, strict=False):
                if good:
                    self._arena.checks[:, ref.slot] = item.block.layer_checks()
            return sound

        def ended(reading: "asyncio.Future[list[bool]]") -> None:
            sound = [False] * len(placed) if reading.cancelled() else reading.result()
            bad = () if reading.cancelled() else tuple(p for p, good in zip(placed, sound, strict=True) if not good)
            self._forget(self.catalog.end_load(placed, bad))
            duration_ns = self._clock.monotonic_ns() - began_ns
            count = sound.index(False) if False in sound else len(sound)
            self.cost.loaded(count * self._arena.geometry.block_nbytes, duration_ns)
            self._count("loaded", sum(sound))
            self._metrics.tier_load_seconds.labels(self.name).observe(duration_ns / 1e9)
            if bad:
                _log.warning("blocks absent tier=%s count=%d cause=damaged or short", self.name, len(bad))
            self.announce()
            if not done.done():
                done.set_result(count)

        self._run(self._readers, read, ended)
        return Loading(placed, done)

    def adopt(
        self, blocks: Sequence[TierBlock], bind: Callable[[Sequence[PlacedBlock]], None]
    ) -> tuple[PlacedBlock, ...]:
        """Take up blocks that the medium holds already, as far as there is room; `bind` hears where, before they can be
        loaded."""
        placed = self.catalog.adopt(blocks)
        bind(placed)
        self._count("adopted", len(placed))
        self.announce()
        return placed

    def gave_up(self, num_blocks: int, waited_ns: int) -> None:
        """A load did not come back in time."""
        self._count("timeout")
        self.cost.loaded(num_blocks * self._arena.geometry.block_nbytes, waited_ns)

    def purge(self, doomed: Callable[[TierBlock], bool]) -> None:
        """Make blocks unfindable and their records void: a slice at once, the others in later turns of the loop.

        What is stored until then may be looked at too, or not: `doomed` must not be true of it.
        """
        self._spread(self._purging(doomed))

    def _purging(self, doomed: Callable[[TierBlock], bool]) -> Iterator[None]:
        gone = 0
        for first in range(0, self.catalog.num_places, SLICE_BLOCKS):
            places = self.catalog.purge(doomed, range(first, min(first + SLICE_BLOCKS, self.catalog.num_places)))
            if places:
                gone += len(places)
                self._forget(places)
                self.announce()
            yield
        if gone:
            _log.info("blocks purged tier=%s count=%d", self.name, gone)

    def _spread(self, slices: Iterator[None]) -> None:
        """Go on for `SLICE_NS`, then in the loop's next turn."""
        end_ns = self._clock.monotonic_ns() + SLICE_NS
        for _ in slices:
            if self._closing:
                # The next life finds the records, and purges what they name before it announces it.
                return
            if self._clock.monotonic_ns() >= end_ns:
                asyncio.get_running_loop().call_soon(self._spread, slices)
                return

    def counts(self) -> TierCounts:
        """What `/status` says of it."""
        stats, spill = self.catalog.stats(), self.queue.stats
        return TierCounts(
            blocks=stats.stored,
            limit=stats.limit,
            used_bytes=self._used_bytes,
            waiting=len(self.queue),
            writing=self.queue.in_flight,
            spilled=spill.spilled,
            missed=spill.missed,
            failed=spill.failed,
            absent=stats.check_failed,
            full=self._full,
            choice=self.choice,
        )

    async def close(self) -> None:
        """Send down what still waits, within a bound, then give the medium up."""
        loop = asyncio.get_running_loop()
        end = loop.time() + CLOSE_TIMEOUT_S
        self.pump()
        try:
            while self._jobs and loop.time() < end:
                await asyncio.wait(self._jobs, timeout=end - loop.time())
        finally:
            # Also when whoever closes us has run out of time: what ends later must find no way to the slots, whose
            # memory goes next.
            self._closing = True
            stuck = bool(self._jobs)
            for pool in (self._writer, self._readers):
                pool.shutdown(wait=not stuck, cancel_futures=True)
            if stuck:
                _log.error("tier did not come to rest tier=%s jobs=%d", self.name, len(self._jobs))
            else:
                self._store.close()

    def _spill(self, batch: SpillBatch) -> None:
        def write() -> int:
            self._store.write([(item, self._cells(ref)) for item, ref in places_of(batch)], batch.plan.forget)
            return self._store.used_bytes()

        def ended(writing: "asyncio.Future[int]") -> None:
            error = None if writing.cancelled() else writing.exception()
            ok = error is None and not writing.cancelled()
            if ok:
                self._used_bytes = writing.result()
            full = isinstance(error, TierFullError)
            if error is not None and not (full and self._full):
                # Once per episode: a full disk would say it for every batch.
                _log.error("blocks not stored tier=%s count=%d cause=%s", self.name, len(batch.refs), error)
            self._full = full
            self._count("spilled" if ok else "failed", len(batch.refs))
            self._forget(self.queue.done(batch, ok=ok, medium_full=full))
            self.announce()
            self.pump()

        self._run(self._writer, write, ended)

    def _forget(self, places: Sequence[int]) -> None:
        # What a closed tier should have forgotten, a restart finds, and checks by CRC and by purge epoch.
        if not places or self._closing:
            return

        def ended(forgetting: "asyncio.Future[None]") -> None:
            error = None if forgetting.cancelled() else forgetting.exception()
            if error is not None:
                # They cannot be found in this life; what a restart finds is checked by CRC and by purge epoch.
                _log.error("records not revoked tier=%s count=%d cause=%s", self.name, len(places), error)

        def forget() -> None:
            self._store.forget(places)

        self._run(self._writer, forget, ended)

    def _run(
        self, pool: ThreadPoolExecutor, work: Callable[[], T], ended: Callable[["asyncio.Future[T]"], None]
    ) -> None:
        job = asyncio.get_running_loop().run_in_executor(pool, work)
        self._jobs.add(job)

        def on_done(future: "asyncio.Future[T]") -> None:
            self._jobs.discard(future)
            ended(future)

        job.add_done_callback(on_done)

    def _cells(self, ref: BlockRef) -> Cells:
        return [self._arena.cell(ref.slot, layer) for layer in range(self._arena.geometry.num_layers)]

    def _checks_of(self, slot: int) -> bytes | None:
        checks = self._arena.block_checks(slot)
        return pack_checks(checks) if all(checks) else None

    def _count(self, event: str, count: int = 1) -> None:
        self._metrics.tier_blocks.labels(self.name, event).inc(count)

"""One slower tier of a node: its contents, the way down to it, and the threads that move its bytes.

Everything but IO happens on the loop; the medium is written from one thread and read from two, so that no store waits
for a load and no load for a store. Memory is bounded: nothing is copied, blocks go from and to their slots.
"""

import asyncio
import logging
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Final, TypeVar

from kv_core.block import BlockRef
from kv_core.clock import Clock
from kv_prefix.events import Tier
from kv_prefix.tiers.blocks import PlacedBlock, TierBlock, pack_checks
from kv_prefix.tiers.catalog import TierCatalog, TierEvent, TierRemoved
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
CLOSE_TIMEOUT_S: Final = 5.0

T = TypeVar("T")

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Loading:
    """Blocks that are being read into slots. `done` gives how many of the first came whole, and never raises."""

    placed: tuple[PlacedBlock, ...]
    done: "asyncio.Future[int]"


class NodeTier:
    """See the module.

    Args:
        tier: which one.
        store: the medium, open.
        held: what it holds already.
        queue: the way down; its catalog is this tier's.
        on_events: told what can be loaded from now on, and what cannot any more.
    """

    def __init__(
        self,
        tier: Tier,
        store: TierStore,
        held: Sequence[PlacedBlock],
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
        self._store = store
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
        self._used_bytes = store.used_bytes()
        self._forget_at_start = self.catalog.restore(held)

    def start(self) -> None:
        """Announce what outlived the last life."""
        self._forget(self._forget_at_start)
        self.announce()

    def announce(self) -> None:
        """Say what changed in the catalog."""
        events = self.catalog.take_events()
        if not events:
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
            items = [(item, self._cells(ref)) for item, ref in places_of(batch)]
            self._spill(batch, items)

    def load(self, blocks: Sequence[TierBlock], refs: Sequence[BlockRef]) -> Loading:
        """Read blocks into slots that are prepared and that nobody else writes."""
        placed = self.catalog.begin_load(blocks)
        items = [(item, self._cells(ref)) for item, ref in zip(placed, refs, strict=False)]
        done: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        began_ns = self._clock.monotonic_ns()

        def read() -> list[bool]:
            sound = self._store.read(items)
            for (item, _), ref, good in zip(items, refs, sound, strict=False):
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

    def gave_up(self, num_blocks: int, waited_ns: int) -> None:
        """A load did not come back in time."""
        self._count("timeout")
        self.cost.loaded(num_blocks * self._arena.geometry.block_nbytes, waited_ns)

    def purge(self, doomed: Callable[[TierBlock], bool]) -> int:
        """Make blocks unfindable, and their records void; how many."""
        places = self.catalog.purge(doomed)
        self._forget(places)
        self.announce()
        return len(places)

    def counts(self) -> TierCounts:
        """What `/status` says of it."""
        stats, spill = self.catalog.stats(), self.queue.stats
        return TierCounts(
            blocks=stats.stored,
            limit=stats.limit,
            used_bytes=self._used_bytes,
            waiting=len(self.queue),
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
        while self._jobs and loop.time() < end:
            await asyncio.wait(self._jobs, timeout=end - loop.time())
        self._closing = True
        stuck = bool(self._jobs)
        for pool in (self._writer, self._readers):
            pool.shutdown(wait=not stuck, cancel_futures=True)
        if stuck:
            _log.error("tier did not come to rest tier=%s jobs=%d", self.name, len(self._jobs))
        else:
            self._store.close()

    def _spill(self, batch: SpillBatch, items: list[tuple[PlacedBlock, Cells]]) -> None:
        def write() -> int:
            self._store.write(items, batch.plan.forget)
            return self._store.used_bytes()

        def ended(writing: "asyncio.Future[int]") -> None:
            error = None if writing.cancelled() else writing.exception()
            ok = error is None and not writing.cancelled()
            if ok:
                self._used_bytes = writing.result()
            full = isinstance(error, TierFullError)
            if error is not None and not (full and self._full):
                # Once per episode: a full disk would say it for every batch.
                _log.error("blocks not stored tier=%s count=%d cause=%s", self.name, len(items), error)
            self._full = full
            self._count("spilled" if ok else "failed", len(items))
            self._forget(self.queue.done(batch, ok=ok, medium_full=full))
            self.announce()
            self.pump()

        self._run(self._writer, write, ended)

    def _forget(self, places: Sequence[int]) -> None:
        if not places:
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

"""Which blocks of a pool go down to a slower tier next, and what must not be freed while they do.

Follows the pool's events. Blocks wait in the order in which they became readable, parents first; a batch of them is
held in the pool while it is written, and given back when that has ended. Pure: no IO, no time.

P1: every block of a batch is held until `done`: its slot is neither freed nor written while its spill runs.
P2: at most `max_in_flight` blocks are held at a time, whatever waits.
P3: what waits is in the pool: at most one entry for each of its slots. A block that is evicted before its turn is
    counted, not written.
P4: a spill that failed leaves the block absent from the tier; it waits again only when it is stored anew.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import msgspec

from kv_core.block import BlockRef
from kv_core.hashing import BlockHash, Extra
from kv_prefix.block_pool import BlockPool
from kv_prefix.errors import StaleMatchError
from kv_prefix.events import BlockRemoved, BlocksStored, PoolEvent, RemovalReason
from kv_prefix.matching import extras_by_block
from kv_prefix.pins import Receipt
from kv_prefix.tiers.blocks import PlacedBlock, TierBlock, chain_digest, pack_extras
from kv_prefix.tiers.catalog import StorePlan, TierCatalog

ScopesOf = Callable[[bytes], tuple[bytes, int]]
"""By what a namespace can be purged, packed, and how many purges of it were followed (`TierBlock.scopes`, `.epoch`)."""

ChecksOf = Callable[[int], bytes | None]
"""The packed CRC-64s of a slot's layers; None when they are not sealed."""


def _no_scopes(_: bytes) -> tuple[bytes, int]:
    return b"", 0


@dataclass(frozen=True, slots=True)
class SpillBatch:
    """Write these places from these slots, then say `done`. `plan.forget` comes first."""

    plan: StorePlan
    refs: tuple[BlockRef, ...]
    receipt: Receipt


@dataclass(slots=True)
class SpillStats:
    """Blocks, since the queue was made."""

    spilled: int = 0
    failed: int = 0
    missed: int = 0
    unsealed: int = 0


@dataclass(slots=True)
class _Waiting:
    block: TierBlock
    ref: BlockRef


@dataclass(slots=True)
class SpillQueue:
    """The way down from one pool to one tier.

    Args:
        pool: where the blocks are; its events must be shown to `observe`, in order.
        catalog: of the tier.
        max_in_flight: blocks held for spilling at a time.
        scopes_of: what is stored beside blocks of a namespace.
    """

    pool: BlockPool
    catalog: TierCatalog
    max_in_flight: int
    scopes_of: ScopesOf = _no_scopes
    stats: SpillStats = field(default_factory=SpillStats)
    in_flight: int = 0
    _known: dict[bytes, tuple[bytes, int]] = field(default_factory=dict)
    _waiting: dict[bytes, _Waiting] = field(default_factory=dict)

    def __len__(self) -> int:
        """Blocks that wait."""
        return len(self._waiting)

    def observe(self, events: Iterable[PoolEvent]) -> None:
        """The pool stored or removed blocks."""
        for event in events:
            if isinstance(event, BlocksStored):
                self._stored(event)
            else:
                self._removed(event)

    def in_pool(self, sequence: bytes) -> BlockHash | None:
        """The names of a block that the pool holds, by its sequence hash."""
        known = self._known.get(sequence)
        return None if known is None else BlockHash(sequence, known[1])

    def holds(self, sequence: bytes) -> bool:
        """Whether the pool holds a block of that sequence hash."""
        return sequence in self._known

    def next_batch(self, max_blocks: int, checks_of: ChecksOf) -> SpillBatch | None:
        """The next blocks to write; None when nothing waits or enough is under way."""
        room = min(max_blocks, self.max_in_flight - self.in_flight)
        found: list[_Waiting] = []
        while self._waiting and len(found) < room:
            name = next(iter(self._waiting))
            waiting = self._waiting.pop(name)
            checks = checks_of(waiting.ref.slot)
            if checks is None:
                self.stats.unsealed += 1
                continue
            block = waiting.block
            found.append(_Waiting(_with_checks(block, checks), waiting.ref))
        if not found:
            return None
        plan = self.catalog.plan_store([item.block for item in found])
        if not plan.writes:
            return None
        planned = {item.block.sequence for item in plan.writes}
        refs = tuple(item.ref for item in found if item.block.sequence in planned)
        try:
            receipt = self.pool.hold("spill", refs, used=False)
        except StaleMatchError:
            # Its removal was not observed yet: it is reported before the next call.
            self.catalog.stored(plan, ok=False)
            self.stats.missed += len(plan.writes)
            return None
        self.in_flight += len(plan.writes)
        return SpillBatch(plan, refs, receipt)

    def done(self, batch: SpillBatch, *, ok: bool, medium_full: bool = False) -> tuple[int, ...]:
        """A batch was written, or not; returns places to forget."""
        count = len(batch.plan.writes)
        self.in_flight -= count
        self.pool.release(batch.receipt)
        if ok:
            self.stats.spilled += count
        else:
            self.stats.failed += count
        return self.catalog.stored(batch.plan, ok=ok, medium_full=medium_full)

    def _stored(self, event: BlocksStored) -> None:
        count = len(event.block_hashes)
        nbytes = len(event.tokens) // count
        end = event.first_block_idx + count
        extras_of = extras_by_block(event.extras, event.first_block_idx, end, self.pool.block_size)
        parent = event.parent.sequence if event.parent is not None else b""
        known = self._known.get(parent) if parent else (event.namespace, 0)
        if known is None:
            # The pool tells of a parent before its children, so the parent was told before this queue was made.
            return
        digest = known[0]
        scopes, epoch = self.scopes_of(event.namespace)
        for i, name in enumerate(event.block_hashes):
            tokens = event.tokens[i * nbytes : (i + 1) * nbytes]
            extras: Sequence[Extra] = extras_of.get(event.first_block_idx + i, ())
            packed = pack_extras(extras)
            digest = chain_digest(digest, tokens, packed)
            self._known[name.sequence] = digest, name.check
            if not self.catalog.knows(name.sequence):
                block = TierBlock(
                    namespace=event.namespace,
                    block_idx=event.first_block_idx + i,
                    sequence=name.sequence,
                    check=name.check,
                    parent=parent,
                    prefix_digest=digest,
                    tokens=tokens,
                    extras=packed,
                    checks=b"",
                    scopes=scopes,
                    epoch=epoch,
                )
                self._waiting[name.sequence] = _Waiting(block, event.refs[i])
            parent = name.sequence

    def _removed(self, event: BlockRemoved) -> None:
        self._known.pop(event.block_hash.sequence, None)
        waiting = self._waiting.pop(event.block_hash.sequence, None)
        if waiting is not None and event.reason is RemovalReason.EVICTED:
            self.stats.missed += 1


def _with_checks(block: TierBlock, checks: bytes) -> TierBlock:
    return msgspec.structs.replace(block, checks=checks)


def places_of(batch: SpillBatch) -> tuple[tuple[PlacedBlock, BlockRef], ...]:
    """Each write of a batch with the slot it reads."""
    return tuple(zip(batch.plan.writes, batch.refs, strict=True))

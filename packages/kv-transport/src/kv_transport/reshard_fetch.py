"""Reads the KV of ranks of another tensor-parallel size, so that each rank ends with exactly its heads.

A checksum is of a whole cell, so whole cells are read: each is verified as its holder sealed it, then the runs of our
heads are copied out of staging and summed again where they lie. A cell of ours is sealed when the last source has
delivered its runs. Ranks that hold fewer heads than their sources read more bytes than they keep; bytes of a cell of
another rank never reach the arena.
"""

import asyncio
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np

from kv_core.block import BlockGeometry, BlockRef
from kv_core.checksum import crc64
from kv_core.errors import KVError
from kv_core.namespace import EXACT, Fidelity
from kv_transport import kernels, limits
from kv_transport.arena import Arena
from kv_transport.arena_layout import IntArray
from kv_transport.cast_units import StagedUnit, Staging, staged_cells
from kv_transport.errors import ChecksumMismatch, InvalidDescriptor, TransferCancelled, TransferTimeout
from kv_transport.flow import Flow
from kv_transport.reshard import HeadRun, reshard_runs, source_geometry
from kv_transport.tickets import ReadGrant
from kv_transport.types import TransferPriority, TransferStats, XferOp


@dataclass(frozen=True, slots=True)
class HeadSplit:
    """Whose heads we are: rank `tp_rank` of `tp_size` over the model's `num_kv_heads`."""

    num_kv_heads: int
    tp_rank: int
    tp_size: int


class Assembly:
    """Which cells of ours still wait for how many sources. Thread-safe."""

    def __init__(self, sources: int) -> None:
        self._sources: Final = sources
        self._lock = threading.Lock()
        self._delivered: dict[tuple[int, int], set[int]] = {}

    def deliver(self, layer: int, slot: int, source: int) -> bool:
        """Runs of a source are in place; whether the cell is complete. A source may deliver again after a retry."""
        with self._lock:
            by = self._delivered.setdefault((layer, slot), set())
            by.add(source)
            return len(by) == self._sources


@dataclass(slots=True, eq=False)
class SliceUnit(StagedUnit):
    """Reads whole cells of one source and keeps the runs of our heads."""

    source: int = 0
    table: IntArray = field(default_factory=lambda: np.empty((0, 3), np.int64))
    """Per run: offset in our cell, offset in the source's, bytes."""
    assembly: Assembly = field(default_factory=lambda: Assembly(1))

    def store_checks(self, checks: list[int]) -> None:
        assert self.arena is not None and self.slots is not None
        for slot, data in zip(self.slots.tolist(), self.staged(), strict=True):
            cell = self.arena.cell(slot, self.layer)
            keep_runs(cell, data, self.table, self.layer)
            if self.assembly.deliver(self.layer, slot, self.source):
                self.arena.checks[self.layer, slot] = crc64(cell)


def keep_runs(cell: memoryview, data: memoryview, table: IntArray, layer: int) -> None:
    """Copy the runs of our heads out of a verified cell of another rank.

    Args:
        table: per run: offset in `cell`, offset in `data`, bytes.

    Raises:
        ChecksumMismatch: what lies in our cell now is not what was read.
    """
    found, sent = kernels.copy_unsealed_cells(cell, data, table)
    if found != sent:
        bad = sum(ours != theirs for ours, theirs in zip(found, sent, strict=True))
        raise ChecksumMismatch(peer="this node", transport="memory", bad=bad, total=len(sent), layer=layer)


def runs_by_rank(target: BlockGeometry, split: HeadSplit, source_size: int) -> dict[int, IntArray]:
    """`keep_runs`' table for each rank of the other side that something comes from.

    Raises:
        GeometryMismatch: `target` does not hold as many heads as our rank has.
        InvalidDescriptor: the numbers cannot be.
    """
    runs: dict[int, list[HeadRun]] = {}
    for run in reshard_runs(target, split.num_kv_heads, split.tp_rank, split.tp_size, source_size):
        runs.setdefault(run.source_rank, []).append(run)
    return {
        rank: np.array([(run.target_offset, run.source_offset, run.nbytes) for run in of_rank], np.int64)
        for rank, of_rank in runs.items()
    }


def head_sources(
    arena: Arena, grants: Sequence[ReadGrant], positions: int, split: HeadSplit
) -> list[tuple[int, ReadGrant, BlockGeometry, IntArray]]:
    """Each rank that something comes from: its rank, its lease, how it must store a block, and `SliceUnit.table`.

    Raises:
        InvalidDescriptor: the leases are not of the same tokens and layers.
        GeometryMismatch: our arena does not hold as many heads as our rank has.
    """
    spans = {(grant.seq_start, grant.seq_end, grant.layer_start, grant.layer_end) for grant in grants}
    if len(spans) != 1 or any(grant.num_positions != positions for grant in grants):
        raise InvalidDescriptor(
            what="leases", value=len(grants), reason=f"need the same tokens and layers in each, over {positions} blocks"
        )
    size = len(grants)
    return [
        (rank, grants[rank], source_geometry(arena.geometry, split.num_kv_heads, rank, size), table)
        for rank, table in runs_by_rank(arena.geometry, split, size).items()
    ]


def slice_units(
    priority: TransferPriority,
    grant: ReadGrant,
    arena: Arena,
    into: Sequence[BlockRef],
    layer: int,
    unit_bytes: int,
) -> list[SliceUnit]:
    """Units that read every cell of one layer of a source; the caller sets which runs are kept."""
    nbytes = grant.form.geometry().slot_layer_nbytes
    cells_max = max(1, min(unit_bytes // nbytes, limits.CELLS_PER_UNIT_MAX))
    slots = np.array([ref.slot for ref in into], np.int64)
    units = []
    for begin in range(0, len(slots), cells_max):
        end = min(begin + cells_max, len(slots))
        staging = Staging((end - begin) * nbytes)
        units.append(
            SliceUnit(
                op=XferOp.READ,
                priority=priority,
                region=grant.region,
                local=staging,
                cells=staged_cells(grant, layer, begin, end),
                ticket=grant,
                layer=layer,
                start=begin,
                end=end,
                arena=arena,
                slots=slots[begin:end],
                staging=staging,
            )
        )
    return units


class ReshardFuture:
    """One fetch from several ranks. It ends as one: when one source fails, the others are given up."""

    def __init__(self) -> None:
        self._flows: list[Flow] = []

    def add(self, flow: Flow) -> None:
        """For the engine: one more source."""
        self._flows.append(flow)

    @property
    def total_bytes(self) -> int:
        """KV bytes that are read for it."""
        return sum(flow.total_bytes for flow in self._flows)

    @property
    def missing_layers(self) -> list[int]:
        """Layers that some source has not delivered yet."""
        return sorted({layer for flow in self._flows for layer in flow.missing_layers})

    @property
    def fidelity(self) -> Fidelity:
        """Of what arrives, so far: publish it under no other."""
        return next((flow.fidelity for flow in self._flows if not flow.fidelity.is_exact), EXACT)

    def stats(self) -> TransferStats:
        """The figures so far, of all sources together."""
        return combined_stats([flow.stats() for flow in self._flows])

    async def layer_ready(self, layer: int) -> None:
        """Until every source has delivered that layer. Raises what the transfer failed with."""
        for flow in self._flows:
            await flow.layer_ready(layer)

    async def wait(self, timeout_ms: int | None = None) -> TransferStats:
        """Until our blocks are complete and no memory is in use any more.

        Raises:
            TransferTimeout: not within `timeout_ms`; the transfer goes on.
            TransportError: a source failed; the others were given up, and all memory is free.
        """
        try:
            async with asyncio.timeout(None if timeout_ms is None else timeout_ms / 1000):
                outcomes = await asyncio.gather(*(self._one(flow) for flow in self._flows), return_exceptions=True)
        except TimeoutError:
            raise TransferTimeout(
                what="fetch",
                request=self._flows[0].name,
                timeout_ms=timeout_ms or 0,
                missing_layers=list(self.missing_layers),
            ) from None
        errors = [outcome for outcome in outcomes if isinstance(outcome, BaseException)]
        if errors:
            # What came first; the others were cancelled for it.
            raise next((error for error in errors if not isinstance(error, TransferCancelled)), errors[0])
        return self.stats()

    def cancel(self) -> None:
        """Give it up; `wait` raises `TransferCancelled` when its memory is free. Idempotent, no-op when over."""
        for flow in self._flows:
            if not flow.over:
                flow.stop(TransferCancelled(request=flow.name))

    async def _one(self, flow: Flow) -> None:
        try:
            await flow.wait(None)
        except KVError:
            self.cancel()
            raise


def combined_stats(parts: Sequence[TransferStats]) -> TransferStats:
    """Of one transfer that has several sources."""
    return TransferStats(
        nbytes=sum(part.nbytes for part in parts),
        wire_nbytes=sum(part.wire_nbytes for part in parts),
        units=sum(part.units for part in parts),
        retries=sum(part.retries for part in parts),
        transports=_summed([part.transports for part in parts]),
        duration_ns=max(part.duration_ns for part in parts),
        codecs=_summed([part.codecs for part in parts]),
    )


def _summed(parts: Sequence[dict[str, int]]) -> dict[str, int]:
    total: dict[str, int] = {}
    for part in parts:
        for name, count in part.items():
            total[name] = total.get(name, 0) + count
    return total

"""Hand-overs from ranks of another tensor-parallel size, layer by layer, so that each rank ends with exactly its heads.

A checksum is of a whole cell, and a cell of ours may be filled by several senders. So each rank of the other side gets
a grant for landing slots that have its own form, and sends whole cells as to any receiver; it need not know that
anything is re-sharded. As soon as every source has delivered a layer, the runs of our heads are copied out, compared
with where they came from, and our cells are sealed. The slower way round is `reshard_fetch`, where we do the asking.

HL1: nobody but this process writes our cells, so they are at rest as soon as the copying is, whatever a peer does; a
peer that must be fenced holds landing slots only. HL2: a layer is ready when every cell of it is whole and sealed.
HL3: a landing slot is given out again when its grant is over and nothing is copied out of it any more.
"""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final

from kv_core.block import BlockGeometry, BlockRef, Layout
from kv_core.errors import KVError
from kv_core.ids import NodeId, RegionId, RequestId
from kv_core.namespace import EXACT, Fidelity
from kv_transport import limits
from kv_transport.arena import Arena
from kv_transport.arena_layout import IntArray
from kv_transport.codecs import Codec
from kv_transport.engine import LOSSLESS, KVCacheTransferEngine
from kv_transport.errors import LandingFull, StaleGeneration, TransferCancelled
from kv_transport.handover import local_arena
from kv_transport.inbound import Inbound, LayerArrival
from kv_transport.memory_budget import MemoryBudget
from kv_transport.reshard import source_geometry
from kv_transport.reshard_fetch import HeadSplit, combined_stats, keep_runs, runs_by_rank
from kv_transport.types import TransferStats


@dataclass(slots=True, eq=False)
class _Area:
    """Landing slots of one form."""

    arena: Arena
    region: RegionId
    free: list[int]


@dataclass(frozen=True, slots=True, eq=False)
class _Part:
    """What one rank of the other side sends: its landing slots by position, and the runs of ours in its cells."""

    area: _Area
    slots: list[int]
    inbound: Inbound
    table: IntArray


class HeadInbound:
    """Made by `HeadLanding.grant`: our blocks, being filled by several ranks. It ends as one; lives on the loop.

    Attributes:
        grants: rank of the other side -> the grant to send to it; ranks that have nothing for us are left out.
        arrival: the view for a compute thread.
    """

    def __init__(self, request_id: RequestId, arena: Arena, into: Sequence[BlockRef], parts: dict[int, _Part]) -> None:
        self.grants: Final = {rank: part.inbound.entry.grant for rank, part in parts.items()}
        self.arrival: Final = LayerArrival(request_id)
        self._arena = arena
        self._into = tuple(into)
        self._parts = tuple(parts.values())
        first = next(iter(self.grants.values()))
        self._layers = range(first.layer_start, first.layer_end)
        loop = asyncio.get_running_loop()
        self._ready: dict[int, asyncio.Future[None]] = {layer: loop.create_future() for layer in self._layers}
        self._assembled = asyncio.Event()
        self._error: KVError | None = TransferCancelled(request=request_id)  # until it is known better

    @property
    def total_bytes(self) -> int:
        """KV bytes that are sent for it: whole cells of the other side."""
        return sum(part.inbound.total_bytes for part in self._parts)

    @property
    def missing_layers(self) -> list[int]:
        """Layers that are not whole yet."""
        return [layer for layer, ready in self._ready.items() if not ready.done() or ready.exception() is not None]

    @property
    def fidelity(self) -> Fidelity:
        """Of what has arrived, so far: publish it under no other."""
        return next((part.inbound.fidelity for part in self._parts if not part.inbound.fidelity.is_exact), EXACT)

    def stats(self) -> TransferStats:
        """The figures so far, of all sources together."""
        return combined_stats([part.inbound.stats() for part in self._parts])

    async def layer_ready(self, layer: int) -> None:
        """Until that layer is whole. Raises what the hand-over failed with, as soon as it does."""
        await asyncio.shield(self._ready[layer])

    async def done(self) -> TransferStats:
        """Until every layer is whole. Raises what the hand-over failed with."""
        await self._assembled.wait()
        if self._error is not None:
            raise self._error
        return self.stats()

    async def released(self) -> None:
        """Until our slots are at rest, after success or failure (HL1)."""
        await self._assembled.wait()

    async def settled(self) -> None:
        """For the landing: until our slots are at rest, and its own are free or in quarantine."""
        await self._assembled.wait()
        for part in self._parts:
            await part.inbound.settled()

    @property
    def fenced(self) -> bool:
        """For the landing: whether nobody can write into its slots any more."""
        return all(part.inbound.slots_free for part in self._parts)

    def cancel(self) -> None:
        """Give it up: all grants end, writers at work are fenced off. Idempotent, no-op when complete."""
        for part in self._parts:
            part.inbound.cancel()

    async def run(self) -> None:
        """For the landing: assemble layer by layer; returns when our cells are at rest."""
        try:
            for layer in self._layers:
                for part in self._parts:
                    await part.inbound.layer_ready(layer)
                await self._assemble(layer)
                self._ready[layer].set_result(None)
                self.arrival.note_ready(layer)
            self._error = None
        except KVError as error:
            self._error = error
            self.cancel()
            self.arrival.fail(error)
            for ready in self._ready.values():
                if not ready.done():
                    ready.set_exception(error)
                    ready.exception()  # nobody may be waiting
        finally:
            self._assembled.set()

    async def _assemble(self, layer: int) -> None:
        """Copy the runs of one layer; in pieces, since it is done on the loop."""
        copied = 0
        for position, ref in enumerate(self._into):
            found = self._arena.generation(ref.slot)
            if found != ref.generation:
                raise StaleGeneration(region=ref.region, slot=ref.slot, found=found, expected=ref.generation)
            cell = self._arena.cell(ref.slot, layer)
            for part in self._parts:
                keep_runs(cell, part.area.arena.cell(part.slots[position], layer), part.table, layer)
            self._arena.seal(layer, (ref.slot,))
            copied += len(cell)
            if copied >= limits.COPY_PIECE_BYTES:
                copied = 0
                await asyncio.sleep(0)


class HeadLanding:
    """Where cells of ranks of another tensor-parallel size land until our heads are taken out of them."""

    def __init__(
        self,
        engine: KVCacheTransferEngine,
        target: BlockGeometry,
        split: HeadSplit,
        source_size: int,
        num_slots: int,
        *,
        budget: MemoryBudget | None = None,
    ) -> None:
        """Allocate and register.

        Args:
            target: how our rank stores a block.
            split: which heads are ours.
            source_size: tensor-parallel size of the other side.
            num_slots: landing slots for each form that ranks of the other side have; a hand-over takes one for each
                of its blocks and ranks, until it is over.

        Raises:
            GeometryMismatch: `target` does not hold as many heads as our rank has.
            MemoryUnavailable: there is no room for so many slots.
            InvalidDescriptor: the numbers cannot be.
        """
        self._engine = engine
        self._tables = runs_by_rank(target, split, source_size)
        self._forms = {rank: source_geometry(target, split.num_kv_heads, rank, source_size) for rank in self._tables}
        self._areas: dict[BlockGeometry, _Area] = {}
        self._open: dict[asyncio.Task[None], HeadInbound] = {}
        self._closed = False
        try:
            for form in dict.fromkeys(self._forms.values()):
                arena = Arena.create(form, num_slots, Layout.LAYER_FIRST, name="head landing", budget=budget)
                region = engine.agent.register_memory(arena).region
                self._areas[form] = _Area(arena, region, list(range(num_slots)))
        except KVError:
            self._retire()
            raise

    @property
    def free_slots(self) -> int:
        """Landing slots that no hand-over has, of all forms."""
        return sum(len(area.free) for area in self._areas.values())

    def grant(
        self,
        request_id: RequestId,
        into: Sequence[BlockRef],
        *,
        seq_start: int,
        seq_end: int,
        layers: tuple[int, int] | None = None,
        writers: Mapping[int, NodeId] | None = None,
        accept: Sequence[Codec] = LOSSLESS,
        timeout_ms: int | None = None,
    ) -> HeadInbound:
        """Let the ranks of the other side send these blocks; send each the grant that is for it. Call it on the loop.

        Args:
            into: our blocks, one per position, generations already raised.
            writers: rank -> the only node that may use its grant.
            accept: as for `grant_writes`; values are not cast.
            timeout_ms: bounds the whole hand-over, from now.

        Raises:
            LandingFull: too few landing slots are free now.
            InvalidDescriptor, StaleGeneration, TransferTooLarge: as `grant_writes`.
        """
        arena = local_arena(self._engine.agent.regions, into)
        if self._closed:
            raise LandingFull(need=len(into) * len(self._forms), free=0)
        for form, area in self._areas.items():
            need = len(into) * sum(other == form for other in self._forms.values())
            if need > len(area.free):
                raise LandingFull(need=need, free=len(area.free))
        parts: dict[int, _Part] = {}
        codecs = [one for one in accept if one is not Codec.FP8_CAST]
        try:
            for rank, table in self._tables.items():
                area = self._areas[self._forms[rank]]
                slots = [area.free.pop() for _ in into]
                try:
                    refs = [BlockRef(area.region, slot, area.arena.raise_generation(slot)) for slot in slots]
                    grant = self._engine.grant_writes(
                        request_id,
                        refs,
                        seq_start=seq_start,
                        seq_end=seq_end,
                        layers=layers,
                        writer=(writers or {}).get(rank),
                        accept=codecs,
                    )
                except KVError:
                    area.free += slots
                    raise
                inbound = self._engine.expect(request_id, grant, timeout_ms=timeout_ms)
                parts[rank] = _Part(area, slots, inbound, table)
        except KVError:
            for part in parts.values():
                part.inbound.when_released(partial(part.area.free.extend, part.slots))
                part.inbound.cancel()
            raise
        filling = HeadInbound(request_id, arena, into, parts)
        task = asyncio.get_running_loop().create_task(self._follow(filling, tuple(parts.values())), name=request_id)
        self._open[task] = filling
        task.add_done_callback(self._over)
        return filling

    async def close(self) -> None:
        """Give up what is under way. Idempotent.

        Returns when our cells are at rest; landing slots that wait for a fence are given back to the system after it.
        """
        self._closed = True
        for filling in self._open.values():
            filling.cancel()
        await asyncio.gather(*(filling.settled() for filling in self._open.values()))
        await asyncio.gather(*(task for task, filling in self._open.items() if filling.fenced))
        self._retire_if_idle()

    async def _follow(self, filling: HeadInbound, parts: Sequence[_Part]) -> None:
        await filling.run()
        for part in parts:
            await part.inbound.released()
            part.area.free += part.slots

    def _over(self, task: "asyncio.Task[None]") -> None:
        del self._open[task]
        if self._closed:
            self._retire_if_idle()

    def _retire_if_idle(self) -> None:
        if not self._open:
            self._retire()

    def _retire(self) -> None:
        for area in self._areas.values():
            self._engine.agent.deregister_memory(area.region)
            area.arena.close()
        self._areas.clear()

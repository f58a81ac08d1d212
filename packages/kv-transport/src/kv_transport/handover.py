"""The sender's side of a hand-over that is fed layer by layer while prefill still computes."""

from collections.abc import Callable, Sequence
from functools import partial

import numpy as np

from kv_core.block import BlockRef
from kv_core.dtypes import DType
from kv_core.errors import KVError, LocalProtocolError
from kv_core.ids import RegionId
from kv_core.namespace import Fidelity
from kv_transport import casting, limits
from kv_transport.arena import Arena
from kv_transport.cast_units import CastUnit, Staging, staged_cells
from kv_transport.codecs import Codec
from kv_transport.errors import GeometryMismatch, InvalidDescriptor, StaleGeneration, TransferCancelled
from kv_transport.flow import Flow
from kv_transport.futures import TransferFuture
from kv_transport.poster import LoopPoster
from kv_transport.progress import span_mask
from kv_transport.regions import RegionTable
from kv_transport.tickets import KVForm, ReadGrant, WriteGrant
from kv_transport.types import TransferPriority, TransferStats, XferOp, XferState
from kv_transport.units import Unit, ticket_cells


class Handover:
    """Made by `KVCacheTransferEngine.open_handover`."""

    def __init__(
        self,
        flow: Flow,
        grant: WriteGrant,
        regions: RegionTable,
        held: set[int],
        poster: LoopPoster,
        unit_bytes: Callable[[int], int],
        *,
        cast: bool = False,
    ) -> None:
        """`held` are the regions that the flow keeps registered; it lets go of them when its memory is free."""
        self._flow = flow
        self._grant = grant
        self._regions = regions
        self._held = held
        self._poster = poster
        self._unit_bytes = unit_bytes
        self._cast = cast
        self._submitted = [0] * (grant.layer_end - grant.layer_start)

    @property
    def state(self) -> XferState:
        return self._flow.state

    @property
    def total_bytes(self) -> int:
        """KV bytes that complete the grant."""
        return self._flow.total_bytes

    @property
    def missing_layers(self) -> list[int]:
        """Layers that the receiver has not verified yet."""
        return self._flow.missing_layers

    @property
    def fidelity(self) -> Fidelity:
        """Of what the receiver gets, so far."""
        return self._flow.fidelity

    @property
    def lossy_checks(self) -> dict[tuple[int, int], int]:
        """(layer, position) -> the CRC-64 of that cell as the receiver has it, where a lossy codec took it there."""
        return dict(self._flow.lossy_checks)

    @property
    def may_be_lossy(self) -> bool:
        """Whether the receiver may get other bytes than the blocks hold: by a cast, or by a lossy codec."""
        return self._cast or not all(Codec(codec).lossless for codec in self._grant.codecs)

    def explain(self) -> str:
        """Which codec was chosen last, and why: a line for an operator."""
        return self._flow.policy.explain()

    def stats(self) -> TransferStats:
        """The figures so far."""
        return self._flow.stats()

    def submit(self, layer: int, blocks: Sequence[BlockRef], start: int = 0) -> None:
        """Send `blocks` of one layer to the grant's positions `[start, start + len(blocks))`; on the loop.

        They must be complete and stay unchanged until `finish` is over. Cells that are not sealed yet are sealed by
        the transport's own threads first.

        Raises:
            InvalidDescriptor, StaleGeneration, GeometryMismatch: these blocks cannot be sent there.
            LocalProtocolError: a position is submitted twice.
            TransportError: what the hand-over failed with, if it did.
        """
        self._add(layer, start, int(blocks[0].region) if blocks else 0, self._units(layer, blocks, start))

    def submit_threadsafe(self, layer: int, blocks: Sequence[BlockRef], start: int = 0) -> None:
        """The same from an engine's compute thread: seals the cells there (about 10 GB/s), hands over, returns.

        Raises as `submit` does, except for a failure that the loop has not told this thread yet: `finish` raises it.
        """
        if self._flow.error is not None:
            raise self._flow.error
        units = self._units(layer, blocks, start)
        for unit in units:
            unit.source_checks()
        self._poster.run(partial(self._add_late, layer, start, int(blocks[0].region), units))

    def sealed_future(self) -> TransferFuture:
        """Nothing more will be submitted; the rest is the future's. Incomplete grants fail as with `finish`."""
        self._seal()
        return TransferFuture(self._flow)

    async def finish(self, timeout_ms: int | None = None) -> TransferStats:
        """Nothing more will be submitted: wait until the receiver has verified everything the grant covers.

        When it returns or raises, the transport has stopped reading the blocks.

        Raises:
            TransferTimeout: not within `timeout_ms`; the hand-over was given up.
            LocalProtocolError: pieces of the grant were never submitted; the hand-over was given up.
            TransportError: why it failed.
        """
        self._seal()
        return await self._flow.wait(timeout_ms, stop=True)

    def _seal(self) -> None:
        full = span_mask(0, self._grant.num_positions)
        missing = [self._grant.layer_start + index for index, bits in enumerate(self._submitted) if bits != full]
        if missing and self._flow.error is None:
            self._flow.stop(LocalProtocolError(detail=f"layers {missing} of {self._flow.name} were never submitted"))
        self._flow.seal()

    async def cancel(self) -> None:
        """Give it up and wait until the blocks are no longer read. The receiver is told. Idempotent."""
        if not self._flow.over:
            self._flow.stop(TransferCancelled(request=self._flow.name))
        await self._flow.released()

    def _units(self, layer: int, blocks: Sequence[BlockRef], start: int) -> list[Unit]:
        grant = self._grant
        end = start + len(blocks)
        if not grant.layer_start <= layer < grant.layer_end:
            raise InvalidDescriptor(
                what="layer", value=layer, reason=f"the grant is for [{grant.layer_start}, {grant.layer_end})"
            )
        if not 0 <= start < end <= grant.num_positions:
            raise InvalidDescriptor(what="positions", value=[start, end], reason=f"the grant has {grant.num_positions}")
        arena = local_arena(self._regions, blocks)
        if (
            check_forms(KVForm.of(arena.geometry, arena.layout, arena.fp8_scale), grant.form, grant.codecs)
            != self._cast
        ):
            # What was announced when the grant was opened.
            raise GeometryMismatch(field="dtype", ours=arena.geometry.dtype.value, theirs="another was announced")
        return ticket_units(XferOp.WRITE, self._flow.priority, grant, arena, blocks, layer, start, self._unit_bytes)

    def _add(self, layer: int, start: int, region: int, units: list[Unit]) -> None:
        span = span_mask(start, units[-1].end)
        index = layer - self._grant.layer_start
        if self._submitted[index] & span:
            raise LocalProtocolError(detail=f"layer {layer} from position {start} of {self._flow.name} was submitted")
        if self._flow.error is not None:
            raise self._flow.error
        if region not in self._held:
            self._regions.use(region)
            self._held.add(region)
        self._submitted[index] |= span
        self._flow.add(units)

    def _add_late(self, layer: int, start: int, region: int, units: list[Unit]) -> None:
        try:
            self._add(layer, start, region, units)
        except KVError as error:
            self._flow.stop(error)


def local_arena(regions: RegionTable, blocks: Sequence[BlockRef]) -> Arena:
    """The arena that these references are in.

    Raises:
        InvalidDescriptor: they are in several, or outside it.
        StaleGeneration: one names an earlier use of its slot.
    """
    region = blocks[0].region if blocks else RegionId(0)
    if not blocks or any(ref.region != region for ref in blocks):
        raise InvalidDescriptor(what="blocks", value=len(blocks), reason="need blocks of one region")
    arena = regions.arena(region)
    slots = [ref.slot for ref in blocks]
    inside = 0 <= min(slots) and max(slots) < arena.num_slots
    if inside and arena.generations[slots].tolist() == [ref.generation for ref in blocks]:
        return arena
    for ref in blocks:  # which one it is
        found = arena.generation(ref.slot)
        if found != ref.generation:
            raise StaleGeneration(region=ref.region, slot=ref.slot, found=found, expected=ref.generation)
    return arena


def check_forms(ours: KVForm, theirs: KVForm, accepted: Sequence[str] = ()) -> bool:
    """Whether values must be cast between the two; the layout does not matter, cells are the same.

    Args:
        accepted: codecs that the receiver accepts; a cast is one of them.

    Raises:
        GeometryMismatch: the first difference for which no conversion is defined, or accepted.
    """
    cast = Codec.FP8_CAST.value in accepted and casting.defined(DType(ours.dtype), DType(theirs.dtype))
    names = ("block_size", "num_kv_heads", "head_dim", "num_planes", "num_layers")
    for name in names if cast else ("dtype", *names):
        mine, other = getattr(ours, name), getattr(theirs, name)
        if mine != other:
            raise GeometryMismatch(field=name, ours=mine, theirs=other)
    if ours.dtype == theirs.dtype == DType.FP8_E4M3.value and ours.fp8_scale != theirs.fp8_scale:
        raise GeometryMismatch(field="fp8_scale", ours=ours.fp8_scale, theirs=theirs.fp8_scale)
    return cast


def require_fit(regions: RegionTable, grant: WriteGrant) -> bool:
    """Before a grant is opened: whether what our arenas hold is sent under it as it is, or cast.

    Raises:
        GeometryMismatch: no arena of ours holds such blocks.
    """
    refused: GeometryMismatch | None = None
    casts = []
    for region in regions.all():
        form = region.info().form
        if form is not None:
            try:
                casts.append(check_forms(form, grant.form, grant.codecs))
            except GeometryMismatch as error:
                refused = refused or error
    if not casts and refused is not None:
        raise refused
    return bool(casts) and all(casts)


def ticket_units(
    op: XferOp,
    priority: TransferPriority,
    ticket: WriteGrant | ReadGrant,
    arena: Arena,
    blocks: Sequence[BlockRef],
    layer: int,
    start: int,
    unit_bytes: Callable[[int], int],
) -> list[Unit]:
    """Units between our blocks and the ticket's positions from `start` on, in one layer.

    Args:
        unit_bytes: the most of each, from how many there are in all (`Peer.unit_bytes`).
    """
    slots = np.array([ref.slot for ref in blocks], np.int64)
    cell_nbytes = ticket.form.geometry().slot_layer_nbytes
    cells_max = max(1, min(unit_bytes(len(slots) * cell_nbytes) // cell_nbytes, limits.CELLS_PER_UNIT_MAX))
    cast = arena.geometry.dtype.value != ticket.form.dtype
    cells = None if cast else ticket_cells(ticket, arena, slots, layer, start, start + len(slots))
    units: list[Unit] = []
    for begin in range(0, len(slots), cells_max):
        end = min(begin + cells_max, len(slots))
        mine = slots[begin:end]
        if cells is None:
            staging = Staging((end - begin) * cell_nbytes)
            units.append(
                CastUnit(
                    op=op,
                    priority=priority,
                    region=ticket.region,
                    local=staging,
                    cells=staged_cells(ticket, layer, start + begin, start + end),
                    ticket=ticket,
                    layer=layer,
                    start=start + begin,
                    end=start + end,
                    arena=arena,
                    slots=mine,
                    staging=staging,
                )
            )
            continue
        units.append(
            Unit(
                op=op,
                priority=priority,
                region=ticket.region,
                local=arena,
                cells=cells.part(begin, end),
                ticket=ticket,
                layer=layer,
                start=start + begin,
                end=start + end,
                arena=arena,
                slots=mine,
            )
        )
    return units

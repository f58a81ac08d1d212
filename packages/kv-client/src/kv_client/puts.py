"""The way in: KV of a prefix is copied into the client's arena, sealed, and sent under the holder's grant."""

from collections.abc import Sequence
from dataclasses import dataclass

from kv_bus.interface import Bus
from kv_client.errors import CheckFailed, DeadlineExceeded, WrongArrays
from kv_client.messages import FinishPut, PutReserved, PutStored
from kv_core.block import BlockGeometry, BlockRef
from kv_core.clock import Clock
from kv_core.ids import Incarnation, NodeId, RegionId, RequestId
from kv_transport import Arena, KVCacheTransferEngine, TransferPriority, WriteGrant
from kv_transport.arena import StoredArray

_STORED_AS = {"fp32": "float32", "fp16": "float16", "bf16": "uint16", "fp8_e4m3": "uint8", "fp8_e5m2": "uint8"}


@dataclass(frozen=True, slots=True)
class StoredPrefix:
    """A prefix that the holder has. `num_sent` blocks of it were new there, `nbytes` went over `transport`."""

    num_blocks: int
    num_sent: int
    nbytes: int = 0
    transport: str = ""


@dataclass(frozen=True, slots=True)
class PinnedPrefix:
    """A pin at the holder; give it to `Client.release`."""

    pin_id: int
    num_blocks: int


def require_layers(layers: Sequence[StoredArray], geometry: BlockGeometry) -> int:
    """How many blocks these arrays hold.

    Raises:
        WrongArrays: they are not one array for each layer, equal in shape and of the geometry's.
    """
    cell = (geometry.num_planes, geometry.num_kv_heads, geometry.block_size, geometry.head_dim)
    dtype = _STORED_AS.get(geometry.dtype.value, geometry.dtype.value)
    num_blocks = layers[0].shape[0] if layers and layers[0].ndim else 0
    need = f"{geometry.num_layers} arrays {(num_blocks, *cell)} of {dtype}"
    if len(layers) != geometry.num_layers:
        raise WrongArrays(layer=len(layers), shape="missing or too many", dtype="any type", need=need)
    for layer, array in enumerate(layers):
        if array.shape != (num_blocks, *cell) or array.dtype.name != dtype:
            raise WrongArrays(layer=layer, shape=str(array.shape), dtype=array.dtype.name, need=need)
    return int(num_blocks)


def copy_in(arena: Arena, run: range, layers: Sequence[StoredArray]) -> None:
    """Copy blocks into a run of slots and seal them; runs at memory speed in the calling thread."""
    for layer, array in enumerate(layers):
        arena.kv(layer)[run.start : run.stop] = array
        arena.seal(layer, run)


class Put:
    """Sends blocks that lie in the arena to one holder."""

    def __init__(
        self,
        bus: Bus,
        transfers: KVCacheTransferEngine,
        arena: Arena,
        region: RegionId,
        clock: Clock,
        holder: NodeId,
    ) -> None:
        self._bus, self._transfers, self._arena = bus, transfers, arena
        self._region, self._clock, self._holder = region, clock, holder

    async def send(
        self,
        reserved: PutReserved,
        refs: Sequence[BlockRef],
        num_blocks: int,
        deadline_ns: int,
        life: Incarnation | None,
    ) -> StoredPrefix:
        """Send what the holder lacks; returns when it has verified and stored it.

        Raises:
            KVError: it did not; the transfer has stopped reading the blocks.
        """
        if reserved.grant is None:
            return StoredPrefix(num_blocks, 0)
        grant = WriteGrant.from_bytes(reserved.grant)
        first, size = reserved.first_block, self._arena.geometry.block_size
        granted = (grant.node, grant.seq_start, grant.seq_end, grant.num_positions)
        if granted != (self._holder, first * size, num_blocks * size, num_blocks - first):
            raise CheckFailed(holder=self._holder, cause=f"the grant is for {granted}")
        handover = self._transfers.open_handover(RequestId(grant.request_id), grant, TransferPriority.LOW)
        try:
            for layer in range(self._arena.geometry.num_layers):
                handover.submit(layer, refs[first:], 0)
            left_ms = (deadline_ns - self._clock.monotonic_ns()) // 1_000_000
            if left_ms < 1:
                raise DeadlineExceeded(holder=self._holder, cause="no time is left to send")
            stats = await handover.finish(left_ms)
            await self._bus.request(
                self._holder, FinishPut(reserved.put_id), expect=PutStored, deadline_ns=deadline_ns, incarnation=life
            )
        except BaseException:
            await handover.cancel()
            raise
        return StoredPrefix(num_blocks, num_blocks - first, stats.nbytes, stats.transport)

"""Memory for KV: a sealed memfd cut into slots, with a generation per slot and a CRC-64 per (slot, layer).

The owner raises a slot's generation before the first byte of its next content is written, which also forgets its
checksums; whoever reads checks the generation after the copy. A checksum is made by `seal` where the KV is produced;
0 stands for "not sealed" (a real CRC of 0 has odds of 2**-64 and is merely computed again).

AR1: a generation only grows. AR2: a sealed cell's checksum is that of the bytes that `seal` saw.
AR3: no process that maps the arena can be hit by SIGBUS: the memfd is sealed against shrinking before it is shared.
"""

import fcntl
import mmap
import os
import weakref
from collections.abc import Iterable, Sequence
from typing import ClassVar, Final, Self

import numpy as np
from numpy.typing import NDArray

from kv_core.block import BlockGeometry, BlockRef, KVCacheBlock, Layout, RegionOffset
from kv_core.checksum import crc64
from kv_core.dtypes import DType
from kv_core.ids import Generation, RegionId
from kv_transport import limits
from kv_transport.arena_layout import ArenaLayout
from kv_transport.errors import InvalidDescriptor, StaleGeneration
from kv_transport.memory_budget import MemoryBudget

StoredArray = NDArray[np.float32] | NDArray[np.float16] | NDArray[np.uint16]
Uint64Array = NDArray[np.uint64]
ByteArray = NDArray[np.uint8]

SEALS: Final = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW

_STORAGE: Final[dict[DType, type[np.generic]]] = {
    DType.FP32: np.float32,
    DType.FP16: np.float16,
    DType.BF16: np.uint16,
    DType.FP8_E4M3: np.uint8,
    DType.FP8_E5M2: np.uint8,
    DType.INT8: np.int8,
}


class ArenaView:
    """The tables and data of an arena, whoever mapped it."""

    def __init__(self, memory: mmap.mmap, shape: ArenaLayout) -> None:
        self.shape: Final = shape
        self._memory = memory
        slots, layers = shape.num_slots, shape.geometry.num_layers
        self.generations: Uint64Array = np.frombuffer(memory, "<u8", slots, shape.generations_offset)
        """Current generation per slot."""
        self.leases: Uint64Array = np.frombuffer(memory, "<u8", limits.LEASES_MAX, shape.leases_offset)
        """Tickets of the read leases that are alive, 0 where there is none."""
        self.checks: Uint64Array = np.frombuffer(memory, "<u8", slots * layers, shape.checks_offset).reshape(
            layers, slots
        )
        """CRC-64 per (layer, slot), 0 where the cell is not sealed."""
        self.data: ByteArray = np.frombuffer(memory, np.uint8, shape.data_nbytes, shape.data_offset)
        """All data bytes, flat."""
        self.data_view = memoryview(memory)[shape.data_offset : shape.total_nbytes]
        """The same as a buffer."""

    def cell(self, slot: int, layer: int) -> memoryview:
        """The bytes of one (slot, layer)."""
        start = self.shape.offset(slot, layer)
        return self.data_view[start : start + self.shape.cell_nbytes]

    def unmap(self) -> None:
        """Give the mapping up; with views still held elsewhere it goes when the last of them does."""
        del self.generations, self.leases, self.checks, self.data, self.data_view
        try:
            self._memory.close()
        except BufferError:
            # Somebody still holds an array over it; unmapping under them would be a segfault.
            pass


class Arena(ArenaView):
    """An arena of this process. Make one with `Arena.create`, end it with `close`."""

    _alive: ClassVar["weakref.WeakSet[Arena]"] = weakref.WeakSet()

    def __init__(self, fd: int, memory: mmap.mmap, shape: ArenaLayout, name: str, fp8_scale: int = 127) -> None:
        super().__init__(memory, shape)
        self.fp8_scale: Final = fp8_scale
        """What the codes of an FP8 arena are worth: times 2 ** (fp8_scale - 127)."""
        self.name: Final = name
        self._fd = fd
        self._array = self._whole()
        Arena._alive.add(self)

    @classmethod
    def create(
        cls,
        geometry: BlockGeometry,
        num_slots: int,
        layout: Layout = Layout.LAYER_FIRST,
        *,
        name: str = "kv-arena",
        budget: MemoryBudget | None = None,
        prefault: bool = False,
        fp8_scale: int = 127,
    ) -> Self:
        """Allocate an arena; its pages are taken when first written, or now with `prefault`.

        Raises:
            MemoryUnavailable: the machine or its cgroup has not that much left.
            InvalidDescriptor: the numbers cannot be.
        """
        shape = ArenaLayout(geometry=geometry, num_slots=num_slots, layout=layout)
        if not 1 <= fp8_scale <= 247:
            raise InvalidDescriptor(what="fp8_scale", value=fp8_scale, reason="1 to 247")
        promised = sum(arena.untouched_nbytes() for arena in list(cls._alive))
        (budget or MemoryBudget()).require(shape.total_nbytes, promised)
        fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(fd, shape.total_nbytes)
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, SEALS)
            if prefault:
                os.posix_fallocate(fd, 0, shape.total_nbytes)
            memory = mmap.mmap(fd, shape.total_nbytes)
        except BaseException:
            os.close(fd)
            raise
        header = shape.pack()
        memory[: len(header)] = header
        return cls(fd, memory, shape, name, fp8_scale)

    @property
    def geometry(self) -> BlockGeometry:
        """Shape and element type of one block."""
        return self.shape.geometry

    @property
    def layout(self) -> Layout:
        """How slots and layers follow each other; `array` and `kv` hide it."""
        return self.shape.layout

    @property
    def layers_adjoin(self) -> bool:
        """Whether the layers of one slot are one contiguous run."""
        return self.shape.layout is Layout.BLOCK_FIRST or self.shape.geometry.num_layers == 1

    @property
    def num_slots(self) -> int:
        return self.shape.num_slots

    @property
    def nbytes(self) -> int:
        """Data bytes."""
        return self.shape.data_nbytes

    @property
    def closed(self) -> bool:
        return self._fd < 0

    @property
    def array(self) -> StoredArray:
        """Everything, writable: `[slot][layer][plane][head][token][dim]` whatever the layout.

        bf16 appears as uint16, fp8 as uint8. `array[slot, layer]` is contiguous.
        """
        return self._array

    def kv(self, layer: int) -> StoredArray:
        """That layer of every slot, writable: `(num_slots, num_planes, num_kv_heads, block_size, head_dim)`."""
        view: StoredArray = self._array[:, layer]
        return view

    def fileno(self) -> int:
        """The memfd; what is sent to peers is a descriptor of it."""
        if self._fd < 0:
            raise InvalidDescriptor(what="arena", value=self.name, reason="it is closed")
        return self._fd

    def untouched_nbytes(self) -> int:
        """Bytes promised to this arena that no page backs yet."""
        if self._fd < 0:
            return 0
        return max(0, self.shape.total_nbytes - os.fstat(self._fd).st_blocks * 512)

    def generation(self, slot: int) -> Generation:
        """The slot's current generation."""
        self._check_slot(slot)
        return Generation(int(self.generations[slot]))

    def raise_generation(self, slot: int, to: Generation | None = None) -> Generation:
        """Begin the slot's next content: every older reference is void from now on, its checksums are forgotten.

        Call it before the first byte is written. `to` follows a pool that counts generations itself.

        Raises:
            StaleGeneration: `to` is not above the current generation.
        """
        current = self.generation(slot)
        target = Generation(current + 1) if to is None else to
        if target <= current:
            raise StaleGeneration(region=self.name, slot=slot, found=current, expected=target)
        self.generations[slot] = target
        self.checks[:, slot] = 0
        return target

    def raise_generations(self, slots: Sequence[int], to: Sequence[Generation]) -> None:
        """`raise_generation` of many different slots, of all or of none.

        Raises:
            StaleGeneration: the first that is not above its slot's current generation.
        """
        at, targets = np.array(slots, np.int64), np.array(to, np.uint64)
        stale = np.flatnonzero(targets <= self.generations[at])
        if len(stale):
            slot, target = slots[int(stale[0])], to[int(stale[0])]
            raise StaleGeneration(region=self.name, slot=slot, found=self.generation(slot), expected=target)
        self.generations[at] = targets
        self.checks[:, at] = 0

    def seal(self, layer: int, slots: Iterable[int]) -> None:
        """Take the CRC-64 of these cells, whose content is complete. Thread-safe for different cells.

        Runs at memory speed in the calling thread: for large blocks not one to call on an event loop.
        """
        checks = self.checks[layer]
        for slot in slots:
            checks[slot] = crc64(self.cell(slot, layer))

    def seal_block(self, slot: int) -> None:
        """Seal every layer of a block."""
        for layer in range(self.geometry.num_layers):
            self.seal(layer, (slot,))

    def unseal(self, slot: int) -> None:
        """The content is about to change within the same generation (tokens are appended)."""
        self._check_slot(slot)
        self.checks[:, slot] = 0

    def block_checks(self, slot: int) -> list[int]:
        """CRC-64 per layer, 0 where not sealed; what the XXH3 of an entry is taken over."""
        self._check_slot(slot)
        return [int(check) for check in self.checks[:, slot]]

    def verify(self, slot: int, layers: Iterable[int] | None = None) -> bool:
        """Whether the bytes still are the ones that were sealed; a cell that is not sealed is not verified."""
        wanted = range(self.geometry.num_layers) if layers is None else layers
        return all(int(self.checks[layer, slot]) == crc64(self.cell(slot, layer)) for layer in wanted)

    def ref(self, region: RegionId, slot: int) -> BlockRef:
        """A reference to the slot's present content."""
        return BlockRef(region=region, slot=slot, generation=self.generation(slot))

    def kv_blocks(self, region: RegionId, slots: Sequence[int], token_start: int, token_end: int) -> list[KVCacheBlock]:
        """These slots, holding consecutive tokens, as `KVCacheBlock`s: one each, or one per layer if LAYER_FIRST."""
        geometry = self.geometry
        per_layer = self.layout is Layout.LAYER_FIRST
        blocks = []
        for index, slot in enumerate(slots):
            start = token_start + index * geometry.block_size
            end = min(start + geometry.block_size, token_end)
            # The size is what the tokens take; a block's place in the arena is always full length.
            per_token = geometry.slot_layer_nbytes // geometry.block_size
            spans = [(i, i + 1) for i in range(geometry.num_layers)] if per_layer else [(0, geometry.num_layers)]
            blocks += [
                KVCacheBlock(
                    layer_start=first,
                    layer_end=last,
                    token_start=start,
                    token_end=end,
                    location=RegionOffset(region=region, offset=self.shape.offset(slot, first)),
                    size_bytes=per_token * (end - start) * (last - first),
                )
                for first, last in spans
            ]
        return blocks

    def close(self) -> None:
        """Give the memory back. Idempotent. Peers that mapped it keep their own mapping."""
        if self._fd < 0:
            return
        os.close(self._fd)
        self._fd = -1
        del self._array
        self.unmap()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _whole(self) -> StoredArray:
        g = self.geometry
        typed = self.data.view(_STORAGE[g.dtype])
        cell = (g.num_planes, g.num_kv_heads, g.block_size, g.head_dim)
        array: StoredArray
        match self.layout:
            case Layout.BLOCK_FIRST:
                array = typed.reshape(self.num_slots, g.num_layers, *cell)
            case Layout.LAYER_FIRST:
                array = typed.reshape(g.num_layers, self.num_slots, *cell).swapaxes(0, 1)
        return array

    def _check_slot(self, slot: int) -> None:
        if not 0 <= slot < self.num_slots:
            raise InvalidDescriptor(what="slot", value=slot, reason=f"the arena has {self.num_slots}")


def map_arena(fd: int, nbytes: int, *, writable: bool) -> ArenaView:
    """Map an arena that a peer sent; takes over `fd`.

    Raises:
        InvalidDescriptor: it is not sealed, or not an arena of that size.
    """
    try:
        if fcntl.fcntl(fd, fcntl.F_GET_SEALS) & SEALS != SEALS:
            raise InvalidDescriptor(what="arena descriptor", value=fd, reason="not sealed against shrinking")
        total = os.fstat(fd).st_size
        access = mmap.ACCESS_WRITE if writable else mmap.ACCESS_READ
        memory = mmap.mmap(fd, total, access=access)
    except (OSError, ValueError) as error:
        raise InvalidDescriptor(what="arena descriptor", value=fd, reason=str(error)) from error
    finally:
        os.close(fd)
    shape = ArenaLayout.unpack(memory[:4096])
    if shape.total_nbytes != total or shape.data_nbytes != nbytes:
        memory.close()
        raise InvalidDescriptor(what="arena size", value=total, reason=f"its header says {shape.total_nbytes}")
    return ArenaView(memory, shape)

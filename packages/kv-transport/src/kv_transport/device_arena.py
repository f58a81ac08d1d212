"""Slots in the memory of a GPU, and moving them to and from a host arena, which is what peers reach.

A cell leaves the device with the CRC-64 that a kernel took of it there, and the host arena holds that sum: whatever
happens to the bytes between the two is found by whoever verifies the host's cell. On the way in the device takes the
sum of what has arrived in its slot and compares it with the host's.

DA1: a generation only grows, and is raised before the first byte of the next content. DA2: a cell that came in with a
wrong sum is reported, and its generation is raised, so that no reference to it holds.
"""

from collections.abc import Sequence
from typing import Any, Final, Protocol, Self

import numpy as np

from kv_core.block import BlockGeometry, BlockRef, Layout
from kv_core.dtypes import DType
from kv_core.ids import Generation, RegionId
from kv_transport import device_kernels, kernels
from kv_transport.arena import Arena, Uint64Array
from kv_transport.arena_layout import ArenaLayout, IntArray
from kv_transport.codecs import NO_SCALE, Codec, encoded_cell_nbytes
from kv_transport.cuda_kernels import CudaKernels, open_cupy
from kv_transport.device_kernels import DeviceArray, Namespace
from kv_transport.errors import ChecksumMismatch, CodecFailed, GeometryMismatch, InvalidDescriptor, StaleGeneration


class Device(Protocol):
    """Where the bytes are, and who moves them there."""

    @property
    def xp(self) -> Namespace: ...
    def gather(self, data: DeviceArray, offsets: DeviceArray, cell_nbytes: int) -> tuple[DeviceArray, DeviceArray]: ...
    def scatter(self, data: DeviceArray, offsets: DeviceArray, rows: DeviceArray) -> DeviceArray: ...
    def gather_fp8(
        self, data: DeviceArray, offsets: DeviceArray, matrices: int, tokens: int, channels: int
    ) -> tuple[DeviceArray, DeviceArray, bool]: ...
    def to_host(self, array: DeviceArray) -> "np.ndarray[Any, Any]": ...


class CudaDevice:
    """The current CUDA device, through CuPy."""

    def __init__(self) -> None:
        """Raises `MissingExtraError` or `DeviceUnavailable`."""
        self.xp = open_cupy()
        launched = CudaKernels(self.xp)
        self.gather, self.scatter, self.gather_fp8 = launched.gather, launched.scatter, launched.gather_fp8

    def to_host(self, array: DeviceArray) -> "np.ndarray[Any, Any]":
        host: np.ndarray[Any, Any] = self.xp.asnumpy(array)
        return host


class HostDevice:
    """The same in NumPy: for machines without a GPU to try their code on, and the oracle of the fused kernels."""

    xp = np

    def gather(self, data: DeviceArray, offsets: DeviceArray, cell_nbytes: int) -> tuple[DeviceArray, DeviceArray]:
        rows = device_kernels.gather_cells(np, data, offsets, cell_nbytes)
        return rows, _sums(rows)

    def scatter(self, data: DeviceArray, offsets: DeviceArray, rows: DeviceArray) -> DeviceArray:
        device_kernels.scatter_cells(np, data, offsets, rows)
        return _sums(device_kernels.gather_cells(np, data, offsets, rows.shape[1]))

    def gather_fp8(
        self, data: DeviceArray, offsets: DeviceArray, matrices: int, tokens: int, channels: int
    ) -> tuple[DeviceArray, DeviceArray, bool]:
        cells = device_kernels.gather_cells(np, data, offsets, 2 * matrices * tokens * channels)
        values = cells.view(np.uint16).reshape(-1, tokens, channels)
        codes, scales, finite = device_kernels.quantise_bf16(np, values)
        rows = np.concatenate([scales.reshape(len(cells), -1), codes.reshape(len(cells), -1)], axis=1)
        return rows, _sums(rows), finite

    def to_host(self, array: DeviceArray) -> "np.ndarray[Any, Any]":
        return np.asarray(array)


def _sums(rows: "np.ndarray[Any, Any]") -> Uint64Array:
    nbytes = rows.shape[1]
    spans = np.stack([np.arange(len(rows)) * nbytes, np.full(len(rows), nbytes)], axis=1)
    return np.array(kernels.sum_cells(np.ascontiguousarray(rows).reshape(-1).data, spans), np.uint64)


class DeviceArena:
    """An arena on a device. `data` are its bytes, `array[slot, layer]` its elements, as in `Arena`."""

    def __init__(self, device: Device, shape: ArenaLayout) -> None:
        self.shape: Final = shape
        self.device: Final = device
        self.data: DeviceArray = device.xp.zeros(shape.data_nbytes, device.xp.uint8)
        self.generations: Uint64Array = np.zeros(shape.num_slots, np.uint64)

    @classmethod
    def create(
        cls,
        geometry: BlockGeometry,
        num_slots: int,
        layout: Layout = Layout.LAYER_FIRST,
        *,
        device: Device | None = None,
    ) -> Self:
        """Allocate on a device; the current CUDA device unless told otherwise.

        Raises:
            MissingExtraError: CuPy is not installed.
            DeviceUnavailable: there is no GPU here.
        """
        return cls(device or CudaDevice(), ArenaLayout(geometry=geometry, num_slots=num_slots, layout=layout))

    def raise_generation(self, slot: int) -> Generation:
        """Begin the slot's next content: call it before the first byte is written."""
        self._check(np.array([slot]))
        self.generations[slot] += np.uint64(1)
        return Generation(int(self.generations[slot]))

    def ref(self, region: RegionId, slot: int) -> BlockRef:
        """A reference to the slot's present content."""
        self._check(np.array([slot]))
        return BlockRef(region, slot, Generation(int(self.generations[slot])))

    def require(self, refs: Sequence[BlockRef]) -> None:
        """Raise `StaleGeneration` unless each slot still holds what was referred to."""
        for ref in refs:
            found = int(self.generations[ref.slot])
            if found != ref.generation:
                raise StaleGeneration(region=ref.region, slot=ref.slot, found=found, expected=ref.generation)

    def copy_out(self, layer: int, slots: Sequence[int], host: Arena, host_slots: Sequence[int]) -> None:
        """Write one layer of these slots into those of a host arena, sealed with the device's checksums.

        Raises:
            GeometryMismatch: the two arenas store blocks in different forms.
            InvalidDescriptor: a slot or layer outside, or not as many of one as of the other.
        """
        offsets, host_offsets = self._pair(layer, slots, host, host_slots)
        rows, checks = self.device.gather(self.data, self._array(offsets), self.shape.cell_nbytes)
        device_kernels.scatter_cells(np, host.data, host_offsets, self.device.to_host(rows))
        host.checks[layer, list(host_slots)] = self.device.to_host(checks)

    def copy_in(self, layer: int, slots: Sequence[int], host: Arena, host_slots: Sequence[int]) -> None:
        """Write one layer of sealed slots of a host arena into these.

        Raises:
            ChecksumMismatch: what lies on the device now is not what the host had sealed. Those slots' generations
                were raised: no reference to them holds.
            InvalidDescriptor: a cell of the host is not sealed; or as in `copy_out`.
            GeometryMismatch: as in `copy_out`.
        """
        offsets, host_offsets = self._pair(layer, slots, host, host_slots)
        expected = host.checks[layer, list(host_slots)]
        if not expected.all():
            raise InvalidDescriptor(what="block", value=layer, reason="a cell is not sealed")
        rows = device_kernels.gather_cells(np, host.data, host_offsets, self.shape.cell_nbytes)
        found = self.device.scatter(self.data, self._array(offsets), self.device.xp.asarray(rows))
        wrong = np.flatnonzero(self.device.to_host(found) != expected)
        if len(wrong):
            for index in wrong.tolist():
                self.raise_generation(slots[index])
            raise ChecksumMismatch(peer="this host", transport="device", bad=len(wrong), total=len(slots), layer=layer)

    def encode_fp8(self, layer: int, slots: Sequence[int]) -> tuple["np.ndarray[Any, Any]", Uint64Array]:
        """One layer of these slots as `codecs.encode_cell` writes them, and the CRC-64 of each.

        Returns:
            uint8 `(slots, encoded_cell_nbytes)`, uint64 `(slots,)`; on the host.

        Raises:
            GeometryMismatch: the arena does not hold bf16.
            CodecFailed: a value is not finite, or has no scale.
        """
        geometry, index = self.shape.geometry, np.array(slots, np.int64)
        self._check(index, layer)
        nbytes = encoded_cell_nbytes(Codec.FP8_E4M3, geometry)
        matrices = geometry.num_planes * geometry.num_kv_heads
        offsets = self._array(self.shape.offsets(index, layer))
        rows, checks, finite = self.device.gather_fp8(
            self.data, offsets, matrices, geometry.block_size, geometry.head_dim
        )
        if not finite:
            raise CodecFailed(codec=Codec.FP8_E4M3.value, reason=NO_SCALE)
        assert rows.shape[1] == nbytes and geometry.dtype is DType.BF16
        return self.device.to_host(rows), self.device.to_host(checks)

    def _pair(
        self, layer: int, slots: Sequence[int], host: Arena, host_slots: Sequence[int]
    ) -> tuple[IntArray, IntArray]:
        if host.geometry != self.shape.geometry:
            raise GeometryMismatch(field="arena", ours=str(self.shape.geometry), theirs=str(host.geometry))
        here, there = np.array(slots, np.int64), np.array(host_slots, np.int64)
        self._check(here, layer)
        if len(here) != len(there) or not len(here) or int(there.min()) < 0 or int(there.max()) >= host.num_slots:
            raise InvalidDescriptor(what="slots", value=len(there), reason=f"need {len(here)} of the host arena")
        if len(set(slots)) != len(slots) or len(set(host_slots)) != len(host_slots):
            raise InvalidDescriptor(what="slots", value=len(slots), reason="one is named twice")
        return self.shape.offsets(here, layer), host.shape.offsets(there, layer)

    def _check(self, slots: IntArray, layer: int = 0) -> None:
        inside = len(slots) and int(slots.min()) >= 0 and int(slots.max()) < self.shape.num_slots
        if not inside or not 0 <= layer < self.shape.geometry.num_layers:
            raise InvalidDescriptor(
                what="slots", value=[layer, len(slots)], reason=f"the device arena has {self.shape.num_slots}"
            )

    def _array(self, offsets: IntArray) -> DeviceArray:
        return self.device.xp.asarray(offsets)

"""Where everything lies in an arena. Pure arithmetic, the same on both sides of a mapping.

An arena is one allocation: a header page that says its shape, a generation per slot, the table of live read leases,
a CRC-64 per (layer, slot), then the data. Tables are little-endian uint64 and precede the data, so that a process
that maps the arena needs nothing but its descriptor.

AL1: the four parts never overlap and the data begins on a page. AL2: offsets of data count from the first data byte.
"""

import struct
from dataclasses import dataclass
from typing import Final, Self

import numpy as np
from numpy.typing import NDArray

from kv_core.block import BlockGeometry, Layout
from kv_core.dtypes import DType
from kv_transport import limits
from kv_transport.errors import InvalidDescriptor

IntArray = NDArray[np.int64]

PAGE: Final = 4096
_MAGIC: Final = b"KVARENA\x01"
_HEADER: Final = struct.Struct("<8sB15sQIIIII")
_LAYOUTS: Final = (Layout.BLOCK_FIRST, Layout.LAYER_FIRST)


@dataclass(frozen=True, slots=True)
class ArenaLayout:
    """Shape of one arena: `num_slots` blocks of `geometry`, arranged by `layout`."""

    geometry: BlockGeometry
    num_slots: int
    layout: Layout

    def __post_init__(self) -> None:
        if not 1 <= self.num_slots <= limits.SLOTS_MAX:
            raise InvalidDescriptor(what="num_slots", value=self.num_slots, reason=f"1 to {limits.SLOTS_MAX}")
        if self.cell_nbytes > limits.UNIT_BYTES:
            raise InvalidDescriptor(
                what="bytes per slot and layer",
                value=self.cell_nbytes,
                reason=f"one transfer unit holds {limits.UNIT_BYTES}; use a smaller block_size",
            )

    @property
    def cell_nbytes(self) -> int:
        """Bytes of one (slot, layer)."""
        return self.geometry.slot_layer_nbytes

    @property
    def generations_offset(self) -> int:
        return PAGE

    @property
    def leases_offset(self) -> int:
        return self.generations_offset + 8 * self.num_slots

    @property
    def checks_offset(self) -> int:
        return self.leases_offset + 8 * limits.LEASES_MAX

    @property
    def data_offset(self) -> int:
        end = self.checks_offset + 8 * self.num_slots * self.geometry.num_layers
        return -(-end // PAGE) * PAGE

    @property
    def data_nbytes(self) -> int:
        return self.num_slots * self.geometry.block_nbytes

    @property
    def total_nbytes(self) -> int:
        return self.data_offset + self.data_nbytes

    def offset(self, slot: int, layer: int) -> int:
        """Byte offset of (slot, layer) from the first data byte; raises `InvalidBlockError` outside the arena."""
        return self.geometry.offset(self.layout, self.num_slots, slot, layer)

    def offsets(self, slots: IntArray, layer: int) -> IntArray:
        """`offset` of many slots, which must lie inside the arena."""
        cell, layers = self.cell_nbytes, self.geometry.num_layers
        match self.layout:
            case Layout.BLOCK_FIRST:
                return (slots * layers + layer) * cell
            case Layout.LAYER_FIRST:
                return (slots + layer * self.num_slots) * cell

    def locate(self, offset: int) -> tuple[int, int]:
        """The (slot, layer) whose data begins at `offset`.

        Raises:
            InvalidDescriptor: no (slot, layer) begins there.
        """
        index, rest = divmod(offset, self.cell_nbytes)
        if rest or not 0 <= index < self.num_slots * self.geometry.num_layers:
            raise InvalidDescriptor(what="offset", value=offset, reason="no block of the arena begins there")
        match self.layout:
            case Layout.BLOCK_FIRST:
                return divmod(index, self.geometry.num_layers)
            case Layout.LAYER_FIRST:
                layer, slot = divmod(index, self.num_slots)
                return slot, layer

    def pack(self) -> bytes:
        """The header page's content."""
        g = self.geometry
        return _HEADER.pack(
            _MAGIC,
            _LAYOUTS.index(self.layout),
            g.dtype.value.encode().ljust(15, b"\0"),
            self.num_slots,
            g.num_layers,
            g.num_kv_heads,
            g.head_dim,
            g.block_size,
            g.num_planes,
        )

    @classmethod
    def unpack(cls, page: bytes) -> Self:
        """Read a header page.

        Raises:
            InvalidDescriptor: it is not an arena's, or of another version.
        """
        if len(page) < _HEADER.size:
            raise InvalidDescriptor(what="arena header", value=len(page), reason="too short")
        magic, layout, dtype, num_slots, layers, heads, dim, block_size, planes = _HEADER.unpack_from(page)
        if magic != _MAGIC or layout >= len(_LAYOUTS):
            raise InvalidDescriptor(what="arena header", value=magic, reason=f"expected {_MAGIC!r}")
        try:
            kind = DType(dtype.rstrip(b"\0").decode())
        except ValueError:
            raise InvalidDescriptor(what="arena header", value=dtype, reason="unknown dtype") from None
        geometry = BlockGeometry(
            num_layers=layers, num_kv_heads=heads, head_dim=dim, dtype=kind, block_size=block_size, num_planes=planes
        )
        return cls(geometry=geometry, num_slots=num_slots, layout=_LAYOUTS[layout])

"""How KV bytes lie in memory, and how a piece of them is named.

`BlockGeometry` decides the size of a block; `Layout` decides how blocks follow each other in an arena; `BlockRef` names
a slot for as long as its generation stands; `KVCacheBlock` describes a rectangle of (layers x tokens) and where it is.

Canonical order within one (slot, layer): `[plane][head][token][dim]`, where the planes are K then V (latent attention
has one plane). B1: `block_nbytes == num_layers * slot_layer_nbytes`. B2: ranges are half open.
"""

from dataclasses import dataclass
from enum import Enum
from typing import Annotated, Final

import msgspec

from kv_core import limits
from kv_core.dtypes import DType
from kv_core.errors import KVError
from kv_core.ids import Generation, RegionId

_UINT63: Final = msgspec.Meta(ge=0, le=limits.MAX_INT64)


class InvalidBlockError(KVError):
    """A block, geometry or reference whose numbers cannot be."""

    code = 1030
    template = "{what} {value!r} is invalid: {reason}"


class Layout(Enum):
    """How the pieces of consecutive slots follow each other in an arena."""

    BLOCK_FIRST = "block_first"
    """`[slot][layer]`: all layers of one block are one contiguous run."""

    LAYER_FIRST = "layer_first"
    """`[layer][slot]`: one layer of consecutive slots is one contiguous run, which is what pipelining wants."""


@dataclass(frozen=True, slots=True)
class BlockGeometry:
    """Dimensions of one block as it is stored on one node.

    Args:
        num_layers: layers held here.
        num_kv_heads: KV heads held here (after tensor parallelism); 1 for latent attention.
        head_dim: elements per head and token; latent plus rotary part for latent attention.
        dtype: stored element type.
        block_size: tokens per block.
        num_planes: 2 (K, then V), or 1 for latent attention, which stores one compressed vector.
    """

    num_layers: int
    num_kv_heads: int
    head_dim: int
    dtype: DType
    block_size: int
    num_planes: int = 2

    def __post_init__(self) -> None:
        _require("num_layers", self.num_layers, 1, limits.MAX_LAYERS)
        _require("num_kv_heads", self.num_kv_heads, 1, limits.MAX_HEADS)
        _require("head_dim", self.head_dim, 1, limits.MAX_HEAD_DIM)
        _require("block_size", self.block_size, limits.MIN_BLOCK_SIZE, limits.MAX_BLOCK_SIZE)
        _require("num_planes", self.num_planes, 1, 2)

    @property
    def plane_nbytes(self) -> int:
        """Bytes of K (or of V) of one (slot, layer)."""
        return self.num_kv_heads * self.block_size * self.head_dim * self.dtype.itemsize

    @property
    def slot_layer_nbytes(self) -> int:
        """Bytes of one (slot, layer): the unit that carries a CRC-64."""
        return self.num_planes * self.plane_nbytes

    @property
    def block_nbytes(self) -> int:
        """Bytes of one block over all its layers."""
        return self.num_layers * self.slot_layer_nbytes

    def offset(self, layout: Layout, num_slots: int, slot: int, layer: int) -> int:
        """Byte offset of (slot, layer) in an arena of `num_slots` slots.

        Raises:
            InvalidBlockError: slot or layer lies outside the arena.
        """
        if not 0 <= slot < num_slots:
            raise InvalidBlockError(what="slot", value=slot, reason=f"the arena has {num_slots}")
        if not 0 <= layer < self.num_layers:
            raise InvalidBlockError(what="layer", value=layer, reason=f"the block has {self.num_layers}")
        match layout:
            case Layout.BLOCK_FIRST:
                return (slot * self.num_layers + layer) * self.slot_layer_nbytes
            case Layout.LAYER_FIRST:
                return (layer * num_slots + slot) * self.slot_layer_nbytes


class BlockRef(msgspec.Struct, frozen=True, array_like=True, gc=False, order=True):
    """One use of one slot. A reader whose generation is no longer the slot's holds a reference to nothing.

    May be a field of a message; the bounds are checked when it is decoded, not when it is made.
    """

    region: Annotated[RegionId, _UINT63]
    slot: Annotated[int, _UINT63]
    generation: Annotated[Generation, _UINT63]


@dataclass(frozen=True, slots=True)
class MemoryAddress:
    """A virtual address of this process (or of its device)."""

    address: int

    def __post_init__(self) -> None:
        _require("address", self.address, 1, limits.MAX_UINT64)


@dataclass(frozen=True, slots=True)
class RegionOffset:
    """A byte offset in a registered region; means the same to every process that maps it."""

    region: RegionId
    offset: int

    def __post_init__(self) -> None:
        _require("region", self.region, 0, limits.MAX_INT64)
        _require("offset", self.offset, 0, limits.MAX_INT64)


@dataclass(frozen=True, slots=True)
class KVCacheBlock:
    """KV of the layers `[layer_start, layer_end)` for the tokens `[token_start, token_end)`, and where it lies.

    `size_bytes` is what it occupies there: a last block that is not full yet occupies all of its slot.
    """

    layer_start: int
    layer_end: int
    token_start: int
    token_end: int
    location: MemoryAddress | RegionOffset
    size_bytes: int

    def __post_init__(self) -> None:
        _require_range("layers", self.layer_start, self.layer_end, limits.MAX_LAYERS)
        _require_range("tokens", self.token_start, self.token_end, limits.MAX_TOKENS_PER_REQUEST)
        _require("size_bytes", self.size_bytes, self.num_layers * self.num_tokens, limits.MAX_INT64)

    @property
    def num_layers(self) -> int:
        return self.layer_end - self.layer_start

    @property
    def num_tokens(self) -> int:
        return self.token_end - self.token_start


def _require(what: str, value: int, lowest: int, highest: int) -> None:
    if type(value) is not int or not lowest <= value <= highest:
        raise InvalidBlockError(what=what, value=value, reason=f"need an integer in [{lowest}, {highest}]")


def _require_range(what: str, start: int, end: int, highest: int) -> None:
    _require(f"start of {what}", start, 0, highest)
    _require(f"end of {what}", end, 1, highest)
    if start >= end:
        raise InvalidBlockError(what=what, value=[start, end], reason="the range is empty or reversed")

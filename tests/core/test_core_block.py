"""Blocks: their size, where the pieces lie, and what cannot be one."""

import itertools
from dataclasses import FrozenInstanceError, replace

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kv_core.block import (
    BlockGeometry,
    BlockRef,
    InvalidBlockError,
    KVCacheBlock,
    Layout,
    MemoryAddress,
    RegionOffset,
)
from kv_core.dtypes import DType
from kv_core.ids import RegionId
from kv_core.testing.strategies import block_geometries

SMOL = BlockGeometry(30, 3, 64, DType.BF16, 16)
BLOCK = KVCacheBlock(2, 5, 16, 32, RegionOffset(RegionId(7), 4096), 3 * 16 * 100)


def test_a_block_of_a_known_model_has_the_known_size() -> None:
    assert SMOL.slot_layer_nbytes == 2 * 3 * 16 * 64 * 2 == 12_288
    assert SMOL.block_nbytes == 30 * 12_288 == 16 * 23_040


def test_latent_attention_has_one_plane() -> None:
    assert BlockGeometry(61, 1, 576, DType.BF16, 16, num_planes=1).block_nbytes == 61 * 16 * 576 * 2


@given(block_geometries(), st.sampled_from(Layout), st.integers(1, 5))
def test_pieces_tile_the_arena_without_gap_or_overlap(geometry: BlockGeometry, layout: Layout, num_slots: int) -> None:
    places = itertools.product(range(num_slots), range(geometry.num_layers))
    offsets = sorted(geometry.offset(layout, num_slots, slot, layer) for slot, layer in places)
    assert offsets == list(range(0, num_slots * geometry.block_nbytes, geometry.slot_layer_nbytes))


def test_layouts_put_their_own_axis_first() -> None:
    step = SMOL.slot_layer_nbytes
    assert SMOL.offset(Layout.BLOCK_FIRST, 8, 1, 0) == SMOL.block_nbytes
    assert SMOL.offset(Layout.BLOCK_FIRST, 8, 1, 2) - SMOL.offset(Layout.BLOCK_FIRST, 8, 1, 1) == step
    assert SMOL.offset(Layout.LAYER_FIRST, 8, 1, 0) == step
    assert SMOL.offset(Layout.LAYER_FIRST, 8, 0, 1) == 8 * step


@pytest.mark.parametrize(("slot", "layer"), [(-1, 0), (8, 0), (0, -1), (0, 30)])
def test_a_place_outside_the_arena_is_refused(slot: int, layer: int) -> None:
    with pytest.raises(InvalidBlockError):
        SMOL.offset(Layout.BLOCK_FIRST, 8, slot, layer)


@pytest.mark.parametrize(
    "fields",
    [
        {"num_layers": 0},
        {"num_layers": 4097},
        {"num_kv_heads": 0},
        {"head_dim": -1},
        {"head_dim": True},
        {"block_size": 0},
        {"block_size": 4097},
        {"block_size": 16.0},
        {"num_planes": 0},
        {"num_planes": 3},
    ],
)
def test_a_geometry_that_cannot_be_is_refused(fields: dict[str, int]) -> None:
    with pytest.raises(InvalidBlockError, match=next(iter(fields))):
        replace(SMOL, **fields)  # type: ignore[arg-type]


def test_a_cache_block_knows_its_extent() -> None:
    assert (BLOCK.num_layers, BLOCK.num_tokens, BLOCK.size_bytes) == (3, 16, 4800)
    with pytest.raises(FrozenInstanceError):
        BLOCK.size_bytes = 1  # type: ignore[misc]


@pytest.mark.parametrize(
    "fields",
    [
        {"layer_start": 5},
        {"layer_end": 2},
        {"layer_end": 5000},
        {"token_start": -1},
        {"token_end": 16},
        {"token_end": 1 << 21},
        {"size_bytes": 0},
        {"size_bytes": 47},
        {"size_bytes": 1 << 63},
    ],
)
def test_a_cache_block_that_cannot_be_is_refused(fields: dict[str, int]) -> None:
    with pytest.raises(InvalidBlockError):
        replace(BLOCK, **fields)  # type: ignore[arg-type]


def test_a_last_block_that_is_not_full_occupies_its_slot() -> None:
    assert replace(BLOCK, token_end=17).num_tokens == 1


@pytest.mark.parametrize("address", [0, -1, 1 << 64])
def test_an_address_is_a_pointer(address: int) -> None:
    with pytest.raises(InvalidBlockError):
        MemoryAddress(address)


@pytest.mark.parametrize("numbers", [(-1, 0), (0, -1), (0, 1 << 63)])
def test_an_offset_lies_in_a_region(numbers: tuple[int, int]) -> None:
    with pytest.raises(InvalidBlockError):
        RegionOffset(RegionId(numbers[0]), numbers[1])


@pytest.mark.parametrize("raw", [[-1, 0, 0], [0, 1 << 63, 0], [0, 0], [0, 0, "1"]])
def test_a_reference_from_the_wire_is_checked(raw: list[object]) -> None:
    with pytest.raises(msgspec.ValidationError):
        msgspec.convert(raw, BlockRef)

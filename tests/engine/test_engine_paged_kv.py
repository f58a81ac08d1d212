"""Blocks over a buffer: byte order, scattering and gathering against a dictionary, refusals."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kv_core.block import BlockGeometry, Layout
from kv_core.dtypes import DType
from kv_services.engine.elements import encode
from kv_services.engine.errors import EngineInputError, UnsupportedStoreError
from kv_services.engine.paged_kv import BufferPagedKV, plan_reads, read_blocks, write_tokens


@pytest.mark.parametrize("layout", list(Layout))
@pytest.mark.parametrize("dtype", [DType.FP32, DType.FP16, DType.BF16])
def test_bytes_lie_in_canonical_order_where_the_geometry_says(layout: Layout, dtype: DType) -> None:
    geometry = BlockGeometry(num_layers=3, num_kv_heads=2, head_dim=4, dtype=dtype, block_size=5)
    memory = bytearray(7 * geometry.block_nbytes)
    kv = BufferPagedKV(memory, geometry, layout, 7)
    for layer in range(3):
        for slot in range(7):
            for plane in range(2):
                for head in range(2):
                    for token in range(5):
                        number = ((((layer * 7 + slot) * 2 + plane) * 2 + head) * 5 + token) % 251
                        kv.kv(layer)[slot, plane, head, token] = number
    for layer in range(3):
        for slot in range(7):
            begin = geometry.offset(layout, 7, slot, layer)
            piece = np.frombuffer(memory[begin : begin + geometry.slot_layer_nbytes], dtype=kv.kv(0).dtype)
            expected = [
                ((((layer * 7 + slot) * 2 + p) * 2 + h) * 5 + t) % 251 for p in (0, 1) for h in (0, 1) for t in range(5)
            ]
            assert piece.tolist() == [number for number in expected for _ in range(4)]


@settings(deadline=None)
@given(
    start=st.integers(0, 20),
    count=st.integers(1, 30),
    block_size=st.integers(1, 9),
    dtype=st.sampled_from([DType.FP32, DType.FP16, DType.BF16]),
    layout=st.sampled_from(Layout),
    order=st.permutations(range(51)),
)
def test_tokens_go_where_the_block_table_says_and_come_back(
    start: int, count: int, block_size: int, dtype: DType, layout: Layout, order: list[int]
) -> None:
    geometry = BlockGeometry(num_layers=2, num_kv_heads=2, head_dim=3, dtype=dtype, block_size=block_size)
    memory = bytearray(b"\x01" * (51 * geometry.block_nbytes))
    kv = BufferPagedKV(memory, geometry, layout, 51)
    untouched = BufferPagedKV(bytearray(memory), geometry, layout, 51)
    blocks = -(-(start + count) // block_size)
    slots = np.array(order[:blocks], dtype=np.intp)
    values = np.random.default_rng(count).integers(-100, 100, (count, 2, 2, 3)).astype(np.float32)
    write_tokens(kv.kv(1), slots, start, encode(values, dtype))
    # The oracle: one token, one plane, one head at a time.
    for token in range(count):
        block, offset = divmod(start + token, block_size)
        untouched.kv(1)[slots[block], :, :, offset] = encode(values[token], dtype)
    assert [kv.kv(layer).tobytes() for layer in (0, 1)] == [untouched.kv(layer).tobytes() for layer in (0, 1)]
    first = start // block_size
    out = np.full((2, 2, blocks * block_size, 3), np.nan, dtype=np.float32)
    read_blocks(kv.kv(1), plan_reads(slots), first, blocks, out)
    assert np.array_equal(out[:, :, start : start + count], values.transpose(1, 2, 0, 3))
    assert np.isnan(out[:, :, : first * block_size]).all()


def test_neighbouring_slots_and_scattered_ones_read_alike() -> None:
    for dtype in (DType.FP32, DType.BF16):
        geometry = BlockGeometry(num_layers=1, num_kv_heads=1, head_dim=2, dtype=dtype, block_size=2)
        kv = BufferPagedKV.allocate(geometry, 64)
        kv.kv(0)[...] = np.arange(64, dtype=np.float32).reshape(64, 1, 1, 1, 1).astype(kv.kv(0).dtype) + 0x3F80
        runs = np.array([9, 10, 11, 12, 3, 40, 41, 1, 0], dtype=np.intp)
        apart = np.arange(62, -1, -2, dtype=np.intp)
        for slots in (runs, apart):
            out = np.empty((2, 1, 2 * len(slots), 2), dtype=np.float32)
            read_blocks(kv.kv(0), plan_reads(slots), 0, len(slots), out)
            one = np.empty((2, 1, 2, 2), dtype=np.float32)
            for index, slot in enumerate(slots):
                read_blocks(kv.kv(0), plan_reads(np.array([slot])), 0, 1, one)
                assert np.array_equal(out[:, :, 2 * index : 2 * index + 2], one)


def test_a_buffer_that_cannot_hold_the_arena_is_refused() -> None:
    geometry = BlockGeometry(num_layers=2, num_kv_heads=1, head_dim=4, dtype=DType.FP32, block_size=2)
    need = 3 * geometry.block_nbytes
    BufferPagedKV(bytearray(need + 5), geometry, Layout.LAYER_FIRST, 3)
    for buffer, slots in ((bytearray(need - 1), 3), (bytes(need), 3), (bytearray(need), 0)):
        with pytest.raises(EngineInputError, match="arena"):
            BufferPagedKV(buffer, geometry, Layout.LAYER_FIRST, slots)


def test_blocks_that_the_engine_cannot_compute_on_are_refused() -> None:
    latent = BlockGeometry(num_layers=2, num_kv_heads=1, head_dim=4, dtype=DType.FP32, block_size=2, num_planes=1)
    lossy = BlockGeometry(num_layers=2, num_kv_heads=1, head_dim=4, dtype=DType.INT8, block_size=2)
    for geometry in (latent, lossy):
        with pytest.raises(UnsupportedStoreError):
            BufferPagedKV(bytearray(1024), geometry, Layout.LAYER_FIRST, 1)

"""Pieces of KV packed into slots: against a dict of cells, in both layouts, and refused where they do not fit."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kv_core.block import Layout
from kv_core.dtypes import DType
from kv_core.geometry import Attention, ModelGeometry
from kv_services.engine.errors import EngineInputError
from kv_services.engine.paged_kv import BufferPagedKV
from kv_services.engine.shard_kv import ShardKV, slots_needed

BLOCK, HEADS, DIM = 4, 1, 2


def arena(num_layers: int, num_slots: int, layout: Layout = Layout.LAYER_FIRST) -> BufferPagedKV:
    geometry = ModelGeometry("m", num_layers, HEADS, HEADS, DIM, Attention.MHA).block_geometry(DType.FP32, BLOCK)
    return BufferPagedKV(bytearray(b"\x7e" * (num_slots * geometry.block_nbytes)), geometry, layout, num_slots)


@given(data=st.data(), num_layers=st.integers(1, 7), layout=st.sampled_from(list(Layout)))
def test_what_was_written_is_read_and_nothing_else_was_touched(
    data: st.DataObject, num_layers: int, layout: Layout
) -> None:
    first = data.draw(st.integers(0, num_layers - 1))
    layers = range(first, data.draw(st.integers(first + 1, num_layers)))
    begin = BLOCK * data.draw(st.integers(0, 3))
    tokens = range(begin, begin + data.draw(st.integers(1, 30)))
    count = slots_needed(num_layers, len(layers), len(tokens), BLOCK)
    kv = arena(num_layers, count + 2, layout)
    slots = data.draw(st.permutations(range(count + 2)))
    piece = ShardKV(kv, layers, tokens, slots[:count])
    oracle: dict[tuple[int, int], np.ndarray[tuple[int, ...], np.dtype[np.float32]]] = {}
    rng = np.random.default_rng(0)
    for layer in data.draw(st.permutations(list(layers))):
        at = tokens.start
        while at < tokens.stop:
            end = data.draw(st.integers(at + 1, tokens.stop))
            values = rng.standard_normal((end - at, 2, HEADS, DIM), dtype=np.float32)
            piece.write(layer, at, values)
            oracle |= {(layer, at + i): row for i, row in enumerate(values)}
            at = end
    for layer in layers:
        stop = data.draw(st.integers(tokens.start + 1, tokens.stop))
        whole = -(-(stop - tokens.start) // BLOCK) * BLOCK
        out = np.full((2, HEADS, whole, DIM), np.nan, dtype=np.float32)
        piece.read(layer, stop, out)
        for token in range(tokens.start, stop):
            assert np.array_equal(out[:, :, token - tokens.start], oracle[layer, token])
    # As many bytes changed as were written: no cell lies on another, and the slots beside it are as they were (C1, C2).
    wrong = np.frombuffer(b"\x7e\x7e\x7e\x7e", np.float32)[0]
    changed = sum(int((kv.kv(layer) != wrong).sum()) for layer in range(num_layers))
    assert changed == len(layers) * len(tokens) * 2 * HEADS * DIM
    assert all((kv.kv(layer)[slot] == wrong).all() for layer in range(num_layers) for slot in slots[count:])


def test_a_piece_of_a_third_of_the_layers_holds_three_times_the_tokens() -> None:
    assert slots_needed(6, 6, 40, BLOCK) == 10
    assert slots_needed(6, 2, 120, BLOCK) == 10
    assert slots_needed(6, 5, 40, BLOCK) == 9
    assert slots_needed(30, 1, 1, 16) == 1


def test_numbers_that_do_not_fit_are_refused_and_nothing_is_written() -> None:
    kv = arena(3, 8)
    for layers, tokens, slots in (
        (range(0, 4), range(0, 4), [0, 1]),
        (range(1, 1), range(0, 4), [0]),
        (range(0, 3), range(2, 8), [0, 1]),
        (range(0, 3), range(4, 4), []),
        (range(0, 3), range(0, 8), [0]),
        (range(0, 3), range(0, 8), [0, 0]),
        (range(0, 3), range(0, 8), [0, 8]),
    ):
        with pytest.raises(EngineInputError):
            ShardKV(kv, layers, tokens, slots)
    before = bytes(kv.kv(0).tobytes())
    piece = ShardKV(kv, range(1, 3), range(4, 10), [3, 5])
    row = np.zeros((2, 2, HEADS, DIM), np.float32)
    for layer, start in ((0, 4), (1, 3), (1, 9), (3, 4)):
        with pytest.raises(EngineInputError):
            piece.write(layer, start, row)
    with pytest.raises(EngineInputError):
        piece.read(1, 11, np.zeros((2, HEADS, 8, DIM), np.float32))
    assert bytes(kv.kv(0).tobytes()) == before

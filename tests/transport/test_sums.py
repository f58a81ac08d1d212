"""Checksums over many cells at once, and copies out of memory that keeps none."""

import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kv_core.checksum import crc64
from kv_transport import kernels

needs_compiled = pytest.mark.skipif(not kernels.COMPILED, reason="installed without a compiler")
CONTENT = random.Random("sums").randbytes(70_000)


@given(pieces=st.lists(st.integers(0, 5_000), min_size=1, max_size=12))
def test_sums_of_pieces_combine_to_the_sum_of_the_whole(pieces: list[int]) -> None:
    ends = np.cumsum(pieces)
    cells = np.stack((ends - pieces, pieces), axis=1).astype(np.int64)
    checks = kernels.sum_cells(memoryview(CONTENT), cells)
    assert checks == [crc64(CONTENT[end - size : end]) for end, size in zip(ends.tolist(), pieces, strict=True)]
    assert kernels.combine(checks, pieces) == crc64(CONTENT[: sum(pieces)])


@needs_compiled
@given(
    checks=st.lists(st.integers(0, 2**64 - 1), min_size=1, max_size=6),
    size=st.integers(1, 1 << 40),
    other=st.integers(1, 1 << 20),
)
def test_combining_agrees_with_its_plain_twin(checks: list[int], size: int, other: int) -> None:
    sizes = [size if index % 2 else other for index in range(len(checks))]
    assert kernels.combine(checks, sizes) == kernels.plain_combine(checks, sizes)


@pytest.mark.parametrize("cell", [(-1, 2), (0, -1), (70_000, 1), (1, 70_000), (1 << 62, 1 << 62)])
def test_a_cell_outside_is_not_summed(cell: tuple[int, int]) -> None:
    for sum_cells in (kernels.sum_cells, kernels.plain_sum_cells):
        with pytest.raises(IndexError):
            sum_cells(memoryview(CONTENT), np.array([(0, 4), cell], np.int64))


@given(
    size=st.integers(0, 200_000),
    shift=st.integers(0, 63),
    gap=st.integers(0, 5),
)
def test_both_sums_of_a_copy_are_those_of_source_and_destination(size: int, shift: int, gap: int) -> None:
    """Across the pieces in which it is done, and whatever the alignment."""
    source, to = memoryview(CONTENT * 3)[shift:], memoryview(bytearray(250_000))
    cells = np.array([(gap, shift, size // 2), (gap + size // 2 + gap, 3, size - size // 2)], np.int64)
    arrived, read = kernels.copy_unsealed_cells(to, source, cells)
    for (target, origin, nbytes), here, there in zip(cells.tolist(), arrived, read, strict=True):
        assert to[target : target + nbytes] == source[origin : origin + nbytes]
        assert here == there == crc64(source[origin : origin + nbytes])
    with pytest.raises(IndexError):
        kernels.copy_unsealed_cells(to, source, np.array([(0, 0, 1), (250_000, 0, 1)], np.int64))

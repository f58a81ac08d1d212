"""Element types: exact round trips, rounding against arithmetic on fractions, refusal instead of infinity."""

import math
import struct
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kv_core.dtypes import DType
from kv_services.engine.elements import decode_into, encode, rows_fit, stored_dtype
from kv_services.engine.errors import UnsupportedStoreError
from kv_services.engine.interface import FloatArray, StoredArray

LARGE = float(np.float32(3.38e38))
ENGINE_TYPES = [DType.FP32, DType.FP16, DType.BF16]


def decoded(stored: StoredArray) -> FloatArray:
    out = np.empty(stored.shape, dtype=np.float32)
    decode_into(stored, out)
    return out


def test_every_bf16_pattern_survives_decoding_and_encoding() -> None:
    patterns = np.arange(1 << 16, dtype=np.uint16)
    values = decoded(patterns)
    finite = np.isfinite(values)
    assert finite.sum() == 65536 - 2 * 128
    assert np.array_equal(encode(values[finite], DType.BF16), patterns[finite])


def test_every_fp16_pattern_survives_decoding_and_encoding() -> None:
    patterns = np.arange(1 << 16, dtype=np.uint16).view(np.float16)
    finite = np.isfinite(patterns)
    assert np.array_equal(encode(decoded(patterns[finite]), DType.FP16), patterns[finite])


def nearest_even_bf16(value: float) -> int:
    """The pattern whose number is nearest, the even one of two that are equally near."""
    low = int(struct.unpack("<I", struct.pack("<f", value))[0]) >> 16
    candidates = [pattern for pattern in (low, low + 1) if (pattern & 0x7F80) != 0x7F80]
    number = {p: Fraction(struct.unpack("<f", struct.pack("<I", p << 16))[0]) for p in candidates}
    return min(candidates, key=lambda p: (abs(number[p] - Fraction(value)), p & 1))


@settings(deadline=None)
@given(st.floats(width=32, min_value=-LARGE, max_value=LARGE))
def test_bf16_rounds_to_nearest_even(value: float) -> None:
    (pattern,) = encode(np.array([value], dtype=np.float32), DType.BF16)
    expected = nearest_even_bf16(value)
    assert int(pattern) == expected or {int(pattern), expected} <= {0x0000, 0x8000}


@pytest.mark.parametrize("dtype", ENGINE_TYPES)
def test_what_fits_stays_finite_and_the_next_number_up_does_not_fit(dtype: DType) -> None:
    edge = {DType.FP32: math.inf, DType.FP16: 65520.0, DType.BF16: float(np.uint32(0x7F7F8000).view(np.float32))}[dtype]
    below = np.nextafter(np.float32(edge), np.float32(0))
    values = np.array([[below, 0], [-below, 1], [edge, 0], [-edge, 0], [math.nan, 0], [0, math.inf]], dtype=np.float32)
    assert rows_fit(values, dtype).tolist() == [True, True, False, False, False, False]
    assert np.isfinite(decoded(encode(values[:2], dtype))).all()


def test_a_strided_target_is_filled_in_place() -> None:
    source = np.arange(24, dtype=np.float32).reshape(2, 3, 4)
    for dtype in ENGINE_TYPES:
        out = np.zeros((3, 2, 4), dtype=np.float32)
        decode_into(encode(source, dtype), out.transpose(1, 0, 2))
        assert np.array_equal(out, source.transpose(1, 0, 2))


@pytest.mark.parametrize("dtype", [DType.FP8_E4M3, DType.FP8_E5M2, DType.INT8])
def test_types_that_need_scales_are_refused_with_the_ones_that_work(dtype: DType) -> None:
    with pytest.raises(UnsupportedStoreError, match=f"{dtype.value}.*fp32, fp16, bf16"):
        stored_dtype(dtype)

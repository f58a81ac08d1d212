"""Between arenas of bf16 and of FP8 E4M3: every value is cast, under the scale that the FP8 side declares.

An FP8 arena keeps one byte an element and no scales of its own; what a code stands for is its E4M3 value times
2 ** (scale - 127), the same for the whole arena (`Arena.fp8_scale`). From FP8 to bf16 nothing is lost but bits below
bf16's smallest number; the other way each value becomes the nearest code, and one that lies beyond the largest code
is refused, not cut off.
"""

from functools import lru_cache
from typing import Final

import numpy as np
from numpy.typing import NDArray

from kv_core.block import BlockGeometry
from kv_core.dtypes import DType
from kv_transport import kernels
from kv_transport.codecs import Codec
from kv_transport.errors import CodecFailed

UNIT_SCALE: Final = 127
"""A code stands for its own value."""

_NAN: Final = 0x7F
_PAIRS: Final = {(DType.BF16, DType.FP8_E4M3), (DType.FP8_E4M3, DType.BF16)}


def defined(source: DType, target: DType) -> bool:
    """Whether values of one type are cast to the other."""
    return (source, target) in _PAIRS


def cast_cell(source: BlockGeometry, data: memoryview, target: DType, scale: int, out: memoryview) -> None:
    """Write a cell of `source` as one of the same shape and `target` type.

    Raises:
        CodecFailed: a value is not finite, or beyond the largest code under this scale.
    """
    if target is DType.BF16:
        np.take(_from_fp8(scale), np.frombuffer(data, np.uint8), out=np.frombuffer(out, np.uint16))
        return
    codes = np.frombuffer(out, np.uint8)
    np.take(_to_fp8(scale), np.frombuffer(data, np.uint16), out=codes)
    if bool(((codes & _NAN) == _NAN).any()):
        largest = 448 * 2.0 ** (scale - 127)
        raise CodecFailed(codec=Codec.FP8_CAST.value, reason=f"a value is not finite, or beyond {largest:g}")


@lru_cache(maxsize=8)
def _from_fp8(scale: int) -> NDArray[np.uint16]:
    """bf16 bits of each code."""
    size = np.arange(256) & _NAN
    with np.errstate(over="ignore"):  # a declared scale may be one under which the largest codes are infinite
        values = np.ldexp(np.append(kernels.E4M3_VALUES, 0.0)[size], scale - 127).astype(np.float32)
    bits = np.where(size == _NAN, 0x7FC0, kernels.round_to_bf16(values))
    return (bits | np.where(np.arange(256) & 0x80, 0x8000, 0)).astype(np.uint16)


@lru_cache(maxsize=8)
def _to_fp8(scale: int) -> NDArray[np.uint8]:
    """The code of each bf16, NaN's for what has none: nearest, of two the even one."""
    bits = np.arange(1 << 16, dtype=np.uint32) << 16
    with np.errstate(invalid="ignore"):
        values = np.ldexp(bits.view(np.float32).astype(np.float64), 127 - scale)
    size = np.abs(np.nan_to_num(values, nan=np.inf))
    codes = kernels.nearest_codes(size)
    # Beyond halfway to where the next code would be.
    codes = np.where(size > 464, _NAN, codes)
    return (codes | np.where(bits >> 31, 0x80, 0)).astype(np.uint8)

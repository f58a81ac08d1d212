"""Element types that KV is stored in and computed from: fp32, fp16, bf16.

NumPy has no bf16, so it is held as uint16 and converted by integer operations: the upper half of the fp32 pattern,
rounded to nearest, ties to even. E1: decoding what was encoded gives x again for every x that the type holds. E2: a
number too large for the type is refused, never stored as infinity, since one infinite key makes every later token
wrong.
"""

from typing import TypeAlias

import numpy as np

from kv_core.dtypes import DType
from kv_services.engine.errors import UnsupportedStoreError
from kv_services.engine.interface import FloatArray, StoredArray

StoredDType: TypeAlias = np.dtype[np.float32] | np.dtype[np.float16] | np.dtype[np.uint16]

_STORED: dict[DType, StoredDType] = {
    DType.FP32: np.dtype("<f4"),
    DType.FP16: np.dtype("<f2"),
    DType.BF16: np.dtype("<u2"),
}

# The smallest magnitude that would round to infinity: halfway from the largest finite number to the next step.
_OVERFLOW: dict[DType, float] = {
    DType.FP32: float("inf"),
    DType.FP16: 65520.0,
    DType.BF16: 2.0**127 * (2 - 2.0**-8),
}


def stored_dtype(dtype: DType) -> StoredDType:
    """The NumPy element type that holds this KV type.

    Raises:
        UnsupportedStoreError: a type that the engine cannot compute on (FP8 and INT8 need their scales).
    """
    try:
        return _STORED[dtype]
    except KeyError:
        raise UnsupportedStoreError(dtype=dtype.value, known=", ".join(d.value for d in _STORED)) from None


def rows_fit(values: FloatArray, dtype: DType) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
    """For each row along the first axis, whether every value is a number that the type holds as a finite one (E2)."""
    flat = values.reshape(len(values), -1)
    high, low = flat.max(axis=1), flat.min(axis=1)
    limit = _OVERFLOW[dtype]
    # Comparisons with NaN are false, so NaN does not fit either.
    fit: np.ndarray[tuple[int], np.dtype[np.bool_]] = (high < limit) & (low > -limit)
    return fit


def encode(values: FloatArray, dtype: DType) -> StoredArray:
    """fp32 to the stored type, rounded to nearest even. `values` must fit (`rows_fit`)."""
    if dtype is DType.BF16:
        bits = np.ascontiguousarray(values).view(np.uint32)
        rounding = ((bits >> np.uint32(16)) & np.uint32(1)) + np.uint32(0x7FFF)
        return ((bits + rounding) >> np.uint32(16)).astype(np.uint16)
    return values.astype(np.float16) if dtype is DType.FP16 else values


def decode_into(stored: StoredArray, out: FloatArray) -> None:
    """The stored type to fp32, exactly. `out` has the same shape and may be strided."""
    if stored.dtype == np.uint16:
        np.left_shift(stored, 16, out=out.view(np.uint32), dtype=np.uint32)
    else:
        np.copyto(out, stored)

"""Rows of floats as they travel, and back; what does not fit the model's shapes is the peer's fault."""

import math

import numpy as np

from kv_core.errors import RemoteProtocolError
from kv_services.engine.interface import FloatArray
from kv_services.engine.shard_math import Partials


def pack(rows: FloatArray) -> bytes:
    """Any array as fp32, little-endian, in C order."""
    return rows.astype("<f4", copy=False).tobytes()


def unpack(data: bytes, *shape: int) -> FloatArray:
    """`(rows, *shape)`, read-only; at least one row.

    Raises:
        RemoteProtocolError: no whole number of such rows.
    """
    nbytes = 4 * math.prod(shape)
    if not data or len(data) % nbytes:
        raise RemoteProtocolError(detail=f"{len(data)} bytes are no rows of {nbytes}")
    rows: FloatArray = np.frombuffer(data, dtype="<f4").reshape(-1, *shape)
    return rows


def unpack_partials(maxima: bytes, sums: bytes, outputs: bytes, rows: int, num_heads: int, head_dim: int) -> Partials:
    """Partials of that many rows.

    Raises:
        RemoteProtocolError: of another shape, or not what `attend_part` gives of numbers.
    """
    parts = Partials(unpack(maxima, num_heads), unpack(sums, num_heads), unpack(outputs, num_heads, head_dim))
    if not len(parts.maxima) == len(parts.sums) == len(parts.outputs) == rows:
        raise RemoteProtocolError(detail=f"partials of {len(parts.maxima)} rows, {rows} were asked for")
    if np.isnan(parts.maxima).any() or np.isnan(parts.outputs).any() or not (parts.sums >= 0).all():
        raise RemoteProtocolError(detail="partials that are no numbers")
    return parts

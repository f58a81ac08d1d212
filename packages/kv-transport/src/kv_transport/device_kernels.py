"""What happens to KV cells in an array: gather, scatter, FP8. Written for any array namespace, NumPy's or CuPy's.

`xp` is the module that made the arrays. Results are bit for bit those of `kernels` on the host, which is what the tests
hold them against; on a GPU the fused source of `cuda_kernels` does the same in one pass, checksums included.
"""

from typing import Any, Final, TypeAlias

Namespace: TypeAlias = Any
"""`numpy` or `cupy`: neither has a type for "the module of this array"."""
DeviceArray: TypeAlias = Any
"""An array of that namespace."""

_BF16_TOP: Final = 0x7F78
"""From here on, rounding to 3 mantissa bits would give 2**128, which bf16 does not have."""


def gather_cells(xp: Namespace, data: DeviceArray, offsets: DeviceArray, cell_nbytes: int) -> DeviceArray:
    """Cells as the rows of a new array.

    Args:
        data: all bytes of an arena, flat.
        offsets: byte offset of each cell, a multiple of `cell_nbytes`.

    Returns:
        uint8, `(cells, cell_nbytes)`.
    """
    return xp.take(data.reshape(-1, cell_nbytes), offsets // cell_nbytes, axis=0)


def scatter_cells(xp: Namespace, data: DeviceArray, offsets: DeviceArray, cells: DeviceArray) -> None:
    """Write rows back to where `gather_cells` would take them from; no offset may be named twice."""
    data.reshape(-1, cells.shape[1])[offsets // cells.shape[1]] = cells


def quantise_bf16(xp: Namespace, values: DeviceArray) -> tuple[DeviceArray, DeviceArray, bool]:
    """bf16 to E4M3 under one power of two per channel, rounding to nearest even: `kernels.quantise_bf16`.

    Args:
        values: bf16 bits as uint16, `(matrices, tokens, channels)`.

    Returns:
        Codes of the same shape, scales `(matrices, channels)`, and whether every value was representable; if not, the
        codes are worth nothing.
    """
    top = (values & 0x7FFF).max(axis=1).astype(xp.int32)
    scales = xp.maximum((top >> 7) - 8 + ((top & 0x7F) > 0x68), 1)
    finite = not bool((top >= _BF16_TOP).any())
    magnitude = values & 0x7FFF
    size = _float_of(xp, xp.where(magnitude < _BF16_TOP, magnitude, 0)).astype(xp.float64)
    # 2**(127 - scale) lies within what float64 holds as a normal number, so the product is exact.
    size = xp.ldexp(size, 127 - scales[:, None, :])
    exponent = xp.maximum(xp.frexp(size)[1] - 1, -6)
    steps = xp.rint(xp.ldexp(size, 3 - exponent)).astype(xp.int32)
    # Eight steps are one power of two; a sixteenth carries into the exponent, and below -6 there are none to carry.
    codes = ((exponent + 7) << 3) + steps - 8
    signed = codes.astype(xp.uint8) | ((values >> 8) & 0x80).astype(xp.uint8)
    return signed, scales.astype(xp.uint8), finite


def dequantise_bf16(xp: Namespace, codes: DeviceArray, scales: DeviceArray) -> DeviceArray:
    """E4M3 to bf16 bits: `kernels.dequantise_bf16`. Shapes as in `quantise_bf16`."""
    size = (codes & 0x7F).astype(xp.int32)
    exponent, mantissa = size >> 3, size & 7
    steps = xp.where(exponent == 0, mantissa, mantissa + 8).astype(xp.float64)
    power = xp.maximum(exponent, 1) - 10 + scales.astype(xp.int32)[:, None, :] - 127
    bits = xp.ldexp(steps, power).astype(xp.float32).view(xp.uint32)
    rounded = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(xp.uint16)
    return xp.where(size == 0x7F, xp.uint16(0x7FC0), rounded) | ((codes & 0x80).astype(xp.uint16) << 8)


def _float_of(xp: Namespace, bits: DeviceArray) -> DeviceArray:
    return (bits.astype(xp.uint32) << 16).view(xp.float32)

"""What happens to KV cells in an array: gather, scatter, FP8. Written for any array namespace, NumPy's or CuPy's.

`xp` is the module that made the arrays. Results are bit for bit those of `kernels` on the host, which is what the tests
hold them against; on a GPU the fused source of `cuda_kernels` does the same in one pass, checksums included.
"""

from typing import Any, TypeAlias

from kv_transport import kernels

Namespace: TypeAlias = Any
"""`numpy` or `cupy`: neither has a type for "the module of this array"."""
DeviceArray: TypeAlias = Any
"""An array of that namespace."""


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
    """bf16 to E4M3 under the scale of least error per channel, rounding to nearest even: `kernels.quantise_bf16`.

    Args:
        values: bf16 bits as uint16, `(matrices, tokens, channels)`.

    Returns:
        Codes of the same shape, scales `(matrices, channels)`, and whether every value was representable; if not, the
        codes are worth nothing.
    """
    magnitude = values & 0x7FFF
    top = magnitude.max(axis=1).astype(xp.int32)
    finite = not bool((top > kernels.TOP_MAX).any())
    known = _float_of(xp, xp.where(magnitude > kernels.TOP_MAX, 0, values))
    least = _least_scales(xp, top)
    inverses = xp.asarray(kernels.INVERSES)
    fewest, scales = xp.full(top.shape, xp.inf, xp.float32), least
    for candidate in range(kernels.SCALE_CANDIDATES):
        tried = xp.minimum(least + candidate, 255)
        scaled = known * inverses[tried][:, None, :]
        split = scaled * kernels.SPLITTER
        lost = scaled - (split - (split - scaled))
        errors = xp.zeros(top.shape, xp.float32)
        for token in range(values.shape[1]):
            errors = errors + lost[:, token] * lost[:, token]
        errors = errors * kernels.SCALES[176 + 2 * candidate]
        better = errors < fewest
        fewest, scales = xp.where(better, errors, fewest), xp.where(better, tried, scales)
    codes = _nearest_codes(xp, xp.abs(known * inverses[scales][:, None, :])).astype(xp.uint8)
    return codes | ((values >> 8) & 0x80).astype(xp.uint8), scales.astype(xp.uint8), finite


def dequantise_bf16(xp: Namespace, codes: DeviceArray, scales: DeviceArray) -> DeviceArray:
    """E4M3 to bf16 bits: `kernels.dequantise_bf16`. Shapes as in `quantise_bf16`."""
    size = (codes & 0x7F).astype(xp.int32)
    values = _values_of(xp, size) * xp.asarray(kernels.SCALES)[scales.astype(xp.int32)][:, None, :]
    rounded = _round_to_bf16(xp, values)
    return xp.where(size == 0x7F, xp.uint16(0x7FC0), rounded) | ((codes & 0x80).astype(xp.uint16) << 8)


def _least_scales(xp: Namespace, top: DeviceArray) -> DeviceArray:
    """`kernels.least_scales`."""
    mantissa = top & 0x7F
    quarters = sum((mantissa > most).astype(xp.int32) for most in (9, 36, 67, 104))
    return xp.clip(4 * (top >> 7) - 367 + quarters, 0, 255)


def _nearest_codes(xp: Namespace, size: DeviceArray) -> DeviceArray:
    """Codes of float32 magnitudes, by arithmetic."""
    size = size.astype(xp.float64)
    exponent = xp.where(size < 2.0**-6, -6, xp.frexp(size)[1] - 1)  # of a zero frexp says 0
    steps = xp.rint(xp.ldexp(size, 3 - exponent)).astype(xp.int32)
    # Eight steps are one power of two; a sixteenth carries into the exponent, and below -6 there are none to carry.
    return ((exponent + 7) << 3) + steps - 8


def _values_of(xp: Namespace, size: DeviceArray) -> DeviceArray:
    """What codes without their sign stand for, as float32."""
    exponent, mantissa = size >> 3, size & 7
    steps = xp.where(exponent == 0, mantissa, mantissa + 8).astype(xp.float32)
    return xp.ldexp(steps, xp.maximum(exponent, 1) - 10)


def _round_to_bf16(xp: Namespace, values: DeviceArray) -> DeviceArray:
    bits = values.view(xp.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(xp.uint16)


def _float_of(xp: Namespace, bits: DeviceArray) -> DeviceArray:
    return (bits.astype(xp.uint32) << 16).view(xp.float32)

"""The hot loops: copying with the checksum of what has arrived, and FP8. Each is compiled, with a plain twin.

The twins (`plain_...`) are the definition: tests hold the compiled ones against them, and they stand in where the
package was installed without a compiler. `COMPILED` says which ones are at work. Compiled kernels release the GIL.

FP8 is E4M3 (finite, largest 448) with one scale per channel: a channel is one (plane, head, dim) of a block, its
values are the block's tokens. A scale is an exponent in one byte, in quarters: byte `b` is `2 ** ((b - 176) / 4)`.
With whole powers of two (E8M0 of the OCP MX formats) every scale would round the same mantissas alike; quarters give
four ways of rounding a channel, and the one of least squared error is taken: a third less error for the same bytes.
"""

import struct
import threading
from collections.abc import Callable, Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

from kv_core.checksum import crc64, crc64_combine

try:
    from kv_transport import _kernels as _kernels
except ImportError:  # built without a compiler
    _kernels = None  # type: ignore[assignment]

COMPILED: Final = _kernels is not None

CellTable = NDArray[np.int64]
"""`(n, 3)` in C order: offset at the destination, offset at the source, bytes."""

SCALE_CANDIDATES: Final = 4
"""Scales tried for a channel: an octave of them, from the least under which nothing is cut off."""

TOP_MAX: Final = 0x4DC3
"""bf16 bits of the largest magnitude that has a scale (4.1e8)."""

SPLITTER: Final = np.float32((1 << 20) + 1)
"""Splits the upper 4 of float32's 24 bits off (Veltkamp)."""

_PIECE: Final = 256 * 1024
_E4M3_NAN: Final = 0x7F


def copy_cells(to: memoryview, source: memoryview, cells: CellTable) -> list[int]:
    """Copy cells and take the CRC-64 of each from the destination, a few KiB behind the copy, while it is in the cache.

    Raises:
        IndexError: a cell lies outside; nothing was copied.
        ValueError: not an `(n, 3)` table.
    """
    if _kernels is None:
        return plain_copy_cells(to, source, cells)
    checks = bytearray(8 * len(cells))
    _kernels.copy_cells(to, source, cells, checks)
    return memoryview(checks).cast("Q").tolist()


def copy_unsealed_cells(to: memoryview, source: memoryview, cells: CellTable) -> tuple[list[int], list[int]]:
    """The same, and the CRC-64 of each source besides: `(arrived, read)`. Memory is read once for both.

    They differ where the copy went wrong, or where somebody changed the source meanwhile.

    Raises:
        IndexError, ValueError: as `copy_cells`.
    """
    if _kernels is None:
        arrived = plain_copy_cells(to, source, cells)
        return arrived, plain_sum_cells(source, cells[:, 1:])
    checks, read = bytearray(8 * len(cells)), bytearray(8 * len(cells))
    _kernels.copy_cells(to, source, cells, checks, read)
    if len(cells) == 1:
        return [int.from_bytes(checks, "little")], [int.from_bytes(read, "little")]
    return memoryview(checks).cast("Q").tolist(), memoryview(read).cast("Q").tolist()


def plain_copy_cells(to: memoryview, source: memoryview, cells: CellTable) -> list[int]:
    """The same without compiled code."""
    return [_copy_cell(to, source, cell) for cell in _checked_cells(to, source, cells)]


def _checked_cells(to: memoryview, source: memoryview, cells: CellTable) -> list[tuple[int, int, int]]:
    if cells.ndim != 2 or cells.shape[1] != 3:
        raise ValueError(f"a table of {cells.shape}")
    table: list[tuple[int, int, int]] = cells.tolist()
    for index, (target, origin, nbytes) in enumerate(table):
        if min(target, origin, nbytes) < 0 or target + nbytes > len(to) or origin + nbytes > len(source):
            raise IndexError(f"cell {index} lies outside its memory")
    return table


def _copy_cell(to: memoryview, source: memoryview, cell: tuple[int, int, int]) -> int:
    target, origin, nbytes = cell
    into, of = np.frombuffer(to, np.uint8), np.frombuffer(source, np.uint8)
    check = 0
    for begin in range(0, nbytes, _PIECE):
        size = min(_PIECE, nbytes - begin)
        np.copyto(into[target + begin : target + begin + size], of[origin + begin : origin + begin + size])
        check = crc64(to[target + begin : target + begin + size], check)
    return check


SHARED_NBYTES: Final = 32
"""State of a copy that threads share, zeros at first, four words: the next cell, whether to stop, how many threads are
inside, whether its outcome was given."""

STOP_AT: Final = 8
"""Where to say that it is to stop; anything but zero."""

_SHARED: Final = struct.Struct("4Q")
_sharing: Final = threading.Lock()


def plain_copy_shared(
    state: bytearray,
    to: memoryview,
    source: memoryview,
    cells: CellTable,
    checks: bytearray,
    read: bytearray | None,
) -> bool | None:
    """Help with a copy that several threads share: take one cell after the other until none is left, or it is stopped.

    Args:
        state: `SHARED_NBYTES`, the same for all of them.
        checks, read: eight bytes a cell, zeros at first; take the CRC-64 of each where it arrived, and of its source.

    Returns:
        To the last thread that leaves, which holds nothing by then: whether every cell was copied; to others None.

    Raises:
        IndexError, ValueError: as `copy_cells`, to one of them; nothing was copied.
    """
    if len(state) != SHARED_NBYTES:
        raise ValueError(f"state has {len(state)} bytes, not {SHARED_NBYTES}")
    with _sharing:
        following, stop, inside, over = _SHARED.unpack_from(state)
        if over:
            return None
        try:
            table = _checked_cells(to, source, cells)
        except (IndexError, ValueError):
            _SHARED.pack_into(state, 0, following, stop, inside, 1)
            raise
        _SHARED.pack_into(state, 0, following, stop, inside + 1, 0)
    while True:
        with _sharing:
            following, stop, inside, over = _SHARED.unpack_from(state)
            if stop or following >= len(table):
                break
            _SHARED.pack_into(state, 0, following + 1, stop, inside, over)
        cell, at = table[following], slice(8 * following, 8 * following + 8)
        checks[at] = _copy_cell(to, source, cell).to_bytes(8, "little")
        if read is not None:
            read[at] = crc64(source[cell[1] : cell[1] + cell[2]]).to_bytes(8, "little")
    with _sharing:
        following, stop, inside, over = _SHARED.unpack_from(state)
        last = inside == 1 and not over
        _SHARED.pack_into(state, 0, following, stop, inside - 1, over or last)
    return following >= len(table) if last else None


copy_shared: Callable[[bytearray, memoryview, memoryview, CellTable, bytearray, bytearray | None], bool | None]
copy_shared = _kernels.copy_shared if COMPILED else plain_copy_shared
"""The same, compiled where it can be."""


def sum_cells(source: memoryview, cells: NDArray[np.int64]) -> list[int]:
    """The CRC-64 of each cell; `cells` is `(n, 2)`: offset, bytes.

    Raises:
        IndexError: a cell lies outside.
    """
    if _kernels is None:
        return plain_sum_cells(source, cells)
    checks = np.empty(len(cells), np.uint64)
    _kernels.sum_cells(source, np.ascontiguousarray(cells, np.int64), checks)
    found: list[int] = checks.tolist()
    return found


def plain_sum_cells(source: memoryview, cells: NDArray[np.int64]) -> list[int]:
    """The same without compiled code."""
    table = cells.tolist()
    for index, (offset, nbytes) in enumerate(table):
        if min(offset, nbytes) < 0 or offset + nbytes > len(source):
            raise IndexError(f"cell {index} lies outside its memory")
    return [crc64(source[offset : offset + nbytes]) for offset, nbytes in table]


def combine(checks: Sequence[int], sizes: Sequence[int]) -> int:
    """The CRC-64 of pieces one after the other, from theirs; one size for each."""
    if len(checks) < 2:
        return checks[0] if checks else 0
    if _kernels is None:
        return plain_combine(checks, sizes)
    return _kernels.combine(np.array(checks, np.uint64), np.array(sizes, np.int64))


def plain_combine(checks: Sequence[int], sizes: Sequence[int]) -> int:
    """The same without compiled code."""
    total = 0
    for check, size in zip(checks, sizes, strict=True):
        total = crc64_combine(total, check, size)
    return total


def quantise_bf16(source: NDArray[np.uint16], codes: NDArray[np.uint8], scales: NDArray[np.uint8]) -> bool:
    """bf16 to E4M3: per channel the scale of least squared error, values rounded to nearest even.

    False if a value is not finite, or beyond `TOP_MAX`: the codes are then worth nothing.

    Args:
        source: `(matrices, tokens, channels)` bf16 bits, C order; at most 1024 channels.
        codes: same shape; written.
        scales: `(matrices, channels)`; written.
    """
    _check_shapes(source.shape, codes.shape, scales.shape)
    if _kernels is None:
        return plain_quantise_bf16(source, codes, scales)
    return _kernels.quantise_bf16(codes, scales, source, *source.shape)


def dequantise_bf16(codes: NDArray[np.uint8], scales: NDArray[np.uint8], out: NDArray[np.uint16]) -> None:
    """E4M3 to the nearest bf16. Shapes as in `quantise_bf16`; every scale and code has a meaning."""
    _check_shapes(out.shape, codes.shape, scales.shape)
    if _kernels is None:
        plain_dequantise_bf16(codes, scales, out)
    else:
        _kernels.dequantise_bf16(out, scales, codes, *out.shape)


def _check_shapes(values: tuple[int, ...], codes: tuple[int, ...], scales: tuple[int, ...]) -> None:
    if len(values) != 3 or codes != values or scales != (values[0], values[2]) or not 1 <= values[2] <= 1024:
        raise ValueError(f"shapes {values}, {codes} and {scales} do not fit")


def _e4m3_values() -> NDArray[np.float64]:
    """Every positive finite code's value, in order."""
    codes = np.arange(_E4M3_NAN)
    exponent, mantissa = codes >> 3, codes & 7
    return np.where(exponent == 0, mantissa / 8 * 2.0**-6, (1 + mantissa / 8) * 2.0 ** (exponent - 7.0))


E4M3_VALUES: Final = _e4m3_values()
"""What each code up to the largest stands for."""

_MIDDLES: Final = (E4M3_VALUES[:-1] + E4M3_VALUES[1:]) / 2


def _quarter_powers(exponents: NDArray[np.int64]) -> NDArray[np.float32]:
    """`2 ** (exponent / 4)` as the nearest float32: the root is rounded once, powers of two are exact."""
    roots = np.exp2(np.arange(4) / 4).astype(np.float32)
    return np.ldexp(roots[exponents % 4], (exponents // 4).astype(np.int32))


SCALES: Final = _quarter_powers(np.arange(256) - 176)
"""What each scale byte stands for."""

INVERSES: Final = _quarter_powers(176 - np.arange(256))
"""What values are multiplied by before they are rounded."""


def nearest_codes(size: NDArray[np.float64]) -> NDArray[np.int64]:
    """The nearest of the 127 magnitudes; of two equally near ones the even code."""
    below, above = np.searchsorted(_MIDDLES, size, side="left"), np.searchsorted(_MIDDLES, size, side="right")
    return np.where(below & 1, above, below)  # they differ on a tie only


def least_scales(top: NDArray[np.uint16]) -> NDArray[np.int64]:
    """The least scale byte that brings a magnitude (bf16 bits) to at most 464, which rounds to 448."""
    mantissa = top & 0x7F
    # 464 is 2**8 times 1.8125; the thresholds are 128 times 1.8125 * 2**(quarters / 4) less one, within an octave.
    quarters = sum((mantissa > most).astype(np.int64) for most in (9, 36, 67, 104))
    clipped: NDArray[np.int64] = np.clip(4 * (top >> 7).astype(np.int64) - 367 + quarters, 0, 255)
    return clipped


def round_to_bf16(values: NDArray[np.float32]) -> NDArray[np.uint16]:
    """Bits of the nearest bf16, of two the even one; for what is finite."""
    bits = values.view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def plain_quantise_bf16(source: NDArray[np.uint16], codes: NDArray[np.uint8], scales: NDArray[np.uint8]) -> bool:
    """The definition. What scales are compared by is float32, summed token after token: every form of it agrees.

    It is the error of rounding to the 4 bits that E4M3 keeps of a number, by Veltkamp's splitting. What lies below
    2**-6 loses more than that, and too little to matter beside the largest value of its channel.
    """
    top = (source & 0x7FFF).max(axis=1)
    if int(top.max(initial=0)) > TOP_MAX:
        return False
    values = (source.astype(np.uint32) << 16).view(np.float32)
    scales[...] = least = least_scales(top)
    fewest = np.full(top.shape, np.inf, np.float32)
    for candidate in range(SCALE_CANDIDATES):
        tried = np.minimum(least + candidate, 255)
        scaled = values * INVERSES[tried][:, None, :]
        split = scaled * SPLITTER
        lost = scaled - (split - (split - scaled))
        errors = np.zeros(top.shape, np.float32)
        for token in range(source.shape[1]):
            errors += lost[:, token] * lost[:, token]
        errors *= SCALES[176 + 2 * candidate]  # the candidate's scale, squared, in squares of the least
        better = errors < fewest
        fewest = np.where(better, errors, fewest)
        scales[...] = np.where(better, tried, scales)
    found = nearest_codes(np.abs(values * INVERSES[scales][:, None, :]).astype(np.float64))
    codes[...] = found | ((source >> 8) & 0x80)
    return True


def plain_dequantise_bf16(codes: NDArray[np.uint8], scales: NDArray[np.uint8], out: NDArray[np.uint16]) -> None:
    """The definition of `dequantise_bf16`: a float32 product, rounded to bf16."""
    size = codes & 0x7F
    table = np.append(E4M3_VALUES, 0.0).astype(np.float32)
    rounded = round_to_bf16(table[size] * SCALES[scales][:, None, :])
    out[:] = np.where(size == _E4M3_NAN, 0x7FC0, rounded) | ((codes & 0x80).astype(np.uint16) << 8)

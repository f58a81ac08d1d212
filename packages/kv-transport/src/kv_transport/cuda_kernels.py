"""The fused CUDA source, its tables, and launching it through CuPy.

CRC-64/NVME is reflected, with all ones going in and coming out: the sum of two pieces one after the other is the first
one's, shifted by the second one's length, xor the second one's. A shift by a length is a matrix over GF(2).
"""

from functools import lru_cache
from importlib.resources import files
from typing import Any, Final

import numpy as np

from kv_core.errors import MissingExtraError
from kv_transport.arena import Uint64Array
from kv_transport.device_kernels import DeviceArray
from kv_transport.errors import DeviceUnavailable

_POLYNOMIAL: Final = 0x9A6C9329AC4BC9B5
_PIECES_MAX: Final = 256
_THREADS: Final = 256


def source() -> str:
    """CUDA C++ of `kv_gather`, `kv_scatter` and `kv_gather_fp8`."""
    return (files("kv_transport") / "cuda" / "fused.cu").read_text(encoding="utf-8")


@lru_cache(maxsize=1)
def crc_tables() -> Uint64Array:
    """Eight tables of 256 for slicing by eight: entry `[k, b]` is byte `b` followed by `k` zero bytes."""
    tables = np.zeros((8, 256), np.uint64)
    for byte in range(256):
        value = byte
        for _ in range(8):
            value = value >> 1 ^ (_POLYNOMIAL if value & 1 else 0)
        tables[0, byte] = value
    for row in range(1, 8):
        previous = tables[row - 1]
        tables[row] = tables[0][previous & 0xFF] ^ (previous >> np.uint64(8))
    return tables


def pieces_of(nbytes: int) -> int:
    """Into how many equal parts the threads of a block divide so many bytes."""
    return min(nbytes & -nbytes, _PIECES_MAX)


@lru_cache(maxsize=64)
def crc_shifts(nbytes: int) -> Uint64Array:
    """The operators that join `pieces_of(nbytes)` equal parts pairwise, one row of 64 columns for each round."""
    pieces = pieces_of(nbytes)
    rounds = max(1, pieces.bit_length() - 1)
    first = _power(_one_byte(), nbytes // pieces)
    operators = [first]
    for _ in range(rounds - 1):
        operators.append(_multiply(operators[-1], operators[-1]))
    return np.array(operators, np.uint64)


def _one_byte() -> list[int]:
    table = crc_tables()[0]
    return [int(table[(1 << bit) & 0xFF]) ^ (1 << bit >> 8) for bit in range(64)]


def _apply(matrix: list[int], vector: int) -> int:
    result = 0
    while vector:
        low = vector & -vector
        result ^= matrix[low.bit_length() - 1]
        vector ^= low
    return result


def _multiply(left: list[int], right: list[int]) -> list[int]:
    return [_apply(left, column) for column in right]


def _power(matrix: list[int], exponent: int) -> list[int]:
    result = [1 << bit for bit in range(64)]
    while exponent:
        if exponent & 1:
            result = _multiply(matrix, result)
        matrix = _multiply(matrix, matrix)
        exponent >>= 1
    return result


class CudaKernels:
    """Launches the fused kernels on the current device of CuPy."""

    def __init__(self, cupy: Any) -> None:
        """Raises `DeviceUnavailable` when the source does not compile for this device."""
        self._cupy = cupy
        try:
            module = cupy.RawModule(code=source())
            self._gather, self._scatter, self._gather_fp8 = (
                module.get_function(name) for name in ("kv_gather", "kv_scatter", "kv_gather_fp8")
            )
        except Exception as error:  # CuPy has a type for each compiler
            raise DeviceUnavailable(reason=f"the kernels do not compile: {error}") from error
        self._tables = cupy.asarray(crc_tables())
        self._shifts: dict[int, DeviceArray] = {}

    def gather(self, data: DeviceArray, offsets: DeviceArray, cell_nbytes: int) -> tuple[DeviceArray, DeviceArray]:
        """Cells as rows, and the CRC-64 of each."""
        cp, count = self._cupy, len(offsets)
        out, checks = cp.empty((count, cell_nbytes), cp.uint8), cp.empty(count, cp.uint64)
        arguments = data, offsets, np.uint32(cell_nbytes), out, checks, *self._sums(cell_nbytes)
        self._gather((count,), (_THREADS,), arguments)
        return out, checks

    def scatter(self, data: DeviceArray, offsets: DeviceArray, rows: DeviceArray) -> DeviceArray:
        """Rows into cells; the CRC-64 of each as it lies there."""
        count, nbytes = rows.shape
        checks = self._cupy.empty(count, self._cupy.uint64)
        self._scatter((count,), (_THREADS,), (data, offsets, np.uint32(nbytes), rows, checks, *self._sums(nbytes)))
        return checks

    def gather_fp8(
        self, data: DeviceArray, offsets: DeviceArray, matrices: int, tokens: int, channels: int
    ) -> tuple[DeviceArray, DeviceArray, bool]:
        """bf16 cells as encoded rows, the CRC-64 of each, and whether every value was representable."""
        cp, count, nbytes = self._cupy, len(offsets), matrices * channels * (tokens + 1)
        out, checks, bad = cp.empty((count, nbytes), cp.uint8), cp.empty(count, cp.uint64), cp.zeros(1, cp.uint32)
        shape = np.uint32(matrices), np.uint32(tokens), np.uint32(channels)
        self._gather_fp8((count,), (_THREADS,), (data, offsets, *shape, out, checks, bad, *self._sums(nbytes)))
        return out, checks, not int(bad[0])

    def _sums(self, nbytes: int) -> tuple[DeviceArray, DeviceArray, np.uint32]:
        shifts = self._shifts.get(nbytes)
        if shifts is None:
            shifts = self._shifts[nbytes] = self._cupy.asarray(crc_shifts(nbytes))
        return self._tables, shifts, np.uint32(pieces_of(nbytes))


def open_cupy() -> Any:
    """CuPy, with a device that answers.

    Raises:
        MissingExtraError: CuPy is not installed.
        DeviceUnavailable: it is, and finds no CUDA device here.
    """
    try:
        import cupy
    except ImportError:
        raise MissingExtraError(
            feature="an arena on a GPU", module="cupy", package="kv-transport", extra="cuda"
        ) from None
    try:
        count = int(cupy.cuda.runtime.getDeviceCount())
    except Exception as error:  # a driver that is missing, too old, or broken: each is a type of its own
        raise DeviceUnavailable(reason=f"no CUDA device answers here: {error}") from error
    if not count:
        raise DeviceUnavailable(reason="this machine has no CUDA device")
    return cupy

import numpy as np
from numpy.typing import NDArray

def copy_cells(
    to: memoryview,
    source: memoryview,
    cells: NDArray[np.int64],
    checks: bytearray,
    read: bytearray = ...,
    /,
) -> None: ...
def copy_shared(
    state: bytearray,
    to: memoryview,
    source: memoryview,
    cells: NDArray[np.int64],
    checks: bytearray,
    read: bytearray | None,
    /,
) -> bool | None: ...
def sum_cells(source: memoryview, cells: NDArray[np.int64], checks: NDArray[np.uint64], /) -> None: ...
def combine(checks: NDArray[np.uint64], sizes: NDArray[np.int64], /) -> int: ...
def quantise_bf16(
    to: NDArray[np.uint8],
    scales: NDArray[np.uint8],
    source: NDArray[np.uint16],
    matrices: int,
    rows: int,
    columns: int,
    /,
) -> bool: ...
def dequantise_bf16(
    to: NDArray[np.uint16],
    scales: NDArray[np.uint8],
    source: NDArray[np.uint8],
    matrices: int,
    rows: int,
    columns: int,
    /,
) -> None: ...
def set_features(pclmul: bool, avx2: bool, avx512: bool, /) -> tuple[bool, bool, bool]: ...

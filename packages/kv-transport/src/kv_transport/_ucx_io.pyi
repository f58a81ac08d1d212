from array import array
from ctypes import c_int

import numpy as np
from numpy.typing import NDArray

def poll(
    progress: int,
    probe: int,
    status: int,
    worker: int,
    tag: int,
    wanted: c_int,
    requests: array[int],
    turns: int,
    /,
) -> bool: ...
def put(
    put: int,
    endpoint: int,
    key: int,
    parameters: int,
    memory: memoryview,
    remote: int,
    cells: NDArray[np.int64],
    checks: NDArray[np.uint64],
    requests: NDArray[np.uint64],
    /,
) -> tuple[int, int]: ...

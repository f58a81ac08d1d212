import numpy as np
from numpy.typing import NDArray

def receive(
    fd: int,
    others: int,
    memory: memoryview,
    spans: NDArray[np.int64],
    checks: NDArray[np.uint64],
    state: NDArray[np.int64],
    /,
) -> int: ...
def send(
    fd: int,
    others: int,
    head: bytes,
    memory: memoryview,
    spans: NDArray[np.int64],
    checks: NDArray[np.uint64] | None,
    state: NDArray[np.int64],
    /,
) -> int: ...

"""How many threads matrix products use in this process.

Several processes that share few cores must not each start a thread per core: a BLAS thread that waits for its
siblings spins, and a product on an overcommitted machine can take ten times as long.
"""

from threadpoolctl import threadpool_info, threadpool_limits

from kv_services.engine.errors import EngineInputError


def set_blas_threads(count: int) -> None:
    """Use `count` threads for every matrix product of this process from now on.

    Raises:
        EngineInputError: fewer than one.
    """
    if count < 1:
        raise EngineInputError(field="BLAS threads", value=count, expected="at least 1")
    threadpool_limits(limits=count, user_api="blas")


def blas_threads() -> int:
    """Threads that a matrix product may use now; 0 when the BLAS library is not one we can ask."""
    return max((int(pool["num_threads"]) for pool in threadpool_info() if pool["user_api"] == "blas"), default=0)

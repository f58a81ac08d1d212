"""Helpers for tests and simulation; no product code imports this.

`VirtualTimeLoop` runs asyncio code in virtual time, `ManualClock` and `SkewedClock` are clocks under a test's hand,
`truncated_hashes` provokes collisions. Hypothesis strategies are in `kv_core.testing.strategies`, which needs the
extra `kv-core[testing]`.
"""

from kv_core.testing.clocks import ManualClock, SkewedClock
from kv_core.testing.collisions import truncated_hashes
from kv_core.testing.loop import (
    BackgroundFailureError,
    LoopClock,
    RealIOError,
    SimulationStalledError,
    ThreadInSimulationError,
    VirtualTimeLoop,
    run_virtual,
)

__all__ = [
    "BackgroundFailureError",
    "LoopClock",
    "ManualClock",
    "RealIOError",
    "SimulationStalledError",
    "SkewedClock",
    "ThreadInSimulationError",
    "VirtualTimeLoop",
    "run_virtual",
    "truncated_hashes",
]

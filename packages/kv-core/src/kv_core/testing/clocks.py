"""Clocks under a test's hand; each is a `kv_core.clock.Clock`.

All arithmetic is in integer nanoseconds, so a run gives the same readings everywhere.
"""

from kv_core.clock import Clock


class ManualClock:
    """Stands still until it is told otherwise."""

    def __init__(self, wall_ns: int = 0, monotonic_ns: int = 0) -> None:
        self._wall_ns = wall_ns
        self._monotonic_ns = monotonic_ns

    def wall_ns(self) -> int:
        return self._wall_ns

    def monotonic_ns(self) -> int:
        return self._monotonic_ns

    def advance(self, delta_ns: int) -> None:
        """Let time pass on both clocks."""
        if delta_ns < 0:
            raise ValueError(f"time does not pass backwards ({delta_ns} ns); step_wall moves the wall alone")
        self._wall_ns += delta_ns
        self._monotonic_ns += delta_ns

    def step_wall(self, delta_ns: int) -> None:
        """Set the wall clock forward or back, as an operator or NTP does; the monotonic clock does not see it."""
        self._wall_ns += delta_ns

    def set_wall(self, wall_ns: int) -> None:
        """Set the wall clock to a reading."""
        self._wall_ns = wall_ns


class SkewedClock:
    """One node's faulty view of a common clock: offset, drift and steps.

    `drift_ppm` makes both of its clocks run fast (or slow) by that many parts per million; offset and steps concern the
    wall alone. Its monotonic clock never goes back.
    """

    def __init__(self, base: Clock, offset_ns: int = 0, drift_ppm: int = 0) -> None:
        self._base = base
        self._base_ns = base.monotonic_ns
        self._offset_ns = offset_ns
        self._since_ns = base.monotonic_ns()
        self._gained_ns = 0
        self._drift_ppm = 0
        self.set_drift(drift_ppm)

    def wall_ns(self) -> int:
        elapsed_ns = self._base_ns() - self._since_ns
        return self._base.wall_ns() + self._offset_ns + self._gained_ns + elapsed_ns * self._drift_ppm // 1_000_000

    def monotonic_ns(self) -> int:
        # Read very often in simulations, hence in one piece; the gain is that of `_gain_ns`.
        base_ns = self._base_ns()
        return base_ns + self._gained_ns + (base_ns - self._since_ns) * self._drift_ppm // 1_000_000

    def step_wall(self, delta_ns: int) -> None:
        """Step the wall forward or back from now on."""
        self._offset_ns += delta_ns

    def set_drift(self, drift_ppm: int) -> None:
        """Run at another rate from now on; what was gained so far stays."""
        if drift_ppm <= -1_000_000:
            raise ValueError(f"a drift of {drift_ppm} ppm would stop time or turn it back")
        self._gained_ns = self._gain_ns()
        self._since_ns = self._base.monotonic_ns()
        self._drift_ppm = drift_ppm

    def _gain_ns(self) -> int:
        elapsed_ns = self._base_ns() - self._since_ns
        return self._gained_ns + elapsed_ns * self._drift_ppm // 1_000_000

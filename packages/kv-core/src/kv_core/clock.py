"""The only place of the product that reads time.

`wall_ns` may step back or jump and is for stamps that people or other machines read; `monotonic_ns` never goes back
and is for deadlines and durations. Everything else is handed a `Clock`, so that the simulator can hand in its own.
Domain time is integer nanoseconds: floats lose steps at epoch size.
"""

import time
from typing import Protocol


class Clock(Protocol):
    """A source of time; production uses `SystemClock`, tests and the simulator their own."""

    def wall_ns(self) -> int:
        """Nanoseconds since the epoch; may go back."""
        ...

    def monotonic_ns(self) -> int:
        """Nanoseconds since an arbitrary start; never goes back."""
        ...


class SystemClock:
    """The machine's clocks."""

    __slots__ = ()

    def wall_ns(self) -> int:
        return time.time_ns()

    def monotonic_ns(self) -> int:
        return time.monotonic_ns()


def thread_cpu_ns() -> int:
    """Processor time of the calling thread: what its work costs, whatever else the machine did meanwhile.

    No part of `Clock`: it is for measurements, and nothing that the simulator repeats may depend on it.
    """
    return time.thread_time_ns()

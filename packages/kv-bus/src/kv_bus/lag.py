"""Measures how late the loop runs what was due: the one figure that shows that something blocks it.

A probe asks to be woken after a fixed pause and notes how much later it was. It keeps a sliding maximum and counts
turns beyond a threshold; it decides nothing.
"""

import asyncio
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from kv_bus.limits import LAG_PROBE_INTERVAL_NS, S
from kv_core.clock import Clock, SystemClock


@dataclass(frozen=True, slots=True)
class LoopLag:
    """A snapshot: lags in nanoseconds."""

    last_ns: int
    recent_max_ns: int
    total_ns: int
    samples: int
    late_samples: int


class LoopLagProbe:
    """A supervised child that measures the lag of the loop it runs on.

    Args:
        clock: tells the time.
        interval_ns: pause between two measurements.
        late_ns: a lag from which a sample counts as late.
        window_ns: how long a lag stays in `recent_max_ns`.
        on_sample: told each lag, for a histogram.
    """

    def __init__(
        self,
        clock: Clock | None = None,
        *,
        interval_ns: int = LAG_PROBE_INTERVAL_NS,
        late_ns: int = 5_000_000,
        window_ns: int = 60 * S,
        on_sample: Callable[[int], None] | None = None,
    ) -> None:
        self._clock = clock or SystemClock()
        self._interval_ns = interval_ns
        self._late_ns = late_ns
        self._window_ns = window_ns
        self._on_sample = on_sample
        # (time, lag), lags falling: the head is the maximum of the window, and there are few.
        self._peaks: deque[tuple[int, int]] = deque()
        self._last = self._total = self._samples = self._late = 0
        self._closed: asyncio.Future[None] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._due_ns = 0

    async def start(self) -> None:
        if self._closed is None:
            self._closed = asyncio.get_running_loop().create_future()
            self._arm()

    async def run(self) -> None:
        await self.start()
        assert self._closed is not None
        await asyncio.shield(self._closed)

    async def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._closed is None:
            self._closed = asyncio.get_running_loop().create_future()
        if not self._closed.done():
            self._closed.set_result(None)

    def snapshot(self) -> LoopLag:
        self._forget(self._clock.monotonic_ns())
        recent = self._peaks[0][1] if self._peaks else 0
        return LoopLag(self._last, recent, self._total, self._samples, self._late)

    def _arm(self) -> None:
        self._due_ns = self._clock.monotonic_ns() + self._interval_ns
        self._timer = asyncio.get_running_loop().call_later(self._interval_ns / 1e9, self._measure)

    def _measure(self) -> None:
        now_ns = self._clock.monotonic_ns()
        lag_ns = max(0, now_ns - self._due_ns)
        self._last = lag_ns
        self._total += lag_ns
        self._samples += 1
        self._late += lag_ns >= self._late_ns
        while self._peaks and self._peaks[-1][1] <= lag_ns:
            self._peaks.pop()
        self._peaks.append((now_ns, lag_ns))
        self._forget(now_ns)
        if self._on_sample is not None:
            self._on_sample(lag_ns)
        self._arm()

    def _forget(self, now_ns: int) -> None:
        while self._peaks and self._peaks[0][0] < now_ns - self._window_ns:
            self._peaks.popleft()

"""asyncio in virtual time: time moves only when nothing can run, and then at once to the next timer.

A run is a function of its inputs: no thread, no real IO, no real clock. What would break that raises. A run in which
nothing can ever happen again (every task waits, no timer is set) is a deadlock and is found at once.

V1: time is a whole number of nanoseconds that starts at 0 and never goes back. (Starting at epoch seconds would hang:
at 1.7e9 the resolution of a float is 240 ns, and a timer could never become due.)
V2: callbacks run first in, first out. Timers fire at their nanosecond, those due at the same one in the order in which
they were armed.
V3: an exception that nobody awaits fails the run.

Still for the test to mind: `asyncio.TaskGroup` and `asyncio.wait` keep tasks in sets, so the order in which they cancel
is not determined; keep tasks in a dict. Sets of strings vary with PYTHONHASHSEED.
"""

import asyncio
import contextvars
import heapq
import threading
import weakref
from collections import deque
from collections.abc import Callable, Coroutine
from typing import TYPE_CHECKING, Any, Final, NoReturn, TypeVar, TypeVarTuple

if TYPE_CHECKING:
    from _typeshed import FileDescriptorLike

_T = TypeVar("_T")
_Ts = TypeVarTuple("_Ts")

_STILL_STEPS_MAX: Final = 1_000_000
"""Turns of the loop at one instant before it counts as stuck."""

_CANCELLED_MAX: Final = 64
"""Cancelled timers that may lie in the heap, if they are not more than half of it."""

_TASKS_MIN: Final = 1024
"""Tasks remembered before those that are gone are looked for."""

_BILLION: Final = 1_000_000_000


class SimulationStalledError(Exception):
    """Nothing will ever happen again, or time no longer moves."""


class RealIOError(Exception):
    """A file descriptor was given to a virtual loop."""


class ThreadInSimulationError(Exception):
    """Another thread was to take part in a run in virtual time."""


class BackgroundFailureError(Exception):
    """Something failed in the background; its cause is the exception."""


class VirtualTimeLoop(asyncio.BaseEventLoop):
    """An event loop in virtual time: `asyncio.Runner(loop_factory=VirtualTimeLoop)`, or `run_virtual`."""

    # asyncio's own: what runs next, whether to stop before time passes, and the thread that runs the loop. They and
    # those of its handles are used as they are: a run makes millions of calls otherwise that say nothing.
    _ready: deque[asyncio.Handle]
    _closed: bool
    _stopping: bool
    _thread_id: int | None

    def __init__(self) -> None:
        super().__init__()
        self._now_ns = 0
        self._still_steps = 0
        # Heap of (due, order of arming, timer); the order decides between timers of one nanosecond.
        self._timers: list[tuple[int, int, asyncio.TimerHandle]] = []
        self._num_armed = self._num_cancelled = 0
        self._failure: BaseException | None = None
        self._tasks: list[weakref.ref[asyncio.Task[object]]] = []
        self._tasks_max = _TASKS_MIN
        self.set_exception_handler(self._handle)

    @property
    def now_ns(self) -> int:
        """Virtual nanoseconds since the start."""
        return self._now_ns

    def time(self) -> float:
        return self._now_ns / _BILLION

    def call_soon(
        self, callback: Callable[[*_Ts], object], *args: *_Ts, context: contextvars.Context | None = None
    ) -> asyncio.Handle:
        self._check_open()
        handle = asyncio.Handle(callback, args, self, context)
        self._enqueue(handle)
        return handle

    def call_at(
        self, when: float, callback: Callable[[*_Ts], object], *args: *_Ts, context: contextvars.Context | None = None
    ) -> asyncio.TimerHandle:
        self._check_open()
        timer = asyncio.TimerHandle(when, callback, args, self, context)
        self._arm(timer)
        return timer

    def call_later(
        self, delay: float, callback: Callable[[*_Ts], object], *args: *_Ts, context: contextvars.Context | None = None
    ) -> asyncio.TimerHandle:
        # In whole nanoseconds: a sum of floats may lie just above the instant that is meant.
        return self.call_at((self._now_ns + round(delay * _BILLION)) / _BILLION, callback, *args, context=context)

    def _check_open(self) -> None:
        if self._closed:
            raise RuntimeError("Event loop is closed")

    def _enqueue(self, handle: asyncio.Handle) -> None:
        self._ready.append(handle)

    def _arm(self, timer: asyncio.TimerHandle) -> None:
        when: float = timer._when  # type: ignore[attr-defined]
        due_ns = round(when * _BILLION)
        if due_ns / _BILLION < when:
            due_ns += 1  # or whoever compares `time()` with `when` would find that it is not yet due
        self._num_armed += 1
        heapq.heappush(self._timers, (due_ns, self._num_armed, timer))

    def _timer_handle_cancelled(self, handle: asyncio.TimerHandle) -> None:
        self._num_cancelled += 1

    def _run_once(self) -> None:
        """One turn: let time pass if nothing can run, then run what is due and nothing that comes up meanwhile."""
        ready, timers = self._ready, self._timers
        if self._num_cancelled > _CANCELLED_MAX and 2 * self._num_cancelled > len(timers):
            # In place: a subclass may be looking at it.
            timers[:] = [entry for entry in timers if not entry[2].cancelled()]
            heapq.heapify(timers)
            self._num_cancelled = 0
        while timers and timers[0][2]._cancelled:
            heapq.heappop(timers)
        now_ns = self._now_ns
        if not ready and not self._stopping:
            if not timers:
                raise SimulationStalledError(f"every task waits and no timer is set, at {now_ns} ns")
            if timers[0][0] > now_ns:
                now_ns = self._now_ns = timers[0][0]
                self._still_steps = 0
        self._still_steps += 1
        if self._still_steps > _STILL_STEPS_MAX:
            raise SimulationStalledError(f"{_STILL_STEPS_MAX} turns of the loop, and it is still {now_ns} ns")
        while timers and timers[0][0] <= now_ns:
            ready.append(heapq.heappop(timers)[2])
        for _ in range(len(ready)):
            if not ready:
                break  # a subclass has put aside what was to run
            handle = ready.popleft()
            if not handle._cancelled:
                handle._run()

    def add_reader(self, fd: "FileDescriptorLike", callback: Callable[..., object], *args: object) -> NoReturn:
        raise RealIOError(f"{fd!r} in virtual time")

    def add_writer(self, fd: "FileDescriptorLike", callback: Callable[..., object], *args: object) -> NoReturn:
        raise RealIOError(f"{fd!r} in virtual time")

    def close(self) -> None:
        super().close()
        self._timers.clear()

    def run_until_complete(self, future):  # type: ignore[no-untyped-def]  # asyncio's own type cannot be written here
        """As asyncio's; a failure in the background ends the run.

        Raises:
            BackgroundFailureError: an exception that nobody awaited.
            SimulationStalledError: a deadlock, or callbacks that never let time pass.
        """
        try:
            result = super().run_until_complete(future)
        except RuntimeError:
            self._raise_failure()
            raise
        for reference in self._tasks:
            task = reference()
            if task is not None and _is_unseen(task):
                self._failure = self._failure or task.exception()
        self._tasks.clear()
        self._raise_failure()
        return result

    def create_task(self, coro, **options):  # type: ignore[no-untyped-def]  # the options differ between versions
        task = super().create_task(coro, **options)
        # Weakly, so that a task nobody holds is collected, and asyncio tells of its exception, as soon as may be.
        self._tasks.append(weakref.ref(task))
        if len(self._tasks) > self._tasks_max:
            self._tasks = [reference for reference in self._tasks if reference() is not None]
            self._tasks_max = _TASKS_MIN + 2 * len(self._tasks)
        return task

    def call_soon_threadsafe(
        self,
        callback: Callable[[*_Ts], object],
        *args: *_Ts,
        context: contextvars.Context | None = None,
    ) -> asyncio.Handle:
        if threading.get_ident() != self._thread_id:
            raise ThreadInSimulationError(f"{callback!r} from another thread")
        return self.call_soon(callback, *args, context=context)

    def run_in_executor(self, executor: object, func: Callable[..., object], *args: object) -> NoReturn:
        raise ThreadInSimulationError(f"{func!r} in an executor")

    def _handle(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        cause = context.get("exception")
        if self._failure is None:
            self._failure = cause if isinstance(cause, BaseException) else RuntimeError(str(context.get("message")))
        if self.is_running():
            self.stop()

    def _raise_failure(self) -> None:
        if self._failure is not None:
            failure, self._failure = self._failure, None
            raise BackgroundFailureError(repr(failure)) from failure


def _is_unseen(task: "asyncio.Future[object]") -> bool:
    """The task failed and nobody has asked for its exception (asking would make it seen)."""
    return bool(getattr(task, "_log_traceback", False))


class LoopClock:
    """The clock of a virtual loop, as a `kv_core.clock.Clock`; the wall starts at `epoch_ns`."""

    def __init__(self, loop: VirtualTimeLoop, epoch_ns: int = 0) -> None:
        self._loop = loop
        self._epoch_ns = epoch_ns

    def wall_ns(self) -> int:
        return self._epoch_ns + self._loop._now_ns

    def monotonic_ns(self) -> int:
        return self._loop._now_ns


def run_virtual(main: Callable[[LoopClock], Coroutine[None, None, _T]], epoch_ns: int = 0) -> _T:
    """Run `main(clock)` to its end in virtual time and return what it returns.

    Raises:
        BackgroundFailureError, SimulationStalledError: see `VirtualTimeLoop.run_until_complete`.
    """
    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        loop = runner.get_loop()
        assert isinstance(loop, VirtualTimeLoop)
        return runner.run(main(LoopClock(loop, epoch_ns)))

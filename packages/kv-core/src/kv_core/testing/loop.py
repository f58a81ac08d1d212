"""asyncio in virtual time: time moves only when nothing can run, and then at once to the next timer.

A run is a function of its inputs: no thread, no real IO, no real clock. What would break that raises. A run in which
nothing can ever happen again (every task waits, no timer is set) is a deadlock and is found at once.

V1: time is a whole number of nanoseconds that starts at 0 and never goes back. (Starting at epoch seconds would hang:
at 1.7e9 the resolution of a float is 240 ns, and a timer could never become due.)
V2: callbacks run first in, first out. Timers due at the same nanosecond fire in the order of asyncio's heap: the
same in every run, but not that of arming.
V3: an exception that nobody awaits fails the run.

Still for the test to mind: `asyncio.TaskGroup` and `asyncio.wait` keep tasks in sets, so the order in which they cancel
is not determined; keep tasks in a dict. Sets of strings vary with PYTHONHASHSEED.
"""

import asyncio
import contextvars
import selectors
import threading
import weakref
from collections.abc import Callable, Coroutine, Mapping
from typing import TYPE_CHECKING, Any, Final, NoReturn, TypeVar, TypeVarTuple

if TYPE_CHECKING:
    from _typeshed import FileDescriptorLike

_T = TypeVar("_T")
_Ts = TypeVarTuple("_Ts")

_STILL_STEPS_MAX: Final = 1_000_000
"""Turns of the loop at one instant before it counts as stuck."""

_BILLION: Final = 1_000_000_000


class SimulationStalledError(Exception):
    """Nothing will ever happen again, or time no longer moves."""


class RealIOError(Exception):
    """A file descriptor was given to a virtual loop."""


class ThreadInSimulationError(Exception):
    """Another thread was to take part in a run in virtual time."""


class BackgroundFailureError(Exception):
    """Something failed in the background; its cause is the exception."""


class _VirtualSelector(selectors.BaseSelector):
    def __init__(self) -> None:
        self.now_ns = 0
        self._still_steps = 0

    def register(self, fileobj: "FileDescriptorLike", events: int, data: object = None) -> NoReturn:
        raise RealIOError(f"{fileobj!r} in virtual time")

    def unregister(self, fileobj: "FileDescriptorLike") -> NoReturn:
        raise RealIOError(f"{fileobj!r} in virtual time")

    def get_map(self) -> Mapping["FileDescriptorLike", selectors.SelectorKey]:
        return {}

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is None:
            raise SimulationStalledError(f"every task waits and no timer is set, at {self.now_ns} ns")
        if timeout > 0:
            self.now_ns += max(round(timeout * _BILLION), 1)
            self._still_steps = 0
        else:
            self._still_steps += 1
            if self._still_steps > _STILL_STEPS_MAX:
                raise SimulationStalledError(f"{_STILL_STEPS_MAX} turns of the loop, and it is still {self.now_ns} ns")
        return []


class VirtualTimeLoop(asyncio.BaseEventLoop):
    """An event loop in virtual time: `asyncio.Runner(loop_factory=VirtualTimeLoop)`, or `run_virtual`."""

    _thread_id: int | None  # asyncio's: the thread that runs the loop

    def __init__(self) -> None:
        super().__init__()
        self._selector = _VirtualSelector()
        self._clock_resolution = 1e-6
        self._failure: BaseException | None = None
        self._failed: list[weakref.ref[asyncio.Future[object]]] = []
        self.set_exception_handler(self._handle)

    @property
    def now_ns(self) -> int:
        """Virtual nanoseconds since the start."""
        return self._selector.now_ns

    def time(self) -> float:
        return self._selector.now_ns / _BILLION

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
        for reference in self._failed:
            task = reference()
            if task is not None and _is_unseen(task):
                self._failure = self._failure or task.exception()
        self._failed.clear()
        self._raise_failure()
        return result

    def create_task(self, coro, **options):  # type: ignore[no-untyped-def]  # the options differ between versions
        task = super().create_task(coro, **options)
        task.add_done_callback(self._note_failed)
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

    def _process_events(self, event_list: object) -> None:
        return None

    def _note_failed(self, task: "asyncio.Future[object]") -> None:
        # Weakly, so that a task nobody holds is collected, and asyncio tells of its exception, as soon as may be.
        if _is_unseen(task):
            self._failed.append(weakref.ref(task))

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
        return self._epoch_ns + self._loop.now_ns

    def monotonic_ns(self) -> int:
        return self._loop.now_ns


def run_virtual(main: Callable[[LoopClock], Coroutine[None, None, _T]], epoch_ns: int = 0) -> _T:
    """Run `main(clock)` to its end in virtual time and return what it returns.

    Raises:
        BackgroundFailureError, SimulationStalledError: see `VirtualTimeLoop.run_until_complete`.
    """
    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        loop = runner.get_loop()
        assert isinstance(loop, VirtualTimeLoop)
        return runner.run(main(LoopClock(loop, epoch_ns)))

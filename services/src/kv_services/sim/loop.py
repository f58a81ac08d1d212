"""Virtual time in which single nodes can stand still, as a process does between SIGSTOP and SIGCONT.

Whatever runs on the loop belongs to the node in whose context (`contextvars`) it was started. While a node stands still
nothing of it runs: what becomes due is kept in order and runs when it goes on. Others see only its silence. What a node
gives to threads is done in virtual time as well, on the loop.
"""

import asyncio
import contextvars
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar, TypeVarTuple

from kv_core.ids import NodeId
from kv_core.testing import LoopClock, VirtualTimeLoop
from kv_services.life import LifeFileError

_T = TypeVar("_T")
_Ts = TypeVarTuple("_Ts")
_OWNER: contextvars.ContextVar[str] = contextvars.ContextVar("simulated node", default="")


def context_of(node: NodeId) -> contextvars.Context:
    """A new context; what is started in it belongs to that node."""
    context = contextvars.copy_context()
    context.run(_OWNER.set, node)
    return context


class SimLoop(VirtualTimeLoop):
    """See the module."""

    def __init__(self) -> None:
        super().__init__()
        self._still: dict[str, tuple[list[asyncio.Handle], list[asyncio.TimerHandle]]] = {}
        self._free_at: dict[object, float] = {}
        self.work_takes_s: Callable[[str], float] = lambda node: 0.0

    def stop_node(self, node: NodeId) -> None:
        """Let nothing of that node run from now on."""
        if node in self._still:
            return
        ready, timers = self._still[node] = [], []
        for handle in list(self._ready):
            if _owner(handle) == node:
                self._ready.remove(handle)
                ready.append(handle)
        others = []
        for entry in sorted(self._timers):
            timer = entry[2]
            if _owner(timer) == node:
                timers.append(timer)
            else:
                others.append(entry)
        # What is sorted is a heap.
        self._timers[:] = others

    def continue_node(self, node: NodeId) -> None:
        """Let it go on: what was due meanwhile runs at once."""
        ready, timers = self._still.pop(node, ([], []))
        self._ready.extend(ready)
        for timer in timers:
            if not timer.cancelled():
                self._arm(timer)

    def continue_all(self) -> None:
        """Let every node go on."""
        for node in list(self._still):
            self.continue_node(NodeId(node))

    def run_in_executor(  # type: ignore[override]  # asyncio's gives a future of any type; so does this one
        self, executor: object, func: Callable[[*_Ts], _T], *args: *_Ts
    ) -> "asyncio.Future[_T]":
        """Call `func` once a thread would have: the jobs of one executor one after the other, each after the time that
        `work_takes_s` says of the node; those of one that was shut down meanwhile not at all. No thread is started."""
        node = _OWNER.get()
        thread = node if executor is None else executor
        begins = max(self.time(), self._free_at.get(thread, 0.0))
        ends = self._free_at[thread] = begins + self.work_takes_s(node)
        future: asyncio.Future[_T] = self.create_future()
        self.call_at(ends, _complete, executor, future, func, args)
        return future

    def _enqueue(self, handle: asyncio.Handle) -> None:
        kept = self._still.get(_owner(handle)) if self._still else None
        if kept is None:
            self._ready.append(handle)
        else:
            kept[0].append(handle)

    def _arm(self, timer: asyncio.TimerHandle) -> None:
        kept = self._still.get(_owner(timer)) if self._still else None
        if kept is None:
            super()._arm(timer)
        else:
            kept[1].append(timer)

    def _handle(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        # A disk that takes no clock bound ends a life at its replica's next tick. What needs a stamp until then fails,
        # and where nobody called who could be told, the loop reports it and goes on, as any process's loop does.
        if not isinstance(context.get("exception"), LifeFileError):
            super()._handle(loop, context)


def run_simulated(main: Callable[[SimLoop, LoopClock], Coroutine[None, None, _T]], epoch_ns: int) -> _T:
    """Run `main(loop, clock)` to its end; raises what `kv_core.testing.run_virtual` raises."""
    with asyncio.Runner(loop_factory=SimLoop) as runner:
        loop = runner.get_loop()
        assert isinstance(loop, SimLoop)
        try:
            return runner.run(main(loop, LoopClock(loop, epoch_ns)))
        finally:
            # What is left is cancelled now and waited for, and who stands still would never hear of it.
            loop.continue_all()


def _complete(executor: object, future: "asyncio.Future[_T]", func: Callable[[*_Ts], _T], args: tuple[*_Ts]) -> None:
    if future.cancelled():
        return
    if getattr(executor, "_shutdown", False):
        # What a pool has not done when it is shut down, it drops; nobody who closes one waits for it in vain.
        future.cancel()
        return
    try:
        result = func(*args)
    except Exception as error:  # whatever it is, it is the caller's
        future.set_exception(error)
    else:
        future.set_result(result)


def _owner(handle: asyncio.Handle) -> str:
    context: contextvars.Context = handle._context  # type: ignore[attr-defined]
    return context.get(_OWNER, "")

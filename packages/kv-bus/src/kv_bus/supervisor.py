"""Keeps the parts of one process running: starts them in order, restarts what fails, stops in reverse order.

It decides when a part is tried again and when trying is over. It does not know what a part does.

V1: children start in the order given, each only after the one before is ready; they stop in the reverse order.
V2: a failure at the first start fails `start()`: what is wrong then (a port, a key file) does not mend by trying.
V3: a child that fails later is made anew after a pause that doubles from `backoff_first_ns` to `backoff_max_ns`.
V4: more than `failures_max` failures within `within_ns` are the end of trying. What then happens is the child's stated
    `GiveUp`: stop everything and raise `ChildGaveUp` from `run()`, or leave this child down and say so.
V5: every failure is reported: logged with its traceback, counted, and handed to `on_failure`. An end that the child's
    spec names as foreseen is a decision, not a fault: it is logged in one line, as a warning.
V6: a child that returns unasked has failed (`ChildEnded`).
V7: whoever stops waits for the child that is just starting, and no other is begun after it: none is left running.
"""

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Generic, Protocol, TypeVar, runtime_checkable

from kv_bus.actor import Actor
from kv_bus.errors import ActorDown, ChildEnded, ChildGaveUp
from kv_bus.limits import MS, S
from kv_core.clock import Clock, SystemClock
from kv_core.errors import KVError, LocalProtocolError

_log = logging.getLogger(__name__)

EventT = TypeVar("EventT")


class Child(Protocol):
    """A part of a process that has a beginning, a life and an end."""

    async def start(self) -> None:
        """Return when ready to work; raise when that is impossible."""
        ...

    async def run(self) -> None:
        """Return after `close()`, raise what ended it otherwise."""
        ...

    async def close(self) -> None:
        """End at once; may be called again and at any time."""
        ...


@runtime_checkable
class Drainable(Protocol):
    """A child that can finish what it has begun."""

    async def drain(self, timeout_ns: int) -> bool:
        """Take no new work, finish the rest; False when `timeout_ns` cut it short."""
        ...


class GiveUp(Enum):
    """What happens when trying is over."""

    STOP_ALL = "stop_all"
    LEAVE_DOWN = "leave_down"


class ChildState(Enum):
    """Where a child is."""

    NEW = "new"
    RUNNING = "running"
    BACKING_OFF = "backing_off"
    DOWN = "down"
    STOPPED = "stopped"


class StopOutcome(Enum):
    """How a child ended when it was stopped."""

    CLEAN = "clean"
    CUT_SHORT = "cut_short"
    HUNG = "hung"
    FAILED = "failed"
    WAS_DOWN = "was_down"


@dataclass(frozen=True, slots=True)
class RestartPolicy:
    """How often and how fast a failing child is tried again."""

    failures_max: int = 5
    within_ns: int = 60 * S
    backoff_first_ns: int = 100 * MS
    backoff_max_ns: int = 5 * S

    def __post_init__(self) -> None:
        if self.failures_max < 0 or self.within_ns <= 0 or not 0 <= self.backoff_first_ns <= self.backoff_max_ns:
            raise LocalProtocolError(detail=f"impossible restart policy {self}")


@dataclass(frozen=True, slots=True)
class RestartAfter:
    """Try again after this pause."""

    delay_ns: int


@dataclass(frozen=True, slots=True)
class GiveUpNow:
    """Trying is over."""

    failures: int


class RestartJudge:
    """Decides, from the times of the failures alone, whether to try again. Pure."""

    __slots__ = ("_failures_ns", "_policy")

    def __init__(self, policy: RestartPolicy) -> None:
        self._policy = policy
        self._failures_ns: deque[int] = deque()

    def failed(self, now_ns: int) -> RestartAfter | GiveUpNow:
        """Count one failure."""
        recent, policy = self._failures_ns, self._policy
        recent.append(now_ns)
        while recent[0] <= now_ns - policy.within_ns:
            recent.popleft()
        if len(recent) > policy.failures_max:
            return GiveUpNow(len(recent))
        return RestartAfter(min(policy.backoff_first_ns << (len(recent) - 1), policy.backoff_max_ns))


@dataclass(frozen=True, slots=True)
class ChildSpec:
    """One child: how it is made, tried again and stopped.

    `make` is called for each life. A `drain_timeout_ns` above 0 lets a `Drainable` child finish before it is closed;
    a child whose `close()` lasts longer than `stop_timeout_ns` is left behind and reported as hung. `foreseen` are the
    errors by which it ends as it was meant to, such as a word from others that its life is over.
    """

    name: str
    make: Callable[[], Child]
    policy: RestartPolicy = RestartPolicy()
    give_up: GiveUp = GiveUp.STOP_ALL
    start_timeout_ns: int = 30 * S
    drain_timeout_ns: int = 0
    stop_timeout_ns: int = 5 * S
    foreseen: tuple[type[Exception], ...] = ()


@dataclass(frozen=True, slots=True)
class ChildFailed:
    """One failure, as handed to `on_failure`."""

    child: str
    error: BaseException
    failures: int
    gave_up: bool
    restart_in_ns: int


@dataclass(frozen=True, slots=True)
class ChildStats:
    """A snapshot of one child."""

    name: str
    state: ChildState
    lives: int
    failures: int
    last_cause: str


@dataclass(frozen=True, slots=True)
class StopReport:
    """How each child ended, in the order they were stopped."""

    outcomes: tuple[tuple[str, StopOutcome], ...]

    @property
    def clean(self) -> bool:
        """Whether every child ended as it should."""
        return all(outcome in (StopOutcome.CLEAN, StopOutcome.WAS_DOWN) for _, outcome in self.outcomes)


@dataclass(slots=True)
class _Kept:
    """A child under supervision."""

    spec: ChildSpec
    judge: RestartJudge
    state: ChildState = ChildState.NEW
    child: Child | None = None
    life: asyncio.Task[None] | None = None
    keeper: asyncio.Task[None] | None = None
    lives: int = 0
    failures: int = 0
    last_cause: str = ""


class ActorRef(Generic[EventT]):
    """A way to post to a supervised actor that survives its restarts."""

    __slots__ = ("_find", "name")

    def __init__(self, name: str, find: Callable[[], Actor[EventT, object] | None]) -> None:
        self.name = name
        self._find = find

    def post(self, event: EventT) -> None:
        """Post to the present life; raises `ActorDown` between two lives, else as `Actor.post`."""
        actor = self._find()
        if actor is None:
            raise ActorDown(actor=self.name)
        actor.post(event)


@dataclass(slots=True)
class Supervisor:
    """Keeps `specs` running.

    Args:
        name: for logs.
        specs: in the order of starting.
        clock: tells when failures happened.
        on_failure: told of every failure, after it was logged.
    """

    name: str
    specs: Sequence[ChildSpec]
    clock: Clock = field(default_factory=SystemClock)
    on_failure: Callable[[ChildFailed], None] | None = None
    _kept: dict[str, _Kept] = field(init=False)
    _ended: asyncio.Event = field(init=False, default_factory=asyncio.Event)
    _stopping: bool = field(init=False, default=False)
    _stop_task: asyncio.Task[StopReport] | None = field(init=False, default=None)
    _gave_up: ChildGaveUp | None = field(init=False, default=None)
    _beginning: asyncio.Lock = field(init=False, default_factory=asyncio.Lock)

    def __post_init__(self) -> None:
        self._kept = {spec.name: _Kept(spec, RestartJudge(spec.policy)) for spec in self.specs}
        if len(self._kept) != len(self.specs):
            raise LocalProtocolError(detail=f"supervisor {self.name}: two children share a name")

    async def start(self) -> None:
        """Start every child in order. If one cannot start, those before it are stopped and its error is raised (V2).

        Raises:
            ChildGaveUp: one that had started could not be kept running while others still started; all are stopped.
        """
        for kept in self._kept.values():
            try:
                async with self._beginning:
                    if self._stopping:
                        break
                    await self._begin_life(kept)
                    keeping = self._keep(kept)
                    kept.keeper = asyncio.get_running_loop().create_task(keeping, name=f"keep:{kept.spec.name}")
            except BaseException:
                await self.stop()
                raise
        if self._stopping:
            await self.stop()
            if self._gave_up is not None:
                raise self._gave_up

    async def run(self) -> None:
        """Return after `stop()`; raise `ChildGaveUp` when a child that stops all could not be kept running (V4)."""
        await self._ended.wait()
        if self._gave_up is not None:
            raise self._gave_up

    async def stop(self) -> StopReport:
        """Stop every child in reverse order; the same report for every caller."""
        if self._stop_task is None:
            self._stopping = True
            self._stop_task = asyncio.get_running_loop().create_task(self._stop_all(), name=f"stop:{self.name}")
        return await asyncio.shield(self._stop_task)

    async def close(self) -> None:
        """`stop()` without its report, so that a supervisor can be a child itself."""
        await self.stop()

    def child(self, name: str) -> Child | None:
        """The present life of a child; None while it has none."""
        kept = self._kept[name]
        return kept.child if kept.state is ChildState.RUNNING else None

    def ref(self, name: str, event_type: type[EventT]) -> ActorRef[EventT]:
        """A lasting way to post events of `event_type` to the actor `name`."""
        if name not in self._kept:
            raise LocalProtocolError(detail=f"supervisor {self.name} has no child {name}")

        def find() -> Actor[EventT, object] | None:
            found = self.child(name)
            if found is not None and not isinstance(found, Actor):
                raise LocalProtocolError(detail=f"{name} takes no events: it is a {type(found).__name__}")
            return found

        return ActorRef(name, find)

    def stats(self) -> tuple[ChildStats, ...]:
        return tuple(
            ChildStats(kept.spec.name, kept.state, kept.lives, kept.failures, kept.last_cause)
            for kept in self._kept.values()
        )

    async def _begin_life(self, kept: _Kept) -> None:
        child = kept.spec.make()
        try:
            async with asyncio.timeout(kept.spec.start_timeout_ns / 1e9):
                await child.start()
        except BaseException:
            await self._close_child(kept.spec, child)
            raise
        # A task of its own, so that a child which cancels itself is not taken for us being cancelled.
        kept.life = asyncio.get_running_loop().create_task(child.run(), name=f"run:{kept.spec.name}")
        kept.child, kept.state = child, ChildState.RUNNING
        kept.lives += 1
        await asyncio.sleep(0)  # let `run` begin, so that a failure right after the start finds it there

    async def _keep(self, kept: _Kept) -> None:
        while True:
            error = await self._live(kept)
            if self._stopping:
                return
            while error is not None:
                delay_ns = self._failed(kept, error)
                if delay_ns is None:
                    return
                await asyncio.sleep(delay_ns / 1e9)
                error = None
                try:
                    await self._begin_life(kept)
                except Exception as failure:  # V5: whatever it is, it is reported
                    error = failure

    async def _live(self, kept: _Kept) -> BaseException | None:
        """Wait for the end of one life; what ended it."""
        child, life = kept.child, kept.life
        assert child is not None and life is not None
        try:
            await asyncio.wait([life])
        finally:
            if not life.done():
                life.cancel()
                await asyncio.gather(life, return_exceptions=True)
        if self._stopping:
            if not life.cancelled() and life.exception() is not None:
                # It is being stopped anyway, but nothing fails unseen (V5).
                _log.warning(
                    "child failed as it stopped supervisor=%s child=%s cause=%s",
                    self.name,
                    kept.spec.name,
                    life.exception(),
                )
            return None
        error: BaseException
        if life.cancelled():
            error = ChildEnded(child=kept.spec.name)
        else:
            error = life.exception() or ChildEnded(child=kept.spec.name)
        kept.child, kept.state = None, ChildState.BACKING_OFF
        await self._close_child(kept.spec, child)
        return error

    def _failed(self, kept: _Kept, error: BaseException) -> int | None:
        """Report one failure (V5); the pause before the next life, or None when trying is over."""
        spec = kept.spec
        kept.failures += 1
        kept.last_cause = str(error) if isinstance(error, KVError) else f"{type(error).__name__}: {error}"
        verdict = kept.judge.failed(self.clock.monotonic_ns())
        gave_up = isinstance(verdict, GiveUpNow)
        delay_ns = verdict.delay_ns if isinstance(verdict, RestartAfter) else 0
        kept.state = ChildState.DOWN if gave_up else ChildState.BACKING_OFF
        foreseen = isinstance(error, spec.foreseen)
        _log.log(
            logging.WARNING if foreseen else logging.ERROR,
            "child %s supervisor=%s child=%s failures=%d gave_up=%s restart_in_ms=%d cause=%s",
            "ended" if foreseen else "failed",
            self.name,
            spec.name,
            kept.failures,
            gave_up,
            delay_ns // MS,
            kept.last_cause,
            exc_info=None if foreseen else error,
        )
        if isinstance(verdict, GiveUpNow) and spec.give_up is GiveUp.STOP_ALL and self._gave_up is None:
            self._gave_up = ChildGaveUp(
                child=spec.name,
                failures=verdict.failures,
                within_ms=spec.policy.within_ns // MS,
                cause=kept.last_cause,
            )
            self._stopping = True
            if self._stop_task is None:
                self._stop_task = asyncio.get_running_loop().create_task(self._stop_all(), name=f"stop:{self.name}")
        if self.on_failure is not None:
            self.on_failure(ChildFailed(spec.name, error, kept.failures, gave_up, delay_ns))
        return None if gave_up else delay_ns

    async def _stop_all(self) -> StopReport:
        outcomes = []
        async with self._beginning:
            pass  # the child that was just starting has started, or could not (V7)
        for kept in reversed(self._kept.values()):
            if kept.state is ChildState.NEW:
                continue
            outcomes.append((kept.spec.name, await self._stop_one(kept)))
        report = StopReport(tuple(outcomes))
        _log.info("stopped supervisor=%s clean=%s", self.name, report.clean)
        self._ended.set()
        return report

    async def _stop_one(self, kept: _Kept) -> StopOutcome:
        child, outcome = kept.child, StopOutcome.WAS_DOWN
        if child is not None:
            outcome = await self._end_child(kept.spec, child)
        keeper, kept.keeper = kept.keeper, None
        if keeper is not None:
            if child is None or outcome is StopOutcome.HUNG:
                keeper.cancel()
            await asyncio.gather(keeper, return_exceptions=True)
        kept.child, kept.state = None, ChildState.STOPPED
        return outcome

    async def _end_child(self, spec: ChildSpec, child: Child) -> StopOutcome:
        outcome = StopOutcome.CLEAN
        if spec.drain_timeout_ns > 0 and isinstance(child, Drainable):
            try:
                # The child keeps its own time; ours is for one that does not.
                limit_s = (spec.drain_timeout_ns + spec.stop_timeout_ns) / 1e9
                async with asyncio.timeout(limit_s):
                    if not await child.drain(spec.drain_timeout_ns):
                        outcome = StopOutcome.CUT_SHORT
            except TimeoutError:
                outcome = StopOutcome.CUT_SHORT
            except Exception:  # a child that fails while it ends must not keep the others from ending
                _log.exception("drain failed supervisor=%s child=%s", self.name, spec.name)
                outcome = StopOutcome.FAILED
        closed = await self._close_child(spec, child)
        return outcome if closed is StopOutcome.CLEAN else closed

    async def _close_child(self, spec: ChildSpec, child: Child) -> StopOutcome:
        try:
            async with asyncio.timeout(spec.stop_timeout_ns / 1e9):
                await child.close()
        except TimeoutError:
            _log.error("close hung supervisor=%s child=%s", self.name, spec.name)
            return StopOutcome.HUNG
        except Exception:  # as above: reported, and the others still end
            _log.exception("close failed supervisor=%s child=%s", self.name, spec.name)
            return StopOutcome.FAILED
        return StopOutcome.CLEAN

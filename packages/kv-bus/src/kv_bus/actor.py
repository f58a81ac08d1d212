"""An actor: one machine, one bounded mailbox, one owner.

The machine decides (`step(event) -> effects`, pure); the actor performs. It decides only when the machine runs and
what happens when too much waits. It knows no bus.

M1: only the actor steps its machine, one event at a time, in mailbox order.
M2: an outsider's event is taken or refused at once (`MailboxFull`, `ActorClosed`), never silently dropped.
M3: a completion (the outcome of IO which an effect started) is never refused while the actor lives: completions are
    bounded by the work in flight, and a machine that misses one leaks.
M4: `perform` never awaits; IO it starts is a job, and a job ends as a completion.
M5: after `close()` nothing runs: no step, no job, no timer. `close()` may be called again and any time.
M6: an error that escapes the machine or `perform` ends the actor, is told to `failed`, and is raised by `run()`: the
    supervisor decides.

An actor takes no task of its own to wait in: a post schedules one turn on the loop, and a turn handles a bounded
number of events for a bounded time. That costs a third of a queue with an awaiting task.
"""

import asyncio
import logging
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Coroutine, Hashable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Generic, Protocol, TypeVar

from kv_bus.errors import ActorClosed, MailboxFull
from kv_bus.limits import ACTOR_TURN_EVENTS, ACTOR_TURN_NS, MAILBOX_MAX
from kv_core.clock import Clock
from kv_core.errors import KVError, LocalProtocolError

EventT = TypeVar("EventT")
EffectT = TypeVar("EffectT")
EventT_contra = TypeVar("EventT_contra", contravariant=True)
EffectT_co = TypeVar("EffectT_co", covariant=True)
ResultT = TypeVar("ResultT")

_log = logging.getLogger(__name__)


class Machine(Protocol[EventT_contra, EffectT_co]):
    """A pure decision maker."""

    def step(self, event: EventT_contra, /) -> Sequence[EffectT_co]:
        """Change state by one event and say what is to be done, in order."""
        ...


class ActorState(Enum):
    """Where an actor is in its life."""

    OPEN = "open"
    DRAINING = "draining"
    CLOSED = "closed"


@dataclass(frozen=True, slots=True)
class MailboxStats:
    """A snapshot of one mailbox."""

    waiting: int
    limit: int
    highest: int
    posted: int
    completed: int
    refused: int
    overloads: int


@dataclass(frozen=True, slots=True)
class ActorStats:
    """A snapshot of one actor."""

    name: str
    state: ActorState
    mailbox: MailboxStats
    handled: int
    turns: int
    jobs: tuple[str, ...]


class Mailbox(Generic[EventT]):
    """A first-in, first-out queue that refuses outsiders at its bound and never refuses a completion."""

    __slots__ = (
        "_completed",
        "_highest",
        "_overloaded",
        "_overloads",
        "_posted",
        "_refused",
        "limit",
        "owner",
        "waiting",
    )

    def __init__(self, owner: str, limit: int = MAILBOX_MAX) -> None:
        if limit < 1:
            raise LocalProtocolError(detail=f"a mailbox of {limit} events can take none")
        self.owner = owner
        self.limit = limit
        self.waiting: deque[EventT] = deque()
        self._posted = self._completed = self._refused = self._highest = self._overloads = 0
        self._overloaded = False

    def __len__(self) -> int:
        return len(self.waiting)

    def post(self, event: EventT) -> None:
        """Add an outsider's event; raises `MailboxFull` at the bound."""
        waiting = len(self.waiting)
        if waiting >= self.limit:
            self._refused += 1
            if not self._overloaded:
                # Once per episode: the line a person acts on, not one per refused event.
                self._overloaded = True
                self._overloads += 1
                _log.warning("mailbox full actor=%s limit=%d refused=%d", self.owner, self.limit, self._refused)
            raise MailboxFull(actor=self.owner, limit=self.limit)
        self.waiting.append(event)
        self._posted += 1
        if waiting >= self._highest:
            self._highest = waiting + 1

    def complete(self, event: EventT) -> None:
        """Add a completion, whatever waits."""
        self.waiting.append(event)
        self._completed += 1
        if len(self.waiting) > self._highest:
            self._highest = len(self.waiting)

    def take(self) -> EventT:
        """The oldest event; raises `IndexError` when there is none."""
        event = self.waiting.popleft()
        if self._overloaded and len(self.waiting) <= self.limit // 2:
            self._overloaded = False
            _log.info("mailbox recovered actor=%s refused=%d", self.owner, self._refused)
        return event

    def clear(self) -> int:
        """Forget what waits; the number of events forgotten."""
        count = len(self.waiting)
        self.waiting.clear()
        return count

    def stats(self) -> MailboxStats:
        return MailboxStats(
            len(self.waiting), self.limit, self._highest, self._posted, self._completed, self._refused, self._overloads
        )


class Actor(ABC, Generic[EventT, EffectT]):
    """Owner of one machine. A subclass says how each effect is performed.

    Args:
        name: for logs, stats and errors.
        machine: the decision maker; nobody else may step it.
        mailbox_max: outsiders' events that may wait.
        clock: measures how long a turn lasts; without one a turn is bounded in events only.
    """

    def __init__(
        self,
        name: str,
        machine: Machine[EventT, EffectT],
        *,
        mailbox_max: int = MAILBOX_MAX,
        clock: Clock | None = None,
    ) -> None:
        self.name = name
        self._machine = machine
        self._mailbox: Mailbox[EventT] = Mailbox(name, mailbox_max)
        self._monotonic_ns = clock.monotonic_ns if clock is not None else _no_time
        self._state = ActorState.OPEN
        self._loop: asyncio.AbstractEventLoop | None = None
        self._turn: asyncio.Handle | None = None
        self._jobs: dict[Hashable, asyncio.Task[None]] = {}  # a dict: insertion order, unlike a set
        self._waiters: list[asyncio.Future[None]] = []
        self._idle_waiters: list[asyncio.Future[None]] = []
        self._failure: BaseException | None = None
        self._handled = self._turns = 0

    @abstractmethod
    def perform(self, effect: EffectT) -> None:
        """Do what the machine decided, without awaiting."""

    def turn_over(self) -> None:
        """Do what can wait until everything that the events of one turn asked for was performed; as `perform`."""

    def failed(self, error: BaseException) -> None:
        """An error ended this actor (M6). For actors that nobody runs: whoever waits for them is told here."""

    def post(self, event: EventT) -> None:
        """Hand in an outsider's event.

        Raises:
            MailboxFull: as many wait as may.
            ActorClosed: the actor is draining or closed.
        """
        if self._state is not ActorState.OPEN:
            raise ActorClosed(actor=self.name)
        self._mailbox.post(event)
        if self._turn is None:
            self._schedule()

    def complete(self, event: EventT) -> None:
        """Hand in the outcome of IO which this actor started; ignored once the actor is closed."""
        if self._state is ActorState.CLOSED:
            return
        self._mailbox.complete(event)
        if self._turn is None:
            self._schedule()

    def start_job(
        self,
        key: Hashable,
        work: Coroutine[object, object, ResultT],
        outcome: Callable[[ResultT | KVError], EventT],
    ) -> None:
        """Run `work`; its result, or the `KVError` it raised, becomes the event that `outcome` makes.

        Anything else it raises is a bug and ends the actor (M6). A cancelled job makes no event: only `close()` and
        `cancel_job` cancel, and both know.
        """
        if key in self._jobs or self._state is ActorState.CLOSED:
            work.close()
            raise LocalProtocolError(detail=f"actor {self.name}: job {key!r} runs already, or the actor is closed")
        task = self._running_loop().create_task(self._job(work, outcome), name=f"{self.name}:{key}")
        self._jobs[key] = task
        task.add_done_callback(lambda done: self._job_ended(key, done))
        task.add_done_callback(lambda _: work.close())  # one cancelled before its first step never began `work`

    def cancel_job(self, key: Hashable) -> bool:
        """Cancel one job; False when it has ended."""
        task = self._jobs.get(key)
        return task.cancel() if task is not None else False

    async def start(self) -> None:
        """Nothing to wait for: an actor is ready at once."""
        self._running_loop()

    async def run(self) -> None:
        """Return when the actor is closed; raise what ended it (M6)."""
        waiter = self._running_loop().create_future()
        self._waiters.append(waiter)
        self._settle()
        await waiter

    async def drain(self, timeout_ns: int) -> bool:
        """Refuse outsiders, finish what waits and what runs, then close. False when `timeout_ns` cut it short."""
        if self._state is ActorState.OPEN:
            self._state = ActorState.DRAINING
        finished = True
        if self._state is not ActorState.CLOSED and (self._mailbox.waiting or self._jobs):
            idle: asyncio.Future[None] = self._running_loop().create_future()
            self._idle_waiters.append(idle)
            try:
                async with asyncio.timeout(timeout_ns / 1e9):
                    await idle
            except TimeoutError:
                finished = False
                _log.warning(
                    "drain cut short actor=%s waiting=%d jobs=%d", self.name, len(self._mailbox), len(self._jobs)
                )
        await self.close()
        return finished

    async def close(self) -> None:
        """Stop at once: cancel the jobs in the order they began and wait for them; forget what waits."""
        self._shut()
        jobs = list(self._jobs.values())
        current = asyncio.current_task()
        await asyncio.gather(*(job for job in jobs if job is not current), return_exceptions=True)
        self._settle()

    @property
    def state(self) -> ActorState:
        return self._state

    def stats(self) -> ActorStats:
        return ActorStats(
            self.name,
            self._state,
            self._mailbox.stats(),
            self._handled,
            self._turns,
            tuple(str(key) for key in self._jobs),
        )

    def _running_loop(self) -> asyncio.AbstractEventLoop:
        if self._loop is None:
            self._loop = asyncio.get_running_loop()
        return self._loop

    def _schedule(self) -> None:
        self._turn = self._running_loop().call_soon(self._take_turn)

    def _take_turn(self) -> None:
        mailbox, step, perform = self._mailbox, self._machine.step, self.perform
        until_ns = self._monotonic_ns() + ACTOR_TURN_NS
        done = 0
        try:
            while mailbox.waiting and done < ACTOR_TURN_EVENTS:
                done += 1
                for effect in step(mailbox.take()):
                    perform(effect)  # never awaits; IO started here ends as another event
                if not done & 7 and self._monotonic_ns() > until_ns:
                    break
            self.turn_over()
        except Exception as error:  # the boundary of M6: whatever it is, run() raises it
            self._fail(error)
            return
        finally:
            self._turns += 1
            self._handled += done
        self._turn = None
        if self._state is ActorState.CLOSED:
            return
        if mailbox.waiting:
            self._schedule()
        elif not self._jobs:
            self._wake_idle()

    async def _job(
        self, work: Coroutine[object, object, ResultT], outcome: Callable[[ResultT | KVError], EventT]
    ) -> None:
        result: ResultT | KVError
        try:
            result = await work
        except KVError as error:
            result = error
        self.complete(outcome(result))

    def _job_ended(self, key: Hashable, task: asyncio.Task[None]) -> None:
        del self._jobs[key]
        error = None if task.cancelled() else task.exception()
        if error is not None and self._state is not ActorState.CLOSED:
            self._fail(error)
        elif not self._jobs and not self._mailbox.waiting and self._turn is None:
            self._wake_idle()

    def _fail(self, error: BaseException) -> None:
        self._failure = error
        if not self._waiters:
            # Nobody is in run(): say it where the process listens for failures nobody waits for.
            context = {"message": f"actor {self.name} failed and nobody runs it", "exception": error}
            self._running_loop().call_exception_handler(context)
        self._shut()
        self.failed(error)
        self._settle()

    def _shut(self) -> None:
        self._state = ActorState.CLOSED
        if self._turn is not None:
            self._turn.cancel()
            self._turn = None
        self._mailbox.clear()
        for job in list(self._jobs.values()):
            job.cancel()
        self._wake_idle()

    def _settle(self) -> None:
        """Tell those in `run()` how it ended, once it has."""
        if self._state is not ActorState.CLOSED:
            return
        waiters, self._waiters = self._waiters, []
        for waiter in waiters:
            if waiter.done():
                continue
            if self._failure is None:
                waiter.set_result(None)
            else:
                waiter.set_exception(self._failure)

    def _wake_idle(self) -> None:
        waiters, self._idle_waiters = self._idle_waiters, []
        for waiter in waiters:
            if not waiter.done():
                waiter.set_result(None)


def _no_time() -> int:
    return 0

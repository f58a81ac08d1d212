"""One transfer on the side that posts it, as a pure machine.

A transfer is a growing set of units. Each unit is queued, in flight, backing off after bad bytes, parked while there
is no link, or done. The machine decides what to post again, when the caller has its answer, and, apart from that, when
the memory is free: a unit in flight may still be read or written by the transport, whatever the caller was told.

T1: the caller is answered exactly once. T2: `Release` comes once, after the answer, and never while a unit is in
flight. T3: DONE only if no more units can come and every one is verified at its destination.
"""

from dataclasses import dataclass
from enum import Enum
from typing import Final

from kv_core.errors import KVError
from kv_transport import limits
from kv_transport.errors import InvalidTransition
from kv_transport.types import XferState

BACKOFF_FIRST_NS: Final = 10_000_000


class Bounce(Enum):
    """Why a unit came back."""

    BAD_BYTES = "bad_bytes"
    LINK = "link"
    FATAL = "fatal"


@dataclass(frozen=True, slots=True)
class Added:
    """New units, to be posted."""

    units: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Sealed:
    """No more units will come."""


@dataclass(frozen=True, slots=True)
class Flown:
    """A unit was handed to the transport."""

    unit: int


@dataclass(frozen=True, slots=True)
class Adopted:
    """A parked unit was handed to the transport before this machine knew of it."""

    unit: int


@dataclass(frozen=True, slots=True)
class Landed:
    """A unit is verified at its destination."""

    unit: int


@dataclass(frozen=True, slots=True)
class Bounced:
    """A unit came back; the transport no longer touches its memory."""

    unit: int
    bounce: Bounce
    error: KVError


@dataclass(frozen=True, slots=True)
class BackoffOver:
    """A unit's pause ended."""

    unit: int


@dataclass(frozen=True, slots=True)
class LinkGone:
    """There is no link for now; nothing can be posted."""


@dataclass(frozen=True, slots=True)
class LinkBack:
    """There is a link; the peer says which parked units it has already."""

    arrived: frozenset[int]


@dataclass(frozen=True, slots=True)
class Stopped:
    """Cancelled, out of time, or no link can be made."""

    error: KVError


Event = Added | Sealed | Flown | Adopted | Landed | Bounced | BackoffOver | LinkGone | LinkBack | Stopped


@dataclass(frozen=True, slots=True)
class Enqueue:
    """Give these units to the scheduler."""

    units: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Dequeue:
    """Take these units from the scheduler."""

    units: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class EnqueueAfter:
    """Come back with `BackoffOver` after this pause."""

    unit: int
    delay_ns: int


@dataclass(frozen=True, slots=True)
class Succeed:
    """Tell the caller that all is there."""


@dataclass(frozen=True, slots=True)
class Fail:
    """Tell the caller why not."""

    error: KVError


@dataclass(frozen=True, slots=True)
class Release:
    """No memory of this transfer is in use any more."""


Effect = Enqueue | Dequeue | EnqueueAfter | Succeed | Fail | Release


class _Unit(Enum):
    QUEUED = "queued"
    FLYING = "flying"
    BACKOFF = "backoff"
    PARKED = "parked"
    DONE = "done"


class Transfer:
    """See the module. `linked` says whether there is a link to begin with."""

    def __init__(self, name: str, *, linked: bool = True) -> None:
        self.name: Final = name
        self.state = XferState.PENDING
        self.error: KVError | None = None
        self.retries = 0
        self._linked = linked
        self._sealed = False
        self._units: dict[int, _Unit] = {}
        self._attempts: dict[int, int] = {}
        self._flying = 0
        self._done = 0

    @property
    def units_left(self) -> int:
        return len(self._units) - self._done

    def is_parked(self, unit: int) -> bool:
        """Whether the unit waits for a link."""
        return self._units.get(unit) is _Unit.PARKED

    def step(self, event: Event) -> list[Effect]:
        """The only way to change the state."""
        match self.state:
            case XferState.PENDING | XferState.POSTED:
                return self._running(event)
            case XferState.ABANDONED:
                return self._abandoned(event)
            case _:
                return self._over(event)

    def _running(self, event: Event) -> list[Effect]:
        match event:
            case Added(units):
                return self._add(units)
            case Sealed():
                self._sealed = True
                return self._finish_if_complete()
            case Flown(unit):
                self._move(unit, _Unit.QUEUED, _Unit.FLYING, event)
                self._flying += 1
                return []
            case Adopted(unit):
                self._move(unit, _Unit.PARKED, _Unit.FLYING, event)
                self._flying += 1
                return []
            case Landed(unit):
                self._move(unit, _Unit.FLYING, _Unit.DONE, event)
                self._flying -= 1
                self._done += 1
                return self._finish_if_complete()
            case Bounced(unit, bounce, error):
                self._move(unit, _Unit.FLYING, _Unit.PARKED, event)
                self._flying -= 1
                return self._retry_or_fail(unit, bounce, error)
            case BackoffOver(unit):
                self._move(unit, _Unit.BACKOFF, _Unit.PARKED, event)
                return self._requeue((unit,))
            case LinkGone():
                return self._park()
            case LinkBack(arrived):
                return self._resume(arrived)
            case Stopped(error):
                return self._fail(error)

    def _abandoned(self, event: Event) -> list[Effect]:
        match event:
            case Landed(unit):
                self._move(unit, _Unit.FLYING, _Unit.DONE, event)
                self._done += 1
            case Bounced(unit, _, _):
                self._move(unit, _Unit.FLYING, _Unit.PARKED, event)
            case BackoffOver() | LinkGone() | LinkBack() | Stopped():
                return []
            case Added() | Sealed() | Flown() | Adopted():
                raise self._illegal(event)
        self._flying -= 1
        if self._flying:
            return []
        self.state = XferState.FAILED
        return [Release()]

    def _over(self, event: Event) -> list[Effect]:
        match event:
            case Stopped() | BackoffOver() | LinkGone() | LinkBack():
                return []
            case _:
                raise self._illegal(event)

    def _add(self, units: tuple[int, ...]) -> list[Effect]:
        if self._sealed or any(unit in self._units for unit in units):
            raise self._illegal(Added(units))
        self.state = XferState.POSTED
        self._units.update(dict.fromkeys(units, _Unit.PARKED))
        return self._requeue(units)

    def _requeue(self, units: tuple[int, ...]) -> list[Effect]:
        if not self._linked or not units:
            return []
        self._units.update(dict.fromkeys(units, _Unit.QUEUED))
        return [Enqueue(units)]

    def checksum_failures(self, unit: int) -> int:
        """How often the bytes of a unit failed their checksum so far."""
        return self._attempts.get(unit, 0)

    def _retry_or_fail(self, unit: int, bounce: Bounce, error: KVError) -> list[Effect]:
        match bounce:
            case Bounce.FATAL:
                return self._fail(error)
            case Bounce.LINK:
                # It stays parked: `LinkGone` has come or is about to, `LinkBack` decides.
                self.retries += 1
                return []
            case Bounce.BAD_BYTES:
                attempt = self._attempts.get(unit, 0) + 1
                self._attempts[unit] = attempt
                if attempt > limits.CHECKSUM_RETRIES_MAX:
                    return self._fail(error)
                self.retries += 1
                self._units[unit] = _Unit.BACKOFF
                return [EnqueueAfter(unit, BACKOFF_FIRST_NS << (attempt - 1))]

    def _park(self) -> list[Effect]:
        self._linked = False
        queued = tuple(unit for unit, state in self._units.items() if state is _Unit.QUEUED)
        self._units.update(dict.fromkeys(queued, _Unit.PARKED))
        return [Dequeue(queued)] if queued else []

    def _resume(self, arrived: frozenset[int]) -> list[Effect]:
        self._linked = True
        parked = [unit for unit, state in self._units.items() if state is _Unit.PARKED]
        for unit in parked:
            if unit in arrived:
                self._units[unit] = _Unit.DONE
                self._done += 1
        effects = self._requeue(tuple(unit for unit in parked if unit not in arrived))
        return effects + self._finish_if_complete()

    def _fail(self, error: KVError) -> list[Effect]:
        self.error = error
        queued = tuple(unit for unit, state in self._units.items() if state is _Unit.QUEUED)
        self._units.update(dict.fromkeys(queued, _Unit.PARKED))
        effects: list[Effect] = [Dequeue(queued)] if queued else []
        effects.append(Fail(error))
        if self._flying:
            # The caller has its answer, the memory stays pinned until the transport lets go.
            self.state = XferState.ABANDONED
        else:
            self.state = XferState.FAILED
            effects.append(Release())
        return effects

    def _finish_if_complete(self) -> list[Effect]:
        if not self._sealed or self.units_left:
            return []
        self.state = XferState.DONE
        return [Succeed(), Release()]

    def _move(self, unit: int, before: _Unit, after: _Unit, event: Event) -> None:
        if self._units.get(unit) is not before:
            raise self._illegal(event)
        self._units[unit] = after

    def _illegal(self, event: Event) -> InvalidTransition:
        return InvalidTransition(machine=f"transfer {self.name}", state=self.state.value, event=repr(event))

    def check(self) -> None:
        """Assert the invariants."""
        states = list(self._units.values())
        assert self._flying == states.count(_Unit.FLYING)
        assert self._done == states.count(_Unit.DONE)
        assert (self.state is XferState.ABANDONED) <= (self._flying > 0)
        if self.state in (XferState.DONE, XferState.FAILED):
            assert self._flying == 0
        if self.state is XferState.DONE:
            assert self._sealed and self._done == len(self._units)

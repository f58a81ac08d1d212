"""What became of the blocks that one followed engine told of, for whoever asks later. Pure.

To be asked only of blocks that are not held: one that came back keeps its former end here until it ends again.

R1: bounded. The latest ends are kept; of blocks that end together, those that were told of last.
R2: an engine that clears a million blocks stops nobody: what ends by the thousand is written down, and let
    go of, in parts.
"""

import itertools
from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from enum import Enum
from typing import Any, Final, Generic, TypeVar

from kv_services.kv_events.wire import EngineHash

MAX_GONE: Final = 65_536
"""Ends of blocks of one engine that are remembered. About 20 MB."""
AT_ONCE: Final = 1_000
"""So many ends are written down in one go, which takes less than a millisecond; more of them a part at a time."""

_Known = TypeVar("_Known")


class Fate(Enum):
    """How a block ended."""

    REMOVED = "the engine removed it"
    CLEARED = "the engine cleared everything"
    DROPPED = "the follower dropped everything that it knew of the engine"


@dataclass(frozen=True, slots=True)
class EventRef:
    """One batch of events of an engine.

    Attributes:
        life: which of the engine's numberings it is of, as the follower counts them.
        sequence: its number.
        sent_s: when it was sent, by the engine's own clock; seconds since 1970.
    """

    life: int
    sequence: int
    sent_s: float

    def __str__(self) -> str:
        try:
            sent = datetime.fromtimestamp(self.sent_s, UTC).isoformat(timespec="milliseconds")
        except (ValueError, OverflowError, OSError):
            sent = f"{self.sent_s} s"  # any number may stand in a peer's event
        return f"event {self.sequence}, sent {sent} by its own clock"


@dataclass(frozen=True, slots=True)
class Gone:
    """The end of a block, or of several at once.

    Attributes:
        event: the event that says so; of a drop, the one at which it was noticed.
        cause: why the follower dropped it; empty if the engine did it.
    """

    fate: Fate
    event: EventRef
    cause: str = ""


@dataclass(slots=True)
class _Passing(Generic[_Known]):
    """Blocks that ended together and are not written down yet."""

    into: OrderedDict[bytes, Gone]
    known: dict[EngineHash, _Known]
    name_of: Callable[[_Known], bytes]
    gone: Gone


class EngineRecord:
    """See the module. Blocks go by the bytes of their `BlockHash.sequence`."""

    def __init__(self, limit: int = MAX_GONE, at_once: int = AT_ONCE) -> None:
        self._limit = limit
        self._at_once = at_once
        # Oldest ends first, in each and over all. What ended together by the thousand has an age of its own, which is
        # filled while later ends go into the next.
        self._ages: deque[OrderedDict[bytes, Gone]] = deque([OrderedDict()])
        self._passing: deque[_Passing[Any]] = deque()
        self._count = 0
        self.forgot = False
        """Whether any end was left out or has been forgotten."""

    def __len__(self) -> int:
        return self._count

    def removed(self, name: bytes, gone: Gone) -> None:
        """One block ended."""
        age = self._ages[-1]
        self._count += name not in age
        age[name] = gone
        age.move_to_end(name)
        self._trim()

    def all_gone(self, known: dict[EngineHash, _Known], name_of: Callable[[_Known], bytes], gone: Gone) -> None:
        """Everything that the engine had ended.

        Args:
            known: all of it, in the order in which it was told of. It is given away: nobody else may use it.
        """
        self.forgot = self.forgot or len(known) > self._limit
        if len(known) <= self._at_once:
            for value in known.values():
                self.removed(name_of(value), gone)
            return
        into = OrderedDict[bytes, Gone]()
        self._ages += (into, OrderedDict())
        self._passing.append(_Passing(into, known, name_of, gone))

    def tidy(self, count: int) -> bool:
        """Write down, or let go of, as many of the ends that came by the thousand; whether there are more."""
        while self._passing and count > 0:
            now = self._passing[0]
            for _ in range(min(count, len(now.known))):
                self._pass_one(now)
                count -= 1
            if not now.known:
                self._passing.popleft()
        return bool(self._passing)

    def get(self, name: bytes) -> Gone | None:
        """How a block ended last, if that is remembered."""
        for now in self._passing:
            # Rare: somebody asks in the moment after. What is beyond the limit is let go of later.
            while now.known and self._has_room(now.into):
                self._pass_one(now)
        return next((age[name] for age in reversed(self._ages) if name in age), None)

    def _pass_one(self, now: _Passing[Any]) -> None:
        _, value = now.known.popitem()  # what was told of last comes first
        if not self._has_room(now.into):
            self.forgot = True
            return
        name = now.name_of(value)
        if name not in now.into:
            now.into[name] = now.gone
            now.into.move_to_end(name, last=False)
            self._count += 1
            self._trim()

    def _has_room(self, age: OrderedDict[bytes, Gone]) -> bool:
        """Whether one more end in this age would stay: there is room, or an older one makes it."""
        return self._count < self._limit or any(itertools.takewhile(lambda older: older is not age, self._ages))

    def _trim(self) -> None:
        while self._count > self._limit:
            oldest = next(age for age in self._ages if age)
            oldest.popitem(last=False)
            self._count -= 1
            self.forgot = True
        filling = {id(now.into) for now in self._passing}
        while len(self._ages) > 1 and not self._ages[0] and id(self._ages[0]) not in filling:
            self._ages.popleft()

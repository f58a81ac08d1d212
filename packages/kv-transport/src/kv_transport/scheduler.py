"""Which unit goes next to one peer. Pure.

Order: priority, then layer, then age. At most `window` units are in flight, and none joins them once they are of
`window_bytes`: urgent work waits for all of them, however large they are. Ageing is counted in picks, not in time: a
class that was passed over `ageing` times gets the next pick, and within a class every `ageing`-th pick takes the oldest
unit whatever its layer, so that neither LOW work nor the deep layers of an old request starve.

S1: never more than `window` in flight, and less than `window_bytes` of all but one of them. S2: a unit is queued, in
flight, or unknown, never two of them. S3: with units waiting in a class, it gets at least one of every `ageing + 2`
picks.
"""

import heapq
from collections import deque
from typing import Final

from kv_transport import limits
from kv_transport.errors import InvalidDescriptor, InvalidTransition, TransferTooLarge
from kv_transport.types import TransferPriority

AGEING_PICKS: Final = 16


class _Class:
    """The waiting units of one priority. Removed ones stay in the queues until they surface."""

    __slots__ = ("by_age", "by_layer", "passed_over", "picks", "waiting")

    def __init__(self) -> None:
        self.by_layer: list[tuple[int, int, int]] = []
        self.by_age: deque[tuple[int, int]] = deque()
        self.waiting: dict[int, int] = {}
        self.passed_over = 0
        self.picks = 0

    def add(self, key: int, layer: int, serial: int) -> None:
        self.waiting[key] = serial
        heapq.heappush(self.by_layer, (layer, serial, key))
        self.by_age.append((serial, key))

    def pop(self, oldest: bool) -> int:
        while True:
            if oldest:
                serial, key = self.by_age.popleft()
            else:
                _, serial, key = heapq.heappop(self.by_layer)
            if self.waiting.get(key) == serial:
                del self.waiting[key]
                self._forget_surfaced()
                return key

    def _forget_surfaced(self) -> None:
        """Keep both queues from growing beyond what waits."""
        if not self.waiting:
            self.by_layer.clear()
            self.by_age.clear()
            return
        while self.waiting.get(self.by_age[0][1]) != self.by_age[0][0]:
            self.by_age.popleft()
        if len(self.by_layer) > 2 * len(self.waiting) + 64:
            self.by_layer = [entry for entry in self.by_layer if self.waiting.get(entry[2]) == entry[1]]
            heapq.heapify(self.by_layer)


class Scheduler:
    """Units are named by the caller's integers.

    `ageing` is at least 2: with 1, two starved classes could hold up the urgent one for longer than S3 says.
    """

    def __init__(
        self,
        window: int = limits.WINDOW_SIZE,
        ageing: int = AGEING_PICKS,
        window_bytes: int = limits.WINDOW_BYTES,
    ) -> None:
        if window < 1 or ageing < 2 or window_bytes < 1:
            found = f"{window}, {ageing} and {window_bytes}"
            raise InvalidDescriptor(what="window, ageing and bytes", value=found, reason="at least 1, 2 and 1")
        self._window = window
        self._window_bytes = window_bytes
        self._ageing = ageing
        self._classes = {priority: _Class() for priority in TransferPriority}
        self._flying: set[int] = set()
        self._nbytes: dict[int, int] = {}  # of each unit that is waiting or in flight
        self._passing = 0
        self._flying_nbytes = 0
        self._serial = 0
        self._waiting = 0

    def __len__(self) -> int:
        """Units waiting."""
        return self._waiting

    @property
    def in_flight(self) -> int:
        return len(self._flying) + self._passing

    @property
    def nbytes_in_flight(self) -> int:
        return self._flying_nbytes

    @property
    def _has_room(self) -> bool:
        return len(self._flying) + self._passing < self._window and self._flying_nbytes < self._window_bytes

    def add(self, key: int, priority: TransferPriority, layer: int, nbytes: int) -> None:
        """Queue a unit.

        Raises:
            TransferTooLarge: `QUEUED_UNITS_MAX` units wait already.
        """
        if key in self._flying or any(key in cls.waiting for cls in self._classes.values()):
            raise InvalidTransition(machine="scheduler", state="known", event=f"add({key})")
        if len(self) >= limits.QUEUED_UNITS_MAX:
            raise TransferTooLarge(what="queue of units", size=len(self) + 1, limit=limits.QUEUED_UNITS_MAX)
        self._serial += 1
        self._waiting += 1
        self._nbytes[key] = nbytes
        self._classes[priority].add(key, layer, self._serial)

    def pass_through(self, nbytes: int) -> bool:
        """Count a unit without a name as in flight, if nothing waits that it would overtake and the window has room."""
        if self._waiting or not self._has_room:
            return False
        self._passing += 1
        self._flying_nbytes += nbytes
        return True

    def passed(self, nbytes: int) -> None:
        """A unit of so many bytes that passed through came to an end, good or bad."""
        if not self._passing:
            raise InvalidTransition(machine="scheduler", state="none passes", event="passed()")
        self._passing -= 1
        self._flying_nbytes -= nbytes

    def remove(self, key: int) -> bool:
        """Forget a unit that waits; False if it does not (it may be in flight)."""
        removed = any(cls.waiting.pop(key, None) is not None for cls in self._classes.values())
        self._waiting -= removed
        if removed:
            del self._nbytes[key]
        return removed

    def pick(self) -> list[int]:
        """The units to post now; they are in flight until `settle`."""
        picked = []
        while self._waiting and self._has_room:
            key = self._next()
            if key is None:
                break
            self._flying.add(key)
            self._flying_nbytes += self._nbytes[key]
            picked.append(key)
        return picked

    def settle(self, key: int) -> None:
        """A unit in flight came to an end, good or bad."""
        if key not in self._flying:
            raise InvalidTransition(machine="scheduler", state="not in flight", event=f"settle({key})")
        self._flying.discard(key)
        self._flying_nbytes -= self._nbytes.pop(key)

    def _next(self) -> int | None:
        busy = [cls for cls in self._classes.values() if cls.waiting]
        if not busy:
            return None
        chosen = next((cls for cls in reversed(busy) if cls.passed_over >= self._ageing), busy[0])
        for cls in busy:
            cls.passed_over = 0 if cls is chosen else cls.passed_over + 1
        chosen.picks += 1
        self._waiting -= 1
        return chosen.pop(oldest=chosen.picks % self._ageing == 0)

    def check(self) -> None:
        """Assert the invariants."""
        assert 0 <= self._passing and self.in_flight <= self._window
        waiting = [key for cls in self._classes.values() for key in cls.waiting]
        assert len(waiting) == len(set(waiting)) == self._waiting
        assert not self._flying.intersection(waiting)
        assert self._nbytes.keys() == self._flying.union(waiting)
        assert self._flying_nbytes >= sum(self._nbytes[key] for key in self._flying)

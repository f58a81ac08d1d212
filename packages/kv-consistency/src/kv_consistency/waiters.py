"""Reads that wait: for dots to be applied here, and then for a request to be long enough.

Decides who must be looked at again after a change; whether a waiter is satisfied is asked of the replica. A waiter is
told exactly once.

W1: a waiter is listed under every origin it still misses dots of, under its request if it named one, and in the
deadline heap; under nothing else.
"""

import heapq
from collections.abc import Iterable
from dataclasses import dataclass

from kv_consistency import limits
from kv_consistency.errors import InvalidUpdateError, LimitReachedError
from kv_consistency.events import WaitFor
from kv_consistency.version_vector import Origin


@dataclass(slots=True)
class _Waiter:
    event: WaitFor
    missing: dict[Origin, int]


class Waiters:
    """The reads that wait at one replica."""

    __slots__ = ("_by_origin", "_by_request", "_deadlines", "_waiters")

    def __init__(self) -> None:
        self._waiters: dict[int, _Waiter] = {}
        self._by_origin: dict[Origin, dict[int, None]] = {}
        self._by_request: dict[str, dict[int, None]] = {}
        self._deadlines: list[tuple[int, int]] = []

    def __len__(self) -> int:
        return len(self._waiters)

    def refuse(self, waiter: int) -> None:
        """Raises for a waiter that cannot be added.

        Raises:
            InvalidUpdateError: its number is in use. LimitReachedError: too many wait.
        """
        if waiter in self._waiters:
            raise InvalidUpdateError(what=f"waiter {waiter}", reason="its number is in use")
        if len(self._waiters) >= limits.MAX_WAITERS:
            raise LimitReachedError(what="waiters", have=len(self._waiters), limit=limits.MAX_WAITERS)

    def add(self, event: WaitFor, missing: dict[Origin, int]) -> None:
        """Wait; `missing` are the dots of its token that are not applied."""
        self._waiters[event.waiter] = _Waiter(event, missing)
        for origin in missing:
            self._by_origin.setdefault(origin, {})[event.waiter] = None
        if event.request_id is not None:
            self._by_request.setdefault(event.request_id, {})[event.waiter] = None
        heapq.heappush(self._deadlines, (event.deadline_ns, event.waiter))

    def advanced(self, origin: Origin, applied: int) -> list[WaitFor]:
        """The origin is applied up to there: the waiters whose token is complete now."""
        complete = []
        for number in list(self._by_origin.get(origin, ())):
            waiter = self._waiters[number]
            if waiter.missing[origin] <= applied:
                self._unlist(origin, number)
                del waiter.missing[origin]
                if not waiter.missing:
                    complete.append(waiter.event)
        return complete

    def on_request(self, request_id: str) -> list[WaitFor]:
        """Waiters for that request whose token is complete."""
        numbers = self._by_request.get(request_id, ())
        return [self._waiters[number].event for number in numbers if not self._waiters[number].missing]

    def on_origin(self, origin: Origin) -> list[WaitFor]:
        """Waiters that miss dots of that origin."""
        return [self._waiters[number].event for number in self._by_origin.get(origin, ())]

    def complete(self) -> list[WaitFor]:
        """All waiters whose token is complete."""
        return [waiter.event for waiter in self._waiters.values() if not waiter.missing]

    def expired(self, now_ns: int) -> list[WaitFor]:
        """Waiters whose deadline has come."""
        events: dict[int, WaitFor] = {}
        while self._deadlines and self._deadlines[0][0] <= now_ns:
            deadline, number = heapq.heappop(self._deadlines)
            waiter = self._waiters.get(number)
            if waiter is not None and waiter.event.deadline_ns == deadline:
                events[number] = waiter.event
        return list(events.values())

    def remove(self, number: int) -> None:
        """It was told, or nobody waits any more."""
        waiter = self._waiters.pop(number, None)
        if waiter is None:
            return
        for origin in waiter.missing:
            self._unlist(origin, number)
        request = waiter.event.request_id
        if request is not None:
            listed = self._by_request[request]
            del listed[number]
            if not listed:
                del self._by_request[request]
        if len(self._deadlines) > 2 * len(self._waiters) + 64:
            self._deadlines = [(w.event.deadline_ns, w.event.waiter) for w in self._waiters.values()]
            heapq.heapify(self._deadlines)

    def check(self) -> None:
        """Assert W1."""
        for number, waiter in self._waiters.items():
            assert all(number in self._by_origin[origin] for origin in waiter.missing)
            request = waiter.event.request_id
            assert request is None or number in self._by_request[request]
            assert (waiter.event.deadline_ns, number) in self._deadlines
        listed: Iterable[int] = [n for table in (*self._by_origin.values(), *self._by_request.values()) for n in table]
        assert all(number in self._waiters for number in listed)

    def _unlist(self, origin: Origin, number: int) -> None:
        listed = self._by_origin[origin]
        del listed[number]
        if not listed:
            del self._by_origin[origin]

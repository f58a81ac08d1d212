"""Decides which calls wait for a reply, and which of them have waited long enough.

Pure: ids and times come in, entries go out. It knows no socket, no message and no clock.

P1: an id is waiting at most once, and leaves the table exactly once: resolved, removed or expired.
P2: `expire(now)` returns exactly the entries whose deadline is at or before `now`, earliest first.
P3: memory is bounded by the entries that wait: deadlines of entries that left are swept before they outnumber them.
"""

import heapq
from dataclasses import dataclass
from typing import Generic, TypeVar

from kv_core.errors import LocalProtocolError

EntryT = TypeVar("EntryT")

_SWEEP_FLOOR = 256


@dataclass(frozen=True, slots=True)
class PendingStats:
    """A snapshot of a pending table."""

    waiting: int
    added: int
    resolved: int
    expired: int
    removed: int
    strays: int


class PendingTable(Generic[EntryT]):
    """Entries that wait for an answer, each with an id and a deadline."""

    __slots__ = ("_added", "_deadlines", "_entries", "_expired", "_removed", "_resolved", "_strays")

    def __init__(self) -> None:
        self._entries: dict[int, tuple[int, EntryT]] = {}
        # A heap that may still name entries which have left; they are skipped, and swept when they are the majority.
        self._deadlines: list[tuple[int, int]] = []
        self._added = self._resolved = self._expired = self._removed = self._strays = 0

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, call_id: int) -> bool:
        return call_id in self._entries

    def add(self, call_id: int, deadline_ns: int, entry: EntryT) -> None:
        """Let `entry` wait until `deadline_ns`."""
        if call_id in self._entries:
            raise LocalProtocolError(detail=f"call {call_id} waits already")
        self._entries[call_id] = (deadline_ns, entry)
        heapq.heappush(self._deadlines, (deadline_ns, call_id))
        self._added += 1

    def resolve(self, call_id: int) -> EntryT | None:
        """The entry whose answer came, or None for a stray: late, duplicate or never asked for."""
        found = self._entries.pop(call_id, None)
        if found is None:
            self._strays += 1
            return None
        self._resolved += 1
        if len(self._deadlines) > 2 * len(self._entries) + _SWEEP_FLOOR:
            self._sweep()
        return found[1]

    def remove(self, call_id: int) -> EntryT | None:
        """Take an entry out without an answer (its caller gave up); None when it had left already."""
        found = self._entries.pop(call_id, None)
        if found is None:
            return None
        self._removed += 1
        if len(self._deadlines) > 2 * len(self._entries) + _SWEEP_FLOOR:
            self._sweep()
        return found[1]

    def expire(self, now_ns: int) -> list[tuple[int, EntryT]]:
        """Take out every entry whose deadline has come, earliest first."""
        gone: list[tuple[int, EntryT]] = []
        heap = self._deadlines
        while heap and heap[0][0] <= now_ns:
            deadline_ns, call_id = heapq.heappop(heap)
            found = self._entries.get(call_id)
            # An id may be used again after it left: only the deadline it waits with now counts.
            if found is not None and found[0] == deadline_ns:
                del self._entries[call_id]
                gone.append((call_id, found[1]))
        self._expired += len(gone)
        return gone

    def next_deadline_ns(self) -> int | None:
        """The earliest deadline of the entries that wait."""
        heap = self._deadlines
        while heap:
            deadline_ns, call_id = heap[0]
            found = self._entries.get(call_id)
            if found is not None and found[0] == deadline_ns:
                return deadline_ns
            heapq.heappop(heap)
        return None

    def take_all(self) -> list[tuple[int, EntryT]]:
        """Take out everything, in the order it was added: the table's owner ends."""
        gone = [(call_id, entry) for call_id, (_, entry) in self._entries.items()]
        self._entries.clear()
        self._deadlines.clear()
        self._removed += len(gone)
        return gone

    def entries(self) -> list[tuple[int, int, EntryT]]:
        """Every waiting `(id, deadline_ns, entry)`, oldest first."""
        return [(call_id, deadline_ns, entry) for call_id, (deadline_ns, entry) in self._entries.items()]

    def stats(self) -> PendingStats:
        return PendingStats(len(self._entries), self._added, self._resolved, self._expired, self._removed, self._strays)

    def check(self) -> None:
        """Assert the invariants."""
        named = set(self._deadlines)
        assert all((deadline, call) in named for call, (deadline, _) in self._entries.items()), "an entry cannot expire"
        assert len(self._deadlines) <= 2 * len(self._entries) + _SWEEP_FLOOR + 1, "deadlines of the gone pile up"
        assert self._added == len(self._entries) + self._resolved + self._expired + self._removed

    def _sweep(self) -> None:
        self._deadlines = [(deadline_ns, call_id) for call_id, (deadline_ns, _) in self._entries.items()]
        heapq.heapify(self._deadlines)

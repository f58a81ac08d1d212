"""Blocks that a request asked to be kept for a while: evicted after all others, by priority.

Retention is a preference, not a pin: it holds no slot against a request that needs one, so it can neither leak nor
block. Wraps any policy, which goes on deciding among blocks that nobody asked to keep. Time comes in with the calls.

R1: while a slot without retention is offered, no retained one is the victim.
R2: among retained slots the lowest priority goes first, and of equal ones the least recently used.
R3: retention ends with its time or with the content, whichever is first; until then it can be raised and lowered.
"""

import heapq
from array import array
from collections.abc import Callable, Hashable, Sequence
from typing import Final

from kv_prefix.errors import InvalidRequestError
from kv_prefix.eviction import EvictionPolicy
from kv_prefix.eviction_queue import OfferedQueue

MAX_PRIORITY: Final = 100

_TICKS: Final = 1 << 64


class RetentionPolicy(EvictionPolicy):
    """An `EvictionPolicy` around another one, over the same slots.

    Args:
        inner: decides among slots that are not retained.
        capacity: slots.
    """

    def __init__(self, inner: EvictionPolicy, capacity: int) -> None:
        self._inner = inner
        self._queue = OfferedQueue(capacity)
        self._until = array("Q", bytes(8 * capacity))  # 0: not retained
        self._priority = bytearray(capacity)
        self._offered = bytearray(capacity)
        self._ends: list[tuple[int, int]] = []
        self._tick = 0
        self.num_retained = 0
        self.on_end: Callable[[int], None] | None = None
        """Told of each slot whose retention ended, by time or with its content."""

    def priority(self, slot: int) -> int:
        """With which priority a slot is retained; -1 when it is not."""
        return self._priority[slot] if self._until[slot] else -1

    def retain(self, slot: int, priority: int, until_ns: int) -> None:
        """Keep the content of a slot before others until `until_ns`; says anew what was said before.

        Raises:
            InvalidRequestError: a priority outside 0 to `MAX_PRIORITY`, or a time that no clock shows.
        """
        if not 0 <= priority <= MAX_PRIORITY:
            raise InvalidRequestError(name="priority", value=priority, rule=f"need 0 to {MAX_PRIORITY}")
        if not 0 < until_ns < 1 << 63:
            raise InvalidRequestError(name="until_ns", value=until_ns, rule="need a time after 0")
        if self._until[slot]:
            self._queue.forget(slot)
        else:
            self.num_retained += 1
            self._inner.withdraw(slot)
        self._priority[slot] = priority
        if self._until[slot] != until_ns:
            self._until[slot] = until_ns
            self._arm(until_ns, slot)
        self._rank(slot)
        if self._offered[slot]:
            self._queue.offer(slot)

    def expire(self, now_ns: int) -> int:
        """End the retentions whose time has passed; returns how many."""
        ended = 0
        while self._ends and self._ends[0][0] <= now_ns:
            until_ns, slot = heapq.heappop(self._ends)
            if self._until[slot] == until_ns:
                self._end(slot)
                ended += 1
                if self._offered[slot]:
                    self._inner.offer(slot)
        return ended

    def insert(self, slot: int, name: Hashable) -> None:
        self._inner.insert(slot, name)

    def insert_all(self, slots: Sequence[int], names: Sequence[Hashable]) -> None:
        self._inner.insert_all(slots, names)

    def touch(self, slot: int) -> None:
        self._inner.touch(slot)
        if self._until[slot]:
            self._rank(slot)

    def touch_all(self, slots: Sequence[int]) -> None:
        self._inner.touch_all(slots)
        if self.num_retained:
            for slot in slots:
                if self._until[slot]:
                    self._rank(slot)

    def offer(self, slot: int) -> None:
        self._offered[slot] = True
        if self._until[slot]:
            self._queue.offer(slot)
        else:
            self._inner.offer(slot)

    def withdraw(self, slot: int) -> None:
        self._offered[slot] = False
        if self._until[slot]:
            self._queue.withdraw(slot)
        else:
            self._inner.withdraw(slot)

    def victim(self) -> int | None:
        slot = self._inner.victim()
        if slot is None:
            slot = self._queue.pop()
        if slot is not None:
            self._offered[slot] = False
        return slot

    def evict_all(self, count: int, leave: Callable[[int], int]) -> None:
        if self.num_retained:
            super().evict_all(count, leave)
            return

        def left(slot: int) -> int:
            self._offered[slot] = False
            following = leave(slot)
            if following >= 0:
                self._offered[following] = True
            return following

        self._inner.evict_all(count, left)

    def remove(self, slot: int, evicted: bool) -> None:
        if self._until[slot]:
            self._end(slot)
        self._offered[slot] = False
        self._inner.remove(slot, evicted)

    def _rank(self, slot: int) -> None:
        self._tick += 1
        self._queue.rank[slot] = self._priority[slot] * _TICKS + self._tick

    def _end(self, slot: int) -> None:
        self._until[slot] = 0
        self._queue.forget(slot)
        self.num_retained -= 1
        if self.on_end is not None:
            self.on_end(slot)

    def _arm(self, until_ns: int, slot: int) -> None:
        heapq.heappush(self._ends, (until_ns, slot))
        # Whoever extends a retention again and again must not grow the heap for ever.
        if len(self._ends) > 2 * self.num_retained + 64:
            self._ends = [(until, slot) for slot, until in enumerate(self._until) if until]
            heapq.heapify(self._ends)

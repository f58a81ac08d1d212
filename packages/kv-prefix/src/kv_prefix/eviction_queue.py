"""What eviction policies are made of: a queue of slots of which only some may leave; names that have left."""

import heapq
from collections import OrderedDict
from collections.abc import Hashable, Iterable
from typing import Final

GHOSTS_PER_SLOT: Final = 2
MIN_GHOSTS: Final = 16_384
"""Evicted names whose access counts are remembered; a small pool needs many times its size to recognise a return."""


class OfferedQueue:
    """Slots by rank, lowest first, of which only the offered ones come out.

    `rank[slot]` may be raised at any time while the content stays, and set to anything after `forget`. While `heap` is
    empty nothing is offered.

    Q1: an offered slot has an entry in the heap with a rank not above its present one; an entry below it is corrected
        when it surfaces. So the top, once corrected, is the lowest-ranked offered slot. Other entries of a slot are
        leftovers; they surface after it, find it not offered, and are thrown away.
    """

    __slots__ = ("_offered", "_queued", "heap", "rank")

    def __init__(self, capacity: int) -> None:
        self.rank: list[float] = [0] * capacity
        self.heap: list[tuple[float, int]] = []
        self._offered = bytearray(capacity)
        self._queued = bytearray(capacity)

    def offer(self, slot: int) -> None:
        self._offered[slot] = True
        if not self._queued[slot]:
            self._queued[slot] = True
            heapq.heappush(self.heap, (self.rank[slot], slot))

    def withdraw(self, slot: int) -> None:
        self._offered[slot] = False

    def forget(self, slot: int) -> None:
        """The content is gone; the next one's rank may be lower."""
        self._offered[slot] = self._queued[slot] = False

    def lowest(self) -> int | None:
        """The lowest-ranked offered slot, which stays; None when nothing is offered."""
        heap = self.heap
        while heap:
            rank, slot = heap[0]
            if not self._offered[slot]:
                heapq.heappop(heap)
                self._queued[slot] = False
            elif self.rank[slot] > rank:
                heapq.heapreplace(heap, (self.rank[slot], slot))
            else:
                return slot
        return None

    def take_lowest(self) -> int:
        """Take out the slot that `lowest` just answered with."""
        slot = heapq.heappop(self.heap)[1]
        self._queued[slot] = self._offered[slot] = False
        return slot

    def pop(self) -> int | None:
        """The lowest-ranked offered slot, withdrawn; None when nothing is offered."""
        return None if self.lowest() is None else self.take_lowest()


class Ghosts:
    """Names that were evicted, with a number each; the oldest is forgotten first."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._numbers: OrderedDict[Hashable, int] = OrderedDict()

    def put(self, name: Hashable, number: int) -> None:
        self._numbers[name] = number
        self._numbers.move_to_end(name)
        if len(self._numbers) > self._limit:
            self._numbers.popitem(last=False)

    def take(self, name: Hashable) -> int:
        """The number of `name`, which is forgotten by this; 0 when it is not remembered."""
        return self._numbers.pop(name, 0)

    def take_all(self, names: Iterable[Hashable]) -> list[int]:
        """`take` of each in turn."""
        take = self._numbers.pop
        return [take(name, 0) for name in names]


def ghost_limit(capacity: int) -> int:
    """How many evicted names to remember."""
    return max(GHOSTS_PER_SLOT * capacity, MIN_GHOSTS)

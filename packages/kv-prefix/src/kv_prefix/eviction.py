"""Which evictable block goes first.

A policy orders *offered* slots: cached, unreferenced, and without a cached child, so that whatever the policy answers,
a chain shrinks from its tail and no suffix is orphaned. Policies know slots and the names of their content, nothing of
tokens, time or memory; recency is a counter of accesses.

E1: `victim()` returns an offered slot, or None when none is offered.
E2: every call is amortised O(log n) in the number of offered slots, and looks at no other.
E3: the same calls give the same victims in every process.
"""

from array import array
from collections.abc import Callable, Hashable, Sequence
from typing import Final, Protocol

from kv_prefix.adaptive_eviction import AdaptivePolicy
from kv_prefix.errors import UnknownPolicyError
from kv_prefix.eviction_queue import Ghosts, OfferedQueue, ghost_limit


class EvictionPolicy(Protocol):
    """A strategy over the slots `0 .. capacity - 1`."""

    def insert(self, slot: int, name: Hashable) -> None:
        """Content `name` was stored in `slot`; it is not offered yet."""
        ...

    def insert_all(self, slots: Sequence[int], names: Sequence[Hashable]) -> None:
        """`insert` of each in turn, at the cost of one call."""
        for slot, name in zip(slots, names, strict=True):
            self.insert(slot, name)

    def touch(self, slot: int) -> None:
        """The content of `slot` was used again."""
        ...

    def touch_all(self, slots: Sequence[int]) -> None:
        """`touch` of each in turn, at the cost of one call."""
        for slot in slots:
            self.touch(slot)

    def offer(self, slot: int) -> None:
        """`slot` may be evicted from now on."""
        ...

    def withdraw(self, slot: int) -> None:
        """`slot` may not be evicted until it is offered again."""
        ...

    def victim(self) -> int | None:
        """The offered slot to evict next, withdrawn by this call; the caller then calls `remove`."""
        ...

    def remove(self, slot: int, evicted: bool) -> None:
        """The content of `slot` is gone; `evicted` says whether for lack of room."""
        ...

    def evict_all(self, count: int, leave: Callable[[int], int]) -> None:
        """Evict `count` slots (none if it is negative), where so many can be, at the cost of one call.

        Args:
            leave: empties a slot; which one is to be offered because of it, negative when none is.
        """
        for _ in range(count):
            slot = self.victim()
            assert slot is not None, "S2: some cached slot is a leaf"
            self.remove(slot, True)
            following = leave(slot)
            if following >= 0:
                self.offer(following)


class LruPolicy(EvictionPolicy):
    """Least recently used first."""

    def __init__(self, capacity: int) -> None:
        self._queue = OfferedQueue(capacity)
        self._tick = 0

    def insert(self, slot: int, name: Hashable) -> None:
        self.touch(slot)

    def touch(self, slot: int) -> None:
        self._tick += 1
        self._queue.rank[slot] = self._tick

    def offer(self, slot: int) -> None:
        self._queue.offer(slot)

    def withdraw(self, slot: int) -> None:
        self._queue.withdraw(slot)

    def victim(self) -> int | None:
        return self._queue.pop()

    def remove(self, slot: int, evicted: bool) -> None:
        self._queue.forget(slot)


class FifoPolicy(LruPolicy):
    """First stored, first evicted."""

    def insert(self, slot: int, name: Hashable) -> None:
        super().touch(slot)

    def touch(self, slot: int) -> None:
        pass


class LfuPolicy(LruPolicy):
    """Least often used first; among equals the least recently used."""

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        self._uses = array("Q", bytes(8 * capacity))

    def insert(self, slot: int, name: Hashable) -> None:
        self._uses[slot] = 0
        self.touch(slot)

    def touch(self, slot: int) -> None:
        self._tick += 1
        self._uses[slot] += 1
        self._queue.rank[slot] = (self._uses[slot] << 64) | self._tick


class S3FifoPolicy(EvictionPolicy):
    """Three queues (Yang et al., "FIFO queues are all you need for cache eviction", SOSP 2023).

    New content waits in a small queue and is promoted if used there; the main queue gives second chances; names evicted
    from the small queue are remembered and go straight to the main one when they return. The small queue has half the
    room, where the paper has a tenth: prefixes come back later than web objects do.
    """

    SMALL_SHARE: Final = 0.5
    MAX_USES: Final = 3

    def __init__(self, capacity: int) -> None:
        self._small, self._main = OfferedQueue(capacity), OfferedQueue(capacity)
        self._in_main = bytearray(capacity)
        self._uses = bytearray(capacity)
        self._names: list[Hashable] = [None] * capacity
        self._small_size, self._small_target = 0, max(1, int(capacity * self.SMALL_SHARE))
        self._ghosts = Ghosts(ghost_limit(capacity))
        self._tick = 0

    def insert(self, slot: int, name: Hashable) -> None:
        self._names[slot] = name
        self._uses[slot] = 0
        self._in_main[slot] = self._ghosts.take(name) > 0
        self._small_size += not self._in_main[slot]
        self._enqueue(slot)

    def touch(self, slot: int) -> None:
        self._uses[slot] = min(self._uses[slot] + 1, self.MAX_USES)

    def offer(self, slot: int) -> None:
        (self._main if self._in_main[slot] else self._small).offer(slot)

    def withdraw(self, slot: int) -> None:
        (self._main if self._in_main[slot] else self._small).withdraw(slot)

    def victim(self) -> int | None:
        # Ends: each turn promotes a slot out of the small queue, or uses up one of at most MAX_USES uses in the main.
        while True:
            prefer_small = self._small_size > self._small_target
            slot = self._small.pop() if prefer_small else self._main.pop()
            if slot is None:
                slot = self._main.pop() if prefer_small else self._small.pop()
            if slot is None:
                return None
            if not self._uses[slot]:
                return slot
            if self._in_main[slot]:
                self._uses[slot] -= 1
            else:
                self._in_main[slot] = True
                self._small_size -= 1
                self._uses[slot] = 0
            self._enqueue(slot)
            self._main.offer(slot)

    def remove(self, slot: int, evicted: bool) -> None:
        if self._in_main[slot]:
            self._main.forget(slot)
        else:
            self._small.forget(slot)
            self._small_size -= 1
            if evicted:
                self._ghosts.put(self._names[slot], 1)
        self._names[slot] = None

    def _enqueue(self, slot: int) -> None:
        self._tick += 1
        (self._main if self._in_main[slot] else self._small).rank[slot] = self._tick


_POLICIES: Final[dict[str, Callable[[int], EvictionPolicy]]] = {
    "adaptive": AdaptivePolicy,
    "lru": LruPolicy,
    "fifo": FifoPolicy,
    "lfu": LfuPolicy,
    "s3fifo": S3FifoPolicy,
}
POLICIES: Final = tuple(_POLICIES)


def make_eviction_policy(name: str, capacity: int) -> EvictionPolicy:
    """A policy by the name users write: `adaptive` (the default), `lru`, `fifo`, `lfu` or `s3fifo`.

    Raises:
        UnknownPolicyError: there is no policy of that name; the message lists them.
    """
    if name not in _POLICIES:
        raise UnknownPolicyError(kind="eviction", name=name, known=", ".join(POLICIES))
    return _POLICIES[name](capacity)

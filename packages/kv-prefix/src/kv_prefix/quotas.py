"""What each tenant may hold of a pool: how many blocks, and how many of these kept by retention.

A slot in use is charged to the account whose request it was handed out to, until it is free again. An account that
would exceed its quota gives up its own blocks first: of its evictable leaves the least recently used one, those that
are retained last. Wraps the pool's eviction policy, to hear which slots are evictable; who goes when the pool as a
whole is full stays that policy's choice.

Q1: `used` of an account is the number of slots charged to it, `evictable` the cached ones among these.
Q2: a hand-out never leaves an account above its quota; where its own blocks cannot make room it fails at once.
Q3: namespaces of no account are charged to nobody and limited by nothing but the pool.
"""

import heapq
from array import array
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from kv_prefix import limits
from kv_prefix.errors import InvalidRequestError, TenantQuotaError
from kv_prefix.retention import RetentionPolicy

NOBODY: Final = 0
"""The account of namespaces that belong to none."""

_PRIORITY_STEP: Final = 1 << 48


@dataclass(frozen=True, slots=True)
class AccountLimits:
    """What one account may hold; None: as much as there is.

    Attributes:
        max_blocks: slots, whether in use or cached.
        max_retained: blocks that its requests may ask to be kept.
    """

    max_blocks: int | None = None
    max_retained: int | None = None


@dataclass(frozen=True, slots=True)
class AccountSource:
    """Who has an account.

    Attributes:
        limits: of each account, by its name.
        account_of: the account of a namespace digest; None when it is of none, or not known yet.
    """

    limits: Mapping[str, AccountLimits]
    account_of: Callable[[bytes], str | None]


@dataclass(frozen=True, slots=True)
class AccountStats:
    """A snapshot of one account."""

    used: int
    evictable: int
    retained: int
    max_blocks: int | None


class TenantQuotas:
    """The accounts of one pool; an `EvictionPolicy` around the pool's.

    Args:
        inner: decides who goes when the pool is full.
        capacity: slots.
        accounts: who has one, and its limits.

    Raises:
        InvalidRequestError: more accounts than can be kept.
    """

    def __init__(self, inner: RetentionPolicy, capacity: int, accounts: AccountSource) -> None:
        if len(accounts.limits) > limits.MAX_ACCOUNTS:
            raise InvalidRequestError(
                name="accounts", value=len(accounts.limits), rule=f"at most {limits.MAX_ACCOUNTS}"
            )
        self._inner = inner
        self._account_of = accounts.account_of
        self._names = ["", *accounts.limits]
        self._limits = [AccountLimits(), *accounts.limits.values()]
        self._number_of = {name: number for number, name in enumerate(self._names)}
        self._by_namespace: dict[bytes, int] = {}
        count = len(self._names)
        self.used, self.evictable, self.retained = [0] * count, [0] * count, [0] * count
        self._account = array("H", bytes(2 * capacity))
        self._last_use = array("Q", bytes(8 * capacity))
        self._offered, self._queued = bytearray(capacity), bytearray(capacity)
        self._heaps: list[list[tuple[int, int]]] = [[] for _ in range(count)]
        self._tick = 0
        inner.on_end = self._retention_ended

    def number(self, namespace: bytes) -> int:
        """The account that a namespace's blocks are charged to."""
        known = self._by_namespace.get(namespace)
        if known is None:
            name = self._account_of(namespace)
            if name is None:
                # Not remembered: it may become known.
                return NOBODY
            known = self._by_namespace[namespace] = self._number_of.get(name, NOBODY)
            if len(self._by_namespace) > limits.MAX_ACCOUNT_NAMESPACES:
                del self._by_namespace[next(iter(self._by_namespace))]
        return known

    def count(self, account: int, slots: Sequence[int]) -> int:
        """How many of these slots are charged to an account."""
        return sum(self._account[slot] == account for slot in slots)

    def lacking(self, account: int, need: int) -> int:
        """How many of its own blocks an account must give up before `need` more are handed out to it."""
        limit = self._limits[account].max_blocks
        return 0 if limit is None else max(0, self.used[account] + need - limit)

    def require(self, account: int, need: int, becoming_pinned: int = 0) -> None:
        """Check that `need` slots can be handed out to an account after `becoming_pinned` of its cached were pinned.

        Raises:
            TenantQuotaError: they cannot.
        """
        evictable = self.evictable[account] - becoming_pinned
        if need and self.lacking(account, need) > evictable:
            raise TenantQuotaError(
                tenant=self._names[account],
                need=need,
                quota=self._limits[account].max_blocks or 0,
                used=self.used[account],
                evictable=evictable,
            )

    def charge(self, slot: int, account: int) -> None:
        """A slot was handed out."""
        self._account[slot] = account
        self._queued[slot] = False
        self.used[account] += 1

    def discharge(self, slot: int) -> None:
        """A slot is free again."""
        self.used[self._account[slot]] -= 1
        self._account[slot] = NOBODY

    def became_cached(self, slot: int, change: int = 1) -> None:
        """A slot became evictable, or (-1) ceased to be."""
        self.evictable[self._account[slot]] += change

    def retain(self, slot: int, priority: int, until_ns: int) -> bool:
        """Keep the content of a slot, within its account's limit; whether it is kept.

        Raises:
            InvalidRequestError: as `RetentionPolicy.retain`.
        """
        account = self._account[slot]
        is_new = self._inner.priority(slot) < 0
        limit = self._limits[account].max_retained
        if is_new and limit is not None and self.retained[account] >= limit:
            return False
        self._inner.retain(slot, priority, until_ns)
        self.retained[account] += is_new
        self._push(slot)
        return True

    def own_victim(self, account: int) -> int | None:
        """The next slot that an account gives up; it stays offered until it is removed. None: it has none."""
        heap = self._heaps[account]
        while heap:
            rank, slot = heap[0]
            if self._account[slot] != account:
                heapq.heappop(heap)
            elif not self._offered[slot]:
                heapq.heappop(heap)
                self._queued[slot] = False
            elif self._rank(slot) > rank:
                heapq.heapreplace(heap, (self._rank(slot), slot))
            else:
                return slot
        return None

    def insert(self, slot: int, name: Hashable) -> None:
        self._inner.insert(slot, name)
        self._use((slot,))

    def insert_all(self, slots: Sequence[int], names: Sequence[Hashable]) -> None:
        self._inner.insert_all(slots, names)
        self._use(slots)

    def touch(self, slot: int) -> None:
        self._inner.touch(slot)
        self._use((slot,))

    def touch_all(self, slots: Sequence[int]) -> None:
        self._inner.touch_all(slots)
        self._use(slots)

    def offer(self, slot: int) -> None:
        self._inner.offer(slot)
        self._offered[slot] = True
        if not self._queued[slot]:
            self._push(slot)

    def withdraw(self, slot: int) -> None:
        self._inner.withdraw(slot)
        self._offered[slot] = False

    def victim(self) -> int | None:
        return self._inner.victim()

    def remove(self, slot: int, evicted: bool) -> None:
        self._inner.remove(slot, evicted)
        self._offered[slot] = False

    def evict_all(self, count: int, leave: Callable[[int], int]) -> None:
        def left(slot: int) -> int:
            self._offered[slot] = False
            following = leave(slot)
            if following >= 0:
                self._offered[following] = True
                if not self._queued[following]:
                    self._push(following)
            return following

        self._inner.evict_all(count, left)

    def stats(self) -> dict[str, AccountStats]:
        """Every account by name."""
        return {
            name: AccountStats(
                self.used[number], self.evictable[number], self.retained[number], self._limits[number].max_blocks
            )
            for number, name in enumerate(self._names)
            if number != NOBODY
        }

    def check(self, cached: Sequence[int], free: Sequence[int]) -> None:
        """Assert Q1 and Q2, for these cached and free slots."""
        count = len(self._names)
        free_slots, used, evictable = set(free), [0] * count, [0] * count
        for slot, account in enumerate(self._account):
            used[account] += slot not in free_slots
        for slot in cached:
            evictable[self._account[slot]] += 1
        assert (used, evictable) == (self.used, self.evictable)
        for number, allowed in enumerate(self._limits):
            assert allowed.max_blocks is None or self.used[number] <= allowed.max_blocks

    def _use(self, slots: Sequence[int]) -> None:
        for tick, slot in enumerate(slots, self._tick + 1):
            self._last_use[slot] = tick
        self._tick += len(slots)

    def _rank(self, slot: int) -> int:
        return (self._inner.priority(slot) + 1) * _PRIORITY_STEP + self._last_use[slot]

    def _push(self, slot: int) -> None:
        account = self._account[slot]
        if account == NOBODY or not self._offered[slot]:
            return
        heap = self._heaps[account]
        heapq.heappush(heap, (self._rank(slot), slot))
        self._queued[slot] = True
        # What went to other accounts, or is retained again and again, leaves entries behind.
        if len(heap) > 2 * self.used[account] + 64:
            offered = {s for _, s in heap if self._account[s] == account and self._offered[s]}
            for _, other in heap:
                if self._account[other] == account:
                    self._queued[other] = other in offered
            heap[:] = [(self._rank(s), s) for s in offered]
            heapq.heapify(heap)

    def _retention_ended(self, slot: int) -> None:
        self.retained[self._account[slot]] -= 1
        # Its rank is lower now than that of its entry.
        self._push(slot)

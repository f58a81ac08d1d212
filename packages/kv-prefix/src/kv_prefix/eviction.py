"""Which evictable block goes first.

A policy orders *offered* slots: cached, unreferenced, and without a cached child, so that whatever the policy answers,
a chain shrinks from its tail and no suffix is orphaned. Policies know slots and the names of their content, nothing of
tokens, time or memory; recency is a counter of accesses.

E1: `victim()` returns an offered slot, or None when none is offered.
E2: every call is amortised O(log n) and looks at no slot that was not offered.
"""

from collections.abc import Hashable
from typing import Protocol


class EvictionPolicy(Protocol):
    """A strategy over the slots `0 .. capacity - 1`."""

    def insert(self, slot: int, name: Hashable) -> None:
        """Content `name` was stored in `slot`; it is not offered yet."""
        ...

    def touch(self, slot: int) -> None:
        """The content of `slot` was used again."""
        ...

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


POLICIES = ("adaptive", "lru", "fifo", "lfu", "s3fifo")


def make_eviction_policy(name: str, capacity: int) -> EvictionPolicy:
    """A policy by the name users write: `adaptive` (the default), `lru`, `fifo`, `lfu` or `s3fifo`.

    Raises:
        UnknownPolicyError: there is no policy of that name; the message lists them.
    """
    raise NotImplementedError

"""Which namespaces a node watches for purges, and which of them were purged since it last looked.

Knows counts of purges and whether anything of a namespace is held; what a purge does is `tiers`' business.

W1: whatever is held of a namespace that was purged since it was followed is told of once. What was stored just before
    a purge may be told of after it, so what comes between a purge and the next look counts as stored before it.
W2: what is kept is bounded by what is held, since a client may name a namespace for each of its requests.
"""

from collections.abc import Callable, Iterator
from typing import Final

from kv_consistency.manager import KvCacheConsistencyManager
from kv_consistency.update import NamespaceRef

WATCHED_MIN: Final = 1024
"""Namespaces that are watched before those of which nothing is held are looked for."""


class PurgeWatch:
    """See the module.

    Args:
        manager: knows how often each namespace was purged.
        is_held: whether anything of a namespace is here, by its digest.
    """

    def __init__(
        self, manager: KvCacheConsistencyManager, is_held: Callable[[bytes], bool], watched_min: int = WATCHED_MIN
    ) -> None:
        self._manager = manager
        self._is_held = is_held
        self._seen: dict[NamespaceRef, int] = {}
        self._min = self._limit = watched_min
        self._looked_at = manager.num_purges

    def __len__(self) -> int:
        return len(self._seen)

    @property
    def is_due(self) -> bool:
        """Whether there was a purge, of whatever namespace, since the last look."""
        return self._looked_at != self._manager.num_purges

    def followed(self, namespace: NamespaceRef) -> int:
        """How many purges of a namespace what is stored now has followed: those that were looked at."""
        now = self._manager.namespace_epoch(namespace)
        return min(now, self._seen.get(namespace, now))

    def follow(self, namespace: NamespaceRef, epoch: int | None = None) -> None:
        """Something of this namespace is held; `epoch`: the purges that it followed, all that were looked at unless
        told."""
        before = self._seen.get(namespace)
        if before is not None:
            if epoch is not None and epoch < before:
                # It was on its way while nothing of its namespace was watched, or comes from elsewhere.
                self._seen[namespace], self._looked_at = epoch, -1
            return
        now = self._manager.namespace_epoch(namespace)
        if epoch is None:
            epoch = now - 1 if now and self.is_due else now
        self._seen[namespace] = min(now, epoch)
        if self._seen[namespace] < now:
            self._looked_at = -1
        if len(self._seen) > self._limit:
            self._seen = {name: seen for name, seen in self._seen.items() if self._is_held(name.digest)}
            self._limit = max(self._min, 2 * len(self._seen))

    def purged(self) -> Iterator[tuple[bytes, int]]:
        """Namespaces that were purged since the last look, by digest, each with its count of purges now."""
        if self._looked_at == self._manager.num_purges:
            return
        self._looked_at = self._manager.num_purges
        for namespace, seen in list(self._seen.items()):
            epoch = self._manager.namespace_epoch(namespace)
            if epoch > seen:
                self._seen[namespace] = epoch
                yield namespace.digest, epoch

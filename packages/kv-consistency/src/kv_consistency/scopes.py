"""Purges: how often each namespace was purged, by whichever of its scopes.

A claim or entry carries the count that its writer had applied. Writers state the purges they have seen as
dependencies, so whoever applies the write has applied at least those; equal counts therefore mean equal sets of
purges, and a smaller one means that some purge was concurrent with the write or came after it: unreadable. A purge so
beats every store that did not follow it, also when several purges are concurrent.

S1: a purge counts once, however often it arrives, by update or by synchronisation. S2: counts only grow.
S3: a namespace's count is the sum over its digest and its scopes.
"""

from collections.abc import Iterable

from kv_consistency import limits
from kv_consistency.errors import LimitReachedError
from kv_consistency.messages import RaiseCount
from kv_consistency.update import NamespaceRef
from kv_consistency.version_vector import Origin


class ScopeTable:
    """The purges that a replica has applied."""

    __slots__ = ("_by_scope", "_counts", "_raises")

    def __init__(self, rows: Iterable[RaiseCount] = ()) -> None:
        self._raises: dict[bytes, dict[Origin, tuple[int, int]]] = {}
        self._counts: dict[NamespaceRef, int] = {}
        self._by_scope: dict[bytes, list[NamespaceRef]] = {}
        self.merge(rows)

    def purges(self, namespace: NamespaceRef) -> int:
        """How many purges of it were applied; the namespace is followed from now on.

        Raises:
            LimitReachedError: too many namespaces.
        """
        count = self._counts.get(namespace)
        if count is None:
            if len(self._counts) >= limits.MAX_NAMESPACES:
                raise LimitReachedError(what="namespaces", have=len(self._counts), limit=limits.MAX_NAMESPACES)
            scopes = dict.fromkeys((namespace.digest, *namespace.scopes))
            count = sum(n for scope in scopes for n, _ in self._raises.get(scope, {}).values())
            self._counts[namespace] = count
            for scope in scopes:
                self._by_scope.setdefault(scope, []).append(namespace)
        return count

    def raise_(self, origin: Origin, n: int, scopes: Iterable[bytes]) -> dict[NamespaceRef, int]:
        """Apply the purge with dot `(origin, n)`; returns the followed namespaces it touches with their new counts."""
        touched: dict[NamespaceRef, int] = {}
        for scope in dict.fromkeys(scopes):
            count, last = self._raises.get(scope, {}).get(origin, (0, 0))
            if n > last:
                touched |= self._set(scope, origin, count + 1, n)
        return touched

    def merge(self, rows: Iterable[RaiseCount]) -> dict[NamespaceRef, int]:
        """Take what another replica has applied; returns what changed, as `raise_`."""
        touched: dict[NamespaceRef, int] = {}
        for row in rows:
            _, last = self._raises.get(row.scope, {}).get(row.origin, (0, 0))
            if row.last > last:
                touched |= self._set(row.scope, row.origin, row.count, row.last)
        return touched

    def rows(self) -> list[RaiseCount]:
        """Everything applied, in order of scope and origin."""
        return [
            RaiseCount(scope, origin, count, last)
            for scope, by_origin in sorted(self._raises.items())
            for origin, (count, last) in sorted(by_origin.items())
        ]

    def check(self) -> None:
        """Assert S3."""
        for namespace, count in self._counts.items():
            scopes = {namespace.digest, *namespace.scopes}
            assert count == sum(n for scope in scopes for n, _ in self._raises.get(scope, {}).values())

    def _set(self, scope: bytes, origin: Origin, count: int, last: int) -> dict[NamespaceRef, int]:
        by_origin = self._raises.setdefault(scope, {})
        grown = count - by_origin.get(origin, (0, 0))[0]
        by_origin[origin] = (count, last)
        touched: dict[NamespaceRef, int] = {}
        for namespace in self._by_scope.get(scope, ()):
            self._counts[namespace] += grown
            touched[namespace] = self._counts[namespace]
        return touched

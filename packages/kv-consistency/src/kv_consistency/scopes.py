"""Purges: how often each namespace was purged, by whichever of its scopes.

A claim or entry carries the count that its writer had applied. Writers state the purges they have seen as
dependencies, so whoever applies the write has applied at least those; equal counts therefore mean equal sets of
purges, and a smaller one means that some purge was concurrent with the write or came after it: unreadable. A purge so
beats every store that did not follow it, also when several purges are concurrent.

Purges that a node kept over a restart count at once, but no update that others can fetch may vouch for them: when the
whole cluster restarted, the updates are gone. They are *unpublished* until an update is applied that made or restored
them (`ScopesRestored`), their own node's or another's.

S1: a purge counts once, however often it arrives, by update, by synchronisation or from a disk. S2: counts only grow.
S3: a namespace's count is the sum over its digest and its scopes. S4: what is unpublished is nowhere published as far.
S5: at most `MAX_NAMESPACES` are followed, as a client may name one for each request; room is made by forgetting those
of which nothing is claimed. Counts are sums over the purges, which stay, so forgetting changes no answer.
"""

from collections.abc import Callable, Container, Iterable
from typing import Final, NamedTuple

from kv_consistency import limits
from kv_consistency.errors import LimitReachedError
from kv_consistency.update import NamespaceRef, RaiseCount
from kv_consistency.version_vector import Dot, Origin


class _Raised(NamedTuple):
    times: int
    last: int
    via: Dot | None = None

    def further(self, other: "_Raised") -> bool:
        """Whether it says more than `other`, or the same by an update that comes first: the same choice everywhere."""
        if self.last != other.last:
            return self.last > other.last
        return other.via is not None and (self.via is None or self.via < other.via)


_NEVER = _Raised(0, 0)
_ROOM: Final = 16
"""Room is looked for again when this part of the bound could be gained, or as many were refused: each look costs a walk
over all that are followed."""
_Table = dict[bytes, dict[Origin, _Raised]]


class ScopeTable:
    """The purges that a replica has applied, and those it restored."""

    __slots__ = ("_by_scope", "_counts", "_patience", "_published", "_unpublished", "num_raised", "size")

    def __init__(self, rows: Iterable[RaiseCount] = ()) -> None:
        self._published: _Table = {}
        self._unpublished: _Table = {}
        self._counts: dict[NamespaceRef, int] = {}
        self._by_scope: dict[bytes, dict[NamespaceRef, None]] = {}
        self._patience = 0
        self.size = 0
        """Pairs of a scope and an origin, in either table."""
        self.num_raised = 0
        """How often any count may have grown: whoever keeps counts need not look before this did."""
        self.restore(rows)

    def purges(self, namespace: NamespaceRef) -> int:
        """How many purges of it were applied; kept for the next time where there is room."""
        count = self._counts.get(namespace)
        if count is None:
            count = self._sum(namespace)
            if len(self._counts) < limits.MAX_NAMESPACES:
                self._follow(namespace, count)
        return count

    def follow(self, namespace: NamespaceRef, in_use: Callable[[], Container[bytes]]) -> int:
        """How many purges of it were applied; those to come are told of (`raise_`).

        Args:
            in_use: gives the digests of the namespaces that must go on being followed.

        Raises:
            LimitReachedError: as many are in use as may be.
        """
        count = self._counts.get(namespace)
        if count is None:
            self._make_room(in_use)
            if len(self._counts) >= limits.MAX_NAMESPACES:
                raise LimitReachedError(what="namespaces", have=len(self._counts), limit=limits.MAX_NAMESPACES)
            count = self._sum(namespace)
            self._follow(namespace, count)
        return count

    def raise_(self, origin: Origin, n: int, scopes: Iterable[bytes]) -> dict[NamespaceRef, int]:
        """Apply the purge with dot `(origin, n)`; returns the followed namespaces it touches with their new counts."""
        touched: dict[NamespaceRef, int] = {}
        for scope in dict.fromkeys(scopes):
            count, last, _ = self._published.get(scope, {}).get(origin, _NEVER)
            if n > last:
                touched |= self._publish(scope, origin, _Raised(count + 1, n))
            elif n == last:
                self._publish(scope, origin, _Raised(count, n))
        return touched

    def merge(self, rows: Iterable[RaiseCount]) -> dict[NamespaceRef, int]:
        """Take what another replica has applied; returns what changed, as `raise_`."""
        touched: dict[NamespaceRef, int] = {}
        for row in rows:
            touched |= self._publish(row.scope, row.origin, _Raised(row.count, row.last, row.via))
        return touched

    def restore(self, rows: Iterable[RaiseCount]) -> dict[NamespaceRef, int]:
        """Take what a disk kept, this node's or a new peer's; returns what changed, as `raise_`."""
        touched: dict[NamespaceRef, int] = {}
        for row in rows:
            before = self._effective(row.scope, row.origin)
            if row.last > before.last:
                self.size += row.origin not in self._unpublished.get(row.scope, {})
                self._unpublished.setdefault(row.scope, {})[row.origin] = _Raised(row.count, row.last)
                touched |= self._recount(row.scope, row.count - before.times)
        return touched

    def news(self, rows: Iterable[RaiseCount]) -> list[RaiseCount]:
        """Those of `rows` that nothing published here says yet."""
        return [row for row in rows if row.last > self._published.get(row.scope, {}).get(row.origin, _NEVER).last]

    def published(self) -> list[RaiseCount]:
        """Everything that applied updates made or restored, in order of scope and origin."""
        return _rows(self._published)

    def unpublished(self) -> list[RaiseCount]:
        """Everything that counts here and that no applied update vouches for, in the same order."""
        return _rows(self._unpublished)

    def rows(self) -> list[RaiseCount]:
        """Everything that counts here, in the same order."""
        scopes = self._published.keys() | self._unpublished.keys()
        return _rows({s: {**self._published.get(s, {}), **self._unpublished.get(s, {})} for s in scopes})

    def check(self) -> None:
        """Assert S3, S4 and S5."""
        assert len(self._counts) <= limits.MAX_NAMESPACES
        for namespace, count in self._counts.items():
            assert count == self._sum(namespace)
            assert all(namespace in self._by_scope[scope] for scope in (namespace.digest, *namespace.scopes))
        assert sum(map(len, self._by_scope.values())) == sum(len({n.digest, *n.scopes}) for n in self._counts)
        assert self.size == sum(map(len, (*self._published.values(), *self._unpublished.values())))
        for scope, by_origin in self._unpublished.items():
            assert by_origin
            for origin, raised in by_origin.items():
                assert raised.last > self._published.get(scope, {}).get(origin, _NEVER).last

    def _publish(self, scope: bytes, origin: Origin, raised: _Raised) -> dict[NamespaceRef, int]:
        before = self._effective(scope, origin)
        by_origin = self._published.setdefault(scope, {})
        known = by_origin.get(origin)
        if known is not None and not raised.further(known):
            return {}
        if known is None:
            self.size += 1
        by_origin[origin] = raised
        waiting = self._unpublished.get(scope, {})
        if origin in waiting and waiting[origin].last <= raised.last:
            del waiting[origin]
            self.size -= 1
            if not waiting:
                del self._unpublished[scope]
        return self._recount(scope, self._effective(scope, origin).times - before.times)

    def _recount(self, scope: bytes, grown: int) -> dict[NamespaceRef, int]:
        touched: dict[NamespaceRef, int] = {}
        if grown:
            self.num_raised += 1
            for namespace in self._by_scope.get(scope, ()):
                self._counts[namespace] += grown
                touched[namespace] = self._counts[namespace]
        return touched

    def _follow(self, namespace: NamespaceRef, count: int) -> None:
        self._counts[namespace] = count
        for scope in (namespace.digest, *namespace.scopes):
            self._by_scope.setdefault(scope, {})[namespace] = None

    def _make_room(self, in_use: Callable[[], Container[bytes]]) -> None:
        have = len(self._counts)
        if have < limits.MAX_NAMESPACES:
            return
        if self._patience > 0:
            self._patience -= 1
            return
        used = in_use()
        for namespace in [one for one in self._counts if one.digest not in used]:
            del self._counts[namespace]
            for scope in {namespace.digest, *namespace.scopes}:
                followers = self._by_scope[scope]
                del followers[namespace]
                if not followers:
                    del self._by_scope[scope]
        least = limits.MAX_NAMESPACES // _ROOM
        self._patience = 0 if have - len(self._counts) >= least else least

    def _effective(self, scope: bytes, origin: Origin) -> _Raised:
        waiting = self._unpublished.get(scope, {}).get(origin)
        return self._published.get(scope, {}).get(origin, _NEVER) if waiting is None else waiting

    def _sum(self, namespace: NamespaceRef) -> int:
        total = 0
        for scope in {namespace.digest, *namespace.scopes}:
            origins = self._published.get(scope, {}).keys() | self._unpublished.get(scope, {}).keys()
            total += sum(self._effective(scope, origin).times for origin in origins)
        return total


def _rows(table: _Table) -> list[RaiseCount]:
    return [
        RaiseCount(scope, origin, *raised)
        for scope, by_origin in sorted(table.items())
        for origin, raised in sorted(by_origin.items())
    ]

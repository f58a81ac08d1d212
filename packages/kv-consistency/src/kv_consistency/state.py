"""What a replica knows, as a function of the updates it applied and the lives that are over.

Decides what an update changes; when it may be applied is the causal buffer's business, whom to tell the replica's.

R1: two states that applied the same updates and know the same lives to be over answer every question alike.
"""

from collections.abc import Container, Iterable

import msgspec

from kv_consistency import limits
from kv_consistency.causal_buffer import CausalBuffer, Delivery
from kv_consistency.claims import ClaimTable
from kv_consistency.effects import ClaimChange, EndCause, RequestEnded, RequestFenced
from kv_consistency.entries import EntryTable, Outcome
from kv_consistency.errors import LimitReachedError
from kv_consistency.lives import Lives
from kv_consistency.messages import ClaimPage, EntryRow
from kv_consistency.scopes import ScopeTable
from kv_consistency.update import (
    BlocksRemoved,
    BlocksStored,
    EntryWritten,
    HolderCleared,
    NamespaceRef,
    RaiseCount,
    ScopesRaised,
)
from kv_consistency.update_log import UpdateLog
from kv_consistency.version_vector import Dot, Origin, VersionVector
from kv_core.ids import RequestId


class Changes(msgspec.Struct, gc=False):
    """What one step changed: for the index, for whoever holds something for a request, for those that wait."""

    now_ns: int
    claims: list[ClaimChange] = []
    requests: list[RequestEnded | RequestFenced] = []
    written: dict[RequestId, None] = {}
    advanced: dict[Origin, None] = {}
    purged: bool = False


class State:
    """The tables of one replica."""

    __slots__ = ("buffer", "claims", "entries", "lives", "log", "origin", "owed", "refused", "replayed", "scopes")

    def __init__(
        self,
        origin: Origin,
        raises: Iterable[RaiseCount] = (),
        log_bytes_max: int = limits.MAX_LOG_BYTES,
        entries_max: int = limits.MAX_ENTRIES,
    ) -> None:
        self.origin = origin
        self.buffer = CausalBuffer()
        self.log = UpdateLog(log_bytes_max)
        self.claims = ClaimTable()
        self.scopes = ScopeTable(raises)
        self.entries = EntryTable(entries_max)
        self.lives = Lives()
        self.lives.seen(origin, 0)
        self.owed: dict[Origin, int] = {}
        """Purges applied since our last update: our next one depends on them."""
        self.replayed: dict[Origin, int] = {}
        """Up to here an origin's updates meet claims of a snapshot that may be newer."""
        self.refused = 0
        """Operations beyond a bound of ours."""

    def apply(self, deliveries: Iterable[Delivery], changes: Changes) -> None:
        """Apply updates in the order in which the causal buffer hands them out."""
        out = changes.claims
        claims, scopes = self.claims, self.scopes
        for origin, updates in deliveries:
            self.log.extend(origin, updates)
            changes.advanced[origin] = None
            over = self.lives.is_over(origin)
            replay_upto = self.replayed.get(origin, 0)
            for update in updates:
                n = update.n
                for op in update.ops:
                    if isinstance(op, BlocksStored):
                        if over:
                            continue
                        try:
                            purges = scopes.follow(op.namespace, claims.tidy)
                        except LimitReachedError:
                            self.refused += 1
                            continue
                        claims.store(origin, n, op, purges, out, n <= replay_upto)
                    elif isinstance(op, BlocksRemoved):
                        claims.remove(origin, n, op, out, n <= replay_upto)
                    elif isinstance(op, EntryWritten):
                        self.write_entry(
                            Dot(origin, n),
                            update.wall_ns,
                            update.logical,
                            op,
                            changes,
                        )
                    elif isinstance(op, HolderCleared):
                        claims.clear(origin, n, op.tier, out, n <= replay_upto)
                    else:
                        if origin != self.origin:
                            self.owed[origin] = n
                        if isinstance(op, ScopesRaised):
                            touched = scopes.raise_(origin, n, op.scopes)
                        else:
                            via = Dot(origin, n)
                            touched = scopes.merge(msgspec.structs.replace(row, via=via) for row in op.rows)
                        self._purged(touched, changes)

    def write_entry(self, dot: Dot, wall_ns: int, logical: int, op: EntryWritten, changes: Changes) -> None:
        """Apply one write of an entry."""
        outcome = self.entries.apply(dot, wall_ns, logical, op, changes.now_ns)
        if outcome is Outcome.LOST:
            return
        if outcome is Outcome.REFUSED:
            self.refused += 1
            return
        changes.written[op.request_id] = None
        owner = op.epoch.owner
        if outcome is Outcome.ENDED:
            changes.requests.append(RequestEnded(op.request_id, op.epoch, EndCause.ENDED))
        elif owner is not None and self.lives.is_over(owner):
            self.bury(op.request_id, changes)
        elif outcome is Outcome.FENCED:
            changes.requests.append(RequestFenced(op.request_id, op.epoch))

    def take_row(self, row: EntryRow, changes: Changes) -> None:
        """Apply an entry of a snapshot."""
        self.write_entry(row.dot, row.wall_ns, row.logical, row.entry, changes)

    def take_raises(self, rows: Iterable[RaiseCount], changes: Changes) -> None:
        """Apply the purges of a snapshot."""
        rows = tuple(rows)
        for row in self.scopes.news(rows):
            made_by, n = (row.origin, row.last) if row.via is None else (row.via.origin, row.via.n)
            if made_by != self.origin:
                self.owed[made_by] = max(n, self.owed.get(made_by, 0))
        self._purged(self.scopes.merge(rows), changes)

    def restore_raises(self, rows: Iterable[RaiseCount], changes: Changes) -> None:
        """Take purges that a new peer kept over its restart."""
        self._purged(self.scopes.restore(rows), changes)

    def take_claims(self, page: ClaimPage, base: int, changes: Changes) -> int:
        """Write claims of a snapshot that began at dot `base` of their holder; returns the highest dot among them."""
        try:
            purges = self.scopes.follow(page.namespace, self.claims.tidy)
        except LimitReachedError:
            self.refused += 1
            return 0
        return self.claims.take_page(page, base, purges, changes.claims)

    def retire(self, floor: Origin, changes: Changes) -> None:
        """Lives of that node below that incarnation are over and everybody has all of them: follow them no longer."""
        self.lives.retire(floor.node, floor.incarnation)
        self.entries.retire(floor)
        gone, woken = self.buffer.retire(floor.node, floor.incarnation)
        for origin in gone:
            self.log.forget(origin)
            self.owed.pop(origin, None)
            self.replayed.pop(origin, None)
            self.claims.drop_holder(origin, changes.claims)
        self.apply(woken, changes)

    def bury(self, request_id: RequestId, changes: Changes) -> None:
        """The request's owner is lost: it is over."""
        row = self.entries.get(request_id)
        if row is not None and not row.ended:
            self.entries.bury(request_id)
            changes.written[request_id] = None
            changes.requests.append(RequestEnded(request_id, row.home.epoch, EndCause.OWNER_LOST))

    def forget_entries(self, listed: Container[RequestId], vector: VersionVector, changes: Changes) -> None:
        """End what whoever had applied `vector` has forgotten, `listed` being all that it knows."""
        for request_id in self.entries.unknown_to(listed, vector):
            row = self.entries.get(request_id)
            assert row is not None
            if not row.ended:
                changes.written[request_id] = None
                changes.requests.append(RequestEnded(request_id, row.home.epoch, EndCause.ENDED))
            self.entries.forget(request_id)

    def purged(self, namespace: NamespaceRef | None, followed: int) -> bool:
        """Whether what followed that many purges of the namespace is unreadable."""
        return namespace is not None and followed < self.scopes.purges(namespace)

    def check(self) -> None:
        """Assert every table's invariants."""
        for table in (self.buffer, self.log, self.claims, self.scopes, self.entries, self.lives):
            table.check()
        assert not any(self.lives.is_over(holder) for holder in self.claims.holders())
        for holder in self.claims.holders():
            for shelf in self.claims.shelves(holder).values():
                assert shelf.epoch >= self.scopes.purges(shelf.namespace)

    def _purged(self, touched: dict[NamespaceRef, int], changes: Changes) -> None:
        for namespace, purges in touched.items():
            self.claims.drop_below(namespace.digest, purges, changes.claims)
        # Entries are hidden by their count when they are read; only those that wait must look again.
        changes.purged |= bool(touched)

"""A naive twin of a replica: it keeps every update there ever was with the true past of its writer, and folds those
that a replica has applied, in the simplest way that can be written down."""

from collections.abc import Iterable
from dataclasses import dataclass, field

from kv_consistency.update import (
    BlocksRemoved,
    BlocksStored,
    EntryWritten,
    HolderCleared,
    NamespaceRef,
    OwnerEpoch,
    RaiseCount,
    ScopesRaised,
    ScopesRestored,
    Tier,
    Update,
    unpack_hashes,
)
from kv_consistency.version_vector import Dot, Origin
from kv_core.ids import RequestId

Rows = Iterable[RaiseCount]
Claim = tuple[Origin, bytes, Tier, bytes, bytes, int]


@dataclass
class Truth:
    """Every update ever issued, and what its writer had applied when it was issued."""

    updates: dict[Dot, Update] = field(default_factory=dict)
    past: dict[Dot, frozenset[Dot]] = field(default_factory=dict)

    def issued(self, dot: Dot, update: Update, past: frozenset[Dot]) -> None:
        assert dot not in self.updates
        self.updates[dot] = update
        self.past[dot] = past

    def closed(self, applied: frozenset[Dot]) -> bool:
        """Whether what is stated as depended upon is applied too, and so is every predecessor."""
        for dot in applied:
            if dot.n > 1 and Dot(dot.origin, dot.n - 1) not in applied:
                return False
            if any(dep not in applied for dep in self.updates[dot].deps):
                return False
        return True

    def purges(self, namespace: NamespaceRef, dots: Iterable[Dot], kept: Rows = ()) -> set[tuple[Dot, bytes]]:
        """The purges of a namespace that `dots` made or restored, and those among `kept`."""
        scopes = {namespace.digest, *namespace.scopes}
        found: set[tuple[Dot, bytes]] = set()
        rows = list(kept)
        for dot in dots:
            for op in self.updates[dot].ops:
                if isinstance(op, ScopesRaised):
                    found |= {(dot, scope) for scope in op.scopes if scope in scopes}
                elif isinstance(op, ScopesRestored):
                    rows += op.rows
        for row in rows:
            if row.scope in scopes:
                found |= {(dot, row.scope) for dot in self.raised_by(row.origin, row.scope) if dot.n <= row.last}
        return found

    def raised_by(self, origin: Origin, scope: bytes) -> list[Dot]:
        """Every purge of a scope that an origin ever made."""
        return [
            dot
            for dot, update in self.updates.items()
            if dot.origin == origin and any(isinstance(op, ScopesRaised) and scope in op.scopes for op in update.ops)
        ]

    def claims(self, applied: frozenset[Dot], over: frozenset[Origin], kept: Rows = ()) -> set[Claim]:
        """Readable claims: each holder's own log folded, without what did not follow every purge. `kept`: purges that
        came from a disk."""
        table: dict[tuple[Origin, bytes, Tier, bytes, bytes], tuple[int, Dot, NamespaceRef]] = {}
        for dot in sorted(applied):
            if dot.origin in over:
                continue
            for op in self.updates[dot].ops:
                if isinstance(op, BlocksStored):
                    for i, name in enumerate(unpack_hashes(op.hashes)):
                        key = (dot.origin, op.namespace.digest, op.tier, op.shape, name)
                        table[key] = (op.start + i, dot, op.namespace)
                elif isinstance(op, BlocksRemoved):
                    for name in unpack_hashes(op.hashes):
                        table.pop((dot.origin, op.namespace, op.tier, op.shape, name), None)
                elif isinstance(op, HolderCleared):
                    for key in [key for key in table if key[0] == dot.origin and op.tier in (None, key[2])]:
                        del table[key]
        return {
            (*key, position)
            for key, (position, dot, namespace) in table.items()
            if self.purges(namespace, applied, kept) <= self.purges(namespace, self.past[dot])
        }

    def entries(
        self, applied: frozenset[Dot], over: frozenset[Origin], kept: Rows = ()
    ) -> dict[RequestId, tuple[int, int, Dot, OwnerEpoch]]:
        """Entries that are not over and not purged, as (length, checksum, dot, epoch): the greatest write wins."""
        best: dict[RequestId, tuple[tuple[object, ...], Dot, EntryWritten]] = {}
        for dot in applied:
            update = self.updates[dot]
            for op in update.ops:
                if isinstance(op, EntryWritten):
                    owner = op.epoch.owner
                    followed = 0 if op.namespace is None else len(self.purges(op.namespace, self.past[dot]))
                    order = (
                        op.epoch.number,
                        "" if owner is None else str(owner),
                        op.ended,
                        0 if op.ended else followed,
                        op.seq_len,
                        update.wall_ns,
                        update.logical,
                        dot,
                    )
                    if op.request_id not in best or order > best[op.request_id][0]:
                        best[op.request_id] = (order, dot, op)
        return {
            request_id: (op.seq_len, op.checksum, dot, op.epoch)
            for request_id, (_, dot, op) in best.items()
            if not op.ended
            and op.epoch.owner not in over
            and (
                op.namespace is None
                or self.purges(op.namespace, applied, kept) <= self.purges(op.namespace, self.past[dot])
            )
        }

"""A naive twin of a replica: it keeps every update there ever was with the true past of its writer, and folds those
that a replica has applied, in the simplest way that can be written down."""

from dataclasses import dataclass, field

from kv_consistency.update import (
    BlocksRemoved,
    BlocksStored,
    EntryWritten,
    HolderCleared,
    NamespaceRef,
    OwnerEpoch,
    ScopesRaised,
    Tier,
    Update,
    unpack_hashes,
)
from kv_consistency.version_vector import Dot, Origin
from kv_core.ids import RequestId

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

    def purges(self, namespace: NamespaceRef, dots: frozenset[Dot]) -> set[tuple[Dot, bytes]]:
        """The purges of a namespace among `dots`."""
        scopes = {namespace.digest, *namespace.scopes}
        return {
            (dot, scope)
            for dot in dots
            for op in self.updates[dot].ops
            if isinstance(op, ScopesRaised)
            for scope in op.scopes
            if scope in scopes
        }

    def claims(self, applied: frozenset[Dot], over: frozenset[Origin]) -> set[Claim]:
        """Readable claims: each holder's own log folded, without what did not follow every purge."""
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
            if self.purges(namespace, applied) <= self.purges(namespace, self.past[dot])
        }

    def entries(
        self, applied: frozenset[Dot], over: frozenset[Origin]
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
                op.namespace is None or self.purges(op.namespace, applied) <= self.purges(op.namespace, self.past[dot])
            )
        }

"""What this process says: local events become updates.

Each is checked whole before anything changes, then becomes one update: stamped, applied here first, then published.
An update depends on what its event says (`after`), on the write it builds on, and on the purges applied since our last
update.
"""

from kv_consistency import limits
from kv_consistency.claims import ShelfKey
from kv_consistency.effects import BroadcastUpdates, Effect, Issued
from kv_consistency.entries import Row
from kv_consistency.errors import (
    FencedError,
    InvalidUpdateError,
    LimitReachedError,
    NotFoundError,
    ShrinkingUpdateError,
    SkippingUpdateError,
)
from kv_consistency.events import (
    NOTHING,
    Instant,
    LocalClear,
    LocalEnd,
    LocalOwn,
    LocalRaise,
    LocalRegister,
    LocalRemove,
    LocalStore,
)
from kv_consistency.messages import UpdateBatch
from kv_consistency.replica import Replica
from kv_consistency.state import Changes
from kv_consistency.update import (
    HASH_BYTES,
    UNOWNED,
    BlocksRemoved,
    BlocksStored,
    EntryWritten,
    HolderCleared,
    Operation,
    OwnerEpoch,
    ScopesRaised,
    ScopesRestored,
    Update,
    estimated_nbytes,
)
from kv_consistency.version_vector import CausalToken, Dot, Origin
from kv_core import limits as core_limits
from kv_core.ids import NodeId, RequestId


def on_store(replica: Replica, event: LocalStore) -> list[Effect]:
    """Claim blocks."""
    _require_ready(replica)
    purges = replica.state.scopes.purges
    ops: list[Operation] = []
    shelves = replica.state.claims.shelves(replica.origin)
    claimed: dict[ShelfKey, int] = {}
    for run in event.runs:
        known = purges(run.namespace)
        epoch = known if run.epoch is None else run.epoch
        if epoch > known:
            raise InvalidUpdateError(what="run", reason=f"it follows {epoch} purges, {known} are known")
        try:
            op = BlocksStored(run.namespace, epoch, run.tier, run.start, run.hashes, run.checks, run.shape)
        except ValueError as error:
            raise InvalidUpdateError(what="run", reason=str(error)) from None
        ops.append(op)
        key = (op.namespace.digest, op.tier, op.shape)
        claimed[key] = claimed.get(key, 0) + len(op.hashes) // HASH_BYTES
    room = limits.MAX_CLAIMS_PER_SHELF
    for key, more in claimed.items():
        have = more + (shelves[key].size if key in shelves else 0)
        if have > room:
            raise LimitReachedError(what="claims of one namespace and tier", have=have, limit=room)
    return publish(replica, event.at, tuple(ops), event.after)


def on_remove(replica: Replica, event: LocalRemove) -> list[Effect]:
    """Give claims up."""
    _require_ready(replica)
    try:
        ops = tuple(BlocksRemoved(r.namespace, r.tier, r.hashes, r.shape) for r in event.removals)
    except ValueError as error:
        raise InvalidUpdateError(what="removal", reason=str(error)) from None
    return publish(replica, event.at, ops, event.after)


def on_clear(replica: Replica, event: LocalClear) -> list[Effect]:
    """Give every claim of a tier up."""
    _require_ready(replica)
    return publish(replica, event.at, (HolderCleared(event.tier),))


def on_raise(replica: Replica, event: LocalRaise) -> list[Effect]:
    """Purge."""
    _require_ready(replica)
    if not all(8 <= len(scope) <= 16 for scope in event.scopes) or not event.scopes:
        raise InvalidUpdateError(what="scopes", reason="a scope has 8 to 16 bytes, and one is needed")
    known = replica.state.scopes.size
    if known + len(event.scopes) > limits.MAX_RAISES:
        raise LimitReachedError(what="purges", have=known, limit=limits.MAX_RAISES)
    return publish(replica, event.at, (ScopesRaised(event.scopes),), event.after)


def on_register(replica: Replica, event: LocalRegister) -> list[Effect]:
    """Say how far the KV of a request reaches."""
    _require_ready(replica)
    replica.require(event.after)
    request_id, new = event.request_id, event.new_seq_len
    row = replica.state.entries.get(request_id)
    epoch = event.epoch if event.epoch is not None else row.home.epoch if row is not None else UNOWNED
    have = _have(replica, row, request_id, epoch)
    if new < have:
        raise ShrinkingUpdateError(request_id=request_id, have=have, new=new)
    if event.start is not None and event.start > have:
        raise SkippingUpdateError(request_id=request_id, have=have, start=event.start)
    if not 0 <= event.checksum <= core_limits.MAX_UINT64:
        raise InvalidUpdateError(what="checksum", reason="need 64 bits")
    namespace = event.namespace
    if namespace is None and row is not None:
        namespace = row.home.namespace
    op = EntryWritten(
        request_id=request_id,
        epoch=epoch,
        start=have,
        seq_len=new,
        checksum=event.checksum,
        nodes=tuple(sorted({_life(replica, node) for node in event.written_nodes})),
        namespace=namespace,
        namespace_epoch=0 if namespace is None else replica.state.scopes.purges(namespace),
    )
    return publish(replica, event.at, (_valid(op),), event.after, row)


def on_own(replica: Replica, event: LocalOwn) -> list[Effect]:
    """Become the owner of a request: a new one, another's, or one whose owner is lost."""
    _require_ready(replica)
    replica.require(event.after)
    row = replica.state.entries.get(event.request_id)
    if replica.state.entries.forgotten(event.request_id) or (row is not None and row.ended and not _lost(replica, row)):
        raise NotFoundError(request_id=event.request_id)
    number = 1 if row is None else row.home.epoch.number + 1
    kept = row if event.keep and row is not None and not row.ended else None
    if kept is not None and replica.state.purged(kept.home.namespace, kept.purges):
        kept = None
    op = EntryWritten(
        request_id=event.request_id,
        epoch=OwnerEpoch(number, replica.origin),
        start=0,
        seq_len=0 if kept is None else kept.seq_len,
        checksum=0 if kept is None else kept.checksum,
        nodes=() if kept is None else kept.home.nodes,
        namespace=None if kept is None else kept.home.namespace,
        namespace_epoch=0 if kept is None else kept.purges,
    )
    return publish(replica, event.at, (_valid(op),), event.after, row)


def on_end(replica: Replica, event: LocalEnd) -> list[Effect]:
    """End a request; unknown and ended ones are left alone."""
    _require_ready(replica)
    row = replica.state.entries.get(event.request_id)
    if row is None or row.ended:
        return []
    epoch = row.home.epoch if event.epoch is None else event.epoch
    if epoch < row.home.epoch:
        raise FencedError(request_id=event.request_id, epoch=str(epoch), current=str(row.home.epoch))
    op = EntryWritten(request_id=event.request_id, epoch=epoch, start=0, seq_len=row.seq_len, ended=True)
    return publish(replica, event.at, (op,), NOTHING, row)


def restore_raises(replica: Replica, at: Instant) -> list[Effect]:
    """Publish purges that came from a disk and that no update brought; others may otherwise never learn of them."""
    return publish(replica, at, ()) if replica.state.scopes.unpublished() else []


def publish(
    replica: Replica,
    at: Instant,
    ops: tuple[Operation, ...],
    after: CausalToken = NOTHING,
    row: Row | None = None,
) -> list[Effect]:
    """Make an update of `ops`, apply it here, and have it published; purges that must go before it go before it."""
    restored = replica.state.scopes.unpublished()
    if len(ops) > limits.MAX_OPS_PER_UPDATE or not (ops or restored):
        raise InvalidUpdateError(what="update", reason=f"{len(ops)} operations")
    if after:
        replica.require(after)
    state, origin = replica.state, replica.origin
    needs = dict(state.owed)
    dots = after.dots if row is None else (*after.dots, row.dot)
    for dot in dots:
        if dot.origin != origin and not state.buffer.retired(dot.origin):
            needs[dot.origin] = max(dot.n, needs.get(dot.origin, 0))
    deps = tuple(Dot(writer, last) for writer, last in sorted(needs.items()))
    out: list[Effect] = []
    lead: list[tuple[tuple[Operation, ...], tuple[Dot, ...]]] = [
        ((ScopesRestored(tuple(restored[i : i + limits.MAX_OPS_PER_UPDATE])),), ())
        for i in range(0, len(restored), limits.MAX_OPS_PER_UPDATE)
    ]
    while len(deps) > limits.MAX_DEPENDENCIES:
        # More purges by others since our last update than one update can name: empty ones go before it.
        lead.append(((), deps[: limits.MAX_DEPENDENCIES]))
        deps = deps[limits.MAX_DEPENDENCIES :]
    updates: list[Update] = []
    n = state.buffer.applied(origin)
    for part, needed in (*lead, (ops, deps)):
        n += 1
        stamp = replica.tick(at, out)
        updates.append(Update(n, stamp.wall_ns, stamp.logical, part, needed))
    update = updates[-1]
    if n > limits.MAX_DOT:
        raise LimitReachedError(what="updates of one life", have=n, limit=limits.MAX_DOT)
    if estimated_nbytes(update) > limits.MAX_UPDATE_BYTES:
        raise LimitReachedError(
            what="bytes of one update", have=estimated_nbytes(update), limit=limits.MAX_UPDATE_BYTES
        )
    state.owed.clear()
    for own in updates:
        state.buffer.issue(origin, own.n)
    changes = Changes(at.now_ns)
    state.apply([(origin, updates)], changes)
    replica.unannounced = True
    out.insert(0, Issued(Dot(origin, n), update.stamp(origin.node)))
    out.append(BroadcastUpdates(UpdateBatch(origin, n, tuple(updates))))
    replica.want_bound(replica.clock.wall_ns, out)
    replica.settle(changes, out)
    return out


def _require_ready(replica: Replica) -> None:
    replica.find_alone()
    replica.require(NOTHING)


def _have(replica: Replica, row: Row | None, request_id: RequestId, epoch: OwnerEpoch) -> int:
    """Tokens that are registered under that epoch.

    Raises:
        FencedError: there is a newer owner, or the owner is lost. NotFoundError: the request has ended.
    """
    owner = epoch.owner
    if owner is not None and replica.state.lives.is_over(owner):
        raise FencedError(request_id=request_id, epoch=str(epoch), current="the loss of its owner")
    if row is None and (_heard_of(replica, owner) or replica.state.entries.forgotten(request_id)):
        # Its owner wrote first, and is followed here: the end is forgotten, perhaps by those whose state was taken.
        raise NotFoundError(request_id=request_id)
    if row is None or epoch > row.home.epoch:
        if row is None and replica.state.entries.full:
            size = replica.state.entries.size
            raise LimitReachedError(what="requests", have=size, limit=size)
        return 0
    if epoch < row.home.epoch:
        raise FencedError(request_id=request_id, epoch=str(epoch), current=str(row.home.epoch))
    if row.ended:
        raise NotFoundError(request_id=request_id)
    return 0 if replica.state.purged(row.home.namespace, row.purges) else row.seq_len


def _heard_of(replica: Replica, owner: Origin | None) -> bool:
    """Whether anything that another node's life wrote is applied here."""
    return owner is not None and owner != replica.origin and replica.state.buffer.applied(owner) > 0


def _lost(replica: Replica, row: Row) -> bool:
    """Whether the request is over only because its owner is lost; another may take it then."""
    owner = row.home.epoch.owner
    return owner is not None and replica.state.lives.is_over(owner)


def _life(replica: Replica, node: NodeId) -> Origin:
    """The present life of a node; 0 for one that was never heard of, which then never counts as lost."""
    return replica.origin if node == replica.origin.node else Origin(node, replica.state.lives.incarnation(node))


def _valid(op: EntryWritten) -> EntryWritten:
    """The write, if its values are within bounds; a peer would refuse it otherwise."""
    if not 1 <= len(op.request_id.encode()) <= core_limits.MAX_NAME_BYTES:
        raise InvalidUpdateError(what="request id", reason=f"need 1 to {core_limits.MAX_NAME_BYTES} bytes")
    if op.seq_len > core_limits.MAX_TOKENS_PER_REQUEST:
        raise InvalidUpdateError(what="length", reason=f"{op.seq_len} of at most {core_limits.MAX_TOKENS_PER_REQUEST}")
    if len(op.nodes) > limits.MAX_NODES_PER_ENTRY:
        raise InvalidUpdateError(what="nodes", reason=f"{len(op.nodes)} of at most {limits.MAX_NODES_PER_ENTRY}")
    return op

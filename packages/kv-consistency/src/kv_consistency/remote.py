"""What peers and membership say, and what time does."""

from kv_consistency import anti_entropy, limits, local, sync
from kv_consistency.effects import BroadcastUpdates, Effect, ReportResync, SendTo
from kv_consistency.errors import (
    ClockBoundReachedError,
    LimitReachedError,
    MalformedUpdateError,
    RemoteClockAheadError,
)
from kv_consistency.events import (
    CancelWait,
    ClockAccepted,
    ClockBoundPersisted,
    GapNoticed,
    Instant,
    PeerDied,
    PeerJoined,
    Received,
    Tick,
    WaitFor,
)
from kv_consistency.hlc import Timestamp
from kv_consistency.messages import Digest, RangeReply, RangeRequest, SyncPage, SyncRequest, UpdateBatch
from kv_consistency.replica import Replica
from kv_consistency.state import Changes
from kv_consistency.update import Update
from kv_consistency.version_vector import Origin, VersionVector
from kv_core.ids import Incarnation, NodeId

_SWEEP_CLAIMS = 8192
_SCAN_ROWS = 2048
_UPKEEP_INTERVAL_NS = 1_000_000_000


def on_received(replica: Replica, event: Received) -> list[Effect]:
    """A message of a peer."""
    out: list[Effect] = []
    message = event.message
    if isinstance(message, UpdateBatch):
        origin = message.origin
        if origin.node != event.peer:
            raise MalformedUpdateError(what="update batch", peer=event.peer, reason=f"it is of {origin}")
        if event.incarnation is not None and event.incarnation != origin.incarnation:
            return out
        if not replica.state.lives.is_over(origin):
            _take_updates(replica, event, origin, message.updates, message.head, out)
        return out
    if event.incarnation is not None and replica.state.lives.is_over(Origin(event.peer, event.incarnation)):
        return out
    match message:
        case RangeReply() as reply:
            _take_range(replica, event, reply, out)
        case Digest() as digest:
            _take_digest(replica, event, digest, out)
        case RangeRequest() as request:
            served = anti_entropy.serve_range(
                replica.state.log, replica.state.buffer, request, replica.config.reply_bytes_max
            )
            out.append(SendTo(event.peer, served))
        case SyncRequest() as wanted:
            _meet_asker(replica, event, out)
            page = sync.make_page(
                replica.state, wanted, replica.clock.last, replica.config.reply_bytes_max, replica.ready, event.peer
            )
            out.append(SendTo(event.peer, page))
        case SyncPage() as page:
            _take_page(replica, event, page, out)
    return out


def on_joined(replica: Replica, event: PeerJoined) -> list[Effect]:
    """A peer that holds a replica is there."""
    out: list[Effect] = []
    origin = Origin(event.node, event.incarnation)
    changes = Changes(event.at.now_ns)
    if _is_self(replica, origin, out) or origin.node == replica.origin.node:
        return out
    _meet(replica, origin, changes, out)
    if replica.state.lives.joined(origin):
        replica.anti_entropy.add_peer(origin)
        _start_session(replica, event.at, out)
    replica.settle(changes, out)
    return out


def on_died(replica: Replica, event: PeerDied) -> list[Effect]:
    """A life is over."""
    out: list[Effect] = []
    origin = Origin(event.node, event.incarnation)
    changes = Changes(event.at.now_ns)
    _bury(replica, origin, event.at, changes, out)
    replica.settle(changes, out)
    return out


def on_gap(replica: Replica, event: GapNoticed) -> list[Effect]:
    """The bus lost something: compare with that peer now."""
    if replica.anti_entropy.known(event.node) is None and event.node not in replica.anti_entropy.peers():
        return []
    return [_digest(replica, event.node, event.at, answer=False)]


def on_wait(replica: Replica, event: WaitFor) -> list[Effect]:
    """Somebody waits."""
    out: list[Effect] = []
    replica.waiters.refuse(event.waiter)
    replica.waiters.add(event, replica.missing(event.after))
    replica.judge(event, out, final=event.deadline_ns <= event.at.now_ns)
    return out


def on_cancel(replica: Replica, event: CancelWait) -> list[Effect]:
    """Nobody waits any more."""
    replica.waiters.remove(event.waiter)
    return []


def on_bound(replica: Replica, event: ClockBoundPersisted) -> list[Effect]:
    """Stamps may go further."""
    replica.clock.extend_bound(event.bound_ns)
    return []


def on_clock_accepted(replica: Replica, event: ClockAccepted) -> list[Effect]:
    """The wall is right as it is."""
    replica.clock.accept_wall(event.at.wall_ns, event.at.now_ns)
    replica.peer_clocks.wall_is_right()
    return []


def on_tick(replica: Replica, event: Tick) -> list[Effect]:
    """Time passed: ask again, compare with a peer, give up what is late, clean up a little."""
    out: list[Effect] = []
    at, now = event.at, event.at.now_ns
    changes = Changes(now)
    if not replica.anti_entropy.peers():
        replica.become_ready(out)
    replica.want_bound(replica.trusted_wall(at, out), out)
    for waiting in replica.waiters.expired(now):
        replica.judge(waiting, out, final=True)
    session = replica.session
    if session is not None and now >= session.deadline_ns:
        _abandon(replica, changes, out)
    _start_session(replica, at, out)
    if now >= replica.next_digest_ns:
        replica.next_digest_ns = now + replica.config.digest_interval_ns
        _compare(replica, at, out)
    out += replica.anti_entropy.requests(replica.state.buffer, replica.origin, now)
    replica.state.claims.sweep(_SWEEP_CLAIMS)
    _scan_orphans(replica, changes)
    if now >= replica.next_upkeep_ns:
        replica.next_upkeep_ns = now + _UPKEEP_INTERVAL_NS
        _upkeep(replica, changes)
    replica.settle(changes, out)
    if replica.ready and now >= replica.restore_at_ns:
        out += _restore_raises(replica, at)
    return out


def _take_updates(
    replica: Replica,
    event: Received,
    origin: Origin,
    updates: tuple[Update, ...],
    head: int,
    out: list[Effect],
) -> None:
    """Updates of one origin, from it or from a peer that keeps its log."""
    state = replica.state
    buffer = state.buffer
    if origin.node == replica.origin.node and origin.incarnation >= replica.origin.incarnation:
        if origin != replica.origin or head > buffer.applied(origin):
            # A later life of this node, or a second process that issues under our name.
            replica.fence(origin.incarnation, out)
        return
    if not buffer.knows(origin):
        if buffer.retired(origin):
            return
        if buffer.num_origins() >= limits.MAX_ORIGINS:
            raise LimitReachedError(what="origins", have=buffer.num_origins(), limit=limits.MAX_ORIGINS)
    if updates:
        last = updates[-1]
        if not _follow_clock(replica, Timestamp(last.wall_ns, last.logical, origin.node), event.at, out, fresh=False):
            return
    changes: Changes | None = None
    if not state.lives.is_current(origin):
        changes = Changes(event.at.now_ns)
        _meet(replica, origin, changes, out)
    deliveries = buffer.offer(origin, updates)
    if deliveries or changes is not None or replica.session is not None:
        # Otherwise it was parked, as most of what comes out of order is, and nothing has changed.
        changes = changes or Changes(event.at.now_ns)
        state.apply(deliveries, changes)
        if replica.session is not None:
            _close_session(replica, changes, out)
        replica.settle(changes, out)
    if head > buffer.applied(origin):
        buffer.note_head(origin, head)
        _pursue(replica, origin, event.peer, event.at.now_ns, head)


def _pursue(replica: Replica, origin: Origin, peer: NodeId, now_ns: int, head: int) -> None:
    """Something up to `head` of the origin is missing, or waits for what is missing; the peer may have it."""
    buffer, asking = replica.state.buffer, replica.anti_entropy
    if not asking.pursues(origin, peer) and buffer.available(origin) < head:
        asking.open_gap(origin, peer, now_ns)
    dot = buffer.waits_for(origin)
    seen = None if dot is None else {origin}
    while dot is not None and seen is not None and dot.origin not in seen:
        # Who issued what depends on it has it.
        asking.open_gap(dot.origin, peer, now_ns)
        seen.add(dot.origin)
        dot = buffer.waits_for(dot.origin)


def _take_range(replica: Replica, event: Received, reply: RangeReply, out: list[Effect]) -> None:
    origin, peer, now = reply.origin, event.peer, event.at.now_ns
    if replica.state.lives.is_over(origin) and peer not in replica.state.lives.members:
        # Only from members: then what they agree upon is all there will ever be.
        return
    before = replica.state.buffer.available(origin)
    _take_updates(replica, event, origin, reply.updates, reply.head, out)
    useful = replica.state.buffer.available(origin) > before
    replica.anti_entropy.answered(origin, peer, useful)
    if reply.low > reply.first and before < reply.first:
        # No log there reaches back any more.
        replica.synced = False
        _start_session(replica, event.at, out, peer)
    elif useful:
        out += replica.anti_entropy.requests(replica.state.buffer, replica.origin, now, urgent=True)


def _take_digest(replica: Replica, event: Received, digest: Digest, out: list[Effect]) -> None:
    if not _follow_clock(replica, Timestamp(digest.wall_ns, digest.logical, event.peer), event.at, out):
        return
    if digest.reading_ns and replica.peer_clocks.jumped:
        replica.peer_clocks.told(event.peer, digest.reading_ns, event.at.wall_ns, event.at.now_ns)
    changes = Changes(event.at.now_ns)
    for origin in digest.over:
        _bury(replica, origin, event.at, changes, out)
    vector = replica.anti_entropy.take_digest(event.peer, digest)
    if vector is not None:
        _learn_heads(replica, vector, event.peer, event.at.now_ns, out)
        out += replica.anti_entropy.requests(replica.state.buffer, replica.origin, event.at.now_ns)
    if not digest.answer and event.peer in replica.anti_entropy.peers():
        out.append(_digest(replica, event.peer, event.at, answer=True))
    replica.settle(changes, out)


def _learn_heads(replica: Replica, vector: VersionVector, peer: NodeId, now_ns: int, out: list[Effect]) -> None:
    """A peer has applied that much: whatever is missing of it here can be had from it."""
    buffer = replica.state.buffer
    for origin in vector:
        if origin.node == replica.origin.node and origin.incarnation >= replica.origin.incarnation:
            if origin != replica.origin or vector[origin] > buffer.applied(origin):
                replica.fence(origin.incarnation, out)
            continue
        if vector[origin] > buffer.available(origin) and not buffer.retired(origin):
            if not buffer.knows(origin) and buffer.num_origins() >= limits.MAX_ORIGINS:
                continue
            buffer.note_head(origin, vector[origin])
            _pursue(replica, origin, peer, now_ns, vector[origin])


def _take_page(replica: Replica, event: Received, page: SyncPage, out: list[Effect]) -> None:
    session = replica.session
    if session is None or event.peer != session.peer or page.session != session.number or page.asked != session.cursor:
        return
    if session.target is not None:
        return
    if not page.ready:
        changes = Changes(event.at.now_ns)
        if replica.state.scopes.size + len(page.raises) > limits.MAX_RAISES:
            raise MalformedUpdateError(what="synchronisation", peer=event.peer, reason="its purges do not end")
        replica.state.restore_raises(page.raises, changes)
        if not replica.config.raises:
            # Whoever has them on disk publishes them; who only heard of them comes later, and seldom has to.
            replica.restore_at_ns = event.at.now_ns + _UPKEEP_INTERVAL_NS
        replica.settle(changes, out)
        if page.cursor:
            session.go_on(page.cursor, event.at.now_ns + replica.config.reply_timeout_ns)
            out.append(SendTo(event.peer, session.request()))
            return
        replica.session = None
        replica.new_peers.add(event.peer)
        if replica.new_peers.issuperset(replica.anti_entropy.peers()):
            # All are as new as we are: there is nothing to learn.
            replica.synced = True
            replica.become_ready(out)
        else:
            _start_session(replica, event.at, out)
        return
    stamp = Timestamp(page.wall_ns, page.logical, event.peer)
    if not _follow_clock(replica, stamp, event.at, out, joining=not replica.ready):
        return
    changes = Changes(event.at.now_ns)
    for origin in page.over:
        _bury(replica, origin, event.at, changes, out)
    if replica.session is None:
        replica.settle(changes, out)  # the peer says that it is over itself
        return
    if session.misses_ends(page, replica.state):
        _abandon(replica, changes, out)
        _start_session(replica, event.at, out, event.peer, have=VersionVector())
        replica.settle(changes, out)
        return
    session.take(page, replica.state, changes)
    session.go_on(page.cursor, event.at.now_ns + replica.config.reply_timeout_ns)
    for reach in page.vector:
        lately = reach.origin
        if lately.node != replica.origin.node or lately.incarnation < replica.origin.incarnation:
            _meet(replica, lately, changes, out)
    _learn_heads(replica, VersionVector.of(page.vector), event.peer, event.at.now_ns, out)
    if session.target is None:
        out.append(SendTo(event.peer, session.request()))
    _close_session(replica, changes, out)
    out += replica.anti_entropy.requests(replica.state.buffer, replica.origin, event.at.now_ns, urgent=True)
    replica.settle(changes, out)


def _start_session(
    replica: Replica,
    at: Instant,
    out: list[Effect],
    peer: NodeId | None = None,
    have: VersionVector | None = None,
) -> None:
    """Take the state of a peer, unless that was done or is being done: what is not covered by `have`, which is what is
    applied here."""
    if replica.synced or replica.session is not None:
        return
    peers = replica.anti_entropy.peers()
    if peer is None or peer not in peers:
        known_to_be_new = replica.new_peers
        later = [name for name in peers if name not in known_to_be_new] or peers
        if not later:
            return
        peer = later[replica.sessions % len(later)]
    replica.sessions += 1
    deadline = at.now_ns + replica.config.reply_timeout_ns
    have = replica.state.buffer.vector() if have is None else have
    replica.session = sync.Session(replica.sessions, peer, have, deadline)
    out.append(ReportResync(peer, "started"))
    out.append(SendTo(peer, replica.session.request()))


def _close_session(replica: Replica, changes: Changes, out: list[Effect]) -> None:
    """Commit the synchronisation once everything it needs is here."""
    session = replica.session
    if session is not None and session.complete(replica.state):
        replica.session = None
        session.commit(replica.state, changes)
        replica.synced = True
        out.append(ReportResync(session.peer, "done"))
        replica.become_ready(out)


def _abandon(replica: Replica, changes: Changes, out: list[Effect]) -> None:
    session = replica.session
    if session is not None:
        replica.session = None
        session.abandon(replica.state, changes)
        out.append(ReportResync(session.peer, "given up"))


def _meet(replica: Replica, origin: Origin, changes: Changes, out: list[Effect]) -> None:
    """An origin was heard of: a life before it is over."""
    former = replica.state.lives.seen(origin, changes.now_ns)
    if former is not None:
        _end_life(replica, former, changes, out, None)


def _meet_asker(replica: Replica, event: Received, out: list[Effect]) -> None:
    """Whoever takes our state is a life to wait for before anything is forgotten, admitted yet or not."""
    if event.incarnation is not None and event.peer != replica.origin.node:
        changes = Changes(event.at.now_ns)
        _meet(replica, Origin(event.peer, event.incarnation), changes, out)
        replica.settle(changes, out)


def _restore_raises(replica: Replica, at: Instant) -> list[Effect]:
    try:
        return local.restore_raises(replica, at)
    except ClockBoundReachedError:
        return []  # a bound was asked for by this tick; the next one will do


def _bury(replica: Replica, origin: Origin, at: Instant, changes: Changes, out: list[Effect]) -> None:
    """Membership, or a peer that membership told, says that this life is over."""
    if origin.node == replica.origin.node:
        if origin.incarnation >= replica.origin.incarnation:
            replica.fence(origin.incarnation, out)
            return
    _meet(replica, origin, changes, out)
    if replica.state.lives.died(origin, changes.now_ns):
        _end_life(replica, origin, changes, out, at)


def _end_life(replica: Replica, origin: Origin, changes: Changes, out: list[Effect], at: Instant | None) -> None:
    """Nothing that life claimed is readable; who waits for what it alone had is told."""
    replica.state.claims.drop_holder(origin, changes.claims)
    for ended in replica.state.lives.over():
        # What is parked of a life that is over is only to come from members that applied it, and what it follows.
        replica.state.buffer.forget_parked(ended)
    replica.anti_entropy.remove_peer(origin)
    replica.new_peers.discard(origin.node)
    replica.ahead.discard(origin.node)
    replica.peer_clocks.forget(origin.node)
    if replica.session is not None and replica.session.peer == origin.node:
        _abandon(replica, changes, out)
    if at is not None:
        _start_session(replica, at, out)
    replica.orphan_shard = 0
    _scan_orphans(replica, changes)
    for event in (*replica.waiters.on_origin(origin), *replica.waiters.complete()):
        replica.judge(event, out)


def _is_self(replica: Replica, origin: Origin, out: list[Effect]) -> bool:
    """Whether that is a later life of this very node; then this one is over."""
    if origin.node == replica.origin.node and origin.incarnation > replica.origin.incarnation:
        replica.fence(origin.incarnation, out)
        return True
    return False


def _follow_clock(
    replica: Replica, stamp: Timestamp, at: Instant, out: list[Effect], joining: bool = False, fresh: bool = True
) -> bool:
    """Merge a peer's stamp; False when it cannot be followed, and the message must be left alone. One that is not
    `fresh` was given out some time ago and says little of what the peer's clock reads now."""
    try:
        if joining:
            replica.adopt(stamp, at, out)
        else:
            replica.follow(stamp, at, out, fresh)
    except (RemoteClockAheadError, ClockBoundReachedError):
        return False
    return True


def _digest(replica: Replica, peer: NodeId, at: Instant, answer: bool) -> SendTo:
    buffer = replica.state.buffer
    over = replica.state.lives.over()
    return replica.anti_entropy.digest_for(
        peer, buffer.vector(), replica.clock.last, buffer.retired, over, answer, at.wall_ns
    )


def _compare(replica: Replica, at: Instant, out: list[Effect]) -> None:
    """Say how far we are: to all once after the last update, in full to one peer after another."""
    if replica.unannounced:
        replica.unannounced = False
        head = replica.state.buffer.applied(replica.origin)
        out.append(BroadcastUpdates(UpdateBatch(replica.origin, head, ())))
    peer = replica.anti_entropy.next_peer()
    if peer is not None:
        out.append(_digest(replica, peer, at, answer=False))


def _scan_orphans(replica: Replica, changes: Changes) -> None:
    """Find requests whose owner is lost, some at a time."""
    scanned = 0
    entries = replica.state.entries
    while replica.orphan_shard is not None and scanned < _SCAN_ROWS:
        shard = replica.orphan_shard
        for request_id, _ in entries.owned_by(shard, replica.state.lives.is_over):
            replica.state.bury(request_id, changes)
        scanned += 1 + entries.shard_size(shard)
        replica.orphan_shard = shard + 1 if shard + 1 < entries.num_shards else None


def _upkeep(replica: Replica, changes: Changes) -> None:
    """Forget what every member has: log entries, ended requests, lives that are over."""
    state = replica.state
    vector = state.buffer.vector()
    stable = replica.anti_entropy.stable(vector, state.buffer.retired)
    if stable is None or replica.session is not None or (not replica.synced and replica.anti_entropy.peers()):
        return
    if state.lives.strangers(replica.origin, changes.now_ns - replica.config.retire_after_ns):
        return  # they may write what is older, until they have heard what we have
    state.log.cut_stable(stable)
    state.entries.collect(stable)
    for origin in state.lives.over():
        if changes.now_ns - state.lives.over_since(origin) < replica.config.retire_after_ns:
            continue
        older = any(other.node == origin.node and other < origin for other in state.lives.over())
        if not older and replica.anti_entropy.agreed_over(origin, vector[origin]):
            state.retire(Origin(origin.node, Incarnation(origin.incarnation + 1)), changes)

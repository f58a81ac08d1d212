"""One replica as a machine: `step(event) -> list[effect]`.

Decides what each event changes and whom to tell. It reads no clock and draws no chance; what it may do with time it
learns from the events. Everything it knows is in `State`; this module and its two halves (local.py for what this
process says, remote.py for what peers say) only move between events, state and effects.

Invariants beside those of its parts: G1: the applied set is closed under "depends on" at every step. G2: a refused
event changes nothing. G3: once fenced, always fenced. G4: replicas that received the same updates and know the same
lives to be over have equal state.
"""

from dataclasses import dataclass
from typing import Final

from kv_consistency import limits
from kv_consistency.anti_entropy import AntiEntropy
from kv_consistency.effects import (
    ClaimsChanged,
    Effect,
    PersistClockBound,
    ReplicaReady,
    ReportClock,
    ReportWallAccepted,
    RestartReplica,
    WaiterFailed,
    WaiterReady,
)
from kv_consistency.errors import (
    ClockBoundReachedError,
    ClockJumpedError,
    ConsistencyError,
    FencedError,
    HolderLostError,
    IncompleteError,
    NotFoundError,
    RemoteClockAheadError,
    ReplicaFencedError,
    StaleReplicaError,
)
from kv_consistency.events import Instant, WaitFor
from kv_consistency.hlc import HybridLogicalClock, Timestamp
from kv_consistency.peer_clocks import PeerClocks
from kv_consistency.state import Changes, State
from kv_consistency.sync import Session
from kv_consistency.update import OwnerEpoch, RaiseCount
from kv_consistency.version_vector import CausalToken, Origin
from kv_consistency.waiters import Waiters
from kv_core.ids import Incarnation, NodeId, RequestId


@dataclass(frozen=True, slots=True)
class ReplicaConfig:
    """What a replica is told once.

    Args:
        clock_floor_ns: the clock bound that the former life persisted; stamps begin there.
        clock_horizon_ns: how far ahead the bound is persisted (`limits.CLOCK_HORIZON_NS`); None: stamps are not
            bounded, and a restart may issue stamps below those of the former life.
        raises: purges that the former life persisted (`KvCacheConsistencyManager.raises`), for nodes whose blocks
            outlive a restart. What no peer knows of them any more is published again.
    """

    offset_max_ns: int = limits.OFFSET_MAX_NS
    jump_max_ns: int = limits.JUMP_MAX_NS
    join_offset_max_ns: int = limits.JOIN_OFFSET_MAX_NS
    clock_floor_ns: int = 0
    clock_horizon_ns: int | None = None
    digest_interval_ns: int = limits.DIGEST_INTERVAL_NS
    gap_grace_ns: int = limits.GAP_GRACE_NS
    reply_timeout_ns: int = limits.REPLY_TIMEOUT_NS
    retire_after_ns: int = limits.RETIRE_AFTER_NS
    reply_bytes_max: int = limits.MAX_REPLY_BYTES
    log_bytes_max: int = limits.MAX_LOG_BYTES
    entries_max: int = limits.MAX_ENTRIES
    raises: tuple[RaiseCount, ...] = ()


DEFAULT_CONFIG: Final = ReplicaConfig()


class Replica:
    """The parts of one replica, and what local.py and remote.py share."""

    def __init__(self, node: NodeId, incarnation: Incarnation, config: ReplicaConfig = DEFAULT_CONFIG) -> None:
        self.origin = Origin(node, incarnation)
        self.config = config
        horizon = config.clock_horizon_ns
        self.clock = HybridLogicalClock(
            node,
            offset_max_ns=config.offset_max_ns,
            jump_max_ns=config.jump_max_ns,
            floor_ns=config.clock_floor_ns,
            bound_ns=None if horizon is None else config.clock_floor_ns,
        )
        self.state = State(self.origin, config.raises, config.log_bytes_max, config.entries_max)
        self.anti_entropy = AntiEntropy(config.gap_grace_ns, config.reply_timeout_ns)
        self.anti_entropy.start_after(node)
        self.waiters = Waiters()
        self.session: Session | None = None
        self.sessions = 0
        self.ready = False
        self.synced = False
        self.new_peers: set[NodeId] = set()
        self.bound_asked_ns = config.clock_floor_ns
        self.peer_clocks = PeerClocks(config.offset_max_ns, config.reply_timeout_ns)
        self.ahead: set[NodeId] = set()
        self.fenced: Incarnation | None = None
        self.orphan_shard: int | None = None
        self.next_digest_ns = 0
        self.next_upkeep_ns = 0
        self.restore_at_ns = 0
        self.unannounced = False

    def find_alone(self) -> None:
        """Without a peer there is nobody to learn from: be ready."""
        if not self.ready and not self.anti_entropy.peers():
            self.ready = True

    def missing(self, token: CausalToken) -> dict[Origin, int]:
        """The dots of a token that are not applied here."""
        covers = self.state.buffer.covers
        return {dot.origin: dot.n for dot in token.dots if not covers(dot)}

    def require(self, token: CausalToken) -> None:
        """Raises unless this replica is ready and has applied `token`."""
        if not self.ready:
            raise StaleReplicaError(replica=str(self.origin), have="nothing yet", need=str(token))
        missing = self.missing(token)
        if missing:
            lost = sorted(origin for origin in missing if self.state.lives.is_over(origin))
            if lost:
                raise HolderLostError(what="an update this read follows", holders=", ".join(map(str, lost)))
            have = ", ".join(f"{origin}:{self.state.buffer.applied(origin)}" for origin in sorted(missing))
            raise StaleReplicaError(replica=str(self.origin), have=have, need=str(token))

    def living(self, nodes: tuple[Origin, ...]) -> tuple[Origin, ...]:
        """Those whose life goes on."""
        is_over = self.state.lives.is_over
        return tuple(node for node in nodes if not is_over(node))

    def readable(self, request_id: RequestId, required_seq_len: int, epoch: OwnerEpoch | None = None) -> Timestamp:
        """The version of an entry whose first `required_seq_len` tokens are readable; errors as the facade's."""
        row = self.state.entries.get(request_id)
        if row is not None and epoch is not None and epoch < row.home.epoch:
            raise FencedError(request_id=request_id, epoch=str(epoch), current=str(row.home.epoch))
        if row is None or row.ended or self.state.purged(row.home.namespace, row.purges):
            raise NotFoundError(request_id=request_id)
        owner = row.home.epoch.owner
        if owner is not None and self.state.lives.is_over(owner):
            raise NotFoundError(request_id=request_id)
        if epoch is not None and epoch > row.home.epoch:
            raise IncompleteError(request_id=request_id, have=0, need=required_seq_len)
        if row.seq_len < required_seq_len:
            raise IncompleteError(request_id=request_id, have=row.seq_len, need=required_seq_len)
        if row.home.nodes and not self.living(row.home.nodes):
            lost = ", ".join(map(str, row.home.nodes))
            raise HolderLostError(what=f"the KV of request {request_id!r}", holders=lost)
        return row.stamp

    def tick(self, at: Instant, out: list[Effect]) -> Timestamp:
        """The stamp of a local event; a jump of the wall is reported and not followed."""
        return self.clock.tick(self.trusted_wall(at, out))

    def trusted_wall(self, at: Instant, out: list[Effect]) -> int:
        """The wall reading, or what the wall should read where it jumped forward."""
        try:
            self.clock.check_jump(at.wall_ns, at.now_ns)
        except ClockJumpedError as error:
            return self.instead_of_jump(error, at, out)
        if self.peer_clocks.jumped:
            self.peer_clocks.wall_is_right()
        return at.wall_ns

    def instead_of_jump(self, error: ClockJumpedError, at: Instant, out: list[Effect]) -> int:
        """Report a jump, once an episode; what the wall should read, or what it reads once peers confirm it: then it
        was wrong before and is right now, as when a time service corrects a clock that began slow."""
        if not self.peer_clocks.jumped:
            self.peer_clocks.wall_jumped(at.now_ns)
            out.append(ReportClock(error, None))
        elif self.peer_clocks.wall_is_confirmed(at.now_ns):
            out.append(ReportWallAccepted(at.wall_ns - self.clock.expected_wall_ns(at.now_ns)))
            self.clock.accept_wall(at.wall_ns, at.now_ns)
            self.peer_clocks.wall_is_right()
            return at.wall_ns
        return self.clock.expected_wall_ns(at.now_ns)

    def follow(self, stamp: Timestamp, at: Instant, out: list[Effect], fresh: bool = True) -> Timestamp:
        """Rise above a peer's stamp; one that lies too far ahead is reported once until a right one comes. A `fresh`
        one counts among the peers' clocks (peer_clocks.py)."""
        clocks, ahead, wall_ns = self.peer_clocks, False, at.wall_ns
        try:
            if self.synced and not clocks.jumped:
                # Nearly always: nothing is in doubt that peers' clocks would be asked for.
                try:
                    risen = self.clock.merge(stamp, wall_ns, at.now_ns)
                except ClockJumpedError as error:
                    wall_ns = self.instead_of_jump(error, at, out)
                    risen = self.clock.merge(stamp, wall_ns)
            else:
                wall_ns = self.trusted_wall(at, out)
                if not self.synced and clocks.most_are_ahead(at.now_ns):
                    # We are new to a cluster that lives ahead of walls which were set back.
                    self.clock.adopt_floor(stamp, wall_ns, self.config.join_offset_max_ns)
                risen = self.clock.merge(stamp, wall_ns)
        except RemoteClockAheadError as error:
            ahead = True
            self.report_ahead(stamp.node, error, out)
            raise
        except ClockBoundReachedError:
            self.want_bound(max(stamp.wall_ns, wall_ns), out)
            raise
        finally:
            if fresh and (ahead or not self.synced or clocks.jumped):
                clocks.heard(stamp.node, stamp.wall_ns, at.wall_ns, at.now_ns, ahead)
        if self.ahead:
            self.ahead.discard(stamp.node)
        return risen

    def adopt(self, stamp: Timestamp, at: Instant, out: list[Effect]) -> None:
        """Begin at the stamp of the peer whose state is being taken, further ahead than could be followed."""
        try:
            self.clock.adopt_floor(stamp, at.wall_ns, self.config.join_offset_max_ns)
        except RemoteClockAheadError as error:
            self.report_ahead(stamp.node, error, out)
            raise
        except ClockBoundReachedError:
            self.want_bound(max(stamp.wall_ns, self.trusted_wall(at, out)), out)
            raise
        self.ahead.discard(stamp.node)

    def report_ahead(self, node: NodeId, error: RemoteClockAheadError, out: list[Effect]) -> None:
        """Say that a peer's clock is ahead, once an episode."""
        if node not in self.ahead:
            self.ahead.add(node)
            out.append(ReportClock(error, node))

    def want_bound(self, wall_ns: int, out: list[Effect]) -> None:
        """Have a higher clock bound persisted in good time."""
        horizon = self.config.clock_horizon_ns
        if horizon is None:
            return
        wall_ns = max(wall_ns, self.clock.wall_ns)
        if wall_ns + horizon // 2 >= self.bound_asked_ns:
            self.bound_asked_ns = wall_ns + horizon
            out.append(PersistClockBound(self.bound_asked_ns))

    def fence(self, seen: Incarnation, out: list[Effect]) -> None:
        """This life is over, the cluster says."""
        self.fenced = seen
        out.append(RestartReplica(seen))

    def refuse_fenced(self) -> None:
        """Raises once this replica is fenced."""
        if self.fenced is not None:
            reason = f"incarnation {self.fenced} was seen"
            raise ReplicaFencedError(node=self.origin.node, incarnation=self.origin.incarnation, reason=reason)

    def become_ready(self, out: list[Effect]) -> None:
        """Reads may be answered from now on."""
        if not self.ready:
            self.ready = True
            out.append(ReplicaReady())
            for event in self.waiters.complete():
                self.judge(event, out)

    def settle(self, changes: Changes, out: list[Effect]) -> None:
        """Tell what a step changed: the index, then holders of resources, then those that wait."""
        if changes.claims:
            out.append(ClaimsChanged(tuple(changes.claims)))
        if changes.requests:
            out += changes.requests
        if self.waiters:
            for origin in changes.advanced:
                for event in self.waiters.advanced(origin, self.state.buffer.applied(origin)):
                    self.judge(event, out)
            for request_id in changes.written:
                for event in self.waiters.on_request(request_id):
                    self.judge(event, out)
            if changes.purged:
                for event in self.waiters.complete():
                    self.judge(event, out)

    def judge(self, event: WaitFor, out: list[Effect], final: bool = False) -> bool:
        """Tell a waiter if its case is decided, or `final`; returns whether it was told."""
        verdict: Timestamp | None = None
        try:
            self.require(event.after)
            if event.request_id is not None:
                verdict = self.readable(event.request_id, event.required_seq_len)
        except (StaleReplicaError, IncompleteError) as error:
            if not final:
                return False
            self._fail(event, error, out)
        except NotFoundError as error:
            row = None if event.request_id is None else self.state.entries.get(event.request_id)
            if row is None and not final:
                return False
            self._fail(event, error, out)
        except ConsistencyError as error:
            self._fail(event, error, out)
        else:
            self.waiters.remove(event.waiter)
            out.append(WaiterReady(event.waiter, verdict))
        return True

    def _fail(self, event: WaitFor, error: ConsistencyError, out: list[Effect]) -> None:
        self.waiters.remove(event.waiter)
        out.append(WaiterFailed(event.waiter, error))

    def check(self) -> None:
        """Assert the invariants of every part."""
        self.state.check()
        self.waiters.check()

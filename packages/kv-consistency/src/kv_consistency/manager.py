"""The facade: what exists, whether it may be read, and who holds which prefix.

`KvCacheConsistencyManager` is a replica and a set of questions about it. Everything that changes it is an event, given
to `step`, or one of the methods below, which make that event and keep its effects for `drain`. Questions change
nothing but an entry's access time.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import msgspec

from kv_consistency import local, remote
from kv_consistency.effects import Effect, Issued
from kv_consistency.events import (
    NOTHING,
    CancelWait,
    ClockAccepted,
    ClockBoundPersisted,
    Event,
    GapNoticed,
    Instant,
    LocalClear,
    LocalEnd,
    LocalOwn,
    LocalRaise,
    LocalRegister,
    LocalRemove,
    LocalStore,
    PeerDied,
    PeerJoined,
    Received,
    Tick,
    WaitFor,
)
from kv_consistency.hlc import ClockStats, HybridLogicalClock, Timestamp
from kv_consistency.replica import DEFAULT_CONFIG, Replica, ReplicaConfig
from kv_consistency.update import NamespaceRef, OwnerEpoch, RaiseCount, Tier
from kv_consistency.version_vector import CausalToken, Dot, Origin, VersionVector
from kv_core.hashing import BlockHash
from kv_core.ids import Incarnation, NodeId, RequestId

FIRST_LIFE: Final = Incarnation(1)
_START: Final = Instant(0, 0)


@dataclass(frozen=True, slots=True)
class KvCacheEntry:
    """What a replica knows of one request's KV.

    Attributes:
        version: stamp of the last update; it only grows.
        seq_len: tokens of KV.
        checksum: XXH3 over the block CRCs in order; 0 when it is not known yet.
        nodes: living nodes that hold all of it.
        access_ns: monotonic time of the last read or write here.
        epoch: the request's owner.
        token: what a read elsewhere must follow to find this.
    """

    request_id: RequestId
    version: Timestamp
    seq_len: int
    checksum: int
    nodes: tuple[NodeId, ...]
    access_ns: int
    epoch: OwnerEpoch
    namespace: NamespaceRef | None
    token: CausalToken


@dataclass(frozen=True, slots=True)
class PrefixHolder:
    """A holder of a prefix: which life of which node, how the bytes lie, and the slowest tier that reading needs."""

    holder: Origin
    shape: bytes
    tier: Tier


@dataclass(frozen=True, slots=True)
class PrefixOverlap:
    """The longest prefix that is held: `num_blocks` from block 0 on, without a hole, and who holds all of them."""

    num_blocks: int
    num_tokens: int
    holders: tuple[PrefixHolder, ...]


@dataclass(frozen=True, slots=True)
class ReplicaStats:
    """A snapshot of sizes and counters.

    Attributes:
        applied: updates applied, of all origins that are followed.
        lag: replication lag in versions (`lag()`), summed.
        parked: updates that wait for what they follow.
        dropped: updates that found the causal buffer full.
        truncated: updates cut from logs before everybody had them.
        refused: operations beyond a bound of limits.py.
    """

    ready: bool
    origins: int
    applied: int
    lag: int
    claims: int
    entries: int
    waiters: int
    parked: int
    parked_bytes: int
    dropped: int
    duplicates: int
    log_bytes: int
    truncated: int
    refused: int
    ranges_asked: int
    sessions: int
    clock: ClockStats


class KvCacheConsistencyManager:
    """One replica of the cluster's metadata.

    Args:
        node: this node.
        incarnation: this life of it, above every one before (`next_incarnation`).
        config: durations and bounds.
    """

    def __init__(
        self, node: NodeId, incarnation: Incarnation = FIRST_LIFE, config: ReplicaConfig = DEFAULT_CONFIG
    ) -> None:
        self._replica = Replica(node, incarnation, config)
        self._at = _START
        self._effects: list[Effect] = []

    @property
    def origin(self) -> Origin:
        """This life of this node."""
        return self._replica.origin

    @property
    def clock(self) -> HybridLogicalClock:
        """The process's one clock, to look at; what is no update is stamped by `stamp` and `follow`."""
        return self._replica.clock

    @property
    def ready(self) -> bool:
        """Whether reads and local events are taken: it has synchronised, or has no peer."""
        return self._replica.ready

    def step(self, event: Event) -> list[Effect]:
        """Apply one event; returns what must be done.

        Raises:
            ConsistencyError: the event is refused, and nothing was changed.
            ReplicaFencedError: the cluster holds this life for over (`RestartReplica` was given out).
        """
        replica = self._replica
        if replica.fenced is not None:
            replica.refuse_fenced()
        if isinstance(event, Received):
            # Not a case of the match: most events are this one, and matching costs as much as the rest of the way.
            self._at = event.at
            return remote.on_received(replica, event)
        match event:
            case LocalStore(at):
                self._at = at
                return local.on_store(replica, event)
            case LocalRemove(at):
                self._at = at
                return local.on_remove(replica, event)
            case LocalRegister(at):
                self._at = at
                return local.on_register(replica, event)
            case Tick(at):
                self._at = at
                return remote.on_tick(replica, event)
            case WaitFor(at):
                self._at = at
                return remote.on_wait(replica, event)
            case CancelWait():
                return remote.on_cancel(replica, event)
            case LocalClear(at):
                self._at = at
                return local.on_clear(replica, event)
            case LocalOwn(at):
                self._at = at
                return local.on_own(replica, event)
            case LocalEnd(at):
                self._at = at
                return local.on_end(replica, event)
            case LocalRaise(at):
                self._at = at
                return local.on_raise(replica, event)
            case PeerJoined(at):
                self._at = at
                return remote.on_joined(replica, event)
            case PeerDied(at):
                self._at = at
                return remote.on_died(replica, event)
            case GapNoticed(at):
                self._at = at
                return remote.on_gap(replica, event)
            case ClockAccepted(at):
                self._at = at
                return remote.on_clock_accepted(replica, event)
            case ClockBoundPersisted():
                return remote.on_bound(replica, event)

    def drain(self) -> list[Effect]:
        """The effects of the methods called since the last time, in order."""
        effects, self._effects = self._effects, []
        return effects

    def stamp(self, at: Instant) -> Timestamp:
        """A stamp for something that is no update, such as a bus envelope. A jump of the wall is not followed but
        reported (`drain`).

        Raises:
            ClockBoundReachedError: a higher clock bound must be persisted first.
        """
        return self._replica.tick(at, self._effects)

    def trusted_wall_ns(self, at: Instant) -> int:
        """The wall reading, or what it should be by the monotonic clock after a jump."""
        return self._replica.trusted_wall(at, self._effects)

    def follow(self, remote: Timestamp, at: Instant) -> Timestamp:
        """The stamp of receiving something that is no update and carries `remote`. A peer's clock that is too far
        ahead is reported as well, once until it is right again (`drain`). A newcomer to whom most peers are ahead
        follows them after `ReplicaConfig.reply_timeout_ns`, by `join_offset_max_ns` at most.

        Raises:
            RemoteClockAheadError, ClockBoundReachedError: as the clock.
        """
        return self._replica.follow(remote, at, self._effects)

    def register_update(
        self,
        request_id: RequestId,
        new_seq_len: int,
        written_nodes: Sequence[NodeId],
        *,
        checksum: int = 0,
        start: int | None = None,
        epoch: OwnerEpoch | None = None,
        namespace: NamespaceRef | None = None,
        after: CausalToken = NOTHING,
        at: Instant | None = None,
    ) -> Timestamp:
        """The KV of a request now reaches `new_seq_len` tokens, all of it on `written_nodes` (see `LocalRegister`).

        Returns:
            The version of the entry; it only grows.

        Raises:
            ShrinkingUpdateError, SkippingUpdateError: it would lose or skip tokens; both name both lengths.
            FencedError: the request has a newer owner than `epoch`.
            NotFoundError: the request has ended; also where `epoch` is of an owner that is followed here and nothing is
                known of the request: wait for the owner's token before.
            StaleReplicaError: `after` is not applied here yet.
        """
        nodes = tuple(written_nodes)
        return self._say(
            LocalRegister(at or self._at, request_id, new_seq_len, nodes, checksum, start, epoch, namespace, after)
        ).stamp

    def take_ownership(
        self, request_id: RequestId, *, keep: bool = False, after: CausalToken = NOTHING, at: Instant | None = None
    ) -> OwnerEpoch:
        """This node owns the request now; writers of former epochs are fenced (see `LocalOwn`)."""
        self._say(LocalOwn(at or self._at, request_id, keep, after))
        row = self._replica.state.entries.get(request_id)
        assert row is not None
        return row.home.epoch

    def end_request(self, request_id: RequestId, epoch: OwnerEpoch | None = None, *, at: Instant | None = None) -> None:
        """The request is over; unknown and ended requests are left alone.

        Raises:
            FencedError: it has a newer owner than `epoch`.
        """
        self._effects += self.step(LocalEnd(at or self._at, request_id, epoch))

    def raise_scopes(
        self, scopes: Sequence[bytes], *, after: CausalToken = NOTHING, at: Instant | None = None
    ) -> CausalToken:
        """Purge (see `LocalRaise`); a read that follows the token finds nothing that did not follow the purge."""
        return CausalToken.of((self._say(LocalRaise(at or self._at, tuple(scopes), after)).dot,))

    def verify_readable(
        self,
        request_id: RequestId,
        required_seq_len: int,
        *,
        after: CausalToken = NOTHING,
        epoch: OwnerEpoch | None = None,
        at: Instant | None = None,
    ) -> Timestamp:
        """The version of a request whose KV of `[0, required_seq_len)` is readable now.

        Raises:
            NotFoundError: never registered, ended or purged.
            IncompleteError: it has fewer tokens.
            StaleReplicaError: this replica has not applied `after`; wait for it with `WaitFor`.
            FencedError: the caller works for a former owner.
            HolderLostError: every node that held it, or the origin of a dot in `after`, died.
        """
        replica = self._replica
        replica.refuse_fenced()
        replica.find_alone()
        replica.require(after)
        version = replica.readable(request_id, required_seq_len, epoch)
        row = replica.state.entries.get(request_id)
        if row is not None:
            row.access_ns = (at or self._at).now_ns
        return version

    def find_prefix_match(
        self, prefix_hash: Sequence[BlockHash] | Sequence[bytes], min_overlap: int = 1
    ) -> PrefixOverlap | None:
        """The longest held prefix of at least `min_overlap` tokens, or None.

        Args:
            prefix_hash: the hashes of a prompt's blocks from block 0 on, as `BlockHash` (both hashes must then agree)
                or as sequence hashes alone.

        A claim is a hint: the holder compares tokens when it grants a read. Fit for a few hundred holders; a router
        feeds `ClaimsChanged` into an index of its own.
        """
        claims = self._replica.state.claims
        blocks, checks = _columns(prefix_hash)
        best: list[PrefixHolder] = []
        longest = block_size = 0
        for holder, namespace, shape, length, tier in claims.runs(blocks, checks):
            if length > longest:
                longest, block_size, best = length, namespace.block_size, []
            if length == longest:
                best.append(PrefixHolder(holder, shape, tier))
        if not best or longest * block_size < min_overlap:
            return None
        return PrefixOverlap(longest, longest * block_size, tuple(sorted(best, key=_by_speed)))

    def entry(self, request_id: RequestId) -> KvCacheEntry:
        """What is known of a request, complete or not.

        Raises:
            NotFoundError, HolderLostError: nothing readable.
        """
        replica = self._replica
        version = replica.readable(request_id, 0)
        row = replica.state.entries.get(request_id)
        assert row is not None
        home = row.home
        return KvCacheEntry(
            request_id=request_id,
            version=version,
            seq_len=row.seq_len,
            checksum=row.checksum,
            nodes=tuple(node.node for node in replica.living(home.nodes)),
            access_ns=row.access_ns,
            epoch=home.epoch,
            namespace=home.namespace,
            token=CausalToken((row.dot,)),
        )

    def token(self, request_id: RequestId) -> CausalToken:
        """What a read elsewhere must follow to see the entry as it is here.

        Raises:
            NotFoundError, HolderLostError: nothing readable.
        """
        return self.entry(request_id).token

    def token_of_claims(self, holder: Origin) -> CausalToken:
        """What a read elsewhere must follow to see what is known here of a holder's claims."""
        n = self._replica.state.buffer.applied(holder)
        return CausalToken((Dot(holder, n),)) if n else NOTHING

    def namespace_epoch(self, namespace: NamespaceRef) -> int:
        """Purges of a namespace applied here; kept beside blocks that outlive a restart (`Run.epoch`)."""
        return self._replica.state.scopes.purges(namespace)

    @property
    def num_purges(self) -> int:
        """Grows whenever `namespace_epoch` of any namespace may have grown."""
        return self._replica.state.scopes.num_raised

    def raises(self) -> tuple[RaiseCount, ...]:
        """Every purge known here; persisted with blocks that outlive a restart, given back in `ReplicaConfig`."""
        return tuple(msgspec.structs.replace(row, via=None) for row in self._replica.state.scopes.rows())

    def vector(self) -> VersionVector:
        """What is applied here."""
        return self._replica.state.buffer.vector()

    def is_over(self, origin: Origin) -> bool:
        """Whether this replica knows that life of a node to be over, from its own membership or from a peer's."""
        return self._replica.state.lives.is_over(origin)

    def lag(self) -> dict[Origin, int]:
        """Replication lag in versions: for each living origin, its updates known to exist and not applied here."""
        is_over = self._replica.state.lives.is_over
        return {origin: lag for origin, lag in self._replica.state.buffer.lags() if not is_over(origin)}

    def lag_of(self, peer: NodeId) -> int | None:
        """Updates of ours that a peer had not applied when it last said so; None before it did."""
        known = self._replica.anti_entropy.known(peer)
        origin = self.origin
        return None if known is None else self._replica.state.buffer.applied(origin) - known[origin]

    def stats(self) -> ReplicaStats:
        """Sizes and counters."""
        replica = self._replica
        state, buffer = replica.state, replica.state.buffer
        vector = buffer.vector()
        return ReplicaStats(
            ready=replica.ready,
            origins=buffer.num_origins(),
            applied=sum(vector[origin] for origin in vector),
            lag=sum(self.lag().values()),
            claims=state.claims.size,
            entries=state.entries.size,
            waiters=len(replica.waiters),
            parked=buffer.parked,
            parked_bytes=buffer.parked_bytes,
            dropped=buffer.dropped,
            duplicates=buffer.duplicates,
            log_bytes=state.log.nbytes,
            truncated=state.log.truncated,
            refused=state.refused + state.claims.refused,
            ranges_asked=replica.anti_entropy.ranges_asked,
            sessions=replica.sessions,
            clock=replica.clock.stats(),
        )

    def check(self) -> None:
        """Assert every invariant; for tests, it looks at everything."""
        self._replica.check()

    def _say(self, event: LocalRegister | LocalOwn | LocalRaise) -> Issued:
        effects = self.step(event)
        self._effects += effects
        issued = effects[0]
        assert isinstance(issued, Issued)
        return issued


def _columns(hashes: Sequence[BlockHash] | Sequence[bytes]) -> tuple[list[bytes], list[int] | None]:
    sequences: list[bytes] = []
    checks: list[int] = []
    for item in hashes:
        if isinstance(item, BlockHash):
            sequences.append(item.sequence)
            checks.append(item.check)
        else:
            sequences.append(item)
    return sequences, checks if len(checks) == len(sequences) else None


def _by_speed(holder: PrefixHolder) -> tuple[int, Origin, bytes]:
    return holder.tier, holder.holder, holder.shape

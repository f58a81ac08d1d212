"""Owns one process's replica: hands it what happens, performs what it wants, and answers its process's questions.

Every event is one call on the loop, so there is no mailbox between a node's claim and its own reads. What the replica
learns of claims goes to the prefix index at once, so a lookup never runs ahead of what the replica has applied.

S1: only this object steps its replica. S2: a local write is applied here before its caller goes on.
"""

import asyncio
import itertools
import logging
from collections.abc import Callable, Sequence
from typing import Final, Protocol, TypeVar

from kv_bus.interface import Bus, Event, Reply, Request
from kv_consistency.effects import (
    BroadcastUpdates,
    ClaimsChanged,
    Effect,
    EndCause,
    PersistClockBound,
    ReportClock,
    ReportResync,
    ReportWallAccepted,
    RequestEnded,
    RestartReplica,
    SendTo,
    WaiterFailed,
    WaiterReady,
)
from kv_consistency.errors import ClockBoundReachedError, ConsistencyError, ReplicaFencedError
from kv_consistency.events import (
    CancelWait,
    ClockBoundPersisted,
    GapNoticed,
    Instant,
    LocalEnd,
    LocalRemove,
    LocalStore,
    PeerDied,
    PeerJoined,
    Received,
    Removal,
    Tick,
    WaitFor,
)
from kv_consistency.events import Event as ReplicaEvent
from kv_consistency.manager import KvCacheConsistencyManager
from kv_consistency.messages import MESSAGES, ReplicaMessage, UpdateBatch
from kv_consistency.update import NamespaceRef, OwnerEpoch, Run, Tier, pack_hashes, pack_run, scope_id
from kv_consistency.version_vector import CausalToken, Origin
from kv_core.clock import Clock
from kv_core.errors import KVError
from kv_core.ids import Incarnation, NodeId, RequestId
from kv_core.namespace import Namespace
from kv_core.wire import Message
from kv_prefix import events as pool_events
from kv_prefix.prefix_index import PrefixIndex
from kv_services.config import Role
from kv_services.errors import ReplicaEndedError
from kv_services.membership.actor import ClusterView
from kv_services.membership.state import Effect as MemberEffect
from kv_services.membership.state import MemberDied, MemberUp
from kv_services.metrics import Metrics
from kv_services.replica.index_feed import feed
from kv_services.replica.lag import LagGauges
from kv_services.replica.outbox import UpdateOutbox
from kv_services.tenants import tenant_scope

TICK_S: Final = 0.1
NAMESPACES_MAX: Final = 4096
"""Namespaces a process remembers the purge scopes of; those that were not used for longest are forgotten, and are then
purged by digest only."""

_log = logging.getLogger(__name__)


R = TypeVar("R")
Offload = Callable[[Callable[[], None]], "asyncio.Future[None]"]


class ClockBoundKeeper(Protocol):
    """Where the clock's bound outlives the process."""

    def keep_clock_bound(self, bound_ns: int) -> None: ...


def in_thread(work: Callable[[], None]) -> "asyncio.Future[None]":
    """Run `work` in the loop's thread pool."""
    return asyncio.get_running_loop().run_in_executor(None, work)


RENEWED_NS: Final = 1_000_000_000
"""How far a bound reaches that had to be waited for: less than a horizon, so that no restart waits for longer."""


class ReplicaService:
    """One process's replica. A supervised child: `start`, `run`, `close`.

    Args:
        on_request_ended: told when a request is over for everybody, because it ended or its gateway died.
        offload: runs what touches the disk away from the loop; in a thread unless told otherwise.
    """

    def __init__(
        self,
        manager: KvCacheConsistencyManager,
        clock: Clock,
        index: PrefixIndex,
        life: ClockBoundKeeper,
        metrics: Metrics,
        on_request_ended: Callable[[RequestId, OwnerEpoch, EndCause], None] | None = None,
        offload: Offload | None = None,
    ) -> None:
        self.manager = manager
        self._clock = clock
        self._index = index
        self._life = life
        self._gauges = LagGauges(metrics)
        self._on_request_ended = on_request_ended
        self._offload: Offload = offload or in_thread
        self._bus: Bus | None = None
        self._outbox = UpdateOutbox(self._publish)
        self._waiters: dict[int, asyncio.Future[None]] = {}
        self._waiter_ids = itertools.count(1)
        self._namespaces: dict[bytes, NamespaceRef] = {}
        self._closed: asyncio.Event | None = None
        self._over: BaseException | None = None

    def prime(self) -> None:
        """Let the clock have its first bound, before anything is stamped."""
        self._step(Tick(self._now()))

    def renew_clock_bound(self) -> None:
        """Put a higher clock bound on disk and wait for it; what runs on the loop waits too.

        Raises:
            KVError: the disk does not take it: nothing can be stamped any more, and this life ends.
        """
        bound_ns = max(self.manager.trusted_wall_ns(self._now()), self.manager.clock.wall_ns) + RENEWED_NS
        try:
            self._life.keep_clock_bound(bound_ns)
        except KVError as error:
            self._over = self._over or error
            raise
        self._hear(ClockBoundPersisted(bound_ns))

    def attach(self, bus: Bus, cluster: ClusterView) -> None:
        """Join the bus: take the peers' messages, follow who lives."""
        self._bus = bus
        for message_type in MESSAGES:
            if message_type is not UpdateBatch:
                bus.handle(message_type, self._on_message)
        cluster.on_published(UpdateBatch, self._on_updates)
        cluster.on_gap(lambda node_id: self._hear(GapNoticed(self._now(), node_id)))
        cluster.on_change(self._on_member)
        cluster.known_over = lambda node_id, incarnation: self.manager.is_over(Origin(node_id, incarnation))
        self._roles = cluster.roles

    @property
    def life_over(self) -> bool:
        """Whether the cluster holds this life for over."""
        return isinstance(self._over, ReplicaOverError | ReplicaFencedError)

    async def start(self) -> None:
        self._closed = asyncio.Event()

    async def run(self) -> None:
        """Tick until closed; raise when the cluster holds this life for over, or its clock bound cannot be kept."""
        assert self._closed is not None
        while not self._closed.is_set():
            if self._over is not None:
                raise self._over
            self._hear(Tick(self._now()))
            self._drain()  # what stamping the bus's envelopes found wrong with clocks
            self._gauges.measure(self.lag(), self.manager.vector(), self._clock.monotonic_ns())
            more = self._index.sweep()
            while more and not self._closed.is_set():
                await asyncio.sleep(0)  # others have their turn between two slices
                more = self._index.sweep()
            try:
                async with asyncio.timeout(TICK_S):
                    await self._closed.wait()
            except TimeoutError:
                continue

    async def close(self) -> None:
        self._outbox.late()
        if self._closed is not None:
            self._closed.set()
        for waiter in self._waiters.values():
            waiter.cancel()
        self._waiters.clear()

    # What a node publishes.

    def know(self, namespace: Namespace) -> NamespaceRef:
        """Remember by what a namespace can be purged; claims name it by digest only."""
        known = self._namespaces.get(namespace.digest)
        if known is None:
            scopes = (
                scope_id("model", namespace.model_id),
                scope_id("weights", f"{namespace.model_id}@{namespace.weights_revision}"),
                tenant_scope(namespace.salt),
            )
            known = NamespaceRef(namespace.digest, namespace.block_size, tuple(sorted(scopes)))
            self._remember(known)
        elif len(self._namespaces) >= NAMESPACES_MAX:
            # What is in use stays, however many others come: forgotten, it could not be purged with its tenant.
            self._namespaces[namespace.digest] = self._namespaces.pop(namespace.digest)
        return known

    def learn(self, namespace: NamespaceRef) -> None:
        """Remember what another node knows of a namespace, unless this one knows it itself."""
        if namespace.scopes and namespace.digest not in self._namespaces:
            self._remember(namespace)

    def known(self, digest: bytes, block_size: int) -> NamespaceRef:
        """A namespace by its digest, with what is remembered of it."""
        return self._namespaces.get(digest) or NamespaceRef(digest, block_size)

    def namespaces(self) -> list[NamespaceRef]:
        """The namespaces that are remembered."""
        return list(self._namespaces.values())

    def claim(self, runs: Sequence[Run]) -> None:
        """Publish that this node holds these runs, as one update."""
        self._step(LocalStore(self._now(), tuple(runs)))

    def unclaim(self, removals: Sequence[Removal]) -> None:
        """Publish that this node does not hold these blocks any more, as one update."""
        self._step(LocalRemove(self._now(), tuple(removals)))

    def purge(self, scopes: Sequence[bytes]) -> CausalToken:
        """Make everything below these scopes unreadable, on every node; what is stored later follows the purge."""
        token = self._within_bound(lambda: self.manager.raise_scopes(scopes, at=self._now()))
        self._drain()
        self.say()
        return token

    def pool_events(self, events: Sequence[pool_events.PoolEvent], block_size: int) -> None:
        """Publish what the pool stored and removed as claims of this node, in the order it happened."""
        runs: list[Run] = []
        removed: dict[bytes, list[bytes]] = {}

        def flush_runs() -> None:
            if runs:
                self._step(LocalStore(self._now(), tuple(runs)))
                runs.clear()

        def flush_removed() -> None:
            if removed:
                removals = tuple(Removal(digest, Tier.HOST, pack_hashes(hashes)) for digest, hashes in removed.items())
                self._step(LocalRemove(self._now(), removals))
                removed.clear()

        for event in events:
            if isinstance(event, pool_events.BlocksStored):
                flush_removed()
                known = self.known(event.namespace, block_size)
                runs.append(pack_run(known, Tier.HOST, event.first_block_idx, event.block_hashes))
            else:
                flush_runs()
                removed.setdefault(event.namespace, []).append(event.block_hash.sequence)
        flush_runs()
        flush_removed()

    def register_length(
        self,
        request_id: RequestId,
        owner: OwnerEpoch,
        num_tokens: int,
        checksum: int,
        namespace: Namespace,
    ) -> None:
        """Publish that KV of the first `num_tokens` tokens of a request is readable here.

        Raises:
            FencedError: the request has a newer owner.
        """
        self._within_bound(
            lambda: self.manager.register_update(
                request_id,
                num_tokens,
                [self.manager.origin.node],
                checksum=checksum,
                epoch=owner,
                namespace=self.know(namespace),
                at=self._now(),
            )
        )
        self._drain()

    def verify(self, request_id: RequestId, owner: OwnerEpoch, num_tokens: int) -> None:
        """See that KV of the first `num_tokens` tokens may be read for this owner.

        Raises:
            NotFoundError, IncompleteError, FencedError, HolderLostError: it may not.
        """
        self.manager.verify_readable(request_id, num_tokens, epoch=owner, at=self._now())

    def token(self, request_id: RequestId) -> bytes:
        """What a read elsewhere must follow to see the request's entry as it is here."""
        return self.manager.token(request_id).to_bytes()

    def news(self) -> UpdateBatch | None:
        """What was made here and is not published yet: goes along with a token, so that its reader need not wait."""
        return self._outbox.waiting

    def say(self) -> None:
        """Publish at once what was made here: what is published next must not run ahead of it."""
        self._outbox.late()

    def hear_news(self, peer: NodeId, incarnation: Incarnation, news: UpdateBatch | None) -> None:
        """Take a peer's `news`; they come once more when they are published, which changes nothing."""
        if news is not None:
            self._hear(Received(self._now(), peer, news, incarnation))

    async def caught_up(self, token: bytes, deadline_ns: int) -> None:
        """Wait until everything `token` names is applied here.

        Raises:
            StaleReplicaError, HolderLostError: not by the deadline, or never.
            ReplicaEndedError: nobody judges deadlines here any more.
        """
        if self._closed is not None and self._closed.is_set():
            raise ReplicaEndedError(node=self.manager.origin.node, cause=str(self._over or "it is closed"))
        after = CausalToken.from_bytes(token)
        waiter = next(self._waiter_ids)
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiters[waiter] = future
        try:
            self._step(WaitFor(self._now(), waiter, after, deadline_ns))
            await future
        finally:
            if self._waiters.pop(waiter, None) is not None:
                self._hear(CancelWait(waiter))

    # What a gateway publishes.

    def own(self, request_id: RequestId) -> tuple[OwnerEpoch, bytes]:
        """Own the request's next epoch; former owners are fenced. Also gives the token that a node must follow."""
        epoch = self._within_bound(lambda: self.manager.take_ownership(request_id, at=self._now()))
        self._drain()
        return epoch, self.manager.token(request_id).to_bytes()

    def end(self, request_id: RequestId) -> None:
        """The request is over everywhere."""
        self._step(LocalEnd(self._now(), request_id))

    def lag(self) -> dict[Origin, int]:
        """Updates of each living origin that are known to exist and not applied here."""
        return self.manager.lag()

    def _remember(self, namespace: NamespaceRef) -> None:
        self._namespaces[namespace.digest] = namespace
        if len(self._namespaces) > NAMESPACES_MAX:
            del self._namespaces[next(iter(self._namespaces))]

    def _now(self) -> Instant:
        return Instant(self._clock.monotonic_ns(), self._clock.wall_ns())

    def _on_message(self, request: Request[Message]) -> Reply:
        message = request.message
        assert isinstance(message, ReplicaMessage)
        self._hear(Received(self._now(), request.sender, message, request.incarnation))
        return None

    def _on_updates(self, event: Event[UpdateBatch]) -> None:
        self._hear(Received(self._now(), event.origin, event.message, event.incarnation))

    def _on_member(self, effect: MemberEffect) -> None:
        if self._roles.get(effect.node_id, Role.MONITOR) is Role.MONITOR:
            return
        match effect:
            case MemberUp(node_id, incarnation):
                self._hear(PeerJoined(self._now(), node_id, incarnation))
            case MemberDied(node_id, incarnation):
                self._hear(PeerDied(self._now(), node_id, incarnation))
            case _:
                pass

    def _hear(self, event: ReplicaEvent) -> None:
        """Step an event that nobody here asked for: what it is refused for is logged, and ends this life if it must."""
        try:
            self._step(event)
        except ReplicaFencedError:
            return
        except ConsistencyError as error:
            _log.warning("replica refused %s: %s", type(event).__name__, error)

    def _within_bound(self, change: Callable[[], R]) -> R:
        """Make a change that takes a stamp, with a higher clock bound if it needs one (as `ReplicaStamper`)."""
        try:
            return change()
        except ClockBoundReachedError:
            # Refused changes changed nothing, so the same one may be made again.
            self.renew_clock_bound()
            return change()

    def _step(self, event: ReplicaEvent) -> None:
        try:
            try:
                effects = self.manager.step(event)
            except ClockBoundReachedError:
                # As `_within_bound`, without its call for each of very many events.
                self.renew_clock_bound()
                effects = self.manager.step(event)
        except ReplicaFencedError as error:
            self._over = self._over or error
            raise
        for effect in effects:
            self._perform(effect)

    def _drain(self) -> None:
        for effect in self.manager.drain():
            self._perform(effect)

    def _perform(self, effect: Effect) -> None:
        match effect:
            case BroadcastUpdates(batch):
                self._outbox.add(batch)
            case SendTo(peer, message):
                self._send(peer, message)
            case ClaimsChanged(changes):
                for change in changes:
                    feed(self._index, change)
            case RequestEnded(request_id, epoch, cause):
                if self._on_request_ended is not None:
                    self._on_request_ended(request_id, epoch, cause)
            case WaiterReady(waiter):
                future = self._waiters.pop(waiter, None)
                if future is not None and not future.done():
                    future.set_result(None)
            case WaiterFailed(waiter, error):
                future = self._waiters.pop(waiter, None)
                if future is not None and not future.done():
                    future.set_exception(error)
            case PersistClockBound(bound_ns):
                self._persist(bound_ns)
            case ReportClock(error, peer):
                _log.error("clock is wrong whose=%s cause=%s", peer or "ours", error)
            case ReportWallAccepted(ahead_ns):
                _log.warning("clock is believed again, as peers confirm it ahead_ns=%d", ahead_ns)
            case ReportResync(peer, state):
                _log.info("replica synchronises peer=%s state=%s", peer, state)
            case RestartReplica(seen):
                self._over = ReplicaOverError(node=self.manager.origin.node, seen=seen)
            case _:
                pass

    def _persist(self, bound_ns: int) -> None:
        """Put a clock bound on disk: at once before the first stamp, else in a thread, since a sync takes its time."""
        if self._closed is None:
            self._life.keep_clock_bound(bound_ns)
            self._step(ClockBoundPersisted(bound_ns))
            return

        def persisted(done: asyncio.Future[None]) -> None:
            if done.cancelled() or self._closed is None or self._closed.is_set():
                return
            error = done.exception()
            if error is None:
                self._hear(ClockBoundPersisted(bound_ns))
            elif self._over is None:
                self._over = error

        self._offload(lambda: self._life.keep_clock_bound(bound_ns)).add_done_callback(persisted)

    def _publish(self, batch: UpdateBatch) -> None:
        if self._bus is not None:
            self._bus.publish(batch)

    def _send(self, peer: NodeId, message: Message) -> None:
        if self._bus is None:
            return
        self.say()  # what is said of our updates must not run ahead of them
        try:
            self._bus.send(peer, message)
        except KVError as error:
            # Loss is repaired by the next digest.
            _log.debug("replica message not sent peer=%s cause=%s", peer, error)


class ReplicaOverError(KVError):
    """The cluster declared this life over: it must end, and begin a new one."""

    code = 7041
    template = "the cluster holds this life of {node} for over (it has seen {seen}); restart it"


def origin_epoch(gateway: NodeId, incarnation: Incarnation, epoch: int) -> OwnerEpoch:
    """The owner that a gateway's request names."""
    return OwnerEpoch(epoch, Origin(gateway, incarnation))

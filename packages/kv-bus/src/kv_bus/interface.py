"""What a bus is to those who use it; production (`ZmqBus`) and simulator (`MemoryBus`) offer exactly this.

It decides what a caller may rely on:

B1: a call ends exactly once, by its deadline: with a reply, with the peer's error, or with an error of the bus.
B2: an error that is a `RetryableError` was raised before the peer handled anything.
B3: a message is handled only if its sender owns the key it came with and it was meant for this incarnation.
B4: calls to one peer are sent in the order they were made; a silent peer delays no call to another.
B5: events of one origin are numbered; a subscriber gets them in order, or is told which are missing.
B6: nothing here blocks: every method that is not `async` returns at once, every queue is bounded.

The bus carries a call at most once. A caller that tries again after a `BusTimeout` may have it handled twice, so
handlers must tolerate repeats.
"""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from enum import Enum
from typing import Final, Generic, NamedTuple, Protocol, TypeVar, overload

import msgspec

from kv_bus.pending import PendingStats
from kv_bus.sequencer import NO_LIFE, GapDetected, OriginRestarted, SequencerStats
from kv_core.errors import KVError
from kv_core.ids import Incarnation, NodeId
from kv_core.wire import Message

__all__ = [
    "DEFERRED",
    "NO_LIFE",
    "Bus",
    "BusStats",
    "Call",
    "Deferred",
    "Event",
    "GapDetected",
    "Handler",
    "OpenRequest",
    "OriginRestarted",
    "PeerAddress",
    "PeerDown",
    "PeerEvent",
    "PeerRefused",
    "PeerRestarted",
    "PeerState",
    "PeerStatus",
    "PeerUp",
    "Reply",
    "Request",
    "Stamp",
    "Stamper",
    "Subscription",
    "Watch",
]

M = TypeVar("M", bound=Message)
M_co = TypeVar("M_co", bound=Message, covariant=True)
R = TypeVar("R", bound=Message)


class Stamp(msgspec.Struct, frozen=True, order=True, gc=False):
    """A hybrid logical clock's stamp as it travels; ordered by its fields."""

    wall_ns: int
    logical: int
    node_id: NodeId


class Stamper(Protocol):
    """The clock that stamps what is sent and learns from what arrives; kv-consistency's, behind an adapter."""

    def tick(self) -> Stamp:
        """A stamp above all given before."""
        ...

    def merge(self, remote: Stamp, /) -> None:
        """Rise above `remote`; raise a `KVError` to have the message refused (a clock too far ahead)."""
        ...


class Deferred(Enum):
    """The type of `DEFERRED`."""

    DEFERRED = "deferred"


DEFERRED: Final = Deferred.DEFERRED
"""What a handler returns when it keeps the request and answers later, by `Request.reply` or `Request.fail`."""

Reply = Message | Deferred | None
"""What a handler gives back: the reply, `DEFERRED`, or None for a one-way message."""


class Request(Protocol[M_co]):
    """A message that arrived, and the handle to answer it; lives until it is answered, given up or too late."""

    @property
    def message(self) -> M_co: ...
    @property
    def sender(self) -> NodeId: ...
    @property
    def incarnation(self) -> Incarnation:
        """Which life of the sender sent it."""
        ...

    @property
    def stamp(self) -> Stamp: ...
    @property
    def deadline_ns(self) -> int:
        """When the caller stops waiting, on this process's monotonic clock."""
        ...

    @property
    def wants_reply(self) -> bool:
        """False for a one-way message."""
        ...

    @property
    def done(self) -> bool:
        """Answered, given up by the caller, or too late: an answer would reach nobody."""
        ...

    def reply(self, message: Message) -> None:
        """Answer. When nobody waits any more the answer is dropped and counted.

        Raises:
            AlreadyAnswered: it was answered before: a bug of ours.
        """
        ...

    def fail(self, error: KVError) -> None:
        """Answer with an error; the caller gets it raised. Otherwise like `reply`."""
        ...

    def on_abandoned(self, callback: Callable[[], None]) -> None:
        """Call back, at most once, when the caller gave up, was replaced by a new life, or ran out of time."""
        ...


Handler = Callable[[Request[M]], Reply | Awaitable[Reply]]
"""Sync handlers run inside the reader's turn and must be short; async ones run as a job of the bus and are cancelled
when their caller gives up. Raising a `KVError` answers with it; any other exception answers `HandlerFailed` and is
reported through the loop's exception handler."""


class Call(Protocol):
    """A call in flight."""

    def cancel(self) -> None:
        """Stop waiting; the peer is told, its answer is ignored, `on_outcome` is not called."""
        ...


class Event(NamedTuple, Generic[M]):
    """One published message as a subscriber sees it."""

    origin: NodeId
    incarnation: Incarnation
    sequence: int
    stamp: Stamp
    message: M


class Subscription(Protocol):
    """One subscriber's view of one origin."""

    def close(self) -> None:
        """Stop; no callback comes after this returns."""
        ...

    def stats(self) -> SequencerStats: ...


class Watch(Protocol):
    """A registration of a callback."""

    def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class PeerAddress:
    """Where a peer is reached.

    Args:
        node_id: its name, which its key must belong to.
        requests: where it takes requests, as `tcp://host:port`.
        events: where it publishes, as `tcp://host:port`.

    Its key comes from the cluster's allow-list, nowhere else. Hosts are IP addresses: libzmq would resolve a name in
    its only IO thread, where a silent name server delays everybody.
    """

    node_id: NodeId
    requests: str
    events: str


class PeerState(Enum):
    """What is known of the link to a peer."""

    IDLE = "idle"
    CONNECTING = "connecting"
    GREETING = "greeting"
    UP = "up"
    REFUSED = "refused"


@dataclass(frozen=True, slots=True)
class PeerStatus:
    """A line of the peers table."""

    address: PeerAddress
    public_key: str
    state: PeerState
    incarnation: Incarnation
    queued: int
    queued_bytes: int
    in_flight: int
    connects: int
    last_cause: str


@dataclass(frozen=True, slots=True)
class PeerUp:
    """The link to this life of the peer works."""

    node_id: NodeId
    incarnation: Incarnation


@dataclass(frozen=True, slots=True)
class PeerDown:
    """The link broke. A hint that the peer may be gone, not a verdict."""

    node_id: NodeId
    incarnation: Incarnation
    cause: str


@dataclass(frozen=True, slots=True)
class PeerRestarted:
    """The peer is in a new life; everything that named the previous one is void."""

    node_id: NodeId
    incarnation: Incarnation
    previous: Incarnation


@dataclass(frozen=True, slots=True)
class PeerRefused:
    """The peer does not admit our key, or is not who we took it for."""

    node_id: NodeId
    cause: str


PeerEvent = PeerUp | PeerDown | PeerRestarted | PeerRefused


@dataclass(frozen=True, slots=True)
class OpenRequest:
    """A request that waits here for its answer."""

    sender: NodeId
    incarnation: Incarnation
    message: str
    deadline_ns: int
    job: bool


@dataclass(frozen=True, slots=True)
class BusStats:
    """A snapshot of one bus. `refused` counts what was not handled, by cause; all counters only grow."""

    node_id: NodeId
    incarnation: Incarnation
    calls: PendingStats
    open_requests: int
    handler_jobs: int
    requests_received: int
    notes_received: int
    replies_sent: int
    replies_dropped: int
    events_published: int
    events_received: int
    gaps: int
    sends_dropped: int
    bytes_sent: int
    bytes_received: int
    turns_cut: int
    auth_admitted: int
    auth_refused: int
    refused: dict[str, int]


class Bus(Protocol):
    """One node's connection to its cluster. It is a supervised child: `start`, `run`, `drain`, `close`."""

    @property
    def node_id(self) -> NodeId: ...
    @property
    def incarnation(self) -> Incarnation: ...

    async def start(self) -> None:
        """Bind and be ready.

        Raises:
            BindFailed: the address is taken.
        """
        ...

    async def run(self) -> None:
        """Return after `close()`; raise what broke the bus otherwise."""
        ...

    async def drain(self, timeout_ns: int) -> bool:
        """Refuse new requests with `Draining`, wait for open ones and for our own calls, then close.

        False when `timeout_ns` cut it short.
        """
        ...

    async def close(self) -> None:
        """End at once; calls fail with `BusClosed`, open requests of peers with `ClosedWithOpenRequests`."""
        ...

    def add_peer(self, peer: PeerAddress) -> None:
        """Make a peer known, or change its address; nothing is connected before it is needed."""
        ...

    def remove_peer(self, node_id: NodeId) -> None:
        """Forget a peer: its calls fail with `UnknownPeer`, its subscriptions end. Unknown names are ignored."""
        ...

    def peers(self) -> tuple[PeerStatus, ...]: ...

    def watch_peers(self, callback: Callable[[PeerEvent], None]) -> Watch:
        """Be told of what happens to links."""
        ...

    def handle(self, message_type: type[M], handler: Handler[M]) -> None:
        """Handle incoming messages of `message_type`.

        Raises:
            HandlerTaken: it has a handler already.
            UnregisteredMessageError: the type is not in the bus's registry.
        """
        ...

    @overload
    async def request(
        self,
        target: NodeId,
        message: Message,
        *,
        expect: type[R],
        timeout_ns: int | None = None,
        deadline_ns: int | None = None,
        incarnation: Incarnation | None = None,
    ) -> R: ...
    @overload
    async def request(
        self,
        target: NodeId,
        message: Message,
        *,
        expect: None = None,
        timeout_ns: int | None = None,
        deadline_ns: int | None = None,
        incarnation: Incarnation | None = None,
    ) -> Message: ...

    def call(
        self,
        target: NodeId,
        message: Message,
        on_outcome: Callable[[Message | KVError], None],
        *,
        timeout_ns: int | None = None,
        deadline_ns: int | None = None,
        incarnation: Incarnation | None = None,
    ) -> Call:
        """Ask without awaiting: what an actor's `perform` uses. See `request` for the arguments.

        What is wrong at once is raised; everything later reaches `on_outcome`, once, never before `call` returns.
        """
        ...

    def send(self, target: NodeId, message: Message, *, incarnation: Incarnation | None = None) -> None:
        """Send one way: at most once, no outcome. It waits a bounded time for a link, then it is dropped and counted.

        Raises:
            UnknownPeer, PeerQueueFull, WrongIncarnation, BusClosed, UnencodableMessageError.
        """
        ...

    def publish(self, message: Message) -> int:
        """Publish to all subscribers; the sequence it got. Slow subscribers lose events, and learn of it.

        Raises:
            BusClosed, UnencodableMessageError.
        """
        ...

    def flush(self) -> None:
        """Let messages and replies leave now, and not when this turn of the loop ends: somebody waits for them, and
        this turn has more to do. Events wait for the end of the turn."""
        ...

    def subscribe(
        self,
        origin: NodeId,
        on_event: Callable[[Event[Message]], None],
        on_gap: Callable[[GapDetected], None],
        *,
        on_restart: Callable[[OriginRestarted], None] | None = None,
        incarnation: Incarnation = NO_LIFE,
        after: int = 0,
    ) -> Subscription:
        """Receive what `origin` publishes from now on.

        Everything before `after` of `incarnation` counts as known; whatever lies between that and the first event
        that arrives is reported as a gap. `on_gap` comes before the event that showed it.

        Raises:
            UnknownPeer: `origin` is not in the peers table.
        """
        ...

    def open_requests(self) -> tuple[OpenRequest, ...]: ...

    def stats(self) -> BusStats: ...

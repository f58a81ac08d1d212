"""One node's bus over any carrier: the parts put together in the order they start and stop.

Start: the carrier binds, then the head of our events is repeated. Stop: our events, then what peers wait for (open
requests are answered with an error), then our own calls, then the carrier, which lets what was handed over leave.
"""

import asyncio
import logging
from collections.abc import Callable
from enum import Enum
from typing import overload

from kv_bus.calls import Calls, PeerLink
from kv_bus.carrier import Carrier, Frame
from kv_bus.control import CONTROL
from kv_bus.errors import AuthRefused, UnexpectedReply, UnknownPeer
from kv_bus.events import Events, EventSubscription
from kv_bus.interface import (
    BusStats,
    Call,
    Event,
    GapDetected,
    Handler,
    M,
    OpenRequest,
    OriginRestarted,
    PeerAddress,
    PeerEvent,
    PeerStatus,
    R,
    Stamper,
    Watch,
)
from kv_bus.limits import MS, PEERS_MAX
from kv_bus.local import Local
from kv_bus.peers import Peer, Peers
from kv_bus.sequencer import NO_LIFE
from kv_bus.serving import Serving
from kv_core.clock import Clock
from kv_core.errors import KVError, LocalProtocolError
from kv_core.ids import Incarnation, NodeId
from kv_core.wire import Message, Registry

_log = logging.getLogger(__name__)


class _State(Enum):
    NEW = "new"
    OPEN = "open"
    DRAINING = "draining"
    CLOSED = "closed"


class Endpoint:
    """A `Bus` over `carrier`.

    Args:
        node_id: our name, which our key must belong to.
        incarnation: which life of the node this is; at least 1 and above every earlier one.
        registry: the message types of this process; it is copied.
        carrier: moves the frames.
        stamper: stamps what is sent, learns from what arrives.
        clock: deadlines are on its monotonic clock.
    """

    def __init__(
        self,
        node_id: NodeId,
        incarnation: Incarnation,
        registry: Registry,
        carrier: Carrier,
        *,
        stamper: Stamper,
        clock: Clock,
    ) -> None:
        if incarnation <= NO_LIFE:
            raise LocalProtocolError(detail=f"incarnations begin at 1, not {incarnation}")
        own = Registry().include(registry).include(CONTROL)
        self._local = Local(node_id, incarnation, own, stamper, clock)
        self._carrier = carrier
        self._peers = Peers(self._local)
        self._calls = Calls(self._local, self._peers, carrier)
        self._serving = Serving(self._local, self._peers, carrier)
        self._events = Events(self._local, self._peers, carrier)
        self._state = _State.NEW
        self._failure: BaseException | None = None
        self._closing: asyncio.Task[None] | None = None
        self._waiters: list[asyncio.Future[None]] = []

    @property
    def node_id(self) -> NodeId:
        return self._local.node_id

    @property
    def incarnation(self) -> Incarnation:
        return self._local.incarnation

    async def start(self) -> None:
        """See `Bus.start`."""
        if self._state is not _State.NEW:
            raise LocalProtocolError(detail=f"the bus of {self.node_id} was started before")
        self._state = _State.OPEN
        await self._carrier.open(self)
        self._events.start()

    async def run(self) -> None:
        """See `Bus.run`."""
        if self._failure is not None:
            raise self._failure
        if self._state is _State.CLOSED:
            return
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiters.append(waiter)
        await waiter

    async def drain(self, timeout_ns: int) -> bool:
        """See `Bus.drain`."""
        finished = True
        if self._state is _State.OPEN:
            self._state = _State.DRAINING
            self._serving.drain()
            try:
                async with asyncio.timeout(timeout_ns / 1e9):
                    # In this order: answering a request may need calls of our own.
                    await self._serving.wait_until_empty()
                    await self._calls.drain()
            except TimeoutError:
                finished = False
                _log.warning(
                    "drain cut short node=%s after_ms=%d open_requests=%d handlers=%d waiting=%s",
                    self.node_id,
                    timeout_ns // MS,
                    self._serving.open_count,
                    self._serving.job_count,
                    self._calls.unfinished(),
                )
        await self.close()
        return finished

    async def close(self) -> None:
        """See `Bus.close`."""
        if self._closing is None:
            self._closing = asyncio.get_running_loop().create_task(self._close(), name=f"close bus {self.node_id}")
        await asyncio.shield(self._closing)

    def add_peer(self, peer: PeerAddress) -> None:
        """See `Bus.add_peer`.

        Raises:
            BadAddress: the carrier cannot use the address.
        """
        self._carrier.check_address(peer)
        line = self._peers.line(peer.node_id)
        if line.address == peer:
            return
        known = sum(other.address is not None for other in self._peers.all())
        if line.address is None and known >= PEERS_MAX:
            raise LocalProtocolError(detail=f"a bus knows {PEERS_MAX} peers at most")
        line.address = peer
        # What is on the old link was not handled there, or nobody will tell.
        self._calls.drop_link(line, lambda: UnknownPeer(node=peer.node_id))
        self._events.move(line)

    def remove_peer(self, node_id: NodeId) -> None:
        """See `Bus.remove_peer`."""
        line = self._peers.find(node_id)
        if line is None or line.address is None:
            return
        line.address = None
        self._calls.drop_link(line, lambda: UnknownPeer(node=node_id))
        if line.origin is not None:
            line.origin.close()

    def peers(self) -> tuple[PeerStatus, ...]:
        """See `Bus.peers`."""
        return tuple(
            (line.link or PeerLink(self._calls, line)).status()
            for line in self._peers.all()
            if line.address is not None
        )

    def watch_peers(self, callback: Callable[[PeerEvent], None]) -> Watch:
        """See `Bus.watch_peers`."""
        return self._peers.watch(callback)

    def handle(self, message_type: type[M], handler: Handler[M]) -> None:
        """See `Bus.handle`."""
        self._serving.handle(message_type, handler)

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
    async def request(
        self,
        target: NodeId,
        message: Message,
        *,
        expect: type[R] | None = None,
        timeout_ns: int | None = None,
        deadline_ns: int | None = None,
        incarnation: Incarnation | None = None,
    ) -> Message:
        """See `Bus.request`."""
        answer: asyncio.Future[Message] = asyncio.get_running_loop().create_future()

        def ended(outcome: Message | KVError) -> None:
            if answer.done():
                return
            if isinstance(outcome, KVError):
                answer.set_exception(outcome)
            else:
                answer.set_result(outcome)

        call = self._calls.call(target, message, ended, timeout_ns, deadline_ns, incarnation)
        try:
            reply = await answer
        except asyncio.CancelledError:
            call.cancel()
            raise
        if expect is not None and not isinstance(reply, expect):
            raise UnexpectedReply(
                node=target, message=type(message).__name__, actual=type(reply).__name__, expected=expect.__name__
            )
        return reply

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
        """See `Bus.call`."""
        return self._calls.call(target, message, on_outcome, timeout_ns, deadline_ns, incarnation)

    def send(self, target: NodeId, message: Message, *, incarnation: Incarnation | None = None) -> None:
        """See `Bus.send`."""
        self._calls.send(target, message, incarnation)

    def publish(self, message: Message) -> int:
        """See `Bus.publish`."""
        return self._events.publish(message)

    def flush(self) -> None:
        """See `Bus.flush`."""
        self._carrier.flush()

    def subscribe(
        self,
        origin: NodeId,
        on_event: Callable[[Event[Message]], None],
        on_gap: Callable[[GapDetected], None],
        *,
        on_restart: Callable[[OriginRestarted], None] | None = None,
        incarnation: Incarnation = NO_LIFE,
        after: int = 0,
    ) -> EventSubscription:
        """See `Bus.subscribe`."""
        return self._events.subscribe(origin, on_event, on_gap, on_restart, incarnation, after)

    def open_requests(self) -> tuple[OpenRequest, ...]:
        """See `Bus.open_requests`."""
        return self._serving.open_requests()

    def stats(self) -> BusStats:
        """See `Bus.stats`."""
        counters, below = self._local.counters, self._carrier.stats()
        return BusStats(
            node_id=self.node_id,
            incarnation=self.incarnation,
            calls=self._calls.stats(),
            open_requests=self._serving.open_count,
            handler_jobs=self._serving.job_count,
            requests_received=counters.requests_received,
            notes_received=counters.notes_received,
            replies_sent=counters.replies_sent,
            replies_dropped=counters.replies_dropped + below.replies_dropped,
            events_published=counters.events_published,
            events_received=counters.events_received,
            gaps=counters.gaps,
            sends_dropped=counters.sends_dropped,
            bytes_sent=counters.bytes_sent,
            bytes_received=counters.bytes_received,
            turns_cut=below.turns_cut,
            auth_admitted=below.auth_admitted,
            auth_refused=below.auth_refused,
            refused={**below.refused, **counters.refused},
        )

    def request_arrived(self, owner: NodeId, route: bytes, data: Frame) -> None:
        """The carrier's side of `RequestSink`."""
        self._serving.request_arrived(owner, route, data)

    def stranger_arrived(self, route: bytes, data: Frame) -> None:
        self._serving.stranger_arrived(route, data)

    def replies_writable(self) -> None:
        self._serving.replies.writable()

    def keys_changed(self) -> None:
        """Cut off whom the list no longer names."""
        for line in self._peers.all():
            if not self._carrier.key_of(line.node_id):
                self._cut_off(line)

    def carrier_failed(self, error: BaseException) -> None:
        """The carrier is of no more use: `run()` raises, and the supervisor makes a new bus."""
        if self._failure is None:
            self._failure = error
            if not self._waiters:
                self._local.report(f"the bus of {self.node_id} failed and nobody runs it", error)
            self._closing = self._closing or asyncio.get_running_loop().create_task(self._close())

    def _cut_off(self, line: Peer) -> None:
        cause = "its key is no longer in the allow-list"
        self._serving.abandon_all(line)
        if line.link is not None:
            line.link.refused(cause)
        self._calls.drop_link(line, lambda: AuthRefused(node=line.node_id, cause=cause))
        if line.origin is not None and line.origin.wire is not None:
            line.origin.wire.reconnect()

    async def _close(self) -> None:
        never_started = self._state is _State.NEW
        self._state = _State.CLOSED
        self._carrier.stop_receiving()
        self._events.close()
        await self._serving.close()
        self._calls.close()
        if not never_started:
            await self._carrier.close()
        waiters, self._waiters = self._waiters, []
        for waiter in waiters:
            if waiter.done():
                continue
            if self._failure is None:
                waiter.set_result(None)
            else:
                waiter.set_exception(self._failure)

"""Published events, both ways: numbering ours, and watching the numbers of others.

E1: our events are numbered 1, 2, 3, ... in the order of `publish`; a message that cannot be encoded takes no number.
E2: an event counts only if it came by the connection to its origin, from its living incarnation.
E3: all subscriptions to one origin share one connection, and each has its own sequencer.
E4: the head is repeated at a fixed pace while nothing is published, so that a lost last event shows within two
    intervals; each event shows what was lost before it.
"""

import asyncio
import logging
from collections.abc import Callable
from typing import Final

from kv_bus.carrier import Carrier, EventWire, Frame
from kv_bus.control import EventHead, header_of
from kv_bus.errors import BusClosed
from kv_bus.interface import Event, GapDetected, OriginRestarted, PeerRefused
from kv_bus.limits import EVENT_HEAD_INTERVAL_NS, SUBSCRIBE_RETRY_NS
from kv_bus.local import Local
from kv_bus.peers import Peer, Peers
from kv_bus.sequencer import NO_LIFE, Accept, Effect, Sequencer, SequencerStats
from kv_core.errors import KVError, LocalProtocolError
from kv_core.ids import Incarnation, NodeId
from kv_core.wire import Message, SchemaMismatchError, UnknownMessageTypeError, WireError, decode

EventCallback = Callable[[Event[Message]], None]
GapCallback = Callable[[GapDetected], None]
RestartCallback = Callable[[OriginRestarted], None]

_log: Final = logging.getLogger(__name__)


class EventSubscription:
    """One subscriber of one origin."""

    __slots__ = ("_origin", "on_event", "on_gap", "on_restart", "sequencer")

    def __init__(
        self,
        origin: "Origin",
        sequencer: Sequencer,
        on_event: EventCallback,
        on_gap: GapCallback,
        on_restart: RestartCallback | None,
    ) -> None:
        self._origin = origin
        self.sequencer = sequencer
        self.on_event = on_event
        self.on_gap = on_gap
        self.on_restart = on_restart

    def close(self) -> None:
        self._origin.drop(self)

    def stats(self) -> SequencerStats:
        return self.sequencer.stats()


class Origin:
    """One publisher, its connection, and who here listens to it."""

    __slots__ = ("_local", "_peers", "_retry", "line", "refused_now", "subscriptions", "wire")

    def __init__(self, local: Local, peers: Peers, line: Peer) -> None:
        self._local = local
        self._peers = peers
        self._retry: asyncio.TimerHandle | None = None
        self.line = line
        self.wire: EventWire | None = None
        self.refused_now = False
        self.subscriptions: dict[EventSubscription, None] = {}

    def event_arrived(self, data: Frame) -> None:
        local, line, counters = self._local, self.line, self._local.counters
        counters.bytes_received += len(data)
        try:
            envelope = decode(data, local.registry)
        except WireError as error:
            self._event_lost(data, error)
            return
        if envelope.sender != line.node_id:
            counters.refuse("impersonation")
            return
        incarnation = envelope.sender_incarnation
        if incarnation == NO_LIFE or not self._peers.seen(line, incarnation):
            counters.refuse("past_life")
            return
        self.refused_now = False
        stamp, refusal = local.learn(envelope)
        body, sequence = envelope.body, envelope.correlation_id
        if type(body) is EventHead:
            self._each(lambda sequencer: sequencer.head_seen(incarnation, body.last_sequence))
        elif sequence == 0:
            counters.refuse("unnumbered_event")
        elif refusal is not None:
            self._each(lambda sequencer: sequencer.event_lost(incarnation, sequence))
        else:
            counters.events_received += 1
            event = Event(line.node_id, incarnation, sequence, stamp, body)
            self._each(lambda sequencer: sequencer.event_seen(incarnation, sequence), event)

    def refused(self, cause: str) -> None:
        if not self.refused_now:
            self.refused_now = True
            self._peers.tell(PeerRefused(self.line.node_id, cause))
        if self._retry is None:
            self._retry = asyncio.get_running_loop().call_later(SUBSCRIBE_RETRY_NS / 1e9, self._try_again)

    def drop(self, subscription: EventSubscription) -> None:
        """End one subscription; the connection goes with the last."""
        self.subscriptions.pop(subscription, None)
        if not self.subscriptions:
            self.close()

    def close(self) -> None:
        self.subscriptions.clear()
        if self._retry is not None:
            self._retry.cancel()
            self._retry = None
        if self.wire is not None:
            self.wire.close()
            self.wire = None
        if self.line.origin is self:
            self.line.origin = None

    def _try_again(self) -> None:
        self._retry = None
        if self.wire is not None:
            self.wire.reconnect()

    def _event_lost(self, data: Frame, error: WireError) -> None:
        """An event that cannot be used is missing; its header, if good, says which."""
        self._local.counters.refuse(type(error).__name__)
        if not isinstance(error, UnknownMessageTypeError | SchemaMismatchError):
            return
        header = header_of(data)
        if header is None or header.sender != self.line.node_id or not header.correlation_id:
            return
        incarnation = Incarnation(header.sender_incarnation)
        if incarnation != NO_LIFE and self._peers.seen(self.line, incarnation):
            self._each(lambda sequencer: sequencer.event_lost(incarnation, header.correlation_id))

    def _each(self, step: Callable[[Sequencer], list[Effect]], event: Event[Message] | None = None) -> None:
        for subscription in list(self.subscriptions):
            for effect in step(subscription.sequencer):
                if subscription not in self.subscriptions:
                    break  # closed by its own callback
                match effect:
                    case Accept():
                        assert event is not None
                        self._local.guard(subscription.on_event, event)
                    case GapDetected():
                        self._local.counters.gaps += 1
                        self._local.guard(subscription.on_gap, effect)
                    case OriginRestarted():
                        if subscription.on_restart is not None:
                            self._local.guard(subscription.on_restart, effect)


class Events:
    """Our own events, and all origins that this node listens to."""

    def __init__(self, local: Local, peers: Peers, carrier: Carrier) -> None:
        self._local = local
        self._peers = peers
        self._carrier = carrier
        self._sequence = 0
        self._sequence_at_turn = 0
        self._head_timer: asyncio.TimerHandle | None = None
        self._closed = False

    def start(self) -> None:
        """Begin to repeat the head (E4)."""
        self._head_timer = asyncio.get_running_loop().call_later(EVENT_HEAD_INTERVAL_NS / 1e9, self._repeat_head)

    def publish(self, message: Message) -> int:
        """See `Bus.publish`."""
        if self._closed:
            raise BusClosed(node=self._local.node_id)
        sequence = self._sequence + 1
        data = self._local.encode(message, NO_LIFE, sequence, 0)
        self._sequence = sequence
        self._local.counters.events_published += 1
        self._carrier.publish(data)
        return sequence

    def subscribe(
        self,
        origin: NodeId,
        on_event: EventCallback,
        on_gap: GapCallback,
        on_restart: RestartCallback | None,
        incarnation: Incarnation,
        after: int,
    ) -> EventSubscription:
        """See `Bus.subscribe`."""
        if self._closed:
            raise BusClosed(node=self._local.node_id)
        line = self._peers.reachable(origin)
        if origin == self._local.node_id:
            raise LocalProtocolError(detail="a node does not subscribe to itself")
        sequencer = Sequencer(origin, incarnation, after)
        if line.origin is None:
            line.origin = Origin(self._local, self._peers, line)
        found = line.origin
        subscription = EventSubscription(found, sequencer, on_event, on_gap, on_restart)
        found.subscriptions[subscription] = None
        if found.wire is None:
            assert line.address is not None
            found.wire = self._carrier.subscribe(line.address, found)
        return subscription

    def move(self, line: Peer) -> None:
        """The origin's address changed: listen there, with the same subscriptions."""
        found = line.origin
        if found is not None and line.address is not None:
            if found.wire is not None:
                found.wire.close()
            found.wire = self._carrier.subscribe(line.address, found)

    def close(self) -> None:
        self._closed = True
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None
        for line in self._peers.all():
            if line.origin is not None:
                line.origin.close()

    def _repeat_head(self) -> None:
        self.start()
        silent, self._sequence_at_turn = self._sequence_at_turn == self._sequence, self._sequence
        if silent and self._sequence:
            try:
                self._carrier.publish(self._local.encode(EventHead(self._sequence), NO_LIFE, 0, 0))
            except KVError as error:
                # Nobody called who could be told; the next one may go.
                _log.warning("last sequence not repeated node=%s cause=%s", self._local.node_id, error)

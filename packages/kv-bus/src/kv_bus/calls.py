"""The outgoing half of an endpoint: calls and one-way messages, from `call()` to their single outcome.

`Link` decides, this half performs: it makes connections, encodes and hands over frames, keeps every deadline in one
pending table with one timer, and matches replies.

O1: every call is in the pending table from `call()` to its outcome; its outcome comes once (B1).
O2: a reply counts only if it came by the link the call left by, from the life the call was addressed to.
"""

import asyncio
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Final

from kv_bus.carrier import Carrier, Frame, Wire
from kv_bus.control import Cancel, Hello, HelloReply, header_of
from kv_bus.errors import (
    BusClosed,
    BusTimeout,
    PeerUnreachable,
    TooManyRequests,
    UnexpectedReply,
    WrongCluster,
    WrongIncarnation,
)
from kv_bus.interface import PeerStatus
from kv_bus.limits import (
    DEFAULT_REQUEST_TIMEOUT_NS,
    HELLO_TIMEOUT_NS,
    MAX_REQUEST_TIMEOUT_NS,
    MS,
    PENDING_CALLS_MAX,
    SEND_TTL_NS,
)
from kv_bus.link import Connect, Effect, Fail, Flush, Greet, Link, Notify, Outgoing, Reconnect
from kv_bus.local import Local
from kv_bus.peers import Peer, Peers
from kv_bus.pending import PendingStats, PendingTable
from kv_bus.sequencer import NO_LIFE
from kv_core.errors import KVError, LocalProtocolError
from kv_core.ids import Incarnation, NodeId
from kv_core.wire import Envelope, ErrorReply, Message, WireError, decode

_NO_GREETING: Final = 0


class PeerCall(Outgoing, eq=False):
    """A message of this half, and the handle its caller holds."""

    calls: "Calls"
    peer: "PeerLink"

    def cancel(self) -> None:
        self.calls.cancel(self)


class PeerLink:
    """One peer's link with its connection; what the carrier reports goes through here."""

    __slots__ = ("calls", "greeting", "line", "link", "reply_arrived", "wire")

    def __init__(self, calls: "Calls", line: Peer) -> None:
        self.calls = calls
        self.line = line
        self.link = Link(line.node_id, line.incarnation)
        self.wire: Wire | None = None
        self.greeting = _NO_GREETING
        self.reply_arrived = partial(calls.reply_arrived, self)

    def connected(self) -> None:
        self.calls.perform(self, self.link.connected())

    def lost(self, cause: str) -> None:
        self.calls.end_greeting(self)
        self.calls.perform(self, self.link.lost(cause))

    def refused(self, cause: str) -> None:
        self.calls.end_greeting(self)
        self.calls.perform(self, self.link.refused(cause, self.calls.now_ns()))

    def writable(self) -> None:
        self.calls.perform(self, self.link.writable())

    def status(self) -> PeerStatus:
        link, address = self.link, self.line.address
        assert address is not None
        return PeerStatus(
            address,
            self.calls.key_of(self.line.node_id),
            link.state,
            self.line.incarnation,
            link.queued,
            link.queued_bytes,
            len(link.in_flight),
            link.connects,
            link.last_cause,
        )


class Calls:
    """Every message that this node sends to one peer and may get an answer to."""

    def __init__(self, local: Local, peers: Peers, carrier: Carrier) -> None:
        self._local = local
        self._peers = peers
        self._carrier = carrier
        self._encode = local.encode
        self._pending: PendingTable[PeerCall] = PendingTable()
        self._greetings = 0
        self._next_id = 0
        self._timer: asyncio.TimerHandle | None = None
        self._timer_ns = 0
        self._closed = False
        self._draining = False
        self._empty_waiters: list[asyncio.Future[None]] = []
        self.now_ns = local.monotonic_ns
        peers.on_new_life.append(self._new_life)

    def call(
        self,
        target: NodeId,
        message: Message,
        on_outcome: Callable[[Message | KVError], None],
        timeout_ns: int | None,
        deadline_ns: int | None,
        incarnation: Incarnation | None,
    ) -> PeerCall:
        """See `Bus.call`."""
        now_ns = self.now_ns()
        if deadline_ns is None:
            deadline_ns = now_ns + (DEFAULT_REQUEST_TIMEOUT_NS if timeout_ns is None else timeout_ns)
        elif timeout_ns is not None:
            raise LocalProtocolError(detail="give a timeout or a deadline, not both")
        remaining_ns = deadline_ns - now_ns
        if remaining_ns <= 0:
            raise BusTimeout(node=target, message=type(message).__name__, waited_ms=0)
        if remaining_ns > MAX_REQUEST_TIMEOUT_NS:
            raise LocalProtocolError(detail=f"a call may wait {MAX_REQUEST_TIMEOUT_NS} ns at most")
        if len(self._pending) >= PENDING_CALLS_MAX:
            raise TooManyRequests(node=self._local.node_id, limit=PENDING_CALLS_MAX)
        peer = self._link_to(target)
        self._next_id = call_id = self._next_id + 1
        call = PeerCall(call_id, message, deadline_ns, now_ns, incarnation or NO_LIFE, on_outcome, self, peer)
        link = peer.link
        if link.ready:
            life = link.incarnation
            if incarnation is not None and incarnation != life:
                raise WrongIncarnation(node=target, expected=incarnation, actual=life)
            data = self._encode(message, life, call_id, remaining_ns)
            assert peer.wire is not None
            if peer.wire.send(data):
                link.in_flight[call_id] = call
                self._wait(call)
                return call
            link.blocked = True
        self._queue(call, now_ns)
        return call

    def send(self, target: NodeId, message: Message, incarnation: Incarnation | None) -> None:
        """See `Bus.send`."""
        peer = self._link_to(target)
        link = peer.link
        if link.ready:
            life = link.incarnation
            if incarnation is not None and incarnation != life:
                raise WrongIncarnation(node=target, expected=incarnation, actual=life)
            assert peer.wire is not None
            if peer.wire.send(self._encode(message, life, 0, 0)):
                return
            link.blocked = True
        now_ns = self.now_ns()
        self._next_id = call_id = self._next_id + 1
        self._queue(
            PeerCall(call_id, message, now_ns + SEND_TTL_NS, now_ns, incarnation or NO_LIFE, None, self, peer), now_ns
        )

    def cancel(self, call: PeerCall) -> None:
        """The caller waits no more."""
        if self._pending.remove(call.call_id) is None:
            return
        self._maybe_empty()
        link, wire = call.peer.link, call.peer.wire
        if link.left(call) and link.ready and wire is not None:
            # Best effort: a peer that does not hear of it goes by the deadline.
            wire.send(self._encode(Cancel(call.call_id), link.incarnation, 0, 0))

    def reply_arrived(self, peer: PeerLink, data: Frame) -> None:
        """A frame came by the link to `peer`."""
        local, link = self._local, peer.link
        local.counters.bytes_received += len(data)
        try:
            envelope = decode(data, local.registry)
        except WireError as error:
            self._refused_reply(peer, data, error)
            return
        if envelope.sender != link.node_id or envelope.target_incarnation != local.incarnation:
            local.counters.refuse("reply_not_for_us")
            return
        if envelope.sender_incarnation != link.incarnation or envelope.correlation_id == peer.greeting:
            self._unusual_reply(peer, envelope)
            return
        call = link.in_flight.pop(envelope.correlation_id, None)
        if call is None:
            local.counters.refuse("stray_reply")
            return
        body = envelope.body
        _, refusal = local.learn(envelope)
        if refusal is not None:
            self._finish(call, refusal)
        else:
            self._finish(call, body.to_error() if type(body) is ErrorReply else body)

    def perform(self, peer: PeerLink, effects: list[Effect]) -> None:
        """Do what a link decided."""
        for effect in effects:
            match effect:
                case Flush():
                    self._flush(peer)
                case Fail(outgoing, error):
                    self._finish(outgoing, error)
                case Greet():
                    self._greet(peer)
                case Notify(event):
                    self._peers.tell(event)
                case Connect():
                    assert peer.line.address is not None
                    peer.wire = self._carrier.connect(peer.line.address, peer)
                case Reconnect():
                    assert peer.wire is not None
                    peer.wire.reconnect()
        if self._draining:
            self._drop_unheard(peer)

    def drop_link(self, line: Peer, error: Callable[[], KVError]) -> None:
        """The peer's link ends; what is on it fails with `error()`."""
        peer, line.link = line.link, None
        if peer is None:
            return
        self.end_greeting(peer)
        for outgoing in peer.link.take_all():
            self._finish(outgoing, error())
        if peer.wire is not None:
            peer.wire.close()
            peer.wire = None

    def close(self) -> None:
        """Fail every call with `BusClosed` and let the connections go."""
        self._closed = True
        node_id = self._local.node_id
        for line in self._peers.all():
            self.drop_link(line, lambda: BusClosed(node=node_id))
        self._pending.take_all()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._maybe_empty()

    async def drain(self) -> None:
        """Return when no message waits; greetings are nobody's, and who cannot be reached hears no farewell."""
        self._draining = True
        for line in self._peers.all():
            if line.link is not None:
                self._drop_unheard(line.link)
        if len(self._pending) > self._greetings:
            waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._empty_waiters.append(waiter)
            await waiter

    def unfinished(self) -> str:
        """What still waits, for a person: how many messages of each type for each peer."""
        waiting = (call for _, _, call in self._pending.entries())
        counts = Counter((call.peer.link.node_id, type(call.message).__name__) for call in waiting)
        return ", ".join(f"{count} {message} to {node}" for (node, message), count in counts.items()) or "nothing"

    def end_greeting(self, peer: PeerLink) -> None:
        """The greeting on its way, if any, counts no more."""
        if peer.greeting != _NO_GREETING:
            self._pending.remove(peer.greeting)
            peer.greeting = _NO_GREETING
            self._greetings -= 1

    def key_of(self, node_id: NodeId) -> str:
        """The peer's public key, or nothing when the list does not name it."""
        return self._carrier.key_of(node_id)

    def stats(self) -> PendingStats:
        return self._pending.stats()

    def _link_to(self, target: NodeId) -> PeerLink:
        if self._closed:
            raise BusClosed(node=self._local.node_id)
        line = self._peers.reachable(target)
        if line.link is None:
            line.link = PeerLink(self, line)
        return line.link

    def _queue(self, call: PeerCall, now_ns: int) -> None:
        # Encoded to learn its size and whether it can be sent at all; sent, it will carry a later stamp.
        nbytes = len(self._encode(call.message, NO_LIFE, call.call_id, 0))
        effects = call.peer.link.submitted(call, nbytes, now_ns)
        self._wait(call)
        self.perform(call.peer, effects)

    def _wait(self, call: PeerCall) -> None:
        deadline_ns = call.deadline_ns
        self._pending.add(call.call_id, deadline_ns, call)
        if self._timer is None or deadline_ns < self._timer_ns:
            self._arm(deadline_ns)

    def _arm(self, deadline_ns: int) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer_ns = deadline_ns
        delay_s = max(0, deadline_ns - self.now_ns()) / 1e9
        self._timer = asyncio.get_running_loop().call_later(delay_s, self._deadline_came)

    def _deadline_came(self) -> None:
        self._timer = None
        for call_id, call in self._pending.expire(self.now_ns()):
            self._expired(call_id, call)
        self._maybe_empty()
        next_ns = self._pending.next_deadline_ns()
        if next_ns is not None and self._timer is None:
            self._arm(next_ns)

    def _expired(self, call_id: int, call: PeerCall) -> None:
        peer, link = call.peer, call.peer.link
        if call_id == peer.greeting:
            peer.greeting = _NO_GREETING
            self._greetings -= 1
            self.perform(peer, link.greeting_unanswered())
            return
        was_sent = link.left(call)
        if call.on_outcome is None:
            self._local.counters.sends_dropped += 1
            return
        name = type(call.message).__name__
        error: KVError
        if was_sent:
            waited_ms = (call.deadline_ns - call.started_ns) // MS
            error = BusTimeout(node=link.node_id, message=name, waited_ms=waited_ms)
        else:
            cause = "it takes no more messages" if link.blocked else link.last_cause or f"link is {link.state.value}"
            error = PeerUnreachable(node=link.node_id, message=name, cause=cause)
        self._local.guard(call.on_outcome, error)

    def _finish(self, call: Outgoing, outcome: Message | KVError) -> None:
        """End a call that has left its link."""
        if self._pending.resolve(call.call_id) is None:
            return
        if self._empty_waiters:
            self._maybe_empty()
        if call.on_outcome is None:
            self._local.counters.sends_dropped += 1
            return
        try:
            call.on_outcome(outcome)
        except Exception as error:  # as `Local.guard`, without the call: every reply comes this way
            self._local.report(f"callback {call.on_outcome!r} of the bus failed", error)

    def _flush(self, peer: PeerLink) -> None:
        link, now_ns = peer.link, self.now_ns()
        while (outgoing := link.next_to_send()) is not None:
            assert peer.wire is not None
            is_call = outgoing.on_outcome is not None
            data = self._encode(
                outgoing.message,
                link.incarnation,
                outgoing.call_id if is_call else 0,
                max(1, outgoing.deadline_ns - now_ns) if is_call else 0,
            )
            if not peer.wire.send(data):
                link.blocked = True
                return
            link.handed_over(outgoing)
            if not is_call:
                self._pending.resolve(outgoing.call_id)

    def _greet(self, peer: PeerLink) -> None:
        self.end_greeting(peer)
        self._next_id = call_id = self._next_id + 1
        now_ns = self.now_ns()
        hello = Hello(self._carrier.cluster)
        call = PeerCall(call_id, hello, now_ns + HELLO_TIMEOUT_NS, now_ns, NO_LIFE, None, self, peer)
        peer.greeting = call_id
        self._greetings += 1
        self._wait(call)
        assert peer.wire is not None
        # A connection that takes no frame now is as silent as a peer that does not answer.
        peer.wire.send(self._encode(hello, NO_LIFE, call_id, HELLO_TIMEOUT_NS))

    def _unusual_reply(self, peer: PeerLink, envelope: Envelope) -> None:
        """The answer to a greeting, or a reply of another life."""
        link, body = peer.link, envelope.body
        if envelope.correlation_id == peer.greeting:
            self._greeted(peer, envelope)
            return
        if envelope.sender_incarnation < link.incarnation:
            self._local.counters.refuse("past_life")
            return
        call = link.in_flight.pop(envelope.correlation_id, None)
        if call is not None:
            # The new life got what was meant for the old one, and says that it did not handle it.
            wrong = WrongIncarnation(node=link.node_id, expected=link.incarnation, actual=envelope.sender_incarnation)
            self._finish(call, body.to_error() if type(body) is ErrorReply else wrong)
        self._peers.seen(peer.line, envelope.sender_incarnation)

    def _greeted(self, peer: PeerLink, envelope: Envelope) -> None:
        self.end_greeting(peer)
        body = envelope.body
        _, error = self._local.learn(envelope)
        if error is None and type(body) is ErrorReply:
            error = body.to_error()
        elif error is None and type(body) is not HelloReply:
            error = UnexpectedReply(
                node=peer.link.node_id, message="Hello", actual=type(body).__name__, expected="HelloReply"
            )
        elif error is None and isinstance(body, HelloReply) and body.cluster != self._carrier.cluster:
            error = WrongCluster(node=peer.link.node_id, theirs=body.cluster, ours=self._carrier.cluster)
        if error is not None:
            self.perform(peer, peer.link.greeting_failed(error, self.now_ns()))
            return
        self._peers.seen(peer.line, envelope.sender_incarnation)
        self.perform(peer, peer.link.welcomed(envelope.sender_incarnation))

    def _refused_reply(self, peer: PeerLink, data: Frame, error: WireError) -> None:
        """The peer's reply is not one that we understand: the call it answers fails with what is wrong with it."""
        self._local.counters.refuse(type(error).__name__)
        header = header_of(data)
        if header is None or (header.sender, header.target_incarnation) != (peer.link.node_id, self._local.incarnation):
            return
        call = peer.link.in_flight.pop(header.correlation_id, None)
        if call is not None:
            self._finish(call, error)

    def _drop_unheard(self, peer: PeerLink) -> None:
        for outgoing in peer.link.take_unheard():
            self._finish(outgoing, BusClosed(node=self._local.node_id))

    def _new_life(self, line: Peer) -> None:
        peer = line.link
        if peer is not None:
            self.perform(peer, peer.link.newer_life_seen(line.incarnation))

    def _maybe_empty(self) -> None:
        if len(self._pending) <= self._greetings:
            waiters, self._empty_waiters = self._empty_waiters, []
            for waiter in waiters:
                if not waiter.done():
                    waiter.set_result(None)

"""Decides what happens to the messages for one peer, from what is known of the link to it.

Pure: connections are made and frames sent by whoever performs the effects. A link is IDLE until the first message,
CONNECTING until both keys are admitted, GREETING until the peer has said which life it is in, and then UP. A peer that
does not admit us makes it REFUSED until a later message has it tried again.

L1: a message is handed over only when UP, in the order it was submitted, addressed to the life that greeted us.
L2: a message leaves the link exactly once: sent one-way, answered, abandoned by its caller, or failed.
L3: waiting messages are bounded in number and bytes.
L4: when the connection breaks, every message handed over and unanswered fails with `ConnectionLost`; those that
    never left go on waiting.
L5: `incarnation` of a link only grows.
"""

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import msgspec

from kv_bus.errors import AuthRefused, ConnectionLost, PeerQueueFull, WrongIncarnation
from kv_bus.interface import PeerDown, PeerEvent, PeerRefused, PeerState, PeerUp
from kv_bus.limits import PEER_QUEUE_BYTES_MAX, PEER_QUEUE_MAX, REFUSED_RETRY_NS
from kv_bus.sequencer import NO_LIFE
from kv_core.errors import KVError, LocalProtocolError
from kv_core.ids import Incarnation, NodeId
from kv_core.wire import Message


class Outgoing(msgspec.Struct, eq=False):
    """A message on its way. `on_outcome` is None for a one-way message; `incarnation` 0 means whichever is there."""

    call_id: int
    message: Message
    deadline_ns: int
    started_ns: int
    incarnation: Incarnation
    on_outcome: Callable[[Message | KVError], None] | None


@dataclass(frozen=True, slots=True)
class Connect:
    """Make the connection."""


@dataclass(frozen=True, slots=True)
class Reconnect:
    """Drop the connection and make it anew."""


@dataclass(frozen=True, slots=True)
class Greet:
    """Send the greeting; its answer comes back as `welcomed`, `greeting_failed` or `greeting_unanswered`."""


@dataclass(frozen=True, slots=True)
class Flush:
    """Hand over what waits, as long as the connection takes it."""


@dataclass(frozen=True, slots=True)
class Fail:
    """End a message with an error."""

    outgoing: Outgoing
    error: KVError


@dataclass(frozen=True, slots=True)
class Notify:
    """Tell those who watch peers."""

    event: PeerEvent


Effect = Connect | Reconnect | Greet | Flush | Fail | Notify

_GREET: Final = Greet()
_FLUSH: Final = Flush()


class Link:
    """What is known of the way to one peer, and the messages on it."""

    __slots__ = (
        "_bytes",
        "_queue",
        "_refusal",
        "_refused_ns",
        "blocked",
        "connects",
        "in_flight",
        "incarnation",
        "last_cause",
        "node_id",
        "state",
    )

    def __init__(self, node_id: NodeId, incarnation: Incarnation = NO_LIFE) -> None:
        self.node_id = node_id
        self.state = PeerState.IDLE
        self.incarnation: Incarnation = incarnation
        self.blocked = False
        self.in_flight: dict[int, Outgoing] = {}
        self.connects = 0
        self.last_cause = ""
        self._queue: OrderedDict[int, tuple[Outgoing, int]] = OrderedDict()
        self._bytes = 0
        self._refusal: KVError | None = None
        self._refused_ns = 0

    @property
    def ready(self) -> bool:
        """Whether a message may be handed over at once, without passing the queue (L1)."""
        return self.state is PeerState.UP and not self.blocked and not self._queue

    @property
    def queued(self) -> int:
        return len(self._queue)

    @property
    def queued_bytes(self) -> int:
        return self._bytes

    def submitted(self, outgoing: Outgoing, nbytes: int, now_ns: int) -> list[Effect]:
        """Let a message of `nbytes` wait.

        Raises:
            PeerQueueFull: L3.
            KVError: what the peer refused us with a moment ago.
        """
        if self.state is PeerState.REFUSED and now_ns - self._refused_ns < REFUSED_RETRY_NS:
            raise self._refusal_again()
        if len(self._queue) >= PEER_QUEUE_MAX or self._bytes + nbytes > PEER_QUEUE_BYTES_MAX:
            raise PeerQueueFull(node=self.node_id, waiting=len(self._queue), waiting_bytes=self._bytes)
        self._queue[outgoing.call_id] = (outgoing, nbytes)
        self._bytes += nbytes
        match self.state:
            case PeerState.IDLE:
                self.state = PeerState.CONNECTING
                return [Connect()]
            case PeerState.REFUSED:
                self.state = PeerState.CONNECTING
                return [Reconnect()]
            case PeerState.UP if outgoing.incarnation not in (NO_LIFE, self.incarnation):
                return self._fail_other_lives()
            case PeerState.UP if not self.blocked:
                return [_FLUSH]
            case _:
                return []

    def next_to_send(self) -> Outgoing | None:
        """The message whose turn it is; it stays in the queue until `handed_over`."""
        if not self._queue or self.state is not PeerState.UP:
            return None
        return next(iter(self._queue.values()))[0]

    def handed_over(self, outgoing: Outgoing) -> None:
        """The carrier took the message. A call is now in flight, a one-way message is gone."""
        found = self._queue.pop(outgoing.call_id, None)
        if found is not None:
            self._bytes -= found[1]
        if outgoing.on_outcome is not None:
            self.in_flight[outgoing.call_id] = outgoing

    def left(self, outgoing: Outgoing) -> bool:
        """A message is answered, abandoned or too late; whether it had been handed over."""
        if self.in_flight.pop(outgoing.call_id, None) is not None:
            return True
        found = self._queue.pop(outgoing.call_id, None)
        if found is not None:
            self._bytes -= found[1]
        return False

    def take_unheard(self) -> list[Outgoing]:
        """The one-way messages that wait for a connection which broke: a node that ends does not wait for them."""
        if self.state is PeerState.UP or not self.last_cause:
            return []
        unheard = [outgoing for outgoing, _ in self._queue.values() if outgoing.on_outcome is None]
        for outgoing in unheard:
            self.left(outgoing)
        return unheard

    def connected(self) -> list[Effect]:
        """The connection is made."""
        if self.state is PeerState.IDLE:
            return []
        self.connects += 1
        effects = self._break("the connection was replaced") if self.state is PeerState.UP else []
        self.state = PeerState.GREETING
        self.blocked = False
        return [*effects, _GREET]

    def welcomed(self, incarnation: Incarnation) -> list[Effect]:
        """The peer answered the greeting."""
        if self.state is not PeerState.GREETING:
            return []
        if incarnation < self.incarnation:
            # The greeting reached a life that is over; its connection will break too.
            self.last_cause = f"greeted by past incarnation {incarnation}"
            self.state = PeerState.CONNECTING
            return [Reconnect()]
        self.incarnation = incarnation
        self.state = PeerState.UP
        self._refusal = None
        return [Notify(PeerUp(self.node_id, incarnation)), *self._fail_other_lives(), _FLUSH]

    def greeting_failed(self, error: KVError, now_ns: int) -> list[Effect]:
        """The peer answered the greeting with an error: as good as refusing our key."""
        return self._refuse(error, now_ns) if self.state is PeerState.GREETING else []

    def greeting_unanswered(self) -> list[Effect]:
        """The peer took the connection but does not speak: try a new one."""
        if self.state is not PeerState.GREETING:
            return []
        self.state = PeerState.CONNECTING
        self.last_cause = "greeting unanswered"
        return [Reconnect()]

    def lost(self, cause: str) -> list[Effect]:
        """The connection broke, or an attempt to make it failed."""
        self.last_cause = cause
        if self.state in (PeerState.IDLE, PeerState.REFUSED):
            return []
        effects = self._break(cause)
        self.state = PeerState.CONNECTING
        self.blocked = False
        return effects

    def refused(self, cause: str, now_ns: int) -> list[Effect]:
        """The peer does not admit us."""
        if self.state is PeerState.IDLE:
            return []
        return self._refuse(AuthRefused(node=self.node_id, cause=cause), now_ns)

    def newer_life_seen(self, incarnation: Incarnation) -> list[Effect]:
        """Something other than this link showed that the peer lives in `incarnation` now."""
        if incarnation <= self.incarnation:
            return []
        known, self.incarnation = self.incarnation, incarnation
        if self.state is not PeerState.UP:
            return []
        effects: list[Effect] = [
            Fail(outgoing, ConnectionLost(node=self.node_id, message=type(outgoing.message).__name__))
            for outgoing in self._take_in_flight()
        ]
        self.state = PeerState.GREETING
        return [*effects, Notify(PeerDown(self.node_id, known, f"incarnation {incarnation} seen")), _GREET]

    def writable(self) -> list[Effect]:
        """The connection takes messages again."""
        if not self.blocked:
            return []
        self.blocked = False
        return [_FLUSH]

    def take_all(self) -> list[Outgoing]:
        """Everything on the link, oldest first: the link ends."""
        everything = self._take_in_flight() + self._take_queue()
        self.state = PeerState.IDLE
        return everything

    def check(self) -> None:
        """Assert the invariants."""
        assert self._bytes == sum(nbytes for _, nbytes in self._queue.values())
        assert len(self._queue) <= PEER_QUEUE_MAX and self._bytes <= PEER_QUEUE_BYTES_MAX
        assert not (self._queue.keys() & self.in_flight.keys()), "a message both waits and is in flight"
        assert not self.in_flight or self.state is PeerState.UP, "in flight on a link that is not up"
        assert self.state is not PeerState.UP or self.incarnation > NO_LIFE

    def _break(self, cause: str) -> list[Effect]:
        was_up = self.state is PeerState.UP
        effects: list[Effect] = [
            Fail(outgoing, ConnectionLost(node=self.node_id, message=type(outgoing.message).__name__))
            for outgoing in self._take_in_flight()
        ]
        if was_up:
            effects.append(Notify(PeerDown(self.node_id, self.incarnation, cause)))
        return effects

    def _refuse(self, error: KVError, now_ns: int) -> list[Effect]:
        effects = self._break(str(error))
        self.state, self.last_cause = PeerState.REFUSED, str(error)
        self._refusal, self._refused_ns = error, now_ns
        effects += [Fail(outgoing, self._refusal_again()) for outgoing in self._take_queue()]
        return [*effects, Notify(PeerRefused(self.node_id, str(error)))]

    def _refusal_again(self) -> KVError:
        # A new instance each time: an exception carries the traceback of whoever raised it.
        if self._refusal is None:
            raise LocalProtocolError(detail=f"link to {self.node_id} is refused without a cause")
        return type(self._refusal)(**self._refusal.fields)

    def _fail_other_lives(self) -> list[Effect]:
        """Messages that were meant for a life which is not the one that greeted us."""
        others = [
            (outgoing, nbytes)
            for outgoing, nbytes in self._queue.values()
            if outgoing.incarnation not in (NO_LIFE, self.incarnation)
        ]
        for outgoing, nbytes in others:
            del self._queue[outgoing.call_id]
            self._bytes -= nbytes
        return [
            Fail(
                outgoing,
                WrongIncarnation(node=self.node_id, expected=outgoing.incarnation, actual=self.incarnation),
            )
            for outgoing, _ in others
        ]

    def _take_in_flight(self) -> list[Outgoing]:
        taken = list(self.in_flight.values())
        self.in_flight.clear()
        return taken

    def _take_queue(self) -> list[Outgoing]:
        taken = [outgoing for outgoing, _ in self._queue.values()]
        self._queue.clear()
        self._bytes = 0
        return taken

"""What every transport offers, and what links of all kinds share.

A link is the initiator's end of a connection: it posts units, asks questions, and says when it is lost. The promise
that everything else rests on: **each posted unit is settled exactly once, and after that the link neither reads nor
writes its memory** (B1), also when the link breaks or is closed.

A session is the owner's end. It hands what arrives to the `Ledger` and answers.

While there is work both ends send a frame at least every heartbeat; silence for longer than the configured time is
the peer's death as far as this connection is concerned (a stopped process looks like this).
"""

import abc
import asyncio
import logging
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Final, Protocol

from kv_core.clock import Clock
from kv_core.errors import KVError
from kv_core.ids import NodeId
from kv_core.namespace import EXACT, Fidelity
from kv_transport import limits
from kv_transport.codec_choice import MovingCost
from kv_transport.codec_rates import CodecRates
from kv_transport.config import TransportConfig
from kv_transport.errors import ConnectionLost, FrameRefused, TransferTimeout
from kv_transport.frames import (
    Acked,
    Bye,
    Fence,
    Fenced,
    Frame,
    FromOwner,
    GiveUp,
    Note,
    Open,
    Opened,
    Ping,
    Refused,
    flat_fields,
)
from kv_transport.ledger import Ledger
from kv_transport.poster import LoopPoster
from kv_transport.recovery import RecoveryAction, TransferTask
from kv_transport.tickets import AgentMetadata
from kv_transport.types import PeerName
from kv_transport.units import NonceSource, Unit

_log = logging.getLogger(__name__)

SettleUnit = Callable[[KVError | None], None]


@dataclass(frozen=True, slots=True)
class Surroundings:
    """What a backend gets from its agent."""

    me: PeerName
    secret: bytes
    config: TransportConfig
    clock: Clock
    loop: asyncio.AbstractEventLoop
    poster: LoopPoster
    ledger: Ledger
    on_note: Callable[[NodeId, bytes], None]
    spawn: Callable[[Coroutine[None, None, None]], None]
    """Runs a coroutine as a task of the agent, which ends with it."""
    codec_rates: CodecRates
    """What codecs were measured to do here."""
    on_recovery: Callable[[TransferTask, RecoveryAction, KVError], None] = lambda task, action, error: None
    """Told of what was done about a fault inside a transfer that goes on."""


class LinkOwner(Protocol):
    """Who uses a link; called on the loop."""

    def link_lost(self, link: "Link", error: KVError) -> None: ...
    def grant_fenced(self, ticket: int) -> None: ...


class Posted(Protocol):
    """What a link keeps of a unit on its way: `settle` is called once; `since_ns` is set by the link."""

    since_ns: int

    @property
    def unit(self) -> Unit: ...

    @property
    def settle(self) -> SettleUnit: ...


@dataclass(slots=True, eq=False)
class _Posted:
    unit: Unit
    settle: SettleUnit
    since_ns: int = 0


class Link(abc.ABC):
    """The initiator's end of a connection to one life of one peer. All methods belong to the loop."""

    scheme: str
    encodes = False
    """Whether it writes units with a codec, as `Unit.codec` says; else they go as they are."""

    def __init__(self, around: Surroundings, peer: PeerName, nonces: NonceSource, owner: LinkOwner) -> None:
        self.peer: Final = peer
        self.lost: KVError | None = None
        self._around = around
        self._nonces = nonces
        self._owner = owner
        self._seq = 0
        self._posted: dict[int, Posted] = {}
        self._asked: dict[int, asyncio.Future[FromOwner]] = {}
        self._open: set[int] = set()
        self._fences: dict[int, None] = {}  # tickets that are over; kept, so that nothing of them is begun again
        self._unconfirmed: set[int] = set()
        self._now_ns: Final = around.clock.monotonic_ns
        self._heard_ns = self._now_ns()
        self._timer: asyncio.TimerHandle | None = None
        self._armed_ns = 0
        self._ended = asyncio.Event()

    @property
    def units_posted(self) -> int:
        return len(self._posted)

    @property
    def heard_ns(self) -> int:
        """When the peer was heard last."""
        return self._heard_ns

    def now_ns(self) -> int:
        """By the clock that `heard_ns` and `since_ns` are of."""
        return self._now_ns()

    # What users of a link call.

    def moving_cost(self) -> MovingCost:
        """What bytes cost the threads at its ends, for whoever weighs codecs; known where it `encodes`."""
        return MovingCost()

    def takes_directly(self, unit: Unit) -> bool:
        """Whether a unit that is alone, of an open region, may go past the queue: that costs more than it is worth."""
        return False

    def post(self, unit: Unit, settle: SettleUnit) -> None:
        """Begin a unit. `settle(None)` when it is verified at its destination, else with the reason."""
        self._begin(self._enlist(_Posted(unit, settle)), unit)

    def post_quietly(self, posted: Posted) -> None:
        """The same, but that it is settled may only be found by `take_answers`, unless somebody `wants_answers`."""
        self._begin(self._enlist(posted), posted.unit)

    def take_answers(self) -> None:
        """Settle the quiet units that the peer has accepted."""
        return  # none are quiet here

    def want_answers(self) -> None:
        """The same, now and as they come: somebody waits for them."""
        self.take_answers()

    def _enlist(self, posted: Posted) -> int:
        """The number of a unit that is about to be posted."""
        if self.lost is not None:
            raise self.lost
        self._seq += 1
        posted.since_ns = now = self._now_ns()
        if not self._posted and not self._asked:
            self._heard_ns = now  # silence counts from when there is something to answer
        self._posted[self._seq] = posted
        if self._timer is None:
            self._arm()
        return self._seq

    def ask_open(self, ticket: int, fidelity: Fidelity = EXACT) -> asyncio.Future[FromOwner]:
        """Announce that we write under a grant, and what; `opened` takes the answer. Raises what ended the link."""
        attempt = self._nonces()
        return self._question(lambda seq: Open(seq, ticket, attempt, str(fidelity)))[1]

    async def opened(self, ticket: int, answer: asyncio.Future[FromOwner]) -> list[int]:
        """Until the owner has answered `ask_open`: the bits that are verified already, per layer.

        Raises:
            GrantRefused and others: the owner's reason.
            ConnectionLost: the link broke meanwhile.
        """
        reply = await answer
        if not isinstance(reply, Opened):
            raise FrameRefused(peer=str(self.peer), reason=f"{type(reply).__name__} in answer to Open")
        self._open.add(ticket)
        self._arm()
        return [int.from_bytes(bits, "little") for bits in reply.verified]

    def close_grant(self, ticket: int, error: KVError | None) -> None:
        """We are done with a grant. With an error: we give it up; no unit of it may be in flight."""
        self._open.discard(ticket)
        if error is not None and self.lost is None:
            code, fields = error.to_wire()
            self._send(GiveUp(ticket, code, flat_fields(fields)))

    def send_note(self, payload: bytes) -> None:
        """Send bytes to the owner's `notifs()`."""
        if self.lost is not None:
            raise self.lost
        self._send(Note(payload))

    def fail(self, error: KVError) -> None:
        """Break the link: every unit is settled with `error` as soon as its memory is free. Idempotent."""
        if self.lost is not None:
            return
        self.take_answers()  # the peer's last words count
        self.lost = error
        if self._timer is not None:
            self._timer.cancel()
        for asked in self._asked.values():
            if not asked.done():
                asked.set_exception(error)
                asked.exception()  # the asker may be gone
        self._asked.clear()
        # First: who hears that a unit has bounced may post the next one, and must know by then that we are gone.
        self._owner.link_lost(self, error)
        self._break(error)

    async def close(self) -> None:
        """End the link in good order if it still stands; returns when no memory is in use. Idempotent."""
        if self.lost is None:
            self.take_answers()
            if not self._posted:
                self._send(Bye())
            self.fail(ConnectionLost(peer=str(self.peer), transport=self.scheme, cause="closed here"))
        await self._ended.wait()

    # What a backend fills in.

    @abc.abstractmethod
    def _begin(self, seq: int, unit: Unit) -> None:
        """Start a unit. Ends in `_settle(seq, ...)`, or in `_break`."""

    @abc.abstractmethod
    def _send(self, frame: Frame) -> None:
        """Send a control frame; a failure ends in `fail`, later."""

    @abc.abstractmethod
    def _break(self, error: KVError) -> None:
        """Stop all work and call `_settle_all` once nothing touches any memory any more."""

    @abc.abstractmethod
    def _ticket_busy(self, ticket: int) -> bool:
        """Whether bytes of this ticket are being moved, or may still be, by this side."""

    # What backends call.

    def _settle(self, seq: int, error: KVError | None) -> None:
        posted = self._posted.pop(seq, None)
        if posted is None:
            return
        posted.settle(error)
        self._confirm_fences()

    def _settle_all(self, error: KVError) -> None:
        """The link is at rest: nothing of ours is touched any more."""
        posted, self._posted = self._posted, {}
        for item in posted.values():
            item.settle(error)
        self._ended.set()

    def _received(self, frame: FromOwner) -> None:
        """A frame of the owner, on the loop."""
        self._heard_ns = self._around.clock.monotonic_ns()
        match frame:
            case Acked(seq):
                self._settle(seq, None)
            case Refused(seq) if seq in self._posted:
                self._settle(seq, frame.error())
            case Refused(seq):
                asked = self._asked.pop(seq, None)
                if asked is not None and not asked.done():
                    asked.set_exception(frame.error())
            case Opened(seq):
                self._answer(seq, frame)
            case Fence(ticket):
                self._fence(ticket)
                self._open.discard(ticket)
                self._owner.grant_fenced(ticket)
                self._confirm_fences()
            case Bye():
                self.fail(ConnectionLost(peer=str(self.peer), transport=self.scheme, cause="the peer closed it"))
            case Ping():
                pass
            case _:
                self._received_other(frame)

    def _received_other(self, frame: FromOwner) -> None:
        """Frames that only some backends use."""
        self.fail(FrameRefused(peer=str(self.peer), reason=f"unexpected {type(frame).__name__}"))

    def _answer(self, seq: int, frame: FromOwner) -> None:
        asked = self._asked.pop(seq, None)
        if asked is not None and not asked.done():
            asked.set_result(frame)

    def _question(self, question: Callable[[int], Frame]) -> tuple[int, asyncio.Future[FromOwner]]:
        """Send a frame that the owner answers, at once."""
        if self.lost is not None:
            raise self.lost
        self._seq += 1
        seq = self._seq
        answer: asyncio.Future[FromOwner] = self._around.loop.create_future()
        if not self._posted and not self._asked:
            self._heard_ns = self._around.clock.monotonic_ns()
        self._asked[seq] = answer
        self._arm()
        self._send(question(seq))
        return seq, answer

    async def _ask(self, question: Callable[[int], Frame]) -> FromOwner:
        seq, answer = self._question(question)
        try:
            return await answer
        finally:
            self._asked.pop(seq, None)

    def _fence(self, ticket: int) -> None:
        """A ticket is over: units of it that wait here, or come yet, find that it is, however late they are begun."""
        self._fences[ticket] = None
        self._unconfirmed.add(ticket)
        oldest = next(iter(self._fences))
        if len(self._fences) > limits.GRANTS_MAX and oldest not in self._unconfirmed:
            del self._fences[oldest]

    def _confirm_fences(self) -> None:
        """Say of each ticket that is over that we write no more, once that is so."""
        for ticket in [ticket for ticket in self._unconfirmed if not self._ticket_busy(ticket)]:
            self._unconfirmed.discard(ticket)
            if self.lost is None:
                self._send(Fenced(ticket))

    # Heartbeats and deadlines.

    def _active(self) -> bool:
        return bool(self._posted or self._asked or self._open)

    def _arm(self) -> None:
        if self._timer is None and self.lost is None:
            delay = self._around.config.heartbeat_ms / 1000
            self._armed_ns = self._around.clock.monotonic_ns()
            self._timer = self._around.loop.call_later(delay, self._tick)

    def _tick(self) -> None:
        self._timer = None
        self.take_answers()
        if self.lost is not None or not self._active():
            return
        config, now = self._around.config, self._around.clock.monotonic_ns()
        if now - self._armed_ns > 2 * config.ns("heartbeat_ms"):
            # It is we who slept (stopped, or a blocked loop): the peer gets its time from now.
            self._forgive(now)
        silent_ms = (now - self._heard_ns) // 1_000_000
        if silent_ms > config.silence_timeout_ms:
            self._time_out("an answer", silent_ms)
            return
        oldest = next(iter(self._posted.values()), None)
        if oldest is not None and (now - oldest.since_ns) // 1_000_000 > config.unit_timeout_ms:
            self._time_out(f"a unit of layer {oldest.unit.layer}", config.unit_timeout_ms)
            return
        self._send(Ping())
        self._arm()

    def _forgive(self, now_ns: int) -> None:
        self._heard_ns = now_ns
        for posted in self._posted.values():
            posted.since_ns = now_ns

    def _time_out(self, what: str, timeout_ms: int) -> None:
        _log.warning("link timed out peer=%s transport=%s what=%s", self.peer, self.scheme, what)
        self.fail(
            TransferTimeout(
                what=what, request=f"{self.peer} over {self.scheme}", timeout_ms=timeout_ms, missing_layers=[]
            )
        )


class Backend(abc.ABC):
    """One transport of one agent."""

    scheme: str

    @abc.abstractmethod
    async def start(self) -> None:
        """Bind. Raises `BackendUnavailable`."""

    @abc.abstractmethod
    def address(self) -> bytes | None:
        """Where peers reach us, for our metadata; None if they cannot."""

    def state(self) -> str:
        """How it stands on this machine, for the inventory."""
        return "ready"

    @abc.abstractmethod
    def reaches(self, peer: AgentMetadata) -> str | None:
        """None if this backend can be tried for that peer, else why not."""

    @abc.abstractmethod
    async def connect(self, peer: AgentMetadata, nonces: NonceSource, owner: LinkOwner) -> Link:
        """A link that has proved both sides.

        Raises:
            ConnectionLost, AuthenticationFailed, StaleIncarnation, TransferTimeout.
        """

    @abc.abstractmethod
    def sessions(self) -> list[tuple[PeerName, str]]:
        """Who is connected to us, and how it stands."""

    @abc.abstractmethod
    async def close(self) -> None:
        """End every session. Links are closed by who made them. Idempotent."""

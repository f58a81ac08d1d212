"""The owner's end of a connection: what all transports answer in the same way. All methods belong to the loop."""

import abc
import asyncio
import logging
from collections.abc import Callable
from typing import Final

from kv_core.errors import KVError, error_from_wire
from kv_core.namespace import Fidelity
from kv_transport.backends.base import Surroundings
from kv_transport.errors import ConnectionLost, FrameRefused, TransferTimeout
from kv_transport.frames import (
    Bye,
    Fence,
    Fenced,
    Frame,
    FromInitiator,
    GiveUp,
    Note,
    Open,
    Opened,
    Ping,
    pack_masks,
    refusal,
)
from kv_transport.types import PeerName

_log = logging.getLogger(__name__)


class OwnerSession(abc.ABC):
    """Implements `ledger.Session`."""

    scheme: str
    one_sided: bool
    may_lag = False

    def __init__(self, around: Surroundings, peer: PeerName, on_end: Callable[[], None]) -> None:
        self.peer: Final = peer
        self.over = False
        self._around = around
        self._on_end = on_end
        self._tickets: set[int] = set()
        self._heard_ns = around.clock.monotonic_ns()
        self._ticked_ns = self._heard_ns
        self._silent = False
        self._timer: asyncio.TimerHandle | None = None

    def status(self) -> str:
        return "silent" if self._silent else "open"

    def send_fence(self, ticket: int) -> None:
        self._tickets.discard(ticket)
        if not self.over:
            self._send(Fence(ticket))

    def close(self) -> None:
        """Our side ends it."""
        if not self.over:
            self._send(Bye())
            self._finish(ConnectionLost(peer=str(self.peer), transport=self.scheme, cause="closed here"), clean=False)

    def supersede(self) -> None:
        self._lost("the peer came back by another connection")

    @abc.abstractmethod
    def _send(self, frame: Frame) -> None: ...

    @abc.abstractmethod
    def _shut(self) -> None:
        """Give the connection up; no byte of it lands after this returns or its landings are aborted."""

    def _finish(self, error: KVError, *, clean: bool) -> None:
        """The connection is over, for whatever reason. Idempotent."""
        if self.over:
            return
        self.over = True
        if self._timer is not None:
            self._timer.cancel()
        self._shut()
        self._around.ledger.session_lost(self, error, clean=clean)
        self._on_end()

    def _lost(self, cause: str) -> None:
        self._finish(ConnectionLost(peer=str(self.peer), transport=self.scheme, cause=cause), clean=False)

    def _hear(self) -> None:
        """The peer lives."""
        self._heard_ns = self._around.clock.monotonic_ns()
        self._silent = False

    def _received(self, frame: FromInitiator) -> None:
        self._hear()
        ledger = self._around.ledger
        match frame:
            case Open():
                self._open(frame)
            case Note(payload):
                self._around.on_note(self.peer.node, payload)
            case Fenced(ticket):
                ledger.fenced(self, ticket)
            case GiveUp(ticket, code):
                self._tickets.discard(ticket)
                ledger.gave_up(self, ticket, error_from_wire(code, dict(frame.fields.items())))
            case Ping():
                self._send(Ping())
            case Bye():
                self._finish(
                    ConnectionLost(peer=str(self.peer), transport=self.scheme, cause="the peer closed it"), clean=True
                )
            case _:
                self._received_other(frame)

    def _received_other(self, frame: FromInitiator) -> None:
        """Frames that only some transports use."""
        self._offence(f"unexpected {type(frame).__name__}")

    def _offence(self, reason: str) -> None:
        """The peer broke the protocol: nothing it says counts any more."""
        error = FrameRefused(peer=str(self.peer), reason=reason)
        _log.warning("session ended transport=%s peer=%s cause=%s", self.scheme, self.peer, error)
        self._finish(error, clean=False)

    def _open(self, frame: Open) -> None:
        try:
            fidelity = Fidelity.parse(frame.fidelity)
            verified, positions = self._around.ledger.open(self, frame.ticket, frame.attempt, fidelity)
        except KVError as error:
            self._send(refusal(frame.seq, error))
            return
        self._tickets.add(frame.ticket)
        self._send(Opened(frame.seq, pack_masks(verified, positions)))
        self._arm()

    def _arm(self) -> None:
        if self._timer is None and not self.over:
            self._ticked_ns = self._around.clock.monotonic_ns()
            self._timer = self._around.loop.call_later(self._around.config.heartbeat_ms / 1000, self._tick)

    def _tick(self) -> None:
        """While the peer writes under a grant it must be heard: its link sends pings."""
        self._timer = None
        open_tickets = {entry.grant.ticket for entry in self._around.ledger.grants()}
        self._tickets &= open_tickets
        if self.over or not self._tickets:
            return
        config, now = self._around.config, self._around.clock.monotonic_ns()
        if now - self._ticked_ns > 2 * config.ns("heartbeat_ms"):
            self._heard_ns = now  # it is we who slept
        silent_ms = (now - self._heard_ns) // 1_000_000
        if silent_ms > config.silence_timeout_ms and not self._silent:
            self._silent = True
            _log.warning("peer is silent transport=%s peer=%s ms=%d", self.scheme, self.peer, silent_ms)
            error = TransferTimeout(
                what="a sign of life", request=str(self.peer), timeout_ms=silent_ms, missing_layers=[]
            )
            self._around.ledger.session_silent(self, error)
            if not self.one_sided:
                # Its bytes land by our hand, so an end of the connection is a fence. None of a host that is gone would
                # ever come, and half a unit would keep its slots for as long as we live.
                self._finish(error, clean=False)
        self._arm()

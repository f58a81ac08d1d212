"""The receiver's side of a hand-over: the pure `InboundTransfer` machine with its grant, its timers and its waiters."""

import asyncio
import logging
import threading
from collections.abc import Callable
from functools import partial
from typing import Final

from kv_core.clock import Clock
from kv_core.errors import KVError
from kv_core.namespace import Fidelity
from kv_transport import inbound_state as st
from kv_transport.config import TransportConfig
from kv_transport.errors import TransferCancelled, TransferTimeout
from kv_transport.ledger import Ledger
from kv_transport.ledger_items import GrantEntry, Session
from kv_transport.types import TransferStats

_log = logging.getLogger(__name__)


class LayerArrival:
    """Which layers are verified to be in the arena; any thread may ask, or wait."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._changed = threading.Condition()
        self._ready: set[int] = set()
        self._error: KVError | None = None

    def layer_ready(self, layer: int) -> bool:
        """Whether that layer is complete; once true it stays true. Raises what the hand-over failed with."""
        if self._error is not None:
            raise self._error
        return layer in self._ready

    def wait_layer(self, layer: int, timeout_ms: int | None = None) -> None:
        """Block until that layer is complete; never on an event loop.

        Raises:
            TransferTimeout: not within `timeout_ms`.
            TransportError: what the hand-over failed with, as soon as it does.
        """
        with self._changed:
            arrived = self._changed.wait_for(
                lambda: self._error is not None or layer in self._ready,
                None if timeout_ms is None else timeout_ms / 1000,
            )
        if self._error is not None:
            raise self._error
        if not arrived:
            raise TransferTimeout(
                what="arrival", request=self._name, timeout_ms=timeout_ms or 0, missing_layers=[layer]
            )

    def note_ready(self, layer: int) -> None:
        """For whoever fills the arena: that layer is complete."""
        with self._changed:
            self._ready.add(layer)
            self._changed.notify_all()

    def fail(self, error: KVError) -> None:
        """For whoever fills the arena: no further layer will come."""
        with self._changed:
            self._error = error
            self._changed.notify_all()


class Inbound:
    """Made by `KVCacheTransferEngine.expect`. Implements `ledger.GrantListener`; lives on the loop."""

    def __init__(
        self, entry: GrantEntry, ledger: Ledger, loop: asyncio.AbstractEventLoop, clock: Clock, config: TransportConfig
    ) -> None:
        self.entry: Final = entry
        self.arrival: Final = LayerArrival(entry.grant.request_id)
        """The view for a compute thread."""
        self.taken = False
        """For the engine: somebody watches it."""
        grant = entry.grant
        self._ledger = ledger
        self._loop = loop
        self._clock = clock
        self._config = config
        self._machine = st.InboundTransfer(grant.request_id, range(grant.layer_start, grant.layer_end))
        self._layers: dict[int, asyncio.Future[None]] = {}
        self._done: asyncio.Future[None] = loop.create_future()
        self._released = asyncio.Event()
        self._settled = asyncio.Event()
        self._when_released: list[Callable[[], object]] = []
        self._timers: dict[str, asyncio.TimerHandle] = {}
        self._opened_ns = self._ended_ns = 0
        entry.listener = self

    # For callers.

    @property
    def state(self) -> st.InboundState:
        return self._machine.state

    @property
    def error(self) -> KVError | None:
        return self._machine.error

    @property
    def total_bytes(self) -> int:
        """KV bytes that complete it."""
        return self.entry.grant.total_bytes

    @property
    def fidelity(self) -> Fidelity:
        """Of what has arrived, so far: publish it under no other."""
        return self.entry.fidelity

    @property
    def missing_layers(self) -> list[int]:
        return self._machine.missing_layers

    def stats(self) -> TransferStats:
        """So far, or finally."""
        end = self._ended_ns or self._clock.monotonic_ns()
        return TransferStats(
            nbytes=self.entry.nbytes,
            wire_nbytes=self.entry.wire_nbytes,
            units=self.entry.units,
            transports=dict(self.entry.transports),
            duration_ns=end - self._opened_ns if self._opened_ns else 0,
            codecs=dict(self.entry.codecs),
        )

    async def layer_ready(self, layer: int) -> None:
        """Until that layer is complete and verified. Raises what the hand-over failed with, as soon as it does."""
        if self._machine.error is not None:
            raise self._machine.error
        if layer not in self._machine.missing_layers:
            return
        waiter = self._layers.get(layer)
        if waiter is None:
            waiter = self._layers[layer] = self._loop.create_future()
        await asyncio.shield(waiter)

    def wait_layer(self, layer: int, timeout_ms: int | None = None) -> None:
        """`layer_ready` for a compute thread: blocks. Raises `TransferTimeout` after `timeout_ms`."""
        self.arrival.wait_layer(layer, timeout_ms)

    async def done(self) -> TransferStats:
        """Until every layer is verified. Raises what the hand-over failed with."""
        await asyncio.shield(self._done)
        if self._machine.error is not None:
            raise self._machine.error
        return self.stats()

    def cancel(self) -> None:
        """Give it up: the grant ends, a writer at work is fenced off. Idempotent, no-op when complete."""
        self._step(st.Stopped(TransferCancelled(request=self.entry.grant.request_id)))

    async def released(self) -> None:
        """Until no peer can write into the slots any more: by completion, or by a fence. Slots may be reused only then.

        It may take as long as a stopped peer lives; meanwhile the slots are listed as in quarantine.
        """
        await self._released.wait()

    async def settled(self) -> None:
        """Until the slots are free or in quarantine, after the hand-over is over."""
        await self._settled.wait()

    def when_released(self, call: Callable[[], object]) -> None:
        """Call once when the slots are free, on the loop."""
        self._when_released.append(call)

    @property
    def slots_free(self) -> bool:
        """Whether `released` would return at once."""
        return self._released.is_set()

    def expire_after(self, timeout_ms: int) -> None:
        """Bound the whole hand-over, from now; a later call replaces an earlier one."""
        if self._machine.state in (st.InboundState.WAITING, st.InboundState.OPEN, st.InboundState.ORPHANED):
            self._arm("expiry", timeout_ms, partial(self._expire, timeout_ms))

    # For the ledger.

    def opened(self, session: Session) -> None:
        self._opened_ns = self._opened_ns or self._clock.monotonic_ns()
        self._step(st.Opened())

    def layer_done(self, layer: int) -> None:
        self._step(st.LayerDone(layer))

    def writer_lost(self, error: KVError, dead: bool) -> None:
        self._step(st.WriterLost(error, dead))

    def fenced(self) -> None:
        self._step(st.Fenced())

    # The machine.

    def _step(self, event: st.Event) -> None:
        for effect in self._machine.step(event):
            self._perform(effect)

    def _perform(self, effect: st.Effect) -> None:
        match effect:
            case st.LayerReady(layer):
                self.arrival.note_ready(layer)
                waiter = self._layers.pop(layer, None)
                if waiter is not None and not waiter.done():
                    waiter.set_result(None)
            case st.ArmGrace():
                self._arm("grace", self._config.resume_grace_ms, partial(self._step, st.GraceOver()))
            case st.Succeed():
                self._ended_ns = self._clock.monotonic_ns()
                self._done.set_result(None)
            case st.Fail(error):
                self._fail(error)
            case st.Fence():
                self._arm("fence", self._config.fence_timeout_ms, partial(self._step, st.FenceTimedOut()))
                if not self._ledger.revoke(self.entry.grant.ticket):
                    # It was given up in the moment between its last unit and the news of it.
                    self._step(st.Fenced())
            case st.Quarantine():
                grant = self.entry.grant
                _log.warning(
                    "slots in quarantine request=%s peer=%s slots=%d",
                    grant.request_id,
                    self.entry.writer,
                    grant.num_positions,
                )
                self._ledger.quarantine(grant.ticket)
                self._settled.set()
            case st.Release():
                for timer in self._timers.values():
                    timer.cancel()
                self._timers.clear()
                self._settled.set()
                self._released.set()
                # No peer writes any more, so there is no more news, and no ring of what knows each other is left.
                self.entry.listener = None
                calls, self._when_released = self._when_released, []
                for call in calls:
                    call()

    def _fail(self, error: KVError) -> None:
        self._ended_ns = self._clock.monotonic_ns()
        self.arrival.fail(error)
        for waiter in self._layers.values():
            if not waiter.done():
                waiter.set_exception(error)
                waiter.exception()  # who waited may be gone
        self._layers.clear()
        self._done.set_result(None)

    def _expire(self, timeout_ms: int) -> None:
        grant = self.entry.grant
        late = TransferTimeout(
            what="hand-over",
            request=grant.request_id,
            timeout_ms=timeout_ms,
            missing_layers=list(self._machine.missing_layers),
        )
        self._step(st.Stopped(late))

    def _arm(self, name: str, delay_ms: int, call: "partial[None]") -> None:
        former = self._timers.pop(name, None)
        if former is not None:
            former.cancel()
        self._timers[name] = self._loop.call_later(delay_ms / 1000, call)

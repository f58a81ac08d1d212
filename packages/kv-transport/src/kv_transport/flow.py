"""One transfer that this side posts, at work: the pure `Transfer` machine with its units, its link and its waiters.

Hand-overs, fetches and plain xfers are all flows. A flow lives on the loop, belongs to one `Peer`, and is told by it
when there is a link, when a unit was posted, and how each unit ended.
"""

import asyncio
from collections.abc import Callable, Sequence
from functools import partial
from typing import Final, Protocol

from kv_core.clock import Clock
from kv_core.errors import KVError
from kv_core.namespace import Fidelity
from kv_transport import transfer_state as ts
from kv_transport.backends.base import Link
from kv_transport.codec_choice import CodecPolicy
from kv_transport.codecs import Codec
from kv_transport.errors import ChecksumMismatch, TransferTimeout
from kv_transport.progress import span_mask
from kv_transport.tickets import ReadGrant, WriteGrant
from kv_transport.types import TransferPriority, TransferStats, XferState
from kv_transport.units import Unit


class FlowHost(Protocol):
    """Who carries a flow's units: its peer."""

    def enqueue(self, flow: "Flow", units: Sequence[int]) -> None: ...
    def dequeue(self, flow: "Flow", units: Sequence[int]) -> None: ...
    def flow_over(self, flow: "Flow") -> None: ...


class Flow:
    """See the module. `name` and `kind` are what the inventory shows."""

    def __init__(
        self,
        host: FlowHost,
        loop: asyncio.AbstractEventLoop,
        clock: Clock,
        *,
        name: str,
        kind: str,
        priority: TransferPriority,
        ticket: WriteGrant | ReadGrant | None,
        layers: range,
        total_bytes: int,
        policy: CodecPolicy,
        on_release: Callable[["Flow"], None],
    ) -> None:
        self.policy: Final = policy
        self.name: Final = name
        self.kind: Final = kind
        self.priority: Final = priority
        self.ticket: Final = ticket
        self.total_bytes = total_bytes
        self.link: Link | None = None
        self.failures: dict[str, int] = {}
        self.last_failure: dict[str, KVError] = {}
        self.lossy_checks: dict[tuple[int, int], int] = {}
        """(layer, position) -> the CRC-64 of that cell as the peer has it, where a lossy codec took it there."""
        self._host = host
        self._loop = loop
        self._clock = clock
        self._machine = ts.Transfer(name, linked=False)
        self._units: dict[int, Unit] = {}
        self._layers_left = dict.fromkeys(layers, ticket.num_positions if ticket is not None else 0)
        self._layer_waiters: dict[int, asyncio.Future[None]] = {}
        self._on_release = on_release
        self._outcome: asyncio.Future[None] = loop.create_future()
        self._released = asyncio.Event()
        self._when_drained: Callable[[], None] | None = None
        self._timers: dict[int, asyncio.TimerHandle] = {}
        self._started_ns = self._ended_ns = 0
        self._nbytes = self._wire_nbytes = self._landed = 0
        self._transports: dict[str, int] = {}
        self._codecs: dict[str, int] = {}

    # For callers.

    @property
    def state(self) -> XferState:
        return self._machine.state

    @property
    def error(self) -> KVError | None:
        return self._machine.error

    @property
    def over(self) -> bool:
        """The caller has its answer."""
        return self._outcome.done()

    @property
    def at_rest(self) -> bool:
        """No memory of it is in use."""
        return self._released.is_set()

    @property
    def missing_layers(self) -> list[int]:
        return list(self._layers_left)

    def stats(self) -> TransferStats:
        """So far, or finally."""
        end = self._ended_ns or self._clock.monotonic_ns()
        return TransferStats(
            nbytes=self._nbytes,
            wire_nbytes=self._wire_nbytes,
            units=self._landed,
            retries=self._machine.retries,
            transports=dict(self._transports),
            duration_ns=end - self._started_ns if self._started_ns else 0,
            codecs=dict(self._codecs),
        )

    @property
    def fidelity(self) -> Fidelity:
        """Of what this transfer makes at its destination, so far."""
        lossy = [codec.fidelity for codec in map(Codec, self._codecs) if not codec.lossless]
        return lossy[0] if lossy else self.policy.fidelity

    def add(self, units: Sequence[Unit]) -> None:
        """More units. Raises what the flow failed with."""
        if self._machine.error is not None:
            raise self._machine.error
        if not self._started_ns:
            self._started_ns = self._clock.monotonic_ns()
        first = len(self._units)
        self._units.update(enumerate(units, first))
        self.step(ts.Added(tuple(range(first, first + len(units)))))

    def seal(self) -> None:
        """No more units. No-op on a flow that failed."""
        if self._machine.error is None:
            self.step(ts.Sealed())

    def when_drained(self, call: Callable[[], None]) -> None:
        """Call once when every unit so far is verified; it may add more. Not called on failure."""
        self._when_drained = call

    def stop(self, error: KVError) -> None:
        """Give it up. No-op when it is over."""
        self.step(ts.Stopped(error))

    async def layer_ready(self, layer: int) -> None:
        """Until every position of the layer is verified at its destination."""
        if self._machine.error is not None:
            raise self._machine.error
        if layer not in self._layers_left:
            return
        waiter = self._layer_waiters.get(layer)
        if waiter is None:
            waiter = self._layer_waiters[layer] = self._loop.create_future()
        await asyncio.shield(waiter)

    def done_well(self) -> TransferStats | None:
        """`stats`, if it has ended and every byte is verified."""
        return self.stats() if self.at_rest and self.error is None else None

    async def wait(self, timeout_ms: int | None, *, stop: bool = False) -> TransferStats:
        """Until it is over and its memory free.

        Raises:
            TransferTimeout: not in time; with `stop` it is given up and its memory free, else it goes on.
            KVError: it failed, and its memory is free.
        """
        try:
            async with asyncio.timeout(None if timeout_ms is None else timeout_ms / 1000):
                await self._released.wait()
        except TimeoutError:
            late = TransferTimeout(
                what=self.kind, request=self.name, timeout_ms=timeout_ms, missing_layers=list(self.missing_layers)
            )
            if not stop:
                raise late from None
            self.stop(late)
            await self._released.wait()
        if self._machine.error is not None:
            raise self._machine.error
        return self.stats()

    async def released(self) -> None:
        """Until its memory is free."""
        await self._released.wait()

    # For the peer.

    def unit(self, unit_id: int) -> Unit:
        return self._units[unit_id]

    def linked(self, link: Link, verified: list[int] | None) -> None:
        """There is a link; for a grant, these positions per layer are at the receiver already."""
        self.link = link
        self.step(ts.LinkBack(self._arrived(verified)))

    def unlinked(self) -> None:
        """The link broke."""
        self.link = None
        self.step(ts.LinkGone())

    def posted(self, unit_id: int) -> None:
        unit = self._units[unit_id]
        unit.begin()
        unit.sent_codec, unit.wire_nbytes, unit.lz4_ratio, unit.far_checks = Codec.NONE, unit.nbytes, None, ()
        self.step(ts.Flown(unit_id))

    def adopt(self, unit: Unit) -> None:
        """The only unit of this flow, which was posted before the flow was made; `settled` tells what came of it."""
        self._started_ns = self._clock.monotonic_ns()
        self._units[0] = unit
        unit.sent_codec, unit.wire_nbytes, unit.lz4_ratio = Codec.NONE, unit.nbytes, None
        for event in (ts.Added((0,)), ts.Sealed(), ts.Adopted(0)):
            self.step(event)

    def checksum_failures(self, unit_id: int) -> int:
        """How often the bytes of a unit failed their checksum so far."""
        return self._machine.checksum_failures(unit_id)

    def settled(self, unit_id: int, scheme: str, error: KVError | None, *, link_lost: bool) -> None:
        """A unit ended; nothing touches its memory any more."""
        unit = self._units[unit_id]
        self._wire_nbytes += unit.wire_nbytes
        if unit.lz4_ratio is not None:
            self.policy.note_lz4(unit.lz4_ratio)
        unit.rest()
        if error is None:
            if not link_lost:  # the last words of a broken link forgive nothing
                self.failures.pop(scheme, None)
            self._count(unit_id, scheme)
            self.step(ts.Landed(unit_id))
            if self._when_drained is not None and not self._machine.units_left and not self.over:
                call, self._when_drained = self._when_drained, None
                call()
        elif isinstance(error, ChecksumMismatch):
            self.step(ts.Bounced(unit_id, ts.Bounce.BAD_BYTES, error))
        else:
            bounce = ts.Bounce.LINK if link_lost else ts.Bounce.FATAL
            self.step(ts.Bounced(unit_id, bounce, error))

    def step(self, event: ts.Event) -> None:
        """Feed the machine and do what it says."""
        for effect in self._machine.step(event):
            self._perform(effect)

    def _perform(self, effect: ts.Effect) -> None:
        match effect:
            case ts.Enqueue(units):
                self._host.enqueue(self, units)
            case ts.Dequeue(units):
                self._host.dequeue(self, units)
            case ts.EnqueueAfter(unit, delay_ns):
                self._timers[unit] = self._loop.call_later(delay_ns / 1e9, partial(self._backoff_over, unit))
            case ts.Succeed():
                self._end(None)
            case ts.Fail(error):
                self._end(error)
            case ts.Release():
                self._host.flow_over(self)
                self._on_release(self)
                self._units.clear()
                self._released.set()

    def _backoff_over(self, unit: int) -> None:
        del self._timers[unit]
        self.step(ts.BackoffOver(unit))

    def _end(self, error: KVError | None) -> None:
        self._ended_ns = self._clock.monotonic_ns()
        for timer in self._timers.values():
            timer.cancel()
        self._timers.clear()
        self._outcome.set_result(None)
        for waiter in self._layer_waiters.values():
            if not waiter.done() and error is not None:
                waiter.set_exception(error)
                waiter.exception()  # who waited may be gone

    def _count(self, unit_id: int, scheme: str) -> None:
        unit = self._units[unit_id]
        self._landed += 1
        self._nbytes += unit.nbytes
        self._transports[scheme] = self._transports.get(scheme, 0) + unit.nbytes
        self._note_codec(unit)
        self._layer_progress(unit)

    def _note_codec(self, unit: Unit) -> None:
        codec = unit.sent_codec.value
        self._codecs[codec] = self._codecs.get(codec, 0) + 1
        for position, check in enumerate(unit.far_checks, unit.start):
            self.lossy_checks[unit.layer, position] = check

    def _layer_progress(self, unit: Unit) -> None:
        left = self._layers_left.get(unit.layer)
        if left is None:
            return
        left -= unit.end - unit.start
        if left:
            self._layers_left[unit.layer] = left
            return
        del self._layers_left[unit.layer]
        waiter = self._layer_waiters.pop(unit.layer, None)
        if waiter is not None and not waiter.done():
            waiter.set_result(None)

    def _arrived(self, verified: list[int] | None) -> frozenset[int]:
        """Units whose positions the receiver has verified, though we had no word of it."""
        if not verified or self.ticket is None:
            return frozenset()
        found = set()
        for unit_id, unit in self._units.items():
            span = span_mask(unit.start, unit.end)
            if verified[unit.layer - self.ticket.layer_start] & span == span and self._machine.is_parked(unit_id):
                found.add(unit_id)
                self._nbytes += unit.nbytes
                self._note_codec(unit)
                self._layer_progress(unit)
        return frozenset(found)

"""The decode role: performs what `DecodeMachine` decides, on the bus, the transfers and the compute thread."""

import asyncio
import itertools
import logging
import threading
from collections.abc import Sequence
from functools import partial

import numpy as np

from kv_bus.actor import Actor
from kv_bus.interface import DEFERRED, Reply, Request
from kv_consistency.update import OwnerEpoch
from kv_core.errors import KVError, LocalProtocolError
from kv_core.ids import RequestId
from kv_core.namespace import Namespace
from kv_services.engine.interface import LayerArrival, Model
from kv_services.errors import HandoverChecksumError, UnknownRequestError
from kv_services.messages import DecodeReserved, HandoverAccepted, HandoverDone, OutputToken, ReserveDecode, Retention
from kv_services.node.announcements import AnnounceBlocks, WithdrawBlocks
from kv_services.node.announcer import Announcer
from kv_services.node.compute import SealingSink, fills_block, run_prefill, run_step
from kv_services.node.context import NodeContext
from kv_services.node.decode_events import (
    CloseInbound,
    Computed,
    DecodeEffect,
    DecodeEvent,
    EndAsked,
    GiveUp,
    HandoverFailed,
    HandoverVerified,
    InboundClosed,
    LayerArrived,
    NotePreempted,
    OpenInbound,
    PrepareSlots,
    RefuseReserve,
    RegisterLength,
    ReplyReserved,
    ReserveAsked,
    Retire,
    SendTokens,
    StartCompute,
    StartStep,
    StepFinished,
    StepItem,
    StepOutcome,
)
from kv_services.node.decode_state import DecodeMachine
from kv_services.node.outbox import TokenOutbox
from kv_services.node.retaining import retain_prompt
from kv_services.replica.service import origin_epoch
from kv_transport import Inbound, TransferStats
from kv_transport.codecs import accepted_under

_log = logging.getLogger(__name__)
_Key = tuple[RequestId, int]


class _Arriving:
    """One hand-over at the receiver: its transfer, and what the sender says the checksum is.

    It is kept until it is over and its request is retired: the machine still speaks of it after it was over here and
    before the event that says so had its turn.
    """

    def __init__(self, inbound: Inbound, slots: tuple[int, ...]) -> None:
        self.inbound = inbound
        self.slots = slots
        self.checksum: asyncio.Future[Request[HandoverDone]] = asyncio.get_running_loop().create_future()
        self.closing = False
        self.over = False
        self.retired = False

    def answer(self, outcome: HandoverAccepted | KVError) -> None:
        """Tell the sender, if it has asked."""
        if not self.checksum.done() or self.checksum.cancelled():
            return
        asked = self.checksum.result()
        if isinstance(outcome, KVError):
            asked.fail(outcome)
        else:
            asked.reply(outcome)


class DecodeActor(Actor[DecodeEvent, DecodeEffect]):
    """Runs the decode machine of one node."""

    def __init__(self, ctx: NodeContext, model: Model, machine: DecodeMachine) -> None:
        super().__init__("decode", machine, clock=ctx.clock)
        self.machine = machine
        self._ctx = ctx
        self._model = model
        self._asked: dict[_Key, Request[ReserveDecode]] = {}
        self._owners: dict[_Key, OwnerEpoch] = {}
        self._arriving: dict[_Key, _Arriving] = {}
        self._unsealed: dict[_Key, int] = {}
        self._stops: dict[_Key, threading.Event] = {}
        self._retain: dict[_Key, tuple[Namespace, bytes, Retention]] = {}
        self.announcer = Announcer(ctx, "decode")
        self._compute_free_ns = 0
        self._steps = itertools.count(1)
        self.outbox = TokenOutbox(ctx.bus, ctx.clock, self._refused)

    def listen(self) -> None:
        """Take requests from the bus."""
        self._ctx.bus.handle(ReserveDecode, self._on_reserve)
        self._ctx.bus.handle(HandoverDone, self._on_handover_done)

    async def close(self) -> None:
        self.outbox.close()
        self._ctx.telling.close()
        for stop in self._stops.values():
            stop.set()
        for arriving in self._arriving.values():
            arriving.inbound.cancel()
        await super().close()

    async def _on_reserve(self, request: Request[ReserveDecode]) -> Reply:
        message, key = request.message, _key(request.message)
        namespace = await self._ctx.take_in(request)
        if key in self._asked:
            raise LocalProtocolError(detail=f"{message.request_id} epoch {message.epoch} was asked for twice")
        now_ns = self._ctx.clock.monotonic_ns()
        tokens = np.frombuffer(message.tokens, dtype="<u4")
        event = ReserveAsked(
            now_ns=now_ns,
            request_id=RequestId(message.request_id),
            epoch=message.epoch,
            gateway=request.sender,
            namespace=namespace,
            tokens=tuple(tokens.tolist()),
            num_confirmed=message.num_confirmed,
            sampling=message.sampling,
            deadline_ns=now_ns + message.deadline_ns,
            compute_locally=message.compute_locally,
        )
        self.post(event)
        self._asked[key] = request
        self._owners[key] = origin_epoch(request.sender, request.incarnation, message.epoch)
        if message.retention is not None:
            self._retain[key] = namespace, message.tokens, message.retention
        request.on_abandoned(lambda: self._abandoned(key))
        return DEFERRED

    async def _on_handover_done(self, request: Request[HandoverDone]) -> Reply:
        arriving = self._arriving.get(_key(request.message))
        if arriving is None or arriving.closing or arriving.over or arriving.checksum.done():
            message = request.message
            raise UnknownRequestError(node=self._ctx.node_id, request_id=message.request_id, epoch=message.epoch)
        self._ctx.replica.hear_news(request.sender, request.incarnation, request.message.news)
        arriving.checksum.set_result(request)
        return DEFERRED

    def _abandoned(self, key: _Key) -> None:
        if self._asked.pop(key, None) is not None:
            self.complete(EndAsked(*key, cause="its gateway stopped waiting"))

    def _refused(self, request_id: RequestId, epoch: int, cause: str) -> None:
        self.complete(EndAsked(request_id, epoch, cause))

    def turn_over(self) -> None:
        """What others wait for leaves; what the pool did is told when it holds nobody up."""
        self._ctx.bus.flush()
        self._ctx.tell_pool_events()

    def perform(self, effect: DecodeEffect) -> None:
        match effect:
            case PrepareSlots(refs):
                self._ctx.prepare(refs)
            case OpenInbound():
                self._open_inbound(effect)
            case ReplyReserved(request_id, epoch, cached_tokens):
                self._reply(DecodeReserved(request_id, epoch, cached_tokens, 0, None))
            case RefuseReserve(request_id, epoch, error):
                # A request that came twice is refused the second time; the first one goes on under its owner.
                if self.machine.sequence(request_id, epoch) is None:
                    self._owners.pop((request_id, epoch), None)
                    self._retain.pop((request_id, epoch), None)
                asked = self._asked.pop((request_id, epoch), None)
                if asked is not None:
                    asked.fail(error)
            case CloseInbound(request_id, epoch):
                arriving = self._arriving[request_id, epoch]
                arriving.closing = True
                arriving.inbound.cancel()
                if not arriving.checksum.done():
                    arriving.checksum.cancel()
            case AnnounceBlocks():
                self.announcer.announce(effect)
            case WithdrawBlocks():
                self.announcer.withdraw(effect)
            case StartCompute():
                self._start_compute(effect)
            case StartStep():
                # The engine's thread takes the interpreter for a while: tokens of the step before go first.
                self._ctx.bus.flush()
                self._start_step(effect)
            case SendTokens(request_id, epoch, gateway, first_index, tokens, finish):
                seq = self.machine.sequence(request_id, epoch)
                # A finished request has left the machine; its last tokens still have this long to arrive.
                deadline_ns = seq.deadline_ns if seq else self._ctx.clock.monotonic_ns() + _LAST_WORDS_NS
                self.outbox.tokens(request_id, epoch, gateway, deadline_ns, first_index, tokens, finish)
                self._ctx.metrics.tokens.labels("decode").inc(len(tokens))
            case GiveUp(request_id, epoch, gateway, error, may_retry):
                _log.warning("request given up request=%s epoch=%d cause=%s", request_id, epoch, error)
                self.outbox.give_up(request_id, epoch, gateway, error, may_retry=may_retry)
            case RegisterLength(request_id, epoch, num_tokens):
                self._register(request_id, epoch, num_tokens)
            case Retire(request_id, epoch):
                self._owners.pop((request_id, epoch), None)
                retain = self._retain.pop((request_id, epoch), None)
                if retain is not None:
                    retain_prompt(self._ctx, *retain)
                stop = self._stops.get((request_id, epoch))
                if stop is not None:
                    stop.set()
                arrived = self._arriving.get((request_id, epoch))
                if arrived is not None:
                    arrived.retired = True
                    self._forget(request_id, epoch, arrived)
            case NotePreempted(request_id, epoch):
                _log.info("request preempted request=%s epoch=%d", request_id, epoch)
                self._ctx.metrics.preemptions.inc()

    def _reply(self, reply: DecodeReserved) -> None:
        asked = self._asked.pop((RequestId(reply.request_id), reply.epoch), None)
        if asked is not None:
            asked.reply(reply)

    def _open_inbound(self, effect: OpenInbound) -> None:
        request_id, epoch = effect.request_id, effect.epoch
        seq = self.machine.sequence(request_id, epoch)
        assert seq is not None, effect
        size = self._ctx.block_size
        grant = self._ctx.transfers.grant_writes(
            request_id,
            effect.refs,
            seq_start=effect.first_block * size,
            seq_end=len(seq.tokens) - 1,
            accept=accepted_under(seq.namespace.fidelity),
        )
        left_ms = max(1, (seq.deadline_ns - self._ctx.clock.monotonic_ns()) // 1_000_000)
        inbound = self._ctx.transfers.expect(request_id, grant, timeout_ms=left_ms)
        arriving = _Arriving(inbound, tuple(ref.slot for ref in effect.refs))
        self._arriving[request_id, epoch] = arriving
        self.start_job(("inbound", request_id, epoch), self._receive(request_id, epoch, arriving), _as_event)
        self._reply(DecodeReserved(request_id, epoch, effect.cached_tokens, effect.first_block, grant.to_bytes()))

    async def _receive(self, request_id: RequestId, epoch: int, arriving: _Arriving) -> DecodeEvent:
        """Follow one hand-over to its end; the event that says how it ended comes when memory is quiet."""
        result: TransferStats | KVError | None = None
        try:
            result = await self._take_in(request_id, epoch, arriving)
        except KVError as error:
            result = error
        except asyncio.CancelledError:
            if not arriving.closing:
                raise
        await arriving.inbound.released()
        arriving.over = True
        self._forget(request_id, epoch, arriving)
        unsealed = self._unsealed.pop((request_id, epoch), None)
        if arriving.closing or result is None:
            ended = UnknownRequestError(node=self._ctx.node_id, request_id=request_id, epoch=epoch)
            arriving.answer(ended)
            return InboundClosed(request_id, epoch)
        if isinstance(result, KVError):
            self._ctx.metrics.transfer_failed(type(result).__name__)
            arriving.answer(result)
            return HandoverFailed(request_id, epoch, result)
        now_ns = self._ctx.clock.monotonic_ns()
        self._ctx.metrics.transfer_done(now_ns, result.transport, result.nbytes, result.duration_ns, result.retries)
        arriving.answer(HandoverAccepted(request_id, epoch))
        if unsealed is not None:
            await asyncio.shield(self._ctx.compute.run(partial(self._ctx.arena.seal_block, unsealed)))
        return HandoverVerified(request_id, epoch)

    def _forget(self, request_id: RequestId, epoch: int, arriving: _Arriving) -> None:
        if arriving.over and arriving.retired:
            del self._arriving[request_id, epoch]

    async def _take_in(self, request_id: RequestId, epoch: int, arriving: _Arriving) -> TransferStats:
        """Follow the layers as they come, then compare the checksum over all of them."""
        for layer in range(self._ctx.num_layers):
            await arriving.inbound.layer_ready(layer)
            self.complete(LayerArrived(request_id, epoch, layer + 1))
        stats = await arriving.inbound.done()
        asked = await asyncio.shield(arriving.checksum)
        await self._ctx.replica.caught_up(asked.message.after, asked.deadline_ns)
        self._compare(request_id, arriving, asked)
        return stats

    def _compare(self, request_id: RequestId, arriving: _Arriving, asked: Request[HandoverDone]) -> None:
        """The entry's checksum, ours against the sender's (C4)."""
        have, want = self._ctx.entry_checksum(arriving.slots), int.from_bytes(asked.message.checksum, "big")
        if have != want:
            raise HandoverChecksumError(request_id=request_id, num_blocks=len(arriving.slots), have=have, want=want)

    def _start_compute(self, effect: StartCompute) -> None:
        key = (effect.request_id, effect.epoch)
        stop = self._stops[key] = threading.Event()
        arena = self._ctx.arena

        def call() -> None:
            sink = SealingSink(arena, effect.slots)
            run_prefill(self._model, arena, effect.tokens, effect.start, effect.stop, effect.slots, sink, stop)

        began_ns = self._ctx.clock.monotonic_ns()
        running = self._ctx.compute.run(call)

        async def compute() -> DecodeEvent:
            error: KVError | None = None
            try:
                await asyncio.shield(running)
            except KVError as failure:
                error = failure
            del self._stops[key]
            now_ns = self._ctx.clock.monotonic_ns()
            if error is None:
                # Computations follow each other: what it waited for the one before is none of its own time.
                self._ctx.cost.computed(effect.stop - effect.start, now_ns - max(began_ns, self._compute_free_ns))
                self._ctx.exact.note(effect.slots[-(-effect.start // self._ctx.block_size) :])
                self._ctx.metrics.tokens.labels("prefill").inc(effect.stop - effect.start)
            self._compute_free_ns = now_ns
            return Computed(*key, error=error)

        self.start_job(("compute", *key), compute(), _as_event)

    def _start_step(self, effect: StartStep) -> None:
        arena = self._ctx.arena
        items, refused = self._readable(effect.items)
        arrivals: dict[RequestId, LayerArrival] = {
            item.request_id: self._arriving[item.request_id, item.epoch].inbound.arrival
            for item in items
            if item.arriving
        }

        running = self._ctx.compute.run(lambda: run_step(self._model, arena, items, arrivals)) if items else None

        async def step() -> DecodeEvent:
            if running is None:
                return StepFinished(tuple(refused))
            try:
                outcomes = await asyncio.shield(running)
                await self._seal_late(items, outcomes)
                return StepFinished((*outcomes, *refused))
            except KVError as error:
                # The engine refused the batch before it wrote anything: none of them can go on.
                failed = [StepOutcome(item.request_id, item.epoch, error) for item in items]
                return StepFinished((*failed, *refused))

        self.start_job(("step", next(self._steps)), step(), _as_event)

    async def _seal_late(self, items: Sequence[StepItem], outcomes: Sequence[StepOutcome]) -> None:
        """Seal the blocks that a step filled over a hand-over, now or when the hand-over's checksum was compared."""
        size = self._ctx.block_size
        for item, outcome in zip(items, outcomes, strict=True):
            if item.arriving and isinstance(outcome.result, OutputToken) and fills_block(item, size):
                key, slot = (item.request_id, item.epoch), item.slots[item.position // size]
                arriving = self._arriving.get(key)
                if arriving is not None and not arriving.over:
                    self._unsealed[key] = slot
                else:
                    await asyncio.shield(self._ctx.compute.run(partial(self._ctx.arena.seal_block, slot)))

    def _readable(self, items: Sequence[StepItem]) -> tuple[list[StepItem], list[StepOutcome]]:
        """Those whose KV may be read, and why the others' may not (C5); layers on their way are guarded by arrival."""
        readable: list[StepItem] = []
        refused: list[StepOutcome] = []
        for item in items:
            try:
                if not item.arriving:
                    owner = self._owners[item.request_id, item.epoch]
                    self._ctx.replica.verify(item.request_id, owner, item.position)
                readable.append(item)
            except KVError as error:
                refused.append(StepOutcome(item.request_id, item.epoch, error))
        return readable, refused

    def _register(self, request_id: RequestId, epoch: int, num_tokens: int) -> None:
        seq = self.machine.sequence(request_id, epoch)
        if seq is None:
            return
        full = num_tokens // self._ctx.block_size
        checksum = self._ctx.entry_checksum([ref.slot for ref in seq.refs[:full]])
        owner = self._owners[request_id, epoch]
        try:
            self._ctx.replica.register_length(request_id, owner, num_tokens, checksum, seq.namespace)
        except KVError as error:
            self.complete(EndAsked(request_id, epoch, str(error)))


_LAST_WORDS_NS = 10_000_000_000


def _key(message: ReserveDecode | HandoverDone) -> _Key:
    return RequestId(message.request_id), message.epoch


def _as_event(outcome: DecodeEvent | KVError) -> DecodeEvent:
    if isinstance(outcome, KVError):
        raise outcome
    return outcome

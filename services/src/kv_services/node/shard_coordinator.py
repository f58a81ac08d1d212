"""Runs sharded sequences over the nodes that hold their pieces: performs what `ShardCoordinatorMachine` decides.

Keeps between stages what the machine does not look at, the hidden state. What a holder fails with is turned here into
errors that say which node to leave out of the next attempt.
"""

import asyncio
import itertools
import logging
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Final, TypeVar

import numpy as np

from kv_bus.actor import Actor
from kv_bus.errors import BusError
from kv_bus.interface import DEFERRED, Reply, Request
from kv_core.errors import KVError, RemoteProtocolError, RetryableError
from kv_core.ids import NodeId, RequestId
from kv_core.sharding import Placement
from kv_core.wire import Message
from kv_prefix.errors import TenantQuotaError
from kv_services.engine.interface import FloatArray
from kv_services.engine.shard_math import Partials
from kv_services.engine.sharding import ShardEngine
from kv_services.errors import NodeDrainingError, NoKVRoleError, UnknownRequestError
from kv_services.event_log import EventLog
from kv_services.messages import DecodeReserved, NamespaceFields
from kv_services.node.compute import sample_token
from kv_services.node.context import NodeContext
from kv_services.node.decode_events import EndAsked, GiveUp, RefuseReserve, ReplyReserved, Retire, SendTokens
from kv_services.node.outbox import TokenOutbox
from kv_services.node.shard_coordinator_state import (
    ChooseToken,
    ClosePiece,
    CoordinatorEffect,
    CoordinatorEvent,
    OpenPiece,
    PieceFailed,
    PieceOpened,
    RunStage,
    ShardCoordinatorMachine,
    ShardedReserveAsked,
    StageEnded,
    TokenChosen,
)
from kv_services.node.shard_worker import Asked, ShardWorker
from kv_services.sharded.errors import ShardLostError, ShardRefusedError
from kv_services.sharded.messages import (
    AttendShard,
    CloseShard,
    LayersRan,
    OpenShard,
    PieceFields,
    ReserveSharded,
    RunLayers,
    ShardAttended,
    ShardOpened,
)
from kv_services.sharded.rows import pack, unpack, unpack_partials

CLOSE_TIMEOUT_NS: Final = 1_000_000_000
CLOSE_TRIES: Final = 3
LAST_WORDS_NS: Final = 10_000_000_000
"""How long the last tokens of a request that has ended here may take to arrive."""

_log = logging.getLogger(__name__)
_Key = tuple[RequestId, int]
_R = TypeVar("_R", bound=Message)
_Result = TypeVar("_Result")


@dataclass(slots=True)
class _Kept:
    """What is kept of one request: who waits until its pieces are open, whose KV it is, the state between stages."""

    asked: Request[ReserveSharded] | None
    namespace: NamespaceFields
    hidden: FloatArray | None = None


class ShardCoordinator(Actor[CoordinatorEvent, CoordinatorEffect]):
    """Runs the coordinator machine of one node.

    Args:
        engine: None when the node's engine cannot compute on pieces: every request is then refused.
        worker: holds this node's own pieces.
        step_timeout_ns: how long a holder may take for one stage.
    """

    def __init__(
        self,
        ctx: NodeContext,
        engine: ShardEngine | None,
        machine: ShardCoordinatorMachine,
        worker: ShardWorker,
        events: EventLog,
        step_timeout_ns: int,
    ) -> None:
        super().__init__("sharded requests", machine, clock=ctx.clock)
        self.machine = machine
        self._ctx, self._engine, self._worker, self._events = ctx, engine, worker, events
        self._step_timeout_ns = step_timeout_ns
        self._kept: dict[_Key, _Kept] = {}
        self._jobs_of: dict[_Key, list[tuple[str, int]]] = {}
        self._job_ids = itertools.count(1)
        self.outbox = TokenOutbox(ctx.bus, ctx.clock, self._refused)

    def __len__(self) -> int:
        """Requests that are coordinated here."""
        return len(self.machine.sequences)

    def listen(self) -> None:
        """Take requests from the bus."""
        self._ctx.bus.handle(ReserveSharded, self._on_reserve)

    async def close(self) -> None:
        self.outbox.close()
        await super().close()

    async def _on_reserve(self, request: Request[ReserveSharded]) -> Reply:
        message, ctx = request.message, self._ctx
        if self._engine is None:
            raise NoKVRoleError(node=ctx.node_id, role=ctx.node.role.value, work="sequences in pieces")
        namespace = message.namespace.namespace()
        ctx.replica.hear_news(request.sender, request.incarnation, message.news)
        if message.after:
            await ctx.replica.caught_up(message.after, request.deadline_ns)
        ctx.past.note(message.request_id, namespace, message.tokens)
        key = (RequestId(message.request_id), message.epoch)
        if key in self._kept:
            raise RemoteProtocolError(detail=f"{message.request_id} epoch {message.epoch} was asked for twice")
        pieces = tuple(
            Placement(p.layer_start, p.layer_end, p.token_start, p.token_end, NodeId(p.node)) for p in message.pieces
        )
        self.post(
            ShardedReserveAsked(
                request_id=key[0],
                epoch=message.epoch,
                gateway=request.sender,
                tokens=tuple(np.frombuffer(message.tokens, dtype="<u4").tolist()),
                num_confirmed=message.num_confirmed,
                sampling=message.sampling,
                deadline_ns=ctx.clock.monotonic_ns() + message.deadline_ns,
                pieces=pieces,
            )
        )
        self._kept[key] = _Kept(request, message.namespace)
        request.on_abandoned(lambda: self._abandoned(key))
        return DEFERRED

    def _abandoned(self, key: _Key) -> None:
        kept = self._kept.get(key)
        if kept is not None and kept.asked is not None:
            self.complete(EndAsked(*key, cause="its gateway stopped waiting"))

    def _refused(self, request_id: RequestId, epoch: int, cause: str) -> None:
        self.complete(EndAsked(request_id, epoch, cause))

    def perform(self, effect: CoordinatorEffect) -> None:
        match effect:
            case OpenPiece(request_id, epoch, piece, _):
                key = (request_id, epoch)

                def opened(outcome: ShardOpened | KVError) -> CoordinatorEvent:
                    if isinstance(outcome, KVError):
                        return PieceFailed(*key, error=outcome)
                    return PieceOpened(*key, node=piece.node)

                self._start(key, "open", self._open(effect), opened)
            case ClosePiece(request_id, epoch, node, cause):
                self._close_piece(node, CloseShard(request_id, epoch, cause), CLOSE_TRIES)
            case RunStage(request_id, epoch):
                self._start((request_id, epoch), "stage", self._run_stage(effect), _stage_ended(request_id, epoch))
            case ChooseToken(request_id, epoch):
                self._start((request_id, epoch), "choose", self._choose(effect), _stage_ended(request_id, epoch))
            case ReplyReserved(request_id, epoch, cached_tokens):
                asked = self._taken(request_id, epoch)
                if asked is not None:
                    asked.reply(DecodeReserved(request_id, epoch, cached_tokens, 0, None))
            case RefuseReserve(request_id, epoch, error):
                asked = self._taken(request_id, epoch)
                if asked is not None:
                    self._note(request_id, error)
                    asked.fail(error)
                if self.machine.sequence(request_id, epoch) is None:
                    self._kept.pop((request_id, epoch), None)
            case SendTokens(request_id, epoch, gateway, first_index, tokens, finish):
                seq = self.machine.sequence(request_id, epoch)
                deadline_ns = seq.deadline_ns if seq else self._ctx.clock.monotonic_ns() + LAST_WORDS_NS
                self.outbox.tokens(request_id, epoch, gateway, deadline_ns, first_index, tokens, finish)
                self._ctx.metrics.tokens.labels("decode").inc(len(tokens))
            case GiveUp(request_id, epoch, gateway, error, may_retry):
                self._note(request_id, error)
                self.outbox.give_up(request_id, epoch, gateway, error, may_retry=may_retry)
            case Retire(request_id, epoch):
                for job in self._jobs_of.pop((request_id, epoch), ()):
                    self.cancel_job(job)
                kept = self._kept.get((request_id, epoch))
                if kept is not None:
                    kept.hidden = None
                    if kept.asked is None:
                        del self._kept[request_id, epoch]
        self._ctx.metrics.sharded_running.set(len(self))

    def _taken(self, request_id: RequestId, epoch: int) -> Request[ReserveSharded] | None:
        kept = self._kept.get((request_id, epoch))
        if kept is None:
            return None
        asked, kept.asked = kept.asked, None
        return asked

    def _note(self, request_id: RequestId, error: KVError) -> None:
        _log.warning("sharded request given up request=%s cause=%s", request_id, error)
        if isinstance(error, ShardLostError | ShardRefusedError):
            kind = "shard_lost" if isinstance(error, ShardLostError) else "shard_refused"
            link = f"{self._ctx.node_id}>{error.fields['node']!s}"
            self._events.note(kind, link, str(error), request=request_id)
            self._ctx.metrics.recoveries.labels(kind).inc()

    def _start(
        self,
        key: _Key,
        kind: str,
        work: Coroutine[object, object, _Result],
        outcome: Callable[[_Result | KVError], CoordinatorEvent],
    ) -> None:
        job = (kind, next(self._job_ids))
        self.start_job(job, work, outcome)
        # Opening is one job for each piece, then there is one at a time: those before it are over.
        running = [] if kind != "open" else self._jobs_of.get(key, [])
        self._jobs_of[key] = [*running, job]

    async def _open(self, effect: OpenPiece) -> ShardOpened:
        p = effect.piece
        fields = PieceFields(p.node, p.layer_start, p.layer_end, p.token_start, p.token_end)
        left_ns = max(1, effect.deadline_ns - self._ctx.clock.monotonic_ns())
        namespace = self._kept[effect.request_id, effect.epoch].namespace
        message = OpenShard(effect.request_id, effect.epoch, namespace, fields, left_ns)
        try:
            return await self._ask(p.node, message, ShardOpened, effect.deadline_ns)
        except (ShardLostError, TenantQuotaError):
            raise
        except RetryableError as error:
            raise ShardRefusedError(request_id=effect.request_id, node=p.node, cause=str(error)) from error

    async def _run_stage(self, effect: RunStage) -> None:
        kept, engine = self._kept[effect.request_id, effect.epoch], self._engine
        assert engine is not None
        if effect.tokens:
            hidden = await self._computed(lambda: engine.embed(effect.tokens))
        else:
            assert kept.hidden is not None, effect
            hidden, kept.hidden = kept.hidden, None
        if effect.stage.split:
            hidden = await self._split(engine, effect, hidden)
        else:
            message = RunLayers(effect.request_id, effect.epoch, effect.start, effect.decoding, pack(hidden))
            node = effect.stage.pieces[0].node
            ran = await self._ask(node, message, LayersRan, effect.deadline_ns)
            hidden = unpack(ran.hidden, engine.shapes.width)
            if len(hidden) != effect.count:
                raise RemoteProtocolError(detail=f"{node} gave {len(hidden)} rows, {effect.count} were asked for")
        kept.hidden = hidden
        if not effect.decoding and effect.stage.layer_end == self._ctx.num_layers:
            self._ctx.metrics.tokens.labels("prefill").inc(effect.count)

    async def _split(self, engine: ShardEngine, effect: RunStage, hidden: FloatArray) -> FloatArray:
        """One layer whose KV several nodes hold: project here, attend there, finish here."""
        layer, start, decoding = effect.stage.layer_start, effect.start, effect.decoding
        queries, keys_values = await self._computed(lambda: engine.project(layer, hidden, start, decoding=decoding))
        asked, brought = pack(queries), pack(keys_values)

        async def attend(piece: Placement) -> Partials:
            own = brought if start < piece.token_end else b""
            message = AttendShard(effect.request_id, effect.epoch, layer, start, asked, own)
            said = await self._ask(piece.node, message, ShardAttended, effect.deadline_ns)
            shapes = engine.shapes
            return unpack_partials(
                said.maxima, said.sums, said.outputs, effect.count, shapes.num_heads, shapes.head_dim
            )

        outcomes = await asyncio.gather(*map(attend, effect.stage.pieces), return_exceptions=True)
        parts: list[Partials] = []
        for outcome in outcomes:
            if isinstance(outcome, BaseException):
                raise outcome
            parts.append(outcome)
        return await self._computed(lambda: engine.finish(layer, hidden, parts, start, decoding=decoding))

    async def _choose(self, effect: ChooseToken) -> CoordinatorEvent:
        kept, engine = self._kept[effect.request_id, effect.epoch], self._engine
        hidden = kept.hidden
        assert engine is not None and hidden is not None, effect
        token = await self._computed(lambda: sample_token(engine.read_out(hidden), effect.sampling, effect.position))
        return TokenChosen(effect.request_id, effect.epoch, token)

    async def _computed(self, call: Callable[[], _Result]) -> _Result:
        return await asyncio.shield(self._ctx.compute.run(call))

    async def _ask(self, node: NodeId, message: Asked, expect: type[_R], deadline_ns: int) -> _R:
        """One call of a holder.

        Raises:
            ShardLostError: it cannot be reached, is too slow, or does not hold the piece (any more).
            ShardRefusedError: it is leaving.
            KVError: what it answered.
        """
        ctx = self._ctx
        until_ns = min(deadline_ns, ctx.clock.monotonic_ns() + self._step_timeout_ns)
        try:
            if node != ctx.node_id:
                return await ctx.bus.request(node, message, expect=expect, deadline_ns=until_ns)
            reply = await self._worker.ask(message)
            assert isinstance(reply, expect), reply
            return reply
        except (BusError, UnknownRequestError) as error:
            raise ShardLostError(request_id=message.request_id, node=node, cause=str(error)) from error
        except NodeDrainingError as error:
            raise ShardRefusedError(request_id=message.request_id, node=node, cause=str(error)) from error

    def _close_piece(self, node: NodeId, message: CloseShard, tries: int) -> None:
        """Tell a holder that an epoch is over, more than once if need be; the piece's deadline is the last resort."""
        if node == self._ctx.node_id:
            self._worker.close_piece(RequestId(message.request_id), message.epoch)
            return

        def outcome(reply: Message | KVError) -> None:
            if isinstance(reply, BusError) and tries > 1:
                self._close_piece(node, message, tries - 1)

        try:
            self._ctx.bus.call(node, message, outcome, timeout_ns=CLOSE_TIMEOUT_NS)
        except KVError as error:
            _log.warning("close not sent request=%s node=%s cause=%s", message.request_id, node, error)


def _stage_ended(request_id: RequestId, epoch: int) -> Callable[[CoordinatorEvent | KVError | None], CoordinatorEvent]:
    """The event of a job that ends a stage, or brings an event of its own."""

    def outcome(result: CoordinatorEvent | KVError | None) -> CoordinatorEvent:
        if result is None or isinstance(result, KVError):
            return StageEnded(request_id, epoch, result)
        return result

    return outcome

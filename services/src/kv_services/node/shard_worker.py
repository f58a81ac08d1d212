"""Holds pieces of sharded sequences: performs what `ShardWorkerMachine` decides, on the bus and the compute thread.

The node's own coordinator asks by `ask`, others by the bus; both go through the same mailbox.
"""

import asyncio
import itertools
from typing import Protocol

from kv_bus.actor import Actor
from kv_bus.interface import DEFERRED, Reply, Request
from kv_core.errors import KVError, RemoteProtocolError
from kv_core.ids import RequestId
from kv_core.sharding import Placement
from kv_core.wire import Message
from kv_services.engine.shard_kv import ShardKV
from kv_services.engine.sharding import ShardEngine
from kv_services.errors import NoKVRoleError
from kv_services.messages import Ack
from kv_services.node.context import NodeContext
from kv_services.node.decode_events import PrepareSlots
from kv_services.node.shard_worker_state import (
    AnswerCall,
    AnswerOpened,
    CallAsked,
    CallEnded,
    Caller,
    CloseAsked,
    OpenAsked,
    RefuseAsk,
    Shard,
    ShardWorkerMachine,
    StartCall,
    WorkerEffect,
    WorkerEvent,
)
from kv_services.sharded.messages import (
    AttendShard,
    CloseShard,
    LayersRan,
    OpenShard,
    RunLayers,
    ShardAttended,
    ShardOpened,
)
from kv_services.sharded.rows import pack, unpack
from kv_services.status_report import ShardStatus

Asked = OpenShard | RunLayers | AttendShard | CloseShard


class Answerable(Protocol):
    """Who waits for an answer: a request of the bus, or this node's own coordinator."""

    def reply(self, message: Message) -> None: ...
    def fail(self, error: KVError) -> None: ...


class _LocalAsk:
    """An ask of this node's own coordinator; nobody minds an answer that comes too late."""

    def __init__(self) -> None:
        self.answer: asyncio.Future[Message] = asyncio.get_running_loop().create_future()

    def reply(self, message: Message) -> None:
        if not self.answer.done():
            self.answer.set_result(message)

    def fail(self, error: KVError) -> None:
        if not self.answer.done():
            self.answer.set_exception(error)


class ShardWorker(Actor[WorkerEvent, WorkerEffect]):
    """Runs the worker machine of one node.

    Args:
        engine: None when the node's engine cannot compute on pieces: every piece is then refused.
    """

    def __init__(self, ctx: NodeContext, engine: ShardEngine | None, machine: ShardWorkerMachine) -> None:
        super().__init__("shards", machine, clock=ctx.clock)
        self.machine = machine
        self._ctx, self._engine = ctx, engine
        self._ids = itertools.count(1)
        self._asked: dict[int, tuple[Asked, Answerable]] = {}
        self._answers: dict[int, Message | KVError] = {}

    def __len__(self) -> int:
        """Pieces that are held."""
        return len(self.machine.shards)

    def listen(self) -> None:
        """Take requests from the bus."""
        self._ctx.bus.handle(OpenShard, self._on_request)
        self._ctx.bus.handle(RunLayers, self._on_request)
        self._ctx.bus.handle(AttendShard, self._on_request)
        self._ctx.bus.handle(CloseShard, self._on_request)

    async def ask(self, message: Asked) -> Message:
        """The same for this node's own coordinator.

        Raises:
            KVError: as a peer would be answered.
        """
        local = _LocalAsk()
        self._take(message, local, Caller(self._ctx.node_id, self._ctx.bus.incarnation))
        return await local.answer

    def close_piece(self, request_id: RequestId, epoch: int) -> None:
        """This node's own coordinator ends that epoch (and all below it)."""
        self.complete(CloseAsked(request_id, epoch))

    def status(self) -> list[ShardStatus]:
        """What is held, for people."""
        return [
            ShardStatus(
                request=shard.request_id,
                epoch=shard.epoch,
                coordinator=shard.caller.node,
                layers=f"{shard.piece.layer_start}-{shard.piece.layer_end}",
                tokens=f"{shard.piece.token_start}-{shard.piece.token_end}",
                stored=min(shard.stored) - shard.piece.token_start,
                slots=len(shard.refs),
            )
            for shard in self.machine.shards
        ]

    async def close(self) -> None:
        """Stop; a call under way in the compute thread ends by itself."""
        await super().close()
        for _, waiting in self._asked.values():
            if isinstance(waiting, _LocalAsk):
                waiting.answer.cancel()
        self._asked.clear()

    def _on_request(
        self, request: Request[OpenShard] | Request[RunLayers] | Request[AttendShard] | Request[CloseShard]
    ) -> Reply:
        return self._take(request.message, request, Caller(request.sender, request.incarnation))

    def _take(self, message: Asked, waiting: Answerable, caller: Caller) -> Reply:
        if self._engine is None:
            raise NoKVRoleError(node=self._ctx.node_id, role=self._ctx.node.role.value, work="pieces of sequences")
        request_id, epoch = RequestId(message.request_id), message.epoch
        if isinstance(message, CloseShard):
            self.complete(CloseAsked(request_id, epoch))
            return Ack()
        ask = next(self._ids)
        if isinstance(message, OpenShard):
            p = message.piece
            piece = Placement(p.layer_start, p.layer_end, p.token_start, p.token_end, self._ctx.node_id)
            deadline_ns = self._ctx.clock.monotonic_ns() + message.deadline_ns
            namespace = self._ctx.replica.know(message.namespace.namespace()).digest
            self.post(OpenAsked(ask, request_id, epoch, caller, namespace, piece, deadline_ns))
        else:
            layer = message.layer if isinstance(message, AttendShard) else None
            count, stores = self._rows_of(self._engine, message)
            self.post(CallAsked(ask, request_id, epoch, caller, layer, message.start, count, stores))
        self._asked[ask] = message, waiting
        return DEFERRED

    def _rows_of(self, engine: ShardEngine, message: RunLayers | AttendShard) -> tuple[int, bool]:
        """How many tokens a call is about, and whether it brings their KV.

        Raises:
            RemoteProtocolError: its rows are not of the model's shapes.
        """
        shapes = engine.shapes
        if isinstance(message, RunLayers):
            return len(unpack(message.hidden, shapes.width)), True
        count = len(unpack(message.queries, shapes.num_heads, shapes.head_dim))
        if message.keys_values:
            brought = len(unpack(message.keys_values, 2, shapes.num_kv_heads, shapes.head_dim))
            if brought != count:
                raise RemoteProtocolError(detail=f"KV of {brought} tokens beside queries of {count}")
        return count, bool(message.keys_values)

    def perform(self, effect: WorkerEffect) -> None:
        match effect:
            case PrepareSlots(refs):
                self._ctx.prepare(refs)
                self._ctx.flush_pool_events()
            case AnswerOpened(ask, request_id, epoch, slots):
                self._asked.pop(ask)[1].reply(ShardOpened(request_id, epoch, slots))
            case RefuseAsk(ask, error):
                self._asked.pop(ask)[1].fail(error)
            case StartCall(ask, request_id, epoch):
                shard = self.machine.shard(request_id, epoch)
                assert shard is not None, effect
                message, _ = self._asked[ask]
                assert isinstance(message, RunLayers | AttendShard), effect
                self.start_job(("call", ask), self._call(ask, message, shard), _as_event)
            case AnswerCall(ask):
                _, waiting = self._asked.pop(ask)
                answer = self._answers.pop(ask)
                if isinstance(answer, KVError):
                    waiting.fail(answer)
                else:
                    self._ctx.metrics.shard_calls.inc()
                    waiting.reply(answer)
        self._ctx.metrics.shards.set(len(self))

    async def _call(self, ask: int, message: RunLayers | AttendShard, shard: Shard) -> WorkerEvent:
        engine, arena = self._engine, self._ctx.arena
        assert engine is not None
        piece, slots = shard.piece, [ref.slot for ref in shard.refs]

        def call() -> Message:
            layers, tokens = range(piece.layer_start, piece.layer_end), range(piece.token_start, piece.token_end)
            return compute_call(engine, ShardKV(arena, layers, tokens, slots), message)

        try:
            self._answers[ask] = await asyncio.shield(self._ctx.compute.run(call))
        except KVError as error:
            self._answers[ask] = error
        return CallEnded(shard.request_id, shard.epoch, isinstance(self._answers[ask], KVError))


def compute_call(engine: ShardEngine, kv: ShardKV, message: RunLayers | AttendShard) -> Message:
    """Carry out one call on a piece; blocks.

    Raises:
        KVError: the engine's reasons.
    """
    shapes = engine.shapes
    if isinstance(message, RunLayers):
        hidden = unpack(message.hidden, shapes.width)
        return LayersRan(pack(engine.run_layers(kv, hidden, message.start, decoding=message.decoding)))
    queries = unpack(message.queries, shapes.num_heads, shapes.head_dim)
    brought = unpack(message.keys_values, 2, shapes.num_kv_heads, shapes.head_dim) if message.keys_values else None
    parts = engine.attend(kv, message.layer, queries, message.start, brought)
    return ShardAttended(pack(parts.maxima), pack(parts.sums), pack(parts.outputs))


def _as_event(outcome: WorkerEvent | KVError) -> WorkerEvent:
    if isinstance(outcome, KVError):
        raise outcome
    return outcome

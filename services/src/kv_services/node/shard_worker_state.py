"""Decides which pieces of sharded sequences a node holds, for whom, and which call on them may run.

Owns the pieces' tables in the pool. Knows no bus, no thread and no clock; `ask` is the actor's name for a message that
waits for its answer.

W1: slots are given back only when no call touches them.
W2: a call begins where the KV of its layers ends: each token is written once, in order, and read only when written.
W3: calls are taken only from the process that opened the piece, in the life in which it did.
W4: an ended epoch stays ended, and a newer one ends those before it.
W5: each ask is answered once, and a call only when the piece may be called again.
"""

from dataclasses import dataclass

from kv_core.block import BlockRef
from kv_core.errors import KVError, LocalProtocolError, RemoteProtocolError
from kv_core.ids import Incarnation, NodeId, RequestId
from kv_core.sharding import Placement
from kv_prefix.block_pool import BlockPool
from kv_prefix.errors import NoSpaceError
from kv_prefix.pins import Receipt
from kv_services.errors import NodeDrainingError, NodeOverloadedError, UnknownRequestError
from kv_services.node.decode_events import DrainBegan, DrainEnded, PrepareSlots, TimePassed
from kv_services.node.fence import EpochFence
from kv_services.sharded.errors import ShardOrderError
from kv_services.sharded.plan import piece_slots


@dataclass(frozen=True, slots=True)
class Caller:
    """One life of the process that coordinates."""

    node: NodeId
    incarnation: Incarnation


@dataclass(frozen=True, slots=True)
class OpenAsked:
    """A coordinator wants this piece held, for the account of that namespace."""

    ask: int
    request_id: RequestId
    epoch: int
    caller: Caller
    namespace: bytes
    piece: Placement
    deadline_ns: int


@dataclass(frozen=True, slots=True)
class CallAsked:
    """A coordinator wants `count` tokens from `start` on worked on, in one layer (`layer`) or in all of the piece's.

    `stores`: their KV is stored here; else they are behind the piece, all of which is read.
    """

    ask: int
    request_id: RequestId
    epoch: int
    caller: Caller
    layer: int | None
    start: int
    count: int
    stores: bool


@dataclass(frozen=True, slots=True)
class CallEnded:
    """The call that was started on this piece is over; `failed`: what it was to store is not there."""

    request_id: RequestId
    epoch: int
    failed: bool


@dataclass(frozen=True, slots=True)
class CloseAsked:
    """The coordinator ends this epoch (and all below it)."""

    request_id: RequestId
    epoch: int


@dataclass(frozen=True, slots=True)
class CallerDied:
    """Membership declared a process dead, in this life and all before it."""

    caller: Caller


WorkerEvent = OpenAsked | CallAsked | CallEnded | CloseAsked | CallerDied | DrainBegan | DrainEnded | TimePassed


@dataclass(frozen=True, slots=True)
class AnswerOpened:
    """Tell the coordinator that so many slots are held."""

    ask: int
    request_id: RequestId
    epoch: int
    slots: int


@dataclass(frozen=True, slots=True)
class RefuseAsk:
    """Tell the coordinator why not."""

    ask: int
    error: KVError


@dataclass(frozen=True, slots=True)
class StartCall:
    """Do what was asked, and report `CallEnded`."""

    ask: int
    request_id: RequestId
    epoch: int


@dataclass(frozen=True, slots=True)
class AnswerCall:
    """Tell the coordinator what the call gave."""

    ask: int


WorkerEffect = PrepareSlots | AnswerOpened | RefuseAsk | StartCall | AnswerCall


@dataclass(slots=True)
class Shard:
    """One piece that is held.

    Attributes:
        stored: for each of the piece's layers, up to which token of the sequence its KV is there.
        busy: the ask of the call under way, if there is one.
        running: what that call stores when it succeeds: layers of the model and the new end, or nothing.
    """

    request_id: RequestId
    epoch: int
    caller: Caller
    piece: Placement
    deadline_ns: int
    table: Receipt
    refs: tuple[BlockRef, ...]
    stored: list[int]
    busy: int | None = None
    running: tuple[range, int] | None = None

    @property
    def layers(self) -> range:
        return range(self.piece.layer_start, self.piece.layer_end)

    def reach(self, layer: int) -> int:
        """Up to which token of the sequence this layer's KV is there."""
        return self.stored[layer - self.piece.layer_start]


class ShardWorkerMachine:
    """The pieces of one node.

    Args:
        node_id: named in errors.
        pool: the node's slots; other machines of the node use it too, each its own tables.
        num_layers, block_size: of the arena.
        max_shards: pieces that may be held at once.
    """

    def __init__(self, node_id: NodeId, pool: BlockPool, *, num_layers: int, block_size: int, max_shards: int) -> None:
        self._node_id, self._pool = node_id, pool
        self._num_layers, self._block_size, self._max_shards = num_layers, block_size, max_shards
        self._fence = EpochFence(node_id)
        self._shards: dict[RequestId, Shard] = {}
        self._closing: dict[tuple[RequestId, int], Shard] = {}
        self._parked: dict[RequestId, OpenAsked] = {}
        self.draining = False
        self._handing_over = False

    def step(self, event: WorkerEvent) -> list[WorkerEffect]:
        match event:
            case OpenAsked():
                return self._open_asked(event)
            case CallAsked():
                return self._call_asked(event)
            case CallEnded(request_id, epoch, failed):
                return self._call_ended(request_id, epoch, failed)
            case CloseAsked(request_id, epoch):
                return self._end(request_id, epoch)
            case CallerDied(caller):
                of_all: list[Shard | OpenAsked] = [*self._shards.values(), *self._parked.values()]
                dead = [one for one in of_all if _same_or_before(one.caller, caller)]
                return [effect for one in dead for effect in self._end(one.request_id, one.epoch)]
            case TimePassed(now_ns):
                held: list[Shard | OpenAsked] = [*self._shards.values(), *self._parked.values()]
                late = [one for one in held if now_ns >= one.deadline_ns]
                return [effect for one in late for effect in self._end(one.request_id, one.epoch)]
            case DrainBegan(hand_over):
                self.draining, self._handing_over = True, hand_over
                return []
            case DrainEnded():
                self.draining = self._handing_over = False
                return []

    @property
    def shards(self) -> list[Shard]:
        """The pieces that are held, those that end with their last call included; look but do not touch."""
        return [*self._shards.values(), *self._closing.values()]

    def shard(self, request_id: RequestId, epoch: int) -> Shard | None:
        """The piece of that epoch, if it is held and not ending."""
        shard = self._shards.get(request_id)
        return shard if shard is not None and shard.epoch == epoch else None

    def check(self) -> None:
        """Assert what ties pieces to the pool, and that nothing reaches beyond its piece."""
        for shard in self.shards:
            assert self._pool.refs(shard.table) == shard.refs, shard
            assert len(shard.refs) == piece_slots(shard.piece, self._num_layers, self._block_size), shard
            assert all(shard.piece.token_start <= end <= shard.piece.token_end for end in shard.stored), shard
        assert all(shard.busy is not None for shard in self._closing.values())
        assert all(any(key[0] == name for key in self._closing) for name in self._parked)

    def _open_asked(self, event: OpenAsked) -> list[WorkerEffect]:
        request_id, epoch, piece = event.request_id, event.epoch, event.piece
        live, parked = self._shards.get(request_id), self._parked.get(request_id)
        if late := self._fence.late(request_id, epoch, max(one.epoch if one else 0 for one in (live, parked))):
            return [RefuseAsk(event.ask, late)]
        effects = self._end(request_id, epoch - 1)
        if not self._fits(piece):
            return [*effects, RefuseAsk(event.ask, RemoteProtocolError(detail=f"{piece} is no piece"))]
        if any(key[0] == request_id for key in self._closing):
            # Its predecessor's last call still has the slots, and ends soon; nothing is held meanwhile.
            self._parked[request_id] = event
            return effects
        return [*effects, *self._open(event)]

    def _open(self, event: OpenAsked) -> list[WorkerEffect]:
        request_id, epoch, piece = event.request_id, event.epoch, event.piece
        if self.draining:
            return [RefuseAsk(event.ask, NodeDrainingError(node=self._node_id))]
        if len(self.shards) >= self._max_shards:
            limit = self._max_shards
            return [RefuseAsk(event.ask, NodeOverloadedError(node=self._node_id, waiting=limit, limit=limit))]
        num_slots = piece_slots(piece, self._num_layers, self._block_size)
        try:
            nothing = self._pool.match(event.namespace, (), ())
            opened = self._pool.open(f"{request_id} piece", nothing, num_slots, use_partial=False)
        except NoSpaceError as error:
            return [RefuseAsk(event.ask, error)]
        stored = [piece.token_start] * (piece.layer_end - piece.layer_start)
        self._shards[request_id] = Shard(
            request_id, epoch, event.caller, piece, event.deadline_ns, opened.table, opened.refs, stored
        )
        return [PrepareSlots(opened.refs), AnswerOpened(event.ask, request_id, epoch, num_slots)]

    def _call_asked(self, event: CallAsked) -> list[WorkerEffect]:
        shard = self.shard(event.request_id, event.epoch)
        if shard is None or shard.caller != event.caller:
            error = UnknownRequestError(node=self._node_id, request_id=event.request_id, epoch=event.epoch)
            return [RefuseAsk(event.ask, error)]
        if self._handing_over:
            return [RefuseAsk(event.ask, NodeDrainingError(node=self._node_id))]
        refusal = self._order_refusal(shard, event)
        if refusal is not None:
            return [RefuseAsk(event.ask, refusal)]
        layers = shard.layers if event.layer is None else range(event.layer, event.layer + 1)
        shard.busy, shard.running = event.ask, (layers, event.start + event.count) if event.stores else None
        return [StartCall(event.ask, event.request_id, event.epoch)]

    def _order_refusal(self, shard: Shard, event: CallAsked) -> KVError | None:
        piece = shard.piece
        if shard.busy is not None:
            return RemoteProtocolError(detail=f"{shard.request_id} was called while a call was under way")
        if event.layer is not None and event.layer not in shard.layers:
            return RemoteProtocolError(detail=f"layer {event.layer} is not in {piece}")
        if event.count < 1 or (event.stores and event.start + event.count > piece.token_end):
            return RemoteProtocolError(detail=f"{event.count} tokens from {event.start} on are not in {piece}")
        # What is read is everything before the call's first token, as far as the piece goes.
        need = event.start if event.stores else piece.token_end
        if not event.stores and event.start < piece.token_end:
            return RemoteProtocolError(detail=f"tokens from {event.start} on belong to {piece}, but are not stored")
        for layer in shard.layers if event.layer is None else (event.layer,):
            if shard.reach(layer) != need:
                return ShardOrderError(
                    request_id=shard.request_id, layer=layer, have=shard.reach(layer), start=event.start
                )
        return None

    def _call_ended(self, request_id: RequestId, epoch: int, failed: bool) -> list[WorkerEffect]:
        shard = self.shard(request_id, epoch) or self._closing.get((request_id, epoch))
        if shard is None or shard.busy is None:
            raise LocalProtocolError(detail=f"a call on the piece of {request_id} epoch {epoch} ended twice")
        if shard.running is not None and not failed:
            layers, end = shard.running
            for layer in layers:
                shard.stored[layer - shard.piece.layer_start] = end
        effects: list[WorkerEffect] = [AnswerCall(shard.busy)]
        shard.busy, shard.running = None, None
        if self._closing.pop((request_id, epoch), None) is None:
            return effects
        self._pool.release(shard.table)
        parked = self._parked.get(request_id)
        if parked is None or any(key[0] == request_id for key in self._closing):
            return effects
        del self._parked[request_id]
        return [*effects, *self._open(parked)]

    def _end(self, request_id: RequestId, epoch: int) -> list[WorkerEffect]:
        """End this epoch of a request and all before it: its slots go back now, or when its call is over."""
        if epoch > 0:
            self._fence.end(request_id, epoch)
        shard, parked = self._shards.get(request_id), self._parked.get(request_id)
        if shard is not None and shard.epoch <= epoch:
            del self._shards[request_id]
            if shard.busy is not None:
                self._closing[request_id, shard.epoch] = shard
            else:
                self._pool.release(shard.table)
        if parked is not None and parked.epoch <= epoch:
            del self._parked[request_id]
            return [RefuseAsk(parked.ask, self._fence.ended(request_id, parked.epoch))]
        return []

    def _fits(self, piece: Placement) -> bool:
        return (
            piece.node == self._node_id
            and 0 <= piece.layer_start < piece.layer_end <= self._num_layers
            and 0 <= piece.token_start < piece.token_end
            and piece.token_start % self._block_size == 0
        )


def _same_or_before(caller: Caller, dead: Caller) -> bool:
    return caller.node == dead.node and caller.incarnation <= dead.incarnation

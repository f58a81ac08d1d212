"""Coordinator and worker machines in a world of messages that come late, and of nodes that refuse, fail and die.

Messages between two nodes keep their order, as on the bus. KV is a set of (layer, token) for each piece: an oracle that
knows nothing of the machines' own books.
"""

import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

from kv_core.errors import KVError
from kv_core.ids import Incarnation, NodeId, RegionId, RequestId
from kv_core.sharding import Placement
from kv_prefix.block_pool import BlockPool
from kv_services.engine.errors import KVRangeError
from kv_services.messages import OutputToken, Sampling
from kv_services.node.decode_events import PeerDied, PrepareSlots, SendTokens, TimePassed
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
from kv_services.node.shard_worker_state import (
    AnswerCall,
    AnswerOpened,
    CallAsked,
    CallEnded,
    Caller,
    CallerDied,
    CloseAsked,
    OpenAsked,
    RefuseAsk,
    Shard,
    ShardWorkerMachine,
    StartCall,
    WorkerEffect,
    WorkerEvent,
)
from kv_services.sharded.errors import ShardLostError, ShardRefusedError

R, GATEWAY = RequestId("r"), NodeId("gateway")
LAYERS, BLOCK, DEADLINE_NS = 3, 4, 1_000
LIFE, NAMESPACE = Incarnation(1), bytes(16)
Answer = Callable[[KVError | None], None]


@dataclass
class Node:
    """One node: its pool, both machines, the KV of its pieces by epoch, and the calls that run."""

    name: NodeId
    pool: BlockPool
    worker: ShardWorkerMachine
    coordinator: ShardCoordinatorMachine
    cells: dict[int, set[tuple[int, int]]] = field(default_factory=dict)
    running: dict[int, Shard] = field(default_factory=dict)
    alive: bool = True


@dataclass
class Ask:
    """An ask that was sent and not answered yet."""

    source: NodeId
    event: OpenAsked | CallAsked
    answer: Answer
    error: KVError | None = None


class World:
    """Nodes and what is under way between them; `rng` decides what happens next."""

    def __init__(self, rng: random.Random, slots: dict[NodeId, int]) -> None:
        self.rng, self.fail_calls = rng, 0
        self.nodes = {name: self._node(name, count) for name, count in slots.items()}
        self.links: dict[tuple[NodeId, NodeId], deque[Callable[[], None]]] = {}
        self.local: list[Callable[[], None]] = []
        self.asks: dict[int, Ask] = {}
        self.num_asks = 0
        self.told: list[CoordinatorEffect] = []

    def _node(self, name: NodeId, count: int) -> Node:
        pool = BlockPool(count, BLOCK, region=RegionId(1))
        worker = ShardWorkerMachine(name, pool, num_layers=LAYERS, block_size=BLOCK, max_shards=8)
        coordinator = ShardCoordinatorMachine(name, num_layers=LAYERS, block_size=BLOCK, pass_tokens=6, max_requests=4)
        return Node(name, pool, worker, coordinator)

    def reserve(
        self, at: NodeId, pieces: tuple[Placement, ...], tokens: tuple[int, ...], count: int, *, epoch: int = 1
    ) -> None:
        """A gateway asks `at` to coordinate; `tokens` are of a prompt of which the client has none yet."""
        sampling = Sampling(count, 0.0, 1.0, 0, (), None)
        self.coordinate(at, ShardedReserveAsked(R, epoch, GATEWAY, tokens, 0, sampling, DEADLINE_NS, pieces))

    def coordinate(self, at: NodeId, event: CoordinatorEvent) -> None:
        """One event of a coordinator, and what follows."""
        node = self.nodes[at]
        if node.alive:
            for effect in node.coordinator.step(event):
                self._perform(node, effect)
            node.coordinator.check()

    def work(self, at: NodeId, event: WorkerEvent) -> None:
        """One event of a worker, and what follows."""
        node = self.nodes[at]
        if node.alive:
            for effect in node.worker.step(event):
                self._do(node, effect)
            node.worker.check()
            for shard in node.running.values():
                assert node.pool.refs(shard.table) == shard.refs  # W1: whatever runs has its slots

    def run(self, steps: int = 100_000) -> None:
        """Let things happen, one after the other, until there are none."""
        while steps:
            links = [link for link in self.links.values() if link]
            if not links and not self.local:
                return
            pick = self.rng.randrange(len(links) + len(self.local))
            happens = links[pick].popleft() if pick < len(links) else self.local.pop(pick - len(links))
            happens()
            steps -= 1

    def kill(self, name: NodeId) -> None:
        """A node dies; the others hear of it sooner or later, and what was under way to and from it is lost."""
        self.nodes[name].alive = False
        self.nodes[name].running.clear()
        for ends, link in self.links.items():
            if name in ends:
                link.clear()
        for other in self.nodes.values():
            self.local.append(partial(self._hear_of_death, other.name, name))

    def _hear_of_death(self, at: NodeId, name: NodeId) -> None:
        self.work(at, CallerDied(Caller(name, LIFE)))
        self.coordinate(at, PeerDied(name, "silent"))

    def expire(self) -> None:
        """Every deadline passes."""
        for name in self.nodes:
            self.work(name, TimePassed(DEADLINE_NS))
            self.coordinate(name, TimePassed(DEADLINE_NS))

    @property
    def tokens(self) -> list[int]:
        """What the gateway was sent, in order."""
        sent = [effect for effect in self.told if isinstance(effect, SendTokens)]
        assert [effect.first_index for effect in sent] == list(range(len(sent)))
        return [effect.tokens[0].token_id for effect in sent]

    def of(self, *kinds: type) -> list[CoordinatorEffect]:
        """What the gateway was told of these kinds."""
        return [effect for effect in self.told if isinstance(effect, kinds)]

    def nothing_left(self) -> bool:
        """No slot is held on any node that lives, and no request or piece known."""
        alive = [node for node in self.nodes.values() if node.alive]
        known = any(node.worker.shards or node.coordinator.sequences or node.running for node in alive)
        return not known and all(node.pool.stats().free == node.pool.stats().total for node in alive)

    def _send(self, source: NodeId, target: NodeId, deliver: Callable[[], None]) -> None:
        if self.nodes[target].alive:
            self.links.setdefault((source, target), deque()).append(deliver)

    def _ask(self, source: NodeId, target: NodeId, event: OpenAsked | CallAsked, answer: Answer) -> None:
        self.asks[event.ask] = Ask(source, event, answer)
        self._send(source, target, partial(self.work, target, event))

    def _answer(self, node: Node, ask: int) -> None:
        asked = self.asks.pop(ask)  # W5: a second answer would be a KeyError
        self._send(node.name, asked.source, partial(asked.answer, asked.error))

    def _perform(self, node: Node, effect: CoordinatorEffect) -> None:
        match effect:
            case OpenPiece(request_id, epoch, piece, deadline_ns):
                self.num_asks += 1
                caller = Caller(node.name, LIFE)
                event = OpenAsked(self.num_asks, request_id, epoch, caller, NAMESPACE, piece, deadline_ns)
                self._ask(node.name, piece.node, event, partial(self._opened, node.name, epoch, piece.node))
            case ClosePiece(request_id, epoch, target, _):
                self._send(node.name, target, partial(self.work, target, CloseAsked(request_id, epoch)))
            case RunStage():
                self._run_stage(node, effect)
            case ChooseToken(request_id, epoch, position):
                token = TokenChosen(request_id, epoch, OutputToken(position))
                self.local.append(partial(self.coordinate, node.name, token))
            case _:
                self.told.append(effect)

    def _opened(self, at: NodeId, epoch: int, node: NodeId, error: KVError | None) -> None:
        if error is None:
            self.coordinate(at, PieceOpened(R, epoch, node))
        else:
            self.coordinate(at, PieceFailed(R, epoch, ShardRefusedError(request_id=R, node=node, cause=str(error))))

    def _run_stage(self, node: Node, effect: RunStage) -> None:
        missing = {piece.node for piece in effect.stage.pieces}
        failed: list[KVError] = []

        def answered(target: NodeId, error: KVError | None) -> None:
            missing.discard(target)
            if error is not None:
                failed.append(ShardLostError(request_id=R, node=target, cause=str(error)))
            if not missing:
                self.coordinate(node.name, StageEnded(R, effect.epoch, failed[0] if failed else None))

        caller, layer = Caller(node.name, LIFE), effect.stage.layer_start if effect.stage.split else None
        for piece in effect.stage.pieces:
            self.num_asks += 1
            stores = effect.start < piece.token_end
            event = CallAsked(self.num_asks, R, effect.epoch, caller, layer, effect.start, effect.count, stores)
            self._ask(node.name, piece.node, event, partial(answered, piece.node))

    def _do(self, node: Node, effect: WorkerEffect) -> None:
        match effect:
            case PrepareSlots():
                pass
            case AnswerOpened(ask, _, epoch):
                node.cells[epoch] = set()
                self._answer(node, ask)
            case RefuseAsk(ask, error):
                self.asks[ask].error = error
                self._answer(node, ask)
            case StartCall(ask, request_id, epoch):
                shard = node.worker.shard(request_id, epoch)
                assert shard is not None
                node.running[ask] = shard
                self._read(node, ask, shard)
                self.local.append(partial(self._end_call, node, ask))
            case AnswerCall(ask):
                self._answer(node, ask)

    def _read(self, node: Node, ask: int, shard: Shard) -> None:
        """Everything before the call's first token must have been written (W2), and nothing twice."""
        event, cells = self.asks[ask].event, node.cells[shard.epoch]
        assert isinstance(event, CallAsked)
        for layer in shard.layers if event.layer is None else (event.layer,):
            before = range(shard.piece.token_start, min(event.start, shard.piece.token_end))
            assert all((layer, token) in cells for token in before), (shard, event)
            if event.stores:
                assert not any((layer, token) in cells for token in range(event.start, event.start + event.count))

    def _end_call(self, node: Node, ask: int) -> None:
        if node.running.pop(ask, None) is None:
            return
        asked = self.asks[ask]
        event = asked.event
        assert isinstance(event, CallAsked)
        failed = self.fail_calls > 0
        if failed:
            self.fail_calls -= 1
            asked.error = KVRangeError(layer=0, dtype="fp16")
        elif event.stores:
            shard = next(one for one in node.worker.shards if one.epoch == event.epoch)
            for layer in shard.layers if event.layer is None else (event.layer,):
                node.cells[event.epoch] |= {(layer, event.start + i) for i in range(event.count)}
        self.work(node.name, CallEnded(R, event.epoch, failed))

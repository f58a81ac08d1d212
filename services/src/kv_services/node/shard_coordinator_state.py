"""Decides what the coordinator of sharded sequences does next: which pieces to open, which stage to run, whom to tell.

Owns no memory: pieces are held by workers, its own node's among them. Knows no bus, no array and no clock. What a stage
carries from one to the next stays with the actor.

Q1: no pass begins before every piece is open, and nothing waits for room while pieces are held: one refusal closes all.
Q2: one stage of a request runs at a time, stages in the order of layers, passes in the order of tokens.
Q3: every piece that was asked for is closed when the request ends, whatever ended it.
Q4: a token is sent only when its pass went through all layers, in order of index.
Q5: each reserve is answered once; each request ends by a finish, a give-up, or an end from its gateway; an ended epoch
    stays ended.
"""

from dataclasses import dataclass, field

from kv_core.errors import KVError, RetryableError
from kv_core.ids import NodeId, RequestId
from kv_core.sharding import InvalidPlanError, Placement
from kv_services.errors import NodeDrainingError, NodeOverloadedError, RequestExpiredError
from kv_services.messages import OutputToken, Sampling
from kv_services.node.answer import Answer
from kv_services.node.decode_events import (
    DrainBegan,
    DrainEnded,
    EndAsked,
    GiveUp,
    PeerDied,
    RefuseReserve,
    ReplyReserved,
    Retire,
    SendTokens,
    TimePassed,
)
from kv_services.node.fence import EpochFence
from kv_services.sharded.errors import ShardLostError
from kv_services.sharded.plan import SequenceSize, Stage, pass_end, single_steps, stages_of


@dataclass(frozen=True, slots=True)
class ShardedReserveAsked:
    """A gateway wants these tokens held in these pieces and decoded. `tokens` are the prompt and what the client
    already has."""

    request_id: RequestId
    epoch: int
    gateway: NodeId
    tokens: tuple[int, ...]
    num_confirmed: int
    sampling: Sampling
    deadline_ns: int
    pieces: tuple[Placement, ...]


@dataclass(frozen=True, slots=True)
class PieceOpened:
    """That node holds its piece."""

    request_id: RequestId
    epoch: int
    node: NodeId


@dataclass(frozen=True, slots=True)
class StageEnded:
    """The stage that was started is over, on every node that took part; `error` when it failed anywhere."""

    request_id: RequestId
    epoch: int
    error: KVError | None = None


@dataclass(frozen=True, slots=True)
class PieceFailed:
    """A piece could not be opened."""

    request_id: RequestId
    epoch: int
    error: KVError


@dataclass(frozen=True, slots=True)
class TokenChosen:
    """The logits of a pass gave this token."""

    request_id: RequestId
    epoch: int
    token: OutputToken


CoordinatorEvent = (
    ShardedReserveAsked
    | PieceOpened
    | PieceFailed
    | StageEnded
    | TokenChosen
    | EndAsked
    | PeerDied
    | DrainBegan
    | DrainEnded
    | TimePassed
)


@dataclass(frozen=True, slots=True)
class OpenPiece:
    """Ask the piece's node to hold it; answer with `PieceOpened` or `PieceFailed`."""

    request_id: RequestId
    epoch: int
    piece: Placement
    deadline_ns: int


@dataclass(frozen=True, slots=True)
class ClosePiece:
    """Tell a node that this epoch is over there, whether or not it ever opened its piece."""

    request_id: RequestId
    epoch: int
    node: NodeId
    cause: str


@dataclass(frozen=True, slots=True)
class RunStage:
    """Take tokens through one stage; answer with `StageEnded`.

    Attributes:
        tokens: of the pass, when this is its first stage: their state begins with them. Else empty.
        start, count: where they stand.
        decoding: the pass is one token that is multiplied alone.
        stage: of one piece: its node runs the layers. Of several: one layer, which this node runs; only pieces that
            begin before the pass ends are named.
        deadline_ns: of the request.
    """

    request_id: RequestId
    epoch: int
    tokens: tuple[int, ...]
    start: int
    count: int
    decoding: bool
    stage: Stage
    deadline_ns: int


@dataclass(frozen=True, slots=True)
class ChooseToken:
    """Sample at `position` from the state that left the last stage; answer with `TokenChosen` or a failed
    `StageEnded`."""

    request_id: RequestId
    epoch: int
    position: int
    sampling: Sampling


CoordinatorEffect = (
    OpenPiece | ClosePiece | RunStage | ChooseToken | ReplyReserved | RefuseReserve | SendTokens | GiveUp | Retire
)


@dataclass(slots=True, kw_only=True)
class ShardedSequence(Answer):
    """One sharded request at its coordinator.

    Attributes:
        steps: the stages of a pass, those of several pieces layer by layer.
        opening: nodes whose answer is awaited.
        stored: KV of `tokens[:stored]` is in the pieces.
        stop: where the pass under way ends; equal to `stored` between passes.
        step: the stage under way.
    """

    pieces: tuple[Placement, ...]
    steps: tuple[Stage, ...]
    opening: dict[NodeId, None] = field(default_factory=dict)
    stored: int = 0
    stop: int = 0
    step: int = 0

    @property
    def decoding(self) -> bool:
        """Whether the pass under way is of the newest token."""
        return self.stop == len(self.tokens)


class ShardCoordinatorMachine:
    """The sharded requests that one node coordinates.

    Args:
        node_id: named in errors.
        num_layers, block_size: of the model and its blocks.
        pass_tokens: tokens of a prefill's pass at most.
        max_requests: sharded requests at once.
    """

    def __init__(
        self, node_id: NodeId, *, num_layers: int, block_size: int, pass_tokens: int, max_requests: int
    ) -> None:
        self._node_id = node_id
        self._num_layers, self._block_size = num_layers, block_size
        self._pass_tokens, self._max_requests = pass_tokens, max_requests
        self._fence = EpochFence(node_id)
        self._sequences: dict[RequestId, ShardedSequence] = {}
        self.draining = False

    def step(self, event: CoordinatorEvent) -> list[CoordinatorEffect]:
        match event:
            case ShardedReserveAsked():
                return self._reserve_asked(event)
            case PieceOpened(request_id, epoch, node):
                return self._piece_opened(request_id, epoch, node)
            case PieceFailed(request_id, epoch, error):
                seq = self.sequence(request_id, epoch)
                return self._give_up(seq, error) if seq is not None else []
            case StageEnded(request_id, epoch, error):
                return self._stage_ended(request_id, epoch, error)
            case TokenChosen(request_id, epoch, token):
                seq = self.sequence(request_id, epoch)
                return self._took(seq, token) if seq is not None else []
            case EndAsked(request_id, epoch, cause):
                return self._end_asked(request_id, epoch, cause)
            case PeerDied(node_id, cause):
                return self._peer_died(node_id, cause)
            case DrainBegan(hand_over):
                self.draining = True
                leaving = list(self._sequences.values()) if hand_over else []
                error = NodeDrainingError(node=self._node_id)
                return [effect for seq in leaving for effect in self._give_up(seq, error)]
            case DrainEnded():
                self.draining = False
                return []
            case TimePassed(now_ns):
                late = [seq for seq in self._sequences.values() if now_ns >= seq.deadline_ns]
                return [effect for seq in late for effect in self._give_up(seq, self._expired(seq))]

    def sequence(self, request_id: RequestId, epoch: int) -> ShardedSequence | None:
        """The live request of that epoch; callers may look but not touch."""
        seq = self._sequences.get(request_id)
        return seq if seq is not None and seq.epoch == epoch else None

    @property
    def sequences(self) -> list[ShardedSequence]:
        """All that are not over."""
        return list(self._sequences.values())

    def check(self) -> None:
        """Assert Q1 and Q2 as far as the state shows them."""
        for seq in self._sequences.values():
            assert 0 <= seq.stored <= seq.stop <= len(seq.tokens), seq
            assert seq.answered != bool(seq.opening), seq
            assert not seq.opening or seq.stop == 0, seq
            assert 0 <= seq.step <= len(seq.steps), seq

    def _reserve_asked(self, event: ShardedReserveAsked) -> list[CoordinatorEffect]:
        request_id, epoch = event.request_id, event.epoch
        live = self._sequences.get(request_id)
        if late := self._fence.late(request_id, epoch, live.epoch if live else 0):
            return [RefuseReserve(request_id, epoch, late)]
        effects = self._close(live, "a newer epoch") if live else []
        try:
            steps = self._admit(event)
        except KVError as refusal:
            self._fence.end(request_id, epoch)
            return [*effects, RefuseReserve(request_id, epoch, refusal)]
        seq = ShardedSequence(
            request_id=request_id,
            epoch=epoch,
            gateway=event.gateway,
            tokens=list(event.tokens),
            num_given=len(event.tokens),
            num_confirmed=event.num_confirmed,
            sampling=event.sampling,
            deadline_ns=event.deadline_ns,
            pieces=event.pieces,
            steps=steps,
            opening={piece.node: None for piece in event.pieces},
        )
        self._sequences[request_id] = seq
        return [*effects, *(OpenPiece(request_id, epoch, piece, seq.deadline_ns) for piece in event.pieces)]

    def _admit(self, event: ShardedReserveAsked) -> tuple[Stage, ...]:
        """The stages of a request that may begin.

        Raises:
            KVError: it may not.
        """
        num_tokens = max(piece.token_end for piece in event.pieces)
        stages = stages_of(event.pieces, SequenceSize(self._num_layers, num_tokens, self._block_size))
        if len(event.tokens) + event.sampling.max_tokens - 1 > num_tokens:
            raise InvalidPlanError(reason=f"pieces of {num_tokens} tokens for {len(event.tokens)} and the answer")
        if self.draining:
            raise NodeDrainingError(node=self._node_id)
        if len(self._sequences) >= self._max_requests:
            limit = self._max_requests
            raise NodeOverloadedError(node=self._node_id, waiting=limit, limit=limit)
        return single_steps(stages)

    def _piece_opened(self, request_id: RequestId, epoch: int, node: NodeId) -> list[CoordinatorEffect]:
        seq = self.sequence(request_id, epoch)
        if seq is None:
            return []
        seq.opening.pop(node, None)
        if seq.opening:
            return []
        seq.answered = True
        return [ReplyReserved(request_id, epoch, 0), *self._next_pass(seq)]

    def _next_pass(self, seq: ShardedSequence) -> list[CoordinatorEffect]:
        """The prompt's tokens but the last in passes of many, then one token at a time."""
        last = len(seq.tokens) - 1
        seq.stop = last + 1 if seq.stored == last else pass_end(seq.steps, seq.stored, last, self._pass_tokens)
        seq.step = 0
        return [self._run(seq)]

    def _run(self, seq: ShardedSequence) -> RunStage:
        stage = seq.steps[seq.step]
        taking_part = tuple(piece for piece in stage.pieces if piece.token_start < seq.stop)
        return RunStage(
            seq.request_id,
            seq.epoch,
            tuple(seq.tokens[seq.stored : seq.stop]) if seq.step == 0 else (),
            seq.stored,
            seq.stop - seq.stored,
            seq.decoding,
            Stage(stage.layer_start, stage.layer_end, taking_part, stage.split),
            seq.deadline_ns,
        )

    def _stage_ended(self, request_id: RequestId, epoch: int, error: KVError | None) -> list[CoordinatorEffect]:
        seq = self.sequence(request_id, epoch)
        if seq is None:
            return []
        if error is not None:
            return self._give_up(seq, error)
        seq.step += 1
        if seq.step < len(seq.steps):
            return [self._run(seq)]
        if seq.decoding:
            return [ChooseToken(request_id, epoch, seq.stop, seq.sampling)]
        seq.stored = seq.stop
        return self._next_pass(seq)

    def _took(self, seq: ShardedSequence, token: OutputToken) -> list[CoordinatorEffect]:
        seq.stored = len(seq.tokens)
        seq.tokens.append(token.token_id)
        finish = seq.finish_reason(token.token_id)
        tell = SendTokens(seq.request_id, seq.epoch, seq.gateway, seq.newest_index, (token,), finish)
        return [tell, *(self._next_pass(seq) if finish is None else self._close(seq, finish))]

    def _end_asked(self, request_id: RequestId, epoch: int, cause: str) -> list[CoordinatorEffect]:
        self._fence.end(request_id, epoch)
        seq = self._sequences.get(request_id)
        return self._close(seq, cause) if seq is not None and seq.epoch <= epoch else []

    def _peer_died(self, node_id: NodeId, cause: str) -> list[CoordinatorEffect]:
        effects: list[CoordinatorEffect] = []
        for seq in list(self._sequences.values()):
            if seq.gateway == node_id:
                effects += self._close(seq, "its gateway died")
            elif any(piece.node == node_id for piece in seq.pieces):
                effects += self._give_up(
                    seq, ShardLostError(request_id=seq.request_id, node=node_id, cause=f"it died ({cause})")
                )
        return effects

    def _give_up(self, seq: ShardedSequence, error: KVError) -> list[CoordinatorEffect]:
        tell: CoordinatorEffect
        if seq.answered:
            may_retry = isinstance(error, RetryableError)
            tell = GiveUp(seq.request_id, seq.epoch, seq.gateway, error, may_retry)
        else:
            seq.answered = True
            tell = RefuseReserve(seq.request_id, seq.epoch, error)
        return [*self._close(seq, "given up"), tell]

    def _close(self, seq: ShardedSequence, cause: str) -> list[CoordinatorEffect]:
        """End a request; what its stage under way still brings is ignored."""
        self._fence.end(seq.request_id, seq.epoch)
        del self._sequences[seq.request_id]
        effects: list[CoordinatorEffect] = [Retire(seq.request_id, seq.epoch)]
        effects += [ClosePiece(seq.request_id, seq.epoch, piece.node, cause) for piece in seq.pieces]
        if not seq.answered:
            seq.answered = True
            error = self._fence.ended(seq.request_id, seq.epoch)
            effects.append(RefuseReserve(seq.request_id, seq.epoch, error))
        return effects

    def _expired(self, seq: ShardedSequence) -> KVError:
        state = "opening its pieces" if seq.opening else "decoding in pieces"
        return RequestExpiredError(request_id=seq.request_id, node=self._node_id, state=state)

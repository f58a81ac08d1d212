"""Decides what a decode node does next: whom to admit, whom to step, whom to preempt, what to tell whom.

Owns the block tables of its requests, by `decode_memory`. Knows no bus, no transfer, no thread and no clock: time
arrives in events, and memory that somebody may still touch is given back only after the event that says he is done.

D1: nobody waits while holding: a waiting or preempted request has no slots.
D2: blocks are given back only when no step, no computation and no open hand-over can touch them.
D3: a token is sent only when the hand-over behind it was verified as a whole, and in order of index.
D4: when no slot is left for a running request the youngest gives way, so the oldest always goes on.
D5: each reserve is answered once; each admitted request ends by a finish, a give-up or an end from its gateway.
D6: an ended epoch stays ended.
D7: a request that would compute a beginning which another one here computes just now waits, holding nothing and
    delaying nobody, until that computation is over, however it ends. There is one thread to compute in, so computing it
    again would not begin sooner.
"""

from collections import deque
from collections.abc import Sequence

from kv_core.errors import KVError, LocalProtocolError, RetryableError
from kv_core.hashing import BlockHash
from kv_core.ids import NodeId, RequestId
from kv_prefix.block_pool import BlockPool
from kv_prefix.errors import NoSpaceError, TenantQuotaError
from kv_services.engine.interface import Parked
from kv_services.errors import (
    NodeDrainingError,
    NodeOverloadedError,
    RequestExpiredError,
    RequestTooLargeError,
)
from kv_services.messages import OutputToken
from kv_services.node.announcements import AnnounceBlocks, WithdrawBlocks
from kv_services.node.decode_events import (
    CloseInbound,
    Computed,
    DecodeEffect,
    DecodeEvent,
    DrainBegan,
    DrainEnded,
    EndAsked,
    GiveUp,
    HandoverFailed,
    HandoverVerified,
    InboundClosed,
    LayerArrived,
    NotePreempted,
    OpenInbound,
    PeerDied,
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
    TimePassed,
)
from kv_services.node.decode_memory import DecodeMemory
from kv_services.node.decode_sequence import DecodeSequence, SeqState
from kv_services.node.fence import EpochFence


class DecodeMachine:
    """The decode work of one node.

    Args:
        node_id: named in errors.
        pool: the node's slots; other machines of the node use it too, each its own tables.
        block_size: tokens per block.
        num_slots: slots of the pool.
        max_batch: requests that hold slots at once, and so the most in one step.
        max_waiting: requests that may wait for slots.
    """

    def __init__(
        self, node_id: NodeId, pool: BlockPool, *, block_size: int, num_slots: int, max_batch: int, max_waiting: int
    ) -> None:
        self._node_id = node_id
        self._memory = DecodeMemory(pool, block_size)
        self._num_slots = num_slots
        self._max_batch = max_batch
        self._max_waiting = max_waiting
        self._fence = EpochFence(node_id)
        self._sequences: dict[RequestId, DecodeSequence] = {}
        self._closing: dict[tuple[RequestId, int], DecodeSequence] = {}
        self._waiting: deque[DecodeSequence] = deque()
        # The first block that each live computation will add, and its position: whoever shares it shares all before it.
        self._coming: dict[tuple[RequestId, int], tuple[int, BlockHash]] = {}
        self._step_running = False
        self._next_order = 0
        self.draining = False

    def step(self, event: DecodeEvent) -> list[DecodeEffect]:
        effects = self._handle(event)
        effects += self._admit()
        effects += self._start_step()
        return effects

    def sequence(self, request_id: RequestId, epoch: int) -> DecodeSequence | None:
        """The live request of that epoch; callers may look but not touch."""
        seq = self._sequences.get(request_id)
        return seq if seq is not None and seq.epoch == epoch else None

    @property
    def num_running(self) -> int:
        """Requests that hold slots."""
        return sum(1 for seq in self._sequences.values() if seq.table is not None) + len(self._closing)

    @property
    def num_waiting(self) -> int:
        """Requests that wait for slots, preempted ones included."""
        return sum(1 for seq in self._sequences.values() if seq.table is None)

    def check(self) -> None:
        """Assert D1 and what ties requests to the pool."""
        for seq in self._sequences.values():
            without = seq.state in (SeqState.WAITING, SeqState.PREEMPTED)
            assert without == (seq.table is None), seq
            assert not (without and seq.busy), seq
            assert seq.stored < len(seq.tokens), seq
            self._memory.check(seq)
            assert not seq.announced or seq.computing, seq
        for seq in self._closing.values():
            assert seq.busy and seq.table is not None, seq
        announced = {(seq.request_id, seq.epoch) for seq in self._sequences.values() if seq.announced}
        assert set(self._coming) == announced, "D7"
        assert self._step_running == any(seq.stepping for seq in (*self._sequences.values(), *self._closing.values()))

    def _handle(self, event: DecodeEvent) -> list[DecodeEffect]:
        match event:
            case ReserveAsked():
                return self._reserve_asked(event)
            case LayerArrived(request_id, epoch, num_layers):
                seq = self.sequence(request_id, epoch)
                if seq is not None:
                    seq.layers_ready = max(seq.layers_ready, num_layers)
                return []
            case HandoverVerified(request_id, epoch):
                return self._handover_verified(request_id, epoch)
            case HandoverFailed(request_id, epoch, error):
                return self._memory_idle(request_id, epoch, "inbound", error)
            case InboundClosed(request_id, epoch):
                return self._memory_idle(request_id, epoch, "inbound", None)
            case Computed(request_id, epoch, error):
                return self._computed(request_id, epoch, error)
            case StepFinished(outcomes):
                return self._step_finished(outcomes)
            case EndAsked(request_id, epoch):
                return self._end_asked(request_id, epoch)
            case PeerDied(node_id):
                ended = [seq for seq in self._sequences.values() if seq.gateway == node_id]
                return [effect for seq in ended for effect in self._close(seq)]
            case DrainBegan(hand_over):
                self.draining = True
                leaving = list(self._sequences.values()) if hand_over else []
                error = NodeDrainingError(node=self._node_id)
                return [effect for seq in leaving for effect in self._give_up(seq, error, may_retry=True)]
            case DrainEnded():
                self.draining = False
                return []
            case TimePassed(now_ns):
                late = [seq for seq in self._sequences.values() if now_ns >= seq.deadline_ns]
                return [effect for seq in late for effect in self._give_up(seq, self._expired(seq), may_retry=False)]

    def _reserve_asked(self, event: ReserveAsked) -> list[DecodeEffect]:
        request_id, epoch = event.request_id, event.epoch
        live = self._sequences.get(request_id)
        if late := self._fence.late(request_id, epoch, live.epoch if live else 0):
            return [RefuseReserve(request_id, epoch, late)]
        effects = self._close(live) if live else []
        refusal = self._refusal(event)
        if refusal is not None:
            self._fence.end(request_id, epoch)
            return [*effects, RefuseReserve(request_id, epoch, refusal)]
        seq = DecodeSequence(
            request_id=request_id,
            epoch=epoch,
            gateway=event.gateway,
            namespace=event.namespace,
            tokens=list(event.tokens),
            num_given=len(event.tokens),
            num_confirmed=event.num_confirmed,
            sampling=event.sampling,
            deadline_ns=event.deadline_ns,
            order=self._next_order,
            compute_locally=event.compute_locally,
        )
        self._next_order += 1
        self._sequences[request_id] = seq
        self._waiting.append(seq)
        return effects

    def _refusal(self, event: ReserveAsked) -> KVError | None:
        need = self._memory.blocks_for(len(event.tokens) + event.sampling.max_tokens - 1)
        if need > self._num_slots:
            return RequestTooLargeError(
                request_id=event.request_id, need=need, node=self._node_id, total=self._num_slots
            )
        if self.draining:
            return NodeDrainingError(node=self._node_id)
        if len(self._waiting) >= self._max_waiting:
            return NodeOverloadedError(node=self._node_id, waiting=len(self._waiting), limit=self._max_waiting)
        return None

    def _admit(self) -> list[DecodeEffect]:
        """Give slots to those that wait: preempted ones first, each group in order."""
        effects: list[DecodeEffect] = []
        while self.num_running < self._max_batch:
            seq = self._next_waiting()
            if seq is None:
                break
            opened = self._open(seq)
            if opened is None:
                break
            effects += opened
        return effects

    def _next_waiting(self) -> DecodeSequence | None:
        preempted = [seq for seq in self._sequences.values() if seq.state is SeqState.PREEMPTED]
        for seq in (*sorted(preempted, key=lambda seq: seq.order), *self._waiting):
            if not (self._coming and self._awaits(seq)):
                return seq
        return None

    def _awaits(self, seq: DecodeSequence) -> bool:
        """Whether another request computes just now what this one would compute itself (D7)."""
        if not (seq.compute_locally or seq.state is SeqState.PREEMPTED):
            return False
        names = seq.hash_blocks()[: (len(seq.tokens) - 1) // seq.namespace.block_size]
        return any(at < len(names) and names[at] == name for at, name in self._coming.values())

    def _open(self, seq: DecodeSequence) -> list[DecodeEffect] | None:
        """Open its table on what the pool has; None when there is no room."""
        resumed = seq.state is SeqState.PREEMPTED
        match = self._memory.match(seq)
        growing = sum(1 for other in self._sequences.values() if other.table is not None)
        if not self._memory.has_room(self._memory.blocks_for(len(seq.tokens)), growing):
            return None
        try:
            fresh = self._memory.open(seq, match)
        except TenantQuotaError as error:
            # Nobody waits behind a tenant that has its share; what is being answered waits for its own others only.
            waits = resumed and self._runs_with(seq.namespace.digest)
            return None if waits else self._give_up(seq, error, may_retry=True)
        except NoSpaceError:
            return None
        if not resumed:
            self._waiting.remove(seq)
            seq.cached_tokens = seq.stored
        seq.parked, seq.layers_ready = None, 0
        return [PrepareSlots(fresh), *self._begin(seq, len(match.refs), resumed=resumed)]

    def _begin(self, seq: DecodeSequence, num_matched: int, *, resumed: bool) -> list[DecodeEffect]:
        """Get the KV that is missing, if any."""
        if seq.stored == len(seq.tokens) - 1:
            seq.state = SeqState.READY
            return [RegisterLength(seq.request_id, seq.epoch, seq.stored), *self._answer(seq)]
        if resumed or seq.compute_locally:
            seq.state, seq.computing = SeqState.COMPUTING, True
            slots = tuple(ref.slot for ref in seq.refs)
            stop = len(seq.tokens) - 1
            compute = StartCompute(seq.request_id, seq.epoch, tuple(seq.tokens), seq.stored, stop, slots)
            return [*self._answer(seq), *self._announce(seq, num_matched, stop), compute]
        seq.state, seq.inbound_open, seq.answered = SeqState.ARRIVING, True, True
        last = self._memory.blocks_for(len(seq.tokens) - 1)
        refs = tuple(seq.refs[num_matched:last])
        return [OpenInbound(seq.request_id, seq.epoch, refs, num_matched, seq.cached_tokens)]

    def _announce(self, seq: DecodeSequence, first: int, stop: int) -> list[DecodeEffect]:
        """Say which blocks computing up to token `stop` will add."""
        coming = tuple(seq.hash_blocks()[first : stop // seq.namespace.block_size])
        if not coming:
            return []
        seq.announced = True
        self._coming[seq.request_id, seq.epoch] = first, coming[0]
        return [AnnounceBlocks(seq.request_id, seq.epoch, coming, stop - seq.stored, seq.deadline_ns)]

    def _answer(self, seq: DecodeSequence) -> list[DecodeEffect]:
        if seq.answered:
            return []
        seq.answered = True
        return [ReplyReserved(seq.request_id, seq.epoch, seq.cached_tokens)]

    def _handover_verified(self, request_id: RequestId, epoch: int) -> list[DecodeEffect]:
        seq = self.sequence(request_id, epoch)
        if seq is None:
            return self._memory_idle(request_id, epoch, "inbound", None)
        if seq.state is not SeqState.ARRIVING:
            raise LocalProtocolError(detail=f"hand-over of {request_id} verified while {seq.state.value}")
        seq.inbound_open, seq.state = False, SeqState.READY
        # A first step that was finished already stored the KV of the last given token too.
        seq.stored = max(seq.stored, seq.num_given - 1)
        if seq.held is not None:
            token, seq.held = seq.held, None
            return self._took(seq, token)
        if not seq.stepping:
            self._memory.commit(seq)
        return [RegisterLength(request_id, epoch, seq.stored)]

    def _computed(self, request_id: RequestId, epoch: int, error: KVError | None) -> list[DecodeEffect]:
        seq = self.sequence(request_id, epoch)
        told = seq or self._closing.get((request_id, epoch))
        # Whoever waits for these blocks is told last, when they can be found.
        over = [WithdrawBlocks(request_id, epoch)] if told is not None and told.announced else []
        if seq is None or error is not None:
            return [*self._memory_idle(request_id, epoch, "compute", error), *over]
        self._coming.pop((request_id, epoch), None)
        seq.computing, seq.announced, seq.state = False, False, SeqState.READY
        seq.stored = len(seq.tokens) - 1
        self._memory.commit(seq)
        return [RegisterLength(request_id, epoch, seq.stored), *over]

    def _step_finished(self, outcomes: Sequence[StepOutcome]) -> list[DecodeEffect]:
        if not self._step_running:
            raise LocalProtocolError(detail="a step finished that was not started")
        self._step_running = False
        effects: list[DecodeEffect] = []
        for outcome in outcomes:
            seq = self.sequence(outcome.request_id, outcome.epoch)
            if seq is None:
                effects += self._memory_idle(outcome.request_id, outcome.epoch, "step", None)
                continue
            seq.stepping = False
            match outcome.result:
                case Parked() as parked:
                    seq.parked = parked
                    if not seq.inbound_open:
                        self._memory.commit(seq)
                case OutputToken() as token:
                    seq.parked = None
                    if seq.inbound_open:
                        seq.held = token
                    else:
                        effects += self._took(seq, token)
                case KVError() as error:
                    effects += self._give_up(seq, error, may_retry=isinstance(error, RetryableError))
        return effects

    def _took(self, seq: DecodeSequence, token: OutputToken) -> list[DecodeEffect]:
        """A verified token: KV of its predecessor is stored, and the client may see it."""
        seq.stored = len(seq.tokens)
        seq.tokens.append(token.token_id)
        self._memory.commit(seq)
        finish = seq.finish_reason(token.token_id)
        effects: list[DecodeEffect] = [
            SendTokens(seq.request_id, seq.epoch, seq.gateway, seq.newest_index, (token,), finish),
            RegisterLength(seq.request_id, seq.epoch, seq.stored),
        ]
        if finish is not None:
            effects += self._close(seq)
        return effects

    def _end_asked(self, request_id: RequestId, epoch: int) -> list[DecodeEffect]:
        self._fence.end(request_id, epoch)
        seq = self._sequences.get(request_id)
        if seq is None or seq.epoch > epoch:
            return []
        return self._close(seq)

    def _give_up(self, seq: DecodeSequence, error: KVError, *, may_retry: bool) -> list[DecodeEffect]:
        request_id, epoch = seq.request_id, seq.epoch
        tell: DecodeEffect
        if seq.answered:
            tell = GiveUp(request_id, epoch, seq.gateway, error, may_retry)
        else:
            seq.answered = True
            tell = RefuseReserve(request_id, epoch, error)
        return [tell, *self._close(seq)]

    def _close(self, seq: DecodeSequence) -> list[DecodeEffect]:
        """End a request: its blocks go back now, or when the last one that may touch them is done."""
        request_id, epoch = seq.request_id, seq.epoch
        self._fence.end(request_id, epoch)
        del self._sequences[request_id]
        # Of what it still computes nothing will be findable.
        self._coming.pop((request_id, epoch), None)
        effects: list[DecodeEffect] = []
        if not seq.answered:
            seq.answered = True
            effects.append(RefuseReserve(request_id, epoch, self._fence.ended(request_id, epoch)))
        if seq.state is SeqState.WAITING:
            self._waiting.remove(seq)
        seq.ended = True
        if seq.inbound_open:
            effects.append(CloseInbound(request_id, epoch))
        if seq.busy:
            seq.state = SeqState.CLOSING
            self._closing[request_id, epoch] = seq
        else:
            self._memory.release(seq)
        return [*effects, Retire(request_id, epoch)]

    def _memory_idle(self, request_id: RequestId, epoch: int, who: str, error: KVError | None) -> list[DecodeEffect]:
        """One that could touch the blocks is done; `error` ends a request that is still alive."""
        live = self.sequence(request_id, epoch)
        seq = live or self._closing.get((request_id, epoch))
        if seq is None:
            raise LocalProtocolError(detail=f"{who} of {request_id} epoch {epoch} ended, which holds nothing")
        match who:
            case "inbound":
                seq.inbound_open = False
            case "compute":
                seq.computing = False
            case _:
                seq.stepping = False
        if live is not None:
            reason = error or LocalProtocolError(detail=f"{who} of {request_id} closed without being asked to")
            return self._give_up(live, reason, may_retry=error is not None)
        if not seq.busy:
            del self._closing[request_id, epoch]
            self._memory.release(seq)
        return []

    def _start_step(self) -> list[DecodeEffect]:
        if self._step_running:
            return []
        effects: list[DecodeEffect] = []
        items: list[StepItem] = []
        for seq in sorted(self._sequences.values(), key=lambda seq: seq.order):
            if not self._steppable(seq):
                continue
            effects += self._make_room(seq)
            if seq.table is None:
                continue
            items.append(self._item(seq))
        # Making room for a later one may have preempted none of the earlier: the youngest goes first.
        items = [item for item in items if self._holds(item)]
        if not items:
            return effects
        for item in items:
            self._sequences[item.request_id].stepping = True
        self._step_running = True
        return [*effects, StartStep(tuple(items))]

    def _holds(self, item: StepItem) -> bool:
        return self._sequences[item.request_id].table is not None

    def _steppable(self, seq: DecodeSequence) -> bool:
        if seq.held is not None:
            return False
        if seq.state is SeqState.READY:
            return True
        # Stepping a sequence whose next layer is not there would only park it again.
        return seq.state is SeqState.ARRIVING and seq.layers_ready > (seq.parked.layer if seq.parked else 0)

    def _item(self, seq: DecodeSequence) -> StepItem:
        return StepItem(
            seq.request_id,
            seq.epoch,
            seq.tokens[-1],
            len(seq.tokens) - 1,
            tuple(ref.slot for ref in seq.refs),
            seq.inbound_open,
            seq.parked,
            seq.sampling,
        )

    def _make_room(self, seq: DecodeSequence) -> list[DecodeEffect]:
        """See that the block of the next position exists, taking slots back from the youngest if need be."""
        effects: list[DecodeEffect] = []
        while self._memory.lacks_block(seq):
            try:
                effects.append(PrepareSlots(self._memory.grow(seq)))
            except NoSpaceError as error:
                victims = [s for s in self._sequences.values() if s.state is SeqState.READY and not s.busy]
                if isinstance(error, TenantQuotaError):
                    # Others' blocks are of no use to a tenant that has its share.
                    victims = [s for s in victims if self._memory.same_account(s, seq.namespace.digest)]
                effects += self._preempt(max(victims, key=lambda s: s.order))
        return effects

    def _runs_with(self, namespace: bytes) -> bool:
        """Whether a request of the same tenant holds slots."""
        return any(s.table is not None and self._memory.same_account(s, namespace) for s in self._sequences.values())

    def _preempt(self, seq: DecodeSequence) -> list[DecodeEffect]:
        self._memory.release(seq)
        seq.state, seq.parked, seq.stored, seq.committed = SeqState.PREEMPTED, None, 0, 0
        return [NotePreempted(seq.request_id, seq.epoch)]

    def _expired(self, seq: DecodeSequence) -> KVError:
        return RequestExpiredError(request_id=seq.request_id, node=self._node_id, state=seq.state.value)

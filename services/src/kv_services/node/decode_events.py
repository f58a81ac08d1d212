"""What a decode node's machine hears (past tense) and what it wants done (imperative)."""

from dataclasses import dataclass

from kv_core.block import BlockRef
from kv_core.errors import KVError
from kv_core.ids import NodeId, RequestId
from kv_core.namespace import Namespace
from kv_services.engine.interface import Parked
from kv_services.messages import OutputToken, Sampling
from kv_services.node.announcements import AnnounceBlocks, WithdrawBlocks


@dataclass(frozen=True, slots=True)
class ReserveAsked:
    """A gateway wants these tokens decoded here. `tokens` are the prompt and what the client already has."""

    now_ns: int
    request_id: RequestId
    epoch: int
    gateway: NodeId
    namespace: Namespace
    tokens: tuple[int, ...]
    num_confirmed: int
    sampling: Sampling
    deadline_ns: int
    compute_locally: bool


@dataclass(frozen=True, slots=True)
class LayerArrived:
    """One more layer of a hand-over is verified: layers `[0, num_layers)` are there."""

    request_id: RequestId
    epoch: int
    num_layers: int


@dataclass(frozen=True, slots=True)
class HandoverVerified:
    """Every byte is there, and the entry's checksum is the sender's; the peer can write here no more."""

    request_id: RequestId
    epoch: int


@dataclass(frozen=True, slots=True)
class HandoverFailed:
    """The hand-over failed, and the peer can write here no more."""

    request_id: RequestId
    epoch: int
    error: KVError


@dataclass(frozen=True, slots=True)
class InboundClosed:
    """A hand-over that was told to close is closed: the peer can write here no more."""

    request_id: RequestId
    epoch: int


@dataclass(frozen=True, slots=True)
class Computed:
    """The missing KV was computed here; `error` when it was not."""

    request_id: RequestId
    epoch: int
    error: KVError | None = None


@dataclass(frozen=True, slots=True)
class StepOutcome:
    """What one sequence got out of a step: a token, a place to go on from, or an error of its own."""

    request_id: RequestId
    epoch: int
    result: OutputToken | Parked | KVError


@dataclass(frozen=True, slots=True)
class StepFinished:
    """The compute thread is done with a step."""

    outcomes: tuple[StepOutcome, ...]


@dataclass(frozen=True, slots=True)
class EndAsked:
    """The gateway ends this epoch (and all below it)."""

    request_id: RequestId
    epoch: int
    cause: str


@dataclass(frozen=True, slots=True)
class PeerDied:
    """Membership declared a process dead."""

    node_id: NodeId
    cause: str


@dataclass(frozen=True, slots=True)
class DrainBegan:
    """Nothing new is taken; with `hand_over` every request goes on elsewhere, else all that are here are finished."""

    hand_over: bool


@dataclass(frozen=True, slots=True)
class DrainEnded:
    """New work is taken again."""


@dataclass(frozen=True, slots=True)
class TimePassed:
    """Deadlines are judged."""

    now_ns: int


DecodeEvent = (
    ReserveAsked
    | LayerArrived
    | HandoverVerified
    | HandoverFailed
    | InboundClosed
    | Computed
    | StepFinished
    | EndAsked
    | PeerDied
    | DrainBegan
    | DrainEnded
    | TimePassed
)


@dataclass(frozen=True, slots=True)
class PrepareSlots:
    """Slots were handed out anew: make their older references void before anything is written."""

    refs: tuple[BlockRef, ...]


@dataclass(frozen=True, slots=True)
class OpenInbound:
    """Let the prefill node write `refs` (blocks `first_block ..` of the sequence) and tell the gateway so."""

    request_id: RequestId
    epoch: int
    refs: tuple[BlockRef, ...]
    first_block: int
    cached_tokens: int


@dataclass(frozen=True, slots=True)
class ReplyReserved:
    """Tell the gateway that slots are held and no hand-over is needed."""

    request_id: RequestId
    epoch: int
    cached_tokens: int


@dataclass(frozen=True, slots=True)
class RefuseReserve:
    """Tell the gateway why not."""

    request_id: RequestId
    epoch: int
    error: KVError


@dataclass(frozen=True, slots=True)
class CloseInbound:
    """End a hand-over by completion or fence; answer with `InboundClosed`."""

    request_id: RequestId
    epoch: int


@dataclass(frozen=True, slots=True)
class StartCompute:
    """Compute KV of tokens `[start, stop)` here; answer with `Computed`."""

    request_id: RequestId
    epoch: int
    tokens: tuple[int, ...]
    start: int
    stop: int
    slots: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class StepItem:
    """One sequence of a step: compute `token` at `position`, then choose the next token."""

    request_id: RequestId
    epoch: int
    token: int
    position: int
    slots: tuple[int, ...]
    arriving: bool
    parked: Parked | None
    sampling: Sampling


@dataclass(frozen=True, slots=True)
class StartStep:
    """Run one decode step; answer with `StepFinished`."""

    items: tuple[StepItem, ...]


@dataclass(frozen=True, slots=True)
class SendTokens:
    """Tell the gateway of new tokens."""

    request_id: RequestId
    epoch: int
    gateway: NodeId
    first_index: int
    tokens: tuple[OutputToken, ...]
    finish: str | None


@dataclass(frozen=True, slots=True)
class GiveUp:
    """Tell the gateway that this epoch ends here with an error."""

    request_id: RequestId
    epoch: int
    gateway: NodeId
    error: KVError
    may_retry: bool


@dataclass(frozen=True, slots=True)
class RegisterLength:
    """Publish that KV of the first `num_tokens` tokens is readable here."""

    request_id: RequestId
    epoch: int
    num_tokens: int


@dataclass(frozen=True, slots=True)
class Retire:
    """The request left this node: forget what was published about it, and its timings."""

    request_id: RequestId
    epoch: int


@dataclass(frozen=True, slots=True)
class NotePreempted:
    """A request's slots were taken back for an older one; it goes on when there is room."""

    request_id: RequestId
    epoch: int


DecodeEffect = (
    PrepareSlots
    | OpenInbound
    | ReplyReserved
    | RefuseReserve
    | CloseInbound
    | AnnounceBlocks
    | WithdrawBlocks
    | StartCompute
    | StartStep
    | SendTokens
    | GiveUp
    | RegisterLength
    | Retire
    | NotePreempted
)

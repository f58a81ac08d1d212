"""What a prefill node's machine hears (past tense) and what it wants done (imperative)."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from kv_core.block import BlockRef
from kv_core.errors import KVError
from kv_core.hashing import BlockHash
from kv_core.ids import NodeId, RequestId
from kv_core.namespace import Namespace
from kv_prefix.in_flight import Wait
from kv_prefix.pool_types import CopyBlock
from kv_services.node.announcements import AnnounceBlocks, WithdrawBlocks


@dataclass(frozen=True, slots=True)
class PrefillAsked:
    """A gateway wants the KV of `tokens` but the last at `decode_node`, from block `first_block` on."""

    now_ns: int
    request_id: RequestId
    epoch: int
    gateway: NodeId
    namespace: Namespace
    tokens: Sequence[int]
    decode_node: NodeId
    first_block: int
    deadline_ns: int


@dataclass(frozen=True, slots=True)
class Pulled:
    """Another node's blocks were fetched and verified; `error` when they were not."""

    request_id: RequestId
    epoch: int
    nbytes: int = 0
    error: KVError | None = None


@dataclass(frozen=True, slots=True)
class PrefillComputed:
    """The compute thread is done; `error` when it did not finish."""

    now_ns: int
    request_id: RequestId
    epoch: int
    error: KVError | None = None


@dataclass(frozen=True, slots=True)
class HandoverStats:
    """How a hand-over went. `tail_ns` of it came after everything was computed, and held the answer up."""

    nbytes: int
    units: int
    retries: int
    transport: str
    duration_ns: int
    tail_ns: int = 0


@dataclass(frozen=True, slots=True)
class HandoverEnded:
    """The hand-over is over and reads our blocks no more: verified by the decode node, or failed."""

    request_id: RequestId
    epoch: int
    result: HandoverStats | KVError


@dataclass(frozen=True, slots=True)
class PrefillEndAsked:
    """The gateway ends this epoch (and all below it)."""

    request_id: RequestId
    epoch: int
    cause: str


@dataclass(frozen=True, slots=True)
class PrefillPeerDied:
    """Membership declared a process dead."""

    node_id: NodeId
    cause: str


@dataclass(frozen=True, slots=True)
class AwaitedEnded:
    """What another node computed is there and claimed, or will not come: it ended, failed, or its node died."""

    owner: str


@dataclass(frozen=True, slots=True)
class PrefillDrainBegan:
    """Nothing new is taken, and what waits for its turn goes elsewhere; what is being worked on is finished."""


@dataclass(frozen=True, slots=True)
class PrefillDrainEnded:
    """New work is taken again."""


@dataclass(frozen=True, slots=True)
class PrefillTimePassed:
    """Deadlines are judged."""

    now_ns: int


PrefillEvent = (
    PrefillAsked
    | Pulled
    | PrefillComputed
    | HandoverEnded
    | PrefillEndAsked
    | PrefillPeerDied
    | AwaitedEnded
    | PrefillDrainBegan
    | PrefillDrainEnded
    | PrefillTimePassed
)


@dataclass(frozen=True, slots=True)
class PullPlan:
    """Fetch blocks `[first_block, first_block + num_blocks)` of the prefix from `holder`."""

    holder: NodeId
    first_block: int
    num_blocks: int


@dataclass(frozen=True, slots=True)
class PrepareBlocks:
    """Slots were handed out anew: make their older references void before anything is written."""

    refs: tuple[BlockRef, ...]


@dataclass(frozen=True, slots=True)
class StartPull:
    """Fetch into `refs`; answer with `Pulled`."""

    request_id: RequestId
    epoch: int
    namespace: Namespace
    plan: PullPlan
    tokens: Sequence[int]
    block_hash: BlockHash
    refs: tuple[BlockRef, ...]


@dataclass(frozen=True, slots=True)
class OpenHandover:
    """Begin the hand-over; blocks `[first_block, ready_blocks)` of `refs` are complete in every layer already."""

    request_id: RequestId
    epoch: int
    decode_node: NodeId
    first_block: int
    ready_blocks: int
    refs: tuple[BlockRef, ...]


@dataclass(frozen=True, slots=True)
class StartPrefill:
    """Compute KV of tokens `[start, stop)`, after `copy`; layers go to the hand-over as they are written."""

    request_id: RequestId
    epoch: int
    tokens: Sequence[int]
    start: int
    stop: int
    refs: tuple[BlockRef, ...]
    copy: CopyBlock | None


@dataclass(frozen=True, slots=True)
class NoteWaiting:
    """A request waits for what another node computes."""

    request_id: RequestId
    epoch: int
    wait: Wait


class WaitOutcome(Enum):
    """What a request found when its wait was over."""

    FOUND = "found"
    MISSING = "missing"
    TIMED_OUT = "timed out"


@dataclass(frozen=True, slots=True)
class NoteWaited:
    """It waits no more."""

    request_id: RequestId
    epoch: int
    outcome: WaitOutcome


@dataclass(frozen=True, slots=True)
class CancelCompute:
    """Stop computing between layers; `PrefillComputed` still comes."""

    request_id: RequestId
    epoch: int


@dataclass(frozen=True, slots=True)
class FinishHandover:
    """All was submitted: wait until it is verified, compare checksums; answer with `HandoverEnded`."""

    request_id: RequestId
    epoch: int
    num_tokens: int


@dataclass(frozen=True, slots=True)
class AbortHandover:
    """Stop reading our blocks; `HandoverEnded` still comes."""

    request_id: RequestId
    epoch: int
    error: KVError


@dataclass(frozen=True, slots=True)
class ReplyDone:
    """Tell the gateway that the hand-over is complete."""

    request_id: RequestId
    epoch: int
    local_tokens: int
    pulled_tokens: int
    computed_tokens: int
    bytes_pulled: int
    stats: HandoverStats
    queued_ns: int
    compute_ns: int


@dataclass(frozen=True, slots=True)
class ReplyFailed:
    """Tell the gateway why not."""

    request_id: RequestId
    epoch: int
    error: KVError


PrefillEffect = (
    PrepareBlocks
    | AnnounceBlocks
    | WithdrawBlocks
    | NoteWaiting
    | NoteWaited
    | StartPull
    | OpenHandover
    | StartPrefill
    | CancelCompute
    | FinishHandover
    | AbortHandover
    | ReplyDone
    | ReplyFailed
)

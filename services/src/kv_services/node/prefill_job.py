"""One request on a prefill node: its progress, where its KV lies, what may still touch it; `prefill_state` decides."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum

from kv_core.block import BlockRef
from kv_core.errors import KVError
from kv_core.hashing import BlockHash
from kv_core.ids import NodeId, RequestId
from kv_core.namespace import Namespace
from kv_prefix.in_flight import Wait
from kv_prefix.pins import Receipt
from kv_prefix.pool_types import CopyBlock
from kv_services.node.prefill_events import PullPlan


class JobState(Enum):
    """Where a request stands on its prefill node."""

    WAITING = "waiting"
    AWAITING = "waiting for what another node computes"
    PULLING = "fetching"
    COMPUTING = "computing"
    SENDING = "sending"


@dataclass(slots=True)
class PrefillJob:
    """One request on a prefill node. `failed` is set once it can only end badly; memory may still be busy then."""

    request_id: RequestId
    epoch: int
    gateway: NodeId
    namespace: Namespace
    tokens: Sequence[int]
    decode_node: NodeId
    first_block: int
    deadline_ns: int
    asked_ns: int
    state: JobState = JobState.WAITING
    table: Receipt | None = None
    sending: Receipt | None = None
    refs: list[BlockRef] = field(default_factory=list)
    hashes: list[BlockHash] = field(default_factory=list)
    plan: PullPlan | None = None
    wait: Wait | None = None
    gave_up: bool = False
    copy: CopyBlock | None = None
    start: int = 0
    committed: int = 0
    local_tokens: int = 0
    pulled_tokens: int = 0
    bytes_pulled: int = 0
    started_ns: int = 0
    compute_ns: int = 0
    pulling: bool = False
    computing: bool = False
    handover_open: bool = False
    announced: bool = False
    failed: KVError | None = None

    @property
    def num_needed(self) -> int:
        """Tokens whose KV must exist: all but the last, which the decode node computes."""
        return len(self.tokens) - 1

    @property
    def busy(self) -> bool:
        return self.pulling or self.computing or self.handover_open

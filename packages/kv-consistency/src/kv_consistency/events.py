"""What can happen to a replica. `Local...` events come from the process it lives in; they are refused with a typed
error, and then nothing was changed. Every event brings the time at which it happened."""

from dataclasses import dataclass
from typing import NamedTuple

import msgspec

from kv_consistency.messages import ReplicaMessage
from kv_consistency.update import NamespaceRef, OwnerEpoch, Run, Tier
from kv_consistency.version_vector import CausalToken
from kv_core.ids import Incarnation, NodeId, RequestId


class Instant(NamedTuple):
    """When: a monotonic reading for deadlines, a wall reading for stamps, both in nanoseconds."""

    now_ns: int
    wall_ns: int


class Removal(NamedTuple):
    """Blocks that left one tier: their 16-byte sequence hashes one after the other."""

    namespace: bytes
    tier: Tier
    hashes: bytes
    shape: bytes = b""


NOTHING = CausalToken()


@dataclass(frozen=True, slots=True)
class LocalStore:
    """This node holds these blocks now; one update for all runs."""

    at: Instant
    runs: tuple[Run, ...]
    after: CausalToken = NOTHING


@dataclass(frozen=True, slots=True)
class LocalRemove:
    """This node no longer holds these blocks; say so before their slots are written again."""

    at: Instant
    removals: tuple[Removal, ...]
    after: CausalToken = NOTHING


@dataclass(frozen=True, slots=True)
class LocalClear:
    """This node holds nothing any more in that tier, or in any."""

    at: Instant
    tier: Tier | None = None


@dataclass(frozen=True, slots=True)
class LocalRegister:
    """The KV of a request now reaches `new_seq_len` tokens and all of it is on `written_nodes`.

    Args:
        start: how long it was before, as the caller knows it; None: as long as it is here. Beyond what is registered
            here it is refused: the KV between would be missing.
        epoch: whose work it is; None: the present owner's.
        namespace: whose purge shall make it unreadable; None: as registered before.
    """

    at: Instant
    request_id: RequestId
    new_seq_len: int
    written_nodes: tuple[NodeId, ...]
    checksum: int = 0
    start: int | None = None
    epoch: OwnerEpoch | None = None
    namespace: NamespaceRef | None = None
    after: CausalToken = NOTHING


@dataclass(frozen=True, slots=True)
class LocalOwn:
    """This node (a gateway that holds the client's connection) owns the request from now on; former owners are
    fenced. With `keep` the registered length stays, else the request begins again at 0. A request that was ended is
    refused; request ids are never used again."""

    at: Instant
    request_id: RequestId
    keep: bool = False
    after: CausalToken = NOTHING


@dataclass(frozen=True, slots=True)
class LocalEnd:
    """The request is over; its entry is unreadable from now on. `epoch`: whose work it was; None: the present
    owner's."""

    at: Instant
    request_id: RequestId
    epoch: OwnerEpoch | None = None


@dataclass(frozen=True, slots=True)
class LocalRaise:
    """Purge: whatever lies below these scopes and did not follow this is unreadable, everywhere."""

    at: Instant
    scopes: tuple[bytes, ...]
    after: CausalToken = NOTHING


class Received(msgspec.Struct, frozen=True, gc=False):
    """A message of `MESSAGES` from that peer, decoded; the bus has checked who sent it.

    `incarnation`: which life of the peer sent it. A bus that refuses messages of former lives need not say.
    """

    at: Instant
    peer: NodeId
    message: ReplicaMessage
    incarnation: Incarnation | None = None


@dataclass(frozen=True, slots=True)
class PeerJoined:
    """Membership admitted that life of a node that holds a replica."""

    at: Instant
    node: NodeId
    incarnation: Incarnation


@dataclass(frozen=True, slots=True)
class PeerDied:
    """Membership declared that life over, by death or by leaving. It does not come back."""

    at: Instant
    node: NodeId
    incarnation: Incarnation


@dataclass(frozen=True, slots=True)
class GapNoticed:
    """The bus lost something that this node published."""

    at: Instant
    node: NodeId


@dataclass(frozen=True, slots=True)
class WaitFor:
    """Tell when everything in `after` is applied here and, where a request is named, `required_seq_len` tokens of it
    are readable; or why not, at once when that is certain, else at the deadline.

    Args:
        waiter: the caller's number for it, unique among those that wait.
        deadline_ns: on the monotonic clock.
    """

    at: Instant
    waiter: int
    after: CausalToken
    deadline_ns: int
    request_id: RequestId | None = None
    required_seq_len: int = 0


@dataclass(frozen=True, slots=True)
class CancelWait:
    """Nobody waits any more; no effect follows. Unknown waiters are ignored: it may just have been told."""

    waiter: int


@dataclass(frozen=True, slots=True)
class ClockBoundPersisted:
    """The bound of a `PersistClockBound` is on disk."""

    bound_ns: int


@dataclass(frozen=True, slots=True)
class ClockAccepted:
    """A person or a time service confirmed that the wall clock is right after a jump.

    Where replicas hear of each other, their votes say so by themselves (`peer_clocks`); this is for who knows better.
    """

    at: Instant


@dataclass(frozen=True, slots=True)
class Tick:
    """Time passed; every 10 to 100 ms."""

    at: Instant


Event = (
    LocalStore
    | LocalRemove
    | LocalClear
    | LocalRegister
    | LocalOwn
    | LocalEnd
    | LocalRaise
    | Received
    | PeerJoined
    | PeerDied
    | GapNoticed
    | WaitFor
    | CancelWait
    | ClockBoundPersisted
    | ClockAccepted
    | Tick
)

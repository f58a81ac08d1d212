"""What a replica wants done. Effects are performed in order; none of them can fail the step that gave them out.

Those that come by the hundred thousand are structs and not dataclasses: they are made in a tenth of the time.
"""

from dataclasses import dataclass
from enum import Enum

import msgspec

from kv_consistency.errors import ConsistencyError
from kv_consistency.hlc import Timestamp
from kv_consistency.messages import ReplicaMessage, UpdateBatch
from kv_consistency.update import NamespaceRef, OwnerEpoch, Tier
from kv_consistency.version_vector import Dot, Origin
from kv_core.errors import KVError
from kv_core.ids import Incarnation, NodeId, RequestId


@dataclass(frozen=True, slots=True)
class BroadcastUpdates:
    """Publish to every peer that follows this replica. Loss is repaired; order need not be kept."""

    batch: UpdateBatch


@dataclass(frozen=True, slots=True)
class SendTo:
    """Send to one peer; loss is repaired."""

    peer: NodeId
    message: ReplicaMessage


class ClaimsAdded(msgspec.Struct, frozen=True, gc=False):
    """The holder has these blocks in that tier. Columns of equal length.

    Args:
        hashes: sequence hashes, 16 bytes each.
        checks: second hashes.
        positions: of each block in its sequence; a range only where they are consecutive ones of one sequence.
    """

    holder: Origin
    namespace: NamespaceRef
    tier: Tier
    shape: bytes
    hashes: tuple[bytes, ...]
    checks: tuple[int, ...]
    positions: range | tuple[int, ...]


class ClaimsRemoved(msgspec.Struct, frozen=True, gc=False):
    """The holder no longer has these blocks in that tier; only blocks that were added before are named."""

    holder: Origin
    namespace: NamespaceRef
    tier: Tier
    shape: bytes
    hashes: tuple[bytes, ...]


class HolderDropped(msgspec.Struct, frozen=True, gc=False):
    """Nothing of this life of a node is readable any more."""

    holder: Origin


ClaimChange = ClaimsAdded | ClaimsRemoved | HolderDropped


class ClaimsChanged(msgspec.Struct, frozen=True, gc=False):
    """What the prefix index must learn, in order; this node's own claims are among them."""

    changes: tuple[ClaimChange, ...]


class EndCause(Enum):
    """Why a request is over."""

    ENDED = "ended"
    OWNER_LOST = "owner lost"


@dataclass(frozen=True, slots=True)
class RequestEnded:
    """Release what this process holds for the request."""

    request_id: RequestId
    epoch: OwnerEpoch
    cause: EndCause


@dataclass(frozen=True, slots=True)
class RequestFenced:
    """Work for epochs of this request below `epoch` is void; it has a new owner."""

    request_id: RequestId
    epoch: OwnerEpoch


@dataclass(frozen=True, slots=True)
class WaiterReady:
    """What the waiter waited for is here; `version` is that of the request's entry, if it named one."""

    waiter: int
    version: Timestamp | None


@dataclass(frozen=True, slots=True)
class WaiterFailed:
    """It will not be here in time, or ever."""

    waiter: int
    error: ConsistencyError


@dataclass(frozen=True, slots=True)
class ReplicaReady:
    """Reads and local events are taken from now on: the first synchronisation is done, or there is no peer."""


@dataclass(frozen=True, slots=True)
class PersistClockBound:
    """Write this to disk, then say `ClockBoundPersisted`. Until then stamps stay below the bound before it."""

    bound_ns: int


@dataclass(frozen=True, slots=True)
class ReportClock:
    """A clock is wrong: the own one jumped (`peer` is None), or a peer's is ahead. Told once per episode."""

    error: KVError
    peer: NodeId | None


@dataclass(frozen=True, slots=True)
class ReportWallAccepted:
    """The own wall, which had jumped forward by that much, is believed: peers' walls agree with it."""

    ahead_ns: int


@dataclass(frozen=True, slots=True)
class ReportResync:
    """A synchronisation with that peer began, ended well, or was given up and will be tried again."""

    peer: NodeId
    state: str


@dataclass(frozen=True, slots=True)
class RestartReplica:
    """The cluster holds this life for over. Make a new replica with a higher incarnation than `seen`; this one
    refuses everything from now on."""

    seen: Incarnation


@dataclass(frozen=True, slots=True)
class Issued:
    """The local event became this dot with this stamp; the first effect of a local event."""

    dot: Dot
    stamp: Timestamp


Effect = (
    Issued
    | BroadcastUpdates
    | SendTo
    | ClaimsChanged
    | RequestEnded
    | RequestFenced
    | WaiterReady
    | WaiterFailed
    | ReplicaReady
    | PersistClockBound
    | ReportClock
    | ReportWallAccepted
    | ReportResync
    | RestartReplica
)

"""The small vocabulary of kv-transport: priorities, states, operations, and the figures of a finished transfer."""

from enum import Enum, IntEnum
from typing import NamedTuple

import msgspec

from kv_core.ids import Incarnation, NodeId


class TransferPriority(IntEnum):
    """How soon a transfer is needed; lower goes first."""

    CRITICAL = 0
    """The running decode step needs it."""

    HIGH = 1
    """The next token needs it."""

    LOW = 2
    """Prefetch: nobody waits yet. Never starves."""


class XferOp(Enum):
    """Direction of a one-sided operation, seen from the side that posts it."""

    WRITE = "write"
    READ = "read"


class XferState(Enum):
    """Where a transfer is in its life."""

    PENDING = "pending"
    """Made, not posted."""

    POSTED = "posted"
    """At work."""

    DONE = "done"
    """Every byte is verified at its destination."""

    FAILED = "failed"
    """Given up; no memory of it is in use any more."""

    ABANDONED = "abandoned"
    """The caller has its error, but the transport may still touch the memory: it stays pinned."""

    RELEASED = "released"
    """The handle is gone."""


class Access(Enum):
    """What introduced peers may do with a region without a grant or lease."""

    NONE = "none"
    READ = "read"
    WRITE = "write"
    """Read and write."""


class PeerName(NamedTuple):
    """One life of one node."""

    node: NodeId
    incarnation: Incarnation

    def __str__(self) -> str:
        return f"{self.node}#{self.incarnation}"


class TransferStats(msgspec.Struct, frozen=True):
    """What a finished transfer took.

    Attributes:
        nbytes: KV bytes verified at the destination.
        wire_nbytes: bytes that crossed the transport for them, retries included.
        units: units acknowledged.
        retries: units posted again, for whatever reason.
        transports: scheme -> bytes it carried; more than one after a fallback.
        codecs: codec -> units that were written with it; those that a codec did not help count as `none`.
        duration_ns: from the first unit submitted to the last one acknowledged.
    """

    nbytes: int = 0
    wire_nbytes: int = 0
    units: int = 0
    retries: int = 0
    transports: dict[str, int] = msgspec.field(default_factory=dict)
    duration_ns: int = 0
    codecs: dict[str, int] = msgspec.field(default_factory=dict)

    @property
    def transport(self) -> str:
        """The schemes that carried it, in order of use, joined by `+`."""
        return "+".join(self.transports) or "none"

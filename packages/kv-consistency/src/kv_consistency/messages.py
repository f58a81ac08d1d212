"""What replicas say to each other. `MESSAGES` is the list to register with `kv_core.wire.Registry`.

Updates are published by their origin. What is lost is found by comparing digests and noticing gaps, and fetched by
range; where no log reaches back any more, by a synchronisation: pages of state in a stable order, pulled by the one
that lacks them, so that whoever serves keeps no session.
"""

from typing import Annotated, Final

from msgspec import Meta

from kv_consistency import limits
from kv_consistency.update import (
    HASH_BYTES,
    Count,
    EntryWritten,
    NamespaceRef,
    RaiseCount,
    Shape,
    Tier,
    Update,
    _Struct,
)
from kv_consistency.version_vector import Dot, Origin, Seen
from kv_core.wire import Message

Origins = Annotated[tuple[Origin, ...], Meta(max_length=limits.MAX_ORIGINS)]
Cursor = Annotated[bytes, Meta(max_length=1024)]
Updates = Annotated[tuple[Update, ...], Meta(max_length=limits.MAX_UPDATES_PER_BATCH)]
META_BYTES: Final = 16
"""Of one claim in a page: `n` (uint64), position (uint32), check (uint32), little-endian."""


class UpdateBatch(Message, frozen=True, tag="consistency.updates"):
    """Published by `origin`: its newest updates in order. Empty: only says how far it is.

    Args:
        head: the origin's highest dot.
    """

    origin: Origin
    head: Count
    updates: Updates


class Digest(Message, frozen=True, tag="consistency.digest"):
    """How far the sender is.

    Args:
        seq: number of this digest between these two replicas.
        base: the digest of the receiver against which `seen` is a difference; 0: `seen` is the whole vector.
        seen: the sender's vector, or the difference.
        answer: sent because one was received; it is not answered again.
        over: lives that are over and that the receiver may still count.
        reading_ns: what the sender's wall reads, believed or not; 0: not told.
    """

    seq: Count
    base: Count
    seen: Seen
    wall_ns: Count
    logical: Count
    answer: bool = False
    over: Origins = ()
    reading_ns: Count = 0


class RangeRequest(Message, frozen=True, tag="consistency.range_request"):
    """Send updates `first` to `last` of that origin, as many as one answer holds."""

    origin: Origin
    first: Annotated[int, Meta(ge=1, le=limits.MAX_DOT)]
    last: Annotated[int, Meta(ge=1, le=limits.MAX_DOT)]


class RangeReply(Message, frozen=True, tag="consistency.range_reply"):
    """Updates in order, from `first` on.

    Args:
        low: lowest dot that the sender's log still has; above `first` the log no longer reaches back, and nothing is
            sent.
        head: how far the sender is in that origin.
    """

    origin: Origin
    first: Annotated[int, Meta(ge=1, le=limits.MAX_DOT)]
    low: Count
    head: Count
    updates: Updates


class SyncRequest(Message, frozen=True, tag="consistency.sync_request"):
    """Send a page of state.

    Args:
        session: the requester's number for this synchronisation.
        have: the requester's vector.
        snapshots: the origins whose claims are wanted, as the first page named them; empty on the first request.
        cursor: where to go on; b"" asks for the first page.
    """

    session: Count
    have: Seen
    snapshots: Origins = ()
    cursor: Cursor = b""


class EntryRow(_Struct, frozen=True):
    """The winning write of one request, with its dot and stamp."""

    dot: Dot
    wall_ns: Count
    logical: Count
    entry: EntryWritten


class ClaimPage(_Struct, frozen=True):
    """All claims of one origin in one namespace, tier and shape whose hash begins with the byte `part`; -1: all.

    Args:
        meta: for each hash `n`, position and check, 16 bytes.
    """

    origin: Origin
    namespace: NamespaceRef
    epoch: Count
    tier: Tier
    shape: Shape
    part: Annotated[int, Meta(ge=-1, le=255)]
    hashes: Annotated[bytes, Meta(max_length=HASH_BYTES * limits.MAX_CLAIMS_PER_SHELF)]
    meta: Annotated[bytes, Meta(max_length=META_BYTES * limits.MAX_CLAIMS_PER_SHELF)]

    def __post_init__(self) -> None:
        if len(self.hashes) % HASH_BYTES or len(self.meta) != len(self.hashes) // HASH_BYTES * META_BYTES:
            raise ValueError(f"{len(self.hashes)} bytes of hashes do not go with {len(self.meta)} of meta")


class SyncPage(Message, frozen=True, tag="consistency.sync_page"):
    """One page of state.

    Args:
        asked: the cursor that this answers.
        cursor: where to go on; b"" on the last page.
        vector: the sender's vector now, on the first and the last page; else empty.
        snapshots: on the first page: the origins whose claims will be sent, because no log reaches back to what the
            requester has, each with the dot at which the pages begin.
        floors: on the first page: nodes whose lives below that incarnation are over and forgotten.
        over: on the first page: lives that are over and not forgotten yet.
        ready: False: the sender is new itself; all it has to give is `raises`, the purges that outlived its restart.
        collected: on the first and the last page: the writes that ended requests of which nothing is left there. Of
            such a request no entry is sent, so whoever lacks one of these writes asks again, as if it had nothing.
    """

    session: Count
    asked: Cursor
    cursor: Cursor
    wall_ns: Count
    logical: Count
    vector: Seen = ()
    snapshots: Seen = ()
    floors: Origins = ()
    over: Origins = ()
    raises: tuple[RaiseCount, ...] = ()
    entries: tuple[EntryRow, ...] = ()
    claims: tuple[ClaimPage, ...] = ()
    ready: bool = True
    collected: Seen = ()


ReplicaMessage = UpdateBatch | Digest | RangeRequest | RangeReply | SyncRequest | SyncPage

MESSAGES: Final[tuple[type[Message], ...]] = (
    UpdateBatch,
    Digest,
    RangeRequest,
    RangeReply,
    SyncRequest,
    SyncPage,
)
"""Every message of this package: `Registry(*MESSAGES)`."""

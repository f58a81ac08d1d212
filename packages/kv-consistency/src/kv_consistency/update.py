"""What an origin says: one update is one dot, one stamp, the dots it depends on, and what changed.

Operations are facts about what their origin alone may write, or registers that merge by maximum, so that the state of
a replica follows from the set of updates it applied:

- `BlocksStored`, `BlocksRemoved`, `HolderCleared`: the origin's own claims, in the order of its dots.
- `EntryWritten`: one request's KV. The greatest `(owner epoch, ended, length, stamp)` wins.
- `ScopesRaised`: a purge. Each counts once; claims and entries carry the count their writer had applied.
- `ScopesRestored`: purges of lives whose own updates are gone everywhere, from the disk of a node that restarted.

Blocks travel as columns: `hashes` is the 16-byte sequence hashes one after the other, `checks` the second hashes as
little-endian uint32.

U1: an update is immutable and valid once constructed; decoding constructs. U2: all its operations take effect in one
step, or none.
"""

import struct
from collections.abc import Iterable, Sequence
from enum import IntEnum
from functools import lru_cache
from typing import Annotated, Final

import msgspec
import xxhash
from msgspec import Meta

from kv_consistency import limits
from kv_consistency.hlc import Timestamp
from kv_consistency.version_vector import Dot, Origin
from kv_core import limits as core_limits
from kv_core.hashing import BlockHash
from kv_core.ids import NodeId, RequestId

HASH_BYTES: Final = 16
CHECK_BYTES: Final = 4

Count = Annotated[int, Meta(ge=0, le=core_limits.MAX_INT64)]
Scope = Annotated[bytes, Meta(min_length=8, max_length=HASH_BYTES)]
"""What a purge may name: a namespace's digest (16 bytes) or a `scope_id` (8 bytes)."""
Shape = Annotated[bytes, Meta(max_length=limits.MAX_SHAPE_BYTES)]
"""How the bytes of a block lie, as its holder encodes it; b"" for the cluster's usual shape."""
Hashes = Annotated[bytes, Meta(min_length=HASH_BYTES, max_length=HASH_BYTES * limits.MAX_BLOCKS_PER_RUN)]
Checks = Annotated[bytes, Meta(min_length=CHECK_BYTES, max_length=CHECK_BYTES * limits.MAX_BLOCKS_PER_RUN)]
RequestName = Annotated[RequestId, Meta(min_length=1, max_length=core_limits.MAX_NAME_BYTES)]


class Tier(IntEnum):
    """Where a copy lies, fastest first. The values are the wire form."""

    DEVICE = 0
    HOST = 1
    DISK = 2
    REMOTE = 3

    __hash__ = int.__hash__  # Enum's own is a Python function, and tiers are keys wherever claims are


class _Struct(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Base of the parts of an update. Parts hold no cycles, so the collector need not look at them."""


class NamespaceRef(_Struct, frozen=True, cache_hash=True):
    """A namespace as this package needs it.

    Args:
        digest: `kv_core.namespace.Namespace.digest`.
        block_size: tokens per block.
        scopes: what else it can be purged by (`scope_id`): tenant, model, weights, adapter.
    """

    digest: Annotated[bytes, Meta(min_length=HASH_BYTES, max_length=HASH_BYTES)]
    block_size: Annotated[int, Meta(ge=core_limits.MIN_BLOCK_SIZE, le=core_limits.MAX_BLOCK_SIZE)]
    scopes: Annotated[tuple[Scope, ...], Meta(max_length=limits.MAX_SCOPES)] = ()


def scope_id(kind: str, name: str) -> bytes:
    """The name of a scope, 8 bytes: XXH3-64 of kind and name, each with its length before it, so that a tenant "x" is
    not a model "x". Two scopes that collide are purged together, which costs hits and never correctness."""
    parts = (kind.encode(), name.encode())
    return xxhash.xxh3_64_digest(b"".join(struct.pack("<I", len(part)) + part for part in parts))


class OwnerEpoch(_Struct, frozen=True, order=True, cache_hash=True):
    """Which owner of a request a write belongs to. The higher `(number, owner)` fences the lower.

    `number` 0 without an owner is a request that nobody took ownership of.
    """

    number: Annotated[int, Meta(ge=0, le=(1 << 31) - 1)] = 0
    owner: Origin | None = None

    def __post_init__(self) -> None:
        if (self.number == 0) != (self.owner is None):
            raise ValueError("an owner and a number from 1 on come together")

    def __str__(self) -> str:
        return f"{self.number}@{self.owner}" if self.owner else "0"


UNOWNED: Final = OwnerEpoch()


class BlocksStored(_Struct, frozen=True, tag=0):
    """The origin holds these consecutive blocks of one sequence in that tier.

    Args:
        epoch: purges of the namespace that the origin had applied.
        start: position of the first block in its sequence.
    """

    namespace: NamespaceRef
    epoch: Count
    tier: Tier
    start: Annotated[int, Meta(ge=0, le=limits.MAX_POSITION)]
    hashes: Hashes
    checks: Checks
    shape: Shape = b""

    def __post_init__(self) -> None:
        count, rest = divmod(len(self.hashes), HASH_BYTES)
        if rest or len(self.checks) != count * CHECK_BYTES or not count:
            raise ValueError(f"{len(self.hashes)} bytes of hashes do not go with {len(self.checks)} of checks")
        if self.start + count - 1 > limits.MAX_POSITION:
            raise ValueError(f"{count} blocks from {self.start} on end beyond position {limits.MAX_POSITION}")


class BlocksRemoved(_Struct, frozen=True, tag=1):
    """The origin no longer holds these blocks in that tier; their order means nothing."""

    namespace: Annotated[bytes, Meta(min_length=HASH_BYTES, max_length=HASH_BYTES)]
    tier: Tier
    hashes: Hashes
    shape: Shape = b""

    def __post_init__(self) -> None:
        if not self.hashes or len(self.hashes) % HASH_BYTES:
            raise ValueError(f"{len(self.hashes)} bytes are not a whole number of hashes")


class HolderCleared(_Struct, frozen=True, tag=2):
    """The origin holds nothing any more in that tier, or in any."""

    tier: Tier | None = None


class EntryWritten(_Struct, frozen=True, tag=3):
    """The KV of one request.

    Args:
        epoch: the owner whose work this is.
        start: tokens that were registered before; the KV of `[start, seq_len)` is new.
        seq_len: tokens of KV.
        checksum: XXH3 over the block CRCs in order, 0 when it is not known yet.
        nodes: who holds all of `[0, seq_len)`.
        namespace: whose purge makes it unreadable; None: no purge does.
        namespace_epoch: purges of that namespace that the origin had applied.
        ended: the request is over.
    """

    request_id: RequestName
    epoch: OwnerEpoch
    start: Annotated[int, Meta(ge=0, le=core_limits.MAX_TOKENS_PER_REQUEST)]
    seq_len: Annotated[int, Meta(ge=0, le=core_limits.MAX_TOKENS_PER_REQUEST)]
    checksum: Annotated[int, Meta(ge=0)] = 0
    nodes: Annotated[tuple[Origin, ...], Meta(max_length=limits.MAX_NODES_PER_ENTRY)] = ()
    namespace: NamespaceRef | None = None
    namespace_epoch: Count = 0
    ended: bool = False

    def __post_init__(self) -> None:
        if self.start > self.seq_len:
            raise ValueError(f"an entry of {self.seq_len} tokens cannot be new from {self.start} on")
        if not 0 <= self.checksum <= core_limits.MAX_UINT64:
            raise ValueError("a checksum has 64 bits")


class ScopesRaised(_Struct, frozen=True, tag=4):
    """A purge, the removal of a tenant, or new weights: claims and entries below these scopes that did not follow
    this update are unreadable."""

    scopes: Annotated[tuple[Scope, ...], Meta(min_length=1, max_length=limits.MAX_OPS_PER_UPDATE)]


class RaiseCount(_Struct, frozen=True):
    """How often one origin raised one scope, and the dot with which it last did.

    `via`: the update that restored it, where the origin's own update was not applied.
    """

    scope: Scope
    origin: Origin
    count: Annotated[int, Meta(ge=1, le=limits.MAX_DOT)]
    last: Annotated[int, Meta(ge=1, le=limits.MAX_DOT)]
    via: Dot | None = None

    def __post_init__(self) -> None:
        if self.count > self.last:
            raise ValueError(f"{self.count} purges cannot have been made by {self.last} updates")


class ScopesRestored(_Struct, frozen=True, tag=5):
    """Purges that this node kept over a restart and that it could not find applied anywhere: as when their origins had
    been heard of. `via` means nothing here."""

    rows: Annotated[tuple[RaiseCount, ...], Meta(min_length=1, max_length=limits.MAX_OPS_PER_UPDATE)]


Operation = BlocksStored | BlocksRemoved | HolderCleared | EntryWritten | ScopesRaised | ScopesRestored


class Update(_Struct, frozen=True):
    """The n-th update of an origin; it follows the (n-1)-th and all of `deps`."""

    n: Annotated[int, Meta(ge=1, le=limits.MAX_DOT)]
    wall_ns: Count
    logical: Annotated[int, Meta(ge=0, le=limits.MAX_LOGICAL)]
    ops: Annotated[tuple[Operation, ...], Meta(max_length=limits.MAX_OPS_PER_UPDATE)]
    deps: Annotated[tuple[Dot, ...], Meta(max_length=limits.MAX_DEPENDENCIES)] = ()

    def stamp(self, node: NodeId) -> Timestamp:
        """The stamp, given the node of the origin."""
        return Timestamp(self.wall_ns, self.logical, node)


_UPDATE_NBYTES: Final = 32
_OP_NBYTES: Final = 64
_DEP_NBYTES: Final = 32
_NODE_NBYTES: Final = 24
ROW_NBYTES: Final = 96
"""One `RaiseCount`."""


def estimated_nbytes(update: Update) -> int:
    """Bytes of an update on the wire, from above for names of usual length; for bounds, where encoding would cost
    more than it is worth."""
    ops = update.ops
    if len(ops) == 1 and not update.deps and isinstance(op := ops[0], BlocksStored):
        # By far the most common update, and this is called for every one.
        return _UPDATE_NBYTES + _OP_NBYTES + len(op.hashes) + len(op.checks)
    total = _UPDATE_NBYTES + _DEP_NBYTES * len(update.deps)
    for op in ops:
        if isinstance(op, BlocksStored):
            total += _OP_NBYTES + len(op.hashes) + len(op.checks)
        elif isinstance(op, BlocksRemoved):
            total += _OP_NBYTES + len(op.hashes)
        elif isinstance(op, EntryWritten):
            total += _OP_NBYTES + len(op.request_id) + _NODE_NBYTES * len(op.nodes)
        elif isinstance(op, ScopesRaised):
            total += _OP_NBYTES + HASH_BYTES * len(op.scopes)
        elif isinstance(op, ScopesRestored):
            total += _OP_NBYTES + ROW_NBYTES * len(op.rows)
        else:
            total += _OP_NBYTES
    return total


class Run(_Struct, frozen=True):
    """Consecutive blocks of one sequence, as a node reports them.

    `epoch` is for blocks that outlived a restart: the purges of their namespace that were known when they were made
    (`namespace_epoch`, to be kept beside them). None: they are made now.
    """

    namespace: NamespaceRef
    tier: Tier
    start: int
    hashes: bytes
    checks: bytes
    shape: bytes = b""
    epoch: int | None = None


def pack_run(namespace: NamespaceRef, tier: Tier, start: int, blocks: Sequence[BlockHash], shape: bytes = b"") -> Run:
    """A run from block hashes; `start` is the position of the first."""
    hashes, checks = pack_hashes(block.sequence for block in blocks), pack_checks(block.check for block in blocks)
    return Run(namespace, tier, start, hashes, checks, shape)


def pack_hashes(hashes: Iterable[bytes]) -> bytes:
    """Sequence hashes as one column."""
    return b"".join(hashes)


def pack_checks(checks: Iterable[int]) -> bytes:
    """Second hashes as one column."""
    values = list(checks)
    return struct.pack(f"<{len(values)}I", *values)


def unpack_hashes(column: bytes) -> tuple[bytes, ...]:
    """The sequence hashes of a column."""
    count = len(column) // HASH_BYTES
    return (column,) if count == 1 else _layouts(count)[0].unpack(column)


def unpack_checks(column: bytes) -> tuple[int, ...]:
    """The second hashes of a column."""
    return _layouts(len(column) // CHECK_BYTES)[1].unpack(column)


@lru_cache(maxsize=limits.MAX_BLOCKS_PER_RUN)
def _layouts(count: int) -> tuple[struct.Struct, struct.Struct]:
    return struct.Struct("16s" * count), struct.Struct(f"<{count}I")

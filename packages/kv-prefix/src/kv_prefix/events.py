"""What a pool tells its node: blocks were stored, blocks were removed, and why.

The node publishes these as claims. Events come in the order in which they happened; a removal always comes tail first,
so whoever follows them never sees a block without its parent for longer than one event.
"""

from dataclasses import dataclass
from enum import Enum, IntEnum

import msgspec

from kv_core.block import BlockRef
from kv_core.hashing import BlockHash, Extra


class Tier(IntEnum):
    """Where the bytes of a block lie, fastest first."""

    DEVICE = 0
    HOST = 1
    DISK = 2
    REMOTE = 3


class RemovalReason(Enum):
    """Why a block is no longer held."""

    EVICTED = "evicted"
    PURGED = "purged"
    CHECK_FAILED = "check failed"
    EXPIRED = "expired"
    PARENT_REMOVED = "parent removed"


@dataclass(frozen=True, slots=True)
class BlocksStored:
    """Consecutive full blocks of one prefix became readable.

    Attributes:
        namespace: digest of the namespace, 16 bytes.
        first_block_idx: position of the first of them in its sequence.
        parent: hash of the block before the first, None at position 0.
        tokens: their tokens, uint32 little-endian, `len(block_hashes) * block_size` of them.
        extras: content behind placeholder tokens of these blocks; empty for plain text.
        refs: per block, where it lies.
    """

    namespace: bytes
    first_block_idx: int
    parent: BlockHash | None
    block_hashes: tuple[BlockHash, ...]
    tokens: bytes
    extras: tuple[Extra, ...]
    refs: tuple[BlockRef, ...]


class BlockRemoved(msgspec.Struct, frozen=True, gc=False):
    """One full block stopped being readable under its hash.

    Attributes:
        needed_by: of an evicted block, who was given its slot; empty when room was made ahead of need.
    """

    namespace: bytes
    block_idx: int
    block_hash: BlockHash
    reason: RemovalReason
    needed_by: str = ""


PoolEvent = BlocksStored | BlockRemoved

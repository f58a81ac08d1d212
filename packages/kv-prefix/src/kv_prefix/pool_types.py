"""What a block pool answers with."""

from dataclasses import dataclass

from kv_core.block import BlockRef
from kv_core.hashing import BlockHash
from kv_prefix.pins import Receipt


@dataclass(frozen=True, slots=True)
class PoolStats:
    """A snapshot; `free + cached + pinned == total`. The rest counts since the pool was made.

    Attributes:
        pinned: slots that are held, or whose content is the beginning of a prefix that is held further down.
        leases: read leases that are out.
        operator_pins: blocks under operators' pins.
        evicted: blocks evicted for lack of room.
        deduplicated: blocks that were computed though their content was held already.
        collisions: blocks not shared because other content holds their hash.
        orphaned: blocks not shared because their parent no longer was (purged or dropped meanwhile).
        copies: copy-on-write copies asked for.
        retained: blocks that requests asked to keep for a while.
    """

    total: int
    free: int
    cached: int
    pinned: int
    leases: int
    operator_pins: int
    evicted: int
    deduplicated: int
    collisions: int
    orphaned: int
    copies: int
    retained: int = 0


@dataclass(frozen=True, slots=True)
class PartialMatch:
    """The first `num_tokens` tokens in `ref`, less than a block, continue the match. To use them, copy the block."""

    ref: BlockRef
    num_tokens: int


@dataclass(frozen=True, slots=True)
class PoolMatch:
    """The longest prefix of a prompt that the pool holds; names blocks but does not hold them.

    Attributes:
        namespace: digest of the namespace that was asked.
        block_hashes: of the matched full blocks, from block 0.
        refs: where they lie.
        partial: what of the block after them is held too.
        num_tokens: matched tokens, partial ones included; always less than the prompt's.
    """

    namespace: bytes
    block_hashes: tuple[BlockHash, ...]
    refs: tuple[BlockRef, ...]
    partial: PartialMatch | None
    num_tokens: int


@dataclass(frozen=True, slots=True)
class CopyBlock:
    """Copy the first `num_tokens` tokens of `src` to `dst` (none when 0), then give `receipt` back: it keeps `src`."""

    src: BlockRef
    dst: BlockRef
    num_tokens: int
    receipt: Receipt


@dataclass(frozen=True, slots=True)
class Opened:
    """A request's table was opened.

    Attributes:
        table: give it back with `release`.
        refs: where the table's blocks lie, matched ones first.
        num_matched_tokens: tokens that need not be computed, those of a matched partial block included.
        copy: to be performed before the block after the full matched ones is written; None when there is none.
    """

    table: Receipt
    refs: tuple[BlockRef, ...]
    num_matched_tokens: int
    copy: CopyBlock | None


@dataclass(frozen=True, slots=True)
class Lease:
    """A remote reader's right to read `refs` until `receipt.until_ns`."""

    receipt: Receipt
    refs: tuple[BlockRef, ...]
    block_hashes: tuple[BlockHash, ...]

"""The slots of one arena: which are free, which hold reusable blocks, who holds them.

The pool decides; it never touches memory, and knows slots and generations only. One node's actor owns it and calls it
from one place. Blocks are found by hash and then by comparing the tokens of the whole prefix from block 0.

B1: `free + cached + pinned == total`, at every step. Cached: committed content, no holder, evictable. Pinned: held by
    at least one receipt. Free: neither.
B2: a slot's generation is raised when the slot is handed out, before its first new byte can be written.
B3: a committed block's parent is committed too: eviction takes leaves, removal takes the whole subtree. So a match is
    a walk, and no hole can be counted.
B4: equal content (namespace, tokens of the whole prefix, extras) is committed once; a second copy is given back.
B5: `match` changes nothing. Calls that fail change nothing.
B6: a block that someone else can read is never written: whoever appends copies first.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from kv_core.block import BlockRef
from kv_core.hashing import BlockHash, Extra, Tokens
from kv_core.ids import NodeId, RegionId
from kv_prefix.events import PoolEvent, RemovalReason
from kv_prefix.eviction import EvictionPolicy
from kv_prefix.pins import HoldInfo, Receipt


@dataclass(frozen=True, slots=True)
class PoolStats:
    """A snapshot; `free + cached + pinned == total`. The rest counts since the pool was made."""

    total: int
    free: int
    cached: int
    pinned: int
    leases: int
    operator_pins: int
    evicted: int
    deduplicated: int
    collisions: int
    copies: int


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
    """Copy the first `num_tokens` tokens of `src` to `dst`, then give `receipt` back: it keeps `src` in place."""

    src: BlockRef
    dst: BlockRef
    num_tokens: int
    receipt: Receipt


@dataclass(frozen=True, slots=True)
class Opened:
    """A request's table was opened. `copy` must be performed before the table's block after the match is used."""

    table: Receipt
    refs: tuple[BlockRef, ...]
    num_matched: int
    copy: CopyBlock | None


@dataclass(frozen=True, slots=True)
class Lease:
    """A remote reader's right to read `refs` until `receipt.until_ns`."""

    receipt: Receipt
    refs: tuple[BlockRef, ...]
    block_hashes: tuple[BlockHash, ...]


class BlockPool:
    """The slots of one arena.

    Args:
        num_slots: slots of the arena, at least 1.
        block_size: tokens per block.
        region: the arena's region, put into every reference.
        policy: eviction strategy over `num_slots` slots; `adaptive` when None.
        pin_quota: blocks that operators may pin; half the pool when None.
    """

    def __init__(
        self,
        num_slots: int,
        block_size: int,
        *,
        region: RegionId,
        policy: EvictionPolicy | None = None,
        pin_quota: int | None = None,
    ) -> None:
        raise NotImplementedError

    def match(
        self,
        namespace: bytes,
        block_hashes: Sequence[BlockHash],
        tokens: Tokens,
        extras: Sequence[Extra] = (),
    ) -> PoolMatch:
        """The longest prefix of the prompt `tokens` held here; the last token is never matched. Changes nothing.

        Args:
            block_hashes: of the prompt's full blocks, from block 0.
            tokens: the whole prompt, as integers or as a uint32 little-endian buffer.
            extras: content behind placeholder tokens, with positions in the sequence.
        """
        raise NotImplementedError

    def open(self, owner: str, match: PoolMatch | None = None, num_new: int = 0, *, use_partial: bool = True) -> Opened:
        """Open a request's table on `match` plus `num_new` fresh slots; all or nothing.

        The matched partial block, if any and wanted, is the first of the fresh slots and comes with a copy to perform
        (`num_new` must then be at least 1).

        Raises:
            NoSpaceError: not enough slots are free or evictable; nothing was changed.
            StaleMatchError: a matched block was evicted since; match again.
        """
        raise NotImplementedError

    def append(self, table: Receipt, num_new: int = 1) -> tuple[BlockRef, ...]:
        """Add `num_new` fresh slots to the end of a table; all or nothing.

        Raises:
            NoSpaceError: not enough slots are free or evictable; nothing was changed.
            UnknownReceiptError: the table was released.
        """
        raise NotImplementedError

    def commit(
        self,
        table: Receipt,
        namespace: bytes,
        first_block_idx: int,
        block_hashes: Sequence[BlockHash],
        tokens: Tokens,
        extras: Sequence[Extra] = (),
    ) -> tuple[BlockRef, ...]:
        """Make full, written blocks of a table findable under their hashes; returns where each lies from now on.

        A block whose content is held already is not stored twice: the table gets the held one, its own slot is freed
        (unless someone else holds that too), and the returned reference differs from the one handed out.
        Blocks before `first_block_idx` must be committed.

        Raises:
            BlockMismatchError: counts, sizes or order do not fit the table; nothing was changed.
            UnknownReceiptError: the table was released.
        """
        raise NotImplementedError

    def commit_tail(self, table: Receipt, tokens: Tokens) -> None:
        """State the tokens of the table's last, part-filled block, so that it can be found by token comparison."""
        raise NotImplementedError

    def fork(self, table: Receipt, owner: str) -> Opened:
        """A second table over the same blocks, by reference; nothing is copied until one of the two appends."""
        raise NotImplementedError

    def prepare_append(self, table: Receipt) -> CopyBlock | None:
        """To be called before writing into the table's last block: the copy to make first, or None when it is unshared.

        Raises:
            NoSpaceError: there is no slot to copy to; nothing was changed.
        """
        raise NotImplementedError

    def refs(self, table: Receipt) -> tuple[BlockRef, ...]:
        """Where a table's blocks lie, in order."""
        raise NotImplementedError

    def release(self, receipt: Receipt) -> None:
        """Give back a table, lease, pin or copy source. Committed blocks stay, evictable tail first; others are freed.

        Raises:
            UnknownReceiptError: it was given back already.
        """
        raise NotImplementedError

    def lease(
        self,
        reader: NodeId,
        namespace: bytes,
        prefix_hash: BlockHash,
        token_digest: bytes,
        *,
        until_ns: int,
        first_block_idx: int = 0,
    ) -> Lease:
        """Let `reader` read the blocks `first_block_idx ..` of the prefix that ends in `prefix_hash`.

        Args:
            token_digest: `kv_core.hashing.token_digest` over all tokens and extras of the prefix from block 0, as the
                reader knows them; compared with the same over the stored tokens.

        Raises:
            NotHeldError: the prefix is not here.
            DigestMismatchError: it is, but with other tokens.
            LeaseLimitError: too many leases are out.
        """
        raise NotImplementedError

    def renew(self, receipt: Receipt, until_ns: int) -> Receipt:
        """Move a lease's end; the new receipt replaces the old.

        Raises:
            LeaseExpiredError: it has ended already.
        """
        raise NotImplementedError

    def expire(self, now_ns: int) -> list[Receipt]:
        """End every lease whose time has passed; returns them."""
        raise NotImplementedError

    def hold(self, owner: str, refs: Sequence[BlockRef]) -> Receipt:
        """Keep slots in place while they are copied elsewhere (outgoing transfer, spill).

        Raises:
            StaleMatchError: one of them was handed out again since.
        """
        raise NotImplementedError

    def pin(self, owner: str, match: PoolMatch) -> Receipt:
        """Keep a matched prefix resident until released, within the quota.

        Raises:
            PinQuotaExceededError: the quota is used up; nothing was changed.
            StaleMatchError: a matched block was evicted since.
        """
        raise NotImplementedError

    def drop(self, block_hash: BlockHash, reason: RemovalReason = RemovalReason.CHECK_FAILED) -> int:
        """Make a block and everything built on it unfindable; returns how many blocks that were.

        Held slots stay with their holders until they give them back.
        """
        raise NotImplementedError

    def purge(self, namespace: bytes | None = None) -> int:
        """Drop every block of a namespace (of all when None); returns how many."""
        raise NotImplementedError

    def take_events(self) -> list[PoolEvent]:
        """What happened since the last call, in order."""
        raise NotImplementedError

    def holds(self) -> list[HoldInfo]:
        """Every live receipt: who holds how much, and until when."""
        raise NotImplementedError

    def stats(self) -> PoolStats:
        """Counts of slots by state and of what happened."""
        raise NotImplementedError

    def check(self) -> None:
        """Assert every invariant; O(total), for tests and for a node's self-check."""
        raise NotImplementedError

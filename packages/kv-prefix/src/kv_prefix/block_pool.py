"""The slots of one arena: which are free, which hold reusable blocks, who holds them.

The pool decides; it never touches memory, and knows slots and generations only. One node's actor owns it and calls it
from one place. Blocks are found by hash and then by comparing the tokens of the whole prefix from block 0.

B1: `free + cached + pinned == total`, at every step. Pinned: held by a receipt, or the beginning of a prefix that is
    held further down. Cached: committed content and not pinned, so evictable. Free: neither.
B2: a slot's generation is raised when the slot is handed out, before its first new byte can be written.
B3: a committed block's parent is committed too: eviction takes leaves, removal takes the whole subtree. So a match is
    a walk, and no hole can be counted.
B4: equal content (namespace, tokens of the whole prefix, extras) is committed once; a second copy is given back.
B5: `match` changes nothing. Calls that fail change nothing.
B6: a block that someone else can read is never written: whoever appends copies first.
"""

from collections.abc import Iterator, Sequence
from itertools import chain

from kv_core.block import BlockRef
from kv_core.hashing import TOKEN_BYTES, BlockHash, Extra, Tokens, token_bytes
from kv_prefix.committing import Outcome, commit_blocks, require_fit, runs
from kv_prefix.errors import BlockMismatchError, InvalidRequestError
from kv_prefix.events import BlocksStored, PoolEvent, RemovalReason
from kv_prefix.matching import continue_partially, extras_by_block, walk
from kv_prefix.pins import HoldKind, Receipt, Tail
from kv_prefix.pool_holds import PoolHolds
from kv_prefix.pool_types import CopyBlock, Opened, PartialMatch, PoolMatch, PoolStats
from kv_prefix.quotas import AccountStats
from kv_prefix.slots import ROOT


class BlockPool(PoolHolds):
    """The slots of one arena; made with the arguments of `PoolHolds`."""

    def match(
        self,
        namespace: bytes,
        block_hashes: Sequence[BlockHash],
        tokens: Tokens,
        extras: Sequence[Extra] = (),
    ) -> PoolMatch:
        """The longest prefix of the prompt `tokens` held here; the last token is never matched. Changes nothing.

        Args:
            namespace: digest of the prompt's namespace.
            block_hashes: of the prompt's full blocks, from block 0.
            tokens: the whole prompt, as integers or as a uint32 little-endian buffer.
            extras: content behind placeholder tokens, with positions in the sequence.
        """
        raw = token_bytes(tokens)
        num_usable = max(len(raw) // TOKEN_BYTES - 1, 0)
        num_blocks = min(num_usable // self.block_size, len(block_hashes))
        extras_of = extras_by_block(extras, 0, num_blocks + 1, self.block_size)
        matched = walk(self._slots, namespace, block_hashes[:num_blocks], raw, extras_of)
        beyond = continue_partially(self._slots, namespace, matched, raw[: num_usable * TOKEN_BYTES], extras_of)
        return PoolMatch(
            namespace,
            tuple(block_hashes[: len(matched)]),
            self._refs(matched),
            PartialMatch(self._ref(beyond[0]), beyond[1]) if beyond else None,
            len(matched) * self.block_size + (beyond[1] if beyond else 0),
        )

    def open(self, owner: str, match: PoolMatch | None = None, num_new: int = 0, *, use_partial: bool = True) -> Opened:
        """Open a request's table on `match` plus `num_new` fresh slots; all or nothing.

        The matched partial block is used if wanted and if `num_new` is at least 1: it is then the first block after
        the full ones, and comes with a copy to perform unless nobody else could still read it.

        Raises:
            NoSpaceError: not enough slots are free or evictable, or the tenant may have no more; nothing was changed.
            StaleMatchError: a matched block was evicted since; match again.
        """
        matched, source, adopt, account = self._plan_open(match, num_new, use_partial=use_partial)
        partial = match.partial if match and source else None
        hold = self._holds.add(HoldKind.TABLE, owner, matched)
        hold.num_committed, hold.account = len(matched), account
        self._acquire(matched)
        self._acquire(source)
        if adopt:
            self._slots.withdraw(source[0])
            self._slots.generation[source[0]] += 1
            hold.slots.extend(source)
        hold.slots.extend(self._slots.take(num_new - adopt, account, owner))
        num_tokens = hold.num_committed * self.block_size + (partial.num_tokens if partial else 0)
        copy = None
        if partial is not None and not adopt:
            copy = self._copy(owner, source[0], hold.slots[hold.num_committed], partial.num_tokens)
        return Opened(hold.receipt, self._refs(hold.slots), num_tokens, copy)

    def require_open(self, match: PoolMatch | None = None, num_new: int = 0, *, use_partial: bool = True) -> None:
        """Check that `open` with these would succeed just now; changes nothing.

        Raises:
            NoSpaceError, StaleMatchError: as `open`.
        """
        self._plan_open(match, num_new, use_partial=use_partial)

    def append(self, table: Receipt, num_new: int = 1) -> tuple[BlockRef, ...]:
        """Add `num_new` fresh slots to the end of a table; all or nothing.

        Raises:
            NoSpaceError: not enough slots are free or evictable; nothing was changed.
            UnknownReceiptError: the table was released.
        """
        if num_new < 0:
            raise InvalidRequestError(name="num_new", value=num_new, rule="need 0 or more")
        hold = self._holds.get(table, HoldKind.TABLE)
        taken = self._slots.take(num_new, hold.account, hold.receipt.owner)
        hold.slots.extend(taken)
        hold.tail = None
        return self._refs(taken)

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
        (unless someone else holds that too), and the returned reference differs from the one handed out. A block that
        cannot be shared (its hash is taken by other content, or its parent was purged meanwhile) stays the table's own.

        Args:
            first_block_idx: position of the first of them; every block before it must have been committed.
            tokens: of these blocks only.
            extras: content behind placeholder tokens, with positions in the sequence.

        Raises:
            BlockMismatchError: counts, sizes or order do not fit the table; nothing was changed.
            UnknownReceiptError: the table was released.
        """
        hold = self._holds.get(table, HoldKind.TABLE)
        raw = token_bytes(tokens)
        end = first_block_idx + len(block_hashes)
        require_fit(self._slots, hold, namespace, first_block_idx, block_hashes, len(raw))
        extras_of = extras_by_block(extras, first_block_idx, end, self.block_size)
        stored = commit_blocks(
            self._slots, hold, namespace, first_block_idx, block_hashes, raw, extras_of, self._outcomes
        )
        hold.num_committed = max(hold.num_committed, end)
        hold.tail = None
        refs = self._refs(hold.slots[first_block_idx:end])
        for run in stored:
            told = refs[run.start - first_block_idx : run.stop - first_block_idx]
            self._slots.events.append(self._stored_event(hold.slots[run.start : run.stop], told))
        return refs

    def commit_tail(self, table: Receipt, namespace: bytes, tokens: Tokens, extras: Sequence[Extra] = ()) -> None:
        """State the tokens in a table's last, part-filled block: once the table is released, others can match them.

        Raises:
            BlockMismatchError: the block before it was not committed, or `tokens` fill the block.
            UnknownReceiptError: the table was released.
        """
        hold = self._holds.get(table, HoldKind.TABLE)
        raw = token_bytes(tokens)
        last = len(hold.slots) - 1
        if hold.num_committed != last or len(raw) >= self._slots.block_nbytes:
            raise BlockMismatchError(
                detail=f"a tail of {len(raw) // TOKEN_BYTES} tokens after {hold.num_committed} full blocks "
                f"in a table of {last + 1}"
            )
        touching = extras_by_block(extras, last, last + 1, self.block_size).get(last, ())
        hold.tail = Tail(namespace, raw, touching) if raw else None

    def fork(self, table: Receipt, owner: str, num_tokens: int) -> Opened:
        """A second table over the blocks that hold the first `num_tokens` tokens, by reference.

        Nothing is copied until one of the two writes behind them (`prepare_append`).

        Raises:
            BlockMismatchError: the table has no room for that many tokens.
            UnknownReceiptError: the table was released.
        """
        source = self._holds.get(table, HoldKind.TABLE)
        num_blocks = -(-num_tokens // self.block_size)
        if not 0 <= num_blocks <= len(source.slots):
            raise BlockMismatchError(detail=f"{num_tokens} tokens in a table of {len(source.slots)} blocks")
        hold = self._holds.add(HoldKind.TABLE, owner, source.slots[:num_blocks])
        self._acquire(hold.slots)
        hold.num_committed, hold.account = min(source.num_committed, num_tokens // self.block_size), source.account
        return Opened(hold.receipt, self._refs(hold.slots), num_tokens, None)

    def prepare_append(self, table: Receipt, num_tokens: int) -> CopyBlock | None:
        """Before writing behind the first `num_tokens` tokens of a table: the copy to make first, if any.

        None means that nobody else can read the block that comes to be written, so it may be written in place.

        Raises:
            NoSpaceError: there is no slot to copy to; nothing was changed.
            BlockMismatchError: the table has no block for the next token.
            UnknownReceiptError: the table was released.
        """
        hold = self._holds.get(table, HoldKind.TABLE)
        block_idx, num_kept = divmod(num_tokens, self.block_size)
        if not 0 <= block_idx < len(hold.slots):
            raise BlockMismatchError(detail=f"no block behind {num_tokens} tokens in a table of {len(hold.slots)}")
        source = hold.slots[block_idx]
        if self._slots.refs[source] > 1 or self._slots.committed[source]:
            (hold.slots[block_idx],) = self._slots.take(1, hold.account, hold.receipt.owner)
            hold.num_committed = min(hold.num_committed, block_idx)
            hold.tail = None
            # The table's own reference to the source becomes the copy's.
            return self._copy(hold.receipt.owner, source, hold.slots[block_idx], num_kept)
        hold.tail = None
        return None

    def drop(self, block_hash: BlockHash, reason: RemovalReason = RemovalReason.CHECK_FAILED) -> int:
        """Make a block and everything built on it unfindable; returns how many blocks that were.

        Held slots stay with their holders until they give them back.
        """
        slot = self._slots.find(block_hash.sequence)
        if slot is None or self._slots.hash[slot] != block_hash:
            return 0
        return self._slots.remove_subtree(slot, reason)

    def purge(self, namespace: bytes | None = None) -> int:
        """Drop every block of a namespace (of all when None); returns how many."""
        return sum(self._slots.remove_subtree(root, RemovalReason.PURGED) for root in self._slots.roots(namespace))

    def has_any(self, namespace: bytes) -> bool:
        """Whether a block of that namespace can be found."""
        return bool(self._slots.roots(namespace))

    def evict(self, most: int) -> int:
        """Evict up to so many blocks that nobody holds, ahead of need; returns how many."""
        return self._slots.evict(most)

    def take_events(self) -> list[PoolEvent]:
        """What happened since the last call, in order. Call it after every call: nothing else empties the list."""
        events, self._slots.events = self._slots.events, []
        return events

    def snapshot(self) -> Iterator[BlocksStored]:
        """Every findable block, parents first, as if it had just been stored: for a peer that starts from nothing."""
        full = (slot for slot in self._slots.committed_slots() if self._slots.hash[slot] is not None)
        return (self._stored_event(run, self._refs(run)) for run in runs(self._slots, full))

    def stats(self) -> PoolStats:
        """Counts of slots by state and of what happened."""
        return PoolStats(
            total=self._slots.total,
            free=self._slots.num_free,
            cached=self._slots.num_cached,
            pinned=self._slots.num_pinned,
            leases=self._holds.num_leases,
            operator_pins=len(self._operator_pins),
            evicted=self._slots.num_evicted,
            deduplicated=self._outcomes[Outcome.DEDUPLICATED],
            collisions=self._outcomes[Outcome.COLLIDED],
            orphaned=self._outcomes[Outcome.ORPHANED],
            copies=self._num_copies,
            retained=self._retention.num_retained,
        )

    def account(self, namespace: bytes) -> int:
        """The number of the account that a namespace is charged to; 0: none."""
        return self._quotas.number(namespace) if self._quotas is not None else 0

    def accounts(self) -> dict[str, AccountStats]:
        """What each tenant with an account holds; empty without accounts."""
        return self._quotas.stats() if self._quotas is not None else {}

    def check(self) -> None:
        """Assert every invariant; O(total), for tests and for a node's self-check."""
        self._slots.check([slot for hold in self._holds for slot in hold.slots])

    def _plan_open(
        self, match: PoolMatch | None, num_new: int, *, use_partial: bool
    ) -> tuple[list[int], list[int], bool, int]:
        """Matched slots, the part-filled one to go on from, whether that is continued in place, and who is charged."""
        if num_new < 0:
            raise InvalidRequestError(name="num_new", value=num_new, rule="need 0 or more")
        matched = self._resolve_match(match) if match else []
        partial = match.partial if match and use_partial and num_new else None
        source = self._resolve((partial.ref,), findable=True) if partial else []
        # A part-filled block that nobody holds is continued where it lies: its tokens stay, and no copy is needed.
        adopt = partial is not None and self._may_adopt(source[0], partial.num_tokens)
        account = self.account(match.namespace) if match else 0
        self._slots.require(num_new - adopt, (*matched, *source), account)
        return matched, source, adopt, account

    def _may_adopt(self, slot: int, num_tokens: int) -> bool:
        nbytes = len(self._slots.tokens[slot])
        return self._slots.hash[slot] is None and self._slots.is_cached(slot) and num_tokens * TOKEN_BYTES == nbytes

    def _copy(self, owner: str, source: int, target: int, num_tokens: int) -> CopyBlock:
        """Ask for a copy; the caller has acquired `source` for it."""
        copying = self._holds.add(HoldKind.COPY, owner, [source])
        self._num_copies += 1
        return CopyBlock(self._ref(source), self._ref(target), num_tokens, copying.receipt)

    def _stored_event(self, run: list[int], refs: tuple[BlockRef, ...]) -> BlocksStored:
        slots = self._slots
        parent = slots.parent[run[0]]
        hashes = map(slots.hash.__getitem__, run)
        touching = (slots.extras[slot] for slot in run if slot in slots.extras) if slots.extras else ()
        return BlocksStored(
            namespace=slots.namespace[run[0]],
            first_block_idx=slots.depth[run[0]],
            parent=None if parent == ROOT else slots.hash[parent],
            block_hashes=tuple([block_hash for block_hash in hashes if block_hash is not None]),
            tokens=b"".join([slots.tokens[slot] for slot in run]),
            extras=tuple(dict.fromkeys(chain.from_iterable(touching))),
            refs=refs,
        )

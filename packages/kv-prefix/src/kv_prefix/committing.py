"""When a written block becomes findable, and under which slot.

Works on the slot table for one table of one request. Equal content is stored once: the request then gets the slot that
holds it already. Content that cannot be named safely stays the request's own, which costs memory and never correctness.
"""

from collections.abc import Iterable, Iterator, Sequence
from enum import Enum

from kv_core.hash_chain import split_blocks
from kv_core.hashing import TOKEN_BYTES, BlockHash, Extra
from kv_prefix.errors import BlockMismatchError
from kv_prefix.matching import ExtrasOf, is_same
from kv_prefix.pins import Hold, Tail
from kv_prefix.slots import ROOT, SlotTable


class Outcome(Enum):
    """What became of one block that was to be committed."""

    STORED = "stored"
    KNOWN = "committed before"
    DEDUPLICATED = "held already, own copy given back"
    COLLIDED = "other content holds its hash"
    ORPHANED = "its parent is not findable any more"


def require_fit(
    slots: SlotTable, hold: Hold, namespace: bytes, first: int, block_hashes: Sequence[BlockHash], nbytes: int
) -> None:
    """Check that `block_hashes` with `nbytes` of tokens can be committed at position `first` of a table.

    Raises:
        BlockMismatchError: they cannot.
    """
    end = first + len(block_hashes)
    if not 0 <= first <= hold.num_committed or end > len(hold.slots):
        raise BlockMismatchError(
            detail=f"blocks {first}..{end} of a table of {len(hold.slots)}, {hold.num_committed} committed"
        )
    if nbytes != len(block_hashes) * slots.block_nbytes:
        raise BlockMismatchError(
            detail=f"{nbytes // TOKEN_BYTES} tokens for {len(block_hashes)} blocks of {slots.block_size}"
        )
    for slot, block_hash in zip(hold.slots[first:end], block_hashes, strict=True):
        if slots.committed[slot] and slots.hash[slot] != block_hash:
            raise BlockMismatchError(detail=f"slot {slot} is committed under another hash")
    parent = hold.slots[first - 1] if first else ROOT
    if parent != ROOT and slots.committed[parent] and slots.namespace[parent] != namespace:
        raise BlockMismatchError(detail="the block before is of another namespace")


def commit_blocks(
    slots: SlotTable,
    hold: Hold,
    namespace: bytes,
    first: int,
    block_hashes: Sequence[BlockHash],
    raw: bytes,
    extras_of: ExtrasOf,
    outcomes: dict[Outcome, int],
) -> list[range]:
    """`commit_block` for each block from position `first` on; what follows a stored one goes in together with it.

    Args:
        raw: their tokens.
        outcomes: how often each came about, which is counted on.

    Returns the positions of the blocks that were stored, as runs in which each follows the one before.
    """
    hashes = list(block_hashes)
    pieces = split_blocks(raw, slots.block_nbytes) if len(hashes) > 1 else [raw]
    stored: list[range] = []
    i = 0
    while i < len(hashes):
        block_idx = first + i
        touching = extras_of.get(block_idx, ())
        outcome = commit_block(slots, hold, namespace, block_idx, hashes[i], pieces[i], touching)
        count = 1
        if outcome is Outcome.STORED:
            if i + 1 < len(hashes):
                count += slots.commit_behind(hold.slots, block_idx + 1, hashes[i + 1 :], pieces[i + 1 :], extras_of)
            stored.append(range(block_idx, block_idx + count))
        outcomes[outcome] += count
        i += count
    return stored


def commit_block(
    slots: SlotTable,
    hold: Hold,
    namespace: bytes,
    block_idx: int,
    block_hash: BlockHash,
    tokens: bytes,
    extras: tuple[Extra, ...],
) -> Outcome:
    """Commit one block of a table; a duplicate is replaced in the table by the slot that holds the content."""
    slot = hold.slots[block_idx]
    parent = hold.slots[block_idx - 1] if block_idx else ROOT
    if slots.committed[slot]:
        return Outcome.KNOWN
    if parent != ROOT and not slots.committed[parent]:
        return Outcome.ORPHANED
    held = slots.find(block_hash.sequence)
    if held is None:
        slots.commit(slot, parent, namespace, tokens, extras, block_hash)
        return Outcome.STORED
    if not is_same(slots, held, parent, namespace, block_hash, tokens, extras):
        return Outcome.COLLIDED
    slots.acquire(held)
    slots.touch((held,))
    hold.slots[block_idx] = held
    slots.release(slot)
    return Outcome.DEDUPLICATED


def keep_tail(slots: SlotTable, table: Sequence[int], tail: Tail) -> None:
    """Make a part-filled last block findable, unless it adds nothing to what is findable, or somebody shares it."""
    parent = table[-2] if len(table) > 1 else ROOT
    if slots.refs[table[-1]] > 1 or (parent != ROOT and not slots.committed[parent]):
        return
    closest = slots.closest_child(parent, tail.namespace, tail.tokens)
    if closest is None or closest[1] * TOKEN_BYTES < len(tail.tokens):
        slots.commit(table[-1], parent, tail.namespace, tail.tokens, tail.extras, None)


def runs(slots: SlotTable, committed: Iterable[int]) -> Iterator[list[int]]:
    """Committed slots cut into runs in which each block follows the one before."""
    run: list[int] = []
    for slot in committed:
        if run and slots.parent[slot] != run[-1]:
            yield run
            run = []
        run.append(slot)
    if run:
        yield run

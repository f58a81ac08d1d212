"""When stored content is the content that was asked for.

Reads the slot table, changes nothing. A hash only proposes: a block counts as held when its second hash, its tokens,
its extras and its parent agree too, and the parent did so before it. Hashes may therefore collide without harm.

M1: what `walk` returns is a path from block 0, each block's parent the one before it.
M2: two blocks with different extras (two pictures behind the same placeholder tokens) never match.
"""

from collections.abc import Iterable, Mapping, Sequence

from kv_core.hashing import TOKEN_BYTES, BlockHash, Extra, Tokens, token_bytes, token_digest
from kv_prefix.slots import ROOT, SlotTable

ExtrasOf = Mapping[int, tuple[Extra, ...]]
"""By block position: the extras that touch the block."""


def prefix_digest(tokens: Tokens, extras: Sequence[Extra], num_tokens: int) -> bytes:
    """What a reader sends to lease the first `num_tokens` of a prompt: the digest of these and what begins in them."""
    raw = token_bytes(tokens)[: num_tokens * TOKEN_BYTES]
    return token_digest(raw, [extra for extra in extras if extra.start < num_tokens])


def stored_digest(slots: SlotTable, chain: Sequence[int]) -> bytes:
    """`prefix_digest` of what is stored in a path from block 0."""
    extras = dict.fromkeys(extra for slot in chain for extra in slots.extras.get(slot, ()))
    return token_digest(b"".join([slots.tokens[slot] for slot in chain]), tuple(extras))


def extras_by_block(extras: Iterable[Extra], first_block_idx: int, end_block_idx: int, block_size: int) -> ExtrasOf:
    """The extras that touch each block of `[first_block_idx, end_block_idx)`, in order of position."""
    by_block: dict[int, tuple[Extra, ...]] = {}
    for extra in sorted(extras, key=lambda extra: (extra.start, extra.digest)):
        first = max(extra.start // block_size, first_block_idx)
        end = min((extra.start + extra.length - 1) // block_size + 1, end_block_idx)
        for block_idx in range(first, end):
            by_block[block_idx] = (*by_block.get(block_idx, ()), extra)
    return by_block


def is_same(
    slots: SlotTable,
    slot: int,
    parent: int,
    namespace: bytes,
    block_hash: BlockHash,
    tokens: bytes,
    extras: tuple[Extra, ...],
) -> bool:
    """Whether the block in `slot` is the one that follows `parent` with these tokens and extras."""
    return (
        slots.parent[slot] == parent
        and slots.tokens[slot] == tokens
        and slots.hash[slot] == block_hash
        and (parent != ROOT or slots.namespace[slot] == namespace)
        and slots.extras.get(slot, ()) == extras
    )


def walk(
    slots: SlotTable, namespace: bytes, block_hashes: Sequence[BlockHash], raw: bytes, extras_of: ExtrasOf
) -> list[int]:
    """The slots of the longest held path from block 0 along `block_hashes`, with the tokens `raw`."""
    nbytes = slots.block_nbytes
    matched: list[int] = []
    parent = ROOT
    for block_idx, block_hash in enumerate(block_hashes):
        slot = slots.find(block_hash.sequence)
        if slot is None:
            break
        tokens = raw[block_idx * nbytes : (block_idx + 1) * nbytes]
        if not is_same(slots, slot, parent, namespace, block_hash, tokens, extras_of.get(block_idx, ())):
            break
        matched.append(slot)
        parent = slot
    return matched


def continue_partially(
    slots: SlotTable, namespace: bytes, matched: Sequence[int], raw: bytes, extras_of: ExtrasOf
) -> tuple[int, int] | None:
    """A block that begins like the prompt goes on after `matched`, and for how many tokens (less than a block).

    Args:
        raw: the tokens of the prompt that may be matched.
    """
    block_idx = len(matched)
    rest = raw[block_idx * slots.block_nbytes : (block_idx + 1) * slots.block_nbytes]
    closest = slots.closest_child(matched[-1] if matched else ROOT, namespace, rest) if rest else None
    if closest is None:
        return None
    slot, num_tokens = closest
    start = block_idx * slots.block_size
    for extra in (*extras_of.get(block_idx, ()), *slots.extras.get(slot, ())):
        num_tokens = min(num_tokens, max(extra.start - start, 0))
    # A whole block is a matter for the hashes: they did not match, so its last token is left out.
    num_tokens = min(num_tokens, slots.block_size - 1)
    return (slot, num_tokens) if num_tokens else None

"""Pictures: content behind placeholder tokens, known by its hash.

In pool, lease, tier, index and explanation alike, two prompts that differ in a picture share what lies before it and
nothing behind, and the same picture twice is a full hit.
"""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kv_core.hashing import Extra, hash_tokens, token_bytes
from kv_core.ids import Incarnation, NodeId, RegionId
from kv_prefix.block_pool import BlockPool
from kv_prefix.errors import DigestMismatchError, NotHeldError
from kv_prefix.events import Tier
from kv_prefix.explain import Explainer, RemovalLog, Verdict
from kv_prefix.matching import extras_by_block, prefix_digest
from kv_prefix.prefix_index import Holder, PrefixIndex
from kv_prefix.tiers.blocks import TierBlock, chain_digest, pack_extras
from kv_prefix.tiers.catalog import TierCatalog
from tests.prefix.helpers_prefix import BLOCK_SIZE, NAMESPACES

NS = NAMESPACES[0]
PLACEHOLDER = 7
NUM_BLOCKS = 6
Prompt = tuple[list[int], tuple[Extra, ...]]


def prompt(start: int, length: int, picture: bytes) -> Prompt:
    """A text with a run of placeholders for one picture, of six blocks in all."""
    tokens = list(range(100, 100 + NUM_BLOCKS * BLOCK_SIZE))
    tokens[start : start + length] = [PLACEHOLDER] * length
    return tokens, (Extra(start, picture, length),)


def pool_with(one: Prompt) -> BlockPool:
    tokens, extras = one
    pool = BlockPool(16, BLOCK_SIZE, region=RegionId(0))
    opened = pool.open("request", None, NUM_BLOCKS)
    pool.commit(opened.table, NS.digest, 0, hash_tokens(NS, tokens, extras), tokens, extras)
    pool.release(opened.table)
    return pool


def in_pool(pool: BlockPool, one: Prompt) -> int:
    tokens, extras = one
    return len(pool.match(NS.digest, hash_tokens(NS, tokens, extras), [*tokens, 0], extras).refs)


def tier_with(one: Prompt) -> TierCatalog:
    tokens, extras = one
    raw, digest, parent, blocks = token_bytes(tokens), NS.digest, b"", []
    touching = extras_by_block(extras, 0, NUM_BLOCKS, BLOCK_SIZE)
    for i, name in enumerate(hash_tokens(NS, tokens, extras)):
        piece, packed = raw[i * 4 * BLOCK_SIZE : (i + 1) * 4 * BLOCK_SIZE], pack_extras(touching.get(i, ()))
        digest = chain_digest(digest, piece, packed)
        blocks.append(TierBlock(NS.digest, i, name.sequence, name.check, parent, digest, piece, packed, bytes(8)))
        parent = name.sequence
    catalog = TierCatalog(16)
    catalog.stored(catalog.plan_store(blocks), ok=True)
    return catalog


def in_tier(catalog: TierCatalog, one: Prompt) -> int:
    tokens, extras = one
    touching = extras_by_block(extras, 0, NUM_BLOCKS, BLOCK_SIZE)
    return len(catalog.match(NS.digest, hash_tokens(NS, tokens, extras), token_bytes(tokens), touching, 0))


def in_index(index: PrefixIndex, one: Prompt) -> int:
    found = index.lookup(hash_tokens(NS, *one))
    return found[0].num_blocks if found else 0


@settings(max_examples=60, deadline=None)
@given(st.integers(0, NUM_BLOCKS * BLOCK_SIZE - 1), st.integers(1, NUM_BLOCKS * BLOCK_SIZE))
def test_equal_before_the_picture_different_from_its_first_block_on_and_the_same_picture_hits(
    start: int, length: int
) -> None:
    length = min(length, NUM_BLOCKS * BLOCK_SIZE - start)
    cat, dog = prompt(start, length, b"cat"), prompt(start, length, b"dog")
    before = start // BLOCK_SIZE
    names = [hash_tokens(NS, *one) for one in (cat, dog)]
    assert [a == b for a, b in zip(*names, strict=True)] == [i < before for i in range(NUM_BLOCKS)]

    pool, tier, index = pool_with(cat), tier_with(cat), PrefixIndex()
    index.stored(Holder(NodeId("n"), Incarnation(1)), Tier.HOST, names[0])
    assert (in_pool(pool, cat), in_tier(tier, cat), in_index(index, cat)) == (NUM_BLOCKS,) * 3
    assert (in_pool(pool, dog), in_tier(tier, dog), in_index(index, dog)) == (before,) * 3
    # Without the picture the placeholders are ordinary tokens, and another prompt.
    assert in_pool(pool, (cat[0], ())) == before

    verdicts = [row.verdict for row in Explainer(pool, RemovalLog()).explain(NS, [*dog[0], 0], dog[1])]
    assert verdicts == [Verdict.HIT] * before + [Verdict.NEVER_SEEN] * (NUM_BLOCKS - before)


def test_a_reader_with_another_picture_gets_no_lease() -> None:
    cat, dog = prompt(BLOCK_SIZE, 2, b"cat"), prompt(BLOCK_SIZE, 2, b"dog")
    pool, reader = pool_with(cat), NodeId("reader")
    last = [hash_tokens(NS, *one)[-1] for one in (cat, dog)]
    mine, theirs = (prefix_digest(one[0], one[1], len(one[0])) for one in (cat, dog))
    with pytest.raises(NotHeldError):
        pool.lease(reader, NS.digest, last[1], theirs, until_ns=1)
    # Though it has the right name from somewhere.
    with pytest.raises(DigestMismatchError):
        pool.lease(reader, NS.digest, last[0], theirs, until_ns=1)
    assert len(pool.lease(reader, NS.digest, last[0], mine, until_ns=1).refs) == NUM_BLOCKS


def test_two_pictures_in_one_prompt_are_told_apart_by_place_and_order() -> None:
    def two(first: bytes, second: bytes) -> Prompt:
        tokens, _ = prompt(0, NUM_BLOCKS * BLOCK_SIZE, b"any")
        return tokens, (Extra(1, first, 2), Extra(2 * BLOCK_SIZE + 1, second, 2))

    pool = pool_with(two(b"cat", b"dog"))
    assert in_pool(pool, two(b"cat", b"dog")) == NUM_BLOCKS
    assert in_pool(pool, two(b"cat", b"cat")) == 2
    assert in_pool(pool, two(b"dog", b"cat")) == in_pool(pool, two(b"dog", b"dog")) == 0

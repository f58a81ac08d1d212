"""Faults that users of systems like this one met below memory and in prefix indexes, each as a scenario.

Others that concern prefixes are tests where their part is: `test_tier_disk`, `test_tier_spill`,
`tests/services/test_tiers`, `test_kv_events`, `tests/client/test_client_nodes`, `tests/integration/test_disk_tier`.
"""

import pytest

from kv_core.dtypes import DType
from kv_core.hashing import BlockHash, Extra, hash_tokens, token_bytes
from kv_core.ids import Incarnation, NodeId, RegionId
from kv_core.namespace import Namespace
from kv_prefix.block_pool import BlockPool
from kv_prefix.errors import NoSpaceError, UnknownReceiptError
from kv_prefix.events import Tier
from kv_prefix.placement import Candidate, PlacementRequest, make_placement_policy
from kv_prefix.prefix_index import Holder, PrefixIndex
from kv_prefix.tiers.blocks import TierBlock, chain_digest
from kv_prefix.tiers.catalog import TierCatalog

SIZE = 4
BASE = Namespace("model", "weights-1", block_size=SIZE)
TOKENS = list(range(100, 100 + 8 * SIZE))


def tier_with(namespace: Namespace, tokens: list[int], extras: tuple[Extra, ...] = ()) -> TierCatalog:
    """A tier that holds a prompt of that namespace."""
    catalog = TierCatalog(64)
    blocks, parent, digest = [], b"", namespace.digest
    raw = token_bytes(tokens)
    for i, name in enumerate(hash_tokens(namespace, tokens, extras)):
        piece = raw[i * 4 * SIZE : (i + 1) * 4 * SIZE]
        digest = chain_digest(digest, piece, ())
        blocks.append(
            TierBlock(namespace.digest, i, name.sequence, name.check, parent, digest, piece, (), bytes(8)),
        )
        parent = name.sequence
    catalog.stored(catalog.plan_store(blocks), ok=True)
    return catalog


def matched(catalog: TierCatalog, namespace: Namespace, tokens: list[int]) -> int:
    return len(catalog.match(namespace.digest, hash_tokens(namespace, tokens), token_bytes(tokens), {}, 0))


@pytest.mark.parametrize(
    "other",
    [
        Namespace("model", "weights-2", block_size=SIZE),
        Namespace("model", "weights-1", salt="x", block_size=SIZE),
        Namespace("model", "weights-1", lora_name="x", lora_revision="1", block_size=SIZE),
        Namespace("model", "weights-1", dtype=DType.FP8_E4M3, block_size=SIZE),
    ],
    ids=["14 new weights", "17 another tenant", "8 an adapter", "13 another dtype"],
)
def test_what_one_namespace_stored_no_other_finds_in_a_tier(other: Namespace) -> None:
    catalog = tier_with(BASE, TOKENS)
    assert matched(catalog, BASE, TOKENS) == 8
    assert matched(catalog, other, TOKENS) == 0
    assert matched(tier_with(other, TOKENS), BASE, TOKENS) == 0


def test_an_adapter_named_like_a_salt_is_another_namespace_in_every_tier() -> None:
    pairs = [
        (dict(lora_name="x", lora_revision="1"), dict(salt="x")),
        (dict(salt="ab", lora_name="c", lora_revision="1"), dict(salt="a", lora_name="bc", lora_revision="1")),
    ]
    for left, right in pairs:
        one = Namespace("model", "weights-1", block_size=SIZE, **left)  # type: ignore[arg-type]
        two = Namespace("model", "weights-1", block_size=SIZE, **right)  # type: ignore[arg-type]
        assert matched(tier_with(one, TOKENS), two, TOKENS) == 0


def test_a_hash_cut_to_eight_bits_never_gives_another_prompt_s_bytes() -> None:
    def weak(names: list[BlockHash]) -> list[BlockHash]:
        return [BlockHash(name.sequence[:1] + bytes(15), 0) for name in names]

    catalog = TierCatalog(512)
    prompts = [[seed * 50 + i for i in range(2 * SIZE)] for seed in range(200)]
    kept = {}
    for tokens in prompts:
        raw, parent, digest = token_bytes(tokens), b"", BASE.digest
        blocks = []
        for i, name in enumerate(weak(hash_tokens(BASE, tokens))):
            piece = raw[i * 16 : (i + 1) * 16]
            digest = chain_digest(digest, piece, ())
            blocks.append(TierBlock(BASE.digest, i, name.sequence, 0, parent, digest, piece, (), bytes(8)))
            parent = name.sequence
        plan = catalog.plan_store(blocks)
        catalog.stored(plan, ok=True)
        kept.update({item.block.sequence: item.block for item in plan.writes})
    collisions = 0
    for tokens in prompts:
        names = weak(hash_tokens(BASE, tokens))
        found = catalog.match(BASE.digest, names, token_bytes(tokens), {}, 0)
        collisions += len(found) < 2 and names[0].sequence in kept
        for i, block in enumerate(found):
            assert block.tokens == token_bytes(tokens[i * SIZE : (i + 1) * SIZE])
    assert collisions > 50, "the hash was weak enough to matter"


def test_a_dropped_head_or_middle_ends_the_match_there_in_tier_and_index() -> None:
    names = hash_tokens(BASE, TOKENS)
    for gone, expected in ((0, 0), (2, 2)):
        catalog = tier_with(BASE, TOKENS)
        catalog.purge(lambda block, gone=gone: block.block_idx == gone)  # type: ignore[misc]
        assert matched(catalog, BASE, TOKENS) == expected
        index, holder = PrefixIndex(), Holder(NodeId("a"), Incarnation(1))
        index.stored(holder, Tier.DISK, names)
        index.removed(holder, Tier.DISK, [names[gone]])
        found = index.lookup(names)
        assert (found[0].num_blocks if found else 0) == expected


def test_a_chain_under_pressure_keeps_its_head() -> None:
    catalog = TierCatalog(8)
    first = tier_with(BASE, TOKENS).blocks()
    catalog.stored(catalog.plan_store(first), ok=True)
    other = tier_with(BASE, [5000 + i for i in range(4 * SIZE)]).blocks()
    catalog.stored(catalog.plan_store(other), ok=True)
    assert sorted(block.block_idx for block in catalog.blocks() if block.tokens in token_bytes(TOKENS)) == [0, 1, 2, 3]


def test_one_holder_s_removal_leaves_the_other_and_the_other_tier() -> None:
    names = hash_tokens(BASE, TOKENS)
    index = PrefixIndex()
    a, b = (Holder(NodeId(name), Incarnation(1)) for name in "ab")
    for holder in (a, b):
        for tier in (Tier.HOST, Tier.DISK):
            index.stored(holder, tier, names)
    index.removed(a, Tier.HOST, names)
    by_holder = {match.holder: match.by_tier for match in index.lookup(names)}
    assert by_holder == {a: (0, 0, 8, 0), b: (0, 8, 0, 0)}
    index.removed(a, Tier.DISK, names)
    assert [match.holder for match in index.lookup(names)] == [b]


def test_when_everything_is_pinned_a_put_fails_at_once_and_works_after_unpinning() -> None:
    pool = BlockPool(8, SIZE, region=RegionId(1), pin_quota=8)
    opened = pool.open("r", None, 8)
    pool.commit(opened.table, BASE.digest, 0, hash_tokens(BASE, TOKENS), TOKENS)
    pinned = pool.pin("operator", pool.match(BASE.digest, hash_tokens(BASE, TOKENS), [*TOKENS, 0]))
    pool.release(opened.table)
    with pytest.raises(NoSpaceError, match="8 pinned"):
        pool.open("other", None, 1)
    pool.release(pinned)
    pool.release(pool.open("other", None, 1).table)
    with pytest.raises(UnknownReceiptError):  # a second unpin is an error, and changes nothing
        pool.release(pinned)
    pool.check()


def test_a_thousand_leases_that_nobody_reads_leave_nothing_pinned() -> None:
    pool = BlockPool(8, SIZE, region=RegionId(1))
    for round_ in range(1_000):
        tokens = [round_ * 100 + i for i in range(4 * SIZE)]
        names = hash_tokens(BASE, tokens)
        opened = pool.open("r", None, 4)
        pool.commit(opened.table, BASE.digest, 0, names, tokens)
        match = pool.match(BASE.digest, names, [*tokens, 0])
        pool.lease_match(NodeId("reader"), match, until_ns=round_ + 1)
        pool.release(opened.table)
        pool.expire(round_ + 1)
    assert pool.stats().pinned == 0 and not pool.holds()
    assert pool.stats().free + pool.stats().cached == 8


def test_a_shared_beginning_does_not_send_every_request_to_its_holder() -> None:
    policy = make_placement_policy("kv_aware")
    loads = {f"node-{i}": 0.0 for i in range(10)}
    counts = dict.fromkeys(loads, 0)
    for number in range(1000):
        candidates = [Candidate(NodeId(name), load, (0, name == "node-0", 0, 0)) for name, load in loads.items()]
        placed = policy.place(PlacementRequest(f"r-{number}".encode(), b"shared", 40), candidates)
        counts[placed.node] += 1
        loads[placed.node] += placed.new_blocks
        loads = {name: load * 0.97 for name, load in loads.items()}
    assert max(counts.values()) / (sum(counts.values()) / len(counts)) <= 1.5, counts


def test_disk_is_worth_less_than_memory_to_the_router() -> None:  # by our own claims
    policy = make_placement_policy("kv_aware")
    request = PlacementRequest(b"r", b"p", 10)
    memory, disk = Candidate(NodeId("a"), 0, (0, 8, 0, 0)), Candidate(NodeId("b"), 0, (0, 0, 8, 0))
    nothing = Candidate(NodeId("c"), 0)
    assert policy.place(request, [disk, memory, nothing]).node == "a"
    assert policy.place(request, [disk, nothing]).node == "b"

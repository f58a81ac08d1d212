"""Find the longest prefix, share it by reference, let go of it."""

import pytest

from kv_core.block import BlockGeometry
from kv_core.dtypes import DType
from kv_core.hashing import BlockHash, hash_tokens
from kv_core.ids import Incarnation, NodeId, RegionId
from kv_core.namespace import Namespace
from kv_prefix.block_pool import BlockPool
from kv_prefix.errors import InvalidRequestError, NotHeldError, StaleMatchError, UnknownReceiptError
from kv_prefix.events import Tier
from kv_prefix.manager import PrefixCacheManager
from kv_prefix.prefix_index import Holder, PrefixIndex

GEOMETRY = BlockGeometry(num_layers=2, num_kv_heads=1, head_dim=4, dtype=DType.FP16, block_size=16)
NS = Namespace("model", "main", dtype=DType.FP16, block_size=16)
TENANT = Namespace("model", "main", salt="tenant", dtype=DType.FP16, block_size=16)
HERE, THERE, TARGET = NodeId("here"), NodeId("there"), NodeId("target")
PROMPT = list(range(200))


def make_manager(index: PrefixIndex | None = None, num_blocks: int = 32) -> PrefixCacheManager:
    return PrefixCacheManager(
        num_blocks * GEOMETRY.block_nbytes, geometry=GEOMETRY, namespace=NS, node=HERE, index=index, lease_ns=1_000
    )


def compute(manager: PrefixCacheManager, tokens: list[int], namespace: Namespace = NS) -> None:
    """What a node does with a prompt: match, compute the rest, share the full blocks."""
    match = manager.lookup_prefix(tokens, 0, namespace=namespace)
    first = len(match.local.refs)
    opened = manager.pool.open("request", match.local, -(-len(tokens) // 16) - first, use_partial=False)
    full = len(tokens) // 16
    names = match.block_hashes[first:full]
    manager.pool.commit(opened.table, namespace.digest, first, names, tokens[first * 16 : full * 16])
    manager.pool.release(opened.table)


def test_a_prompt_finds_its_longest_prefix() -> None:
    manager = make_manager()
    compute(manager, PROMPT[:165])
    match = manager.lookup_prefix(PROMPT)
    assert (match.num_tokens, match.num_missing_tokens) == (160, 40)
    assert match.prefix_hash == hash_tokens(NS, PROMPT)[9]


def test_a_short_match_counts_as_none() -> None:
    manager = make_manager()
    compute(manager, PROMPT[:64])
    assert manager.lookup_prefix(PROMPT).num_tokens == 0
    assert manager.lookup_prefix(PROMPT).prefix_hash is None
    assert manager.lookup_prefix(PROMPT, min_match_len=64).num_tokens == 64


def test_a_lookup_also_says_who_else_holds_how_much() -> None:
    index = PrefixIndex()
    names = hash_tokens(NS, PROMPT)
    index.stored(Holder(THERE, Incarnation(1)), Tier.DISK, names)
    index.stored(Holder(HERE, Incarnation(1)), Tier.HOST, names)
    index.stored(Holder(NodeId("short"), Incarnation(1)), Tier.HOST, names[:7])
    match = make_manager(index).lookup_prefix(PROMPT[:192])
    (holder,) = match.holders
    assert (holder.holder.node, holder.num_blocks) == (THERE, 11), "the last token is left to compute"


def test_a_tenant_does_not_see_anothers_prefix() -> None:
    manager = make_manager()
    compute(manager, PROMPT)
    assert manager.lookup_prefix(PROMPT, 0, namespace=TENANT).num_tokens == 0


def test_a_shared_prefix_is_kept_until_each_reference_is_released() -> None:
    manager = make_manager(num_blocks=13)
    compute(manager, PROMPT[:192])
    match = manager.lookup_prefix(PROMPT)
    shared = manager.share_prefix_kvcache(TARGET, match)
    assert (shared.num_tokens, shared.shared_bytes) == (192, 12 * GEOMETRY.block_nbytes)
    assert shared.refs == match.local.refs
    manager.share_prefix_kvcache(THERE, match)
    entry = manager.entry(shared.prefix_hash)
    assert entry is not None and (entry.ref_count, entry.in_use, entry.num_tokens) == (2, True, 192)
    assert entry.size_bytes == shared.shared_bytes
    manager.pool.release(manager.pool.open("other", None, 1).table)
    assert manager.lookup_prefix(PROMPT).num_tokens == 192, "in use, so not evicted"
    assert manager.release_prefix_ref(shared.prefix_hash, THERE) == 1
    with pytest.raises(UnknownReceiptError):
        manager.release_prefix_ref(shared.prefix_hash, THERE)
    assert manager.release_prefix_ref(shared.prefix_hash) == 0
    with pytest.raises(UnknownReceiptError):
        manager.release_prefix_ref(shared.prefix_hash)
    assert manager.pool.stats().pinned == 0
    manager.pool.open("other", None, 13)
    assert manager.entry(shared.prefix_hash) is None


def test_a_reference_ends_by_time() -> None:
    manager = make_manager()
    compute(manager, PROMPT)
    manager.advance(5_000)
    shared = manager.share_prefix_kvcache(TARGET, manager.lookup_prefix(PROMPT))
    assert shared.lease.until_ns == 6_000
    assert manager.advance(5_999) == []
    assert manager.advance(6_000) == [shared.lease]
    with pytest.raises(UnknownReceiptError):
        manager.release_prefix_ref(shared.prefix_hash)
    entry = manager.entry(shared.prefix_hash)
    assert entry is not None and (entry.ref_count, entry.in_use) == (0, False)


def test_a_request_that_goes_on_from_a_shared_prefix_leaves_it_alone() -> None:
    manager = make_manager()
    compute(manager, PROMPT[:160])
    other = [*PROMPT[:150], *range(900, 930)]
    match = manager.lookup_prefix(other)
    assert match.num_tokens == 150
    opened = manager.pool.open("request", match.local, 3)
    assert opened.copy is not None
    assert opened.copy.dst not in match.local.refs and opened.copy.num_tokens == 6


def test_nothing_to_share_is_an_error() -> None:
    manager = make_manager()
    with pytest.raises(NotHeldError):
        manager.share_prefix_kvcache(TARGET, manager.lookup_prefix(PROMPT))
    with pytest.raises(NotHeldError):
        manager.share_prefix_kvcache(TARGET, manager.lookup_prefix([1, 2, 3]))
    compute(manager, PROMPT)
    match = manager.lookup_prefix(PROMPT)
    manager.pool.purge()
    with pytest.raises(StaleMatchError):
        manager.share_prefix_kvcache(TARGET, match)
    assert manager.entry(BlockHash(b"?" * 16, 0)) is None


def test_sizes_that_cannot_be_are_refused() -> None:
    for max_bytes, namespace in ((GEOMETRY.block_nbytes - 1, NS), (1 << 20, Namespace("m", "r", block_size=32))):
        with pytest.raises(InvalidRequestError):
            PrefixCacheManager(max_bytes, geometry=GEOMETRY, namespace=namespace, node=HERE)
    with pytest.raises(InvalidRequestError):
        PrefixCacheManager(geometry=GEOMETRY, namespace=NS, node=HERE, pool=BlockPool(4, 8, region=RegionId(0)))
    with pytest.raises(InvalidRequestError):
        make_manager().lookup_prefix(PROMPT, namespace=Namespace("m", "r", block_size=32))


def test_the_default_capacity_is_40_gib() -> None:
    one_mib = BlockGeometry(num_layers=32, num_kv_heads=8, head_dim=64, dtype=DType.FP16, block_size=16)
    manager = PrefixCacheManager(geometry=one_mib, namespace=NS, node=HERE)
    assert manager.pool.stats().total * one_mib.block_nbytes == 40 << 30

"""One node's door to shared prefixes: find the longest one, share it by reference, let go of it.

Composes the block pool (what is here), the prefix index (what is elsewhere) and the hash scheme. It holds no clock:
`advance(now_ns)` states the time, and ends the leases whose time has passed.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from kv_core.block import BlockGeometry, BlockRef
from kv_core.hashing import BlockHash, Extra, Tokens
from kv_core.ids import NodeId
from kv_core.namespace import Namespace
from kv_prefix.block_pool import BlockPool
from kv_prefix.limits import DEFAULT_MAX_CACHE_BYTES, DEFAULT_MIN_MATCH_TOKENS
from kv_prefix.pins import Receipt
from kv_prefix.pool_types import PoolMatch
from kv_prefix.prefix_index import HolderMatch, PrefixIndex


@dataclass(frozen=True, slots=True)
class PrefixMatch:
    """What is held of a prompt, here and elsewhere.

    Attributes:
        prefix_hash: hash of the last matched full block held here; None when nothing is.
        num_tokens: tokens matched here, the partial block's included.
        local: the match in the own pool.
        block_hashes: of all full blocks of the prompt.
        holders: who else holds how much, deepest first.
        prompt_tokens: length of the prompt.
    """

    prefix_hash: BlockHash | None
    num_tokens: int
    local: PoolMatch
    block_hashes: tuple[BlockHash, ...]
    holders: tuple[HolderMatch, ...]
    prompt_tokens: int


@dataclass(frozen=True, slots=True)
class ShareResult:
    """A prefix was shared with `target_node` by reference.

    Attributes:
        prefix_hash: give this to `release_prefix_ref`.
        refs: what the target may read, one reference per block, from block 0.
        num_tokens: tokens they hold.
        shared_bytes: bytes that need not be computed or stored a second time.
        lease: the hold behind it; it ends by itself at `lease.until_ns`.
    """

    target_node: NodeId
    prefix_hash: BlockHash
    refs: tuple[BlockRef, ...]
    num_tokens: int
    shared_bytes: int
    lease: Receipt


@dataclass(frozen=True, slots=True)
class PrefixCacheEntry:
    """A prefix in the cache, as `entry` reports it.

    Attributes:
        num_tokens: tokens from block 0 to the end of the block named by `prefix_hash`.
        size_bytes: bytes of its blocks.
        ref_count: references taken by `share_prefix_kvcache` and not yet released or expired.
        in_use: whether anybody at all holds its last block; such an entry is never evicted.
    """

    prefix_hash: BlockHash
    namespace: bytes
    num_tokens: int
    size_bytes: int
    refs: tuple[BlockRef, ...]
    ref_count: int
    in_use: bool


class PrefixCacheManager:
    """Shared prefixes of one node.

    Args:
        max_cache_bytes: memory for blocks; decides the number of slots when no `pool` is given.
        geometry: shape of one block.
        namespace: the namespace of prompts that name none.
        node: this node.
        pool: the pool of an existing arena; a new one of `max_cache_bytes` when None.
        index: the cluster's index; none when None: then only what is here is found.
    """

    def __init__(
        self,
        max_cache_bytes: int = DEFAULT_MAX_CACHE_BYTES,
        *,
        geometry: BlockGeometry,
        namespace: Namespace,
        node: NodeId,
        pool: BlockPool | None = None,
        index: PrefixIndex | None = None,
    ) -> None:
        raise NotImplementedError

    def lookup_prefix(
        self,
        prompt_tokens: Tokens,
        min_match_len: int = DEFAULT_MIN_MATCH_TOKENS,
        *,
        namespace: Namespace | None = None,
        extras: Sequence[Extra] = (),
    ) -> PrefixMatch:
        """The longest held prefix of a prompt; a match shorter than `min_match_len` tokens counts as none.

        Changes nothing. The last prompt token is always left to compute.
        """
        raise NotImplementedError

    def share_prefix_kvcache(self, target_node: NodeId, match: PrefixMatch) -> ShareResult:
        """Let `target_node` read the matched full blocks by reference, without copying, under a lease.

        Raises:
            NotHeldError: the match has no full block here.
            StaleMatchError: a matched block was evicted since; look up again.
        """
        raise NotImplementedError

    def release_prefix_ref(self, prefix_hash: BlockHash, target_node: NodeId | None = None) -> int:
        """Give back one reference taken by `share_prefix_kvcache`; returns how many are left.

        Without `target_node`, the reference that would end soonest is given back.

        Raises:
            UnknownReceiptError: no reference to it is held.
        """
        raise NotImplementedError

"""A door to shared prefixes for whoever has a pool: find the longest one, share it by reference, let go of it.

Composes the block pool (what is here), the prefix index (what is elsewhere) and the hash scheme. It holds no clock:
`advance(now_ns)` states the time, and ends the leases whose time has passed.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from kv_core.block import BlockGeometry, BlockRef
from kv_core.hashing import TOKEN_BYTES, BlockHash, Extra, Tokens, hash_tokens, token_bytes
from kv_core.ids import NodeId, RegionId
from kv_core.namespace import Namespace
from kv_prefix import limits
from kv_prefix.block_pool import BlockPool
from kv_prefix.errors import InvalidRequestError, NotHeldError, UnknownReceiptError
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

    @property
    def num_missing_tokens(self) -> int:
        """Tokens that are not held here, the last one included: to be computed, or pulled from a holder."""
        return self.prompt_tokens - self.num_tokens


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
        index: the cluster's index; without one only what is here is found.
        lease_ns: how long a shared prefix stays with its reader unless renewed.

    Raises:
        InvalidRequestError: `max_cache_bytes` holds no block, or the block sizes disagree.
    """

    def __init__(
        self,
        max_cache_bytes: int = limits.DEFAULT_MAX_CACHE_BYTES,
        *,
        geometry: BlockGeometry,
        namespace: Namespace,
        node: NodeId,
        pool: BlockPool | None = None,
        index: PrefixIndex | None = None,
        lease_ns: int = limits.DEFAULT_LEASE_NS,
    ) -> None:
        if pool is None:
            num_slots = max_cache_bytes // geometry.block_nbytes
            if num_slots < 1:
                raise InvalidRequestError(
                    name="max_cache_bytes", value=max_cache_bytes, rule=f"one block is {geometry.block_nbytes} bytes"
                )
            pool = BlockPool(min(num_slots, limits.MAX_SLOTS), geometry.block_size, region=RegionId(0))
        self.node = node
        self.pool = pool
        self.index = index
        self._geometry = geometry
        self._lease_ns = lease_ns
        self._now_ns = 0
        self._shares: dict[bytes, list[Receipt]] = {}
        self._namespace = self._require_fit(namespace)

    def advance(self, now_ns: int) -> list[Receipt]:
        """State the time (of a clock that never goes back); returns the leases that ended by it."""
        self._now_ns = max(self._now_ns, now_ns)
        ended = self.pool.expire(self._now_ns)
        gone = {receipt.receipt_id for receipt in ended}
        if gone:
            for name, receipts in list(self._shares.items()):
                self._keep_shares(name, [receipt for receipt in receipts if receipt.receipt_id not in gone])
        return ended

    def lookup_prefix(
        self,
        prompt_tokens: Tokens,
        min_match_len: int = limits.DEFAULT_MIN_MATCH_TOKENS,
        *,
        namespace: Namespace | None = None,
        extras: Sequence[Extra] = (),
    ) -> PrefixMatch:
        """The longest held prefix of a prompt; a match shorter than `min_match_len` tokens counts as none.

        Changes nothing. The last prompt token is always left to compute.
        """
        namespace = self._namespace if namespace is None else self._require_fit(namespace)
        raw = token_bytes(prompt_tokens)
        num_tokens = len(raw) // TOKEN_BYTES
        names = tuple(hash_tokens(namespace, raw, extras))
        local = self.pool.match(namespace.digest, names, raw, extras)
        if local.num_tokens < min_match_len:
            local = PoolMatch(namespace.digest, (), (), None, 0)
        num_usable = max(num_tokens - 1, 0) // namespace.block_size
        holders = self.index.lookup(names[:num_usable]) if self.index else []
        return PrefixMatch(
            prefix_hash=local.block_hashes[-1] if local.block_hashes else None,
            num_tokens=local.num_tokens,
            local=local,
            block_hashes=names,
            holders=tuple(
                held
                for held in holders
                if held.holder.node != self.node and held.num_blocks * namespace.block_size >= min_match_len
            ),
            prompt_tokens=num_tokens,
        )

    def share_prefix_kvcache(self, target_node: NodeId, match: PrefixMatch) -> ShareResult:
        """Let `target_node` read the matched full blocks by reference, without copying, under a lease.

        The blocks stay as they are until the lease ends: requests that go on from them write into blocks of their own.

        Raises:
            NotHeldError: the match has no full block here.
            StaleMatchError: a matched block was evicted since; look up again.
            LeaseLimitError: the target holds too many leases.
        """
        if match.prefix_hash is None:
            wanted = match.block_hashes[-1].sequence.hex() if match.block_hashes else "of no full block"
            raise NotHeldError(prefix_hash=wanted)
        lease = self.pool.lease_match(target_node, match.local, until_ns=self._now_ns + self._lease_ns)
        self._shares.setdefault(match.prefix_hash.sequence, []).append(lease.receipt)
        return ShareResult(
            target_node=target_node,
            prefix_hash=match.prefix_hash,
            refs=lease.refs,
            num_tokens=len(lease.refs) * self.pool.block_size,
            shared_bytes=len(lease.refs) * self._geometry.block_nbytes,
            lease=lease.receipt,
        )

    def release_prefix_ref(self, prefix_hash: BlockHash, target_node: NodeId | None = None) -> int:
        """Give back one reference taken by `share_prefix_kvcache`; returns how many are left.

        Without `target_node`, the reference that would end soonest is given back.

        Raises:
            UnknownReceiptError: no reference to it is held: released already, or its lease ended.
        """
        receipts = self._shares.get(prefix_hash.sequence, [])
        mine = [receipt for receipt in receipts if target_node in (None, receipt.owner)]
        if not mine:
            raise UnknownReceiptError(receipt=prefix_hash.sequence.hex(), owner=target_node or self.node)
        receipt = min(mine, key=lambda receipt: (receipt.until_ns or 0, receipt.receipt_id))
        self.pool.release(receipt)
        self._keep_shares(prefix_hash.sequence, [other for other in receipts if other is not receipt])
        return len(receipts) - 1

    def entry(self, prefix_hash: BlockHash) -> PrefixCacheEntry | None:
        """The held prefix of that name, or None."""
        held = self.pool.prefix(prefix_hash)
        if held is None:
            return None
        return PrefixCacheEntry(
            prefix_hash=prefix_hash,
            namespace=held.namespace,
            num_tokens=held.num_tokens,
            size_bytes=len(held.refs) * self._geometry.block_nbytes,
            refs=held.refs,
            ref_count=len(self._shares.get(prefix_hash.sequence, ())),
            in_use=not self.pool.is_evictable(prefix_hash),
        )

    def _require_fit(self, namespace: Namespace) -> Namespace:
        sizes = {self._geometry.block_size, namespace.block_size, self.pool.block_size}
        if len(sizes) > 1:
            raise InvalidRequestError(
                name="block_size",
                value=namespace.block_size,
                rule=f"blocks here have {self._geometry.block_size} tokens, those of the pool {self.pool.block_size}",
            )
        return namespace

    def _keep_shares(self, name: bytes, receipts: list[Receipt]) -> None:
        if receipts:
            self._shares[name] = receipts
        else:
            self._shares.pop(name, None)

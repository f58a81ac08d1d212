"""The blocks of a decode node's requests: opened on what the pool has, grown, made findable, given back.

Knows the pool and each request's table. Who gets slots, and whose are taken, `decode_state` decides.

B1: a request's `refs` are those of its table. B2: a block is made findable only between steps, since one that is held
already takes the place of the own one.
"""

from kv_core.block import BlockRef
from kv_prefix.block_pool import BlockPool
from kv_prefix.pool_types import PoolMatch
from kv_services.node.decode_sequence import DecodeSequence


class DecodeMemory:
    """The part of a node's pool that its decode work has.

    Args:
        pool: the node's slots; others use it too, each their own tables.
        block_size: tokens per block.
    """

    def __init__(self, pool: BlockPool, block_size: int) -> None:
        self._pool = pool
        self._block_size = block_size

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that so many tokens take."""
        return -(-num_tokens // self._block_size)

    def match(self, seq: DecodeSequence) -> PoolMatch:
        """What the pool has of a request's tokens."""
        return self._pool.match(seq.namespace.digest, seq.hash_blocks(), seq.tokens)

    def has_room(self, num_blocks: int, num_growing: int) -> bool:
        """Whether a newcomer of that many blocks leaves each of those that grow one more: else it would be preempted at
        once."""
        stats = self._pool.stats()
        return num_growing == 0 or stats.free + stats.cached >= num_blocks + num_growing

    def open(self, seq: DecodeSequence, match: PoolMatch) -> tuple[BlockRef, ...]:
        """Give a request its table behind that match; returns the slots that are new to it.

        Raises:
            NoSpaceError, TenantQuotaError: there is no room, or its tenant has its share; nothing was changed.
        """
        num_matched = len(match.refs)
        num_new = self.blocks_for(len(seq.tokens)) - num_matched
        opened = self._pool.open(seq.request_id, match, num_new, use_partial=False)
        seq.table, seq.refs = opened.table, list(opened.refs)
        seq.stored, seq.committed = opened.num_matched_tokens, num_matched
        return tuple(seq.refs[num_matched:])

    def lacks_block(self, seq: DecodeSequence) -> bool:
        """Whether the position of its newest token has no slot yet."""
        return seq.table is not None and len(seq.refs) * self._block_size < len(seq.tokens)

    def grow(self, seq: DecodeSequence) -> tuple[BlockRef, ...]:
        """One more block; returns its slot.

        Raises:
            NoSpaceError, TenantQuotaError: as `open`.
        """
        assert seq.table is not None, seq
        fresh = self._pool.append(seq.table)
        seq.refs += fresh
        return fresh

    def commit(self, seq: DecodeSequence) -> None:
        """Make full blocks findable (B2)."""
        hashes = seq.hash_blocks()
        full = seq.stored // self._block_size
        if seq.table is None or full <= seq.committed:
            return
        first, size = seq.committed, self._block_size
        tokens = seq.tokens[first * size : full * size]
        seq.refs[first:full] = self._pool.commit(seq.table, seq.namespace.digest, first, hashes[first:full], tokens)
        seq.committed = full

    def release(self, seq: DecodeSequence) -> None:
        """Give everything back."""
        if seq.table is not None:
            self._pool.release(seq.table)
            seq.table, seq.refs = None, []

    def same_account(self, seq: DecodeSequence, namespace: bytes) -> bool:
        """Whether a request is of the tenant whose namespace that is."""
        return self._pool.account(seq.namespace.digest) == self._pool.account(namespace)

    def check(self, seq: DecodeSequence) -> None:
        """Assert B1, and that what is stored has a slot."""
        if seq.table is not None:
            assert tuple(seq.refs) == self._pool.refs(seq.table), seq
            assert len(seq.refs) * self._block_size >= seq.stored, seq

"""A small pool, and requests that fill it: shared by the tests of its two halves."""

from kv_core.hashing import Extra, hash_tokens
from kv_core.ids import NodeId, RegionId
from kv_core.namespace import Namespace
from kv_prefix.block_pool import BlockPool
from kv_prefix.eviction import make_eviction_policy
from kv_prefix.pins import Receipt
from kv_prefix.pool_types import PoolMatch
from tests.prefix.helpers_prefix import BLOCK_SIZE, NAMESPACES

NS = NAMESPACES[0]
READER = NodeId("reader")


def make_pool(num_slots: int = 8, policy: str = "lru") -> BlockPool:
    return BlockPool(num_slots, BLOCK_SIZE, region=RegionId(1), policy=make_eviction_policy(policy, num_slots))


def match(pool: BlockPool, tokens: list[int], namespace: Namespace = NS, extras: tuple[Extra, ...] = ()) -> PoolMatch:
    return pool.match(namespace.digest, hash_tokens(namespace, tokens, extras), tokens, extras)


def open_committed(
    pool: BlockPool, tokens: list[int], namespace: Namespace = NS, extras: tuple[Extra, ...] = ()
) -> Receipt:
    """A running request whose full blocks are computed and shared."""
    found = match(pool, tokens, namespace, extras)
    num_full = len(tokens) // BLOCK_SIZE
    opened = pool.open("request", found, -(-len(tokens) // BLOCK_SIZE) - len(found.refs), use_partial=False)
    first = len(found.refs)
    names = hash_tokens(namespace, tokens, extras)[first:]
    new = tokens[first * BLOCK_SIZE : num_full * BLOCK_SIZE]
    pool.commit(opened.table, namespace.digest, first, names, new, extras)
    return opened.table


def store(pool: BlockPool, tokens: list[int], namespace: Namespace = NS, extras: tuple[Extra, ...] = ()) -> None:
    pool.release(open_committed(pool, tokens, namespace, extras))


def text(num_blocks: int, start: int = 0) -> list[int]:
    """A prompt of that many full blocks and one token more."""
    return list(range(start, start + num_blocks * BLOCK_SIZE + 1))

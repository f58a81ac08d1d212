"""Lets a tenant's prompts begin with KV that another tenant shares with it: read only, by a copy of its own.

A tenant that may read another's prefixes must not write among them, and what it computes behind them is its own. So the
shared blocks are copied, on the node, into the reader's namespace: found from then on as its own.

H1: only tenants named in `shares_with` are looked at, and only what they store without a `cache_salt` of a client.
H2: a copy is findable after its bytes were compared with the original's CRC-64s.
"""

import asyncio
import itertools
from collections.abc import Sequence

from kv_core.block import BlockRef
from kv_core.checksum import crc64
from kv_core.hashing import hash_tokens
from kv_core.namespace import Namespace
from kv_prefix.errors import NoSpaceError, StaleMatchError
from kv_services.config import ClusterConfig
from kv_services.node.context import NodeContext
from kv_services.tenants import SEPARATOR, namespace_salt, tenant_mark


class Sharing:
    """The shared prefixes of one node."""

    def __init__(self, ctx: NodeContext) -> None:
        self._ctx = ctx
        self._ids = itertools.count(1)
        self._sources = sources_of(ctx.config)

    async def adopt(self, namespace: Namespace, tokens: bytes) -> int:
        """Copy what the namespace's tenant may read and lacks of a prompt's beginning; how many blocks."""
        sources = self._sources.get(namespace.salt.partition(SEPARATOR)[0], ())
        return sum([await self._adopt_from(namespace, salt, tokens) for salt in sources])

    async def _adopt_from(self, namespace: Namespace, salt: str, tokens: bytes) -> int:
        ctx = self._ctx
        shared = Namespace(
            namespace.model_id,
            namespace.weights_revision,
            salt=salt,
            dtype=namespace.dtype,
            fidelity=namespace.fidelity,
            block_size=namespace.block_size,
        )
        names = hash_tokens(namespace, tokens[:-4])
        own = ctx.pool.match(namespace.digest, names, tokens)
        theirs = ctx.pool.match(shared.digest, hash_tokens(shared, tokens[:-4]), tokens)
        first, count = len(own.refs), len(theirs.refs)
        if count <= first:
            return 0
        try:
            held = ctx.pool.hold("shared prefix", theirs.refs[first:])
        except StaleMatchError:
            return 0
        try:
            opened = ctx.pool.open(f"shared-{next(self._ids)}", own, count - first, use_partial=False)
        except (NoSpaceError, StaleMatchError):
            ctx.pool.release(held)
            return 0
        new = opened.refs[first:]
        ctx.flush_pool_events()
        ctx.prepare(new)
        work = asyncio.get_running_loop().run_in_executor(None, self._copy, theirs.refs[first:], new)
        try:
            sound = await asyncio.shield(work)
        finally:
            if not work.done():
                # The thread goes on; the slots stay until it has ended.
                await asyncio.wait([work])
            ctx.pool.release(held)
            if work.done() and not work.cancelled() and work.exception() is None and work.result():
                size = 4 * ctx.block_size
                ctx.pool.commit(
                    opened.table, namespace.digest, first, names[first:count], tokens[first * size : count * size]
                )
            ctx.pool.release(opened.table)
            ctx.flush_pool_events()
        return count - first if sound else 0

    def _copy(self, sources: Sequence[BlockRef], targets: Sequence[BlockRef]) -> bool:
        """In a thread: copy blocks with their checks; whether every byte is what was sealed."""
        arena = self._ctx.arena
        for source, target in zip(sources, targets, strict=True):
            for layer, check in enumerate(arena.block_checks(source.slot)):
                cell = arena.cell(target.slot, layer)
                cell[:] = arena.cell(source.slot, layer)
                if crc64(cell) != check:
                    return False
                arena.checks[layer, target.slot] = check
        return True


def sources_of(config: ClusterConfig) -> dict[str, tuple[str, ...]]:
    """Per tenant, by its mark: the salts of those whose prefixes it may read."""
    salt_of = {tenant.id: namespace_salt(tenant.id, tenant.salt, None) for tenant in config.tenants}
    return {
        tenant_mark(tenant.id, tenant.salt): tuple(salt_of[name] for name in tenant.shares_with)
        for tenant in config.tenants
        if tenant.shares_with
    }

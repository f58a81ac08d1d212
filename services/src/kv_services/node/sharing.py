"""Lets a tenant's prompts begin with KV that another tenant shares with it: read only, by a copy of its own.

A tenant that may read another's prefixes must not write among them, and what it computes behind them is its own. So the
shared blocks are copied into the reader's namespace, from this node's memory or from the node that holds more of them
where fetching is cheaper than computing: found from then on as its own.

H1: only tenants named in `shares_with` are looked at, and only what they store without a `cache_salt` of a client.
H2: a copy is findable after its bytes were compared with the original's CRC-64s.
H3: what cannot be copied or fetched is computed: sharing fails no request, and holds one up for no longer than a fetch.
"""

import asyncio
import itertools
from collections.abc import Sequence

from kv_core.block import BlockRef
from kv_core.checksum import crc64
from kv_core.errors import KVError
from kv_core.hashing import BlockHash, hash_tokens
from kv_core.namespace import Namespace
from kv_prefix.errors import NoSpaceError, StaleMatchError
from kv_services.config import ClusterConfig
from kv_services.node.context import NodeContext
from kv_services.node.prefill_events import PullPlan
from kv_services.node.prefill_state import PullPlanner
from kv_services.node.prefix_reader import ASK_HOLDER_NS, read_prefix
from kv_services.tenants import SEPARATOR, namespace_salt, tenant_mark


class Sharing:
    """The shared prefixes of one node.

    Args:
        plan_pull: what of a prompt to fetch from whom, where that is cheaper than computing it.
    """

    def __init__(self, ctx: NodeContext, plan_pull: PullPlanner) -> None:
        self._ctx = ctx
        self._plan_pull = plan_pull
        self._fetching: dict[bytes, asyncio.Task[int]] = {}
        self._ids = itertools.count(1)
        self._sources = sources_of(ctx.config)

    async def adopt(self, namespace: Namespace, tokens: bytes) -> int:
        """Copy what the namespace's tenant may read and lacks of a prompt's beginning; how many blocks."""
        sources = self._sources.get(namespace.salt.partition(SEPARATOR)[0], ())
        found = 0
        for salt in sources:
            shared = _with_salt(namespace, salt)
            found += await self._copy_from(namespace, shared, tokens)
            found += await self._fetch_from(namespace, shared, tokens)
        return found

    async def _fetch_from(self, namespace: Namespace, shared: Namespace, tokens: bytes) -> int:
        """Read what another node has of the shared prefix beyond what is here; how many blocks."""
        names = hash_tokens(shared, tokens[:-4])
        mine = self._ctx.pool.match(namespace.digest, hash_tokens(namespace, tokens[:-4]), tokens)
        plan = self._plan_pull(names, len(mine.refs))
        if plan is None:
            return 0
        last = names[plan.first_block + plan.num_blocks - 1]
        key = namespace.digest + last.sequence
        if key not in self._fetching:
            work = self._fetch(namespace, shared, tokens, plan, last)
            task = self._fetching[key] = asyncio.get_running_loop().create_task(work, name="shared prefix")
            task.add_done_callback(lambda _: self._fetching.pop(key, None))
        # The same prefix is wanted by two requests: it comes once. Whoever goes away leaves it to come.
        return await asyncio.shield(self._fetching[key])

    async def _fetch(
        self, namespace: Namespace, shared: Namespace, tokens: bytes, plan: PullPlan, last: BlockHash
    ) -> int:
        ctx, first, size = self._ctx, plan.first_block, 4 * self._ctx.block_size
        end = first + plan.num_blocks
        names = hash_tokens(namespace, tokens[: end * size])
        own = ctx.pool.match(namespace.digest, names, tokens)
        try:
            opened = ctx.pool.open(f"shared-{next(self._ids)}", own, end - len(own.refs), use_partial=False)
        except (NoSpaceError, StaleMatchError):
            return 0
        refs = opened.refs[first:]
        ctx.flush_pool_events()
        try:
            if len(own.refs) != first:
                return 0
            ctx.prepare(refs)
            prefix = tokens[: end * size]
            deadline_ns = ctx.clock.monotonic_ns() + ASK_HOLDER_NS
            await read_prefix(
                ctx, plan.holder, shared, last, prefix, first, refs, deadline_ns=deadline_ns, cause="a shared prefix"
            )
            ctx.pool.commit(opened.table, namespace.digest, first, names[first:], prefix[first * size :])
        except KVError:
            return 0
        finally:
            ctx.pool.release(opened.table)
            ctx.flush_pool_events()
        return end - first

    async def _copy_from(self, namespace: Namespace, shared: Namespace, tokens: bytes) -> int:
        """Copy what this node has of the shared prefix; how many blocks."""
        ctx = self._ctx
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


def _with_salt(namespace: Namespace, salt: str) -> Namespace:
    return Namespace(
        namespace.model_id,
        namespace.weights_revision,
        salt=salt,
        dtype=namespace.dtype,
        fidelity=namespace.fidelity,
        block_size=namespace.block_size,
    )


def sources_of(config: ClusterConfig) -> dict[str, tuple[str, ...]]:
    """Per tenant, by its mark: the salts of those whose prefixes it may read."""
    salt_of = {tenant.id: namespace_salt(tenant.id, tenant.salt, None) for tenant in config.tenants}
    return {
        tenant_mark(tenant.id, tenant.salt): tuple(salt_of[name] for name in tenant.shares_with)
        for tenant in config.tenants
        if tenant.shares_with
    }

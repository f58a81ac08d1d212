"""Offers a prefix to another node: grants him a lease on it, asks him to take it, waits until he has."""

from typing import Final

from kv_core.hashing import token_digest
from kv_core.ids import NodeId
from kv_services.messages import AdoptPrefix, PrefixAdopted
from kv_services.node.context import NodeContext
from kv_services.node.move_plan import Chain
from kv_services.node.store import LeaseDesk

MOVE_TIMEOUT_NS: Final = 20_000_000_000


async def offer(
    ctx: NodeContext, leases: LeaseDesk, chain: Chain, target: NodeId, first_block: int, *, copy: bool = False
) -> PrefixAdopted:
    """Have `target` read the blocks from `first_block` on, which it lacks.

    Args:
        copy: it stays here too, and he may evict colder blocks for it, within the share he has for copies.

    Raises:
        KVError: he refused, or was lost, or did not end in time; what he read is his own affair.
    """
    deadline_ns = ctx.clock.monotonic_ns() + MOVE_TIMEOUT_NS
    ctx.recovery.tried(target)
    await ctx.introductions.ensure(target, deadline_ns)
    namespace = ctx.replica.known(chain.namespace, ctx.block_size)
    lease_id, grant = leases.grant(
        target,
        chain.namespace,
        chain.names[-1],
        token_digest(chain.tokens),
        first_block=first_block,
        num_blocks=len(chain.names),
        lease_ns=MOVE_TIMEOUT_NS,
    )
    try:
        ask = AdoptPrefix(chain.namespace, namespace.scopes, chain.tokens, first_block, grant, copy)
        return await ctx.bus.request(target, ask, expect=PrefixAdopted, deadline_ns=deadline_ns)
    finally:
        leases.end(lease_id)

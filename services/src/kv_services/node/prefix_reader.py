"""Reads blocks of a prefix from another node that holds them: leased, read, verified, given back.

Decides nothing: who asks names the holder and has slots ready. Computing is always an answer, so a silent holder
costs no more than `ASK_HOLDER_NS`, and its link is judged by how it went.
"""

import contextlib
import logging
from collections.abc import Sequence
from typing import Final

from kv_core.block import BlockRef
from kv_core.errors import KVError
from kv_core.hashing import BlockHash, Tokens, token_digest
from kv_core.ids import NodeId
from kv_core.namespace import Namespace
from kv_prefix.errors import PrefixError
from kv_services.messages import LeasePrefix, NamespaceFields, PrefixLeased, ReleaseLease
from kv_services.node.context import NodeContext
from kv_transport import ReadGrant, TransferPriority
from kv_transport.codecs import Codec, accepted_under

ASK_HOLDER_NS: Final = 1_000_000_000
"""How long a holder may take to grant a lease: many times what it takes one that is alive."""

_log = logging.getLogger(__name__)


async def read_prefix(
    ctx: NodeContext,
    holder: NodeId,
    namespace: Namespace,
    last: BlockHash,
    tokens: Tokens,
    first_block: int,
    refs: Sequence[BlockRef],
    *,
    deadline_ns: int,
    cause: str,
) -> int:
    """Fill `refs` with the blocks `first_block ..` of the prefix that ends in `last`; how many bytes that were.

    Args:
        tokens: of the whole prefix, from block 0.
        cause: on whose behalf, for the log.

    Raises:
        KVError: the holder has it not, is silent, or bytes failed their check; nothing may be in `refs`, and nothing
            writes into them any more.
    """
    ctx.recovery.tried(holder)
    try:
        asked_until_ns = min(deadline_ns, ctx.clock.monotonic_ns() + ASK_HOLDER_NS)
        await ctx.introductions.ensure(holder, asked_until_ns)
        ask = LeasePrefix(
            namespace=NamespaceFields.of(namespace),
            sequence=last.sequence,
            check=last.check,
            first_block=first_block,
            num_blocks=first_block + len(refs),
            token_digest=token_digest(tokens),
            lease_ns=ctx.config.limits.lease_ms * 1_000_000,
        )
        leased = await ctx.bus.request(holder, ask, expect=PrefixLeased, deadline_ns=asked_until_ns)
        try:
            nbytes = await _read(ctx, ReadGrant.from_bytes(leased.grant), refs, accepted_under(namespace.fidelity))
        finally:
            ctx.bus.send(holder, ReleaseLease(leased.lease_id))
    except KVError as error:
        _log.warning("prefix not fetched request=%s holder=%s cause=%s", cause, holder, error)
        ctx.metrics.transfer_failed(type(error).__name__)
        if not isinstance(error, PrefixError):
            ctx.recovery.ended(holder, cause, error, reading=True)
        raise
    ctx.recovery.ended(holder, cause, None, reading=True)
    return nbytes


async def _read(ctx: NodeContext, grant: ReadGrant, refs: Sequence[BlockRef], accept: Sequence[Codec]) -> int:
    future = ctx.transfers.fetch(grant, refs, TransferPriority.HIGH, accept=accept)
    try:
        stats = await future.wait(ctx.config.limits.lease_ms)
    except KVError:
        # A deadline frees no memory (A4): what is late may still be written into these blocks.
        future.cancel()
        with contextlib.suppress(KVError):
            await future.wait()
        raise
    now_ns = ctx.clock.monotonic_ns()
    ctx.metrics.transfer_done(now_ns, stats.transport, stats.nbytes, stats.duration_ns, stats.retries)
    ctx.cost.fetched(stats.nbytes, stats.duration_ns)
    return stats.nbytes

"""The store role, which every node with an arena has: lets peers read its blocks under leases that end by themselves.

L1: a lease is granted only when the reader's digest over all tokens of the prefix is that of the stored tokens.
L2: leased blocks stay in place until the lease is released, its time is over, or its reader is dead.
"""

import itertools
import logging
from dataclasses import dataclass

from kv_bus.interface import Reply, Request
from kv_core.hashing import BlockHash
from kv_core.ids import NodeId, RequestId
from kv_prefix.pins import Receipt
from kv_services.messages import LeasePrefix, PrefixLeased, ReleaseLease
from kv_services.node.context import NodeContext

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Lease:
    reader: NodeId
    receipt: Receipt
    ticket: int


class LeaseDesk:
    """Grants and ends the read leases of one node."""

    def __init__(self, ctx: NodeContext) -> None:
        self._ctx = ctx
        self._leases: dict[int, _Lease] = {}
        self._ids = itertools.count(1)

    def __len__(self) -> int:
        """Leases that are out."""
        return len(self._leases)

    def listen(self) -> None:
        """Take requests from the bus."""
        self._ctx.bus.handle(LeasePrefix, self._on_lease)
        self._ctx.bus.handle(ReleaseLease, self._on_release)

    def expire(self) -> None:
        """End the leases whose time is over; called at a steady pace."""
        ended = {receipt.receipt_id for receipt in self._ctx.pool.expire(self._ctx.clock.monotonic_ns())}
        for lease_id, lease in list(self._leases.items()):
            if lease.receipt.receipt_id in ended:
                del self._leases[lease_id]
                self._ctx.transfers.release_lease(lease.ticket)
                _log.warning("lease ended by time reader=%s lease=%d", lease.reader, lease_id)
        self._ctx.flush_pool_events()

    def reader_died(self, node_id: NodeId) -> None:
        """End what a dead reader held."""
        for lease_id, lease in list(self._leases.items()):
            if lease.reader == node_id:
                self._end(lease_id)

    def close(self) -> None:
        """End every lease. Idempotent."""
        for lease_id in list(self._leases):
            self._end(lease_id)

    async def _on_lease(self, request: Request[LeasePrefix]) -> Reply:
        message, ctx = request.message, self._ctx
        await ctx.introductions.ensure(request.sender, request.deadline_ns)
        namespace = message.namespace.namespace()
        limit_ns = ctx.config.limits.lease_ms * 1_000_000
        lease_ns = min(message.lease_ns, limit_ns)
        name = BlockHash(message.sequence, message.check)
        await ctx.tiers.promote_named(name, request.deadline_ns)
        lease = ctx.pool.lease(
            request.sender,
            namespace.digest,
            name,
            message.token_digest,
            until_ns=ctx.clock.monotonic_ns() + lease_ns,
            first_block_idx=message.first_block,
        )
        lease_id = next(self._ids)
        size = ctx.block_size
        grant = ctx.transfers.lease_reads(
            RequestId(f"lease-{lease_id}"),
            lease.refs,
            seq_start=message.first_block * size,
            seq_end=message.num_blocks * size,
            lease_ms=max(1, lease_ns // 1_000_000),
        )
        self._leases[lease_id] = _Lease(request.sender, lease.receipt, grant.ticket)
        return PrefixLeased(lease_id, grant.to_bytes(), lease_ns)

    async def _on_release(self, request: Request[ReleaseLease]) -> Reply:
        lease = self._leases.get(request.message.lease_id)
        if lease is not None and lease.reader == request.sender:
            self._end(request.message.lease_id)
        return None

    def _end(self, lease_id: int) -> None:
        lease = self._leases.pop(lease_id)
        self._ctx.transfers.release_lease(lease.ticket)
        self._ctx.pool.release(lease.receipt)
        self._ctx.flush_pool_events()

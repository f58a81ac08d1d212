"""The store role, which every node with an arena has: lets peers read its blocks under leases that end by themselves.

L1: a lease is granted only when the reader's digest over all tokens of the prefix is that of the stored tokens.
L2: leased blocks stay in place until the lease is released, its time is over, or its reader is dead.
L3: once a leaving node has given its blocks away, nobody begins to read there: that it is safe to stop stays true.
"""

import itertools
import logging
from dataclasses import dataclass

from kv_bus.interface import Reply, Request
from kv_client.messages import LeaseRenewed, RenewLease
from kv_core.errors import KVError
from kv_core.hashing import BlockHash
from kv_core.ids import NodeId, RequestId
from kv_core.namespace import EXACT, Fidelity
from kv_prefix.errors import HolderLeavingError, LeaseExpiredError
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
        self.ending = False
        """Whether no lease is given any more; those that are out go on."""

    def __len__(self) -> int:
        """Leases that are out."""
        return len(self._leases)

    def listen(self) -> None:
        """Take requests from the bus."""
        self._ctx.bus.handle(LeasePrefix, self._on_lease)
        self._ctx.bus.handle(ReleaseLease, self._on_release)
        self._ctx.bus.handle(RenewLease, self._on_renew)

    def expire(self) -> None:
        """End the leases whose time is over; called at a steady pace."""
        ended = {receipt.receipt_id for receipt in self._ctx.pool.expire(self._ctx.clock.monotonic_ns())}
        for lease_id, lease in list(self._leases.items()):
            if lease.receipt.receipt_id in ended:
                del self._leases[lease_id]
                self._ctx.transfers.release_lease(lease.ticket)
                _log.warning("lease ended by time reader=%s lease=%d", lease.reader, lease_id)
        self._ctx.flush_pool_events()

    def readers(self) -> set[NodeId]:
        """Who holds leases."""
        return {lease.reader for lease in self._leases.values()}

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
        self._refuse_if_ending()
        limit_ns = ctx.config.limits.lease_ms * 1_000_000
        lease_ns = min(message.lease_ns, limit_ns)
        name, namespace = BlockHash(message.sequence, message.check), message.namespace.namespace()
        await ctx.tiers.promote_named(name, request.deadline_ns)
        lease_id, grant = self.grant(
            request.sender,
            namespace.digest,
            name,
            message.token_digest,
            first_block=message.first_block,
            num_blocks=message.num_blocks,
            lease_ns=lease_ns,
            published=namespace.fidelity,
        )
        return PrefixLeased(lease_id, grant, lease_ns)

    def _refuse_if_ending(self) -> None:
        if self.ending:
            raise HolderLeavingError(node=self._ctx.node_id)

    def grant(
        self,
        reader: NodeId,
        namespace: bytes,
        name: BlockHash,
        token_digest: bytes,
        *,
        first_block: int,
        num_blocks: int,
        lease_ns: int,
        published: Fidelity = EXACT,
    ) -> tuple[int, bytes]:
        """Let `reader` read the blocks `[first_block, num_blocks)` of the prefix that ends in `name`: the lease's
        number, and the grant for the reader's transfers.

        Args:
            published: fidelity of the namespace. A reader that accepts no lossy codec need not know it: it gets the
                bytes as they are, under the name they have.

        Raises:
            PrefixError: the prefix is not here, or has other tokens (L1), or the node is leaving (L3).
            TransportError: the blocks that are asked for are not those of the prefix.
        """
        self._refuse_if_ending()
        ctx = self._ctx
        lease = ctx.pool.lease(
            reader,
            namespace,
            name,
            token_digest,
            until_ns=ctx.clock.monotonic_ns() + lease_ns,
            first_block_idx=first_block,
        )
        lease_id = next(self._ids)
        size = ctx.block_size
        try:
            grant = ctx.transfers.lease_reads(
                RequestId(f"lease-{lease_id}"),
                lease.refs,
                seq_start=first_block * size,
                seq_end=num_blocks * size,
                lease_ms=max(1, lease_ns // 1_000_000),
                fidelity=ctx.exact.fidelity(published, [ref.slot for ref in lease.refs]),
            )
        except KVError:
            # Nobody would ever give it back: whoever asked was told no.
            ctx.pool.release(lease.receipt)
            raise
        self._leases[lease_id] = _Lease(reader, lease.receipt, grant.ticket)
        return lease_id, grant.to_bytes()

    def end(self, lease_id: int) -> None:
        """End a lease, if it has not ended."""
        if lease_id in self._leases:
            self._end(lease_id)

    async def _on_renew(self, request: Request[RenewLease]) -> Reply:
        ctx, message = self._ctx, request.message
        lease = self._leases.get(message.lease_id)
        if lease is None or lease.reader != request.sender:
            raise LeaseExpiredError(receipt=message.lease_id)
        lease_ns = min(message.lease_ns, ctx.config.limits.lease_ms * 1_000_000)
        now_ns = ctx.clock.monotonic_ns()
        receipt = ctx.pool.renew(lease.receipt, now_ns=now_ns, until_ns=now_ns + lease_ns)
        ctx.transfers.renew_lease(lease.ticket, max(1, lease_ns // 1_000_000))
        self._leases[message.lease_id] = _Lease(lease.reader, receipt, lease.ticket)
        return LeaseRenewed(lease_ns)

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

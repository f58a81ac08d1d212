"""`KVCacheTransferEngine`: moves the KV of requests between arenas, layer by layer, shallow layers first.

Four occasions use it: hand-over from prefill to decode, nodes joining or leaving, promotion from a slower tier, and
reading a shared prefix. Two directions: a receiver grants writes into slots it reserved (`grant_writes`, `expect`) and
a sender fills them (`open_handover`, `transfer_for_decode`); or a holder leases reads (`lease_reads`) and a reader
fetches (`fetch`).
"""

from collections.abc import Sequence

from kv_core.block import BlockRef, KVCacheBlock
from kv_core.ids import NodeId, RequestId
from kv_transport.agent import TransferAgent
from kv_transport.futures import TransferFuture
from kv_transport.handover import Handover
from kv_transport.inbound import Inbound
from kv_transport.tickets import ReadGrant, WriteGrant
from kv_transport.types import TransferPriority


class KVCacheTransferEngine:
    """See the module. Lives on the event loop of its agent."""

    def __init__(self, agent: TransferAgent) -> None: ...

    # The receiver's side of a hand-over.

    def grant_writes(
        self,
        request_id: RequestId,
        blocks: Sequence[BlockRef],
        *,
        seq_start: int,
        seq_end: int,
        layers: tuple[int, int] | None = None,
        writer: NodeId | None = None,
    ) -> WriteGrant:
        """Let a peer write these blocks (all of one registered arena, generations already raised).

        The slots belong to the grant from now on: they are free again when `Inbound.released()` returns.
        """
        raise NotImplementedError

    def expect(self, request_id: RequestId, grant: WriteGrant, *, timeout_ms: int | None = None) -> Inbound:
        """Watch a grant being filled. `timeout_ms` bounds the whole hand-over, from now."""
        raise NotImplementedError

    # The sender's side of a hand-over.

    def open_handover(
        self, request_id: RequestId, grant: WriteGrant, priority: TransferPriority = TransferPriority.HIGH
    ) -> Handover:
        """Start sending under a grant; connects and announces itself at once. Feed it with `Handover.submit`.

        Raises:
            UnknownPeer, StaleIncarnation: the receiver was not introduced, or has restarted since.
        """
        raise NotImplementedError

    def add_grant(self, grant: WriteGrant) -> None:
        """Keep a grant for `transfer_for_decode`, which names only request and node."""

    def transfer_for_decode(
        self,
        request_id: RequestId,
        kv_blocks: Sequence[KVCacheBlock],
        remote_node_id: NodeId,
        priority: TransferPriority = TransferPriority.HIGH,
    ) -> TransferFuture:
        """Send complete, sealed blocks to the decode node under the grant given to `add_grant`.

        Raises:
            GrantRefused: there is no grant of that node for that request, or the blocks are not the ones it is for.
        """
        raise NotImplementedError

    # One-sided reads.

    def lease_reads(
        self,
        request_id: RequestId,
        blocks: Sequence[BlockRef],
        *,
        seq_start: int,
        seq_end: int,
        lease_ms: int,
        layers: tuple[int, int] | None = None,
    ) -> ReadGrant:
        """Let a peer read these blocks for `lease_ms`. Pin them for at least as long."""
        raise NotImplementedError

    def renew_lease(self, ticket: int, lease_ms: int) -> None:
        """Let the lease live `lease_ms` from now. Raises `LeaseEnded` when it is over already."""

    def release_lease(self, ticket: int) -> None:
        """End a lease; reads that are not over fail with `LeaseEnded`. Idempotent."""

    def fetch(
        self,
        read_grant: ReadGrant,
        into: Sequence[BlockRef],
        priority: TransferPriority = TransferPriority.HIGH,
        *,
        layers: tuple[int, int] | None = None,
    ) -> TransferFuture:
        """Read leased blocks into our own (one per position, generations already raised); shallow layers first."""
        raise NotImplementedError

    async def close(self) -> None:
        """Cancel what is running and wait for its memory; idempotent. The agent stays open."""

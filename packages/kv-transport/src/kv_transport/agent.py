"""`TransferAgent`: one node's door to the memory of others, in the shape that users know from NIXL.

Register memory, hand out your metadata, add remote agents, prepare descriptor lists once, post transfers many times by
index, wait for them, release them. Adding an agent does not connect; the first transfer does.

The agent owns every region, session, grant, lease and transfer of its process and can list them (`inventory`).
"""

from collections.abc import AsyncIterator, Sequence
from types import TracebackType
from typing import Self

from kv_core.clock import Clock
from kv_core.ids import Incarnation, NodeId, RegionId
from kv_transport.arena import Arena
from kv_transport.config import TransportConfig
from kv_transport.regions import Inventory, MemoryRegion, Notif, SharedBuffer, XferDesc
from kv_transport.tickets import AgentMetadata
from kv_transport.types import Access, TransferPriority, XferOp
from kv_transport.xfer import Xfer, XferDlist


class TransferAgent:
    """See the module. Use as `async with TransferAgent(...) as agent:`; all methods belong to its event loop."""

    def __init__(
        self, node: NodeId, incarnation: Incarnation, config: TransportConfig, clock: Clock | None = None
    ) -> None: ...

    async def start(self) -> None:
        """Bind what the configuration names. Raises `BackendUnavailable` with the reason."""

    async def close(self) -> None:
        """End every transfer, session and thread; idempotent. Registered memory stays its owner's."""

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    def register_memory(self, memory: Arena | SharedBuffer, access: Access = Access.NONE) -> MemoryRegion:
        """Make memory reachable under a new region id. With `Access.NONE` peers need a grant or lease for each byte."""
        raise NotImplementedError

    def deregister_memory(self, region: RegionId) -> None:
        """Forget a region. Raises `InvalidDescriptor` while a grant, lease or transfer uses it."""

    def get_agent_metadata(self, for_node: NodeId, for_incarnation: Incarnation) -> AgentMetadata:
        """The introduction to give to one peer, over an authenticated channel (it carries that peer's key)."""
        raise NotImplementedError

    def add_remote_agent(self, metadata: AgentMetadata) -> NodeId:
        """Learn how to reach a peer. A higher incarnation replaces the old one, whose transfers fail; the same one
        refreshes the list of regions; a lower one raises `StaleIncarnation`. Nothing connects yet."""
        raise NotImplementedError

    async def remove_remote_agent(self, node: NodeId) -> None:
        """Disconnect and forget. Its transfers fail with `ConnectionLost`. Unknown nodes are no error."""

    def prep_xfer_dlist(self, node: NodeId | None, descs: Sequence[XferDesc]) -> XferDlist:
        """Check a list of pieces once, so that transfers can name them by index. `None` means our own memory."""
        raise NotImplementedError

    def make_prepped_xfer(
        self,
        op: XferOp,
        local: XferDlist,
        local_indices: Sequence[int],
        remote: XferDlist,
        remote_indices: Sequence[int],
        *,
        notif: bytes = b"",
        priority: TransferPriority = TransferPriority.HIGH,
    ) -> Xfer:
        """A transfer of pairwise equally long pieces; `notif` reaches the peer after its last byte (writes only)."""
        raise NotImplementedError

    def initialize_xfer(
        self,
        op: XferOp,
        local: Sequence[XferDesc],
        remote: Sequence[XferDesc],
        node: NodeId,
        *,
        notif: bytes = b"",
        priority: TransferPriority = TransferPriority.HIGH,
    ) -> Xfer:
        """`prep_xfer_dlist` and `make_prepped_xfer` in one, for transfers that are made once."""
        raise NotImplementedError

    def transfer(self, xfer: Xfer) -> None:
        """Post it; wait with `await xfer.done()`. Raises `XferActive` for one that is already posted."""

    async def send_notif(self, node: NodeId, payload: bytes) -> None:
        """Send bytes to a peer's `notifs()`; connects if needed."""

    def notifs(self) -> AsyncIterator[Notif]:
        """Notifications in order of arrival, until the agent is closed. A notification that came with a transfer is
        given out after the transfer's bytes were verified."""
        raise NotImplementedError

    def inventory(self) -> Inventory:
        """Everything alive, each with its owner."""
        raise NotImplementedError

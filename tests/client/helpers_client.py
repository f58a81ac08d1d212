"""Clients of a real node process, and a holder in this process whose memory can be damaged."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from pathlib import Path

from kv_bus.interface import DEFERRED, PeerAddress, Reply, Request
from kv_bus.keys import (
    AllowList,
    AllowListFile,
    create_key_pair,
    load_key_pair,
    read_allow_list,
    write_allow_list,
)
from kv_bus.ports import pick_ports
from kv_bus.stamps import LamportStamper
from kv_bus.zmq_bus import ZmqBus, ZmqBusConfig
from kv_client import ClientConfig
from kv_client.messages import (
    READER_MESSAGES,
    AgentIntroduced,
    IntroduceAgent,
    LeasePrefix,
    PrefixLeased,
    ReleaseLease,
)
from kv_core.block import BlockGeometry, BlockRef
from kv_core.dtypes import DType
from kv_core.ids import Incarnation, NodeId, RequestId
from kv_core.namespace import Namespace
from kv_core.wire import Registry
from kv_prefix.errors import DigestMismatchError, NotHeldError
from kv_transport import AgentMetadata, Arena, KVCacheTransferEngine, TransferAgent, TransportConfig

GEOMETRY = BlockGeometry(num_layers=3, num_kv_heads=2, head_dim=16, dtype=DType.FP16, block_size=8)
NAMESPACE = Namespace("model", "weights", dtype=DType.FP16, block_size=8)
TOKENS = list(range(100, 140))
NUM_BLOCKS = 5
HOLDER, READER = NodeId("holder"), NodeId("reader")


def transport(folder: Path | None) -> TransportConfig:
    """shm with a folder, else tcp."""
    if folder is None:
        return TransportConfig(transport="tcp")
    return TransportConfig(transport="shm", socket_folder=folder, tcp_host=None)


def admit(keys: Path, allow_list: Path, name: NodeId) -> None:
    """Give a reader a key pair and put it in the cluster's list."""
    pair = create_key_pair(keys, name)
    listed = read_allow_list(allow_list)
    write_allow_list(allow_list, AllowList(listed.cluster, {**listed.keys, name: pair.public_key}))


class Holder:
    """What a node does for its readers, and no more: for the ends that no healthy node comes to."""

    def __init__(self, keys: Path, allow_list: Path, address: PeerAddress, incarnation: int = 1) -> None:
        self.bus = ZmqBus(
            ZmqBusConfig(
                node_id=HOLDER,
                incarnation=Incarnation(incarnation),
                requests=address.requests,
                events=address.events,
                keys=load_key_pair(keys, HOLDER),
                allow_list=AllowListFile(allow_list),
            ),
            Registry(*READER_MESSAGES),
            stamper=LamportStamper(HOLDER),
        )
        self.agent = TransferAgent(HOLDER, Incarnation(incarnation), TransportConfig(transport="tcp"))
        self.arena = Arena.create(GEOMETRY, 8, name="holder")
        self.silent = False
        self.wrong_range = False
        self.mismatch = False
        self.asked = 0
        self.leased: set[int] = set()

    async def start(self) -> None:
        self.engine = KVCacheTransferEngine(self.agent)
        region = self.agent.register_memory(self.arena).region
        self.refs = [BlockRef(region, slot, self.arena.raise_generation(slot)) for slot in range(NUM_BLOCKS)]
        for ref in self.refs:
            self.arena.array[ref.slot] = ref.slot + 1
            self.arena.seal_block(ref.slot)
        await self.agent.start()
        self.bus.handle(IntroduceAgent, self._introduce)
        self.bus.handle(LeasePrefix, self._lease)
        self.bus.handle(ReleaseLease, self._release)
        await self.bus.start()

    async def close(self) -> None:
        await self.engine.close()
        await self.agent.close()
        await self.bus.close()
        self.arena.close()

    def _introduce(self, request: Request[IntroduceAgent]) -> Reply:
        self.agent.add_remote_agent(AgentMetadata.from_bytes(request.message.metadata))
        return AgentIntroduced(self.agent.get_agent_metadata(request.sender, request.incarnation).to_bytes())

    def _lease(self, request: Request[LeasePrefix]) -> Reply:
        self.agent.peer(request.sender)
        self.asked += 1
        if self.silent:
            return DEFERRED
        if self.mismatch:
            raise DigestMismatchError(prefix_hash=request.message.sequence.hex())
        count = request.message.num_blocks
        if count > NUM_BLOCKS:
            raise NotHeldError(prefix_hash=request.message.sequence.hex())
        refs = self.refs[: count - self.wrong_range]
        grant = self.engine.lease_reads(
            RequestId("lease"), refs, seq_start=0, seq_end=len(refs) * GEOMETRY.block_size, lease_ms=60_000
        )
        self.leased.add(grant.ticket)
        return PrefixLeased(grant.ticket, grant.to_bytes(), 60_000_000_000)

    def _release(self, request: Request[ReleaseLease]) -> Reply:
        self.leased.discard(request.message.lease_id)
        self.engine.release_lease(request.message.lease_id)
        return None


class Pair:
    """A cluster of one holder and what a reader of it needs."""

    def __init__(self, folder: Path) -> None:
        self.keys, self.allow_list = folder / "keys", folder / "keys" / "cluster.keys"
        pairs = [create_key_pair(self.keys, name) for name in (HOLDER, READER)]
        write_allow_list(self.allow_list, AllowList("test", {pair.node_id: pair.public_key for pair in pairs}))
        self.ports = [f"tcp://127.0.0.1:{port}" for port in pick_ports(4)]
        self.address = PeerAddress(HOLDER, *self.ports[:2])

    def config(self, timeout_ms: int = 20_000) -> ClientConfig:
        return ClientConfig(
            node_id=READER,
            requests=self.ports[2],
            events=self.ports[3],
            keys_folder=self.keys,
            allow_list=self.allow_list,
            holder=self.address,
            geometry=GEOMETRY,
            num_slots=6,
            transport=transport(None),
            timeout_ms=timeout_ms,
        )

    @contextlib.asynccontextmanager
    async def holder(self, incarnation: int = 1) -> AsyncIterator[Holder]:
        holder = Holder(self.keys, self.allow_list, self.address, incarnation)
        await holder.start()
        try:
            yield holder
        finally:
            await holder.close()


async def eventually(condition: Callable[[], bool], within_s: float = 20) -> None:
    """Wait until it holds."""
    async with asyncio.timeout(within_s):
        while not condition():  # noqa: ASYNC110 - nobody announces these states
            await asyncio.sleep(0.01)

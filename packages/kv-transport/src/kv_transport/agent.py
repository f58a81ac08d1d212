"""`TransferAgent`: one node's door to the memory of others, in the shape that users know from NIXL.

Register memory, hand out your metadata, add remote agents, prepare descriptor lists once, post transfers many times by
index, wait for them, release them. Adding an agent does not connect; the first transfer does.

The agent owns every region, session, grant, lease and transfer of its process and can list them (`inventory`).
"""

import asyncio
import itertools
import logging
import secrets
import socket
from collections import deque
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Sequence
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Final, Self

from kv_core.clock import Clock, SystemClock
from kv_core.errors import KVError
from kv_core.ids import Incarnation, NodeId, RegionId
from kv_transport import limits
from kv_transport.arena import Arena
from kv_transport.auth import KEY_BYTES, session_key
from kv_transport.backends.base import Backend, Surroundings
from kv_transport.backends.memory_network import MemoryNetwork
from kv_transport.backends.registry import make_backends
from kv_transport.codec_choice import CodecPolicy
from kv_transport.codec_rates import CodecRates
from kv_transport.codecs import Codec
from kv_transport.config import TransportConfig
from kv_transport.direct import DirectDesk, Posting
from kv_transport.errors import (
    AgentClosed,
    InvalidDescriptor,
    StaleIncarnation,
    TransferTooLarge,
    UnknownPeer,
    UnknownRegion,
)
from kv_transport.flow import Flow
from kv_transport.leases import LeaseKeeper
from kv_transport.ledger import Ledger
from kv_transport.listing import inventory_of, peer_stats
from kv_transport.peers import Peer
from kv_transport.poster import LoopPoster
from kv_transport.recovery import RecoveryAction, TransferTask
from kv_transport.regions import Inventory, MemoryRegion, Notif, RegionTable, SharedBuffer, XferDesc, check_piece
from kv_transport.stats import AgentStats, Totals
from kv_transport.tickets import WIRE_VERSION, AgentMetadata, BackendAddress, ReadGrant, RegionInfo, WriteGrant
from kv_transport.types import Access, PeerName, TransferPriority, XferOp
from kv_transport.units import Unit
from kv_transport.xfer import Xfer, XferDlist, check_notif, check_pairs

_log = logging.getLogger(__name__)


class TransferAgent:
    """See the module. Use as `async with TransferAgent(...) as agent:`; all methods belong to its event loop."""

    def __init__(
        self,
        node: NodeId,
        incarnation: Incarnation,
        config: TransportConfig,
        clock: Clock | None = None,
        network: MemoryNetwork | None = None,
    ) -> None:
        """`network` is where agents of the `memory` transport meet."""
        self.name: Final = PeerName(node, incarnation)
        self.config: Final = config
        self.clock: Final[Clock] = clock or SystemClock()
        self.regions: Final = RegionTable(node)
        self._network = network
        self._secret = secrets.token_bytes(KEY_BYTES)
        self._host_id = _host_id()
        self._backends: list[Backend] = []
        self._peers: dict[NodeId, Peer] = {}
        # Known no more, but what they were given to move may still be under way.
        self._leaving: dict[Peer, None] = {}
        self._xfers: dict[str, Xfer] = {}
        self._tasks: dict[asyncio.Task[None], None] = {}
        self._notifs: deque[Notif] = deque()
        self._notified: asyncio.Future[None] | None = None
        self._serial = 0
        self._nonce = 0
        self._puts = itertools.count(1)
        self._started = self._closed = False
        self._totals = Totals()
        self.on_recovery: Callable[[TransferTask, RecoveryAction, KVError], None] = lambda task, action, error: None
        """Told of what was done about a fault inside a transfer that goes on: a retry, or tcp from now on."""

    # Life.

    async def start(self) -> None:
        """Bind what the configuration names. Raises `BackendUnavailable` with the reason."""
        if self._started:
            return
        self.loop = asyncio.get_running_loop()
        self.poster = LoopPoster(self.loop)
        self.ledger = Ledger(self.regions, self.poster, self._deliver)
        self.ledger.quarantine_max = self.config.quarantine_slots_max
        self._direct = DirectDesk(self.loop, self.regions, self._totals, self._plain_policy, self._count)
        self.leases = LeaseKeeper(self.ledger.reads, self.loop, self.clock)
        self._started = True
        self._around = Surroundings(
            me=self.name,
            secret=self._secret,
            config=self.config,
            clock=self.clock,
            loop=self.loop,
            poster=self.poster,
            ledger=self.ledger,
            on_note=self._deliver,
            spawn=self._spawn,
            codec_rates=CodecRates(),
            on_recovery=lambda task, action, error: self.on_recovery(task, action, error),
        )
        self._backends = make_backends(self._around, self._host_id, self._network)
        try:
            for backend in self._backends:
                await backend.start()
        except BaseException:
            await self.close()
            raise

    async def close(self) -> None:
        """End every transfer, session and thread; idempotent. Registered memory stays its owner's."""
        if self._closed or not self._started:
            self._closed = True
            return
        self._closed = True
        error = AgentClosed(node=self.name.node)
        for peer in [*self._peers.values(), *self._leaving]:
            await peer.close(error)
        self.leases.close()
        for backend in self._backends:
            await backend.close()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._wake_consumer()

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    # Memory.

    def register_memory(self, memory: Arena | SharedBuffer, access: Access = Access.NONE) -> MemoryRegion:
        """Make memory reachable under a new region id. With `Access.NONE` peers need a grant or lease for each byte."""
        return self.regions.add(memory, access)

    def deregister_memory(self, region: RegionId) -> None:
        """Forget a region. Raises `InvalidDescriptor` while a grant, lease or transfer uses it."""
        for peer in self._peers.values():
            peer.take_answers()
        self.regions.remove(region)

    # Peers.

    def get_agent_metadata(self, for_node: NodeId, for_incarnation: Incarnation) -> AgentMetadata:
        """The introduction to give to one peer, over an authenticated channel (it carries that peer's key)."""
        self.require_running()
        addresses = [(backend.scheme, backend.address()) for backend in self._backends]
        return AgentMetadata(
            wire_version=WIRE_VERSION,
            node=self.name.node,
            incarnation=self.name.incarnation,
            made_for_node=for_node,
            made_for_incarnation=for_incarnation,
            session_key=session_key(self._secret, PeerName(for_node, for_incarnation)),
            host_id=self._host_id,
            addresses=[BackendAddress(scheme, address) for scheme, address in addresses if address is not None],
            regions=[region.info() for region in self.regions.all()],
        )

    def add_remote_agent(self, metadata: AgentMetadata) -> NodeId:
        """Learn how to reach a peer. Nothing connects yet.

        A higher incarnation replaces the old one, whose transfers fail; the same one refreshes its regions.

        Raises:
            StaleIncarnation: a lower incarnation than the one known, or made for another life of ours.
            InvalidDescriptor: another wire version, or made for another node.
        """
        self.require_running()
        if metadata.wire_version != WIRE_VERSION:
            raise InvalidDescriptor(
                what="wire version",
                value=metadata.wire_version,
                reason=f"{metadata.node} differs from our {WIRE_VERSION}",
            )
        if metadata.made_for_node != self.name.node:
            raise InvalidDescriptor(what="metadata", value=metadata.made_for_node, reason=f"we are {self.name.node}")
        if metadata.made_for_incarnation != self.name.incarnation:
            raise StaleIncarnation(
                peer=self.name.node, found=self.name.incarnation, expected=metadata.made_for_incarnation
            )
        node = metadata.name.node
        known = self._peers.get(node)
        if known is not None and metadata.incarnation < known.name.incarnation:
            raise StaleIncarnation(peer=node, found=known.name.incarnation, expected=metadata.incarnation)
        if known is not None and metadata.incarnation == known.name.incarnation:
            known.metadata = metadata
            return node
        if known is None and len(self._peers) >= limits.PEERS_MAX:
            raise TransferTooLarge(what="list of peers", size=len(self._peers) + 1, limit=limits.PEERS_MAX)
        self._peers[node] = Peer(self._around, metadata, self._backends, self._next_nonce)
        if known is not None:
            restarted = StaleIncarnation(peer=node, found=metadata.incarnation, expected=known.name.incarnation)
            self._leaving[known] = None
            self._spawn(self._let_go(known, restarted))
        return node

    async def remove_remote_agent(self, node: NodeId, incarnation: Incarnation | None = None) -> None:
        """Disconnect and forget. Its transfers fail with `ConnectionLost`. Unknown nodes are no error.

        Args:
            incarnation: forget this life only; when another one is known by now, nothing happens.
        """
        peer = self._peers.get(node)
        if peer is not None and incarnation in (None, peer.name.incarnation):
            del self._peers[node]
            self._leaving[peer] = None
            await self._let_go(peer)

    def peer(self, node: NodeId) -> Peer:
        """For the engine. Raises `UnknownPeer`."""
        self.require_running()
        peer = self._peers.get(node)
        if peer is None:
            raise UnknownPeer(peer=node)
        return peer

    def require_running(self) -> None:
        """Raise `AgentClosed` before `start` and after `close`."""
        if self._closed or not self._started:
            raise AgentClosed(node=self.name.node)

    # Transfers by descriptor.

    def prep_xfer_dlist(self, node: NodeId | None, descs: Sequence[XferDesc]) -> XferDlist:
        """Check a list of pieces once, so that transfers can name them by index. `None` means our own memory.

        Raises:
            InvalidDescriptor: a piece lies outside its region.
            UnknownRegion, UnknownPeer.
        """
        for desc in descs:
            if node is None:
                check_piece(desc, self.regions.get(desc.region).nbytes)
            else:
                check_piece(desc, self._remote_region(node, desc.region).nbytes)
        return XferDlist(node, descs)

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
        """A transfer of pairwise equally long pieces; `notif` reaches the peer after its last byte (writes only).

        Raises:
            InvalidDescriptor: the lists do not fit together.
            GrantRefused: the peer has not opened that region for this operation.
        """
        mine, theirs = local.pick(local_indices), remote.pick(remote_indices)
        if local.node is not None or remote.node is None:
            raise InvalidDescriptor(what="lists", value=str(remote.node), reason="need our own, then a peer's")
        check_pairs(op, mine, theirs, partial(self._remote_region, remote.node), notif)
        self._serial += 1
        xfer = Xfer(
            f"xfer-{self._serial}", op, remote.node, mine, theirs, notif, priority, on_release=self._forget_xfer
        )
        self._xfers[xfer.name] = xfer
        return xfer

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
        mine, theirs = self.prep_xfer_dlist(None, local), self.prep_xfer_dlist(node, remote)
        return self.make_prepped_xfer(
            op, mine, range(len(mine)), theirs, range(len(theirs)), notif=notif, priority=priority
        )

    def transfer(self, xfer: Xfer) -> None:
        """Post it; wait with `await xfer.done()`. Raises `XferActive` for one that is in flight or released."""
        direct = xfer.direct
        if direct is not None and self._peers.get(xfer.node) is direct.host and direct.again(next(self._puts)):
            return
        xfer.require_idle("posting")
        peer = self.peer(xfer.node)
        units = xfer.units(self.regions, peer.unit_bytes)
        units[-1].put = next(self._puts)
        if len(units) == 1:
            (region,) = xfer.regions
            direct = peer.post_direct(self._direct, units[0], xfer.name, region)
            if direct is not None:
                xfer.begin(direct)
                return
        flow = self.start_flow(
            peer,
            name=xfer.name,
            kind="xfer",
            priority=xfer.priority,
            ticket=None,
            layers=range(0),
            total_bytes=xfer.total_bytes,
            regions=set(xfer.regions),
        )
        xfer.begin(flow)
        if xfer.notif and len(units) > 1:
            # The notification comes after every byte: its unit is posted when the others are verified.
            flow.add(units[:-1])
            flow.when_drained(partial(_add_last, flow, units[-1]))
        else:
            _add_last(flow, *units)

    async def send_notif(self, node: NodeId, payload: bytes) -> None:
        """Send bytes to a peer's `notifs()`; connects if needed."""
        check_notif(payload)
        (await self.peer(node).connect()).send_note(payload)

    async def notifs(self) -> AsyncIterator[Notif]:
        """Notifications in order of arrival, until the agent is closed; for one consumer.

        A notification that came with a transfer is given out after the transfer's bytes were verified.
        """
        while True:
            while self._notifs:
                yield self._notifs.popleft()
            if self._closed:
                return
            self._notified = self.loop.create_future()
            await self._notified

    # What there is.

    def inventory(self) -> Inventory:
        """Everything alive, each with its owner."""
        if not self._started:
            return Inventory()
        return inventory_of(self.regions, self.ledger, self.leases, self._peers.values(), self._backends)

    def stats(self) -> AgentStats:
        """Figures since the start."""
        totals = self._totals
        peers = [peer_stats(peer, self._backends) for peer in self._peers.values()]
        return AgentStats(
            sent_bytes=dict(totals.sent),
            fetched_bytes=dict(totals.fetched),
            received_bytes=self.ledger.received_bytes() if self._started else {},
            transfers_done=totals.done,
            transfers_failed=totals.failed,
            retries=totals.retries,
            checksum_failures=self.ledger.checksum_failures if self._started else 0,
            units_refused=self.ledger.refusals if self._started else 0,
            notifs_dropped=totals.notifs_dropped,
            quarantined_slots=self.ledger.quarantined_slots(None) if self._started else 0,
            peers=tuple(peers),
        )

    # For the engine.

    def start_flow(
        self,
        peer: Peer,
        *,
        name: str,
        kind: str,
        priority: TransferPriority,
        ticket: WriteGrant | ReadGrant | None,
        layers: range,
        total_bytes: int,
        regions: set[int],
        policy: CodecPolicy | None = None,
    ) -> Flow:
        """A flow that keeps these regions of ours registered while it runs, and is counted when it ends."""
        for region in regions:
            self.regions.use(region)
        try:
            return peer.start_flow(
                name=name,
                kind=kind,
                priority=priority,
                ticket=ticket,
                layers=layers,
                total_bytes=total_bytes,
                policy=policy or self._plain_policy(),
                on_release=partial(self._posting_over, regions),
            )
        except BaseException:
            self._unuse(regions)
            raise

    def _posting_over(self, regions: Iterable[int], posting: Posting) -> None:
        self._unuse(regions)
        self._count(posting)

    def _count(self, posting: Posting) -> None:
        self._totals.count(posting.stats(), fetched=posting.kind == "fetch", failed=posting.error is not None)

    def _unuse(self, regions: Iterable[int]) -> None:
        for region in regions:
            self.regions.unuse(region)

    def _plain_policy(self) -> CodecPolicy:
        return CodecPolicy([Codec.LZ4], wanted=self.wanted_codec([Codec.LZ4]))

    def wanted_codec(self, accepted: Sequence[Codec]) -> Codec | None:
        """What the configuration asks for, as far as the other side accepts it; None leaves it to the figures."""
        if self.config.codec == "auto":
            return None
        codec = Codec(self.config.codec)
        return codec if codec in accepted or codec is Codec.NONE else None

    # Inside.

    def _remote_region(self, node: NodeId, region: int) -> RegionInfo:
        info = self.peer(node).metadata.region(region)
        if info is None:
            raise UnknownRegion(region=region, node=node)
        return info

    def _forget_xfer(self, xfer: Xfer) -> None:
        self._xfers.pop(xfer.name, None)

    def _next_nonce(self) -> int:
        self._nonce += 1
        return self._nonce

    def _deliver(self, node: NodeId, payload: bytes) -> None:
        if len(self._notifs) >= limits.NOTIFS_MAX:
            self._totals.notifs_dropped += 1
            return
        self._notifs.append(Notif(node, payload))
        if self._notified is not None:
            self._wake_consumer()

    def _wake_consumer(self) -> None:
        waiting, self._notified = self._notified, None
        if waiting is not None and not waiting.done():
            waiting.set_result(None)

    async def _let_go(self, peer: Peer, error: KVError | None = None) -> None:
        """Close a peer of `_leaving`; one whose caller is cancelled meanwhile is waited for by `close`."""
        await peer.close(error)
        self._leaving.pop(peer, None)

    def _spawn(self, work: Coroutine[None, None, None]) -> None:
        if self._closed:
            # A link that breaks while everything ends needs no successor.
            work.close()
            return
        task = self.loop.create_task(work)
        self._tasks[task] = None
        task.add_done_callback(self._task_over)

    def _task_over(self, task: asyncio.Task[None]) -> None:
        self._tasks.pop(task, None)
        if not task.cancelled() and task.exception() is not None:
            _log.error("transfer task failed node=%s", self.name, exc_info=task.exception())


def _add_last(flow: Flow, *units: Unit) -> None:
    flow.add(units)
    flow.seal()


def _host_id() -> bytes:
    """The same for all processes of one running kernel, and for nobody else."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_bytes().strip()
    except OSError:
        return socket.gethostname().encode()

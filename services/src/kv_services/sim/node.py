"""One simulated node: production bus, membership, replica, index and pool; only frames, time and disk are imitated."""

import asyncio
from collections.abc import Callable
from random import Random

from kv_bus.interface import PeerAddress, Reply, Request
from kv_bus.memory_bus import MemoryBus, MemoryNetwork
from kv_bus.supervisor import Child
from kv_consistency.manager import KvCacheConsistencyManager
from kv_consistency.messages import MESSAGES
from kv_consistency.replica import ReplicaConfig
from kv_consistency.update import OwnerEpoch
from kv_core.errors import KVError
from kv_core.hashing import BlockHash
from kv_core.ids import Incarnation, NodeId, RegionId, RequestId
from kv_core.namespace import Namespace
from kv_core.testing import SkewedClock
from kv_core.wire import Message, Registry
from kv_prefix.block_pool import BlockPool
from kv_prefix.errors import NoSpaceError
from kv_prefix.prefix_index import Holder, PrefixIndex
from kv_services.config import BusSection, Role
from kv_services.membership.actor import ClusterView
from kv_services.messages import ROLE_MESSAGES, Load
from kv_services.metrics import Metrics
from kv_services.replica.service import ReplicaService, ReplicaStamper, origin_epoch, wait_out

BLOCK_SIZE = 4
NAMESPACE = Namespace("sim", "weights-1", block_size=BLOCK_SIZE)
SETTINGS = BusSection(heartbeat_interval_ms=100, suspect_after_ms=400, dead_after_ms=1_500)
CLOCK_HORIZON_NS = 2_000_000_000
NUM_SLOTS = 24


class Work(Message, frozen=True, tag="sim.work"):
    """Gateway to node: register the request in steps up to `length`, after the token."""

    request_id: str
    epoch: int
    length: int
    after: bytes


class Worked(Message, frozen=True, tag="sim.worked"):
    """It is registered; whoever follows `token` sees all of `length`."""

    length: int
    token: bytes


class Disk:
    """What outlives a crash: incarnation and clock bound."""

    def __init__(self) -> None:
        self.incarnation = 0
        self.clock_bound_ns = 0

    def keep_clock_bound(self, bound_ns: int) -> None:
        self.clock_bound_ns = max(self.clock_bound_ns, bound_ns)


class SimNode:
    """One life after another of one node."""

    def __init__(
        self,
        name: NodeId,
        role: Role,
        names: dict[NodeId, Role],
        network: MemoryNetwork,
        clock: SkewedClock,
        rng: Random,
    ) -> None:
        self.name, self.role, self.clock = name, role, clock
        self.disk = Disk()
        self.lives = 0
        self._names = names
        self._network = network
        self._random = rng
        self.running = False

    async def start(self) -> None:
        """Begin a life with what is on disk."""
        await wait_out(self.disk.clock_bound_ns, self.clock)
        self.disk.incarnation += 1
        self.lives += 1
        self.incarnation = Incarnation(self.disk.incarnation)
        self.index = PrefixIndex()
        self.pool = BlockPool(NUM_SLOTS, BLOCK_SIZE, region=RegionId(1))
        settings = ReplicaConfig(clock_floor_ns=self.disk.clock_bound_ns, clock_horizon_ns=CLOCK_HORIZON_NS)
        self.manager = KvCacheConsistencyManager(self.name, self.incarnation, settings)
        metrics = Metrics(self.name, self.role.value)
        self.replica = ReplicaService(self.manager, self.clock, self.index, self.disk, metrics, offload=_at_once)
        self.replica.prime()
        self.replica.know(NAMESPACE)
        self.bus = MemoryBus(
            self._network,
            self.name,
            self.incarnation,
            Registry(*ROLE_MESSAGES, *MESSAGES, Work, Worked),
            stamper=ReplicaStamper(self.manager, self.clock),
            clock=self.clock,
        )
        peers = {name: role for name, role in self._names.items() if name != self.name}
        for peer in peers:
            self.bus.add_peer(PeerAddress(peer, f"memory://{peer}", f"memory://{peer}"))
        self.view = ClusterView(self.bus, self.clock, SETTINGS, self.role, peers, Load)
        self.replica.attach(self.bus, self.view)
        self.bus.handle(Work, self._on_work)
        self.children: list[Child] = [self.bus, self.view, self.replica]
        for child in self.children:
            await child.start()
        self.running = True

    async def live(self) -> None:
        """Return when this life ends; a life that the cluster holds for over ends by itself."""
        runs = [asyncio.ensure_future(child.run()) for child in self.children]
        await asyncio.wait(runs, return_when=asyncio.FIRST_COMPLETED)
        self.running = False
        for child in reversed(self.children):
            await child.close()
        outcomes = await asyncio.gather(*runs, return_exceptions=True)
        for outcome in outcomes:
            if isinstance(outcome, BaseException) and not isinstance(outcome, KVError):
                raise outcome

    async def crash(self) -> None:
        """Gone without a word; only the disk stays."""
        self.running = False
        self._network.crash(self.name)
        for child in reversed(self.children):
            await child.close()

    def store(self, tokens: tuple[int, ...], hashes: list[BlockHash]) -> None:
        """Hold this prefix's blocks, evicting others if need be, and publish what changed."""
        match = self.pool.match(NAMESPACE.digest, hashes, (*tokens, 0))
        num_new = len(hashes) - len(match.refs)
        try:
            opened = self.pool.open("sim", match, num_new, use_partial=False)
        except NoSpaceError:
            return
        first = len(match.refs)
        if num_new:
            self.pool.commit(opened.table, NAMESPACE.digest, first, hashes[first:], tokens[first * BLOCK_SIZE :])
        self.pool.release(opened.table)
        self.flush()

    def purge(self) -> None:
        """Drop everything held."""
        self.pool.purge()
        self.flush()

    def flush(self) -> None:
        """Publish what happened in the pool."""
        events = self.pool.take_events()
        if events:
            self.replica.pool_events(events, BLOCK_SIZE)

    def depth(self, tokens: tuple[int, ...], hashes: list[BlockHash]) -> int:
        """Blocks of a prefix that are really here."""
        return len(self.pool.match(NAMESPACE.digest, hashes, (*tokens, 0)).refs)

    @property
    def holder(self) -> Holder:
        return Holder(self.name, self.incarnation)

    async def _on_work(self, request: Request[Work]) -> Reply:
        work = request.message
        owner: OwnerEpoch = origin_epoch(request.sender, request.incarnation, work.epoch)
        request_id = RequestId(work.request_id)
        await self.replica.caught_up(work.after, min(request.deadline_ns, self.clock.monotonic_ns() + 2_000_000_000))
        length = 0
        while length < work.length:
            length = min(work.length, length + 1 + self._random.randrange(8))
            self.replica.register_length(request_id, owner, length, length, NAMESPACE)
            self.replica.verify(request_id, owner, length)
            await asyncio.sleep(0.001)
        return Worked(length, self.replica.token(request_id))


def _at_once(work: Callable[[], None]) -> "asyncio.Future[None]":
    done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    work()
    done.set_result(None)
    return done

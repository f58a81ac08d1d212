"""What every process of a cluster has: settings, a life, keys, a bus, a view of the others, a replica, counters.

Roles are built on a `Base` and hand back their children; `run` supervises base and children in one order and stops
them in the reverse one, at SIGTERM or SIGINT, or when a child cannot be kept running.
"""

import asyncio
import dataclasses
import logging
import signal
import sys
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import uvloop

from kv_bus.errors import AllowListError, ChildGaveUp, KeyFileError
from kv_bus.interface import Bus, PeerAddress, Stamper
from kv_bus.keys import AllowListFile, load_key_pair
from kv_bus.lag import LoopLagProbe
from kv_bus.supervisor import Child, ChildSpec, RestartPolicy, Supervisor
from kv_bus.zmq_bus import ZmqBus, ZmqBusConfig
from kv_consistency.errors import ReplicaFencedError
from kv_consistency.limits import CLOCK_HORIZON_NS
from kv_consistency.manager import KvCacheConsistencyManager
from kv_consistency.messages import MESSAGES
from kv_consistency.replica import ReplicaConfig
from kv_core.clock import Clock, SystemClock
from kv_core.compatibility import Compatibility, ServedModel
from kv_core.errors import KVError
from kv_core.ids import Incarnation, NodeId
from kv_core.wire import WIRE_REVISION, Registry
from kv_prefix.prefix_index import PrefixIndex
from kv_services import garbage
from kv_services.config import ClusterConfig, NodeConfig
from kv_services.errors import LifeOverError, ReplicaEndedError
from kv_services.event_log import EventLog
from kv_services.life import LifeFile
from kv_services.membership.actor import ClusterView
from kv_services.membership.discovery import EtcdDiscovery
from kv_services.messages import ROLE_MESSAGES, Load
from kv_services.metrics import Metrics
from kv_services.purge_file import PurgeFile
from kv_services.replica.service import Offload, ReplicaOverError, ReplicaService
from kv_services.replica.stamper import ReplicaStamper, wait_out
from kv_services.sharded.messages import SHARD_MESSAGES
from kv_services.side_http import SideHttp
from kv_services.status_report import MoveCounts, ShardStatus, SlotCounts, StatusReport, TierCounts, encode_status

DRAIN_NS: Final = 2_000_000_000
LIFE_ENDS: Final = (LifeOverError, ReplicaOverError, ReplicaFencedError, ReplicaEndedError)
"""Others declared this life over: its parts end, and the process begins a new one."""
SWITCH_INTERVAL_S: Final = 0.0005
"""How long a computing thread may keep the interpreter from the loop: a tenth of the default."""

MakeBus = Callable[[Incarnation, Registry, Stamper], Bus]
"""Makes the bus of one life."""
MakeManager = Callable[[NodeId, Incarnation, ReplicaConfig], KvCacheConsistencyManager]
"""Makes the replica of one life."""

_log = logging.getLogger(__name__)


@dataclass(slots=True)
class Base:
    """The parts that every role shares. `load` and `status` are filled in by the role."""

    config: ClusterConfig
    node: NodeConfig
    clock: Clock
    incarnation: Incarnation
    bus: Bus
    cluster: ClusterView
    index: PrefixIndex
    replica: ReplicaService
    metrics: Metrics
    lag: LoopLagProbe
    started_ns: int
    clock_floor_ns: int
    load: Callable[[], Load] = Load
    slots: Callable[[], SlotCounts | None] = lambda: None
    transports: Callable[[], dict[str, str]] = dict
    codecs: Callable[[], dict[str, str]] = dict
    open_things: Callable[[], dict[str, int]] = dict
    tiers: Callable[[], dict[str, TierCounts]] = dict
    alerts: Callable[[], list[str]] = list
    discovery: EtcdDiscovery | None = None
    moving: Callable[[], MoveCounts | None] = lambda: None
    shards: Callable[[], list[ShardStatus]] = list
    events: EventLog = field(init=False)
    ready: bool = False
    draining: bool = field(default=False)

    def __post_init__(self) -> None:
        self.events = EventLog(self.clock)

    def serves(self, model_id: str, weights_revision: str) -> None:
        """Say which model this process works with: peers must have the same weights and block size of it."""
        served = ServedModel(model_id, weights_revision, self.config.model.block_size)
        self.cluster.compatibility = Compatibility((served,), wire_revision=WIRE_REVISION)

    def unready(self) -> str:
        """Why this process cannot do its work now; empty if it can."""
        if self.draining:
            return "draining"
        if not self.ready:
            return "starting"
        return "" if self.replica.manager.ready else "its replica synchronises"

    def status(self) -> StatusReport:
        """This process as it sees itself."""
        load, alerts = self.load(), [*self.alerts(), *self._lost_etcd()]
        reason = self.unready()
        return StatusReport(
            node=self.node.id,
            role=self.cluster.role.value,
            state="draining" if self.draining else "starting" if reason else "degraded" if alerts else "ready",
            incarnation=self.incarnation,
            uptime_s=(self.clock.monotonic_ns() - self.started_ns) / 1e9,
            slots=self.slots(),
            running=load.running,
            waiting=load.waiting,
            transports=self.transports(),
            codecs=self.codecs(),
            members={
                m.node_id: "refused" if m.node_id in self.cluster.refused else m.liveness.value
                for m in self.cluster.view.members.values()
            },
            wire=self.cluster.compatibility.wire,
            wires=self.cluster.wires(),
            alerts=[*alerts, *map(str, self.cluster.refused.values())],
            open=self.open_things(),
            tiers=self.tiers(),
            moving=self.moving(),
            events=self.events.recent(),
            shards=self.shards(),
        )

    def processes(self) -> list[NodeConfig]:
        """Every process of the cluster that is known here, this one too: the file's first, then etcd's."""
        nodes = {node.id: node for node in self.config.nodes}
        for node in self.discovery.members if self.discovery else ():
            nodes.setdefault(node.id, node)
        return list(nodes.values())

    def _lost_etcd(self) -> list[str]:
        problem = self.discovery.problem if self.discovery else ""
        return [f"members are not followed: {problem}"] if problem else []

    def status_body(self) -> bytes:
        """The body of /status."""
        return encode_status(self.status())

    def metrics_body(self) -> bytes:
        """The body of /metrics, with the gauges that are read rather than counted brought up to date."""
        metrics, load = self.metrics, self.load()
        metrics.loop_lag.set(self.lag.snapshot().recent_max_ns / 1e9)
        metrics.bus_refused.set(sum(self.bus.stats().refused.values()))
        metrics.running.set(load.running)
        metrics.waiting.set(load.waiting)
        slots = self.slots()
        if slots is not None:
            for state in ("free", "cached", "pinned", "quarantined"):
                metrics.slots.labels(state).set(getattr(slots, state))
            metrics.utilization.set((slots.cached + slots.pinned) / slots.total)
        for name, tier in self.tiers().items():
            metrics.tier_stored.labels(name).set(tier.blocks)
            metrics.tier_bytes.labels(name).set(tier.used_bytes)
        counts: dict[str, int] = {}
        for member in self.cluster.view.members.values():
            counts[member.liveness.value] = counts.get(member.liveness.value, 0) + 1
        for liveness in ("unseen", "alive", "suspect", "dead"):
            metrics.members.labels(liveness).set(counts.get(liveness, 0))
        return metrics.expose(self.clock.monotonic_ns())

    def side_http(
        self,
        pages: dict[str, tuple[str, Callable[[], bytes]]] | None = None,
        actions: dict[str, Callable[[bytes], Awaitable[bytes]]] | None = None,
    ) -> SideHttp:
        """The HTTP server of a process that is no gateway."""
        return SideHttp(
            self.node.host,
            self.node.http_port,
            operator_keys=self.config.cluster.operator_keys,
            unready=self.unready,
            metrics=self.metrics_body,
            status=self.status_body,
            pages=pages,
            actions=actions,
        )

    def children(self) -> list[ChildSpec]:
        """The base's own children, in the order of starting."""
        return [
            keep("loop lag", self.lag),
            keep("bus", self.bus, drain_ns=DRAIN_NS),
            keep("membership", self.cluster),
            keep("replica", self.replica),
            *([keep("discovery", self.discovery)] if self.discovery else []),
        ]


def keep(name: str, child: Child, *, drain_ns: int = 0) -> ChildSpec:
    """A child that is made once: it owns sockets and memory, so its failure ends the process, and the next life of
    the process is the restart."""

    policy = RestartPolicy(failures_max=0)
    return ChildSpec(name, lambda: child, policy=policy, drain_timeout_ns=drain_ns, foreseen=LIFE_ENDS)


def build_base(config: ClusterConfig, node: NodeConfig, life: LifeFile) -> Base:
    """Make the parts of one life of a process; nothing is started.

    Raises:
        KVError: a key, a life file or an address is not as it must be.
    """
    clock = SystemClock()

    def make_bus(incarnation: Incarnation, registry: Registry, stamper: Stamper) -> Bus:
        config_of_bus = ZmqBusConfig(
            node_id=node.node_id,
            incarnation=incarnation,
            requests=node.bus_endpoint,
            events=node.events_endpoint,
            keys=load_key_pair(config.keys_path, node.node_id),
            allow_list=AllowListFile(config.allow_list_path),
        )
        return ZmqBus(config_of_bus, registry, stamper=stamper, clock=clock)

    purges = PurgeFile(config.state_path / "lives", node.id).load()

    def make_manager(node_id: NodeId, incarnation: Incarnation, settings: ReplicaConfig) -> KvCacheConsistencyManager:
        return KvCacheConsistencyManager(node_id, incarnation, dataclasses.replace(settings, raises=purges))

    base = assemble_base(config, node, clock, life, make_bus, make_manager)
    if config.cluster.discovery == "etcd":
        discovery = EtcdDiscovery(config, node, base.incarnation, base.bus, base.cluster)
        base.discovery = discovery
        base.cluster.is_listed = lambda: discovery.sessions > 0
    return base


def assemble_base(
    config: ClusterConfig,
    node: NodeConfig,
    clock: Clock,
    life: LifeFile,
    make_bus: MakeBus,
    make_manager: MakeManager = KvCacheConsistencyManager,
    offload: Offload | None = None,
) -> Base:
    """Begin a life with what `life` kept, on that bus, clock and replica; nothing is started.

    Raises:
        KVError: as `build_base`.
    """
    this_life = life.begin(clock)
    incarnation = this_life.incarnation
    metrics = Metrics(node.id, node.role.value)
    index = PrefixIndex()
    settings = ReplicaConfig(clock_floor_ns=this_life.clock_bound_ns, clock_horizon_ns=CLOCK_HORIZON_NS)
    manager = make_manager(node.node_id, incarnation, settings)
    replica = ReplicaService(manager, clock, index, this_life, metrics, offload=offload)
    replica.prime()
    bus = make_bus(
        incarnation,
        Registry(*ROLE_MESSAGES, *SHARD_MESSAGES, *MESSAGES),
        ReplicaStamper(manager, clock, replica.renew_clock_bound),
    )
    peers = {peer.node_id: peer.role for peer in config.nodes if peer.id != node.id}
    for peer in config.nodes:
        if peer.id != node.id:
            bus.add_peer(PeerAddress(peer.node_id, peer.bus_endpoint, peer.events_endpoint))
    base: Base
    cluster = ClusterView(bus, clock, config.bus, node.role, peers, lambda: base.load())
    # A role that works with a model says more; the wire is everybody's.
    cluster.compatibility = Compatibility((), wire_revision=WIRE_REVISION)
    replica.attach(bus, cluster)
    base = Base(
        config=config,
        node=node,
        clock=clock,
        incarnation=incarnation,
        bus=bus,
        cluster=cluster,
        index=index,
        replica=replica,
        metrics=metrics,
        lag=LoopLagProbe(clock),
        started_ns=clock.monotonic_ns(),
        clock_floor_ns=this_life.clock_bound_ns,
    )
    return base


Build = Callable[[Base], Sequence[ChildSpec]]


Live = Callable[[asyncio.Event], Awaitable[int | None]]
"""Lives one life until it ends or the event is set; gives the exit status, or None when another life must follow."""


def run(config: ClusterConfig, node: NodeConfig, build: Build) -> int:
    """Run one process until it is told to stop; its exit status."""
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    life = LifeFile(config.state_path / "lives", node.id)
    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            return runner.run(live_on(node.id, lambda stop: _live(config, node, life, build, stop)))
    except (KeyFileError, AllowListError) as error:
        _log.error("%s cannot run: %s (kvctl keys init FILE makes what is missing)", node.id, error)
    except KVError as error:
        _log.error("%s cannot run: %s", node.id, error)
    return 1


async def live_on(name: str, live: Live) -> int:
    """One life after the other, until one ends with an exit status; none begins after the process was told to stop."""
    stop = asyncio.Event()
    while (status := await live(stop)) is None:
        if stop.is_set():
            return 0
        # Silent for too long, or cut off: what this life held is void, a new one begins from nothing.
        _log.warning("%s begins a new life", name)
    return status


async def _live(
    config: ClusterConfig, node: NodeConfig, life: LifeFile, build: Build, stop: asyncio.Event
) -> int | None:
    """One life: its exit status, or None when the cluster declared it over. Signals set `stop` from its start on."""
    base = build_base(config, node, life)
    await wait_out(base.clock_floor_ns, base.clock)
    if stop.is_set():
        return 0
    supervisor = Supervisor(node.id, [*base.children(), *build(base)], clock=base.clock)
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)

    def ready() -> None:
        garbage.set_aside()
        base.ready = True
        _log.info("ready node=%s role=%s incarnation=%d", node.id, node.role.value, base.incarnation)

    def ending() -> None:
        base.draining = True
        base.cluster.state = "draining"

    def is_over() -> bool:
        return base.cluster.life_over is not None or base.replica.life_over

    return await live_once(supervisor, stop, ready=ready, ending=ending, is_over=is_over)


async def live_once(
    supervisor: Supervisor,
    stop: asyncio.Event,
    *,
    ready: Callable[[], None],
    ending: Callable[[], None],
    is_over: Callable[[], bool],
) -> int | None:
    """Start what is supervised and keep it until `stop` is set: the exit status, 0 when all ended cleanly.

    None when a child gave up because the life is over, be it that others still started: all are stopped then, and the
    next life finds ports, locks and memory free.

    Raises:
        ChildGaveUp: a child gave up for another reason.
        KVError, OSError: what kept a child from starting.
    """
    loop = asyncio.get_running_loop()
    waiting = loop.create_task(stop.wait())
    try:
        starting = loop.create_task(supervisor.start())
        await asyncio.wait((waiting, starting), return_when=asyncio.FIRST_COMPLETED)
        if not starting.done():
            starting.cancel()
            await asyncio.gather(starting, return_exceptions=True)
            await supervisor.stop()
            return 0
        starting.result()
        ready()
        running = loop.create_task(supervisor.run())
        await asyncio.wait((waiting, running), return_when=asyncio.FIRST_COMPLETED)
        ending()
        report = await supervisor.stop()
        await running
    except ChildGaveUp:
        if not is_over():
            raise
        return None
    finally:
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
    return 0 if report.clean else 1


def set_up_logging(level: str) -> None:
    """One line a record on standard error: time, level, logger, text."""
    logging.basicConfig(
        stream=sys.stderr,
        level=level.upper(),
        format="%(asctime)s.%(msecs)03d %(levelname)-7s %(name)s %(message)s",
        datefmt="%Y-%m-%d %H:%M:%S",
    )


def model_path(config: ClusterConfig) -> Path | None:
    """The weights file that the cluster file names, if it names one."""
    return Path(config.model.path) if config.model.path else None

"""One simulated node: the production process, with frames, units of KV, time, disk and computing imitated.

What is put together here is what `kv_services.process` and the roles put together: base, membership, replica, pool,
transfer agent, decode, prefill and store roles or the gateway's completer, under the production supervisor.
"""

import asyncio
import contextvars
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random
from typing import Final

from kv_bus.errors import ChildGaveUp
from kv_bus.interface import Bus, Stamper
from kv_bus.lag import LoopLagProbe
from kv_bus.memory_bus import MemoryBus, MemoryNetwork
from kv_bus.supervisor import ChildFailed, ChildSpec, ChildState, Supervisor
from kv_consistency.replica import ReplicaConfig
from kv_core.block import Layout
from kv_core.errors import KVError
from kv_core.geometry import Attention, ModelGeometry
from kv_core.ids import Incarnation, NodeId
from kv_core.namespace import Namespace
from kv_core.testing import SkewedClock
from kv_core.wire import Registry
from kv_prefix.placement import make_placement_policy
from kv_prefix.prefix_index import Holder
from kv_services.config import ClusterConfig, Role
from kv_services.config_file import parse_config
from kv_services.engine.stub import StubModel
from kv_services.gateway.actor import ClusterCompleter, GatewayContext
from kv_services.gateway.placing import Placer
from kv_services.in_flight_watch import InFlightWatch
from kv_services.life import LifeFile, LifeFileError
from kv_services.membership.member_list import MemberList
from kv_services.membership.records import record_of
from kv_services.messages import Load
from kv_services.node.process import Memory, NodeWork, assemble
from kv_services.node.tier_setup import open_tiers
from kv_services.process import Base, assemble_base, keep
from kv_services.purge_file import PurgeFile
from kv_services.replica.service import ReplicaService
from kv_services.replica.stamper import wait_out
from kv_services.sim.causality import CausalOracle
from kv_services.sim.compute import SimCompute
from kv_services.sim.directory import SimDirectory, SimDiscovery
from kv_services.sim.disk import Mount, SimDisk
from kv_services.sim.holdings import BLOCK_SIZE
from kv_services.sim.loop import context_of
from kv_services.sim.tier_disk import SimTierStore
from kv_services.sim.watch import WatchedManager, WatchedStamper
from kv_transport import Arena, TransferAgent, TransportConfig
from kv_transport.backends.memory_network import MemoryNetwork as TransferNetwork

NUM_SLOTS: Final = 28
TIER_BYTES: Final = 80 << 10
"""Room for about 60 blocks and their records; memory holds half as many."""
REQUEST_TIMEOUT_S: Final = 6.0
DIGEST_INTERVAL_NS: Final = 400_000_000
LAG_INTERVAL_NS: Final = 400_000_000
"""How often a node measures its loop's lag: in virtual time there is none but while a node stands still."""
DAMAGED_STARTS: Final = 2
"""Starts that fail for a damaged life file before an operator removes it."""
MODEL_ID: Final = "sim"
MODEL: Final = StubModel(ModelGeometry("sim", 2, 1, 1, 4, Attention.MHA, max_tokens=1 << 12), max_context=1 << 12)
_ROLES: Final = (Role.GATEWAY, Role.PREFILL, Role.DECODE, Role.PREFILL, Role.DECODE, Role.GATEWAY, Role.STORE)
_JOINER_ROLES: Final = (Role.PREFILL, Role.DECODE)


def cluster_of(num_nodes: int, folder: Path, joiner: int | None = None) -> ClusterConfig:
    """A cluster of so many processes, as their file says, or that of the `joiner`-th of those that are in nobody's file
    but their own. Files are below `folder`. Sizes are small, and periodic messages rarer than by default: most of them
    say that nothing happened, and more can happen instead."""
    text = [
        f'[cluster]\nname = "sim"\nstate_dir = "{folder}"',
        f'[model]\nid = "{MODEL_ID}"\nengine = "stub"\nkv_dtype = "fp16"\nblock_size = {BLOCK_SIZE}',
        "[bus]\nheartbeat_interval_ms = 400\nsuspect_after_ms = 1200\ndead_after_ms = 3000",
        f"[limits]\nrequest_timeout_s = {REQUEST_TIMEOUT_S}\nmax_batch = 4\nnode_queue = 16\nlease_ms = 2000",
        '[transport]\nbackend = "shm"',
        f'[tiers.disk]\nsize = "{TIER_BYTES} B"',
    ]
    roles = [_ROLES[number % len(_ROLES)] for number in range(num_nodes)]
    numbered = list(enumerate(roles))
    if joiner is not None:
        numbered.append((num_nodes + joiner, _JOINER_ROLES[joiner % len(_JOINER_ROLES)]))
    for number, role in numbered:
        ports = "".join(f"{name}_port = {7000 + 3 * number + i}\n" for i, name in enumerate(("bus", "events", "http")))
        slots = f"slots = {NUM_SLOTS}\n" if role.holds_kv else ""
        text.append(f'[[node]]\nid = "{role.value}-{number}"\nrole = "{role.value}"\n{ports}{slots}')
    return parse_config("\n".join(text), file=folder / "cluster.toml")


def namespace_of(config: ClusterConfig) -> Namespace:
    """The one namespace of all simulated requests."""
    model = config.model
    return Namespace(model.id, MODEL.info.weights_revision, dtype=model.dtype, block_size=model.block_size)


@dataclass(frozen=True, slots=True)
class Surroundings:
    """What all nodes of one run share."""

    bus: MemoryNetwork
    transfers: TransferNetwork
    directory: SimDirectory
    oracle: CausalOracle
    blocks_changed: Callable[["SimNode"], None]


class SimNode:
    """One life after another of one node.

    Attributes:
        slowness: by how much it computes slower than others.
        stood_still_ns: for how long it stood still, in all.
        pauses: how many faults keep it still now.
        running: between the end of its start and the end of its life.
        joins: it is in nobody's file but its own.
        away: it is stopped, and not started again.
    """

    def __init__(
        self,
        name: NodeId,
        config: ClusterConfig,
        around: Surroundings,
        clock: SkewedClock,
        disk: SimDisk,
        rng: Random,
        joins: bool,
    ) -> None:
        self.name, self.clock, self.disk = name, clock, disk
        self.joins = self.away = joins
        self._config = config
        self.node = config.node(name)
        self.role = self.node.role
        self.lives = self.failed_starts = 0
        self.slowness = 1.0
        self.stood_still_ns = 0
        self.pauses = 0
        self.running = False
        self.context: contextvars.Context = context_of(name)
        self._around = around
        self._random = rng
        self._damaged_starts, self._forgot = 0, False
        self._mount: Mount | None = None
        self._supervisor: Supervisor | None = None
        self._agent: TransferAgent | None = None
        self._failure: BaseException | None = None
        self.work: NodeWork | None = None
        self.completer: ClusterCompleter | None = None

    @property
    def incarnation(self) -> Incarnation:
        """The present life."""
        return self.base.incarnation

    @property
    def replica(self) -> ReplicaService:
        return self.base.replica

    @property
    def ending(self) -> bool:
        """Whether a part of this life has ended, and the others are about to."""
        return self._supervisor is not None and any(
            child.state is not ChildState.RUNNING for child in self._supervisor.stats()
        )

    @property
    def serving(self) -> bool:
        """Whether it runs and its memory is there."""
        return self.running and (self.work is None or not self.work.ctx.arena.closed)

    @property
    def ready(self) -> bool:
        """Whether it runs and its replica takes reads and writes."""
        return self.running and self.replica.manager.ready

    @property
    def holder(self) -> Holder:
        """This life as claims name it."""
        return Holder(self.name, self.incarnation)

    async def live(self) -> None:
        """One life, from the disk's content to its end: a crash, or the cluster held it for over.

        Raises:
            BaseException: a part failed for a reason that is no `KVError`: a bug.
        """
        mount = self._mount = self.disk.mount()
        try:
            await self._live(mount)
        finally:
            # Of a process that is gone, whichever way, nothing holds its files or writes to them.
            mount.crash()

    async def _live(self, mount: Mount) -> None:
        try:
            self._begin(mount)
        except LifeFileError as error:
            self.failed_starts += 1
            if "damaged" in str(error):
                self._damaged_starts += 1
                if self._damaged_starts > DAMAGED_STARTS:
                    self._damaged_starts, self._forgot = 0, True
                    self.disk.remove_all()
            return
        self.lives += 1
        self._damaged_starts, self._forgot = 0, False
        supervisor = self._supervisor
        await wait_out(self.base.clock_floor_ns, self.clock)
        assert supervisor is not None
        if mount.crashed:
            return
        try:
            await supervisor.start()
        except KVError:
            # It crashed while it started, or its disk failed it.
            self.failed_starts += 1
            return
        self.base.ready = self.running = True
        try:
            await supervisor.run()
        except ChildGaveUp:
            pass
        finally:
            self.running = False
        if self._failure is not None:
            raise self._failure

    async def crash(self) -> None:
        """Gone without a word; only the disk stays."""
        self.running = False
        if self._mount is not None:
            self._mount.crash()
            self.disk.lose_power()
        self._around.bus.crash(self.name)
        self._around.transfers.crash(self.name)
        await self.stop()

    async def stop(self) -> None:
        """End this life."""
        if self._supervisor is not None:
            await self.within(self._supervisor.stop())

    def within(self, work: "asyncio._CoroutineLike[object]") -> "asyncio.Task[object]":
        """Run something as a part of this node."""
        return asyncio.get_running_loop().create_task(work, context=self.context)

    def open_things(self) -> dict[str, int]:
        """What it owns and has not given back, by kind."""
        things = dict(self.base.open_things())
        if self.completer is not None and self.completer.num_open:
            things["requests"] = self.completer.num_open
        stats = self.replica.manager.stats()
        if stats.waiters:
            things["waiting reads"] = stats.waiters
        return things

    def _begin(self, mount: Mount) -> None:
        manager: WatchedManager

        def make_manager(node: NodeId, incarnation: Incarnation, settings: ReplicaConfig) -> WatchedManager:
            nonlocal manager
            purges = PurgeFile(self._config.state_path / "lives", node).load()
            settings = replace(settings, digest_interval_ns=DIGEST_INTERVAL_NS, raises=purges)
            life = self._around.oracle.begin_life(node, forgot=self._forgot)
            manager = WatchedManager(node, incarnation, settings, self._around.oracle, life, self._changed)
            return manager

        def make_bus(incarnation: Incarnation, registry: Registry, stamper: Stamper) -> Bus:
            watched = WatchedStamper(stamper, manager, self._around.oracle)
            return MemoryBus(self._around.bus, self.name, incarnation, registry, stamper=watched, clock=self.clock)

        life = LifeFile(Path("lives"), self.name, mount)
        self.work = self.completer = None
        self.base = assemble_base(self._config, self.node, self.clock, life, make_bus, make_manager, _at_once)
        record = record_of(self.node, self.base.incarnation)
        members = MemberList(self.name, self.base.bus, self.base.cluster)
        discovery = SimDiscovery(self._around.directory, record, members, lambda: mount.crashed)
        self.base.lag = LoopLagProbe(self.clock, interval_ns=LAG_INTERVAL_NS)
        role = self._gateway() if self.role is Role.GATEWAY else self._holder(self.base)
        # A life that is over, or crashes, finishes nothing.
        specs = [
            replace(spec, drain_timeout_ns=0) for spec in (*self.base.children(), keep("discovery", discovery), *role)
        ]
        self._supervisor = Supervisor(self.name, specs, clock=self.clock, on_failure=self._failed)

    def _holder(self, base: Base) -> Sequence[ChildSpec]:
        config = self._config
        base.serves(config.model.id, MODEL.info.weights_revision)
        geometry = MODEL.info.geometry.block_geometry(config.model.dtype, BLOCK_SIZE)
        arena = Arena.create(geometry, NUM_SLOTS, Layout(config.model.layout), name=self.name)
        settings = TransportConfig(transport="memory", unit_bytes=4096)
        agent = TransferAgent(self.name, base.incarnation, settings, self.clock, self._around.transfers)
        compute = SimCompute(self._random, lambda: self.slowness)
        work = self.work = assemble(base, MODEL, arena, agent, compute)
        disk, mount = self.disk, self._mount
        assert mount is not None
        open_tiers(
            work.ctx,
            MODEL.info.weights_revision,
            base.cluster,
            lambda folder, shape, nbytes: SimTierStore.open(disk, mount, folder, shape, nbytes),
        )
        self._agent = agent
        return [keep("memory", Memory(arena, agent, work.ctx.transfers, None)), keep("work", work)]

    def _gateway(self) -> Sequence[ChildSpec]:
        config, base = self._config, self.base
        base.serves(config.model.id, MODEL.info.weights_revision)
        policy = config.routing.policy
        context = GatewayContext(
            config=config,
            clock=base.clock,
            bus=base.bus,
            cluster=base.cluster,
            index=base.index,
            placer=Placer(make_placement_policy(policy), make_placement_policy(policy), BLOCK_SIZE),
            ownership=base.replica,
            metrics=base.metrics,
            model_id=config.model.id,
            weights_revision=MODEL.info.weights_revision,
            in_flight=InFlightWatch(base.cluster, base.clock),
        )
        completer = self.completer = ClusterCompleter(context)
        base.load = lambda: Load(running=completer.num_open)
        return [keep("completer", completer)]

    def _changed(self) -> None:
        if self.serving:
            self._around.blocks_changed(self)

    def _failed(self, failed: ChildFailed) -> None:
        if not isinstance(failed.error, KVError):
            self._failure = self._failure or failed.error


def _at_once(work: Callable[[], None]) -> "asyncio.Future[None]":
    done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    try:
        work()
    except KVError as error:
        done.set_exception(error)
    else:
        done.set_result(None)
    return done

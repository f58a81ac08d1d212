"""One seeded run: a whole cluster of production processes in virtual time, faults, and checks all along.

While faults last, what must always hold is checked with every event that could break it. Then everything heals, and
after a stated time nothing may be left over, all replicas must be equal, and requests must succeed.
"""

import asyncio
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from kv_bus.memory_bus import MemoryNetwork
from kv_core.errors import KVError
from kv_core.ids import NodeId
from kv_core.testing import BackgroundFailureError, LoopClock, SimulationStalledError, SkewedClock
from kv_services.config import ClusterConfig, Role
from kv_services.sim.causality import CausalOracle
from kv_services.sim.chaos import CALM, KINDS, Chaos
from kv_services.sim.checks import BlockChecker, CheckError, check_own_claims, check_settled
from kv_services.sim.directory import SimDirectory
from kv_services.sim.disk import SimDisk
from kv_services.sim.loop import SimLoop, run_simulated
from kv_services.sim.network import SimNetwork
from kv_services.sim.node import SimNode, Surroundings, cluster_of
from kv_services.sim.operators import Operators
from kv_services.sim.streams import stream
from kv_services.sim.workload import Workload, make_prompts
from kv_transport.backends.memory_network import MemoryNetwork as TransferNetwork

EPOCH_NS: Final = 1_700_000_000_000_000_000
SECONDS: Final = 60.0
NUM_NODES: Final = 5
NUM_JOINERS: Final = 2
SETTLE_S: Final = 13.0
"""After the last fault, at most: by then every request has ended, every life is back, all replicas are equal."""
RESTART_S: Final = 0.3
CHECK_S: Final = 0.5
CHECK_ALL_S: Final = 5.0
LAST_REQUESTS: Final = 4


class SimulationFailedError(KVError):
    """An invariant did not hold; the message repeats the run."""

    code = 7090
    template = "seed {seed} at {seconds:.2f} s: {what}; repeat it with: {command}"


@dataclass(frozen=True, slots=True)
class SimResult:
    """How a run went.

    Attributes:
        nodes: of the cluster's file; more may join.
        events: frames, units of KV, requests, reads and faults.
        faults: how often each kind happened.
        acts: nodes that joined, were drained to the end, and left.
        fates: what became of units of KV.
        failures: requests that ended with an error while something was wrong, by its name.
        stamps, blocks: how many the oracle looked at.
        on_disk: blocks that disk tiers took, gave back whole, and found damaged.
        digest: of everything that happened; equal for equal seeds.
    """

    seed: int
    nodes: int
    virtual_seconds: float
    events: int
    faults: dict[str, int]
    acts: dict[str, int]
    fates: dict[str, int]
    restarts: int
    failed_starts: int
    requests: int
    requests_failed: int
    failures: dict[str, int]
    reads: int
    reads_refused: int
    stamps: int
    blocks: int
    on_disk: dict[str, int]
    digest: str


@dataclass(frozen=True, slots=True)
class Plan:
    """What one run is to be."""

    seed: int
    seconds: float
    num_nodes: int
    kinds: tuple[str, ...]

    @property
    def command(self) -> str:
        """What repeats it."""
        if (self.seconds, self.num_nodes, self.kinds) == (SECONDS, NUM_NODES, KINDS):
            return f"make sim SEED={self.seed}"
        only = "" if self.kinds == KINDS else "".join(f" --only '{kind}'" for kind in self.kinds)
        return f"kvctl sim --seed {self.seed} --seconds {self.seconds:g} --nodes {self.num_nodes}{only}"


class World:
    """The state of one run."""

    def __init__(self, plan: Plan, loop: SimLoop, clock: LoopClock, folder: Path) -> None:
        seed = plan.seed
        self.plan, self.clock = plan, clock
        self.network = SimNetwork(stream(seed, "network"), clock)
        self.transfers = TransferNetwork(f"{seed}/transfers", CALM)
        self.oracle, self.blocks = CausalOracle(), BlockChecker()
        directory = SimDirectory(stream(seed, "directory"))
        bus = MemoryNetwork("sim", self.network)
        around = Surroundings(bus, self.transfers, directory, self.oracle, self.blocks.changed)
        skew = stream(seed, "clocks")

        def make(config: ClusterConfig, name: str, joins: bool) -> SimNode:
            wall = SkewedClock(clock, skew.randint(-50_000_000, 50_000_000), skew.randint(-200, 200))
            disk = SimDisk(stream(seed, f"disk {name}"), folder / "tiers" / name)
            engine = stream(seed, f"engine {name}")
            return SimNode(NodeId(name), config, around, wall, disk, engine, joins)

        in_file = cluster_of(plan.num_nodes, folder)
        self.nodes = [make(in_file, node.id, False) for node in in_file.nodes]
        if "join" in plan.kinds:
            for number in range(NUM_JOINERS):
                own_file = cluster_of(plan.num_nodes, folder, number)
                self.nodes.append(make(own_file, own_file.nodes[-1].id, True))
        disks = {node.name: node.disk for node in self.nodes}
        loop.work_takes_s = lambda owner: disks[NodeId(owner)].io_takes_s()
        self.operators = Operators(stream(seed, "operators"), self.nodes)
        self.chaos = Chaos(
            stream(seed, "chaos"),
            self.nodes,
            self.network,
            self.transfers,
            directory,
            self.operators,
            loop,
            clock,
            plan.kinds,
        )
        prompts = make_prompts(stream(seed, "prompts"))
        self.workload = Workload(self.nodes, self.oracle, stream(seed, "clients"), self.network.note, prompts)
        self._tasks: list[asyncio.Task[object]] = []
        self._keepers: list[asyncio.Task[None]] = []
        self._over = False

    async def run(self) -> SimResult:
        """The whole run.

        Raises:
            SimulationFailedError: an invariant did not hold.
        """
        loop = asyncio.get_running_loop()
        self._keepers = [loop.create_task(self._keep(node)) for node in self.nodes]
        clients = [loop.create_task(work) for work in (self.workload.ask(), self.workload.read())]
        checks = loop.create_task(self._check_always())
        chaos = loop.create_task(self.chaos.run())
        await self._watched(asyncio.sleep(self.plan.seconds), checks, chaos, *clients)
        chaos.cancel()
        await asyncio.gather(chaos, return_exceptions=True)
        await self.chaos.heal()
        self.network.note("healed")
        self.workload.stopping = True
        await self._watched(self._settle(clients), checks)
        await self._watched(self._last_requests(), checks)
        await self._watched(self._agreed(), checks)
        checks.cancel()
        await asyncio.gather(checks, return_exceptions=True)
        self._raise_refused()
        await self._stop()
        return self._result()

    async def _watched(self, work: "asyncio._CoroutineLike[object]", *watch: "asyncio.Task[None]") -> None:
        """Wait for `work`; what goes wrong elsewhere meanwhile ends it."""
        main = asyncio.get_running_loop().create_task(work)
        others = [*watch, *self._keepers]
        while not main.done():
            await asyncio.wait([main, *others], return_when=asyncio.FIRST_COMPLETED)
            for task in [task for task in others if task.done()]:
                others.remove(task)
                if task.exception() is not None:
                    main.cancel()
                    await asyncio.gather(main, return_exceptions=True)
                    task.result()
        await main

    async def _keep(self, node: SimNode) -> None:
        """Life after life, as a service manager would."""
        while not self._over:
            if node.away:
                await asyncio.sleep(RESTART_S)
                continue
            self.network.note(f"{node.name} starts")
            await node.within(node.live())
            self.network.note(f"{node.name} ended {node.lives}")
            await asyncio.sleep(RESTART_S)

    async def _check_always(self) -> None:
        holders = [node for node in self.nodes if node.role.holds_kv]
        full_s = CHECK_ALL_S
        looked: dict[NodeId, object] = {}
        while True:
            await asyncio.sleep(CHECK_S)
            self._raise_refused()
            self.workload.check()
            full_s -= CHECK_S
            for node in self.nodes:
                if node.running:
                    node.base.cluster.view.check()
            for node in holders:
                if node.serving:
                    # A purge takes until the node's next tick, which is before our next look, unless it stands still or
                    # is about to end.
                    now = (node.incarnation, node.pauses, node.stood_still_ns, node.replica.manager.raises())
                    waits = node.ending or node.pauses > 0 or now != looked.get(node.name)
                    check_own_claims(node, purging=waits)
                    looked[node.name] = now
                    if full_s <= 0:
                        self.blocks.all(node)
            if full_s <= 0:
                full_s = CHECK_ALL_S
                for node in self.nodes:
                    if node.running:
                        node.replica.manager.check()

    def _raise_refused(self) -> None:
        for error in (*self.oracle.refused, *self.blocks.refused, *self.operators.refused):
            raise error

    async def _settle(self, clients: list["asyncio.Task[None]"]) -> None:
        """Return when everything has ended and everybody agrees; it must within `SETTLE_S`."""
        await asyncio.gather(*clients)
        await self.workload.ended()
        await self._agreed()

    async def _agreed(self) -> None:
        until_ns = self.clock.monotonic_ns() + int(SETTLE_S * 1e9)
        while True:
            try:
                check_settled(self.nodes)
                return
            except CheckError:
                if self.clock.monotonic_ns() >= until_ns:
                    raise
            await asyncio.sleep(1.0)

    async def _last_requests(self) -> None:
        """Nothing is wrong any more, so nothing may fail."""
        gateways = [node for node in self.nodes if node.role is Role.GATEWAY]
        for number in range(LAST_REQUESTS):
            gateway = gateways[number % len(gateways)]
            await gateway.within(self.workload.request(gateway, patient=True))
        await asyncio.sleep(1.0)

    async def _stop(self) -> None:
        """End every life in good order; nothing may be left running."""
        self._over = True
        for node in self.nodes:
            await node.stop()
        await asyncio.gather(*self._keepers)
        await asyncio.sleep(0)
        left = [task.get_name() for task in asyncio.all_tasks() if task is not asyncio.current_task()]
        if left:
            raise self.failure(f"tasks are left: {', '.join(sorted(left))}")

    def _result(self) -> SimResult:
        workload, transfers = self.workload, self.transfers
        fates = {fate.value: count for fate, count in transfers.fates.items() if count}
        on_disk = {what: sum(node.disk.counts[what] for node in self.nodes) for what in ("stored", "loaded", "spoiled")}
        self.network.note(f"{fates} {self.oracle.num_stamps} {self.blocks.num_blocks} {on_disk}")
        faults = dict(sorted(self.chaos.counts.items()))
        counted = (self.network.frames, sum(fates.values()), workload.requests, workload.reads, sum(faults.values()))
        return SimResult(
            seed=self.plan.seed,
            nodes=self.plan.num_nodes,
            virtual_seconds=self.clock.monotonic_ns() / 1e9,
            events=sum(counted),
            faults=faults,
            acts=dict(self.operators.counts),
            fates=fates,
            restarts=sum(node.lives - 1 for node in self.nodes),
            failed_starts=sum(node.failed_starts for node in self.nodes),
            requests=workload.requests,
            requests_failed=workload.failed,
            failures=dict(sorted(workload.errors.items())),
            reads=workload.reads,
            reads_refused=workload.reads_refused,
            stamps=self.oracle.num_stamps,
            blocks=self.blocks.num_blocks,
            on_disk=on_disk,
            digest=self.network.digest,
        )

    def failure(self, what: str) -> SimulationFailedError:
        """The error that names this run, now."""
        seconds = self.clock.monotonic_ns() / 1e9
        return SimulationFailedError(seed=self.plan.seed, seconds=seconds, what=what, command=self.plan.command)


def simulate(
    seed: int, *, seconds: float = SECONDS, num_nodes: int = NUM_NODES, kinds: Sequence[str] = KINDS
) -> SimResult:
    """Run one seed.

    Args:
        seconds: for how long faults begin; what follows until all is settled comes on top.
        kinds: which of the kinds of faults (`chaos.KINDS`) there are.

    Raises:
        ValueError: a kind that there is not, or none.
        SimulationFailedError: an invariant did not hold.
    """
    unknown = [kind for kind in kinds if kind not in KINDS]
    if unknown or not kinds:
        raise ValueError(f"no kind of fault is called {unknown}; there are: {', '.join(KINDS)}")
    plan = Plan(seed, seconds, num_nodes, tuple(kinds))
    worlds: list[World] = []

    async def main(loop: SimLoop, clock: LoopClock) -> SimResult:
        world = World(plan, loop, clock, Path(folder))
        worlds.append(world)
        return await world.run()

    try:
        with tempfile.TemporaryDirectory(prefix="kv-sim-") as folder:
            return run_simulated(main, EPOCH_NS)
    except SimulationFailedError:
        raise
    except (Exception, BackgroundFailureError, SimulationStalledError) as error:
        cause: BaseException = error
        while cause.__cause__ is not None and isinstance(cause, BackgroundFailureError):
            cause = cause.__cause__
        raise worlds[0].failure(f"{type(cause).__name__}: {cause}") from error

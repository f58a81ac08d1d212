"""One seeded run: nodes that store, evict and register, a network and machines that fail, and checks all along.

While faults last only what must always hold is checked. Then everything heals, and after a stated time all replicas
must be equal and every index must say exactly what the pools hold.
"""

import asyncio
from dataclasses import dataclass

from kv_bus.memory_bus import MemoryNetwork
from kv_consistency.errors import ReplicaFencedError
from kv_consistency.version_vector import VersionVector
from kv_core.errors import KVError
from kv_core.hashing import BlockHash, hash_tokens
from kv_core.ids import NodeId, RequestId
from kv_core.testing import LoopClock, SkewedClock, run_virtual
from kv_services.config import Role
from kv_services.sim.faults import SimNetwork
from kv_services.sim.node import BLOCK_SIZE, NAMESPACE, SimNode, Work, Worked
from kv_services.sim.streams import stream

EPOCH_NS = 1_700_000_000_000_000_000
SETTLE_S = 12.0
CHECK_S = 0.25
FAULTS = ("cut", "one way", "isolate", "clog", "loss", "duplicate", "crash", "clock step", "clock drift")


class SimulationFailedError(KVError):
    """An invariant did not hold; the message repeats the run."""

    code = 7050
    template = "seed {seed} at {seconds:.2f} s: {what}; repeat it with: make sim SEED={seed}"


@dataclass(slots=True)
class SimResult:
    """How a run went.

    Attributes:
        events: frames, stores, requests and faults.
        faults: how often each kind happened.
        digest: of everything that happened; equal for equal seeds.
    """

    seed: int
    virtual_seconds: float
    events: int
    faults: dict[str, int]
    restarts: int
    requests: int
    requests_failed: int
    digest: str


class World:
    """The state of one run."""

    def __init__(self, seed: int, seconds: float, num_nodes: int, clock: LoopClock) -> None:
        self.seed, self.seconds, self.num_nodes, self.clock = seed, seconds, num_nodes, clock
        self.faults: dict[str, int] = {}
        self.chains: list[tuple[tuple[int, ...], list[BlockHash]]] = []
        self.requests = self.failed = self.stores = 0
        self.network = SimNetwork(stream(self.seed, "network"), self.clock)
        self.chaos = stream(self.seed, "chaos")
        memory = MemoryNetwork(faults=self.network)
        names = {NodeId("gateway"): Role.GATEWAY}
        names |= {NodeId(f"node-{i}"): Role.DECODE for i in range(1, self.num_nodes)}
        skew = stream(self.seed, "clocks")
        self.nodes = [
            SimNode(
                name,
                role,
                names,
                memory,
                SkewedClock(self.clock, skew.randint(-50_000_000, 50_000_000), skew.randint(-200, 200)),
                stream(self.seed, f"work {name}"),
            )
            for name, role in names.items()
        ]
        prompts = stream(self.seed, "prompts")
        for _ in range(6):
            shared = [prompts.randrange(1_000) for _ in range(2 * BLOCK_SIZE)]
            for _ in range(3):
                tokens = (*shared, *(prompts.randrange(1_000) for _ in range(4 * BLOCK_SIZE)))
                self.chains.append((tokens, hash_tokens(NAMESPACE, tokens)))
        self._seen: dict[tuple[NodeId, int], VersionVector] = {}
        self._lives: dict[NodeId, asyncio.Task[None]] = {}
        self._stopping = False

    async def run(self) -> SimResult:
        for node in self.nodes:
            self._lives[node.name] = asyncio.ensure_future(self._keep(node))
        work = [asyncio.ensure_future(self._store(node)) for node in self.nodes if node.role is Role.DECODE]
        work += [asyncio.ensure_future(self._serve()), asyncio.ensure_future(self._check_always())]
        chaos = asyncio.ensure_future(self._break_things())
        await asyncio.sleep(self.seconds)
        chaos.cancel()
        self.network.heal()
        for node in self.nodes:
            # A time service sets the walls right again; monotonic clocks keep what they gained.
            node.clock.set_drift(0)
            node.clock.step_wall(self.clock.wall_ns() - node.clock.wall_ns())
        self._stopping = True
        await asyncio.sleep(SETTLE_S)
        for task in work:
            task.cancel()
        await asyncio.gather(chaos, *work, return_exceptions=True)
        for task in (chaos, *work):
            if not task.cancelled() and task.exception() is not None:
                raise task.exception() or AssertionError
        self._check_settled()
        for node in self.nodes:
            self._lives[node.name].cancel()
            if node.running:
                await node.crash()
        await asyncio.gather(*self._lives.values(), return_exceptions=True)
        return SimResult(
            seed=self.seed,
            virtual_seconds=self.clock.monotonic_ns() / 1e9,
            events=self.network.frames + self.stores + self.requests + sum(self.faults.values()),
            faults=dict(sorted(self.faults.items())),
            restarts=sum(node.lives - 1 for node in self.nodes),
            requests=self.requests,
            requests_failed=self.failed,
            digest=self.network.digest,
        )

    async def _keep(self, node: SimNode) -> None:
        """Life after life, as a service manager would."""
        while True:
            await node.start()
            self.network.note(f"{node.name} starts {node.incarnation}")
            await node.live()
            self.network.note(f"{node.name} ends")
            await asyncio.sleep(0.3)

    async def _store(self, node: SimNode) -> None:
        random = stream(self.seed, f"store {node.name}")
        while not self._stopping:
            await asyncio.sleep(0.02 + random.random() * 0.1)
            if not node.running or not node.manager.ready:
                continue
            tokens, hashes = self.chains[random.randrange(len(self.chains))]
            depth = random.randint(1, len(hashes))
            self.stores += 1
            try:
                if random.random() < 0.01:
                    node.purge()
                else:
                    node.store(tokens[: depth * BLOCK_SIZE], hashes[:depth])
            except ReplicaFencedError:
                # Its life is over and about to end: what it held will be gone with it.
                self.network.note(f"{node.name} is fenced")

    async def _serve(self) -> None:
        """The gateway's requests: own, have a node register, then see all of it at home."""
        random, gateway = stream(self.seed, "requests"), self.nodes[0]
        while not self._stopping:
            await asyncio.sleep(0.03 + random.random() * 0.1)
            targets = [node for node in self.nodes[1:] if node.running]
            if not gateway.running or not gateway.manager.ready or not targets:
                continue
            self.requests += 1
            request_id = RequestId(f"request-{self.requests}")
            try:
                await self._one(gateway, targets[random.randrange(len(targets))], request_id, random.randint(1, 40))
            except KVError as error:
                self.failed += 1
                self.network.note(f"{request_id} {type(error).__name__}")

    async def _one(self, gateway: SimNode, node: SimNode, request_id: RequestId, length: int) -> None:
        incarnation = gateway.incarnation
        owner, token = gateway.replica.own(request_id)
        work = Work(request_id, owner.number, length, token)
        worked = await gateway.bus.request(node.name, work, expect=Worked, timeout_ns=3_000_000_000)
        deadline_ns = gateway.clock.monotonic_ns() + 2_000_000_000
        await gateway.replica.caught_up(worked.token, deadline_ns)
        if gateway.incarnation != incarnation:
            return
        entry = gateway.manager.entry(request_id)
        if entry.seq_len < worked.length:
            raise self._failure(f"{request_id} follows its token but shows {entry.seq_len} of {worked.length} tokens")
        gateway.replica.end(request_id)

    async def _break_things(self) -> None:
        random = self.chaos
        while True:
            await asyncio.sleep(0.3 + random.random() * 1.2)
            kind = FAULTS[random.randrange(len(FAULTS))]
            self.faults[kind] = self.faults.get(kind, 0) + 1
            self.network.note(f"fault {kind}")
            await self._break(kind)

    async def _break(self, kind: str) -> None:
        random, network = self.chaos, self.network
        a, b = random.sample([node.name for node in self.nodes], 2)
        others = [node.name for node in self.nodes if node.name != a]
        pause_s = 0.2 + random.random() * 2.5
        match kind:
            case "cut" | "one way" | "isolate":
                links = [(a, b)] if kind == "one way" else [(a, b), (b, a)]
                if kind == "isolate":
                    links = [link for other in others for link in ((a, other), (other, a))]
                network.cut |= dict.fromkeys(links)
                await asyncio.sleep(pause_s)
                # Healed in another order than cut.
                for link in random.sample(links, len(links)):
                    network.cut.pop(link, None)
                    await asyncio.sleep(0.01)
            case "clog":
                network.clogged[a, b] = random.randint(1_000_000, 200_000_000)
                await asyncio.sleep(pause_s)
                network.clogged.pop((a, b), None)
            case "loss":
                network.loss = random.random() * 0.2
                await asyncio.sleep(pause_s)
                network.loss = 0.0
            case "duplicate":
                network.duplication = random.random() * 0.3
                await asyncio.sleep(pause_s)
                network.duplication = 0.0
            case "crash":
                node = next(node for node in self.nodes if node.name == a)
                if node.running:
                    await node.crash()
            case "clock step":
                next(n for n in self.nodes if n.name == a).clock.step_wall(random.randint(-300_000_000, 150_000_000))
            case _:
                next(n for n in self.nodes if n.name == a).clock.set_drift(random.randint(-500, 500))

    async def _check_always(self) -> None:
        while True:
            await asyncio.sleep(CHECK_S)
            for node in self.nodes:
                if node.running:
                    self._check_node(node)

    def _check_node(self, node: SimNode) -> None:
        node.view.view.check()
        node.pool.check()
        stats = node.pool.stats()
        if stats.free + stats.cached + stats.pinned != stats.total:
            raise self._failure(f"{node.name} counts {stats}")
        life, vector = (node.name, int(node.incarnation)), node.manager.vector()
        before = self._seen.get(life)
        # A life that is over is forgotten as a whole; of a living one nothing ever is.
        if before is not None and any(0 < vector[origin] < before[origin] for origin in before):
            raise self._failure(f"{node.name} forgot updates: {before} became {vector}")
        self._seen[life] = vector
        for tokens, hashes in self.chains:
            said = {match.holder: match.num_blocks for match in node.index.lookup(hashes)}.get(node.holder, 0)
            if said != node.depth(tokens, hashes):
                raise self._failure(f"{node.name} says {said} of its own blocks, has {node.depth(tokens, hashes)}")

    def _check_settled(self) -> None:
        for node in self.nodes:
            if not node.running or not node.manager.ready:
                raise self._failure(f"{node.name} did not come back within {SETTLE_S:g} s")
        first = self.nodes[0]
        for node in self.nodes:
            lag = {str(origin): n for origin, n in node.manager.lag().items() if n}
            if lag:
                raise self._failure(f"{node.name} still lacks {lag}")
            if self._alive_part(node.manager.vector()) != self._alive_part(first.manager.vector()):
                raise self._failure(f"{node.name} and {first.name} applied different updates")
            for tokens, hashes in self.chains:
                truth = {n.holder: n.depth(tokens, hashes) for n in self.nodes if n.depth(tokens, hashes)}
                said = {match.holder: match.num_blocks for match in node.index.lookup(hashes)}
                if said != truth:
                    raise self._failure(f"{node.name} says {said} of a prefix, the pools hold {truth}")
            if any(stats.receipt for stats in node.pool.holds()):
                raise self._failure(f"{node.name} still holds {node.pool.holds()}")

    def _alive_part(self, vector: VersionVector) -> dict[str, int]:
        alive = {(node.name, node.incarnation) for node in self.nodes}
        return {str(origin): vector[origin] for origin in vector if (origin.node, origin.incarnation) in alive}

    def _failure(self, what: str) -> SimulationFailedError:
        return SimulationFailedError(seed=self.seed, seconds=self.clock.monotonic_ns() / 1e9, what=what)


def simulate(seed: int, *, seconds: float = 60.0, num_nodes: int = 5) -> SimResult:
    """Run one seed.

    Raises:
        SimulationFailedError: an invariant did not hold.
    """

    async def main(clock: LoopClock) -> SimResult:
        return await World(seed, seconds, num_nodes, clock).run()

    return run_virtual(main, epoch_ns=EPOCH_NS)

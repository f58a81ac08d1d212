"""What goes wrong in a run, and when: faults of network, nodes, clocks, transfers, disks and discovery, and among them
what operators do (operators.py), by chance.

Faults overlap, and end in another order than they began. After `heal` nothing is wrong any more.
"""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import replace
from random import Random
from typing import Final

from kv_core.clock import Clock
from kv_core.ids import NodeId
from kv_services.sim import operators
from kv_services.sim.directory import SimDirectory
from kv_services.sim.loop import SimLoop
from kv_services.sim.network import Link, SimNetwork
from kv_services.sim.node import SimNode
from kv_services.sim.operators import Operators
from kv_transport.backends.memory_network import MemoryFaults
from kv_transport.backends.memory_network import MemoryNetwork as TransferNetwork

KINDS: Final = (
    "cut",
    "one way",
    "isolate",
    "clog",
    "loss",
    "duplicate",
    "slow link",
    "crash",
    "pause",
    "slow node",
    "clock step",
    "clock drift",
    "clock jump",
    "late units",
    "missing completions",
    "lost units",
    "torn units",
    "reused slots",
    "disk full",
    "short read",
    "flipped bit",
    "short block reads",
    "slow disk",
    "directory lost",
    *operators.KINDS,
    "purge",
)
CALM: Final = MemoryFaults(delay_ns=30_000, jitter_ns=200_000)
_MS: Final = 1_000_000
JUMP_MAX_NS: Final = 5_000 * _MS
"""A node that starts with its wall this far ahead is one that peers refuse until they are there, too."""


class Chaos:
    """The faults of one run."""

    def __init__(
        self,
        rng: Random,
        nodes: list[SimNode],
        network: SimNetwork,
        transfers: TransferNetwork,
        directory: SimDirectory,
        acts: Operators,
        loop: SimLoop,
        clock: Clock,
        kinds: Sequence[str] = KINDS,
    ) -> None:
        self._kinds = kinds
        self._random = rng
        self._nodes = {node.name: node for node in nodes}
        self._network = network
        self._transfers = transfers
        self._directory = directory
        self._operators = acts
        self._loop = loop
        self._clock = clock
        self._open: dict[asyncio.Task[None], None] = {}
        self._undo: dict[int, Callable[[], None]] = {}
        self._serial = 0
        self.counts: dict[str, int] = {}

    async def run(self) -> None:
        """Begin one fault after the other, until cancelled."""
        while True:
            await asyncio.sleep(0.2 + self._random.random() * 1.3)
            kind = self._random.choice(self._kinds)
            self._network.note(f"fault {kind}")
            if await self._begin(kind):
                self.counts[kind] = self.counts.get(kind, 0) + 1

    async def heal(self) -> None:
        """End every fault."""
        for task in self._open:
            task.cancel()
        await asyncio.gather(*self._open, return_exceptions=True)
        for undo in list(self._undo.values()):
            undo()
        self._undo.clear()
        await self._operators.heal()
        for node in self._nodes.values():
            # A time service sets the walls right again; monotonic clocks keep what they gained.
            node.clock.set_drift(0)
            self._set_wall(node, 0)
            node.disk.short_reads = node.disk.short_block_reads = 0

    def _for_a_while(self, undo: Callable[[], None]) -> None:
        """End a fault after a time by chance, or when everything heals."""
        self._serial += 1
        serial, self._undo[self._serial] = self._serial, undo

        async def later() -> None:
            await asyncio.sleep(0.2 + self._random.random() * 2.5)
            del self._undo[serial]
            undo()

        task = asyncio.get_running_loop().create_task(later())
        self._open[task] = None
        task.add_done_callback(lambda done: self._open.pop(done, None))

    async def _begin(self, kind: str) -> bool:
        """Begin a fault; False where there was nothing to do it to."""
        random, network = self._random, self._network
        a, b = random.sample(sorted(self._nodes), 2)
        node = self._nodes[a]
        match kind:
            case "cut" | "one way" | "isolate":
                self._cut(kind, a, b)
            case "clog":
                network.clogged[a, b] = random.randint(1 * _MS, 200 * _MS)

                def unclog() -> None:
                    network.clogged.pop((a, b), None)

                self._for_a_while(unclog)
            case "slow link":
                self._links(a, b, replace(CALM, delay_ns=random.randint(1, 40) * _MS, bytes_per_s=200_000))
            case "loss":
                network.loss = random.random() * 0.15
                self._for_a_while(lambda: setattr(network, "loss", 0.0))
            case "duplicate":
                network.duplication = random.random() * 0.3
                self._for_a_while(lambda: setattr(network, "duplication", 0.0))
            case "crash":
                return await self._crash(node)
            case "pause":
                self._pause(node)
            case "slow node":
                self._slow(node)
            case "clock step":
                self._set_wall(node, random.randint(-300 * _MS, 150 * _MS))
            case "clock drift":
                node.clock.set_drift(random.randint(-500, 500))
            case "clock jump":
                self._set_wall(node, random.choice((-1, 1)) * random.randint(1_000 * _MS, JUMP_MAX_NS))
            case "late units" | "missing completions" | "lost units" | "torn units" | "reused slots":
                self._spoil(kind)
            case "disk full":
                node.disk.full = True
                self._for_a_while(lambda: setattr(node.disk, "full", False))
            case "short read":
                node.disk.short_reads = 1
                return await self._crash(node)
            case "flipped bit":
                node.disk.flip_bits()
            case "short block reads":
                node.disk.short_block_reads = random.randint(1, 4)
            case "slow disk":
                node.disk.slowness = float(random.randint(10, 10_000))
                self._for_a_while(lambda: setattr(node.disk, "slowness", 1.0))
            case "directory lost":
                self._directory.cut(a)
                self._for_a_while(lambda: self._directory.heal(a))
            case _:
                return self._operators.begin(kind)
        return True

    async def _crash(self, node: SimNode) -> bool:
        if not node.running or node.pauses:
            return False
        await node.crash()
        return True

    def _cut(self, kind: str, a: NodeId, b: NodeId) -> None:
        """Cut links of the bus, and in two of three cases those of KV as well."""
        links: list[Link] = [(a, b)] if kind == "one way" else [(a, b), (b, a)]
        if kind == "isolate":
            others = [name for name in self._nodes if name != a]
            links = [link for other in others for link in ((a, other), (other, a))]
        with_transfers = self._random.random() < 0.67
        for link in links:
            self._network.cut_link(link)
            if with_transfers:
                self._transfers.cut(*link)

        def heal() -> None:
            # In another order than they were cut.
            for link in self._random.sample(links, len(links)):
                if self._network.heal_link(link):
                    self._transfers.heal(*link)

        self._for_a_while(heal)

    def _set_wall(self, node: SimNode, offset_ns: int) -> None:
        """Put a wall that far from the true one."""
        node.clock.step_wall(self._clock.wall_ns() + offset_ns - node.clock.wall_ns())

    def _links(self, a: NodeId, b: NodeId, faults: MemoryFaults) -> None:
        self._transfers.set_faults(a, b, faults)
        self._for_a_while(lambda: self._transfers.set_faults(a, b, None))

    def _spoil(self, kind: str) -> None:
        """Let units of KV meet a fate more often, everywhere."""
        chance = 0.1 + self._random.random() * 0.5
        late_ns = self._random.randint(50, 8_000) * _MS

        def change(value: float) -> MemoryFaults:
            now = self._transfers.faults
            match kind:
                case "late units":
                    return replace(now, late=value, late_ns=late_ns)
                case "missing completions":
                    return replace(now, missing=value)
                case "lost units":
                    return replace(now, loss=value)
                case "torn units":
                    return replace(now, torn=value)
                case _:
                    return replace(now, reused=value)

        def mend() -> None:
            self._transfers.faults = change(0.0)

        self._transfers.faults = change(chance)
        self._for_a_while(mend)

    def _pause(self, node: SimNode) -> None:
        began_ns = self._clock.monotonic_ns()
        self._loop.stop_node(node.name)
        node.pauses += 1

        def go_on() -> None:
            node.pauses -= 1
            if not node.pauses:
                self._loop.continue_node(node.name)
            node.stood_still_ns += self._clock.monotonic_ns() - began_ns

        self._for_a_while(go_on)

    def _slow(self, node: SimNode) -> None:
        node.slowness = float(self._random.randint(5, 50))
        self._network.slow[node.name] = self._random.randint(1, 30) * _MS

        def recover() -> None:
            node.slowness = 1.0
            self._network.slow.pop(node.name, None)

        self._for_a_while(recover)

"""An upgrade, one process at a time: processes of two revisions of the wire work together, and the index is kept."""

import contextlib
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from pathlib import Path

import aiohttp
import pytest

from kv_core.wire import WIRE_REVISION, WIRE_VERSION
from kv_services.config import DiskTierSection, NodeConfig, Role, TiersSection
from kv_services.launch import LocalCluster, PortReservation, local_config
from kv_services.launch.group import service_command
from tests.integration.helpers_integration import BLOCK, DEADLINE_S, MODEL, Fabric, prompt, until
from tests.services import old_wire_process

pytestmark = [pytest.mark.integration, pytest.mark.timeout(300), pytest.mark.asyncio]

NEW = f"{WIRE_VERSION}.{WIRE_REVISION}"
OLD = f"{WIRE_VERSION}.0"
NODES = ("prefill-1", "decode-1", "decode-2")
SHARED = 12 * BLOCK
COUNT = 8


class Programs:
    """Which build each process is started with: the older one unless it was upgraded."""

    def __init__(self) -> None:
        self.upgraded: set[str] = set()

    def command(self, config_file: Path, node: NodeConfig) -> Sequence[str]:
        new = service_command(config_file, node)
        if node.id in self.upgraded:
            return new
        kind = "gateway" if node.role is Role.GATEWAY else "node"
        return [sys.executable, "-m", old_wire_process.__name__, kind, *new[1:]]


@contextlib.asynccontextmanager
async def old_cluster(programs: Programs) -> AsyncIterator[Fabric]:
    with PortReservation() as ports:
        tiers = TiersSection(disk=DiskTierSection(size="64 MiB"))
        config = local_config(ports, prefill=1, decode=2, slots=256, monitor=False, model=MODEL, tiers=tiers)
        cluster = LocalCluster(config, command=programs.command)
        async with cluster:
            async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=DEADLINE_S)) as session:
                fabric = Fabric(cluster, session)
                names = {node.id for node in config.nodes}
                for name in names:
                    await fabric.all_alive(name, names - {name})
                yield fabric
    assert cluster.leftovers == []


async def test_processes_are_upgraded_one_by_one_and_what_was_held_is_still_found() -> None:
    programs = Programs()
    async with old_cluster(programs) as fabric:
        seed = iter(range(1000))

        async def ask(*, cached: bool) -> None:
            tokens = prompt(next(seed), SHARED + 40, SHARED)
            answer = await fabric.ask(tokens, COUNT)
            assert answer.is_right(tokens, COUNT), f"{answer}\n{fabric.last_lines()}"
            assert answer.cached >= (SHARED if cached else 0), answer

        def told(name: str, expected: dict[str, str]) -> Callable[[], Awaitable[bool]]:
            async def wires_are_expected() -> bool:
                report = await fabric.status(name)
                return {name: report.wire, **report.wires} == expected

            return wires_are_expected

        await ask(cached=False)
        await ask(cached=True)
        for name in (*NODES, "gateway"):
            programs.upgraded.add(name)
            await fabric.cluster.restart(name)
            others = {"gateway", *NODES} - {name}
            for other in others:
                await fabric.all_alive(other, {"gateway", *NODES} - {other})
            await fabric.all_alive(name, others)
            expected = {node: NEW if node in programs.upgraded else OLD for node in (*NODES, "gateway")}
            # Asked of the one that is new: a gateway of the older build takes a newcomer for one of its own kind.
            await until(told(name, expected), lambda: "not every member told its wire")
            await fabric.all_alive("gateway", NODES)
            for _ in range(4):  # over both decode nodes, the one that was just upgraded too
                await ask(cached=True)

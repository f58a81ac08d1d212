"""A cluster of real processes over a network that can fail, with a disk tier each that can be filled."""

import contextlib
import os
import shutil
import subprocess
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

import aiohttp
import pytest

from kv_services.config import (
    BusSection,
    DiskTierSection,
    LimitsSection,
    TiersSection,
    TransportSection,
)
from kv_services.gateway.limits import KEEPALIVE_S
from kv_services.launch import LocalCluster, PortReservation, local_config
from tests.integration.helpers_integration import DEADLINE_S, Fabric
from tests.soak.lives import Lives
from tests.soak.network import Network
from tests.soak.questions import Questions

SILENT_S = KEEPALIVE_S + 5.0
"""For how long a client that was told nothing holds its gateway for there: a stream without news carries comments. Of a
machine that is gone nobody would ever hear."""

DISK = "2 MiB"
DISK_BYTES = 3 << 20


@dataclass
class Disks:
    """Where tiers lie: a small file system for each node when that can be had, else a plain folder."""

    folder: Path
    mounted: list[Path] = field(default_factory=list)

    def prepare(self, nodes: list[str]) -> None:
        for node in nodes:
            path = self.folder / node
            path.mkdir(parents=True)
            mount = ["mount", "-t", "tmpfs", "-o", f"size={DISK_BYTES}", "tmpfs", str(path)]
            if os.geteuid() == 0 and subprocess.run(mount, capture_output=True, check=False).returncode == 0:
                self.mounted.append(path)

    def can_fill(self, node: str) -> bool:
        return self.folder / node in self.mounted

    def fill(self, node: str) -> None:
        with (self.folder / node / "filler").open("wb", buffering=0) as stream, contextlib.suppress(OSError):
            while True:
                stream.write(bytes(1 << 16))

    def empty(self, node: str) -> None:
        (self.folder / node / "filler").unlink(missing_ok=True)

    def flip(self, node: str, random: Random, count: int) -> int:
        """Flip bits in what lies there; how many."""
        files = [path for path in (self.folder / node).rglob("*") if path.is_file() and path.stat().st_size]
        flipped = 0
        for _ in range(count if files else 0):
            path = random.choice(sorted(files))
            with path.open("r+b") as stream:
                at = random.randrange(path.stat().st_size)
                stream.seek(at)
                byte = stream.read(1)
                if byte:
                    stream.seek(at)
                    stream.write(bytes([byte[0] ^ (1 << random.randrange(8))]))
                    flipped += 1
        return flipped

    def close(self) -> None:
        for path in self.mounted:
            subprocess.run(["umount", "-l", str(path)], check=False)


@dataclass
class SoakCluster:
    """What a run works on."""

    fabric: Fabric
    network: Network
    disks: Disks
    cluster: LocalCluster
    lives: Lives


@contextlib.asynccontextmanager
async def soak_cluster(
    folder: Path, seed: int, prefill: int, decode: int, questions: Questions, network: Network
) -> AsyncIterator[SoakCluster]:
    """The cluster, all of its members knowing each other. On the way out its leftovers are in `cluster.leftovers`, and
    what its processes wrote, until they were told to stop, is in `folder/logs`."""
    disks = Disks(folder / "disks")
    with PortReservation() as ports:
        config = local_config(
            ports,
            prefill=prefill,
            decode=decode,
            slots=questions.slots,
            monitor=False,
            model=questions.model,
            bus=BusSection(heartbeat_interval_ms=250, suspect_after_ms=1_000, dead_after_ms=3_000),
            limits=LimitsSection(request_timeout_s=30.0, lease_ms=5_000),
            transport=TransportSection(backend="tcp"),
            tiers=TiersSection(disk=DiskTierSection(size=DISK, path=str(folder / "disks"))),
        )
        kv_nodes = [node.id for node in config.nodes if node.role.holds_kv]
        disks.prepare(kv_nodes)
        config = network.place(config, ports, seed)
        environment = pytest.MonkeyPatch()
        if questions.model.path:
            # What was unpacked of its weights for the oracle serves the processes too.
            environment.setenv("XDG_CACHE_HOME", str(Path(questions.model.path).parent))

        try:
            await network.start()
            lives = Lives()
            cluster = LocalCluster(config, command=network.command, on_change=lives.changed)
            async with cluster:
                lives.cluster = cluster
                timeout, headers = aiohttp.ClientTimeout(total=DEADLINE_S, sock_read=SILENT_S), network.headers
                connector = aiohttp.TCPConnector(limit=0)
                try:
                    async with aiohttp.ClientSession(timeout=timeout, connector=connector, headers=headers) as session:
                        fabric = Fabric(cluster, session)
                        names = {node.id for node in config.nodes}
                        for name in sorted(names):
                            await fabric.all_alive(name, names - {name})
                        yield SoakCluster(fabric, network, disks, cluster, lives)
                finally:
                    lives.over()
                    shutil.copytree(cluster.folder / "logs", folder / "logs", dirs_exist_ok=True)
        finally:
            environment.undo()
            await network.close()
            disks.close()

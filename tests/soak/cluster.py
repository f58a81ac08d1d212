"""A cluster of real processes that see each other through proxies, with a disk tier each that can be filled."""

import contextlib
import os
import shutil
import subprocess
import sys
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

import aiohttp
import msgspec
import pytest

from kv_services.config import (
    BusSection,
    ClusterConfig,
    ClusterSection,
    DiskTierSection,
    LimitsSection,
    NodeConfig,
    TiersSection,
    TransportSection,
)
from kv_services.config_file import dump_config, load_config
from kv_services.launch import LocalCluster, PortReservation, local_config
from kv_services.launch.group import service_command
from tests.integration.helpers_integration import DEADLINE_S, Fabric
from tests.soak.lives import Lives
from tests.soak.proxy import Conditions, Proxy
from tests.soak.questions import Questions

DISK = "2 MiB"
DISK_BYTES = 3 << 20


@dataclass
class Network:
    """The proxies: per pair for the bus, per target for KV."""

    bus: dict[tuple[str, str], Conditions] = field(default_factory=dict)
    data: dict[str, Conditions] = field(default_factory=dict)
    proxies: list[Proxy] = field(default_factory=list)

    def isolate(self, node: str, cut: bool) -> None:
        """Cut a node off from everybody, or no longer."""
        for pair, conditions in self.bus.items():
            if node in pair:
                conditions.cut = cut
        if node in self.data:
            self.data[node].cut = cut


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
    folder: Path, seed: int, prefill: int, decode: int, questions: Questions
) -> AsyncIterator[SoakCluster]:
    """The cluster, all of its members knowing each other. On the way out its leftovers are in `cluster.leftovers`, and
    what its processes wrote, until they were told to stop, is in `folder/logs`."""
    network, disks = Network(), Disks(folder / "disks")
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
        seen = {node.id: _seen_by(node, config, ports, network, seed) for node in config.nodes}
        advertised = {node: _data_proxy(config.node(node), ports, network, seed) for node in kv_nodes}

        def command(config_file: Path, node: NodeConfig) -> list[str]:
            whole = msgspec.structs.replace(seen[node.id], cluster=_cluster_of(config_file))
            file = config_file.parent / f"{node.id}.toml"
            file.write_text(dump_config(whole))
            argv = service_command(file, node)
            if node.id not in advertised:
                return argv
            program = Path(__file__).with_name("faulty_node.py")
            return [sys.executable, str(program), str(advertised[node.id]), *argv[1:]]

        environment = pytest.MonkeyPatch()
        if questions.model.path:
            # What was unpacked of its weights for the oracle serves the processes too.
            environment.setenv("XDG_CACHE_HOME", str(Path(questions.model.path).parent))

        try:
            for proxy in network.proxies:
                await proxy.start()
            lives = Lives()
            cluster = LocalCluster(config, command=command, on_change=lives.changed)
            async with cluster:
                lives.cluster = cluster
                timeout = aiohttp.ClientTimeout(total=DEADLINE_S)
                connector = aiohttp.TCPConnector(limit=0)
                try:
                    async with aiohttp.ClientSession(timeout=timeout, connector=connector) as session:
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
            for proxy in network.proxies:
                await proxy.close()
            disks.close()


def _cluster_of(config_file: Path) -> ClusterSection:
    return load_config(config_file).cluster


def _seen_by(
    observer: NodeConfig, config: ClusterConfig, ports: PortReservation, network: Network, seed: int
) -> ClusterConfig:
    """The cluster file of one process: the others' bus ports are those of proxies."""
    nodes = []
    for node in config.nodes:
        if node.id != observer.id:
            conditions = network.bus.setdefault((observer.id, node.id), Conditions())
            changed: dict[str, int] = {}
            for name in ("bus_port", "events_port"):
                random = Random(f"{seed}/{observer.id}/{node.id}/{name}")
                changed[name] = ports.take()
                network.proxies.append(Proxy(changed[name], getattr(node, name), conditions, random))
            node = msgspec.structs.replace(node, **changed)
        nodes.append(node)
    return msgspec.structs.replace(config, nodes=nodes)


def _data_proxy(node: NodeConfig, ports: PortReservation, network: Network, seed: int) -> int:
    port = ports.take()
    network.data[node.id] = Conditions()
    network.proxies.append(Proxy(port, node.data_port, network.data[node.id], Random(f"{seed}/{node.id}/data")))
    return port

"""How the processes of a run reach each other, and what can happen to that; by proxies, which everybody can have."""

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Protocol

import msgspec

from kv_services.config import ClusterConfig, ClusterSection, NodeConfig
from kv_services.config_file import dump_config, load_config
from kv_services.launch import PortReservation
from kv_services.launch.group import service_command
from tests.soak.proxy import Conditions, Proxy

SLOW_BYTES_PER_S = 64_000


class Network(Protocol):
    """What lies between the processes.

    Attributes:
        faults: kinds of faults that it can inflict.
        headers: what a client's requests must carry.
    """

    faults: Sequence[str]
    headers: dict[str, str]

    @property
    def flipped(self) -> int:
        """Bits that it flipped so far."""
        ...

    def place(self, config: ClusterConfig, ports: PortReservation, seed: int) -> ClusterConfig:
        """The cluster as the launcher and clients are to see it; called once, before `start`."""
        ...

    def command(self, config_file: Path, node: NodeConfig) -> list[str]:
        """The command line of a process, by the launcher's cluster file."""
        ...

    async def start(self) -> None:
        """Let them reach each other."""
        ...

    async def close(self) -> None:
        """Leave nothing behind. Idempotent."""
        ...

    def begin(self, fault: str, victim: str) -> None:
        """Inflict one of `faults` on a process."""
        ...

    def end(self, fault: str, victim: str) -> None:
        """Heal it."""
        ...


@dataclass
class Proxies:
    """A proxy per pair for the bus, and one per target for KV."""

    faults: Sequence[str] = ("partition", "slow link", "flip in transit")
    headers: dict[str, str] = field(default_factory=dict)
    _bus: dict[tuple[str, str], Conditions] = field(default_factory=dict)
    _data: dict[str, Conditions] = field(default_factory=dict)
    _proxies: list[Proxy] = field(default_factory=list)
    _seen: dict[str, ClusterConfig] = field(default_factory=dict)
    _advertised: dict[str, int] = field(default_factory=dict)

    @property
    def flipped(self) -> int:
        return sum(conditions.flipped for conditions in self._data.values())

    def place(self, config: ClusterConfig, ports: PortReservation, seed: int) -> ClusterConfig:
        for node in config.nodes:
            self._seen[node.id] = self._seen_by(node, config, ports, seed)
            if node.role.holds_kv:
                port = self._advertised[node.id] = ports.take()
                conditions = self._data[node.id] = Conditions()
                self._proxies.append(Proxy(port, node.data_port, conditions, Random(f"{seed}/{node.id}/data")))
        return config

    def command(self, config_file: Path, node: NodeConfig) -> list[str]:
        whole = msgspec.structs.replace(self._seen[node.id], cluster=_cluster_of(config_file))
        file = config_file.parent / f"{node.id}.toml"
        file.write_text(dump_config(whole))
        argv = service_command(file, node)
        if node.id not in self._advertised:
            return argv
        program = Path(__file__).with_name("faulty_node.py")
        return [sys.executable, str(program), str(self._advertised[node.id]), *argv[1:]]

    async def start(self) -> None:
        for proxy in self._proxies:
            await proxy.start()

    async def close(self) -> None:
        for proxy in self._proxies:
            await proxy.close()

    def begin(self, fault: str, victim: str) -> None:
        self._set(fault, victim, on=True)

    def end(self, fault: str, victim: str) -> None:
        self._set(fault, victim, on=False)

    def _set(self, fault: str, victim: str, *, on: bool) -> None:
        match fault:
            case "partition":
                for pair, conditions in self._bus.items():
                    if victim in pair:
                        conditions.cut = on
                if victim in self._data:
                    self._data[victim].cut = on
            case "slow link":
                self._data[victim].bytes_per_s = SLOW_BYTES_PER_S if on else 0
            case "flip in transit":
                for conditions in self._data.values():
                    conditions.flips = conditions.flips + 2 if on else 0
            case _:
                raise AssertionError(fault)

    def _seen_by(self, observer: NodeConfig, config: ClusterConfig, ports: PortReservation, seed: int) -> ClusterConfig:
        """The cluster file of one process: the others' bus ports are those of proxies."""
        nodes = []
        for node in config.nodes:
            if node.id != observer.id:
                conditions = self._bus.setdefault((observer.id, node.id), Conditions())
                changed: dict[str, int] = {}
                for name in ("bus_port", "events_port"):
                    random = Random(f"{seed}/{observer.id}/{node.id}/{name}")
                    changed[name] = ports.take()
                    self._proxies.append(Proxy(changed[name], getattr(node, name), conditions, random))
                node = msgspec.structs.replace(node, **changed)
            nodes.append(node)
        return msgspec.structs.replace(config, nodes=nodes)


def _cluster_of(config_file: Path) -> ClusterSection:
    return load_config(config_file).cluster

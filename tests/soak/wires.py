"""A network of wires for the processes of a run: a namespace each, joined by bridges, where packets are really lost.

    its namespace   |            this process's namespace
    eth0 ---- port of a switch of its own ---- uplink ---- trunk ---- core, where clients are

What is lost is lost at the switch or with the cable, never by the sender's own kernel knowing of it: connections stay
half open, and what was sent is sent again later and later, as in the field. All of it, and what is mounted, belongs to
a network and a mount namespace of this process alone (`alone`), which end with its last process however that ends.
"""

import os
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from bench import namespaces
from bench.namespaces import inside, run
from kv_services.config import ClusterConfig, NodeConfig, TenantConfig
from kv_services.launch import PortReservation
from kv_services.launch.group import service_command
from tests.soak.network import SLOW_BYTES_PER_S

OUTSIDE = "KV_SOAK_OUTSIDE"
KEY = "soak-" + "k" * 16
OPERATOR_KEY = "soak-" + "o" * 16
"""What leaves loopback needs a tenant with a key; and who watches the processes then needs one too."""

# 198.18.0.0/15 is set aside for such networks.
_CORE = "198.18.0.1"
_HOST = "198.18.0.{}"
_FIRST_HOST = 10
_ENTER = ("unshare", "--net", "--mount", "--")


def unavailable() -> str | None:
    """Why there can be no such network here, or None."""
    reason = namespaces.unavailable()
    if reason is None:
        attempt = "ip link add kvs type bridge && ip link add kva type veth peer name kvb && mount -t tmpfs none /run"
        done = subprocess.run([*_ENTER, "sh", "-c", attempt], capture_output=True, text=True, check=False)
        reason = f"no private network: {done.stderr.strip()}" if done.returncode else None
    return reason


def alone(argv: Sequence[str]) -> None:
    """Have this process in namespaces of its own: the first call becomes `argv` in them, in which a second one returns.

    Raises:
        OSError: `unshare` is missing.
    """
    here = str(Path("/proc/self/ns/net").readlink())
    if os.environ.setdefault(OUTSIDE, here) == here:
        os.execvp(_ENTER[0], [*_ENTER, *argv])
    # The names of namespaces are files below it, and these shall be gone too.
    run("mount", "-t", "tmpfs", "tmpfs", "/run")
    run("ip", "link", "set", "lo", "up")


@dataclass
class Wires:
    """The network. Only for a process that is `alone`."""

    faults: Sequence[str] = ("partition", "unplugged", "deaf", "mute", "power off", "slow link")
    headers: dict[str, str] = field(default_factory=lambda: {"Authorization": f"Bearer {KEY}"})
    flipped: int = 0
    _nodes: list[str] = field(default_factory=list)

    def place(self, config: ClusterConfig, ports: PortReservation, seed: int) -> ClusterConfig:
        self._nodes = [node.id for node in config.nodes]
        return msgspec.structs.replace(
            config,
            cluster=msgspec.structs.replace(config.cluster, allow_remote=True, operator_keys=[OPERATOR_KEY]),
            tenants=[TenantConfig(id="soak", api_keys=[KEY])],
            nodes=[msgspec.structs.replace(node, host=self._host(node.id)) for node in config.nodes],
        )

    def command(self, config_file: Path, node: NodeConfig) -> list[str]:
        return [*inside(self._name(node.id)), *service_command(config_file, node)]

    async def start(self) -> None:
        run("ip", "link", "add", "core", "type", "bridge")
        run("ip", "addr", "add", f"{_CORE}/24", "dev", "core")
        run("ip", "link", "set", "core", "up")
        for node in self._nodes:
            tag = self._tag(node)
            run("ip", "link", "add", f"switch{tag}", "type", "bridge")
            run("ip", "link", "add", f"uplink{tag}", "type", "veth", "peer", "name", f"trunk{tag}")
            run("ip", "link", "set", f"uplink{tag}", "master", f"switch{tag}")
            run("ip", "link", "set", f"trunk{tag}", "master", "core")
            for device in ("switch", "uplink", "trunk"):
                run("ip", "link", "set", f"{device}{tag}", "up")
            self._build(node)

    async def close(self) -> None:
        """Nothing to do: all of it ends with this process."""

    def begin(self, fault: str, victim: str) -> None:
        tag = self._tag(victim)
        match fault:
            case "partition":
                self._lose(f"uplink{tag}")
                self._lose(f"port{tag}")
            case "unplugged" | "power off":
                run("ip", "link", "set", f"port{tag}", "down")
            case "deaf":
                self._lose(f"port{tag}")
            case "mute":
                self._lose(f"uplink{tag}")
            case "slow link":
                for device in (f"uplink{tag}", f"port{tag}"):
                    run("tc", "qdisc", "replace", "dev", device, "root", "tbf", "rate", f"{SLOW_BYTES_PER_S}bps",
                        "burst", "16kb", "latency", "300ms")  # fmt: skip
            case _:
                raise AssertionError(fault)

    def end(self, fault: str, victim: str) -> None:
        tag = self._tag(victim)
        match fault:
            case "partition" | "slow link":
                self._pass(f"uplink{tag}")
                self._pass(f"port{tag}")
            case "unplugged":
                run("ip", "link", "set", f"port{tag}", "up")
            case "power off":
                # A machine that was off knows of none of its connections, and what it had to send is gone.
                # The link first: a namespace takes its end of it along, in its own time.
                run("ip", "link", "del", f"port{tag}")
                run("ip", "netns", "del", self._name(victim))
                self._build(victim)
            case "deaf":
                self._pass(f"port{tag}")
            case "mute":
                self._pass(f"uplink{tag}")
            case _:
                raise AssertionError(fault)

    def _build(self, node: str) -> None:
        name, tag = self._name(node), self._tag(node)
        run("ip", "netns", "add", name)
        run("ip", "link", "add", f"port{tag}", "type", "veth", "peer", "name", "eth0", "netns", name)
        run("ip", "-n", name, "link", "set", "lo", "up")
        # Always the same, as of one machine: others remember it.
        run("ip", "-n", name, "link", "set", "eth0", "address", f"02:00:00:00:00:{tag:02x}")
        run("ip", "-n", name, "addr", "add", f"{self._host(node)}/24", "dev", "eth0")
        run("ip", "-n", name, "link", "set", "eth0", "up")
        run("ip", "link", "set", f"port{tag}", "master", f"switch{tag}")
        run("ip", "link", "set", f"port{tag}", "up")

    def _lose(self, device: str) -> None:
        """Lose whatever leaves by it: its queue has no room."""
        run("tc", "qdisc", "replace", "dev", device, "root", "pfifo", "limit", "0")

    def _pass(self, device: str) -> None:
        run("tc", "qdisc", "del", "dev", device, "root")

    def _tag(self, node: str) -> int:
        return self._nodes.index(node) + _FIRST_HOST

    def _host(self, node: str) -> str:
        return _HOST.format(self._tag(node))

    def _name(self, node: str) -> str:
        return f"kv-{node}"

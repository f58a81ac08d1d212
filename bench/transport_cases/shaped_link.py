"""A link of a given rate to a network namespace: a veth pair, shaped on the way there by `tc tbf`."""

import contextlib
import os
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ShapedLink:
    """`near` and `far` are the addresses of its ends; `prefix` starts a command at the far one."""

    near: str
    far: str
    prefix: tuple[str, ...]
    _device: str

    def shape(self, mbit: int) -> None:
        """Pass at most so many Mbit/s towards the far end. The bucket holds what passes in about 1 ms."""
        burst = max(128_000, mbit * 125)
        _run("tc", "qdisc", "replace", "dev", self._device, "root", "tbf", "rate", f"{mbit}mbit",
             "burst", str(burst), "latency", "20ms")  # fmt: skip


def unavailable() -> str | None:
    """Why there can be no such link here, or None."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    missing = [name for name in ("ip", "tc") if shutil.which(name) is None]
    return f"no {' and no '.join(missing)} (package iproute2)" if missing else None


@contextlib.contextmanager
def shaped_link() -> Iterator[ShapedLink]:
    """Made for this process, removed at the end with everything in it; not shaped yet.

    Raises:
        OSError: the kernel has no namespaces, veth or tbf.
    """
    tag = os.getpid()
    namespace, device, other = f"kvbench-{tag}", f"kvb{tag}", f"kvf{tag}"
    # 198.18.0.0/15 is set aside for benchmarks.
    near, far = f"198.18.{tag % 251}.1", f"198.18.{tag % 251}.2"
    _run("ip", "netns", "add", namespace)
    try:
        _run("ip", "link", "add", device, "type", "veth", "peer", "name", other, "netns", namespace)
        try:
            _run("ip", "addr", "add", f"{near}/30", "dev", device)
            _run("ip", "link", "set", device, "up")
            inside = ("ip", "netns", "exec", namespace)
            for command in (f"addr add {far}/30 dev {other}", f"link set {other} up", "link set lo up"):
                _run(*inside, "ip", *command.split())
            yield ShapedLink(near, far, inside, device)
        finally:
            _run("ip", "link", "del", device)
    finally:
        _run("ip", "netns", "del", namespace)


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise OSError(f"{' '.join(command)}: {done.stderr.strip()}")

"""A link of a given rate to a network namespace: a veth pair, shaped on the way there by `tc tbf`."""

import contextlib
import json
import os
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass

from bench.namespaces import namespace, run


@dataclass(frozen=True, slots=True)
class ShapedLink:
    """`near` and `far` are the addresses of its ends; `prefix` starts a command at the far one."""

    near: str
    far: str
    prefix: tuple[str, ...]
    _device: str

    def shape(self, mbit: int) -> None:
        """Pass at most so many Mbit/s towards the far end."""
        run("tc", "qdisc", "replace", "dev", self._device, "root", "tbf", "rate", f"{mbit}mbit",
            "burst", str(burst_nbytes(mbit)), "latency", "20ms")  # fmt: skip

    def carried_nbytes(self) -> int:
        """What went towards the far end so far, headers included."""
        command = ("ip", "-json", "-statistics", "link", "show", "dev", self._device)
        shown = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
        return int(shown[0]["stats64"]["tx"]["bytes"])


def burst_nbytes(mbit: int) -> int:
    """What passes at once after a pause: the bucket holds what passes in about 1 ms."""
    return max(128_000, mbit * 125)


@contextlib.contextmanager
def shaped_link() -> Iterator[ShapedLink]:
    """Made for this process, removed at the end with everything in it; not shaped yet.

    Raises:
        OSError: the kernel has no namespaces, veth or tbf.
    """
    tag = os.getpid()
    name, device, other = f"kvbench-{tag}", f"kvb{tag}", f"kvf{tag}"
    # 198.18.0.0/15 is set aside for benchmarks.
    near, far = f"198.18.{tag % 251}.1", f"198.18.{tag % 251}.2"
    with namespace(name) as prefix:
        run("ip", "link", "add", device, "type", "veth", "peer", "name", other, "netns", name)
        try:
            run("ip", "addr", "add", f"{near}/30", "dev", device)
            run("ip", "link", "set", device, "up")
            for command in (f"addr add {far}/30 dev {other}", f"link set {other} up", "link set lo up"):
                run(*prefix, "ip", *command.split())
            yield ShapedLink(near, far, prefix, device)
        finally:
            run("ip", "link", "del", device)

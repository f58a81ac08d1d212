"""A link of a given rate to a network namespace: a veth pair, shaped on the way there by `tc tbf`."""

import contextlib
import os
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
        """Pass at most so many Mbit/s towards the far end. The bucket holds what passes in about 1 ms."""
        burst = max(128_000, mbit * 125)
        run("tc", "qdisc", "replace", "dev", self._device, "root", "tbf", "rate", f"{mbit}mbit",
            "burst", str(burst), "latency", "20ms")  # fmt: skip


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

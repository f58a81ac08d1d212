"""Network namespaces by iproute2: links and networks that are made here and still behave like those in the field."""

import contextlib
import os
import shutil
import subprocess
from collections.abc import Iterator


def unavailable() -> str | None:
    """Why there can be no namespaces here, or None."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    missing = [name for name in ("ip", "tc") if shutil.which(name) is None]
    return f"no {' and no '.join(missing)} (package iproute2)" if missing else None


@contextlib.contextmanager
def namespace(name: str) -> Iterator[tuple[str, ...]]:
    """A namespace of that name, which ends with the context; what starts a command in it.

    Raises:
        OSError: the kernel has none, or this process may not make one.
    """
    run("ip", "netns", "add", name)
    try:
        yield inside(name)
    finally:
        run("ip", "netns", "del", name)


def inside(name: str) -> tuple[str, ...]:
    """What starts a command in the namespace of that name; the command takes over the process."""
    return (shutil.which("ip") or "ip", "netns", "exec", name)


def run(*command: str) -> None:
    """Run a command to its end.

    Raises:
        OSError: it failed; with what it said.
    """
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise OSError(f"{' '.join(command)}: {done.stderr.strip()}")

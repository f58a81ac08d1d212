"""What did a stopped cluster leave on this machine: processes, sockets, shared memory, folders.

Measured, not assumed: while the processes run, what they hold is read from /proc; once they are stopped each thing is
looked for again. Only what these processes held is counted, so other software on the machine does not matter.
"""

import contextlib
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Final

MARK: Final = "KV_FABRIC_CLUSTER"
"""Environment variable by which all processes of one cluster, and whatever they start, are known."""

_PROC: Final = Path("/proc")
_SHM: Final = "/dev/shm/"
_TCP_LISTEN: Final = "0A"


class Footprint:
    """What the processes of one cluster were seen to hold."""

    def __init__(self, mark: str) -> None:
        """`mark` is the value of `MARK` in the cluster's processes."""
        self._mark = f"{MARK}={mark}".encode()
        self._listeners: set[str] = set()
        self._socket_files: set[Path] = set()
        self._segments: set[Path] = set()
        self._memfds: set[tuple[int, int]] = set()
        self._folders: set[Path] = set()

    def watch_folder(self, folder: Path) -> None:
        """Count that folder if it is still there at the end."""
        self._folders.add(folder)

    def observe(self) -> None:
        """Note what the cluster's processes hold now; call it before they are stopped, as often as liked."""
        inodes: set[str] = set()
        for pid in self._processes():
            for link, target in _descriptors(pid):
                if target.startswith("socket:["):
                    inodes.add(target[8:-1])
                elif target.startswith("/memfd:"):
                    self._memfds |= _identity(link)
            self._segments |= {path for path in _mapped_files(pid) if str(path).startswith(_SHM)}
        self._listeners |= {local for local, inode in _tcp_listeners() if inode in inodes}
        self._socket_files |= {Path(name) for name, inode in _unix_sockets() if inode in inodes and name[:1] == "/"}

    def remaining(self) -> list[str]:
        """What is still there, one sentence each; empty when nothing is."""
        found = [f"process {pid}" for pid in self._processes()]
        listening = {local for local, _ in _tcp_listeners()}
        found += [f"listening socket {local}" for local in sorted(self._listeners & listening)]
        found += [f"socket {path}" for path in sorted(self._socket_files) if path.exists()]
        found += [f"shared memory {path}" for path in sorted(self._segments) if path.exists()]
        found += [f"folder {path}" for path in sorted(self._folders) if path.exists()]
        if self._memfds:
            for pid in _pids():
                held = {
                    one for link, name in _descriptors(pid) if name.startswith("/memfd:") for one in _identity(link)
                }
                found += [f"memfd {inode} held by process {pid}" for _, inode in sorted(held & self._memfds)]
        return found

    def kill_survivors(self) -> None:
        """SIGKILL to every process that still carries the mark."""
        for pid in self._processes():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def _processes(self) -> list[int]:
        return [pid for pid in _pids() if self._mark in _read(_PROC / str(pid) / "environ").split(b"\0")]


def _pids() -> Iterator[int]:
    for name in os.listdir(_PROC):
        if name.isdigit():
            yield int(name)


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:
        return b""  # the process ended meanwhile, or is not ours to look at


def _descriptors(pid: int) -> Iterator[tuple[Path, str]]:
    folder = _PROC / str(pid) / "fd"
    try:
        names = os.listdir(folder)
    except OSError:
        return
    for name in names:
        try:
            yield folder / name, os.readlink(folder / name)
        except OSError:
            continue


def _identity(link: Path) -> set[tuple[int, int]]:
    try:
        stat = link.stat()
    except OSError:
        return set()
    return {(stat.st_dev, stat.st_ino)}


def _mapped_files(pid: int) -> Iterator[Path]:
    for line in _read(_PROC / str(pid) / "maps").decode(errors="replace").splitlines():
        fields = line.split(maxsplit=5)
        if len(fields) == 6 and fields[5].startswith("/"):
            yield Path(fields[5].removesuffix(" (deleted)"))


def _tcp_listeners() -> Iterator[tuple[str, str]]:
    for table in ("tcp", "tcp6"):
        for line in _read(_PROC / "net" / table).decode().splitlines()[1:]:
            fields = line.split()
            if fields[3] == _TCP_LISTEN:
                yield fields[1], fields[9]


def _unix_sockets() -> Iterator[tuple[str, str]]:
    for line in _read(_PROC / "net" / "unix").decode(errors="replace").splitlines()[1:]:
        fields = line.split(maxsplit=7)
        if len(fields) == 8:
            yield fields[7], fields[6]

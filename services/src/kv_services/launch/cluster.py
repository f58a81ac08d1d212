"""A whole cluster of processes on this machine, as one thing with a beginning and an end.

Start: a private folder is made and locked, the cluster file and the keys are written into it, all processes are
started at once, and each is awaited until its `/healthz` answers. Stop, also when any of that failed or was
cancelled: the processes in their order, then the folder goes, and what stayed behind is looked for and listed.

Invariants: no process outlives the context; a cancelled clean-up is finished all the same, only faster; a folder of a
launcher that was killed is removed by the next one, known by its lock.
"""

import asyncio
import contextlib
import fcntl
import os
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Final, Self

import msgspec

from kv_services.config import ClusterConfig
from kv_services.config_checks import check_config
from kv_services.config_file import dump_config
from kv_services.launch.errors import NotRunningError
from kv_services.launch.group import (
    START_TIMEOUT_S,
    STOP_GRACE_S,
    Command,
    ProcessGroup,
    Watcher,
    service_command,
)
from kv_services.launch.keys import write_keys
from kv_services.launch.leftovers import Footprint
from kv_services.launch.processes import ProcessState
from kv_services.launch.signals import finish

_PREFIX: Final = "kv-fabric-"
_SHORT_BASE: Final = "/tmp"
_SOCKET_PATH_MAX: Final = 107
_SOCKET_NAME_MAX: Final = 40
"""Room for a socket's file name below a node's folder of sockets."""

_LOCK: Final = "lock"
_TAIL_LINES: Final = 20
_TAIL_BYTES: Final = 64 << 10


class LocalCluster:
    """Processes of one cluster file, started on entry and gone on exit.

    Args:
        config: the cluster; its `state_dir` is replaced by one in the private folder.
        keep: leave the folder (logs, state) where it is.
        command: makes a process's command line; tests put their own programs in.
        on_change: told of each change of a process's state.
        start_timeout_s: seconds a process may take to become ready.
        stop_grace_s: seconds a process may take to stop before it is killed.
        hurry: when set, stopping no longer waits for anybody.
        start: the nodes to start on entry; all when None. `restart` starts others later.

    After exit `leftovers` lists what was found to be still there.
    """

    def __init__(
        self,
        config: ClusterConfig,
        *,
        keep: bool = False,
        command: Command = service_command,
        on_change: Watcher | None = None,
        start_timeout_s: float = START_TIMEOUT_S,
        stop_grace_s: float = STOP_GRACE_S,
        hurry: asyncio.Event | None = None,
        start: Sequence[str] | None = None,
    ) -> None:
        check_config(config, file="<local cluster>")
        self._start = None if start is None else [config.node(node_id).id for node_id in start]
        self.config = config
        self.leftovers: list[str] = []
        self._keep = keep
        self._command = command
        self._on_change = on_change
        self._start_timeout_s = start_timeout_s
        self._stop_grace_s = stop_grace_s
        self._hurry = hurry or asyncio.Event()
        self._group: ProcessGroup | None = None
        self._folder: Path | None = None
        self._lock: int | None = None
        self._footprint = Footprint("")

    @property
    def folder(self) -> Path:
        """The private folder: `cluster.toml`, `state`, `logs`. Only while the cluster is open, or kept."""
        if self._folder is None:
            raise NotRunningError(node="the cluster")
        return self._folder

    @property
    def config_file(self) -> Path:
        """The file that the processes were started with."""
        return self.folder / "cluster.toml"

    def url(self, node_id: str) -> str:
        """Root of a process's HTTP server."""
        return self.config.node(node_id).http_url

    def pid(self, node_id: str) -> int:
        """Process id of a node's present life."""
        return self._processes.process(node_id).pid

    def state(self, node_id: str) -> ProcessState:
        """Where a node's present life stands."""
        return self._processes.process(node_id).state

    def status(self, node_id: str) -> int | None:
        """Exit status of a node's present life, minus the signal's number if one ended it; None while it runs."""
        return self._processes.process(node_id).status

    def logs(self, node_id: str, lines: int | None = None) -> str:
        """What a node wrote in all its lives; of that at most the last 64 KiB when `lines` are asked for."""
        path = self._log_path(self.config.node(node_id).id)
        if lines is None:
            return path.read_text(encoding="utf-8", errors="replace")
        with path.open("rb") as stream:
            stream.seek(max(0, path.stat().st_size - _TAIL_BYTES))
            text = stream.read().decode("utf-8", errors="replace")
        return "\n".join(text.splitlines()[-lines:])

    async def kill(self, node_id: str) -> None:
        """SIGKILL; returns when the process is gone."""
        self._footprint.observe()
        await self._processes.kill(node_id)

    async def stop(self, node_id: str) -> int:
        """Ask it to stop, kill it if it does not; returns its exit status."""
        self._footprint.observe()
        return await self._processes.stop(node_id)

    async def restart(self, node_id: str) -> None:
        """Start a stopped node again (a running one is stopped first) and wait until it is ready.

        Raises:
            ProcessExitedError, ProcessNotReadyError: it did not come up.
        """
        with contextlib.suppress(NotRunningError):
            await self.stop(node_id)
        await self._processes.start([node_id])

    async def wait_ready(self, node_id: str) -> None:
        """Wait until a node's `/healthz` answers 200.

        Raises:
            ProcessExitedError, ProcessNotReadyError: it does not.
        """
        await self._processes.wait_ready(node_id)

    async def __aenter__(self) -> Self:
        try:
            self._prepare()
            everybody = [node.id for node in self.config.nodes]
            await self._processes.start(everybody if self._start is None else self._start)
        except BaseException:
            await finish(self._close(), self._hurry)
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await finish(self._close(), self._hurry)

    def _prepare(self) -> None:
        sweep_abandoned()
        self._folder = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=self._base()))
        # Locked before it has its name, so that a sweep never finds it unlocked.
        unnamed = self._folder / f"{_LOCK}.new"
        self._lock = os.open(unnamed, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        unnamed.rename(self._folder / _LOCK)
        for name in ("logs", "state"):
            (self._folder / name).mkdir(mode=0o700)
        cluster = msgspec.structs.replace(self.config.cluster, state_dir=str(self._folder / "state"))
        self.config = msgspec.structs.replace(self.config, cluster=cluster)
        self._footprint = Footprint(str(self._folder))
        self.config_file.touch(mode=0o600)  # it may hold API keys
        self.config_file.write_text(dump_config(self.config), encoding="utf-8")
        write_keys(self.config)
        self._group = ProcessGroup(
            self.config,
            self.config_file,
            open_output=self._open_log,
            tail=lambda node_id: self.logs(node_id, _TAIL_LINES),
            command=self._command,
            on_change=self._on_change,
            start_timeout_s=self._start_timeout_s,
            stop_grace_s=self._stop_grace_s,
            hurry=self._hurry,
        )

    def _base(self) -> str:
        """The folder for temporary files, unless Unix sockets in it would have too long a path."""
        base = tempfile.gettempdir()
        longest_id = max(len(node.id) for node in self.config.nodes)
        deepest = len(f"{base}/{_PREFIX}12345678/state/sockets/") + longest_id + 1 + _SOCKET_NAME_MAX
        return base if deepest <= _SOCKET_PATH_MAX else _SHORT_BASE

    async def _close(self) -> None:
        if self._group is not None:
            self._footprint.observe()
            await self._group.stop_all()
        if self._folder is not None:
            if self._keep:
                (self._folder / _LOCK).unlink(missing_ok=True)
            else:
                shutil.rmtree(self._folder, ignore_errors=True)
                self._footprint.watch_folder(self._folder)
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None
        self.leftovers = self._footprint.remaining()
        self._footprint.kill_survivors()

    @property
    def _processes(self) -> ProcessGroup:
        if self._group is None:
            raise NotRunningError(node="the cluster")
        return self._group

    def _open_log(self, node_id: str) -> int:
        return os.open(self._log_path(node_id), os.O_CREAT | os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC, 0o600)

    def _log_path(self, node_id: str) -> Path:
        return self.folder / "logs" / f"{node_id}.log"


def sweep_abandoned() -> list[Path]:
    """Remove the folders of launchers that were killed; their processes died with them. Returns what was removed."""
    removed = []
    bases = {tempfile.gettempdir(), _SHORT_BASE}
    for folder in (folder for base in bases for folder in Path(base).glob(f"{_PREFIX}*")):
        # A kept folder has no lock, and a living launcher's cannot be taken: both end in OSError.
        with contextlib.suppress(OSError):
            if folder.is_symlink() or folder.stat().st_uid != os.getuid():
                continue
            lock = os.open(folder / _LOCK, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder, ignore_errors=True)
                removed.append(folder)
            finally:
                os.close(lock)
    return removed

"""The processes of a cluster file: started at once, awaited, stopped in a stated order.

Stop order: gateways first, so that nothing new comes in, then prefill, decode and store nodes, so that who holds KV
outlives who asks for it, and the monitor last, so that it sees the others go. Within a role all at once; each by
SIGTERM, then SIGKILL when its grace is over.
"""

import asyncio
import os
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Final

from kv_services.config import ClusterConfig, NodeConfig, Role
from kv_services.launch.errors import NotRunningError
from kv_services.launch.leftovers import MARK
from kv_services.launch.processes import ManagedProcess, ProcessState
from kv_services.launch.readiness import wait_ready

STOP_ORDER: Final = (Role.GATEWAY, Role.PREFILL, Role.DECODE, Role.STORE, Role.MONITOR)
START_TIMEOUT_S: Final = 120.0
STOP_GRACE_S: Final = 8.0

Command = Callable[[Path, NodeConfig], Sequence[str]]
Watcher = Callable[[str, ProcessState], None]


def service_command(config_file: Path, node: NodeConfig) -> list[str]:
    """The command line of a process of that role, from the environment that runs us."""
    program = {Role.GATEWAY: "kv-gateway", Role.MONITOR: "kv-monitor"}.get(node.role, "kv-node")
    return [str(Path(sys.executable).parent / program), "--config", str(config_file), "--node", node.id]


class ProcessGroup:
    """Processes that belong together.

    Args:
        config: what is started; only `nodes` of it, when given.
        config_file: the same as a file, for the processes to read.
        open_output: a descriptor for a node's output; closed here once the process has it.
        tail: the last lines of a node's output, for errors.
        command: makes a process's command line.
        on_change: told of each change of a process's state.
        hurry: when set, stopping no longer waits for anybody.
    """

    def __init__(
        self,
        config: ClusterConfig,
        config_file: Path,
        *,
        open_output: Callable[[str], int],
        tail: Callable[[str], str],
        command: Command = service_command,
        on_change: Watcher | None = None,
        start_timeout_s: float = START_TIMEOUT_S,
        stop_grace_s: float = STOP_GRACE_S,
        hurry: asyncio.Event | None = None,
    ) -> None:
        self.config = config
        self.config_file = config_file
        self._open_output = open_output
        self._tail = tail
        self._command = command
        self._on_change = on_change or (lambda node, state: None)
        self._start_timeout_s = start_timeout_s
        self._stop_grace_s = stop_grace_s
        self._hurry = hurry or asyncio.Event()
        self._processes: dict[str, ManagedProcess] = {}
        self._watchers: list[asyncio.Task[None]] = []

    def process(self, node_id: str) -> ManagedProcess:
        """The present or last life of a node.

        Raises:
            ConfigError: there is no such node.
            NotRunningError: it was never started.
        """
        process = self._processes.get(self.config.node(node_id).id)
        if process is None:
            raise NotRunningError(node=node_id)
        return process

    def spawn(self, node_id: str) -> ManagedProcess:
        """Start a node's process; returns at once."""
        node = self.config.node(node_id)
        output = self._open_output(node.id)
        try:
            process = ManagedProcess(
                node.id,
                self._command(self.config_file, node),
                output=output,
                threads=node.compute_threads,
                extra_env={MARK: str(self.config_file.parent)},
            )
        finally:
            os.close(output)
        self._processes[node.id] = process
        self._on_change(node.id, ProcessState.STARTING)
        self._watchers.append(asyncio.create_task(self._watch(process)))
        return process

    async def start(self, node_ids: Iterable[str]) -> None:
        """Start those nodes at once and wait until each is ready.

        Raises:
            ProcessExitedError, ProcessNotReadyError: of the first that fails; the others go on running.
        """
        started = [self.spawn(node_id).name for node_id in node_ids]
        try:
            async with asyncio.TaskGroup() as waiting:
                for node_id in started:
                    waiting.create_task(self.wait_ready(node_id))
        except BaseExceptionGroup as errors:
            # One process that does not start makes others fail too; the first says why.
            raise errors.exceptions[0] from None

    async def wait_ready(self, node_id: str) -> None:
        """Wait until a node's `/healthz` answers 200.

        Raises:
            ProcessExitedError, ProcessNotReadyError: it does not.
        """
        process, url = self.process(node_id), self.config.node(node_id).http_url
        await wait_ready(process, url, self._start_timeout_s, lambda: self._tail(node_id))
        self._on_change(node_id, process.state)

    async def kill(self, node_id: str) -> None:
        """SIGKILL; returns when the process is gone."""
        await self.process(node_id).kill()

    async def stop(self, node_id: str) -> int:
        """Ask a process to stop, kill it if it does not; returns its exit status."""
        process = self.process(node_id)
        if process.status is None:
            self._on_change(node_id, ProcessState.STOPPING)
        return await process.stop(self._stop_grace_s, self._hurry)

    async def stop_all(self) -> None:
        """Stop whatever runs, in `STOP_ORDER`."""
        for role in STOP_ORDER:
            group = [node.id for node in self.config.by_role(role) if node.id in self._processes]
            await asyncio.gather(*(self.stop(node_id) for node_id in group))
        await asyncio.gather(*self._watchers)

    async def _watch(self, process: ManagedProcess) -> None:
        await process.wait()
        self._on_change(process.name, ProcessState.EXITED)

"""One process of a cluster: started in its own group, tied to our life, stopped by escalation, always reaped.

Starting is one synchronous call, so that no cancellation can come between the fork and our knowing of the child. The
exit is seen through a pidfd on the loop: no thread, no signal handler, no polling.
"""

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from enum import Enum
from pathlib import Path
from typing import Final

from kv_services.launch import child
from kv_services.launch.errors import NotRunningError

_BLAS_SETTINGS: Final = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "BLIS_NUM_THREADS")


class ProcessState(Enum):
    """Where a process stands in its life."""

    STARTING = "starting"
    READY = "ready"
    STOPPING = "stopping"
    EXITED = "exited"


class ManagedProcess:
    """A child process.

    Args:
        name: how messages call it.
        argv: program (absolute path) and arguments.
        output: descriptor that takes stdout and stderr; stays the caller's.
        threads: threads of matrix products, for the BLAS libraries that read them from the environment.
        extra_env: added to our environment.
    """

    def __init__(
        self,
        name: str,
        argv: Sequence[str],
        *,
        output: int,
        threads: int = 1,
        extra_env: Mapping[str, str] | None = None,
    ) -> None:
        self.name = name
        self.state = ProcessState.STARTING
        env = dict(os.environ)  # noqa: TID251  a child inherits ours; no setting is read from it
        env |= dict.fromkeys(_BLAS_SETTINGS, str(threads))
        env |= {"PYTHONUNBUFFERED": "1", **(extra_env or {})}
        tied = [sys.executable, "-S", str(Path(child.__file__)), str(os.getpid()), *argv]
        self._loop = asyncio.get_running_loop()
        self._exited: asyncio.Future[int] = self._loop.create_future()
        self._popen = subprocess.Popen(
            tied, stdin=subprocess.DEVNULL, stdout=output, stderr=output, env=env, process_group=0
        )
        self._pidfd = os.pidfd_open(self._popen.pid)
        self._loop.add_reader(self._pidfd, self._on_exit)

    @property
    def pid(self) -> int:
        """The process id, also that of its group."""
        return self._popen.pid

    @property
    def status(self) -> int | None:
        """Exit status; minus the signal's number if one ended it; None while it runs."""
        return self._exited.result() if self._exited.done() else None

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to the process.

        Raises:
            NotRunningError: it has ended.
        """
        if self._exited.done():
            raise NotRunningError(node=self.name)
        # Not yet reaped, so the id is still its own.
        self._popen.send_signal(number)

    async def wait(self) -> int:
        """The exit status, once it has ended. May be cancelled and called again."""
        return await asyncio.shield(self._exited)

    async def kill(self) -> int:
        """End it and its group at once; returns when it is reaped."""
        if not self._exited.done():
            self.state = ProcessState.STOPPING
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGKILL)
        return await self.wait()

    async def stop(self, grace_s: float, hurry: asyncio.Event | None = None) -> int:
        """SIGTERM, then SIGKILL after `grace_s` or as soon as `hurry` is set; returns the exit status."""
        if self._exited.done():
            return self._exited.result()
        self.state = ProcessState.STOPPING
        self.signal(signal.SIGTERM)
        waits = [asyncio.ensure_future(self.wait())]
        if hurry is not None:
            waits.append(asyncio.ensure_future(_until(hurry)))
        try:
            await asyncio.wait(waits, timeout=grace_s, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for job in waits:
                job.cancel()
        return await self.kill()

    def _on_exit(self) -> None:
        status = self._popen.poll()
        if status is None:
            return
        self._loop.remove_reader(self._pidfd)
        os.close(self._pidfd)
        self.state = ProcessState.EXITED
        self._exited.set_result(status)


async def _until(event: asyncio.Event) -> int:
    await event.wait()
    return 0

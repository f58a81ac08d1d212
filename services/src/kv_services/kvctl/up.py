"""`kvctl up`: the processes of a cluster file in the foreground, their output with names before it.

A process that ends by itself is reported and the others go on, as a cluster must; the exit status tells of it. When
none is left, so is `up`. Two of them for one file are refused.
"""

import asyncio
import contextlib
import fcntl
import os
import sys
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Final

from kv_services.config import ClusterConfig
from kv_services.config_file import load_config
from kv_services.launch.errors import LaunchError
from kv_services.launch.group import Command, ProcessGroup, service_command
from kv_services.launch.keys import write_keys
from kv_services.launch.processes import ProcessState
from kv_services.launch.signals import finish, run_until_signal

LINE_BYTES_MAX: Final = 64 << 10
"""A longer line is cut in pieces, so that a process cannot fill our memory."""

DRAIN_S: Final = 2.0
"""Seconds to wait for the last output of processes that have ended."""

_TAIL_LINES: Final = 20
_COLOURS: Final = (36, 32, 33, 35, 34, 96, 92, 93, 95, 94)


class AlreadyUpError(LaunchError):
    """Another `kvctl up` runs the same cluster."""

    code = 7130
    template = "the cluster of {state_dir} is already up"


class StateFolderError(LaunchError):
    """The folder of keys and lives cannot be used."""

    code = 7125
    template = "cannot use the state folder {path}: {cause}"


def run(file: Path, node_ids: Sequence[str] | None, command: Command = service_command) -> int:
    """Run until a signal comes or every process has ended; 1 if one ended by itself.

    Raises:
        ConfigError: the file is wrong, or names no such node.
        AlreadyUpError: another one runs it.
        StateFolderError: its state cannot be kept where the file says.
        LaunchError: a process did not start.
    """
    config = load_config(file)
    wanted = [config.node(node_id).id for node_id in node_ids or [node.id for node in config.nodes]]
    with _only_one(config):
        write_keys(config, wanted)
        return run_until_signal(lambda hurry: _foreground(config, file.absolute(), wanted, command, hurry))


async def _foreground(
    config: ClusterConfig, file: Path, wanted: list[str], command: Command, hurry: asyncio.Event
) -> int:
    states: dict[str, ProcessState] = {}
    died: list[str] = []
    over = asyncio.Event()

    printer = _Printer(max(map(len, wanted)), on_lost=over.set)

    def on_change(node_id: str, state: ProcessState) -> None:
        before, states[node_id] = states.get(node_id), state
        if state is ProcessState.READY:
            printer.note(f"{node_id} ready at {config.node(node_id).http_url}")
        elif state is ProcessState.EXITED:
            status = group.process(node_id).status
            printer.note(f"{node_id} ended with status {status}")
            if before is not ProcessState.STOPPING:
                died.append(node_id)
            if all(one is ProcessState.EXITED for one in states.values()):
                over.set()

    group = ProcessGroup(
        config,
        file,
        open_output=printer.open,
        tail=printer.tail,
        command=command,
        on_change=on_change,
        hurry=hurry,
    )
    try:
        await group.start(wanted)
        printer.note(f"{len(wanted)} processes are ready; Ctrl-C stops them")
        await over.wait()
    finally:
        printer.note("stopping" + (" at once" if hurry.is_set() else ""))
        await finish(_stop(group, printer), hurry)
    return 1 if died else 0


async def _stop(group: ProcessGroup, printer: "_Printer") -> None:
    await group.stop_all()
    await printer.drained()


class _Printer:
    """Prints what the processes write, line by line, with the process's name before it.

    When standard output is gone it says so by `on_lost` and goes on reading, so that no process waits for a reader.
    """

    def __init__(self, name_width: int, on_lost: Callable[[], None]) -> None:
        self._width = name_width
        self._on_lost = on_lost
        self._tails: dict[str, deque[str]] = {}
        self._readers: list[asyncio.Task[None]] = []
        self._colour = sys.stdout.isatty()

    def open(self, node_id: str) -> int:
        """A descriptor to write to; what is written there is printed until its end."""
        reading, writing = os.pipe2(os.O_CLOEXEC)
        self._readers.append(asyncio.create_task(self._read(node_id, reading)))
        return writing

    def tail(self, node_id: str) -> str:
        """The last lines of a process."""
        return "\n".join(self._tails.get(node_id, ()))

    def note(self, text: str) -> None:
        """A line of our own."""
        self._print(f"{'kvctl':>{self._width}} | {text}\n")

    async def drained(self) -> None:
        """Wait until everything that was written is printed; the processes have ended.

        Not for ever: what a process started may still hold its output.
        """
        if self._readers:
            _, late = await asyncio.wait(self._readers, timeout=DRAIN_S)
            for reader in late:
                reader.cancel()
            await asyncio.gather(*late, return_exceptions=True)

    async def _read(self, node_id: str, descriptor: int) -> None:
        stream = asyncio.StreamReader(limit=LINE_BYTES_MAX)
        tail = self._tails.setdefault(node_id, deque(maxlen=_TAIL_LINES))
        prefix = f"{node_id:>{self._width}} | "
        if self._colour:
            colour = _COLOURS[(len(self._tails) - 1) % len(_COLOURS)]
            prefix = f"\x1b[{colour}m{prefix}\x1b[0m"
        pipe = os.fdopen(descriptor, "rb", buffering=0)
        transport, _ = await asyncio.get_running_loop().connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(stream), pipe
        )
        try:
            while line := await _line(stream):
                text = line.decode(errors="replace").rstrip("\r\n")
                tail.append(text)
                self._print(f"{prefix}{text}\n")
        finally:
            transport.close()

    def _print(self, text: str) -> None:
        try:
            sys.stdout.write(text)
            sys.stdout.flush()
        except OSError:
            # Whatever is still in the buffer goes nowhere, or the interpreter would stumble over it at its end.
            nowhere = os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC)
            os.dup2(nowhere, sys.stdout.fileno())
            os.close(nowhere)
            self._on_lost()


async def _line(stream: asyncio.StreamReader) -> bytes:
    try:
        return await stream.readuntil(b"\n")
    except asyncio.IncompleteReadError as error:
        return error.partial
    except asyncio.LimitOverrunError as error:
        return await stream.readexactly(error.consumed or LINE_BYTES_MAX)


@contextlib.contextmanager
def _only_one(config: ClusterConfig) -> Iterator[None]:
    try:
        config.state_path.mkdir(mode=0o700, parents=True, exist_ok=True)
        lock = os.open(config.state_path / "up.lock", os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
    except OSError as error:
        cause = error.strerror or str(error)
        raise StateFolderError(path=str(config.state_path), cause=cause) from error
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise AlreadyUpError(state_dir=str(config.state_path)) from None
        yield
    finally:
        os.close(lock)

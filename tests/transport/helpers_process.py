"""Starts `peer_process.py`, talks to it, stops it, kills it."""

import asyncio
import base64
import contextlib
import json
import os
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path

from kv_core.ids import Incarnation, NodeId
from kv_transport.tickets import AgentMetadata
from tests.transport.helpers_transport import Node

ROOT = Path(__file__).resolve().parents[2]


class PeerProcess:
    """One agent in a process of its own."""

    def __init__(self, process: asyncio.subprocess.Process, name: str, incarnation: int) -> None:
        self.process = process
        self.name = name
        self.incarnation = incarnation

    def tell(self, do: str, **fields: object) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps({"do": do, **fields}).encode() + b"\n")

    async def hear(self, event: str) -> dict[str, object]:
        """The next event of that name; others are skipped."""
        assert self.process.stdout is not None
        async with asyncio.timeout(30):
            while line := await self.process.stdout.readline():
                heard: dict[str, object] = json.loads(line)
                if heard["event"] == event:
                    return heard
        raise AssertionError(f"{self.name} ended before it said {event}")

    async def outcome(self) -> dict[str, object]:
        """The next event that ends something."""
        assert self.process.stdout is not None
        async with asyncio.timeout(30):
            while line := await self.process.stdout.readline():
                heard: dict[str, object] = json.loads(line)
                if heard["event"] in ("pushed", "pulled", "received", "digest", "failed"):
                    return heard
        raise AssertionError(f"{self.name} ended without an outcome")

    async def meet(self, me: Node) -> None:
        """Introduce the process and us to each other."""
        self.tell("metadata", node=me.agent.name.node, incarnation=me.agent.name.incarnation)
        metadata = str((await self.hear("metadata"))["metadata"])
        me.agent.add_remote_agent(AgentMetadata.from_bytes(base64.b64decode(metadata)))
        mine = me.agent.get_agent_metadata(NodeId(self.name), Incarnation(self.incarnation))
        self.tell("add", metadata=base64.b64encode(mine.to_bytes()).decode())
        await self.hear("added")

    def stop(self) -> None:
        """Returns when it has stopped: a signal takes effect a moment after it was sent."""
        self.process.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, self.process.pid, os.WSTOPPED | os.WNOWAIT)

    def go_on(self) -> None:
        self.process.send_signal(signal.SIGCONT)

    async def kill(self) -> None:
        if self.process.returncode is None:
            self.process.kill()
        await self.process.wait()


def peer_process(
    name: str, transport: str, folder: Path, incarnation: int = 1, **settings: int
) -> contextlib.AbstractAsyncContextManager[PeerProcess]:
    """With small blocks."""
    return sized_peer_process(name, transport, folder, incarnation, "small", settings)


@contextlib.asynccontextmanager
async def sized_peer_process(
    name: str, transport: str, folder: Path, incarnation: int, size: str, settings: dict[str, int]
) -> AsyncIterator[PeerProcess]:
    """`size` is that of its blocks: one of `peer_process.GEOMETRIES`."""
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "tests.transport.peer_process",
        name,
        str(incarnation),
        transport,
        str(folder / "sockets"),
        json.dumps(settings),
        size,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        cwd=ROOT,
    )
    peer = PeerProcess(process, name, incarnation)
    try:
        await peer.hear("started")
        yield peer
    finally:
        with contextlib.suppress(ProcessLookupError):
            peer.go_on()
        await peer.kill()
        # Reads the pipes to their ends, so that their transports are closed with the loop still there.
        await process.communicate()

"""This process's side: an agent on a loop of its own that only runs while something is measured."""

import asyncio
import base64
import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Coroutine, Iterator, Sequence
from pathlib import Path
from typing import TypeVar

import uvloop

from bench.transport_cases import places
from bench.transport_cases.places import Pattern
from kv_core.ids import Incarnation, NodeId, RegionId
from kv_transport import Access, TransferAgent, XferDesc, XferOp
from kv_transport.config import TransportName
from kv_transport.tickets import AgentMetadata
from kv_transport.xfer import Xfer

T = TypeVar("T")
FAR = NodeId("far")
NEAR = NodeId("near")


class FarProcess:
    """The other process; `ask` runs one of its commands."""

    def __init__(self, transport: TransportName, folder: Path, host: str, prefix: Sequence[str] = ()) -> None:
        module = [sys.executable, "-m", "bench.transport_cases.far", FAR, transport, str(folder), host]
        self._process = subprocess.Popen(
            [*prefix, *module], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=places.ROOT
        )
        self._heard()

    def ask(self, do: str, **fields: object) -> dict[str, object]:
        self.tell(do, **fields)
        return self._heard()

    def tell(self, do: str, **fields: object) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"do": do, **fields}) + "\n")
        self._process.stdin.flush()

    def _heard(self) -> dict[str, object]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"the far process ended with {self._process.wait()}")
        heard: dict[str, object] = json.loads(line)
        return heard

    def stay_on(self, processors: set[int]) -> None:
        """Its loop runs on these only."""
        os.sched_setaffinity(self._process.pid, processors)

    def close(self) -> None:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.close()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()


class Near:
    """Our agent and the far one, introduced to each other."""

    def __init__(self, runner: asyncio.Runner, agent: TransferAgent, far: FarProcess, folder: Path) -> None:
        self.folder = folder
        self.runner = runner
        self.agent = agent
        self.far = far
        self._far_region = 0
        self._region = 0

    def run(self, work: Coroutine[object, object, T]) -> T:
        return self.runner.run(work)

    def introduce(self) -> None:
        """After the memory of both sides is registered."""
        theirs = str(self.far.ask("metadata")["metadata"])
        self.agent.add_remote_agent(AgentMetadata.from_bytes(base64.b64decode(theirs)))
        mine = self.agent.get_agent_metadata(FAR, Incarnation(1)).to_bytes()
        self.far.ask("meet", metadata=base64.b64encode(mine).decode())

    def share_buffers(self, nbytes: int) -> memoryview:
        """A buffer on each side, open to the other; ours is returned."""
        mine = places.buffer(nbytes, seed=1)
        self._region = int(self.agent.register_memory(mine, Access.WRITE).region)
        self._far_region = int(str(self.far.ask("buffer", nbytes=nbytes)["region"]))
        return mine.data_view

    def xfer(self, op: XferOp, pattern: Pattern, notif: bytes = b"") -> Xfer:
        """A prepared transfer of those pieces."""
        pairs = pattern.offsets()
        ours = [XferDesc(RegionId(self._region), at, pattern.piece) for at, _ in pairs]
        theirs = [XferDesc(RegionId(self._far_region), at, pattern.piece) for _, at in pairs]
        return self.agent.initialize_xfer(op, ours, theirs, FAR, notif=notif)

    def rate(self, xfer: Xfer, seconds: float) -> float:
        """GB/s of posting it again and again."""

        async def repeat() -> float:
            moved, started = 0, time.perf_counter()
            while True:
                self.agent.transfer(xfer)
                await xfer.done()
                moved += xfer.total_bytes
                elapsed = time.perf_counter() - started
                if elapsed >= seconds:
                    return moved / elapsed / 1e9

        return self.run(repeat())


@contextlib.contextmanager
def connected(
    transport: TransportName, host: str = "127.0.0.1", far_host: str = "", prefix: Sequence[str] = ()
) -> Iterator[Near]:
    """Two started agents in two processes; introduce them when memory is registered."""
    with (
        tempfile.TemporaryDirectory(prefix="kv-bench-") as name,
        asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner,
    ):
        folder = Path(name)
        far = FarProcess(transport, folder, far_host or host, prefix)
        try:
            agent = TransferAgent(NEAR, Incarnation(1), places.config(transport, folder, host))
            runner.run(agent.start())
            try:
                yield Near(runner, agent, far, folder)
            finally:
                runner.run(agent.close())
        finally:
            far.close()

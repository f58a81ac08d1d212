"""An agent in a process of its own, driven by JSON lines on stdin; what happens is told by JSON lines on stdout.

Started by `helpers_process.PeerProcess`. Its blocks hold bytes that a seed makes (`Node.filled`), so that the other
side knows what to expect; beside them it has a buffer that is open to everybody, region 2.
"""

import asyncio
import base64
import hashlib
import json
import sys
from pathlib import Path

from kv_core.errors import KVError
from kv_core.ids import Incarnation, NodeId, RequestId
from kv_transport import Access, SharedBuffer, TransferPriority
from kv_transport.tickets import AgentMetadata, ReadGrant, WriteGrant
from tests.transport.helpers_transport import LARGE, NO_RESERVE, SMALL, Node, config, node

GEOMETRIES = {"small": SMALL, "large": LARGE}
"""Cells that are copied where they are asked for, and such that threads share."""

SLOTS = {"small": 64, "large": 24}
BUFFER_NBYTES = 4 << 20


def tell(**fields: object) -> None:
    print(json.dumps(fields), flush=True)


def digest_of(content: list[bytes]) -> str:
    """Stands for the bytes of some blocks."""
    return hashlib.blake2b(b"".join(content), digest_size=16).hexdigest()


async def commands() -> asyncio.Queue[dict[str, object]]:
    reader = asyncio.StreamReader()
    loop = asyncio.get_running_loop()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    queue: asyncio.Queue[dict[str, object]] = asyncio.Queue()

    async def read() -> None:
        while line := await reader.readline():
            queue.put_nowait(json.loads(line))
        queue.put_nowait({"do": "quit"})

    queue.reader = asyncio.create_task(read())  # type: ignore[attr-defined]
    return queue


class Peer:
    def __init__(self, me: Node) -> None:
        self.me = me
        self.tasks: dict[asyncio.Task[None], None] = {}

    def start(self, work: "asyncio.Task[None]") -> None:
        self.tasks[work] = None
        work.add_done_callback(lambda task: self.tasks.pop(task, None))

    async def push(self, command: dict[str, object]) -> None:
        """Hand over under a grant, `pause_ms` after each layer, saying when each was submitted."""
        grant = WriteGrant.from_bytes(base64.b64decode(str(command["grant"])))
        refs = self.me.filled(grant.num_positions, seed=int(str(command["seed"])))
        try:
            handover = self.me.engine.open_handover(RequestId(grant.request_id), grant, TransferPriority.HIGH)
            for layer in range(grant.layer_start, grant.layer_end):
                handover.submit(layer, refs)
                tell(event="submitted", layer=layer)
                await asyncio.sleep(float(str(command.get("pause_ms", 0))) / 1000)
            stats = await handover.finish(int(str(command["timeout_ms"])))
            tell(event="pushed", transport=stats.transport, retries=stats.retries)
        except KVError as error:
            tell(event="failed", error=type(error).__name__, detail=str(error))

    async def pull(self, command: dict[str, object]) -> None:
        """Fetch what a lease allows."""
        grant = ReadGrant.from_bytes(base64.b64decode(str(command["grant"])))
        into = self.me.blocks(grant.num_positions)
        try:
            stats = await self.me.engine.fetch(grant, into).wait(int(str(command["timeout_ms"])))
            right, digest = self.me.sealed_and_right(into), digest_of(self.me.content(into))
            tell(event="pulled", transport=stats.transport, right=right, digest=digest)
        except KVError as error:
            tell(event="failed", error=type(error).__name__, detail=str(error))

    async def expect(self, command: dict[str, object]) -> None:
        """Grant slots and wait for them to be filled."""
        count, tokens = int(str(command["blocks"])), int(str(command["tokens"]))
        target = self.me.blocks(count)
        request = RequestId(str(command["request"]))
        grant = self.me.engine.grant_writes(request, target, seq_start=0, seq_end=tokens)
        inbound = self.me.engine.expect(request, grant, timeout_ms=int(str(command["timeout_ms"])))
        tell(event="granted", grant=base64.b64encode(grant.to_bytes()).decode())
        try:
            stats = await inbound.done()
            right, digest = self.me.sealed_and_right(target), digest_of(self.me.content(target))
            tell(event="received", transport=stats.transport, right=right, digest=digest)
        except KVError as error:
            tell(event="failed", error=type(error).__name__, detail=str(error))

    def lease(self, command: dict[str, object]) -> None:
        refs = self.me.filled(int(str(command["blocks"])), seed=int(str(command["seed"])))
        tokens = len(refs) * self.me.arena.geometry.block_size
        grant = self.me.engine.lease_reads(
            RequestId("leased"), refs, seq_start=0, seq_end=tokens, lease_ms=int(str(command["lease_ms"]))
        )
        tell(event="leased", grant=base64.b64encode(grant.to_bytes()).decode())


async def serve() -> None:
    name, incarnation, transport, folder, settings, size = sys.argv[1:7]
    one = config(transport, Path(folder), **json.loads(settings))  # type: ignore[arg-type]
    queue = await commands()
    with SharedBuffer.create(BUFFER_NBYTES, "open", budget=NO_RESERVE) as buffer:
        async with node(name, one, incarnation=int(incarnation), geometry=GEOMETRIES[size], slots=SLOTS[size]) as me:
            me.agent.register_memory(buffer, Access.WRITE)
            await obey(queue, me, buffer)


async def obey(queue: "asyncio.Queue[dict[str, object]]", me: Node, buffer: SharedBuffer) -> None:
    peer = Peer(me)
    tell(event="started")
    while (command := await queue.get())["do"] != "quit":
        match command["do"]:
            case "metadata":
                metadata = me.agent.get_agent_metadata(
                    NodeId(str(command["node"])), Incarnation(int(str(command["incarnation"])))
                )
                tell(event="metadata", metadata=base64.b64encode(metadata.to_bytes()).decode())
            case "add":
                me.agent.add_remote_agent(AgentMetadata.from_bytes(base64.b64decode(str(command["metadata"]))))
                tell(event="added")
            case "push":
                peer.start(asyncio.create_task(peer.push(command)))
            case "pull":
                peer.start(asyncio.create_task(peer.pull(command)))
            case "expect":
                peer.start(asyncio.create_task(peer.expect(command)))
            case "lease":
                peer.lease(command)
            case "digest":
                tell(event="digest", digest=digest_of([bytes(buffer.data_view[: int(str(command["nbytes"]))])]))
            case unknown if unknown != "inventory":
                raise ValueError(unknown)
            case _:
                tell(event="inventory", work=[str(item) for item in me.agent.inventory().work])
    for task in list(peer.tasks):
        task.cancel()


if __name__ == "__main__":
    asyncio.run(serve())

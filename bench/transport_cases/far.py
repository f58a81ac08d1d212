"""The other process: owns the memory that is written and read, answers commands on stdin with JSON lines on stdout.

python -m bench.transport_cases.far NAME TRANSPORT FOLDER HOST
"""

import asyncio
import base64
import json
import socket
import sys
import threading
import time
from pathlib import Path

import uvloop
import zmq

from bench.transport_cases import places
from bench.transport_cases.ucx_straight import StraightTarget
from kv_core.block import BlockGeometry, BlockRef
from kv_core.dtypes import DType
from kv_core.ids import Incarnation, NodeId, RegionId, RequestId
from kv_transport import Access, Arena, KVCacheTransferEngine, TransferAgent, XferDesc, XferOp
from kv_transport.codecs import Codec
from kv_transport.engine import LOSSLESS
from kv_transport.regions import SharedBuffer
from kv_transport.tickets import AgentMetadata

Fields = dict[str, object]


class Far:
    """What the commands do. Each returns the fields of its answer."""

    def __init__(self, agent: TransferAgent, host: str) -> None:
        self.agent = agent
        self.engine = KVCacheTransferEngine(agent)
        self.host = host
        self.buffer: SharedBuffer | None = None
        self.arena: Arena | None = None
        self.refs: list[BlockRef] = []
        self.region = 0
        self.lease = 0
        self.straight: dict[str, StraightTarget] = {}
        self.peer = NodeId("near")
        self.inbound: asyncio.Task[None] | None = None
        self.echo: asyncio.Task[None] | None = None

    def do_buffer(self, nbytes: int) -> Fields:
        self.buffer = places.buffer(nbytes, seed=2)
        region = self.agent.register_memory(self.buffer, Access.WRITE)
        return {"region": int(region.region)}

    def do_arena(self, layers: int, heads: int, dim: int, block_size: int, slots: int) -> Fields:
        """Every page is touched, and sealed, so that it can also be leased."""
        geometry = BlockGeometry(layers, heads, dim, DType.BF16, block_size)
        self.arena = Arena.create(geometry, slots, budget=places.NO_RESERVE)
        self.region = int(self.agent.register_memory(self.arena).region)
        self._raise()
        self.arena.data[:] = 7
        for ref in self.refs:
            self.arena.seal_block(ref.slot)
        return {}

    def _raise(self) -> None:
        assert self.arena is not None
        self.refs = [
            BlockRef(self.agent.regions.get(self.region).region, slot, self.arena.raise_generation(slot))
            for slot in range(self.arena.num_slots)
        ]

    def do_metadata(self) -> Fields:
        metadata = self.agent.get_agent_metadata(self.peer, Incarnation(1))
        return {"metadata": base64.b64encode(metadata.to_bytes()).decode()}

    def do_meet(self, metadata: str) -> Fields:
        self.agent.add_remote_agent(AgentMetadata.from_bytes(base64.b64decode(metadata)))
        return {}

    def do_grant(self, request: str, accept: list[str]) -> Fields:
        """Open every slot for one hand-over, in what is lossless or one of those codecs."""
        assert self.arena is not None
        self._raise()
        tokens = len(self.refs) * self.arena.geometry.block_size
        codecs = [*LOSSLESS, *map(Codec, accept)]
        grant = self.engine.grant_writes(RequestId(request), self.refs, seq_start=0, seq_end=tokens, accept=codecs)
        inbound = self.engine.expect(RequestId(request), grant, timeout_ms=120_000)

        async def wait() -> None:
            await inbound.done()

        self.inbound = asyncio.create_task(wait())
        return {"grant": base64.b64encode(grant.to_bytes()).decode()}

    async def do_granted(self) -> Fields:
        """When the hand-over was complete here."""
        assert self.inbound is not None
        await self.inbound
        return {"done_ns": time.monotonic_ns()}

    def do_lease(self) -> Fields:
        """Every slot as it was filled last; one lease is alive at a time."""
        assert self.arena is not None
        if self.lease:
            self.engine.release_lease(self.lease)
        tokens = len(self.refs) * self.arena.geometry.block_size
        grant = self.engine.lease_reads(RequestId("leased"), self.refs, seq_start=0, seq_end=tokens, lease_ms=3_600_000)
        self.lease = grant.ticket
        return {"grant": base64.b64encode(grant.to_bytes()).decode()}

    def do_cpu(self) -> Fields:
        return {"cpu_s": time.process_time(), "at_s": time.monotonic()}

    def do_echo_notifs(self, nbytes: int) -> Fields:
        """Answer every notification: with a bare one, or with a put of `nbytes` that carries one."""
        if self.echo is not None:
            self.echo.cancel()
        self.echo = asyncio.create_task(self._echo_put(nbytes) if nbytes else self._echo())
        return {}

    async def _echo(self) -> None:
        async for notif in self.agent.notifs():
            await self.agent.send_notif(self.peer, notif.payload)

    async def _echo_put(self, nbytes: int) -> None:
        agent = self.agent
        ours = XferDesc(agent.regions.all()[0].region, 0, nbytes)
        theirs = XferDesc(RegionId(agent.peer(self.peer).metadata.regions[0].region), 0, nbytes)
        xfer = agent.initialize_xfer(XferOp.WRITE, [ours], [theirs], self.peer, notif=b"there")
        async for _ in agent.notifs():
            agent.transfer(xfer)
            await xfer.done()

    def do_zmq_echo(self, address: str) -> Fields:
        """Blocking echo in a thread: the reference for notifications."""
        bound = threading.Event()
        threading.Thread(target=serve_zmq, args=(address, bound), daemon=True).start()
        bound.wait()
        return {}

    def do_ucx_target(self, name: str, options: dict[str, str]) -> Fields:
        """A reference for ucx: the same buffer, reached straight through the binding with those options."""
        assert self.buffer is not None
        target = self.straight[name] = StraightTarget(self.buffer.data, options)
        address, key = base64.b64encode(target.address), base64.b64encode(target.key)
        return {"address": address.decode(), "key": key.decode(), "at": self.buffer.data.ctypes.data}

    def do_ucx_active(self, name: str, on: bool) -> Fields:
        self.straight[name].active(on)
        return {}

    def do_plain_sockets(self, nbytes: int = 0, unpaced: bool = False) -> Fields:
        """A listener for the reference: blocking sockets in a thread, `recv_into` and `sendall` on the same buffer.

        With `nbytes` on a buffer of its own; `unpaced`: whatever the host's congestion control is.
        """
        if nbytes:
            self.buffer = places.buffer(nbytes, seed=2)
        listener = socket.create_server((self.host, 0))
        if unpaced:
            stop_pacing(listener)
        threading.Thread(target=self._serve_plain, args=(listener,), daemon=True).start()
        return {"port": listener.getsockname()[1]}

    def _serve_plain(self, listener: socket.socket) -> None:
        sock, _ = listener.accept()
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        while told := sock.recv(16, socket.MSG_WAITALL):
            write, nbytes = int.from_bytes(told[:8], "little"), int.from_bytes(told[8:], "little")
            assert self.buffer is not None
            view = self.buffer.data_view[:nbytes]
            if write:
                receive_all(sock, view)
                sock.sendall(b"!")
            else:
                sock.sendall(view)


def serve_zmq(address: str, bound: threading.Event) -> None:
    socket_: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.REP)
    socket_.linger = 0
    socket_.bind(address)
    bound.set()
    while True:
        socket_.send(socket_.recv())


def stop_pacing(sock: socket.socket) -> None:
    """As our own connections within one host; who is accepted has what the listener has."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, b"reno")


def order(write: bool, nbytes: int) -> bytes:
    """What the plain connection is told to do next."""
    return int(write).to_bytes(8, "little") + nbytes.to_bytes(8, "little")


def receive_all(sock: socket.socket, view: memoryview) -> None:
    at = 0
    while at < len(view):
        came = sock.recv_into(view[at:])
        if not came:
            raise ConnectionError("the peer is gone")
        at += came


async def serve() -> None:
    name, transport, folder, host = sys.argv[1:5]
    loop = asyncio.get_running_loop()
    reader = asyncio.StreamReader()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    settings = places.config(transport, Path(folder), host)  # type: ignore[arg-type]
    async with TransferAgent(NodeId(name), Incarnation(1), settings) as agent:
        far = Far(agent, host)
        print(json.dumps({}), flush=True)
        while line := await reader.readline():
            command: dict[str, object] = json.loads(line)
            answer = getattr(far, f"do_{command.pop('do')}")(**command)
            if asyncio.iscoroutine(answer):
                answer = await answer
            print(json.dumps(answer), flush=True)
        if far.echo is not None:
            far.echo.cancel()
        await far.engine.close()


if __name__ == "__main__":
    uvloop.run(serve())

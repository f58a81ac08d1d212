"""A TCP proxy in front of an agent, which damages what it is told to."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable

import msgspec

from kv_transport.tickets import AgentMetadata, BackendAddress

Damage = Callable[[int, bytearray], None]
"""Gets the offset of a piece within its connection and the piece, which it may change."""


@contextlib.asynccontextmanager
async def proxied(metadata: AgentMetadata, damage: Damage) -> AsyncIterator[AgentMetadata]:
    """The metadata with a tcp address that leads through the proxy; `damage` sees what goes to the agent."""
    target = next(item.address for item in metadata.addresses if item.scheme == "tcp").decode()
    host, _, port = target.rpartition(":")
    writers: dict[asyncio.StreamWriter, None] = {}
    tasks: dict[asyncio.Task[None], None] = {}

    async def forward(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, change: Damage | None) -> None:
        offset = 0
        with contextlib.suppress(OSError):
            while data := await reader.read(1 << 16):
                piece = bytearray(data)
                if change is not None:
                    change(offset, piece)
                offset += len(piece)
                writer.write(piece)
                await writer.drain()
        writer.close()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there, back = await asyncio.open_connection(host, int(port))
        writers.update({writer: None, back: None})
        for work in (forward(reader, back, damage), forward(there, writer, None)):
            tasks[asyncio.ensure_future(work)] = None

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    address = f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
    try:
        yield msgspec.structs.replace(metadata, addresses=[BackendAddress("tcp", address.encode())])
    finally:
        server.close()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for writer in writers:
            writer.close()
            with contextlib.suppress(OSError):
                await writer.wait_closed()


def flip_at(offset: int, times: int) -> Damage:
    """Flip one bit at that offset, in the first `times` connections or passes that reach it."""
    left = [times]

    def damage(start: int, piece: bytearray) -> None:
        if left[0] and start <= offset < start + len(piece):
            left[0] -= 1
            piece[offset - start] ^= 1

    return damage

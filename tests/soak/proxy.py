"""Proxies between the processes of a cluster, which cut, slow and damage what passes."""

import asyncio
import contextlib
from dataclasses import dataclass, field
from random import Random

PIECE = 1 << 14


@dataclass(slots=True)
class Conditions:
    """What happens to bytes that pass; changed while they do."""

    cut: bool = False
    bytes_per_s: float = 0.0
    flips: int = 0
    flipped: int = 0


@dataclass(slots=True)
class Proxy:
    """One listening port in front of another. While it is cut nothing passes and nothing is refused."""

    port: int
    target: int
    conditions: Conditions
    random: Random
    _server: asyncio.Server | None = None
    _tasks: set[asyncio.Task[None]] = field(default_factory=set)

    async def start(self) -> None:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", self.port, reuse_address=True)

    async def close(self) -> None:
        if self._server is not None:
            self._server.close()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        try:
            await self._passable()
            there, back = await asyncio.open_connection("127.0.0.1", self.target)
        except OSError:
            writer.close()
            return
        finally:
            self._tasks.discard(task)
        ways = [
            asyncio.ensure_future(self._forward(reader, back, damage=True)),
            asyncio.ensure_future(self._forward(there, writer, damage=False)),
        ]
        for way in ways:
            self._tasks.add(way)
            way.add_done_callback(self._tasks.discard)
        try:
            await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for way in ways:
                way.cancel()
            for end in (writer, back):
                end.close()

    async def _forward(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, damage: bool) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(PIECE):
                await self._passable()
                piece = bytearray(data)
                conditions = self.conditions
                if damage and conditions.flips and len(piece) > PIECE // 2:
                    # Deep in a large piece lies payload, not the header of a frame.
                    conditions.flips -= 1
                    conditions.flipped += 1
                    piece[self.random.randrange(len(piece) // 4, len(piece) // 2)] ^= 1 << self.random.randrange(8)
                if conditions.bytes_per_s:
                    await asyncio.sleep(len(piece) / conditions.bytes_per_s)
                writer.write(piece)
                await writer.drain()

    async def _passable(self) -> None:
        while self.conditions.cut:  # noqa: ASYNC110  # flags that are set from outside, looked at often enough
            await asyncio.sleep(0.05)

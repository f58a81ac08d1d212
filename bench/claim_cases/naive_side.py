"""The naive side's processes (`naive`), started and asked."""

import asyncio
import contextlib
import os
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

import msgspec

from bench.claim_cases.naive_wire import CONNECT_S, Ask, Counts, Ended, Line, Settings, Token
from bench.claim_cases.sides import Answered, ClaimError, Held
from bench.stream_cases.clients import resident_mib
from kv_services.engine.interface import ChatMessage
from kv_services.launch.processes import ManagedProcess

_LINE: msgspec.json.Decoder[Line] = msgspec.json.Decoder(Line)
_GRACE_S = 2.0
_TAIL_NBYTES = 4096


@dataclass(slots=True)
class _Open:
    """A request on its way."""

    asked_ns: int
    done: asyncio.Future[Ended]
    tokens: list[bytes] = field(default_factory=list)
    first_ns: int = 0


class NaiveSide:
    """See `sides.Side`.

    Args:
        max_tokens: of each answer, at most.
        block_nbytes: of one block, for `held`.
    """

    def __init__(
        self,
        processes: Sequence[ManagedProcess],
        ask: asyncio.StreamWriter,
        tokens: tuple[asyncio.StreamReader, asyncio.StreamWriter],
        max_tokens: int,
        block_nbytes: int,
    ) -> None:
        self._processes = processes
        self._ask, (self._lines, self._look) = ask, tokens
        self._max_tokens, self._block_nbytes = max_tokens, block_nbytes
        self._open: dict[int, _Open] = {}
        self._looks: list[asyncio.Future[Counts]] = []

    async def ask(self, number: int, chat: Sequence[ChatMessage]) -> Answered:
        """See `Side.ask`."""
        opened = self._open[number] = _Open(time.monotonic_ns(), asyncio.get_running_loop().create_future())
        pairs = [(message.role, message.content) for message in chat]
        self._ask.write(msgspec.json.encode(Ask(number, pairs, self._max_tokens)) + b"\n")
        ended = await opened.done
        handover_ms = (ended.in_place_ns - ended.computed_ns) / 1e6
        return Answered(
            tokens=opened.tokens,
            first_ms=(opened.first_ns - opened.asked_ns) / 1e6,
            nbytes=ended.nbytes,
            handover_ms=handover_ms,
            sending_ms=handover_ms,
            decode_first_ms=(opened.first_ns - ended.computed_ns) / 1e6,
        )

    async def held(self) -> Held:
        """See `Side.held`."""
        look: asyncio.Future[Counts] = asyncio.get_running_loop().create_future()
        self._looks.append(look)
        self._look.write(b"\n")
        counts = await look
        return Held(counts.live, counts.slots * self._block_nbytes)

    def resident_mib(self) -> dict[str, float]:
        """See `Side.resident_mib`."""
        return {process.name: resident_mib(process.pid) for process in self._processes}

    async def listen(self, log: IO[bytes]) -> None:
        """Take in what the decode process says, until it is gone; then whoever waits fails."""
        async for raw in self._lines:
            match _LINE.decode(raw):
                case Token(number, data):
                    opened = self._open[number]
                    opened.first_ns = opened.first_ns or time.monotonic_ns()
                    opened.tokens.append(data)
                case Ended() as ended:
                    self._open.pop(ended.number).done.set_result(ended)
                case Counts() as counts:
                    look = self._looks.pop(0)
                    if not look.done():
                        look.set_result(counts)
        waiting: list[asyncio.Future[Ended] | asyncio.Future[Counts]] = [*self._looks]
        waiting += [opened.done for opened in self._open.values()]
        for future in waiting:
            if not future.done():
                future.set_exception(ClaimError(f"the naive side is gone: {_tail(log)}"))


@contextlib.asynccontextmanager
async def naive_side(
    settings: Settings, far_prefix: Sequence[str], max_tokens: int, block_nbytes: int
) -> AsyncIterator[NaiveSide]:
    """Both processes, ready to be asked; the decode process is started by `far_prefix`.

    Raises:
        ClaimError: they did not start.
    """
    program, given = Path(__file__).with_name("naive.py"), msgspec.json.encode(settings).decode()
    async with contextlib.AsyncExitStack() as stack:
        log = stack.enter_context(tempfile.TemporaryFile())
        processes = list[ManagedProcess]()
        for role, prefix in (("decode", far_prefix), ("prefill", ())):
            argv = [*prefix, sys.executable, str(program), role, given]
            process = ManagedProcess(f"naive {role}", argv, output=log.fileno())
            processes.append(process)
            stack.push_async_callback(process.stop, _GRACE_S)
        try:
            # The prefill process takes a client when it has reached the decode process.
            _, ask = await _reached(settings.near, settings.ask_port, processes)
            tokens = await _reached(settings.far, settings.token_port, processes)
        except OSError as error:
            raise ClaimError(f"the naive side did not start: {error}; {_tail(log)}") from error
        side = NaiveSide(processes, ask, tokens, max_tokens, block_nbytes)
        listening = asyncio.create_task(side.listen(log))
        try:
            yield side
        finally:
            listening.cancel()
            for writer in (ask, tokens[1]):
                writer.close()


def _tail(log: IO[bytes]) -> str:
    size = os.fstat(log.fileno()).st_size
    return os.pread(log.fileno(), _TAIL_NBYTES, max(0, size - _TAIL_NBYTES)).decode(errors="replace")


async def _reached(
    host: str, port: int, processes: Sequence[ManagedProcess]
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    loop = asyncio.get_running_loop()
    end_s = loop.time() + CONNECT_S
    while True:
        try:
            return await asyncio.open_connection(host, port)
        except ConnectionRefusedError:
            if loop.time() > end_s or any(process.status is not None for process in processes):
                raise
            await asyncio.sleep(0.05)

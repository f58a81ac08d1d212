"""What a side of the comparison must do, and how it is asked: one by one, then several at a time.

Both sides are up during the whole run and are asked in turn, round by round; the one that is not asked waits for its
sockets. A side is asked through this module alone, so both get the same requests, as many at a time.
"""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from kv_services.engine.interface import ChatMessage

SAMPLE_S = 0.1
"""Between two looks at what the decode node holds."""


class ClaimError(Exception):
    """A side failed, or said something else than the other: there is nothing to compare."""


@dataclass(frozen=True, slots=True)
class Answered:
    """One request, as its client saw it and as its side tells.

    Attributes:
        tokens: the bytes of each token of the answer.
        first_ms: from sending the request to the first token, at the client.
        nbytes: of KV that went to the decode node for it.
        handover_ms: from the prompt's last layer computed to all of its KV ready for use at the decode node.
        sending_ms: from before the first byte of KV that was sent for it until after the last.
        decode_first_ms: from the last layer computed to the first token at the client.
    """

    tokens: Sequence[bytes]
    first_ms: float
    nbytes: int
    handover_ms: float
    sending_ms: float
    decode_first_ms: float


@dataclass(frozen=True, slots=True)
class Held:
    """What the decode node holds at one moment: requests that are live there, and bytes of KV that these need."""

    live: int
    nbytes: int


class Side(Protocol):
    """One of the two."""

    async def ask(self, number: int, chat: Sequence[ChatMessage]) -> Answered:
        """One request, greedy, streamed.

        Args:
            number: which of the questions it is.

        Raises:
            ClaimError: it was not answered.
        """
        ...

    async def held(self) -> Held:
        """What its decode node holds now."""
        ...

    def resident_mib(self) -> dict[str, float]:
        """Resident memory of its processes, by name."""
        ...


@dataclass(frozen=True, slots=True)
class Round:
    """Requests that were asked together. `held` was sampled meanwhile."""

    answers: dict[int, Answered]
    wall_s: float
    held: list[Held] = field(default_factory=list)

    @property
    def tokens_per_s(self) -> float:
        return sum(len(answer.tokens) for answer in self.answers.values()) / self.wall_s

    @property
    def held_per_live(self) -> float:
        """Bytes of KV at the decode node for each request that is live there, on average over the round; 0 of none."""
        live = sum(sample.live for sample in self.held)
        return sum(sample.nbytes for sample in self.held if sample.live) / live if live else 0.0


async def ask_together(
    side: Side, chats: Sequence[Sequence[ChatMessage]], numbers: Sequence[int], concurrency: int
) -> Round:
    """Ask these questions, so many at a time."""
    turns, answers = asyncio.Semaphore(concurrency), dict[int, Answered]()

    async def one(number: int) -> None:
        async with turns:
            answers[number] = await side.ask(number, chats[number])

    samples: list[Held] = []
    began_s = time.perf_counter()
    async with _sampled(side, samples), asyncio.TaskGroup() as group:
        for number in numbers:
            group.create_task(one(number))
    return Round(answers, time.perf_counter() - began_s, samples)


@contextlib.asynccontextmanager
async def _sampled(side: Side, samples: list[Held]) -> AsyncIterator[None]:
    async def sample() -> None:
        while True:
            samples.append(await side.held())
            await asyncio.sleep(SAMPLE_S)

    task = asyncio.create_task(sample())
    try:
        yield
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task

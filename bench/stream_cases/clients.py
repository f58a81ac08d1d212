"""Clients that stream one answer after the other and check every byte of it."""

import asyncio
import statistics
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import aiohttp

from tests.integration.helpers_integration import Answer, Fabric, expected, prompt

COUNT = 16
SHARED = 96
"""Tokens with which two of three prompts begin alike, as with a system prompt."""


@dataclass(frozen=True, slots=True)
class Question:
    """A prompt and the one right answer to it."""

    tokens: tuple[int, ...]
    answer: bytes


def questions(number: int, length: int) -> list[Question]:
    """Different prompts of about `length` tokens, their answers worked out before anything is timed."""
    made = [prompt(seed, length + seed % 64, SHARED if seed % 3 else 0) for seed in range(number)]
    return [Question(tokens, expected(tokens, COUNT)) for tokens in made]


@dataclass
class Tally:
    """What came of the requests. Times in milliseconds."""

    right: int = 0
    wrong: int = 0
    errors: Counter[str] = field(default_factory=Counter)
    first_ms: list[float] = field(default_factory=list)
    gap_ms: list[float] = field(default_factory=list)
    total_ms: list[float] = field(default_factory=list)

    def first(self, quantile: float) -> float:
        return at_quantile(self.first_ms, quantile)


def at_quantile(values: Sequence[float], quantile: float) -> float:
    """The value below which that part of them lies; 0 of nothing."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(quantile * len(ordered)))] if ordered else 0.0


async def stream_for(fabric: Fabric, asked: Sequence[Question], streams: int, seconds: float) -> Tally:
    """Keep `streams` streams open for that long; each asks its next question when its answer is whole."""
    tally = Tally()
    end_s = time.perf_counter() + seconds
    turn = iter(range(1 << 60))

    async def client() -> None:
        while time.perf_counter() < end_s:
            await _one(fabric, asked[next(turn) % len(asked)], tally)

    await asyncio.gather(*(client() for _ in range(streams)))
    return tally


async def _one(fabric: Fabric, question: Question, tally: Tally) -> None:
    began_s = last_s = time.perf_counter()
    first_ms = 0.0

    async def progress(_: bytes) -> None:
        nonlocal last_s, first_ms
        now_s = time.perf_counter()
        if first_ms:
            tally.gap_ms.append((now_s - last_s) * 1e3)
        else:
            first_ms = (now_s - began_s) * 1e3
        last_s = now_s

    try:
        answer = await fabric.stream(question.tokens, COUNT, progress)
    except (aiohttp.ClientError, TimeoutError) as error:
        answer = Answer(599, error={"code": type(error).__name__})
    if answer.status != 200 or answer.error:
        tally.errors[str(answer.error.get("code"))] += 1
    elif answer.text != question.answer:
        tally.wrong += 1
    else:
        tally.right += 1
        tally.first_ms.append(first_ms)
        tally.total_ms.append((time.perf_counter() - began_s) * 1e3)


def resident_mib(pid: int) -> float:
    """Resident memory of a process."""
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * 4096 / (1 << 20)


def median(values: Sequence[float]) -> float:
    """Of nothing: 0."""
    return statistics.median(values) if values else 0.0

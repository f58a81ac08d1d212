"""Steady clients that hold every answer against the oracle, whole or not."""

import asyncio
from collections import Counter
from dataclasses import dataclass, field

import aiohttp

from kv_core.clock import SystemClock
from tests.integration.helpers_integration import Answer, Fabric
from tests.soak.questions import Question, Questions

AWAY_S = 0.25
"""How long a client waits before it asks a gateway again that it lost or does not reach."""

LATE_S = 10.0
"""How long after its time a request may end: a gateway that stands still tells nobody, and this machine is busy."""

TOLD_MAX = 5
"""Errors of one code whose messages are kept."""


@dataclass
class Tally:
    """What came of all requests."""

    requests: int = 0
    right: int = 0
    failed: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    told: list[str] = field(default_factory=list)
    longest_stall_s: float = 0.0
    longest_request_s: float = 0.0


class Load:
    """`clients` clients that ask one request after the other until stopped."""

    def __init__(self, fabric: Fabric, clients: int, questions: Questions) -> None:
        self.tally = Tally()
        self._fabric = fabric
        self._questions = questions
        self._stopping = False
        self._clock = SystemClock()
        self._tasks = [asyncio.ensure_future(self._client(number)) for number in range(clients)]

    async def stop(self) -> Tally:
        self._stopping = True
        await asyncio.gather(*self._tasks)
        return self.tally

    async def _client(self, number: int) -> None:
        turn = 0
        while not self._stopping:
            turn += 1
            await self._ask(self._questions.question(number, turn))
            await asyncio.sleep(0.02)

    async def _ask(self, question: Question) -> None:
        began_ns = last_ns = self._clock.monotonic_ns()
        said = b""

        async def progress(text: bytes) -> None:
            nonlocal last_ns, said
            now_ns = self._clock.monotonic_ns()
            self.tally.longest_stall_s = max(self.tally.longest_stall_s, (now_ns - last_ns) / 1e9)
            last_ns, said = now_ns, text

        self.tally.requests += 1
        try:
            answer = await self._fabric.stream(question.tokens, question.count, progress)
        except (aiohttp.ClientError, TimeoutError) as error:
            self._failed(type(error).__name__, str(error))
            answer = Answer(599, said)
            await asyncio.sleep(AWAY_S)
        await progress(answer.text)
        self._judge_time((last_ns - began_ns) / 1e9)
        self._judge(question.answer, answer)

    def _judge_time(self, took_s: float) -> None:
        self.tally.longest_request_s = max(self.tally.longest_request_s, took_s)
        if took_s > self._fabric.config.limits.request_timeout_s + LATE_S:
            self.tally.wrong.append(f"a request ended after {took_s:.0f} s")

    def _judge(self, want: bytes, answer: Answer) -> None:
        tally = self.tally
        if not want.startswith(answer.text):
            tally.wrong.append(f"{answer.text!r} is not the beginning of {want!r}")
        elif answer.status == 200 and not answer.error:
            if answer.text == want:
                tally.right += 1
            else:
                tally.wrong.append(f"{answer.text!r} ended as if it were all of {want!r}")
        elif answer.status != 599:
            if not answer.is_clear_error():
                tally.wrong.append(f"an error that says nothing: {answer}")
            self._failed(str(answer.error.get("code")), str(answer.error.get("message")))

    def _failed(self, code: str, message: str) -> None:
        self.tally.failed[code] += 1
        if self.tally.failed[code] <= TOLD_MAX:
            self.tally.told.append(f"{code}: {message}")

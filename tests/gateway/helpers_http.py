"""A front on a free loopback port with a scripted completer behind it, and ways to talk to it."""

import asyncio
import io
import json
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import openai

from kv_core.clock import Clock, SystemClock
from kv_core.errors import KVError
from kv_core.ids import RequestId
from kv_services.gateway.admission import RequestLimits, ServedModel
from kv_services.gateway.completer import (
    Finished,
    FinishReason,
    GenerationRequest,
    RequestRecord,
    Timings,
    Token,
    Usage,
)
from kv_services.gateway.errors import InvalidRequestError
from kv_services.gateway.generation import GenerationSettings
from kv_services.gateway.http import FrontHooks, HttpFront
from kv_services.gateway.stream import TokenStream
from kv_services.gateway.tenancy import ApiKeys
from tests.gateway.helpers_gateway import EOS, served

Script = Callable[[GenerationRequest, TokenStream], None]
Json = Any  # what a JSON text decodes to: tests look into it freely


def wait_for_test(request: GenerationRequest, stream: TokenStream) -> None:
    """The script that leaves the stream to the test."""


def say(text: str | bytes, *, cached: int = 0, end: bool = True) -> Script:
    """The script that answers with this text, a token a byte, as a decode node would: to the end token, or as far as
    `max_tokens` goes."""
    raw = text.encode() if isinstance(text, str) else text

    def script(request: GenerationRequest, stream: TokenStream) -> None:
        ids = [*raw, EOS] if end else list(raw)
        top = request.sampling.top_logprobs
        limit = request.sampling.max_tokens
        tokens = [token_with(index, token_id, top) for index, token_id in enumerate(ids[:limit])]
        stream.push(tokens)
        reason = FinishReason.STOP if end and len(ids) <= limit else FinishReason.LENGTH
        stream.finish(finish_of(request, reason, len(tokens), cached))

    return script


def fail(error: KVError, *, after: str = "") -> Script:
    """The script that says this much and then fails."""

    def script(request: GenerationRequest, stream: TokenStream) -> None:
        stream.push([token_with(index, value, None) for index, value in enumerate(after.encode())])
        stream.fail(error)

    return script


def token_with(index: int, token_id: int, top: int | None) -> Token:
    if top is None:
        return Token(index, token_id)
    return Token(index, token_id, -0.25, tuple((token_id + rank, -0.25 - rank) for rank in range(top)))


def finish_of(request: GenerationRequest, reason: FinishReason, completion: int, cached: int = 0) -> Finished:
    usage = Usage(len(request.prompt_token_ids), completion, cached)
    timings = Timings(
        "d1", "p1", kv_bytes_moved=4096, transport="shm", handover_ns=2_500_000, prefill_ns=7_000_000, tail_ns=500_000
    )
    return Finished(reason, usage, timings)


class OffsetClock(SystemClock):
    """The machine's clock, moved by as much as a test says."""

    __slots__ = ("offset_ns",)

    def __init__(self) -> None:
        self.offset_ns = 0

    def monotonic_ns(self) -> int:
        return super().monotonic_ns() + self.offset_ns


@dataclass
class ScriptedCompleter:
    """Keeps what it was asked, and answers by script."""

    script: Script = wait_for_test
    window: int = 4096
    requests: list[GenerationRequest] = field(default_factory=list)
    streams: list[TokenStream] = field(default_factory=list)
    cancelled: list[RequestId] = field(default_factory=list)
    stopped: list[RequestId] = field(default_factory=list)
    taken: int = 0

    def submit(self, request: GenerationRequest) -> TokenStream:
        self.requests.append(request)
        stream = TokenStream(
            window=self.window,
            on_taken=self._took,
            on_stop=lambda: self.stopped.append(request.request_id),
            on_cancel=lambda: self.cancelled.append(request.request_id),
        )
        self.streams.append(stream)
        self.script(request, stream)
        return stream

    def _took(self, count: int) -> None:
        self.taken = count

    async def next_request(self, number: int = 1) -> tuple[GenerationRequest, TokenStream]:
        """The request of that number, once it was submitted."""
        await until(lambda: len(self.requests) >= number)
        return self.requests[number - 1], self.streams[number - 1]


@dataclass
class Served:
    """A front under test."""

    front: HttpFront
    completer: ScriptedCompleter
    records: list[RequestRecord]

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.front.port}"

    def client(self, api_key: str = "whatever") -> openai.AsyncOpenAI:
        return openai.AsyncOpenAI(
            base_url=f"{self.url}/v1",
            api_key=api_key,
            max_retries=0,
            http_client=openai.DefaultAsyncHttpxClient(trust_env=False),
        )

    async def call(
        self,
        path: str,
        body: object = None,
        *,
        method: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> tuple[int, Mapping[str, str], bytes]:
        """One request by a plain client: status, headers, body. A `bytes` body goes as it is, others as JSON."""
        raw = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
        data = None if raw is None else io.BytesIO(raw)
        sent = {"Content-Type": "application/json"} | dict(headers or {})
        verb = method or ("GET" if body is None else "POST")
        async with (
            aiohttp.ClientSession() as session,
            session.request(verb, self.url + path, data=data, headers=sent) as response,
        ):
            return response.status, response.headers, await response.read()

    async def complete(self, body: Mapping[str, object], path: str = "/v1/completions") -> tuple[int, Json]:
        """One request with defaults filled in: status and decoded body."""
        status, _, raw = await self.call(path, {"model": "m", **body})
        return status, json.loads(raw)

    async def stream(self, body: Mapping[str, object], path: str = "/v1/completions") -> list[str]:
        """The events of a streamed answer, as they stand on the wire, without the comments."""
        status, headers, raw = await self.call(path, {"model": "m", "stream": True, **body})
        assert status == 200, raw
        assert headers["Content-Type"].startswith("text/event-stream")
        events = raw.decode().split("\n\n")
        assert events.pop() == ""
        return [event for event in events if not event.startswith(":")]


@asynccontextmanager
async def serving(
    script: Script = wait_for_test,
    *,
    model: ServedModel | None = None,
    keys: ApiKeys | None = None,
    max_requests: int = 64,
    max_prompt_tokens: int = 256,
    max_output_tokens: int = 128,
    timeout_s: float = 30.0,
    keepalive_s: float = 10.0,
    stall_timeout_s: float = 10.0,
    body_timeout_s: float = 10.0,
    show_fabric: bool = True,
    window: int = 4096,
    unready: Callable[[], str] = str,
    clock: Clock | None = None,
) -> AsyncIterator[Served]:
    """A running front."""
    completer = ScriptedCompleter(script, window)
    records: list[RequestRecord] = []
    settings = GenerationSettings(
        request_limits=RequestLimits(max_prompt_tokens, max_output_tokens, timeout_s),
        max_requests=max_requests,
        show_fabric=show_fabric,
        keepalive_s=keepalive_s,
        stall_timeout_s=stall_timeout_s,
        body_timeout_s=body_timeout_s,
    )
    hooks = FrontHooks(
        metrics=lambda: b"kv_up 1\n",
        status=lambda: b'{"nodes":[]}',
        unready=unready,
        observe=records.append,
        lookup=lambda body: b'{"holders":[],"nodes":%d}' % len(body),
        explain=_explained,
    )
    shown = model or served()
    front = HttpFront(
        completer,
        {shown.name: shown},
        keys or ApiKeys(),
        settings,
        hooks,
        host="127.0.0.1",
        port=0,
        clock=clock or SystemClock(),
    )
    async with front:
        yield Served(front, completer, records)


async def _explained(body: bytes) -> bytes:
    if not json.loads(body):
        raise InvalidRequestError(param="", detail="no prompt")
    return b'{"engines":{},"nodes":%d}' % len(body)


async def until(condition: Callable[[], bool], timeout_s: float = 20.0) -> None:
    """Wait for something that the loop is about to do."""
    async with asyncio.timeout(timeout_s):
        while not condition():  # noqa: ASYNC110 - what is waited for happens in code that knows no event of ours
            await asyncio.sleep(0.001)

"""One chat request of the demo over the gateway's public API, streamed, with what it tells of its way.

The tokens are taken from `logprobs`, each as the bytes it stands for: text alone would not show that two different
tokens were cut from it.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Collection, Sequence
from http import HTTPStatus
from typing import Final

import aiohttp
import msgspec

from kv_core.errors import KVError
from kv_services.engine.interface import ChatMessage
from kv_services.status_report import decode_status

LINE_BYTES_MAX: Final = 1 << 20
HEARD_S: Final = 10.0


class RequestFailedError(KVError):
    """The gateway answered a request of the demo with an error, or not to its end."""

    code = 7131
    template = "request {number}: {problem}"


class Fabric(msgspec.Struct, frozen=True):
    """The `kv_fabric` object of an answer; see the gateway."""

    prefill_node: str | None
    decode_node: str
    prompt_tokens: int
    cached_tokens: int
    kv_bytes_moved: int
    transport: str
    handover_ms: float
    ttft_ms: float
    tokens_per_s: float | None
    prefill_ms: float = 0.0
    handover_tail_ms: float = 0.0


class Answer(msgspec.Struct, frozen=True):
    """What came of one request. `tokens` are the bytes of each token; `logprobs` belong to them."""

    number: int
    tokens: list[bytes]
    logprobs: list[float]
    fabric: Fabric

    @property
    def text(self) -> str:
        """The answer as people read it."""
        return b"".join(self.tokens).decode(errors="replace")


class _Token(msgspec.Struct):
    logprob: float
    bytes: list[int]


class _Logprobs(msgspec.Struct):
    content: list[_Token]


class _Choice(msgspec.Struct):
    finish_reason: str | None = None
    logprobs: _Logprobs | None = None


class _Problem(msgspec.Struct):
    message: str


class _Chunk(msgspec.Struct):
    choices: list[_Choice] = []
    kv_fabric: Fabric | None = None
    error: _Problem | None = None


_CHUNK: Final = msgspec.json.Decoder(_Chunk)


async def heard_of(session: aiohttp.ClientSession, gateway: str, nodes: Collection[str]) -> None:
    """Return when the gateway has heard from these nodes, or after `HEARD_S`: it serves as soon as one decode node is
    there, which would then compute the first prompts by itself. A gateway that does not say is not waited for."""
    with contextlib.suppress(aiohttp.ClientError, msgspec.MsgspecError, TimeoutError):
        async with asyncio.timeout(HEARD_S):
            while True:
                async with session.get(f"{gateway}/status") as response:
                    if response.status != HTTPStatus.OK:
                        return
                    heard = decode_status(await response.read()).wires
                if heard.keys() >= set(nodes):
                    return
                await asyncio.sleep(0.05)


async def ask(
    session: aiohttp.ClientSession,
    gateway: str,
    model: str,
    number: int,
    messages: Sequence[ChatMessage],
    max_tokens: int,
    on_token: Callable[[str], None],
) -> Answer:
    """Send a chat request, greedy, and read the answer to its end.

    Args:
        gateway: root of its HTTP server.
        number: how errors call the request.
        on_token: told the text of each token as it comes.

    Raises:
        RequestFailedError: an error of the gateway, or an answer that ends early.
    """
    body = {
        "model": model,
        "messages": [{"role": message.role, "content": message.content} for message in messages],
        "max_tokens": max_tokens,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
        "logprobs": True,
        "top_logprobs": 0,
    }
    tokens: list[bytes] = []
    logprobs: list[float] = []
    fabric: Fabric | None = None
    finished = False
    try:
        async with session.post(f"{gateway}/v1/chat/completions", json=body) as response:
            if response.status != 200:
                raise RequestFailedError(number=number, problem=f"HTTP {response.status}: {await response.text()}")
            async for chunk in _chunks(response.content):
                if chunk.error is not None:
                    raise RequestFailedError(number=number, problem=chunk.error.message)
                for choice in chunk.choices:
                    for token in choice.logprobs.content if choice.logprobs else ():
                        tokens.append(bytes(token.bytes))
                        logprobs.append(token.logprob)
                        on_token(tokens[-1].decode(errors="replace"))
                    finished |= choice.finish_reason is not None
                fabric = chunk.kv_fabric or fabric
    except (aiohttp.ClientError, TimeoutError, msgspec.DecodeError) as error:
        raise RequestFailedError(number=number, problem=f"{type(error).__name__}: {error}") from error
    if not finished or fabric is None:
        raise RequestFailedError(number=number, problem="the answer ended early")
    return Answer(number, tokens, logprobs, fabric)


async def _chunks(content: aiohttp.StreamReader) -> AsyncIterator[_Chunk]:
    while line := await content.readline():
        text = line.strip()
        if text.startswith(b"data:") and (data := text[5:].strip()) != b"[DONE]":
            yield _CHUNK.decode(data)

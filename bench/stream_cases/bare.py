"""The same engine without a cluster: prefill and the first step in one process, alone and behind a bare HTTP server.

The first is what computing takes. The second is what a client of such an engine sees, HTTP included, as vllm-router's
workers are asked directly in `router`: what a cluster adds is counted from there.
"""

import json
import time
from collections.abc import Sequence

import aiohttp
from aiohttp import web

from bench.stream_cases.clients import Question, median
from kv_core.block import Layout
from kv_services.engine.load import STUB_GEOMETRY
from kv_services.engine.paged_kv import BufferPagedKV
from kv_services.engine.single import GenerationRequest, SingleProcess
from kv_services.engine.stub import StubModel
from tests.integration.helpers_integration import GEOMETRY

SLOTS = 64


def first_token(arena: BufferPagedKV, tokens: Sequence[int]) -> int:
    """Prefill and one step."""
    return SingleProcess(StubModel(STUB_GEOMETRY), arena).generate([GenerationRequest(tuple(tokens), 1)])[0].ids[0]


def alone(asked: Sequence[Question]) -> float:
    """Milliseconds to the first token by calls."""
    memory = arena()
    took: list[float] = []
    for question in asked:
        began_s = time.perf_counter()
        first_token(memory, question.tokens)
        took.append((time.perf_counter() - began_s) * 1e3)
    return median(took)


async def behind_http(asked: Sequence[Question]) -> float:
    """Milliseconds to the first event of a streamed answer of an HTTP server that does nothing else."""
    memory = arena()

    async def complete(request: web.Request) -> web.StreamResponse:
        body = json.loads(await request.read())
        return await streamed(request, chr(first_token(memory, body["prompt"])))

    application = web.Application(client_max_size=1 << 24)
    application.router.add_post("/v1/completions", complete)
    runner = web.AppRunner(application, access_log=None)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        host, port = runner.addresses[0][:2]
        async with aiohttp.ClientSession() as session:
            took = [
                await first_event_ms(session, f"http://{host}:{port}/v1/completions", question) for question in asked
            ]
    finally:
        await runner.cleanup()
    return median(took[2:])


async def streamed(request: web.Request, text: str) -> web.StreamResponse:
    """An answer of one event."""
    answer = {"id": "x", "object": "text_completion", "choices": [{"index": 0, "text": text}]}
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
    await response.prepare(request)
    await response.write(b"data: " + json.dumps(answer).encode() + b"\n\ndata: [DONE]\n\n")
    return response


async def first_event_ms(session: aiohttp.ClientSession, url: str, question: Question) -> float:
    """Ask, and see that the first token is the right one."""
    body = {"model": "stub", "prompt": list(question.tokens), "max_tokens": 16, "temperature": 0, "stream": True}
    began_s = time.perf_counter()
    async with session.post(url, json=body) as response:
        response.raise_for_status()
        line = await response.content.readline()
        took_ms = (time.perf_counter() - began_s) * 1e3
        await response.read()
    if json.loads(line[6:])["choices"][0]["text"].encode() != question.answer[:1]:
        raise ValueError(f"the bare server's first token is wrong: {line!r}")
    return took_ms


def arena() -> BufferPagedKV:
    """Memory for the prompts that are asked here, one at a time."""
    return BufferPagedKV(bytearray(SLOTS * GEOMETRY.block_nbytes), GEOMETRY, Layout.LAYER_FIRST, SLOTS)

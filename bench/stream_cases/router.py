"""The same path through vllm-router: its prefill and decode step before workers that answer at once.

The workers compute nothing and move no KV, so what a request takes through the router beyond what it takes when the
client asks the two workers itself is what the router adds.
"""

import asyncio
import contextlib
import json
import socket
import statistics
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import aiohttp
from aiohttp import web

PROGRAM = Path(__file__).resolve().parent.parent / "peers" / ".envs" / "vllm-router" / "bin" / "vllm-router"
START_S = 60.0


@dataclass(frozen=True, slots=True)
class RouterTimes:
    """Medians in milliseconds, to the first byte of the answer."""

    direct_ms: float
    through_ms: float

    @property
    def added_ms(self) -> float:
        return self.through_ms - self.direct_ms


def installed() -> bool:
    """Whether `make bench-peers PEERS=vllm-router` put it there."""
    return PROGRAM.exists()


async def measure(prompts: list[str], rounds: int) -> RouterTimes:
    """Each prompt in turn, straight and through the router, one request at a time."""
    async with _worker("prefill") as prefill, _worker("decode") as decode, _router(prefill, decode) as router:
        async with aiohttp.ClientSession() as session:
            direct, through = [], []
            for number in range(rounds):
                body = {"model": "stub", "prompt": prompts[number % len(prompts)], "max_tokens": 16, "stream": True}
                direct.append(await _direct(session, prefill, decode, body))
                through.append(await _first_byte(session, router, body))
    return RouterTimes(statistics.median(direct[2:]) * 1e3, statistics.median(through[2:]) * 1e3)


async def _direct(session: aiohttp.ClientSession, prefill: str, decode: str, body: dict[str, object]) -> float:
    began_s = time.perf_counter()
    async with session.post(f"{prefill}/v1/completions", json={**body, "max_tokens": 1, "stream": False}) as response:
        response.raise_for_status()
        await response.read()
    await _first_byte(session, decode, body)
    return time.perf_counter() - began_s


async def _first_byte(session: aiohttp.ClientSession, url: str, body: dict[str, object]) -> float:
    began_s = time.perf_counter()
    async with session.post(f"{url}/v1/completions", json=body) as response:
        response.raise_for_status()
        await response.content.readany()
        took_s = time.perf_counter() - began_s
        await response.read()
    return took_s


@contextlib.asynccontextmanager
async def _worker(kind: str) -> AsyncIterator[str]:
    async def complete(request: web.Request) -> web.StreamResponse:
        body = json.loads(await request.read())
        answer = {"id": "x", "object": "text_completion", "choices": [{"index": 0, "text": "a", "finish_reason": None}]}
        if not body.get("stream"):
            return web.json_response(
                {**answer, "kv_transfer_params": {"remote_engine_id": "e", "remote_block_ids": [1]}}
            )
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        await response.write(b"data: " + json.dumps(answer).encode() + b"\n\ndata: [DONE]\n\n")
        return response

    async def well(_: web.Request) -> web.Response:
        return web.json_response({"status": kind, "data": [{"id": "stub"}]})

    application = web.Application(client_max_size=1 << 24)
    application.router.add_post("/v1/completions", complete)
    for path in ("/health", "/v1/models", "/get_server_info", "/get_model_info"):
        application.router.add_get(path, well)
    runner = web.AppRunner(application, access_log=None)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        host, port = runner.addresses[0][:2]
        yield f"http://{host}:{port}"
    finally:
        await runner.cleanup()


@contextlib.asynccontextmanager
async def _router(prefill: str, decode: str) -> AsyncIterator[str]:
    with socket.socket() as probe, socket.socket() as other:
        probe.bind(("127.0.0.1", 0))
        other.bind(("127.0.0.1", 0))
        port, metrics = probe.getsockname()[1], other.getsockname()[1]
    process = await asyncio.create_subprocess_exec(
        *(str(PROGRAM), "--host", "127.0.0.1", "--port", str(port), "--vllm-pd-disaggregation"),
        *("--prefill", prefill, "--decode", decode, "--policy", "round_robin", "--log-level", "error"),
        *("--prometheus-port", str(metrics), "--kv-connector", "nixl"),
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.DEVNULL,
    )
    try:
        url = f"http://127.0.0.1:{port}"
        await asyncio.wait_for(_until_up(url), START_S)
        yield url
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()


async def _until_up(url: str) -> None:
    async with aiohttp.ClientSession() as session:
        while True:
            with contextlib.suppress(aiohttp.ClientError):
                async with session.get(f"{url}/health") as response:
                    if response.status == 200:
                        return
            await asyncio.sleep(0.1)

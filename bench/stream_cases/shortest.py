"""The shortest path through Python: an HTTP server, one message over an authenticated bus to an engine, one back.

What a cluster does between is left out: nobody is placed, owned, matched, followed, checked or given a deadline, and
nothing is written down. So no cluster whose parts are Python processes joined by ZeroMQ with CURVE adds less than this.
"""

import asyncio
import contextlib
import json
import sys
import tempfile
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path

import aiohttp
import numpy as np
import uvloop
import zmq
import zmq.auth
from aiohttp import web

from bench.stream_cases import bare
from bench.stream_cases.clients import Question, median

ROOT = Path(__file__).resolve().parent.parent.parent
START_S = 30.0


async def added_ms(asked: Sequence[Question]) -> float:
    """Milliseconds to the first token beyond the same engine behind bare HTTP, which is asked before and after."""
    before_ms = await bare.behind_http(asked)
    with tempfile.TemporaryDirectory() as folder:
        for name in ("engine", "front"):
            zmq.auth.create_certificates(folder, name)
        async with _process("engine", folder) as port, _process("front", folder, port) as front:
            async with aiohttp.ClientSession() as session:
                url = f"http://127.0.0.1:{front}/v1/completions"
                took = [await bare.first_event_ms(session, url, question) for question in asked]
    after_ms = await bare.behind_http(asked)
    return median(took[2:]) - (before_ms + after_ms) / 2


@contextlib.asynccontextmanager
async def _process(*arguments: object) -> AsyncIterator[int]:
    """A process of this module; gives the port that it says it has."""
    command = ("-m", "bench.stream_cases.shortest", *map(str, arguments))
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(sys.executable, *command, cwd=ROOT, stdin=pipe, stdout=pipe)
    try:
        assert process.stdout is not None
        yield int(await asyncio.wait_for(process.stdout.readline(), START_S))
    finally:
        process.kill()
        await process.wait()


def _keys(folder: str, socket: "zmq.Socket[bytes]", name: str) -> None:
    public, secret = zmq.auth.load_certificate(Path(folder) / f"{name}.key_secret")
    assert secret is not None
    socket.curve_publickey, socket.curve_secretkey = public, secret


async def engine(folder: str) -> None:
    """Answers each prompt with its first token, on the loop."""
    arena = bare.arena()
    socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.ROUTER)
    socket.curve_server = True
    _keys(folder, socket, "engine")
    port = socket.bind_to_random_port("tcp://127.0.0.1")

    def turn() -> None:
        with contextlib.suppress(zmq.Again):
            while True:
                route, prompt = socket.recv_multipart(zmq.NOBLOCK)
                token = bare.first_token(arena, np.frombuffer(prompt, dtype="<u4").tolist())
                socket.send_multipart([route, bytes([token])], zmq.NOBLOCK)

    await _serve(socket, turn, port)


async def front(folder: str, engine_port: str) -> None:
    """Hands each prompt on and streams the token that comes back."""
    socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.DEALER)
    _keys(folder, socket, "front")
    socket.curve_serverkey = zmq.auth.load_certificate(Path(folder) / "engine.key")[0]
    socket.connect(f"tcp://127.0.0.1:{engine_port}")
    answered: asyncio.Queue[bytes] = asyncio.Queue()

    def turn() -> None:
        with contextlib.suppress(zmq.Again):
            while True:
                answered.put_nowait(socket.recv(zmq.NOBLOCK))

    async def complete(request: web.Request) -> web.StreamResponse:
        body = json.loads(await request.read())
        socket.send(np.array(body["prompt"], dtype="<u4").tobytes(), zmq.NOBLOCK)
        turn()
        return await bare.streamed(request, chr((await answered.get())[0]))

    application = web.Application(client_max_size=1 << 24)
    application.router.add_post("/v1/completions", complete)
    runner = web.AppRunner(application, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    await _serve(socket, turn, runner.addresses[0][1])


async def _serve(socket: "zmq.Socket[bytes]", turn: Callable[[], None], port: int) -> None:
    asyncio.get_running_loop().add_reader(int(socket.FD), turn)
    print(port, flush=True)
    # Until the parent closes our input, or kills us.
    await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)


async def main(part: str, folder: str, *port: str) -> None:
    """One of the two processes."""
    await (engine(folder) if part == "engine" else front(folder, *port))


if __name__ == "__main__":
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(main(*sys.argv[1:]))

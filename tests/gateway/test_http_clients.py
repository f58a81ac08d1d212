"""Clients that leave, do not read, do not write, or do not speak HTTP: each costs itself only."""

import asyncio
import json
import socket
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager

import pytest

from kv_services.gateway.completer import FinishReason
from kv_services.gateway.limits import MAX_BODY_BYTES
from tests.gateway.helpers_gateway import served as served_model
from tests.gateway.helpers_http import Served, finish_of, say, serving, token_with, until


@pytest.fixture(autouse=True)
def nothing_is_logged_as_an_error(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """What clients do is no fault of ours."""
    yield
    assert [record.getMessage() for record in caplog.get_records("call") if record.levelname == "ERROR"] == []


Pipe = tuple[asyncio.StreamReader, asyncio.StreamWriter]


@asynccontextmanager
async def raw(served: Served, *, receive_buffer: int | None = None) -> AsyncIterator[Pipe]:
    """A bare connection."""
    sock = socket.socket()
    sock.setblocking(False)
    if receive_buffer is not None:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
    await asyncio.get_running_loop().sock_connect(sock, ("127.0.0.1", served.front.port))
    reader, writer = await asyncio.open_connection(sock=sock)
    try:
        yield reader, writer
    finally:
        writer.transport.abort()


def post(body: object, *, path: str = "/v1/completions", extra: str = "") -> bytes:
    data = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n{extra}"
    return f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data


def status_of(head: bytes) -> int:
    return int(head.split(b" ", 2)[1])


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("begun", [False, True])
async def test_a_client_that_leaves_ends_its_request_within_a_few_turns(streamed: bool, begun: bool) -> None:
    async with serving() as served, raw(served) as (reader, writer):
        writer.write(post({"model": "m", "prompt": "x", "stream": streamed}))
        request, tokens = await served.completer.next_request()
        if begun:
            tokens.push([token_with(0, ord("a"), None)])
            if streamed:
                await reader.readuntil(b'"text":"a"')
            else:
                await until(lambda: served.completer.taken == 1)
        writer.transport.abort()
        for _ in range(50):
            await asyncio.sleep(0)
        assert served.completer.cancelled == [request.request_id]
        assert served.front.stats().running == 0
        assert [record.outcome for record in served.records] == ["disconnected"]


async def test_a_client_that_leaves_in_the_middle_of_its_body_starts_nothing() -> None:
    async with serving() as served:
        async with raw(served) as (_, writer):
            writer.write(post({"model": "m", "prompt": "x" * 1000})[:-500])
            await until(lambda: served.front.stats().running == 1)
        await until(lambda: served.front.stats().running == 0)
        assert served.completer.requests == []
        assert [record.outcome for record in served.records] == ["disconnected"]


async def test_one_client_that_leaves_does_not_disturb_another() -> None:
    async with serving() as served:
        staying = asyncio.ensure_future(served.stream({"prompt": "x"}))
        kept, tokens = await served.completer.next_request(1)
        async with raw(served) as (_, writer):
            writer.write(post({"model": "m", "prompt": "x", "stream": True}))
            left, _ = await served.completer.next_request(2)
        await until(lambda: served.completer.cancelled == [left.request_id])
        say("ok")(kept, tokens)
        assert (await staying)[-1] == "data: [DONE]"
        assert served.completer.cancelled == [left.request_id]


MANY_LOGPROBS = {"logprobs": True, "top_logprobs": 20, "messages": [{"role": "user", "content": "x"}], "model": "m"}
"""With these a token takes about 3 KB on the wire, so that kernel buffers are full after a thousand."""

COUNT = 4000


async def produce(served: Served) -> None:
    """Say `COUNT` tokens, never more than the window ahead of the reader."""
    request, tokens = await served.completer.next_request()
    for index in range(COUNT):
        await until(lambda: tokens.room > 0, timeout_s=60)
        if not tokens.push([token_with(index, ord("a") + index % 26, 20)]):
            return
    tokens.finish(finish_of(request, FinishReason.LENGTH, COUNT))


async def stands_still(served: Served) -> int:
    """Wait until the front takes no more tokens; gives how many it took."""
    before, taken = -1, served.completer.taken
    while taken == 0 or taken != before:
        await asyncio.sleep(0.3)
        before, taken = taken, served.completer.taken
    return taken


async def test_a_slow_reader_stops_its_producer_and_gets_everything_in_the_end() -> None:
    async with (
        serving(window=64, max_output_tokens=COUNT, stall_timeout_s=60, model=served_model(max_context=8192)) as served,
        raw(served, receive_buffer=4096) as (reader, writer),
    ):
        producer = asyncio.ensure_future(produce(served))
        writer.transport.pause_reading()  # type: ignore[attr-defined]
        writer.write(
            post({**MANY_LOGPROBS, "stream": True}, path="/v1/chat/completions", extra="Connection: close\r\n")
        )
        taken = await stands_still(served)
        assert 0 < taken < COUNT - 64
        assert not producer.done()
        writer.transport.resume_reading()  # type: ignore[attr-defined]
        everything = await reader.read()
        await producer
        assert everything.count(b'"delta":{"content":') == COUNT
        assert everything.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n")
        assert served.records[0].outcome == "ok"


@pytest.mark.parametrize("streamed", [False, True])
async def test_a_client_that_never_reads_loses_its_request_and_connection(streamed: bool) -> None:
    async with (
        serving(
            window=64, max_output_tokens=COUNT, stall_timeout_s=0.3, model=served_model(max_context=8192)
        ) as served,
        raw(served, receive_buffer=4096) as (_, writer),
    ):
        producer = asyncio.ensure_future(produce(served))
        writer.transport.pause_reading()  # type: ignore[attr-defined]
        writer.write(post({**MANY_LOGPROBS, "stream": streamed}, path="/v1/chat/completions"))
        await until(lambda: bool(served.records), timeout_s=60)
        assert served.records[0].outcome == "slow_reader"
        assert served.front.stats().running == 0
        await until(lambda: served.front.stats().connections == 0)
        await producer
        # A whole answer is only sent when it is complete, so nothing is left to cancel.
        assert len(served.completer.cancelled) == int(streamed)


async def test_a_producer_that_overruns_a_slow_reader_ends_that_request_only() -> None:
    async with serving(window=8) as served:
        asking = asyncio.ensure_future(served.complete({"prompt": "x"}))
        _, tokens = await served.completer.next_request()
        assert not tokens.push([token_with(index, ord("a"), None) for index in range(9)])
        status, answer = await asking
        assert (status, answer["error"]["code"]) == (408, "slow_reader")
        assert served.completer.cancelled == []


async def read_answer(reader: asyncio.StreamReader) -> tuple[int, dict[str, str], bytes]:
    head = await reader.readuntil(b"\r\n\r\n")
    lines = head.decode().split("\r\n")
    headers = dict(line.split(": ", 1) for line in lines[1:] if line)
    return status_of(head), headers, await reader.readexactly(int(headers.get("Content-Length", 0)))


async def test_a_connection_serves_many_requests_also_when_they_come_at_once() -> None:
    async with serving(say("ok")) as served, raw(served) as (reader, writer):
        writer.write(post({"model": "m", "prompt": "x"}) + post({"model": "m"}) + post({"model": "m", "prompt": "y"}))
        assert [(await read_answer(reader))[0] for _ in range(3)] == [200, 400, 200]


async def test_a_body_is_asked_for_only_when_it_will_be_read() -> None:
    expect = "Expect: 100-continue\r\n"
    async with serving(say("ok")) as served, raw(served) as (reader, writer):
        head, _, body = post({"model": "m", "prompt": "x"}, extra=expect).partition(b"\r\n\r\n")
        writer.write(head + b"\r\n\r\n")
        assert await reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
        writer.write(body)
        assert (await read_answer(reader))[0] == 200
        writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n")
        writer.write(f"{expect}Content-Length: {MAX_BODY_BYTES + 1}\r\n\r\n".encode())
        assert (await read_answer(reader))[0] == 413


async def test_another_expectation_is_refused() -> None:
    async with serving(say("ok")) as served, raw(served) as (reader, writer):
        writer.write(post({"model": "m", "prompt": "x"}, extra="Expect: the-unexpected\r\n"))
        assert (await read_answer(reader))[0] == 400


async def test_a_body_without_a_stated_length_is_bounded_too() -> None:
    async with serving(say("ok")) as served, raw(served) as (reader, writer):
        writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n")
        writer.write(b"Transfer-Encoding: chunked\r\n\r\n")
        answering = asyncio.ensure_future(read_answer(reader))
        piece = b"10000\r\n" + b" " * 0x10000 + b"\r\n"
        for _ in range(MAX_BODY_BYTES // 0x10000 + 2):
            writer.write(piece)
            await writer.drain()
        writer.write(b"0\r\n\r\n")
        status, _, body = await answering
        assert (status, json.loads(body)["error"]["code"]) == (413, "request_too_large")


async def test_a_body_that_stops_is_not_waited_for() -> None:
    async with serving(body_timeout_s=0.1) as served, raw(served) as (reader, writer):
        writer.write(post({"model": "m", "prompt": "x"})[:-5])
        status, _, body = await read_answer(reader)
        assert (status, json.loads(body)["error"]["code"]) == (408, "request_timeout")
        assert await reader.read() == b""


@pytest.mark.parametrize(
    "junk",
    [
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
        b"GET\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Length: -5\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n",
        b"GET /healthz HTTP/1.1\r\nHost: a\r\nX: " + b"y" * 20_000 + b"\r\n\r\n",
        b"\x80\x04\x95pickle\r\n\r\n",
    ],
    ids=lambda junk: repr(junk[:12]),
)
async def test_what_is_no_http_is_dropped_quietly(junk: bytes, caplog: pytest.LogCaptureFixture) -> None:
    async with serving(say("ok")) as served:
        caplog.set_level("INFO")
        async with raw(served) as (reader, writer):
            writer.write(junk)
            answer = await reader.read()
            assert answer == b"" or status_of(answer) == 400
        assert not any(record.exc_info for record in caplog.records)
        assert (await served.complete({"prompt": "x"}))[0] == 200


async def test_a_broken_chunk_is_a_bad_request() -> None:
    async with serving(say("ok")) as served:
        async with raw(served) as (reader, writer):
            writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n")
            writer.write(b"Transfer-Encoding: chunked\r\n\r\nzz\r\n{}\r\n")
            answer = await reader.read()
            assert answer == b"" or status_of(answer) == 400
        await until(lambda: served.front.stats().running == 0)
        assert (await served.complete({"prompt": "x"}))[0] == 200


async def test_an_old_client_gets_its_stream_until_the_connection_ends() -> None:
    async with serving(say("ok")) as served, raw(served) as (reader, writer):
        old = post({"model": "m", "prompt": "x", "stream": True}).replace(b"HTTP/1.1", b"HTTP/1.0")
        writer.write(old)
        answer = await reader.read()
        assert status_of(answer) == 200
        assert b"chunked" not in answer
        assert answer.endswith(b"data: [DONE]\n\n")


async def test_head_gives_the_head_alone() -> None:
    async with serving() as served, raw(served) as (reader, writer):
        writer.write(b"HEAD /healthz HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
        head, _, body = (await reader.read()).partition(b"\r\n\r\n")
        assert (status_of(head), body) == (200, b"")


async def test_one_connection_too_many_is_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kv_services.gateway.limits.MAX_CONNECTIONS", 2)
    async with serving() as served, raw(served), raw(served):
        await until(lambda: served.front.stats().connections == 2)
        async with raw(served) as (reader, _):
            answer = await reader.read()
            assert status_of(answer) == 503
            assert b"Retry-After: 1" in answer

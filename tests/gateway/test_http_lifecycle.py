"""Starting, draining and stopping a front: nobody is left without an answer, nothing is left behind."""

import asyncio
import json
import socket
import threading

import openai
import pytest

from kv_core.clock import SystemClock
from kv_services.gateway.admission import RequestLimits
from kv_services.gateway.completer import FinishReason
from kv_services.gateway.errors import BindError, OpenGatewayError
from kv_services.gateway.generation import GenerationSettings
from kv_services.gateway.http import FrontHooks, HttpFront
from kv_services.gateway.tenancy import ApiKeys
from tests.gateway.helpers_http import ScriptedCompleter, finish_of, say, serving, token_with, until


def front_on(host: str, port: int) -> HttpFront:
    return HttpFront(
        ScriptedCompleter(),
        {},
        ApiKeys(),
        GenerationSettings(request_limits=RequestLimits(1, 1, 1.0)),
        FrontHooks(metrics=bytes, status=bytes),
        host=host,
        port=port,
        clock=SystemClock(),
    )


async def test_an_open_gateway_does_not_leave_loopback() -> None:
    for host in ("0.0.0.0", "::", "192.0.2.1"):
        with pytest.raises(OpenGatewayError, match="no API key"):
            await front_on(host, 0).start()


async def test_a_taken_port_is_named() -> None:
    async with serving() as served:
        front = front_on("127.0.0.1", served.front.port)
        with pytest.raises(BindError, match=f"127.0.0.1:{served.front.port}"):
            await front.start()


async def test_two_fronts_on_one_machine_do_not_meet() -> None:
    async with serving(say("one")) as first, serving(say("two")) as second:
        assert first.front.port != second.front.port
        assert (await first.complete({"prompt": "x"}))[1]["choices"][0]["text"] == "one"
        assert (await second.complete({"prompt": "x"}))[1]["choices"][0]["text"] == "two"


async def test_draining_refuses_new_requests_and_finishes_those_that_run() -> None:
    async with serving() as served:
        running = asyncio.ensure_future(served.complete({"prompt": "x"}))
        request, tokens = await served.completer.next_request()
        draining = asyncio.ensure_future(served.front.drain(30.0))
        await asyncio.sleep(0)
        status, headers, raw = await served.call("/v1/completions", {"model": "m", "prompt": "y"})
        assert (status, json.loads(raw)["error"]["code"], headers["Retry-After"]) == (503, "draining", "1")
        status, _, raw = await served.call("/healthz")
        assert (status, json.loads(raw)["status"]) == (503, "unready")
        assert not draining.done()
        say("done")(request, tokens)
        assert (await running)[1]["choices"][0]["text"] == "done"
        assert await draining == 0


async def test_draining_does_not_wait_for_ever() -> None:
    async with serving() as served:
        running = asyncio.ensure_future(served.complete({"prompt": "x"}))
        await served.completer.next_request()
        assert await served.front.drain(0.01) == 1
        await served.front.close()
        assert (await running)[0] == 503


async def test_closing_tells_those_who_wait_and_cancels_their_requests() -> None:
    async with serving() as served, served.client() as client:
        whole = asyncio.ensure_future(served.complete({"prompt": "x"}))
        await served.completer.next_request(1)
        creating = asyncio.ensure_future(client.completions.create(model="m", prompt="x", stream=True))
        _, tokens = await served.completer.next_request(2)
        tokens.push([token_with(0, ord("a"), None)])
        stream = await creating
        assert (await anext(stream)).choices[0].text == "a"
        closing = asyncio.ensure_future(served.front.close())
        status, answer = await whole
        assert (status, answer["error"]["code"]) == (503, "draining")
        with pytest.raises(openai.APIError, match="shutting down"):
            await anext(stream)
        await closing
        assert sorted(served.completer.cancelled) == sorted(r.request_id for r in served.completer.requests)
        assert [record.outcome for record in served.records] == ["draining", "draining"]


async def test_closing_in_the_middle_of_a_body_starts_nothing() -> None:
    async with serving() as served:
        reader, writer = await asyncio.open_connection("127.0.0.1", served.front.port)
        writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n")
        writer.write(b'Content-Length: 50\r\n\r\n{"model"')
        await until(lambda: served.front.stats().running == 1)
        closing = asyncio.ensure_future(served.front.close())
        writer.write(b':"m","prompt":"x"' + b" " * 24 + b"}")
        answer = await reader.read()
        assert answer.startswith(b"HTTP/1.1 503 ")
        await closing
        writer.close()
        assert served.completer.requests == []


async def test_after_closing_nothing_listens_and_no_thread_is_left() -> None:
    threads = {thread.name for thread in threading.enumerate()}
    async with serving(say("x")) as served:
        await served.complete({"prompt": "x" * 20_000})
        assert any(thread.name.startswith("gateway-text") for thread in threading.enumerate())
        port = served.front.port
    with socket.socket() as probe:
        assert probe.connect_ex(("127.0.0.1", port)) != 0
    left = {thread.name for thread in threading.enumerate()} - threads
    assert not any(name.startswith("gateway-text") for name in left)
    await served.front.close()


async def test_healthz_says_why_it_cannot_serve() -> None:
    reasons = ["no decode node is alive", ""]
    async with serving(unready=lambda: reasons[0]) as served:
        status, _, raw = await served.call("/healthz")
        assert (status, json.loads(raw)) == (503, {"status": "unready", "reason": reasons[0]})
        del reasons[0]
        assert (await served.call("/healthz"))[0] == 200


async def test_open_requests_and_connections_are_counted() -> None:
    async with serving() as served:
        running = asyncio.ensure_future(served.complete({"prompt": "x"}))
        request, tokens = await served.completer.next_request()
        stats = served.front.stats()
        assert (stats.connections, stats.running, stats.draining) == (1, 1, False)
        tokens.finish(finish_of(request, FinishReason.STOP, 0))
        await running
        await until(lambda: served.front.stats().connections == 0)
        assert served.front.stats().running == 0

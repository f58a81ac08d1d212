"""The calls of discovery against a real etcd server, and against one that answers nonsense."""

import asyncio
import contextlib
import os
import socket
from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
import pytest
from aiohttp import web

from kv_services.membership.etcd_client import PROBE_S, EtcdClient, EtcdError, KeyDeleted, KeyEvent, KeyPut
from tests.services.helpers_etcd import etcd_server, needs_etcd

pytestmark = [pytest.mark.asyncio, pytest.mark.timeout(120)]


@needs_etcd
async def test_leases_listings_and_watches_of_a_real_server(tmp_path: Path) -> None:
    async with etcd_server(tmp_path) as etcd, aiohttp.ClientSession() as http:
        client = EtcdClient(http, etcd.endpoint)
        lease = await client.grant(60)
        await client.put("/p/nodes/a", b"\x00\xff", lease)
        await client.put("/p/nodez", b"beside", lease)
        listed, revision = await client.listing("/p/nodes/")
        assert listed == {"/p/nodes/a": b"\x00\xff"}
        watch = client.watch("/p/nodes/", revision + 1)
        await client.put("/p/nodes/b", b"", lease)
        await client.revoke(lease)
        seen: list[KeyEvent] = []
        async with asyncio.timeout(60):
            while len(seen) < 3:
                seen += await anext(watch)
        await watch.aclose()  # type: ignore[attr-defined]  # an async generator
        assert seen[0] == KeyPut("/p/nodes/b", b"")
        assert set(seen[1:]) == {KeyDeleted("/p/nodes/a"), KeyDeleted("/p/nodes/b")}
        assert not await client.renew(lease)
        with pytest.raises(EtcdError, match="answered 4"):
            await client.revoke(lease)


ANSWERS = [b"", b"[", b"[]", b"null", b"{}", b'{"kvs": 3}', b'{"kvs": [{}], "header": {"revision": "1"}}', b'"x"']


@contextlib.asynccontextmanager
async def liar(answer: bytes, status: int = 200) -> AsyncIterator[str]:
    async def say(request: web.Request) -> web.Response:
        return web.Response(body=answer, status=status)

    app = web.Application()
    app.router.add_route("*", "/{path:.*}", say)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


@pytest.mark.parametrize("answer", ANSWERS)
async def test_an_answer_that_cannot_be_read_is_one_typed_error(answer: bytes) -> None:
    async with liar(answer) as endpoint, aiohttp.ClientSession() as http:
        client = EtcdClient(http, endpoint)
        with pytest.raises(EtcdError):
            await client.grant(5)
        with pytest.raises(EtcdError):
            await client.listing("/p/")
        with pytest.raises(EtcdError):
            await anext(client.watch("/p/", 1))


async def test_a_refusal_and_a_dead_endpoint_are_the_same_error() -> None:
    async with liar(b"no", status=503) as endpoint, aiohttp.ClientSession() as http:
        with pytest.raises(EtcdError, match="503"):
            await EtcdClient(http, endpoint).grant(5)
    async with aiohttp.ClientSession() as http:
        with pytest.raises(EtcdError, match=endpoint):
            await EtcdClient(http, endpoint).listing("/p/")


async def test_a_watch_without_news_has_its_connection_probed() -> None:
    """A host that is gone, or back without knowing of the watch, says nothing: only a probe finds that out."""
    stuck = asyncio.Event()

    async def say_little(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        await response.write(b'{"result": {"events": [{"kv": {"key": "YQ==", "value": ""}}]}}\n')
        await stuck.wait()
        return response

    app = web.Application()
    app.router.add_post("/v3/watch", say_little)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    port = runner.addresses[0][1]
    try:
        async with aiohttp.ClientSession() as http:
            watch = EtcdClient(http, f"http://127.0.0.1:{port}").watch("a", 1)
            assert await anext(watch) == [KeyPut("a", b"")]
            assert probes_to(port) == [PROBE_S]
            await watch.aclose()  # type: ignore[attr-defined]  # an async generator
    finally:
        stuck.set()
        await runner.cleanup()


def probes_to(port: int) -> list[int]:
    """After how many idle seconds each of this process's connections to a port is probed; 0: never."""
    found = []
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            if not os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
                continue
            with socket.socket(fileno=os.dup(int(name))) as one:
                if one.family is socket.AF_INET and one.getpeername()[1] == port:
                    probed = one.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
                    found.append(probed and one.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE))
    return found

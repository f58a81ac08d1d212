"""The side HTTP port: who may read it under which name, and how many may be connected."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import aiohttp
import pytest

from kv_services.launch import PortReservation
from kv_services.side_http import SideHttp

KEY = "operator-" + "k" * 16


@asynccontextmanager
async def serving(*keys: str) -> AsyncIterator[int]:
    with PortReservation() as ports:
        port = ports.take()
        side = SideHttp(
            "127.0.0.1", port, operator_keys=keys, unready=str, metrics=lambda: b"metrics", status=lambda: b"{}"
        )
        await side.start()
        try:
            yield port
        finally:
            await side.close()


async def get(port: int, path: str, host: str, key: str = "") -> int:
    headers = {"Host": host} | ({"Authorization": f"Bearer {key}"} if key else {})
    async with aiohttp.ClientSession(headers=headers) as http, http.get(f"http://127.0.0.1:{port}{path}") as response:
        await response.read()
        return response.status


@pytest.mark.parametrize("path", ["/metrics", "/status"])
@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("127.0.0.1:9000", 200),
        ("localhost", 200),
        ("LOCALHOST.:80", 200),
        ("[::1]:9000", 200),
        ("10.1.2.3:9000", 200),
        ("evil.example", 403),
        ("127.0.0.1.evil.example:9000", 403),
        ("localhost.evil.example", 403),
    ],
)
async def test_without_keys_no_name_of_somebody_else_leads_to_what_a_process_tells(
    path: str, host: str, status: int
) -> None:
    async with serving() as port:
        assert await get(port, path, host) == status
        assert await get(port, "/healthz", host) == 200


async def test_with_keys_any_name_is_answered_who_has_one() -> None:
    async with serving(KEY) as port:
        assert await get(port, "/status", "node.example", KEY) == 200
        assert await get(port, "/status", "node.example") == 401


async def test_whoever_connects_and_says_nothing_keeps_nobody_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kv_services.side_http.CONNECTIONS_MAX", 3)
    async with serving() as port:
        silent = [await asyncio.open_connection("127.0.0.1", port) for _ in range(3)]
        for _ in range(3):
            assert await get(port, "/healthz", "localhost") == 200
        silent += [await asyncio.open_connection("127.0.0.1", port) for _ in range(10)]
        assert await get(port, "/healthz", "localhost") == 200
        assert [await reader.read() for reader, _ in silent[:10]] == [b""] * 10, "the oldest gave way"
        for _, writer in silent:
            writer.close()


async def test_after_closing_nothing_is_listened_on_and_no_connection_stays() -> None:
    async with serving() as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
    assert await reader.read() == b""
    writer.close()
    with pytest.raises(ConnectionRefusedError):
        await asyncio.open_connection("127.0.0.1", port)

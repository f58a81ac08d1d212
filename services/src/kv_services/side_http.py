"""The small HTTP server that every process but a gateway has: /healthz, /metrics, /status, and what operators ask for.

With operator keys in the cluster file, /metrics and /status ask for one; without, they answer only who names this
process by an address or as localhost, so that no web page reads them by a name of its own that leads here. /healthz
says only whether the process can do its work. A path that changes something takes POST, and only with an operator's
key: without any in the cluster file it is refused, on loopback too, since everybody on the machine reaches that.

Open connections have a bound; beyond it whoever is connected for longest gives way, so that those who connect and say
nothing keep nobody out, health checks least of all.
"""

import asyncio
import hashlib
import hmac
import ipaddress
import logging
from collections.abc import Awaitable, Callable, Sequence
from typing import Final

import msgspec
from aiohttp import web

from kv_core.errors import KVError
from kv_services.metrics import CONTENT_TYPE

JSON: Final = "application/json"
BODY_BYTES_MAX: Final = 16 << 20
"""What an operator may send: the longest prompt as a list of tokens, eleven characters each, with room for the rest."""

CONNECTIONS_MAX: Final = 128
"""Monitors, scrapers and operators are few; each asks for a moment."""

COUNT_AFTER_S: Final = 0.05
"""Connections are counted so long after one came: many come in one turn of the loop, and are not there yet in it."""

_log = logging.getLogger(__name__)


class SideHttpBindError(KVError):
    """The address cannot be had."""

    code = 7042
    template = "cannot serve HTTP on {host}:{port}: {cause}"


class SideHttp:
    """One listening address. A supervised child: `start`, `run`, `close`.

    Args:
        pages: further GET paths with their content type and body, for the monitor's page.
        actions: POST paths that change something; each is given the request's body and gives JSON.
    """

    def __init__(
        self,
        host: str,
        port: int,
        *,
        operator_keys: Sequence[str],
        unready: Callable[[], str],
        metrics: Callable[[], bytes],
        status: Callable[[], bytes],
        pages: dict[str, tuple[str, Callable[[], bytes]]] | None = None,
        actions: dict[str, Callable[[bytes], Awaitable[bytes]]] | None = None,
    ) -> None:
        self._host, self._port = host, port
        self._keys = [_digest(key) for key in operator_keys]
        self._unready = unready
        self._runner: web.AppRunner | None = None
        self._server: asyncio.Server | None = None
        self._counting: asyncio.TimerHandle | None = None
        self._closed: asyncio.Event | None = None
        self._app = web.Application(client_max_size=BODY_BYTES_MAX)
        self._app.router.add_get("/healthz", self._healthz)
        guarded = {"/metrics": (CONTENT_TYPE, metrics), "/status": (JSON, status), **(pages or {})}
        for path, (content_type, body) in guarded.items():
            self._app.router.add_get(path, self._page(content_type, body))
        for path, action in (actions or {}).items():
            self._app.router.add_post(path, self._action(path, action))

    async def start(self) -> None:
        """Listen.

        Raises:
            SideHttpBindError: the address cannot be had.
        """
        self._closed = asyncio.Event()
        self._runner = web.AppRunner(self._app, access_log=None, shutdown_timeout=1.0)
        await self._runner.setup()
        loop = asyncio.get_running_loop()
        try:
            self._server = await loop.create_server(
                self._protocol, self._host, self._port, backlog=CONNECTIONS_MAX, reuse_address=True
            )
        except OSError as error:
            cause = error.strerror or str(error)
            raise SideHttpBindError(host=self._host, port=self._port, cause=cause) from error

    async def run(self) -> None:
        assert self._closed is not None
        await self._closed.wait()

    async def close(self) -> None:
        if self._closed is not None:
            self._closed.set()
        server, self._server = self._server, None
        if server is not None:
            server.close()
        if self._counting is not None:
            self._counting.cancel()
        runner, self._runner = self._runner, None
        if runner is not None:
            await runner.cleanup()

    def _protocol(self) -> asyncio.BaseProtocol:
        server = self._runner.server if self._runner is not None else None
        if server is None:
            return asyncio.Protocol()  # it is closing: nothing is answered any more
        if self._counting is None:
            self._counting = asyncio.get_running_loop().call_later(COUNT_AFTER_S, self._make_room)
        return server()

    def _make_room(self) -> None:
        self._counting = None
        server = self._runner.server if self._runner is not None else None
        handlers = server.connections if server is not None else []
        for oldest in handlers[: max(0, len(handlers) - CONNECTIONS_MAX)]:
            oldest.force_close()  # what is answered already is still sent

    async def _healthz(self, request: web.Request) -> web.Response:
        reason = self._unready()
        if reason:
            return web.json_response({"status": "unready", "reason": reason}, status=503)
        return web.json_response({"status": "ok"})

    def _page(self, content_type: str, body: Callable[[], bytes]) -> Callable[[web.Request], Awaitable[web.Response]]:
        async def page(request: web.Request) -> web.Response:
            if not self._keys and not _is_address(request.headers.get("Host", "")):
                error = "without cluster.operator_keys this process answers under its address or as localhost only"
                return web.json_response({"error": error}, status=403)
            if not self._allowed(request.headers.get("Authorization", "")):
                return web.json_response({"error": "this path needs an operator's key"}, status=401)
            return web.Response(body=body(), headers={"Content-Type": content_type})

        return page

    def _action(
        self, path: str, action: Callable[[bytes], Awaitable[bytes]]
    ) -> Callable[[web.Request], Awaitable[web.Response]]:
        async def act(request: web.Request) -> web.Response:
            if not self._keys:
                error = "this path changes something: set cluster.operator_keys in the cluster file to allow it"
                return web.json_response({"error": error}, status=403)
            if not self._allowed(request.headers.get("Authorization", "")):
                _log.warning("refused path=%s from=%s cause=no operator's key", path, request.remote)
                return web.json_response({"error": "this path needs an operator's key"}, status=401)
            try:
                body = await action(await request.read())
            except web.HTTPRequestEntityTooLarge:
                return web.json_response({"error": f"more than {BODY_BYTES_MAX} bytes"}, status=413)
            except msgspec.MsgspecError as error:
                return web.json_response({"error": str(error)}, status=400)
            except KVError as error:
                return web.json_response({"error": str(error)}, status=409)
            _log.info("operator asked for %s", path)
            return web.Response(body=body, headers={"Content-Type": JSON})

        return act

    def _allowed(self, authorization: str) -> bool:
        if not self._keys:
            return True
        scheme, _, key = authorization.partition(" ")
        given, known = _digest(key.strip()), False
        for digest in self._keys:
            known |= hmac.compare_digest(digest, given)
        return known and scheme.lower() == "bearer"


def _is_address(host: str) -> bool:
    """Whether a Host header names an address, or localhost, or nothing: whatever no name server can lead here."""
    name = host.partition("]")[0].strip("[") if host.startswith("[") else host.partition(":")[0]
    if name.lower().rstrip(".") in ("", "localhost"):
        return True
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def _digest(key: str) -> bytes:
    return hashlib.blake2b(key.encode("utf-8", "surrogateescape"), digest_size=32).digest()

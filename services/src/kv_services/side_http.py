"""The small HTTP server that every process but a gateway has: /healthz, /metrics, /status, and what operators ask for.

With operator keys in the cluster file, /metrics and /status ask for one; /healthz says only whether the process can do
its work. A path that changes something takes POST, and only with an operator's key: without any in the cluster file it
is refused, on loopback too, since everybody on the machine reaches that.
"""

import asyncio
import hashlib
import hmac
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
        try:
            await web.TCPSite(self._runner, self._host, self._port).start()
        except OSError as error:
            cause = error.strerror or str(error)
            raise SideHttpBindError(host=self._host, port=self._port, cause=cause) from error

    async def run(self) -> None:
        assert self._closed is not None
        await self._closed.wait()

    async def close(self) -> None:
        if self._closed is not None:
            self._closed.set()
        runner, self._runner = self._runner, None
        if runner is not None:
            await runner.cleanup()

    async def _healthz(self, request: web.Request) -> web.Response:
        reason = self._unready()
        if reason:
            return web.json_response({"status": "unready", "reason": reason}, status=503)
        return web.json_response({"status": "ok"})

    def _page(self, content_type: str, body: Callable[[], bytes]) -> Callable[[web.Request], Awaitable[web.Response]]:
        async def page(request: web.Request) -> web.Response:
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


def _digest(key: str) -> bytes:
    return hashlib.blake2b(key.encode("utf-8", "surrogateescape"), digest_size=32).digest()

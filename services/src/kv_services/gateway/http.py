"""The OpenAI-compatible HTTP front of a gateway: its routes, who may call which, how it starts and stops.

Decides routes and life cycle; bodies and sockets are `http_io`, one request's life is `generation`. Knows nothing of
nodes: a `Completer` turns requests into tokens.

H4: every request that is HTTP gets an answer in OpenAI's form, errors too; a client's fault is never a 5xx.
H6: without credentials nothing but /healthz answers once there are keys; no route but the two POSTs below /v1 changes
    anything.
H8: without keys only this machine is served, and only under a loopback name, so that no web page reaches it by a name
    of its own that leads here.
"""

import asyncio
import logging
import secrets
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Final, TypeAlias, cast

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError

from kv_core.clock import Clock
from kv_core.ids import RequestId
from kv_services.gateway import limits
from kv_services.gateway.admission import SEED_MASK, ServedModel, find_model
from kv_services.gateway.completer import Completer, RequestRecord
from kv_services.gateway.errors import (
    AuthenticationError,
    BindError,
    DrainingError,
    MethodNotAllowedError,
    PermissionDeniedError,
    RouteNotFoundError,
    fault_of,
)
from kv_services.gateway.generation import Generation, GenerationSettings, Parse, as_kv_error
from kv_services.gateway.http_io import JSON_TYPE, REQUEST_ID_HEADER, client_gone, read_json_body, send_whole
from kv_services.gateway.openai_answers import ModelCard, ModelList, encode, error_answer
from kv_services.gateway.openai_schema import CHAT, COMPLETIONS, shorten
from kv_services.gateway.tenancy import ApiKeys, is_loopback
from kv_services.metrics import CONTENT_TYPE as METRICS_TYPE

_log: Final = logging.getLogger(__name__)
_wire_log: Final = logging.getLogger(f"{__name__}.wire")

_CLOSE_GRACE_S: Final = 5.0
_Handler: TypeAlias = Callable[[web.Request, RequestId], Awaitable[web.StreamResponse]]


def _nobody(_: RequestRecord) -> None:
    """Nobody counts."""


def _always_ready() -> str:
    return ""


@dataclass(frozen=True, slots=True, kw_only=True)
class FrontHooks:
    """What the process adds to its front. Each must be quick.

    Attributes:
        metrics: the exposition of /metrics.
        status: the JSON text of /status.
        unready: why this gateway cannot serve now, for /healthz; "" if it can.
        observe: told of every completion request when it is over, refused ones too.
        lookup: answers operators' /prefix/lookup; raises what the client did wrong.
        explain: answers operators' /prefix/explain likewise, with pauses.
    """

    metrics: Callable[[], bytes]
    status: Callable[[], bytes]
    unready: Callable[[], str] = _always_ready
    observe: Callable[[RequestRecord], None] = _nobody
    lookup: Callable[[bytes], bytes] | None = None
    explain: Callable[[bytes], Awaitable[bytes]] | None = None


@dataclass(frozen=True, slots=True)
class FrontStats:
    """A snapshot: connections open, requests open, whether it takes new ones."""

    connections: int
    running: int
    draining: bool


class HttpFront:
    """One listening address of a gateway.

    `async with` starts and closes it. To stop without breaking anything: `await drain(timeout_s)`, then close.

    Args:
        port: 0 takes any free one; see `port` once started.
        draw_id: the unique part of a request's id; default: 96 random bits.
        draw_seed: the seed of a request that names none; default: 63 random bits.
    """

    def __init__(
        self,
        completer: Completer,
        models: Mapping[str, ServedModel],
        keys: ApiKeys,
        settings: GenerationSettings,
        hooks: FrontHooks,
        *,
        host: str,
        port: int,
        clock: Clock,
        draw_id: Callable[[], str] = lambda: secrets.token_hex(12),
        draw_seed: Callable[[], int] = lambda: secrets.randbits(63) & SEED_MASK,
    ) -> None:
        self._models = models
        self._keys = keys
        self._settings = settings
        self._hooks = hooks
        self._host = host
        self._port = port
        self._draw_id = draw_id
        self._generation = Generation(
            completer, models, keys, settings, clock=clock, draw_seed=draw_seed, observe=hooks.observe
        )
        self._runner: web.AppRunner | None = None
        self._server: asyncio.Server | None = None

    @property
    def port(self) -> int:
        """The port that is listened on."""
        return self._port

    async def start(self) -> None:
        """Listen.

        Raises:
            OpenGatewayError: an address outside this machine, and no key is configured.
            BindError: the address cannot be had.
        """
        self._keys.check_bind(self._host)
        runner = web.AppRunner(
            self._application(),
            handler_cancellation=True,
            access_log=None,
            auto_decompress=False,
            keepalive_timeout=limits.IDLE_CONNECTION_S,
            lingering_time=limits.LINGER_S,
            shutdown_timeout=1.0,
            logger=_wire_log,
        )
        await runner.setup()
        self._runner = runner
        loop = asyncio.get_running_loop()
        try:
            self._server = await loop.create_server(self._protocol, self._host, self._port, backlog=1024)
        except OSError as error:
            await self.close()
            raise BindError(host=self._host, port=self._port, reason=error.strerror or str(error)) from error
        self._port = self._server.sockets[0].getsockname()[1]
        _log.info("serving HTTP host=%s port=%d open=%s", self._host, self._port, self._keys.open)

    async def drain(self, timeout_s: float) -> int:
        """Refuse new requests, /healthz says so, and wait for those that run; gives how many still do."""
        return await self._generation.drain(timeout_s)

    async def close(self) -> None:
        """Stop: end what still runs with an error its client sees, close every connection. May be called twice."""
        server, self._server = self._server, None
        if server is not None:
            server.close()
        await self._generation.close(_CLOSE_GRACE_S)
        runner, self._runner = self._runner, None
        if runner is not None:
            await runner.cleanup()
        if server is not None:
            # Every connection was closed above; a loop that lost count of them must not keep the process.
            with suppress(TimeoutError):
                async with asyncio.timeout(_CLOSE_GRACE_S):
                    await server.wait_closed()

    def stats(self) -> FrontStats:
        """What is open now."""
        server = self._runner.server if self._runner is not None else None
        connections = len(server.connections) if server is not None else 0
        return FrontStats(connections, self._generation.running, self._generation.draining)

    async def __aenter__(self) -> "HttpFront":
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    def _application(self) -> web.Application:
        app = web.Application()
        self._add(app, "POST", "/v1/completions", self._generate(COMPLETIONS.parse), "cmpl")
        self._add(app, "POST", "/v1/chat/completions", self._generate(CHAT.parse), "chatcmpl")
        self._add(app, "GET", "/v1/models", self._list_models)
        self._add(app, "GET", "/v1/models/{name:.+}", self._show_model)
        self._add(app, "GET", "/healthz", self._healthz)
        self._add(app, "GET", "/metrics", self._metrics)
        self._add(app, "GET", "/status", self._status)
        if self._hooks.lookup is not None:
            self._add(app, "POST", "/prefix/lookup", self._lookup(self._hooks.lookup))
        if self._hooks.explain is not None:
            self._add(app, "POST", "/prefix/explain", self._explain(self._hooks.explain))
        self._add(app, "", "/{path:.*}", self._no_route)
        return app

    def _add(self, app: web.Application, method: str, path: str, handler: _Handler, prefix: str = "req") -> None:
        """Serve a path: give the request its id, let no error out but in OpenAI's form (H4)."""

        async def guarded(request: web.Request) -> web.StreamResponse:
            request_id = RequestId(f"{prefix}-{self._draw_id()}")
            try:
                self._check_host(request)
                if method and request.method != method and (method, request.method) != ("GET", "HEAD"):
                    raise MethodNotAllowedError(method=shorten(request.method), allowed=method)
                return await handler(request, request_id)
            except Exception as error:
                if client_gone(request):
                    if not isinstance(error, ConnectionError):
                        as_kv_error(error, request_id)  # a bug is logged also when nobody waits
                    # aiohttp finds out by itself when it tries to send this, and says nothing.
                    return web.Response()
                # The one place where a bug in a request becomes that request's answer instead of everybody's end.
                return await self._refuse(request, request_id, error)

        app.router.add_route("*", path, guarded, expect_handler=_expect_later)

    async def _refuse(self, request: web.Request, request_id: RequestId, error: Exception) -> web.StreamResponse:
        failure = as_kv_error(error, request_id)
        fault = fault_of(failure)
        headers: dict[str, str] = {REQUEST_ID_HEADER: request_id}
        if fault.retry_after_s is not None:
            headers["Retry-After"] = str(fault.retry_after_s)
        if isinstance(failure, MethodNotAllowedError):
            headers["Allow"] = str(failure.fields["allowed"])
        if isinstance(failure, AuthenticationError):
            headers["WWW-Authenticate"] = "Bearer"
        return await self._send(request, fault.status, encode(error_answer(failure)), headers)

    async def _send(
        self, request: web.Request, status: int, body: bytes, headers: Mapping[str, str], content_type: str = JSON_TYPE
    ) -> web.StreamResponse:
        return await send_whole(
            request,
            status,
            body,
            headers=headers,
            content_type=content_type,
            stall_timeout_s=self._settings.stall_timeout_s,
        )

    def _generate(self, parse: Parse) -> _Handler:
        async def handler(request: web.Request, request_id: RequestId) -> web.StreamResponse:
            return await self._generation.answer(request, request_id, parse)

        return handler

    async def _list_models(self, request: web.Request, request_id: RequestId) -> web.StreamResponse:
        self._keys.caller(request.headers.get("Authorization"))
        cards = [_card(model) for _, model in sorted(self._models.items())]
        return await self._send(request, 200, encode(ModelList(cards)), {REQUEST_ID_HEADER: request_id})

    async def _show_model(self, request: web.Request, request_id: RequestId) -> web.StreamResponse:
        self._keys.caller(request.headers.get("Authorization"))
        model = find_model(self._models, request.match_info["name"])
        return await self._send(request, 200, encode(_card(model)), {REQUEST_ID_HEADER: request_id})

    async def _healthz(self, request: web.Request, request_id: RequestId) -> web.StreamResponse:
        reason = str(DrainingError()) if self._generation.draining else self._hooks.unready()
        body = encode({"status": "unready", "reason": reason} if reason else {"status": "ok"})
        return await self._send(request, 503 if reason else 200, body, {REQUEST_ID_HEADER: request_id})

    async def _metrics(self, request: web.Request, request_id: RequestId) -> web.StreamResponse:
        self._keys.check_operator(request.headers.get("Authorization"))
        return await self._send(request, 200, self._hooks.metrics(), {REQUEST_ID_HEADER: request_id}, METRICS_TYPE)

    async def _status(self, request: web.Request, request_id: RequestId) -> web.StreamResponse:
        self._keys.check_operator(request.headers.get("Authorization"))
        return await self._send(request, 200, self._hooks.status(), {REQUEST_ID_HEADER: request_id})

    def _lookup(self, answer: Callable[[bytes], bytes]) -> _Handler:
        async def handler(request: web.Request, request_id: RequestId) -> web.StreamResponse:
            self._keys.check_operator(request.headers.get("Authorization"))
            body = await read_json_body(request, timeout_s=self._settings.body_timeout_s)
            return await self._send(request, 200, answer(body), {REQUEST_ID_HEADER: request_id})

        return handler

    def _explain(self, answer: Callable[[bytes], Awaitable[bytes]]) -> _Handler:
        async def handler(request: web.Request, request_id: RequestId) -> web.StreamResponse:
            self._keys.check_operator(request.headers.get("Authorization"))
            body = await read_json_body(request, timeout_s=self._settings.body_timeout_s)
            return await self._send(request, 200, await answer(body), {REQUEST_ID_HEADER: request_id})

        return handler

    async def _no_route(self, request: web.Request, request_id: RequestId) -> web.StreamResponse:
        raise RouteNotFoundError(path=shorten(request.path))

    def _check_host(self, request: web.Request) -> None:
        host = request.headers.get("Host")
        if self._keys.open and host is not None and not is_loopback(_without_port(host)):
            raise PermissionDeniedError(detail="without API keys this gateway answers under loopback names only")

    def _protocol(self) -> asyncio.BaseProtocol:
        server = self._runner.server if self._runner is not None else None
        if server is None or len(server.connections) >= limits.MAX_CONNECTIONS:
            return _FullProtocol()
        return server()


_FULL: Final = b"HTTP/1.1 503 Service Unavailable\r\nRetry-After: 1\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"


class _FullProtocol(asyncio.Protocol):
    """Tells one connection too many so, and closes it."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transports have the methods of `asyncio.Transport` and not its type.
        stream = cast(asyncio.Transport, transport)
        stream.write(_FULL)
        stream.close()


class _PeerFaultsAreNoErrors(logging.Filter):
    """What is no HTTP at all is the peer's fault: one line, no traceback, no alarm."""

    def filter(self, record: logging.LogRecord) -> bool:
        if record.exc_info and isinstance(record.exc_info[1], HttpProcessingError):
            record.msg, record.args = f"{record.getMessage()}: {type(record.exc_info[1]).__name__}", ()
            record.exc_info, record.exc_text = None, None
            record.levelno, record.levelname = logging.DEBUG, "DEBUG"
            return _wire_log.isEnabledFor(logging.DEBUG)
        return True


_wire_log.addFilter(_PeerFaultsAreNoErrors())


async def _expect_later(_: web.Request) -> None:
    """A body is asked for when it will be read, not before the caller is known (`http_io`)."""


def _card(model: ServedModel) -> ModelCard:
    return ModelCard(model.name, model.created_s)


def _without_port(host: str) -> str:
    if host.startswith("["):
        return host.partition("]")[0] + "]"
    return host.partition(":")[0]

"""The client's side of a connection: reads a body within its bounds, writes answers no faster than they are read.

Decides sizes and times only; every failure is a typed error or the `ConnectionError` of a client that has gone.

H1: no more than `MAX_BODY_BYTES` of a body is held, whatever its headers say.
H2: a client that reads nothing for the stall limit loses its connection; what waits for it is bounded meanwhile.
H3: whoever was told a Content-Length that is too large, or who sends another type, is refused before the body is read.
"""

import asyncio
from collections.abc import Mapping
from typing import Final

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError
from aiohttp.web_protocol import RequestPayloadError

from kv_services.gateway.errors import (
    BodyTimeoutError,
    BodyTooLargeError,
    ClientStalledError,
    InvalidRequestError,
    MediaTypeError,
)
from kv_services.gateway.limits import MAX_BODY_BYTES, WRITE_PIECE_BYTES

JSON_TYPE: Final = "application/json"
REQUEST_ID_HEADER: Final = "X-Request-Id"
_CONTINUE: Final = b"HTTP/1.1 100 Continue\r\n\r\n"


async def read_json_body(request: web.BaseRequest, *, timeout_s: float) -> bytes:
    """The whole body of a request that says it is JSON.

    Raises:
        MediaTypeError: another type, charset or encoding. Requiring the type also keeps web pages of other origins
            from posting here: their browser asks first, and is not answered.
        BodyTooLargeError, BodyTimeoutError: over the limits.
        InvalidRequestError: the body broke off or is no valid chunked encoding.
    """
    _check_media_type(request)
    if (request.content_length or 0) > MAX_BODY_BYTES:
        raise BodyTooLargeError(limit=MAX_BODY_BYTES)
    if "Expect" in request.headers:
        await _answer_expectation(request)
    parts: list[bytes] = []
    size = 0
    try:
        async with asyncio.timeout(timeout_s):
            while part := await request.content.readany():
                size += len(part)
                if size > MAX_BODY_BYTES:
                    raise BodyTooLargeError(limit=MAX_BODY_BYTES)
                parts.append(part)
    except TimeoutError:
        raise BodyTimeoutError(timeout_s=timeout_s) from None
    except (HttpProcessingError, RequestPayloadError) as error:
        raise InvalidRequestError(param="", detail=f"the body is broken: {type(error).__name__}") from error
    return b"".join(parts)


class _StreamedResponse(web.StreamResponse):
    """Its head leaves together with the first bytes of its body."""

    _send_headers_immediately = False


class SseSink:
    """A response of server-sent events.

    Args:
        headers: sent with the head.
        stall_timeout_s: H2.
    """

    def __init__(self, request: web.BaseRequest, headers: Mapping[str, str], *, stall_timeout_s: float) -> None:
        self._request = request
        self._stall_timeout_s = stall_timeout_s
        self.opened = False
        self.response = _StreamedResponse(
            headers={
                "Content-Type": "text/event-stream; charset=utf-8",
                "Cache-Control": "no-cache",
                # A proxy that collects chunks would make a stream into a wait.
                "X-Accel-Buffering": "no",
                **headers,
            }
        )

    async def open(self) -> None:
        """Begin: the head leaves with the first event."""
        self.opened = True
        await self.response.prepare(self._request)

    async def send(self, data: bytes) -> None:
        """Send one event; waits while the client has too much unread.

        Raises:
            ClientStalledError: it read nothing for the stall limit; the connection is gone.
            ConnectionError: the client has gone.
        """
        await _write(self._request, self.response, data, self._stall_timeout_s)

    async def close(self) -> None:
        """Send the end."""
        await _finish(self._request, self.response, self._stall_timeout_s)


async def send_whole(
    request: web.BaseRequest,
    status: int,
    body: bytes,
    *,
    headers: Mapping[str, str],
    content_type: str = JSON_TYPE,
    stall_timeout_s: float,
) -> web.StreamResponse:
    """Send a whole answer in pieces, each under the stall limit.

    Raises:
        ClientStalledError, ConnectionError: as `SseSink.send`.
    """
    response = web.StreamResponse(status=status, headers={"Content-Type": content_type, **headers})
    response.content_length = len(body)
    await response.prepare(request)
    if request.method != "HEAD":
        for start in range(0, len(body), WRITE_PIECE_BYTES):
            await _write(request, response, body[start : start + WRITE_PIECE_BYTES], stall_timeout_s)
    await _finish(request, response, stall_timeout_s)
    return response


async def _write(request: web.BaseRequest, response: web.StreamResponse, data: bytes, stall_timeout_s: float) -> None:
    try:
        async with asyncio.timeout(stall_timeout_s):
            await response.write(data)
    except TimeoutError:
        raise _drop(request, stall_timeout_s) from None


async def _finish(request: web.BaseRequest, response: web.StreamResponse, stall_timeout_s: float) -> None:
    try:
        async with asyncio.timeout(stall_timeout_s):
            await response.write_eof()
    except TimeoutError:
        raise _drop(request, stall_timeout_s) from None


def _drop(request: web.BaseRequest, stall_timeout_s: float) -> ClientStalledError:
    # Closing would wait for the client to take what it does not take.
    if request.transport is not None:
        request.transport.abort()
    return ClientStalledError(timeout_s=stall_timeout_s)


def client_gone(request: web.BaseRequest) -> bool:
    """Whether nobody is there to be answered. A `ConnectionError` while somebody is there is not the client's."""
    return request.transport is None or request.transport.is_closing()


def _check_media_type(request: web.BaseRequest) -> None:
    encoding = request.headers.get("Content-Encoding", "identity").lower()
    if encoding != "identity":
        raise MediaTypeError(detail="a compressed body is not accepted: send it without Content-Encoding")
    if request.content_type != JSON_TYPE or (request.charset or "utf-8").lower() not in ("utf-8", "utf8"):
        raise MediaTypeError(detail=f"the body must be {JSON_TYPE} in UTF-8: send 'Content-Type: {JSON_TYPE}'")


async def _answer_expectation(request: web.BaseRequest) -> None:
    if request.headers["Expect"].lower() != "100-continue":
        raise InvalidRequestError(param="", detail="the only expectation met is 'Expect: 100-continue'")
    if request.version >= (1, 1):
        await request.writer.write(_CONTINUE)
        # The status line of the answer itself must still follow.
        request.writer.output_size = 0

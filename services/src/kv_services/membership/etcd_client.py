"""The few calls of etcd's v3 API that discovery needs, through etcd's own JSON gateway.

Knows keys, leases and revisions, nothing of nodes. Every call has a deadline and a bound on what it reads; whatever
goes wrong is one `EtcdError` that names the endpoint.

Source: etcd's "gRPC gateway" page of its developer guide; the paths are those of etcd 3.4 and later (`/v3/...`).
64-bit numbers travel as strings, keys and values as base64.
"""

import base64
import socket
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any, Final

import aiohttp
import msgspec

from kv_core.errors import RetryableError

CALL_TIMEOUT_S: Final = 2.0
ANSWER_BYTES_MAX: Final = 16 << 20
"""A listing of 10,000 nodes takes 5 MiB."""
LINE_BYTES_MAX: Final = 1 << 20
KEYS_MAX: Final = 10_000
PROBE_S: Final = 5
"""A watch without news is probed so often; three probes without an answer end it."""


class EtcdError(RetryableError):
    """etcd cannot be reached, refuses, or answers what cannot be read."""

    code = 7051
    template = "etcd at {endpoint}: {cause}"


@dataclass(frozen=True, slots=True)
class KeyPut:
    """A key was written."""

    key: str
    value: bytes


@dataclass(frozen=True, slots=True)
class KeyDeleted:
    """A key was deleted, or its lease ended."""

    key: str


KeyEvent = KeyPut | KeyDeleted


class EtcdClient:
    """One endpoint of an etcd cluster.

    Args:
        session: whose connections are used; its owner closes it.
        endpoint: `http://HOST:PORT` or `https://HOST:PORT`.
    """

    def __init__(self, session: aiohttp.ClientSession, endpoint: str) -> None:
        self._session = session
        self.endpoint = endpoint.rstrip("/")

    async def grant(self, ttl_s: int) -> str:
        """A new lease that ends `ttl_s` seconds after its last renewal.

        Raises:
            EtcdError: as for every call.
        """
        answer = await self._call("/v3/lease/grant", {"TTL": str(ttl_s)})
        return _text(answer, "ID", self.endpoint)

    async def renew(self, lease: str) -> bool:
        """Renew a lease; False when it has ended."""
        answer = await self._call("/v3/lease/keepalive", {"ID": lease})
        result = answer.get("result")
        if not isinstance(result, dict):
            raise EtcdError(endpoint=self.endpoint, cause="a renewal without result")
        return int(result.get("TTL", "0")) > 0

    async def revoke(self, lease: str) -> None:
        """End a lease, and with it every key under it."""
        await self._call("/v3/lease/revoke", {"ID": lease})

    async def put(self, key: str, value: bytes, lease: str) -> None:
        """Write a key that ends with the lease."""
        await self._call("/v3/kv/put", {"key": _b64(key.encode()), "value": _b64(value), "lease": lease})

    async def listing(self, prefix: str) -> tuple[dict[str, bytes], int]:
        """All keys below `prefix` with their values, and the revision at which that was so."""
        ask = {"key": _b64(prefix.encode()), "range_end": _b64(_after(prefix)), "limit": str(KEYS_MAX + 1)}
        answer = await self._call("/v3/kv/range", ask)
        pairs = answer.get("kvs", [])
        if not isinstance(pairs, list) or len(pairs) > KEYS_MAX:
            raise EtcdError(endpoint=self.endpoint, cause=f"more than {KEYS_MAX} keys below {prefix}")
        try:
            found = {_key(pair): base64.b64decode(pair.get("value", ""), validate=True) for pair in pairs}
            return found, int(answer["header"]["revision"])
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise EtcdError(endpoint=self.endpoint, cause=f"a listing that cannot be read: {error!r}") from None

    async def watch(self, prefix: str, revision: int) -> AsyncIterator[list[KeyEvent]]:
        """What happens below `prefix` from `revision` on, until the connection ends.

        Raises:
            EtcdError: it ended, or that revision was compacted away: list again.
        """
        create = {"key": _b64(prefix.encode()), "range_end": _b64(_after(prefix)), "start_revision": str(revision)}
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=CALL_TIMEOUT_S)
        try:
            async with self._session.post(
                f"{self.endpoint}/v3/watch",
                data=msgspec.json.encode({"create_request": create}),
                timeout=timeout,
                read_bufsize=LINE_BYTES_MAX,
            ) as response:
                if response.status != 200:
                    raise EtcdError(endpoint=self.endpoint, cause=f"a watch is answered {response.status}")
                _probe(response)
                while line := await response.content.readline():
                    yield self._events(line)
        except (aiohttp.ClientError, TimeoutError, OSError, ValueError) as error:
            raise EtcdError(endpoint=self.endpoint, cause=_reason(error)) from error
        raise EtcdError(endpoint=self.endpoint, cause="the watch ended")

    def _events(self, line: bytes) -> list[KeyEvent]:
        try:
            message = msgspec.json.decode(line)
            result = message["result"]
            if result.get("canceled"):
                reason = result.get("cancel_reason") or f"compacted at {result.get('compact_revision')}"
                raise EtcdError(endpoint=self.endpoint, cause=f"the watch was cancelled: {reason}")
            events: list[KeyEvent] = []
            for event in result.get("events", []):
                key = _key(event["kv"])
                if event.get("type") == "DELETE":
                    events.append(KeyDeleted(key))
                else:
                    events.append(KeyPut(key, base64.b64decode(event["kv"].get("value", ""), validate=True)))
            return events
        except (KeyError, TypeError, ValueError, AttributeError, msgspec.DecodeError) as error:
            raise EtcdError(endpoint=self.endpoint, cause=f"an event that cannot be read: {error!r}") from None

    async def _call(self, path: str, body: dict[str, str]) -> dict[str, Any]:
        timeout = aiohttp.ClientTimeout(total=CALL_TIMEOUT_S)
        try:
            async with self._session.post(
                f"{self.endpoint}{path}", data=msgspec.json.encode(body), timeout=timeout
            ) as response:
                raw = bytearray()
                async for piece in response.content.iter_chunked(1 << 16):
                    raw += piece
                    if len(raw) > ANSWER_BYTES_MAX:
                        raise EtcdError(endpoint=self.endpoint, cause=f"an answer of more than {ANSWER_BYTES_MAX} B")
                if response.status != 200:
                    said = bytes(raw[:200]).decode(errors="replace")
                    raise EtcdError(endpoint=self.endpoint, cause=f"{path} is answered {response.status}: {said}")
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise EtcdError(endpoint=self.endpoint, cause=_reason(error)) from error
        try:
            answer = msgspec.json.decode(bytes(raw))
        except msgspec.DecodeError as error:
            raise EtcdError(endpoint=self.endpoint, cause=f"{path} answers no JSON: {error}") from None
        if not isinstance(answer, dict):
            raise EtcdError(endpoint=self.endpoint, cause=f"{path} answers no object")
        return answer


def _probe(response: aiohttp.ClientResponse) -> None:
    """Have the kernel find out when the other host is gone: over this connection only that side speaks."""
    transport = response.connection.transport if response.connection is not None else None
    sock = transport.get_extra_info("socket") if transport is not None else None
    if sock is not None:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, value in ((socket.TCP_KEEPIDLE, PROBE_S), (socket.TCP_KEEPINTVL, PROBE_S), (socket.TCP_KEEPCNT, 3)):
            sock.setsockopt(socket.IPPROTO_TCP, option, value)


def _text(answer: dict[str, Any], name: str, endpoint: str) -> str:
    value = answer.get(name)
    if not isinstance(value, str) or not value:
        raise EtcdError(endpoint=endpoint, cause=f"an answer without {name}")
    return value


def _key(pair: dict[str, str]) -> str:
    return base64.b64decode(pair["key"], validate=True).decode()


def _b64(raw: bytes) -> str:
    return base64.b64encode(raw).decode("ascii")


def _after(prefix: str) -> bytes:
    """The first key that no longer begins with `prefix`, whose last character is no 0xff."""
    raw = prefix.encode()
    return raw[:-1] + bytes((raw[-1] + 1,))


def _reason(error: BaseException) -> str:
    return str(error) or type(error).__name__

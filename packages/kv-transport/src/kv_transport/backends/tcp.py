"""`tcp`: any network, several streams per peer, authenticated sessions.

The listener binds the address it was given, loopback by default. Connections are made without blocking anybody and
prove whose they are before a byte of theirs is believed; then each stream is served by an IO thread. With TLS
configured (`tls`) nothing is spoken without it.
"""

import asyncio
import contextlib
import ipaddress
import logging
import secrets
import socket
from functools import partial
from typing import Final, NamedTuple

from kv_core.errors import KVError
from kv_transport import limits
from kv_transport.auth import NONCE_BYTES, Hello, SessionKeys
from kv_transport.backends.accepting import Acceptor
from kv_transport.backends.base import Backend, Link, LinkOwner, Surroundings
from kv_transport.backends.handshaking import HandshakeIO, shake_as_initiator, shake_as_owner
from kv_transport.backends.io_thread import IoThread
from kv_transport.backends.stream import Stream
from kv_transport.backends.tcp_link import TcpLink
from kv_transport.backends.tcp_session import TcpSession
from kv_transport.backends.tls import TlsLayer
from kv_transport.errors import BackendUnavailable, ConnectionLost, TransferTimeout
from kv_transport.tickets import AgentMetadata
from kv_transport.types import PeerName
from kv_transport.units import NonceSource

_log = logging.getLogger(__name__)
_BACKLOG: Final = 128
_TLS: Final = "tls+"
_UNPACED: Final = b"reno"


class TcpBackend(Backend):
    """See the module."""

    scheme = "tcp"

    def __init__(self, around: Surroundings, host: str, port: int) -> None:
        self._around = around
        self._host = host
        self._port = port
        self._listener: socket.socket | None = None
        self._acceptor: Acceptor | None = None
        self._threads: list[IoThread] = []
        self._next_thread = 0
        self._sessions: dict[tuple[PeerName, bytes], TcpSession] = {}
        self._tls: TlsLayer | None = None

    async def start(self) -> None:
        if self._around.config.tls is not None:
            self._tls = TlsLayer(self._around.config.tls)
        where = f"{self._host}:{self._port}"
        try:
            found = await self._around.loop.getaddrinfo(self._host, self._port, type=socket.SOCK_STREAM)
            family, _, _, _, address = found[0]
            listener = socket.socket(family, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
            try:
                listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                listener.bind(address)
                listener.listen(_BACKLOG)
            except OSError:
                listener.close()
                raise
        except OSError as error:
            raise BackendUnavailable(scheme="tcp", reason=f"{where}: {error}") from error
        self._listener = listener
        name = f"kv-io-{self._around.me.node}"
        self._threads = [IoThread(f"{name}-{index}") for index in range(self._around.config.io_threads)]
        self._acceptor = Acceptor(listener, self._around.loop, "tcp", self._shake)

    def address(self) -> bytes | None:
        if self._listener is None:
            return None
        host, port = self._listener.getsockname()[:2]
        where = f"{host}:{port}"
        return (where if self._tls is None else f"{_TLS}{self._tls.fingerprint}@{where}").encode()

    def state(self) -> str:
        return "ready" if self._tls is None else "ready, with TLS"

    def reaches(self, peer: AgentMetadata) -> str | None:
        address = _address(peer)
        if address is None:
            return "the peer offers no tcp address"
        if self._tls is not None and not address.fingerprint:
            return "TLS is required here, and the peer has none"
        if self._tls is None and address.fingerprint:
            return "the peer requires TLS, which is not configured here"
        return None if self._threads else "tcp is not started here"

    async def connect(self, peer: AgentMetadata, nonces: NonceSource, owner: LinkOwner) -> Link:
        address = _address(peer)
        assert address is not None
        streams = self._around.config.tcp_streams
        link_id = secrets.token_bytes(NONCE_BYTES)
        timeout_ms = self._around.config.connect_timeout_ms
        link = TcpLink(self._around, peer, nonces, owner)
        opened: list[tuple[socket.socket, SessionKeys]] = []
        try:
            async with asyncio.timeout(timeout_ms / 1000):
                while len(opened) < streams:
                    opened.append(await self._open(peer, address, link_id, len(opened), streams))
        except BaseException as error:
            for sock, _ in opened:
                sock.close()
            if isinstance(error, TimeoutError):
                raise TransferTimeout(
                    what="connecting", request=f"{peer.name} over tcp", timeout_ms=timeout_ms, missing_layers=[]
                ) from None
            raise
        for sock, keys in opened:
            link.attach(Stream(sock, self._thread(), keys.to_owner, keys.to_initiator, link))
        link.start()
        return link

    async def _open(
        self, peer: AgentMetadata, address: "_Address", link_id: bytes, index: int, streams: int
    ) -> tuple[socket.socket, SessionKeys]:
        family = socket.AF_INET6 if ":" in address.host else socket.AF_INET
        sock = socket.socket(family, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        try:
            self._tune(sock)
            await self._around.loop.sock_connect(sock, (address.host, address.port))
            _stop_pacing(sock)
            if self._tls is not None:
                sock = await self._tls.connect(sock, address.fingerprint)
            wire = HandshakeIO(sock, self._around.loop, packets=False)
            keys = await shake_as_initiator(wire, self._around, peer, "tcp", link_id, index, streams)
        except OSError as error:
            sock.close()
            raise ConnectionLost(peer=str(peer.name), transport="tcp", cause=str(error)) from error
        except BaseException:
            sock.close()
            raise
        return sock, keys

    def sessions(self) -> list[tuple[PeerName, str]]:
        return [
            (session.peer, f"{session.status()}, {session.num_streams} streams") for session in self._sessions.values()
        ]

    async def close(self) -> None:
        self._listener = None
        if self._acceptor is not None:
            await self._acceptor.close()
        for session in list(self._sessions.values()):
            session.close()
        threads, self._threads = self._threads, []
        for thread in threads:
            # Their sockets are closed by calls that are in their queues: nothing blocks in there.
            thread.close()
        if self._tls is not None:
            await asyncio.to_thread(self._tls.close)

    def _thread(self) -> IoThread:
        self._next_thread += 1
        return self._threads[self._next_thread % len(self._threads)]

    def _tune(self, sock: socket.socket) -> None:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        # A host that vanishes leaves bytes unacknowledged: the kernel then ends the connection in our time, not its.
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, self._around.config.silence_timeout_ms)
        # Of a connection on which nothing is sent nobody would hear that the other host is gone.
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, limits.KEEPALIVE_IDLE_S)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, limits.KEEPALIVE_INTERVAL_S)

    async def _shake(self, sock: socket.socket) -> None:
        try:
            self._tune(sock)
            _stop_pacing(sock)
            async with asyncio.timeout(self._around.config.connect_timeout_ms / 1000):
                if self._tls is not None:
                    sock = await self._tls.accept(sock)
                wire = HandshakeIO(sock, self._around.loop, packets=False)
                hello, keys = await shake_as_owner(wire, self._around)
        except (KVError, OSError, TimeoutError) as error:
            _log.warning("connection refused transport=tcp cause=%s", error)
            sock.close()
            return
        except BaseException:
            sock.close()
            raise
        session = self._session(hello)
        if session is None:
            sock.close()
            return
        session.attach(Stream(sock, self._thread(), keys.to_initiator, keys.to_owner, session))

    def _session(self, hello: Hello) -> TcpSession | None:
        """The connection that a stream belongs to; the link id in its authenticated hello says which."""
        key = (hello.name, hello.link)
        session = self._sessions.get(key)
        if session is not None:
            return session if session.num_streams < hello.streams else None
        of_peer = sum(session.peer.node == hello.name.node for session in self._sessions.values())
        if of_peer >= limits.SESSIONS_PER_PEER_MAX or not self._threads:
            _log.warning("connection refused transport=tcp peer=%s cause=%d sessions", hello.name, of_peer)
            return None
        session = TcpSession(self._around, hello.name, partial(self._forget, key))
        self._sessions[key] = session
        return session

    def _forget(self, key: tuple[PeerName, bytes]) -> None:
        self._sessions.pop(key, None)


def on_one_host(ours: str, theirs: str) -> bool:
    """Whether the ends of a connection, by their addresses, are on the same host."""
    return ours == theirs or ipaddress.ip_address(theirs).is_loopback


def _stop_pacing(sock: socket.socket) -> None:
    """A host may have chosen an algorithm that spreads its packets over time (BBR), against queues in the network.
    Between two processes of one host there is none, and the pauses cost half of the rate. Reno makes no pauses, and
    every kernel has it for everybody.
    """
    if on_one_host(sock.getsockname()[0], sock.getpeername()[0]):
        with contextlib.suppress(OSError):  # it may be forbidden all the same: then it is slower
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, _UNPACED)


class _Address(NamedTuple):
    host: str
    port: int
    fingerprint: str
    """SHA-256 of its certificate; empty without TLS."""


def _address(peer: AgentMetadata) -> _Address | None:
    found = next((item.address for item in peer.addresses if item.scheme == "tcp"), None)
    if found is None:
        return None
    text, fingerprint = found.decode(errors="replace"), ""
    if text.startswith(_TLS):
        fingerprint, _, text = text.removeprefix(_TLS).partition("@")
        if not fingerprint:
            return None
    host, _, port = text.rpartition(":")
    return _Address(host, int(port), fingerprint) if host and port.isdigit() and int(port) < 65536 else None

"""Runs the handshake of `auth` over a connected socket, on the event loop, in bounded time and memory."""

import asyncio
import secrets
import socket

from kv_core.errors import KVError
from kv_transport import limits
from kv_transport.auth import NONCE_BYTES, ClientHandshake, Hello, ServerHandshake, SessionKeys
from kv_transport.backends.base import Surroundings
from kv_transport.errors import AuthenticationFailed, ConnectionLost
from kv_transport.tickets import AgentMetadata


class HandshakeIO:
    """Frames of at most `HANDSHAKE_BYTES_MAX` over a non-blocking socket: as packets, or with a length in front."""

    def __init__(self, sock: socket.socket, loop: asyncio.AbstractEventLoop, *, packets: bool) -> None:
        self._sock = sock
        self._loop = loop
        self._packets = packets

    async def send(self, data: bytes) -> None:
        await self._loop.sock_sendall(self._sock, data if self._packets else len(data).to_bytes(2, "big") + data)

    async def receive(self) -> bytes:
        """Never reads beyond the frame: what follows belongs to the session."""
        if self._packets:
            data = await self._loop.sock_recv(self._sock, limits.HANDSHAKE_BYTES_MAX + 1)
            if not data or len(data) > limits.HANDSHAKE_BYTES_MAX:
                raise AuthenticationFailed(reason="connection closed, or handshake frame too long")
            return data
        size = int.from_bytes(await self._exactly(2), "big")
        if not 1 <= size <= limits.HANDSHAKE_BYTES_MAX:
            raise AuthenticationFailed(reason=f"handshake frame of {size} bytes")
        return await self._exactly(size)

    async def _exactly(self, size: int) -> bytes:
        data = b""
        while len(data) < size:
            piece = await self._loop.sock_recv(self._sock, size - len(data))
            if not piece:
                raise AuthenticationFailed(reason="connection closed during the handshake")
            data += piece
        return data


async def shake_as_initiator(
    wire: HandshakeIO,
    around: Surroundings,
    peer: AgentMetadata,
    scheme: str,
    link: bytes,
    stream: int = 0,
    streams: int = 1,
) -> SessionKeys:
    """Prove both sides.

    Raises:
        AuthenticationFailed, StaleIncarnation: one of them is not who it should be.
        ConnectionLost: the connection broke.
    """
    nonce = secrets.token_bytes(NONCE_BYTES)
    handshake = ClientHandshake(around.me, peer.name, peer.session_key, nonce, link, stream, streams)
    try:
        await wire.send(handshake.hello())
        await wire.send(handshake.challenged(await wire.receive()))
        return handshake.welcomed(await wire.receive())
    except OSError as error:
        raise ConnectionLost(peer=str(peer.name), transport=scheme, cause=str(error)) from error


async def shake_as_owner(wire: HandshakeIO, around: Surroundings) -> tuple[Hello, SessionKeys]:
    """Let a peer prove itself; one that cannot is told why, and the error is raised here, too.

    Raises:
        AuthenticationFailed, StaleIncarnation, OSError.
    """
    handshake = ServerHandshake(around.me, around.secret, secrets.token_bytes(NONCE_BYTES))
    try:
        await wire.send(handshake.answer(await wire.receive()))
        keys = handshake.verify(await wire.receive())
    except KVError as error:
        await wire.send(handshake.deny(error))
        raise
    await wire.send(handshake.welcome())
    assert handshake.hello is not None
    return handshake.hello, keys

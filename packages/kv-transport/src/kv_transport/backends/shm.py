"""`shm`: two processes of one user on one host.

The initiator maps the owner's memfd, which the owner hands over by SCM_RIGHTS on a unix socket, and copies bytes
itself, in worker threads or, when they are few, at once. The same socket is the doorbell: for a write the frame that
carries the unit's header is sent when the bytes are in place; a read needs no frame at all.

The socket lives in a folder of mode 0700 and the peer's user id is checked besides: processes of one user id trust
each other, since who maps an arena for writing can write all of it.
"""

import asyncio
import hashlib
import logging
import os
import secrets
import socket
import stat
import struct
from functools import partial
from pathlib import Path
from typing import Final
from weakref import WeakValueDictionary

from kv_core.errors import KVError
from kv_transport import limits
from kv_transport.auth import NONCE_BYTES
from kv_transport.backends.accepting import Acceptor
from kv_transport.backends.base import Backend, Link, LinkOwner, Surroundings
from kv_transport.backends.bell import Bell
from kv_transport.backends.handshaking import HandshakeIO, shake_as_initiator, shake_as_owner
from kv_transport.backends.shm_link import ShmLink
from kv_transport.backends.shm_session import ShmSession
from kv_transport.errors import BackendUnavailable, ConnectionLost, TransferTimeout
from kv_transport.tickets import AgentMetadata
from kv_transport.types import PeerName
from kv_transport.units import NonceSource
from kv_transport.workers import WorkerPool

_log = logging.getLogger(__name__)
_UCRED: Final = struct.Struct("3i")
_SUN_PATH_MAX: Final = 107
_BACKLOG: Final = 128
_CONNECT_RETRY_S: Final = 0.005


class ShmBackend(Backend):
    """See the module."""

    scheme = "shm"

    def __init__(self, around: Surroundings, folder: Path, host_id: bytes) -> None:
        self._around = around
        self._folder = folder
        self._host_id = host_id
        self._path = folder / f"{_stem(around.me.node)}.{around.me.incarnation:x}.sock"
        self._acceptor: Acceptor | None = None
        self._workers: WorkerPool | None = None
        self._sessions: dict[int, ShmSession] = {}
        self._bells: WeakValueDictionary[PeerName, Bell] = WeakValueDictionary()
        self._serial = 0

    async def start(self) -> None:
        path = str(self._path)
        if len(os.fsencode(path)) > _SUN_PATH_MAX:
            raise BackendUnavailable(scheme="shm", reason=f"socket path {path} is longer than {_SUN_PATH_MAX} bytes")
        try:
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._check_folder()
            self._remove_leftovers()
            listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK)
            try:
                listener.bind(path)
                listener.listen(_BACKLOG)
            except OSError:
                listener.close()
                raise
        except OSError as error:
            raise BackendUnavailable(scheme="shm", reason=f"{path}: {error}") from error
        self._workers = WorkerPool(f"kv-copy-{self._around.me.node}", self._around.config.copy_threads)
        self._acceptor = Acceptor(listener, self._around.loop, "shm", self._shake)

    def address(self) -> bytes | None:
        return os.fsencode(self._path) if self._acceptor is not None else None

    def reaches(self, peer: AgentMetadata) -> str | None:
        address = _address(peer)
        if address is None:
            return "the peer offers no unix socket"
        if peer.host_id != self._host_id:
            return "the peer is on another host"
        if self._acceptor is None:
            return "shm is not started here"
        try:
            return None if stat.S_ISSOCK(os.stat(address).st_mode) else f"{address!r} is not a socket"
        except OSError as error:
            return f"{os.fsdecode(address)}: {error.strerror}"

    async def connect(self, peer: AgentMetadata, nonces: NonceSource, owner: LinkOwner) -> Link:
        address = _address(peer)
        assert address is not None and self._workers is not None
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK)
        timeout_ms = self._around.config.connect_timeout_ms
        try:
            async with asyncio.timeout(timeout_ms / 1000):
                await _connect(sock, address)
                wire = HandshakeIO(sock, self._around.loop, packets=True)
                await shake_as_initiator(wire, self._around, peer, "shm", secrets.token_bytes(NONCE_BYTES))
        except TimeoutError:
            sock.close()
            raise TransferTimeout(
                what="connecting", request=f"{peer.name} over shm", timeout_ms=timeout_ms, missing_layers=[]
            ) from None
        except OSError as error:
            sock.close()
            raise ConnectionLost(peer=str(peer.name), transport="shm", cause=str(error)) from error
        except BaseException:
            sock.close()
            raise
        return ShmLink(self._around, peer, nonces, owner, sock, self._workers, self._bell(peer.name))

    def sessions(self) -> list[tuple[PeerName, str]]:
        return [(session.peer, session.status()) for session in self._sessions.values()]

    async def close(self) -> None:
        acceptor, self._acceptor = self._acceptor, None
        if acceptor is not None:
            acceptor.stop_listening()
            self._path.unlink(missing_ok=True)
            await acceptor.close()
        for session in list(self._sessions.values()):
            session.close()
        workers, self._workers = self._workers, None
        if workers is not None:
            # Jobs at hand end within a piece: their links are closed and told them to stop.
            workers.close()

    def _check_folder(self) -> None:
        status = self._folder.stat()
        if status.st_uid != os.getuid() or status.st_mode & 0o077:
            raise BackendUnavailable(
                scheme="shm", reason=f"folder {self._folder} must belong to user {os.getuid()} and have mode 0700"
            )

    def _remove_leftovers(self) -> None:
        """Sockets of former lives of this node that were killed: nobody listens there."""
        for path in self._folder.glob(f"{_stem(self._around.me.node)}.*.sock"):
            probe = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK)
            try:
                probe.connect(str(path))
            except ConnectionRefusedError:
                path.unlink(missing_ok=True)
            except OSError:
                pass  # busy, or gone: not ours to judge
            finally:
                probe.close()

    async def _shake(self, sock: socket.socket) -> None:
        try:
            pid, uid, _ = _UCRED.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size))
            if uid != os.getuid():
                _log.warning("connection refused transport=shm cause=user %d is not %d", uid, os.getuid())
                sock.close()
                return
            async with asyncio.timeout(self._around.config.connect_timeout_ms / 1000):
                hello, _ = await shake_as_owner(HandshakeIO(sock, self._around.loop, packets=True), self._around)
        except (KVError, OSError, TimeoutError) as error:
            _log.warning("connection refused transport=shm cause=%s", error)
            sock.close()
            return
        except BaseException:
            sock.close()
            raise
        of_peer = sum(session.peer.node == hello.name.node for session in self._sessions.values())
        if of_peer >= limits.SESSIONS_PER_PEER_MAX:
            _log.warning("connection refused transport=shm peer=%s cause=%d sessions", hello.name, of_peer)
            sock.close()
            return
        self._serial += 1
        bell, forget = self._bell(hello.name), partial(self._forget, self._serial)
        self._sessions[self._serial] = ShmSession(self._around, hello.name, sock, pid, bell, forget)

    def _bell(self, peer: PeerName) -> Bell:
        return self._bells.setdefault(peer, Bell())

    def _forget(self, serial: int) -> None:
        self._sessions.pop(serial, None)


def _stem(node: str) -> str:
    """Socket names are short whatever the node is called."""
    return hashlib.blake2b(node.encode(), digest_size=8).hexdigest()


def _address(peer: AgentMetadata) -> bytes | None:
    return next((item.address for item in peer.addresses if item.scheme == "shm"), None)


async def _connect(sock: socket.socket, address: bytes) -> None:
    """A unix connect does not wait: it succeeds, fails, or the owner's queue is full for the moment."""
    while True:
        try:
            sock.connect(address)
            return
        except BlockingIOError:
            await asyncio.sleep(_CONNECT_RETRY_S)

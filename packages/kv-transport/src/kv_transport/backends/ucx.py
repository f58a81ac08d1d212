"""`ucx`: one-sided puts and gets over whatever fabric UCX has: RDMA cards, and plain networks without.

UCX authenticates nobody and a remote key is not bounded to its region: a process that can reach our worker with a key
of ours can read and write all of this process. So this transport is opt-in, for fabrics you trust; addresses and keys
travel only over the bus and over connections that have proved whose they are, and UCX is kept to the network
interface of the node's bind address. Nothing is encrypted.

Endpoints have error handling on, and UCX's own shared memory is left out: a peer that dies is seen and never takes
this process with it. On one host `shm` is the faster choice anyway.
"""

import asyncio
import logging
import secrets
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Final, Protocol

from kv_core.errors import KVError, MissingExtraError
from kv_transport import limits
from kv_transport.auth import NONCE_BYTES, ClientHandshake, ServerHandshake, session_key
from kv_transport.backends.base import Backend, Link, LinkOwner, Surroundings
from kv_transport.backends.ucp_api import UcxStatusError, quiet_environment
from kv_transport.backends.ucx_binding import UcxBinding, network_devices, open_binding
from kv_transport.backends.ucx_engine import UcxEngine
from kv_transport.backends.ucx_link import UcxLink
from kv_transport.backends.ucx_session import TellKey, UcxSession
from kv_transport.backends.ucx_wire import (
    Kind,
    UcxConnection,
    check_address,
    link_of,
    pack_hello,
    pack_reply,
    split,
    unpack_hello,
    unpack_reply,
)
from kv_transport.errors import AuthenticationFailed, BackendUnavailable, ConnectionLost, FrameRefused, TransferTimeout
from kv_transport.regions import Memory
from kv_transport.tickets import AgentMetadata
from kv_transport.types import PeerName
from kv_transport.units import NonceSource
from kv_transport.workers import WorkerPool

_log = logging.getLogger(__name__)
_CLOSE_S: Final = 3.0
_TRANSPORTS: Final = "^posix,sysv,cma"
"""Everything but UCX's own shared memory, where a put to a process that has died can end this one."""
TCP_SEGMENTS: Final = {"TCP_TX_SEG_SIZE": "256K", "TCP_RX_SEG_SIZE": "256K"}
"""What a put over tcp is cut into. UCX comes with 8 KiB, at which one took three times as long (bench/README.md)."""
_TCP_OPTIONS: Final = {"TCP_CM_REUSEADDR": "y", "TCP_CONN_NB": "y", **TCP_SEGMENTS}
"""A restart may use its port again; and connecting does not block. With libucx 1.21's default a peer that goes away
while an endpoint connects can end this process: the connection is destroyed with a request still queued on it."""
OpenBinding = Callable[[dict[str, str]], UcxBinding]


class _Route(Protocol):
    """Where the messages of one connection go; called on the loop."""

    def arrive(self, body: memoryview) -> None: ...
    def lose(self, cause: str) -> None: ...


class _Shaking:
    """A connection whose handshake is under way. Implements `_Route` for handshake messages."""

    def __init__(self) -> None:
        self._bodies: asyncio.Queue[tuple[int, bytes] | str] = asyncio.Queue()

    def arrive(self, body: memoryview) -> None:
        try:
            self._bodies.put_nowait(unpack_reply(body))
        except AuthenticationFailed as error:
            self._bodies.put_nowait(str(error))

    def lose(self, cause: str) -> None:
        self._bodies.put_nowait(cause)

    async def next(self, peer: str) -> tuple[int, bytes]:
        """Raises `ConnectionLost`."""
        body = await self._bodies.get()
        if isinstance(body, str):
            raise ConnectionLost(peer=peer, transport="ucx", cause=body)
        return body


@dataclass(slots=True, eq=False)
class _Mapped:
    """A region that UCX knows. `memory` keeps the bytes in place however early their owner closes them."""

    memory: Memory
    handle: int = 0
    address: int = 0
    key: bytes = b""
    error: KVError | None = None
    ready: bool = False
    holders: dict[object, None] = field(default_factory=dict)
    waiting: list[TellKey] = field(default_factory=list)


class UcxBackend(Backend):
    """See the module. Implements `ucx_session.KeyCabinet`."""

    scheme = "ucx"

    def __init__(
        self, around: Surroundings, host: str, *, only_rdma: bool, bindings: OpenBinding = open_binding
    ) -> None:
        """With `only_rdma` (the rule of `auto`) a machine without RDMA goes without this transport."""
        self._around = around
        self._host = host
        self._only_rdma = only_rdma
        self._bindings = bindings
        self._engine: UcxEngine | None = None
        self._workers: WorkerPool | None = None
        self._off = "ucx is not started here"
        self._routes: dict[int, tuple[UcxConnection, _Route]] = {}
        self._handshakes: dict[asyncio.Task[None], None] = {}
        self._sessions: dict[UcxSession, None] = {}
        self._mapped: dict[int, _Mapped] = {}

    async def start(self) -> None:
        try:
            await self._open()
        except (BackendUnavailable, MissingExtraError) as error:
            if not self._only_rdma:
                raise
            self._off = str(error)
            _log.warning("transport left out transport=ucx node=%s cause=%s", self._around.me, error)
            return
        assert self._engine is not None
        devices, binding = self._engine.devices, self._engine.binding
        _log.info("ucx open node=%s binding=%s devices=%s", self._around.me, binding, devices)
        if devices.has_rdma:
            self._off = ""
        elif self._only_rdma:
            self._off = f"no RDMA device here, only {devices}"
            await self._stop_engine()
            _log.warning("transport left out transport=ucx node=%s cause=%s", self._around.me, self._off)
        else:
            self._off = ""
            _log.warning("ucx was asked for and has no RDMA device: it uses %s node=%s", devices, self._around.me)

    async def _open(self) -> None:
        quiet_environment()
        loop = self._around.loop
        options = {"NET_DEVICES": network_devices(self._host), "TLS": _TRANSPORTS, **_TCP_OPTIONS}
        engine = UcxEngine(f"kv-ucx-{self._around.me.node}", partial(self._bindings, options))
        opened: asyncio.Future[None] = loop.create_future()
        poster = self._around.poster
        engine.start(
            lambda error: poster.post(partial(_opened, opened, error)),
            lambda message: poster.post(partial(self._arrived, message)),
        )
        try:
            await opened
        except BaseException:
            await asyncio.to_thread(engine.stop)
            raise
        self._engine = engine
        self._workers = WorkerPool(f"kv-ucx-sum-{self._around.me.node}", self._around.config.copy_threads)

    def address(self) -> bytes | None:
        return self._engine.address if self._engine is not None else None

    def state(self) -> str:
        if self._engine is None:
            return self._off
        kind = "RDMA" if self._engine.devices.has_rdma else "no RDMA"
        return f"{self._engine.binding}, {kind}: {self._engine.devices}"

    def reaches(self, peer: AgentMetadata) -> str | None:
        if self._off:
            return self._off
        return None if _address(peer) is not None else "the peer offers no ucx worker"

    # Connecting.

    async def connect(self, peer: AgentMetadata, nonces: NonceSource, owner: LinkOwner) -> Link:
        address, engine = _address(peer), self._engine
        assert address is not None and engine is not None and self._workers is not None
        connection, shaking = self._connection(engine)
        timeout_ms = self._around.config.connect_timeout_ms
        try:
            async with asyncio.timeout(timeout_ms / 1000):
                await self._shake_as_initiator(connection, shaking, peer, address)
        except BaseException as error:
            self._dispose(connection)
            if isinstance(error, TimeoutError):
                raise TransferTimeout(
                    what="connecting", request=f"{peer.name} over ucx", timeout_ms=timeout_ms, missing_layers=[]
                ) from None
            raise
        over = partial(self._forget_route, connection.ident)
        link = UcxLink(self._around, peer, nonces, owner, connection, self._workers, over)
        self._routes[connection.ident] = connection, link
        return link

    async def _shake_as_initiator(
        self, connection: UcxConnection, shaking: _Shaking, peer: AgentMetadata, address: bytes
    ) -> None:
        engine, ident, name = connection.engine, connection.ident, str(peer.name)
        nonce, link = secrets.token_bytes(NONCE_BYTES), link_of(engine.address, ident)
        handshake = ClientHandshake(self._around.me, peer.name, peer.session_key, nonce, link, 0, 1)
        hello = pack_hello(peer.session_key, ident, engine.address, handshake.hello())
        engine.call(partial(connection.open_to, address, 0))
        engine.call(partial(connection.handshake, hello))
        theirs, challenge = await shaking.next(name)
        proof = handshake.challenged(challenge)
        engine.call(partial(connection.answer_to, theirs))
        engine.call(partial(connection.handshake, pack_reply(ident, proof)))
        connection.secure(handshake.welcomed((await shaking.next(name))[1]), initiator=True)

    def _arrived(self, message: bytes) -> None:
        try:
            ident, kind, body = split(message)
        except FrameRefused as error:
            _log.warning("message dropped transport=ucx cause=%s", error)
            return
        if not ident and kind == Kind.HANDSHAKE:
            if len(self._handshakes) < limits.PENDING_HANDSHAKES_MAX and self._engine is not None:
                task = self._around.loop.create_task(self._shake_as_owner(self._engine, body))
                self._handshakes[task] = None
                task.add_done_callback(self._handshake_over)
            return
        found = self._routes.get(ident)
        if found is None:
            return  # of a connection that is over
        route = found[1]
        if isinstance(route, _Shaking) is (kind == Kind.HANDSHAKE):
            route.arrive(body)

    def _handshake_over(self, task: asyncio.Task[None]) -> None:
        del self._handshakes[task]

    async def _shake_as_owner(self, engine: UcxEngine, body: memoryview) -> None:
        connection: UcxConnection | None = None
        try:
            async with asyncio.timeout(self._around.config.connect_timeout_ms / 1000):
                theirs, mac, address, hello = unpack_hello(body)
                handshake = ServerHandshake(self._around.me, self._around.secret, secrets.token_bytes(NONCE_BYTES))
                challenge = handshake.answer(hello)
                assert handshake.hello is not None
                name = handshake.hello.name
                # Before UCX is given the address to parse.
                check_address(session_key(self._around.secret, name), theirs, mac, address)
                if handshake.hello.link != link_of(address, theirs):
                    raise AuthenticationFailed(reason="the hello is for another address")
                self._require_room(name)
                connection, shaking = self._connection(engine)
                engine.call(partial(connection.open_to, address, theirs))
                engine.call(partial(connection.handshake, pack_reply(connection.ident, challenge)))
                connection.secure(handshake.verify((await shaking.next(str(name)))[1]), initiator=False)
        except (KVError, TimeoutError) as error:
            _log.warning("connection refused transport=ucx cause=%s", error)
            if connection is not None:
                self._dispose(connection)
            return
        except BaseException:
            if connection is not None:
                self._dispose(connection)
            raise
        assert self._workers is not None
        session = UcxSession(self._around, name, connection, self._workers, self, self._forget)
        self._sessions[session] = None
        self._routes[connection.ident] = connection, session
        engine.call(partial(connection.handshake, pack_reply(connection.ident, handshake.welcome())))

    def _require_room(self, peer: PeerName) -> None:
        of_peer = sum(session.peer.node == peer.node for session in self._sessions)
        if of_peer >= limits.SESSIONS_PER_PEER_MAX:
            raise AuthenticationFailed(reason=f"{peer} has {of_peer} connections")

    def _connection(self, engine: UcxEngine) -> tuple[UcxConnection, _Shaking]:
        ident = secrets.randbits(63) | 1
        poster, shaking = self._around.poster, _Shaking()
        connection = UcxConnection(engine, ident, lambda cause: poster.post(partial(self._broken, ident, cause)))
        self._routes[ident] = connection, shaking
        return connection, shaking

    def _broken(self, ident: int, cause: str) -> None:
        found = self._routes.get(ident)
        if found is not None:
            found[1].lose(cause)

    def _dispose(self, connection: UcxConnection) -> None:
        """A connection that became neither link nor session."""
        gone = partial(self._around.poster.post, partial(self._forget_route, connection.ident))
        connection.engine.call(partial(connection.close, gone, polite=False))

    def _forget(self, session: UcxSession) -> None:
        self._sessions.pop(session, None)
        self._forget_route(session.connection.ident)

    def _forget_route(self, ident: int) -> None:
        self._routes.pop(ident, None)

    # Keys.

    def give_key(self, holder: object, region: int, tell: TellKey) -> None:
        engine = self._engine
        assert engine is not None
        mapped = self._mapped.get(region)
        if mapped is None:
            mapped = self._mapped[region] = _Mapped(self._around.ledger.memory(region))
            engine.call(partial(self._map, engine, mapped))
        mapped.holders[holder] = None
        if mapped.ready:
            tell(mapped.address, mapped.key, mapped.error)
        else:
            mapped.waiting.append(tell)

    def take_back(self, holder: object) -> None:
        for region, mapped in list(self._mapped.items()):
            mapped.holders.pop(holder, None)
            if not mapped.holders and mapped.ready:
                del self._mapped[region]
                self._unmap(mapped)

    def _map(self, engine: UcxEngine, mapped: _Mapped) -> None:
        """In the engine's thread."""
        try:
            address = mapped.memory.data.ctypes.data
            mapped.handle = engine.ucp.map(address, len(mapped.memory.data))
            mapped.key, mapped.address = engine.ucp.pack_key(mapped.handle), address
        except UcxStatusError as error:
            mapped.error = BackendUnavailable(scheme="ucx", reason=f"memory cannot be registered: {error}")
        self._around.poster.post(partial(self._is_mapped, mapped))

    def _is_mapped(self, mapped: _Mapped) -> None:
        mapped.ready = True
        waiting, mapped.waiting = mapped.waiting, []
        for tell in waiting:
            tell(mapped.address, mapped.key, mapped.error)
        self.take_back(None)  # who wanted it may be gone

    def _unmap(self, mapped: _Mapped) -> None:
        engine = self._engine
        if engine is None or not mapped.handle:
            return

        def unmap() -> None:
            try:
                engine.ucp.unmap(mapped.handle)
            except UcxStatusError as error:
                _log.warning("memory not unregistered transport=ucx cause=%s", error)

        engine.call(unmap)

    # What there is, and the end.

    def sessions(self) -> list[tuple[PeerName, str]]:
        return [(session.peer, session.status()) for session in self._sessions]

    async def close(self) -> None:
        self._off = "ucx is closed here"
        for task in list(self._handshakes):
            task.cancel()
        await asyncio.gather(*self._handshakes, return_exceptions=True)
        sessions = list(self._sessions)
        for session in sessions:
            session.close()
        try:
            async with asyncio.timeout(_CLOSE_S):
                for session in sessions:
                    await session.closed.wait()
        except TimeoutError:
            _log.warning("connections do not close transport=ucx node=%s", self._around.me)
        await self._stop_engine()

    async def _stop_engine(self) -> None:
        for mapped in self._mapped.values():
            self._unmap(mapped)
        self._mapped.clear()
        engine, self._engine = self._engine, None
        workers, self._workers = self._workers, None
        if workers is not None:
            workers.close()
        if engine is not None:
            await asyncio.to_thread(engine.stop)


def _opened(opened: "asyncio.Future[None]", error: BaseException | None) -> None:
    if opened.done():
        return
    if error is None:
        opened.set_result(None)
    else:
        opened.set_exception(error)


def _address(peer: AgentMetadata) -> bytes | None:
    return next((item.address for item in peer.addresses if item.scheme == "ucx"), None)

"""`memory`: agents of one process, over a `MemoryNetwork` with seeded faults, in real or in virtual time.

Behaves as one-sided hardware does: a unit reads or writes the other side's memory when its time comes, the receiver
verifies what it finds, and a unit whose link has broken may still be under way, so its memory is free only after it.
What an agent may touch is decided when the first unit of a ticket is posted, and not asked again: like a remote key,
it outlives the grant until the writer confirms the fence.
"""

import asyncio
import secrets
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Final

import numpy as np

from kv_core.checksum import crc64
from kv_core.errors import KVError
from kv_core.ids import NodeId
from kv_transport import kernels, limits
from kv_transport.arena import Arena
from kv_transport.arena_layout import IntArray
from kv_transport.auth import NONCE_BYTES, ClientHandshake, ServerHandshake
from kv_transport.backends.base import Backend, Link, LinkOwner, Surroundings
from kv_transport.backends.memory_network import Fate, MemoryConnection, MemoryNetwork
from kv_transport.backends.rma_session import RmaSession
from kv_transport.errors import (
    AuthenticationFailed,
    ChecksumMismatch,
    ConnectionLost,
    FrameRefused,
    GeometryMismatch,
    LeaseEnded,
    StaleGeneration,
    TransferTimeout,
    UnknownRegion,
)
from kv_transport.frames import (
    Acked,
    Frame,
    FromOwner,
    Placed,
    Refused,
    decode_from_initiator,
    decode_from_owner,
    encode,
)
from kv_transport.regions import Memory, SharedBuffer
from kv_transport.ticket_checks import require_generations
from kv_transport.tickets import AgentMetadata, ReadGrant
from kv_transport.types import PeerName, XferOp
from kv_transport.units import NonceSource, Unit, remote_shape

_GARBAGE: Final = 0xA5


class MemoryBackend(Backend):
    """See the module."""

    scheme = "memory"

    def __init__(self, around: Surroundings, network: MemoryNetwork) -> None:
        self.around = around
        self._network = network
        self._started = False
        self._sessions: dict[MemorySession, None] = {}

    async def start(self) -> None:
        self._network.join(self.around.me.node, self)
        self._started = True

    def address(self) -> bytes | None:
        return self.around.me.node.encode() if self._started else None

    def reaches(self, peer: AgentMetadata) -> str | None:
        if not self._started:
            return "memory is not started here"
        if not any(item.scheme == "memory" for item in peer.addresses):
            return "the peer offers no place in a memory network"
        return None

    async def connect(self, peer: AgentMetadata, nonces: NonceSource, owner: LinkOwner) -> Link:
        timeout_ms = self.around.config.connect_timeout_ms
        try:
            async with asyncio.timeout(timeout_ms / 1000):
                theirs = await self._shake(peer)
        except TimeoutError:
            raise TransferTimeout(
                what="connecting", request=f"{peer.name} over memory", timeout_ms=timeout_ms, missing_layers=[]
            ) from None
        link = MemoryLink(self.around, peer.name, nonces, owner, self._network, theirs)
        session = theirs.accept(self.around.me)
        connection = self._network.connect(link, session)
        link.attach(connection, session)
        session.attach(connection)
        return link

    async def _shake(self, peer: AgentMetadata) -> "MemoryBackend":
        """The handshake of every transport, its four frames across the network."""
        me, there = self.around.me.node, peer.name.node
        nonce = secrets.token_bytes(NONCE_BYTES)
        ours = ClientHandshake(self.around.me, peer.name, peer.session_key, nonce, bytes(NONCE_BYTES), 0, 1)
        await self._cross(me, there)
        backend = self._network.backend(there)
        if backend is None:
            raise ConnectionLost(peer=str(peer.name), transport="memory", cause="nobody is there")
        theirs = ServerHandshake(backend.around.me, backend.around.secret, secrets.token_bytes(NONCE_BYTES))
        try:
            challenge = theirs.answer(ours.hello())
            await self._cross(there, me)
            proof = ours.challenged(challenge)
            await self._cross(me, there)
            theirs.verify(proof)
            backend.require_room(self.around.me)
        finally:
            await self._cross(there, me)
        ours.welcomed(theirs.welcome())
        if self._network.backend(there) is not backend:
            raise ConnectionLost(peer=str(peer.name), transport="memory", cause="it went away during the handshake")
        return backend

    async def _cross(self, source: NodeId, target: NodeId) -> None:
        await asyncio.sleep(self._network.delay_s(source, target))
        if self._network.is_cut(source, target):
            # Nothing comes back: only the deadline of the caller ends it.
            await asyncio.Event().wait()

    def require_room(self, peer: PeerName) -> None:
        """Raises `AuthenticationFailed` for a peer with too many connections."""
        of_peer = sum(session.peer.node == peer.node for session in self._sessions)
        if of_peer >= limits.SESSIONS_PER_PEER_MAX:
            raise AuthenticationFailed(reason=f"{peer} has {of_peer} connections")

    def accept(self, peer: PeerName) -> "MemorySession":
        session = MemorySession(self.around, peer, self._forget)
        self._sessions[session] = None
        return session

    def _forget(self, session: "MemorySession") -> None:
        self._sessions.pop(session, None)

    def sessions(self) -> list[tuple[PeerName, str]]:
        return [(session.peer, session.status()) for session in self._sessions]

    async def close(self) -> None:
        self._started = False
        self._network.leave(self.around.me.node, self)
        for session in list(self._sessions):
            session.close()


class MemorySession(RmaSession):
    """The owner's end."""

    scheme = "memory"

    def __init__(self, around: Surroundings, peer: PeerName, on_gone: Callable[["MemorySession"], None]) -> None:
        super().__init__(around, peer, self._connection_over)
        self._on_gone = on_gone
        self._connection: MemoryConnection | None = None

    def attach(self, connection: MemoryConnection) -> None:
        self._connection = connection

    def arrive(self, data: bytes) -> None:
        """A frame of the writer."""
        if self.over:
            return
        try:
            frame = decode_from_initiator(data, str(self.peer))
        except FrameRefused as error:
            self._offence(str(error))
            return
        self._received(frame)

    def _send(self, frame: Frame) -> None:
        assert self._connection is not None
        self._connection.send_to_writer(encode(frame))

    def _shut(self) -> None:
        """Frames of the writer are not taken any more; its units may still come."""

    def _connection_over(self) -> None:
        if not self._around.ledger.may_still_write(self.peer):
            self._gone()

    def _gone(self) -> None:
        self._on_gone(self)


@dataclass(slots=True, eq=False)
class _Flight:
    """A unit under way."""

    seq: int
    unit: Unit
    nonce: int
    fate: Fate
    memory: Arena | SharedBuffer | KVError

    @property
    def ticket(self) -> int:
        return self.unit.ticket.ticket if self.unit.ticket is not None else 0


class MemoryLink(Link):
    """The initiator's end."""

    scheme = "memory"

    def __init__(
        self,
        around: Surroundings,
        peer: PeerName,
        nonces: NonceSource,
        owner: LinkOwner,
        network: MemoryNetwork,
        there: MemoryBackend,
    ) -> None:
        super().__init__(around, peer, nonces, owner)
        self.me: Final = around.me
        self.loop: Final = around.loop
        self._network = network
        self._there = there
        self._connection: MemoryConnection | None = None
        self._session: MemorySession | None = None
        self._flights: dict[int, _Flight] = {}
        self._unheard: dict[int, None] = {}
        self._keys: dict[tuple[int, int], Arena | SharedBuffer] = {}

    def attach(self, connection: MemoryConnection, session: MemorySession) -> None:
        self._connection, self._session = connection, session

    # Units.

    def _begin(self, seq: int, unit: Unit) -> None:
        write, me, there = unit.op is XferOp.WRITE, self.me.node, self.peer.node
        fate = self._network.fate(me, there, leased_read=unit.ticket is not None and not write)
        try:
            memory: Arena | SharedBuffer | KVError = self._reach(unit)
        except KVError as refused:
            memory = refused
        flight = _Flight(seq, unit, self._nonces(), fate, memory)
        self._flights[seq] = flight
        delay_s = self._network.delay_s(me, there) + self._wire.carry_unit_s(unit.nbytes, write=write)
        if flight.fate is Fate.LATE:
            delay_s += self._network.late_s(me, there)
        self.loop.call_later(delay_s, partial(self._execute, flight))

    def _execute(self, flight: _Flight) -> None:
        """The unit's time has come, whether the link still stands or not."""
        if self._flights.pop(flight.seq, None) is None:
            return
        if self._wire.writer_crashed:
            self._rest_if_idle()
            return
        lost = flight.fate is Fate.LOST or self._wire.owner_crashed or self._is_cut(flight.unit.op)
        error: KVError | None = None
        if not lost:
            try:
                self._move(flight)
            except KVError as refused:
                error = refused
        if self.lost is not None:
            self._rest_if_idle()
            return
        if not lost and (error is not None or flight.unit.op is XferOp.READ) and flight.fate is not Fate.MISSING:
            self._settle(flight.seq, error)
        # A lost one stays posted: the deadline of units finds it.
        self._confirm_fences()

    def _is_cut(self, op: XferOp) -> bool:
        """A write needs the way there; a read needs the way back, too."""
        there = self._network.is_cut(self.me.node, self.peer.node)
        return there or (op is XferOp.READ and self._network.is_cut(self.peer.node, self.me.node))

    def _move(self, flight: _Flight) -> None:
        unit, memory = flight.unit, flight.memory
        if isinstance(memory, KVError):
            raise memory
        if memory.closed:
            raise UnknownRegion(region=unit.region, node=self.peer.node)
        if unit.op is XferOp.WRITE:
            checks = unit.take_checks()
            kernels.copy_cells(memory.data_view, unit.local.data_view, unit.cells.table(into_local=False))
            if flight.fate is Fate.TORN:
                self._tear(memory, unit.cells.remote, unit)
            if flight.fate is Fate.MISSING:
                self._unheard[flight.seq] = None
            if self.lost is None:
                self._send(Placed(flight.seq, unit.head(flight.nonce, checks)))
        else:
            self._read(flight, memory)

    def _reach(self, unit: Unit) -> Arena | SharedBuffer:
        """The owner's memory, if it may be touched: asked once per region and ticket."""
        ticket = unit.ticket.ticket if unit.ticket is not None else 0
        key = (unit.region, ticket)
        memory = self._keys.get(key)
        if memory is None:
            ledger = self._there.around.ledger
            assert self._session is not None
            ledger.may_map(self._session, unit.region, ticket, write=unit.op is XferOp.WRITE)
            memory = self._keys[key] = ledger.memory(unit.region)
        if unit.ticket is not None:
            theirs = memory.shape if isinstance(memory, Arena) else None
            expected = remote_shape(unit.ticket.form, unit.ticket.num_slots)
            if theirs != expected:
                raise GeometryMismatch(field="arena", ours=str(expected), theirs=str(theirs))
        elif int((unit.cells.remote + unit.cells.sizes).max()) > memory.nbytes:
            raise FrameRefused(peer=str(self.peer), reason=f"region {unit.region} is smaller than it was said")
        return memory

    def _read(self, flight: _Flight, memory: Arena | SharedBuffer) -> None:
        unit = flight.unit
        checks = kernels.copy_cells(unit.local.data_view, memory.data_view, unit.cells.table(into_local=True))
        if flight.fate in (Fate.TORN, Fate.REUSED):
            checks = self._tear(unit.local, unit.cells.local, unit)
        if unit.ticket is None or not isinstance(memory, Arena):
            view, cells = memory.data_view, unit.cells
            offsets = zip(cells.remote.tolist(), cells.sizes.tolist(), strict=True)
            self._compare(unit, checks, [crc64(view[offset : offset + size]) for offset, size in offsets])
            return
        grant = unit.ticket
        assert isinstance(grant, ReadGrant)
        slots = np.array(grant.slots[unit.start : unit.end], np.int64)
        require_generations(memory, grant, unit.start, unit.end)
        if flight.fate is Fate.REUSED:
            slot, expected = grant.slots[unit.start], grant.generations[unit.start]
            raise StaleGeneration(region=grant.region, slot=slot, found=expected + 1, expected=expected)
        if int(memory.leases[grant.lease_index]) != grant.ticket:
            raise LeaseEnded(ticket=grant.ticket, reason="its holder has ended it")
        self._compare(unit, checks, [int(check) for check in memory.checks[unit.layer, slots]])
        unit.store_checks(checks)

    def _tear(self, memory: Memory, offsets: IntArray, unit: Unit) -> list[int]:
        """Spoil a part of one cell, as a copy that was cut short does; the checksums of what lies there now."""
        view, cell = memory.data_view, self._network.pick(self.me.node, self.peer.node, len(unit.cells))
        begin, size = int(offsets[cell]), int(unit.cells.sizes[cell])
        half = begin + size // 2
        view[half : begin + size] = bytes(byte ^ _GARBAGE for byte in view[half : begin + size])
        spans = zip(offsets.tolist(), unit.cells.sizes.tolist(), strict=True)
        return [crc64(view[offset : offset + nbytes]) for offset, nbytes in spans]

    def _compare(self, unit: Unit, checks: list[int], expected: list[int]) -> None:
        if checks != expected:
            bad = sum(ours != theirs for ours, theirs in zip(checks, expected, strict=True))
            self._around.ledger.count_checksum_failure()
            raise ChecksumMismatch(
                peer=str(self.peer), transport="memory", bad=bad, total=len(checks), layer=unit.layer
            )

    def _ticket_busy(self, ticket: int) -> bool:
        return any(flight.ticket == ticket and flight.unit.op is XferOp.WRITE for flight in self._flights.values())

    # The connection.

    @property
    def _wire(self) -> MemoryConnection:
        assert self._connection is not None
        return self._connection

    def _send(self, frame: Frame) -> None:
        self._wire.send_to_owner(encode(frame))

    def arrive(self, data: bytes) -> None:
        """A frame of the owner."""
        if self.lost is not None:
            return
        frame: FromOwner = decode_from_owner(data, str(self.peer))
        if isinstance(frame, Acked | Refused) and frame.seq in self._unheard:
            del self._unheard[frame.seq]
            return
        self._received(frame)

    def lose(self, cause: str) -> None:
        self.fail(ConnectionLost(peer=str(self.peer), transport="memory", cause=cause))

    def _break(self, error: KVError) -> None:
        # Not at once: whoever hears that a unit is settled may post the next one, and is told of the loss after this.
        self.loop.call_soon(self._rest_if_idle)

    def _rest_if_idle(self) -> None:
        if self._wire.writer_crashed:
            self._flights.clear()
        if self._flights or self.lost is None or self._ended.is_set():
            return
        self._keys.clear()
        self._wire.writer_at_rest()
        self._settle_all(self.lost)

"""The initiator's end of a UCX connection: puts and gets by remote key, the header behind them."""

import asyncio
from collections.abc import Callable
from functools import partial
from typing import Final

import numpy as np

from kv_core.checksum import crc64
from kv_core.errors import KVError, LocalProtocolError
from kv_transport import limits
from kv_transport.backends.base import Link, LinkOwner, Surroundings
from kv_transport.backends.ucx_wire import UcxConnection
from kv_transport.errors import ChecksumMismatch, ConnectionLost, FrameRefused, GrantRefused
from kv_transport.frames import Data, Frame, FromOwner, Keyed, Map, Placed, Read, decode_from_owner, encode
from kv_transport.tickets import AgentMetadata
from kv_transport.types import XferOp
from kv_transport.units import NonceSource, Unit
from kv_transport.workers import WorkerPool

_POLITE_S: Final = 0.2


class _Remote:
    """A region of the peer that we have a key of."""

    __slots__ = ("address", "key", "nbytes")

    def __init__(self, address: int, nbytes: int, key: int) -> None:
        self.address = address
        self.nbytes = nbytes
        self.key = key


class _Writing:
    """A unit that is being put while its sums are taken; what has become of both. Belongs to the engine's thread."""

    __slots__ = ("error", "failure", "header", "placed", "seq", "unit")

    def __init__(self, seq: int, unit: Unit) -> None:
        self.seq = seq
        self.unit = unit
        self.placed = False
        self.failure: str | None = None
        self.header: bytes | None = None
        self.error: KVError | None = None


class UcxLink(Link):
    """See the module."""

    scheme = "ucx"

    def __init__(
        self,
        around: Surroundings,
        peer: AgentMetadata,
        nonces: NonceSource,
        owner: LinkOwner,
        connection: UcxConnection,
        workers: WorkerPool,
        on_over: Callable[[], None],
    ) -> None:
        super().__init__(around, peer.name, nonces, owner)
        self.connection: Final = connection
        self._workers = workers
        self._on_over = on_over
        self._regions: dict[int, _Remote] = {}
        self._allowed: dict[tuple[int, bool, int], None] = {}
        self._waiting: dict[tuple[int, bool, int], list[tuple[int, Unit]]] = {}
        self._busy: dict[int, int] = {}
        self._jobs = 0
        self._closed = False

    # On the loop.

    def arrive(self, body: memoryview) -> None:
        """A frame of the owner, still sealed."""
        if self.lost is not None:
            return
        try:
            frame = decode_from_owner(self.connection.open_frame(body, str(self.peer)), str(self.peer))
        except FrameRefused as error:
            self.fail(error)
            return
        self._received(frame)

    def lose(self, cause: str) -> None:
        self.fail(ConnectionLost(peer=str(self.peer), transport="ucx", cause=cause))

    def _begin(self, seq: int, unit: Unit) -> None:
        """The owner is asked once per ticket, though the key of a region stays the same: a key knows no tickets."""
        key = (unit.region, unit.op is XferOp.WRITE, _ticket(unit))
        if key in self._allowed:
            self._start(seq, unit, self._regions[unit.region])
            return
        waiting = self._waiting.get(key)
        if waiting is not None:
            waiting.append((seq, unit))
            return
        self._waiting[key] = [(seq, unit)]
        self._around.spawn(self._map(key))

    async def _map(self, key: tuple[int, bool, int]) -> None:
        region, write, ticket = key
        error: KVError | None = None
        try:
            reply = await self._ask(lambda seq: Map(seq, region, ticket, write))
            if not isinstance(reply, Keyed):
                raise FrameRefused(peer=str(self.peer), reason=f"{type(reply).__name__} in answer to Map")
            if region not in self._regions:
                self._regions[region] = await self._unpacked(reply)
        except KVError as refused:
            error = refused
        waiting = self._waiting.pop(key, [])
        if self.lost is not None:
            return  # they were settled when the link broke
        if error is None:
            self._allow(key)
        for seq, unit in waiting:
            if error is not None:
                self._settle(seq, error)
            else:
                self._start(seq, unit, self._regions[region])

    def _allow(self, key: tuple[int, bool, int]) -> None:
        self._allowed[key] = None
        if len(self._allowed) > limits.GRANTS_MAX:
            del self._allowed[next(iter(self._allowed))]  # the oldest is asked for again if it is still in use

    async def _unpacked(self, reply: Keyed) -> _Remote:
        future: asyncio.Future[int] = self._around.loop.create_future()

        def unpack() -> None:
            key, error = 0, None
            try:
                key = self.connection.unpack_key(reply.key)
            except FrameRefused as refused:
                error = refused
            self._around.poster.post(partial(_settled_with, future, key, error))

        self.connection.engine.call(unpack)
        return _Remote(reply.address, reply.nbytes, await future)

    def _start(self, seq: int, unit: Unit, remote: _Remote) -> None:
        ticket = _ticket(unit)
        self._jobs += 1
        self._busy[ticket] = self._busy.get(ticket, 0) + 1
        if int((unit.cells.remote + unit.cells.sizes).max()) > remote.nbytes:
            refused = FrameRefused(peer=str(self.peer), reason=f"region {unit.region} is smaller than it was said")
            self._moved(seq, unit, refused)
            return
        if unit.op is not XferOp.WRITE:
            self.connection.engine.move(partial(self._get, seq, unit, remote))
            return
        if ticket in self._fences:
            self._moved(seq, unit, GrantRefused(ticket=ticket, reason="it was revoked by its owner"))
            return
        writing, nonce = _Writing(seq, unit), self._nonces()
        if unit.arena is None and not self.connection.engine.devices.has_rdma:
            # UCX is about to copy the bytes itself: they are summed on their way, from the same cache.
            self.connection.engine.move(partial(self._put_summed, writing, nonce, remote))
        else:
            # Memory that keeps no checksums is summed now, which takes its time: meanwhile its bytes travel.
            self.connection.engine.move(partial(self._put, writing, remote))
            if unit.nbytes <= limits.INLINE_COPY_BYTES_MAX:
                self._sum_written(writing, nonce)
            else:
                self._workers.submit(partial(self._sum_written, writing, nonce))

    def _moved(self, seq: int, unit: Unit, error: KVError | None) -> None:
        """Nothing of this unit is in flight, in either memory of ours."""
        self._jobs -= 1
        ticket = _ticket(unit)
        self._busy[ticket] -= 1
        if not self._busy[ticket]:
            del self._busy[ticket]
        if isinstance(error, ConnectionLost):
            self.fail(error)
        if self.lost is not None:
            self._rest_if_idle()
        elif error is not None:
            self._settle(seq, error)
        else:
            self._confirm_fences()  # the owner's answer settles it

    def _ticket_busy(self, ticket: int) -> bool:
        """One that waits for a key counts: it may get it, and begin, before it hears of a fence."""
        return ticket in self._busy or any(key[2] == ticket for key in self._waiting)

    def _received_other(self, frame: FromOwner) -> None:
        match frame:
            case Keyed(seq):
                self._answer(seq, frame)
            case Data():
                self._confirmed(frame)
            case _:
                super()._received_other(frame)

    def _confirmed(self, frame: Data) -> None:
        """What we have read is what the holder says: take our sums."""
        posted = self._posted.get(frame.seq)
        if posted is None or posted.unit.op is not XferOp.READ or len(frame.checks) != 8 * len(posted.unit.cells):
            self.fail(FrameRefused(peer=str(self.peer), reason="data that nobody asked for"))
            return
        expected = [int.from_bytes(frame.checks[at : at + 8], "little") for at in range(0, len(frame.checks), 8)]
        self._jobs += 1
        job = partial(self._sum_read, frame.seq, posted.unit, expected)
        if posted.unit.nbytes <= limits.INLINE_COPY_BYTES_MAX:
            job()
        else:
            self._workers.submit(job)

    def _read_over(self, seq: int, error: KVError | None) -> None:
        self._jobs -= 1
        if self.lost is not None:
            self._rest_if_idle()
        else:
            self._settle(seq, error)

    def _send(self, frame: Frame) -> None:
        self.connection.engine.call(partial(self.connection.send, encode(frame)))

    def _break(self, error: KVError) -> None:
        connection = self.connection
        closed = partial(self._around.poster.post, self._connection_closed)
        connection.engine.call(partial(connection.close, closed, polite=not self._posted))
        self._around.loop.call_later(_POLITE_S, connection.engine.call, connection.hurry)

    def _connection_closed(self) -> None:
        self._closed = True
        self._rest_if_idle()

    def _rest_if_idle(self) -> None:
        if self._closed and not self._jobs and self.lost is not None and not self._ended.is_set():
            self._on_over()
            self._settle_all(self.lost)

    # In a worker.

    def _sum_written(self, writing: _Writing, nonce: int) -> None:
        """Also on the loop, for few bytes."""
        header, error = self._header(writing, nonce, writing.unit.take_checks)
        self.connection.engine.call(partial(self._summed, writing, header, error))

    def _header(
        self, writing: _Writing, nonce: int, take_checks: Callable[[], list[int]]
    ) -> tuple[bytes, KVError | None]:
        """What tells the owner of the unit."""
        try:
            return encode(Placed(writing.seq, writing.unit.head(nonce, take_checks()))), None
        except KVError as refused:
            return b"", refused
        except Exception as bug:
            return b"", LocalProtocolError(detail=f"moving a unit raised {bug!r}")

    def _sum_read(self, seq: int, unit: Unit, expected: list[int]) -> None:
        view = unit.local.data_view
        spans = zip(unit.cells.local.tolist(), unit.cells.sizes.tolist(), strict=True)
        checks = [crc64(view[offset : offset + size]) for offset, size in spans]
        error: KVError | None = None
        if checks == expected:
            unit.store_checks(checks)
        else:
            bad = sum(ours != theirs for ours, theirs in zip(checks, expected, strict=True))
            self._around.ledger.count_checksum_failure()
            error = ChecksumMismatch(peer=str(self.peer), transport="ucx", bad=bad, total=len(checks), layer=unit.layer)
        self._around.poster.run(partial(self._read_over, seq, error))

    # In the engine's thread.

    def _put(self, writing: _Writing, remote: _Remote) -> None:
        def placed(failure: str | None) -> None:
            writing.placed, writing.failure = True, failure
            self._tell(writing)

        unit = writing.unit
        self.connection.put(unit.cells.runs(), unit.local.data.ctypes.data, remote.address, remote.key, placed)

    def _put_summed(self, writing: _Writing, nonce: int, remote: _Remote) -> None:
        def placed(failure: str | None) -> None:
            writing.placed, writing.failure = True, failure
            self._tell(writing)

        def put() -> list[int]:
            unit, where = writing.unit, (remote.address, remote.key)
            cells = np.stack((unit.cells.local, unit.cells.remote, unit.cells.sizes), axis=1)
            try:
                return self.connection.put_summed(unit.local.data_view, cells, *where, placed)
            except (
                Exception
            ):  # raised by the checks that precede the first byte: none is on its way, nobody waits for any
                writing.placed = True
                raise

        self._summed(writing, *self._header(writing, nonce, put))

    def _summed(self, writing: _Writing, header: bytes, error: KVError | None) -> None:
        writing.header, writing.error = header, error
        self._tell(writing)

    def _tell(self, writing: _Writing) -> None:
        """The owner hears of the unit when its bytes are there and their sums are known."""
        if not writing.placed or writing.header is None:
            return
        error = self._translated(writing.failure) or writing.error
        if error is None:
            self.connection.send(writing.header)
        self._around.poster.post(partial(self._moved, writing.seq, writing.unit, error))

    def _get(self, seq: int, unit: Unit, remote: _Remote) -> None:
        def got(error: str | None) -> None:
            if error is None:
                # Asked after the bytes are here: had the slots been given to other content meanwhile, this shows it.
                self.connection.send(encode(Read(seq, unit.head(0, []))))
            self._around.poster.post(partial(self._moved, seq, unit, self._translated(error)))

        local = unit.local.data.ctypes.data
        self.connection.get(unit.cells.runs(), local, remote.address, remote.key, got)

    def _translated(self, error: str | None) -> KVError | None:
        return None if error is None else ConnectionLost(peer=str(self.peer), transport="ucx", cause=error)


def _settled_with(future: "asyncio.Future[int]", key: int, error: KVError | None) -> None:
    if future.done():
        return
    if error is None:
        future.set_result(key)
    else:
        future.set_exception(error)


def _ticket(unit: Unit) -> int:
    return unit.ticket.ticket if unit.ticket is not None else 0

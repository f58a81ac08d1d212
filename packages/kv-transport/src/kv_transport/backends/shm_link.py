"""The initiator's end of a shared-memory connection: maps what it needs and moves the bytes itself."""

import os
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from kv_core.errors import KVError, LocalProtocolError
from kv_transport import doorbell, limits
from kv_transport.arena import map_arena
from kv_transport.backends.base import Link, LinkOwner, Posted, Surroundings
from kv_transport.backends.bell import Bell
from kv_transport.backends.seqpacket import FrameSocket
from kv_transport.backends.shm_copies import Mapping, UnitCopy
from kv_transport.backends.shm_jobs import Jobs, Moved, ticket_of
from kv_transport.copying import CopyStopped
from kv_transport.doorbell import DAMAGED, PLACES, SENT, AnswersWanted
from kv_transport.errors import (
    ChecksumMismatch,
    ConnectionLost,
    FrameRefused,
    GrantRefused,
    TransferTooLarge,
)
from kv_transport.frames import (
    AckedMany,
    Answers,
    Bye,
    Frame,
    FromOwner,
    Map,
    Mapped,
    Placed,
    PlacedMany,
    decode_from_owner,
    encode,
)
from kv_transport.regions import MappedBuffer
from kv_transport.tickets import AgentMetadata
from kv_transport.types import XferOp
from kv_transport.unit_header import combined
from kv_transport.units import NonceSource, Unit
from kv_transport.workers import WorkerPool


@dataclass(frozen=True, slots=True, eq=False)
class _Job:
    """A unit that workers have in hand. `by_message`: its owner is told as `doorbell` says, and answers in the page."""

    seq: int
    copy: UnitCopy
    nonce: int
    by_message: bool


class ShmLink(Link):
    """See the module."""

    scheme = "shm"

    def __init__(
        self,
        around: Surroundings,
        peer: AgentMetadata,
        nonces: NonceSource,
        owner: LinkOwner,
        sock: socket.socket,
        workers: WorkerPool,
        bell: Bell,
    ) -> None:
        super().__init__(around, peer.name, nonces, owner)
        self._workers = workers
        self._peer_text = str(peer.name)
        self._socket = FrameSocket(sock, around.loop, around.poster, self._on_frame, self._on_end)
        self._maps: dict[tuple[int, bool], Mapping] = {}
        self._waiting: dict[tuple[int, bool], list[tuple[int, Unit]]] = {}
        self._descriptors: dict[int, int] = {}
        self._mapping_now = 0
        self._jobs = Jobs(around.config.window_size // 4)  # most of a window goes on while those are answered
        self._bell = bell
        self._page = AnswersWanted.create()
        self._quiet: dict[int, int] = {}  # place on the page -> the put that will be answered there
        if self._page is not None:
            bell.join(self)
            self._socket.send(encode(Answers()), [self._page.fileno()])

    # Mapping.

    def takes_directly(self, unit: Unit) -> bool:
        return self._mapping(unit) is not None

    def _mapping(self, unit: Unit) -> Mapping | None:
        """A writable one serves reads, too."""
        found = self._maps.get((unit.region, True))
        return found if found is not None or unit.op is XferOp.WRITE else self._maps.get((unit.region, False))

    def _begin(self, seq: int, unit: Unit) -> None:
        memory = self._mapping(unit)
        if memory is not None:
            self._start(seq, unit, memory)
            return
        key = (unit.region, unit.op is XferOp.WRITE)
        waiting = self._waiting.get(key)
        if waiting is not None:
            waiting.append((seq, unit))
            return
        self._waiting[key] = [(seq, unit)]
        self._around.spawn(self._map(key, ticket_of(unit)))

    async def _map(self, key: tuple[int, bool], ticket: int) -> None:
        region, write = key
        error: KVError | None = None
        self._mapping_now += 1
        self._socket.takes_descriptors = True
        try:
            reply = await self._ask(lambda seq: Map(seq, region, ticket, write))
            if not isinstance(reply, Mapped) or reply.seq not in self._descriptors:
                raise FrameRefused(peer=str(self.peer), reason="no descriptor in answer to Map")
            fd = self._descriptors.pop(reply.seq)
            if reply.arena:
                self._maps[key] = map_arena(fd, reply.nbytes, writable=write)
            else:
                self._maps[key] = MappedBuffer(fd, reply.nbytes, writable=write)
        except KVError as refused:
            error = refused
        finally:
            self._mapping_now -= 1
            self._socket.takes_descriptors = self._mapping_now > 0
        waiting = self._waiting.pop(key, [])
        if self.lost is not None:
            return  # they were settled when the link broke
        for seq, unit in waiting:
            if error is not None:
                self._settle(seq, error)
            else:
                self._start(seq, unit, self._maps[key])

    # Puts of one run, told by a message.

    def post_quietly(self, posted: Posted) -> None:
        """Moves a small put of one run in one call; see `doorbell`."""
        unit = posted.unit
        memory = self._maps.get((unit.region, True))
        if memory is None or unit.cells.nbytes > limits.INLINE_COPY_BYTES_MAX or not _has_message(unit):
            super().post_quietly(posted)
            return
        seq = self._enlist(posted)
        if not self._takes_place(seq):
            self._begin(seq, unit)
            return
        error = self._put(seq, unit, memory)
        if error is not None:
            self._settle(seq, error)

    def _takes_place(self, seq: int) -> bool:
        """Whether a put may be told by a message: its answer has a place in the page, or is a frame."""
        if self._page is None:
            return True
        if seq % PLACES in self._quiet:
            self.take_answers()
        return self._quiet.setdefault(seq % PLACES, seq) == seq

    def _put(self, seq: int, unit: Unit, memory: Mapping) -> KVError | None:
        assert unit.message is not None
        try:
            outcome = self._socket.put(
                memory.data_view,
                unit.local.data_view,
                unit.cells.first_local,
                unit.message,
                seq,
                unit.put,
                self._nonces(),
            )
        except Exception as error:
            return self._failure(unit, error)
        if outcome != DAMAGED:
            self._bell.rung += outcome == SENT
            return None
        self._around.ledger.count_checksum_failure()
        return ChecksumMismatch(peer=str(self.peer), transport="shm", bad=1, total=1, layer=unit.layer)

    def take_answers(self) -> None:
        page, quiet = self._page, self._quiet
        if page is None or not quiet:
            return
        for place, seq in list(quiet.items()):
            if page.answered(seq) and quiet.get(place) == seq:
                self._heard_ns = self._now_ns()
                del quiet[place]
                self._posted.pop(seq).settle(None)
        if page.waits and not quiet and self._page is not None:
            page.wait(False)

    def want_answers(self) -> None:
        if self._page is not None and self._quiet:
            self._page.wait(True)
            self.take_answers()

    def rung(self) -> None:
        """The peer has sent something by its own connection; implements `bell.HearsBell`."""
        if self._page is not None and self._page.waits:
            self.take_answers()

    def _settle(self, seq: int, error: KVError | None) -> None:
        if self._quiet.get(seq % PLACES) == seq:
            del self._quiet[seq % PLACES]
            if not self._quiet and self._page is not None:
                self._page.wait(False)
        super()._settle(seq, error)

    # Moving.

    def _start(self, seq: int, unit: Unit, memory: Mapping) -> None:
        config = self._around.config
        copy = UnitCopy(unit, memory, config.copy_threads, self._peer_text, self._stopped(unit))
        if unit.nbytes <= limits.INLINE_COPY_BYTES_MAX:
            # Here, on the loop: nothing that ends the link or fences the ticket comes in between.
            self._start_here(_Job(seq, copy, self._nonces(), by_message=False))
            return
        job = _Job(seq, copy, self._nonces(), by_message=_has_message(unit) and self._takes_place(seq))
        if job.by_message and self._page is not None:
            self._page.wait(True)
        self._jobs.begin(unit)
        if copy.prepares_fast:
            copy.prepare()
            self._help_with(job, 1 + copy.helpers)
        else:
            self._workers.submit(partial(self._work, job))

    def _start_here(self, job: _Job) -> None:
        moved = self._prepared(job) or self._move(job)
        assert moved is not None, "nobody else has it in hand"
        if moved.placed is not None:
            for text in _together([moved.placed]):
                self._socket.send(text)
        else:
            self._settle(job.seq, moved.error)

    def _help_with(self, job: _Job, threads: int) -> None:
        for _ in range(threads):
            self._workers.submit(partial(self._help, job))

    def _work(self, job: _Job) -> None:
        """Runs in the first worker."""
        failed = self._prepared(job)
        if failed is not None:
            self._tell(self._jobs.moved(failed))
            return
        self._help_with(job, job.copy.helpers)
        self._help(job)

    def _help(self, job: _Job) -> None:
        """Runs in a worker; the last one also rings the doorbell."""
        moved = self._move(job)
        if moved is not None:
            self._tell(self._jobs.moved(moved))

    def _prepared(self, job: _Job) -> Moved | None:
        """What became of it already, if it must not be copied."""
        try:
            job.copy.prepare()
        except Exception as error:
            return Moved(job.seq, job.copy.unit, self._failure(job.copy.unit, error), None)
        return None

    def _move(self, job: _Job) -> Moved | None:
        """Move bytes that nobody has moved yet; what became of the unit, if this thread is to say so."""
        unit = job.copy.unit
        placed: Placed | bytes | None = None
        try:
            if not job.copy.help():
                return None
            checks = job.copy.finish()
            if job.by_message:
                assert unit.message is not None
                whole = combined(checks, unit.cells.size_list())
                placed = doorbell.complete(unit.message, job.seq, unit.put, job.nonce, whole)
            elif unit.op is XferOp.WRITE:
                placed = Placed(job.seq, unit.head(job.nonce, checks))
        except Exception as error:
            return Moved(job.seq, unit, self._failure(unit, error), None)
        return Moved(job.seq, unit, None, placed)

    def _tell(self, jobs: list[Moved]) -> None:
        """Say what became of those, from any thread. The loop is woken only for what it must do something about: not
        for units that were placed, which the peer's answer settles.
        """
        if not jobs:
            return
        placed = [job.placed for job in jobs if job.placed is not None]
        for text in _together(placed):
            self._socket.send(text)
        self._jobs.told(jobs)
        # Whoever ends the link or fences a ticket after this finds that the jobs are over.
        awaited = self.lost is not None or any(job.ticket in self._fences for job in jobs)
        if awaited or len(placed) < len(jobs):
            self._around.poster.post(partial(self._moved, jobs))

    def _failure(self, unit: Unit, error: Exception) -> KVError:
        match error:
            case CopyStopped():
                return self.lost or GrantRefused(ticket=ticket_of(unit), reason="it was revoked by its owner")
            case IndexError():
                # Our own side was checked when the transfer was made.
                return FrameRefused(peer=str(self.peer), reason=f"region {unit.region} is smaller than it was said")
            case ChecksumMismatch():
                self._around.ledger.count_checksum_failure()
                return error
            case KVError():
                return error
            case _:
                return LocalProtocolError(detail=f"moving a unit raised {error!r}")

    def _stopped(self, unit: Unit) -> Callable[[], bool]:
        ticket = ticket_of(unit)
        return lambda: self.lost is not None or ticket in self._fences

    def _moved(self, jobs: list[Moved]) -> None:
        for seq, error in [(job.seq, job.error) for job in jobs if job.placed is None]:
            if self.lost is None:
                self._settle(seq, error)
        if self.lost is not None:
            self._rest_if_idle()
        else:
            self._confirm_fences()

    def _ticket_busy(self, ticket: int) -> bool:
        """One that waits for a mapping counts: it may get it, and begin, before it hears of a fence."""
        waiting = (unit.ticket for units in self._waiting.values() for _, unit in units)
        return self._jobs.busy(ticket) or any(grant is not None and grant.ticket == ticket for grant in waiting)

    # The socket.

    def _send(self, frame: Frame) -> None:
        self._socket.send(encode(frame))

    def _on_frame(self, data: memoryview, fds: list[int]) -> None:
        try:
            frame = decode_from_owner(data, self._peer_text)
        except FrameRefused as error:
            for fd in fds:
                os.close(fd)
            self.fail(error)
            return
        if isinstance(frame, Mapped) and fds and frame.seq in self._asked:
            self._descriptors[frame.seq] = fds.pop()
        for fd in fds:
            os.close(fd)
        self.take_answers()  # what is in the page was said before
        self._received(frame)

    def _received_other(self, frame: FromOwner) -> None:
        if isinstance(frame, AckedMany):
            for seq in frame.seqs:
                self._settle(seq, None)
        elif isinstance(frame, Mapped):
            self._answer(frame.seq, frame)
        else:
            super()._received_other(frame)

    def _on_end(self, cause: str) -> None:
        self.fail(ConnectionLost(peer=str(self.peer), transport="shm", cause=cause))

    def _break(self, error: KVError) -> None:
        self._rest_if_idle()

    def _rest_if_idle(self) -> None:
        """Goodbye comes after the last copy: to the owner it is the proof that we write no more."""
        if self._jobs.busy() or self._ended.is_set() or self.lost is None:
            return
        self._socket.send(encode(Bye()))
        self._socket.close()
        for fd in self._descriptors.values():
            os.close(fd)
        self._descriptors.clear()
        for memory in self._maps.values():
            memory.unmap()
        self._maps.clear()
        self._quiet.clear()
        if self._page is not None:
            self._bell.leave(self)
            self._page.close()
            self._page = None
        self._settle_all(self.lost)


def _together(placed: Sequence[Placed | bytes]) -> list[bytes]:
    """What tells of those units: messages as they are, and one frame for the others, where one can hold them all."""
    said = [one for one in placed if isinstance(one, bytes)]
    frames = [one for one in placed if isinstance(one, Placed)]
    if len(frames) > 1:
        try:
            return [*said, encode(PlacedMany(frames))]
        except TransferTooLarge:
            pass
    return [*said, *map(encode, frames)]


def _has_message(unit: Unit) -> bool:
    """Whether it is a put of one run into an open region, which then has its message."""
    if unit.message is not None:
        return True
    if unit.op is not XferOp.WRITE or unit.ticket is not None or len(unit.cells.runs()) != 1:
        return False
    (run,) = unit.cells.runs()
    unit.message = doorbell.message(unit.region, run.remote, run.nbytes, unit.notif)
    return True

"""The owner's end of a shared-memory connection: hands out descriptors, and believes the doorbell only as far as
the ledger allows.

The peer writes our memory itself. Whether it still can is known in three ways only: it says so after a fence, it said
goodbye after its last copy, or its process has exited (seen by pidfd). A connection that breaks while the process
lives proves nothing, so the watch on the process outlives the connection where a fence is still due.
"""

import os
import socket
from collections.abc import Callable

from kv_core.errors import KVError
from kv_transport import doorbell
from kv_transport.arena import Arena
from kv_transport.backends.base import Surroundings
from kv_transport.backends.bell import Bell
from kv_transport.backends.seqpacket import FrameSocket
from kv_transport.backends.session import OwnerSession
from kv_transport.doorbell import AnswersGiven
from kv_transport.errors import ConnectionLost, FrameRefused, InvalidDescriptor
from kv_transport.frames import (
    Acked,
    AckedMany,
    Answers,
    Frame,
    FromInitiator,
    Map,
    Mapped,
    Placed,
    PlacedMany,
    decode_from_initiator,
    encode,
    refusal,
)
from kv_transport.run_puts import RunPuts
from kv_transport.types import PeerName


class ShmSession(OwnerSession):
    """See the module."""

    scheme = "shm"
    one_sided = True

    def __init__(
        self,
        around: Surroundings,
        peer: PeerName,
        sock: socket.socket,
        pid: int,
        bell: Bell,
        on_end: Callable[[], None],
    ) -> None:
        super().__init__(around, peer, self._connection_over)
        self._gone = on_end
        self._pidfd = -1
        self._peer_text = str(peer)
        self._bell = bell
        self._page: AnswersGiven | None = None
        self._puts: RunPuts | None = None
        self._socket = FrameSocket(sock, around.loop, around.poster, self._on_frame, self._lost)
        self._socket.takes_descriptors = True  # beside the first frame
        try:
            self._pidfd = os.pidfd_open(pid)
            around.loop.add_reader(self._pidfd, self._process_exited)
        except ProcessLookupError:
            around.loop.call_soon(self._process_exited)

    def status(self) -> str:
        return "lingering: a fence is due" if self.over else super().status()

    def close(self) -> None:
        super().close()
        self._stop_watching()

    def _on_frame(self, data: memoryview, fds: list[int]) -> None:
        self._socket.takes_descriptors = False
        if fds:
            self._take_page(data, fds)
            return
        if data[0] == doorbell.MARK:
            self._put(data)
            return
        try:
            frame = decode_from_initiator(data, self._peer_text)
        except FrameRefused as error:
            self._offence(str(error))
            return
        if isinstance(frame, Placed | PlacedMany):
            self._hear()
            self._placed([frame] if isinstance(frame, Placed) else frame.units)
        else:
            self._received(frame)

    def _received_other(self, frame: FromInitiator) -> None:
        if isinstance(frame, Map):
            self._map(frame)
        else:
            super()._received_other(frame)

    def _take_page(self, data: memoryview, fds: list[int]) -> None:
        """Descriptors are taken beside the first frame only."""
        page = fds.pop()
        for fd in fds:
            os.close(fd)
        try:
            known = not fds and isinstance(decode_from_initiator(data, self._peer_text), Answers)
        except FrameRefused:
            known = False
        if not known:
            os.close(page)
            self._offence("descriptors that nobody asked for")
            return
        try:
            self._page = AnswersGiven.of(page)
        except InvalidDescriptor as error:
            self._offence(str(error))

    def _put(self, data: memoryview) -> None:
        if self._tickets or self._silent:
            self._hear()
        self._bell.heard()
        if self._puts is None:
            self._puts = self._around.ledger.run_puts(self)
        try:
            seq, awaited = self._puts.take(data, self._page)
        except KVError as error:
            try:
                self._send(refusal(doorbell.seq_of(data, self.peer), error))
            except FrameRefused as offence:
                self._offence(str(offence))
            return
        if awaited:
            # Whoever waits for the notification is woken first, and may answer with a put.
            self._around.loop.call_soon(self._acknowledge, seq, self._bell.rung)

    def _acknowledge(self, seq: int, rung: int) -> None:
        if self._page is None or self._bell.rung == rung:
            self._send(Acked(seq))

    def _placed(self, frames: list[Placed]) -> None:
        seqs: list[int] = []
        for frame in frames:
            try:
                self._around.ledger.place(self, frame.unit)
            except KVError as error:
                self._send(refusal(frame.seq, error))
            else:
                seqs.append(frame.seq)
        if not seqs:
            return
        answer = Acked(seqs[0]) if len(seqs) == 1 else AckedMany(seqs)
        if any(frame.unit.notif for frame in frames):
            # Whoever waits for a notification is woken first: the writer does not wait, it has gone on.
            self._around.loop.call_soon(self._send, answer)
        else:
            self._send(answer)

    def _map(self, frame: Map) -> None:
        try:
            writable = self._around.ledger.may_map(self, frame.region, frame.ticket, write=frame.write)
            memory = self._around.ledger.memory(frame.region)
        except KVError as error:
            self._send(refusal(frame.seq, error))
            return
        mode = os.O_RDWR if writable else os.O_RDONLY
        # Opened anew: a read-only descriptor cannot be mapped for writing, whatever the peer tries.
        fd = os.open(f"/proc/self/fd/{memory.fileno()}", mode | os.O_CLOEXEC)
        try:
            reply = Mapped(frame.seq, memory.nbytes, isinstance(memory, Arena))
            self._socket.send(encode(reply), [fd])
        finally:
            os.close(fd)

    def _send(self, frame: Frame) -> None:
        self._socket.send(encode(frame))

    def _shut(self) -> None:
        self._socket.close()
        page, self._page = self._page, None
        if page is not None:
            page.close()

    def _connection_over(self) -> None:
        if not self._around.ledger.may_still_write(self.peer):
            self._stop_watching()
            self._gone()

    def _process_exited(self) -> None:
        self._stop_watching()
        error = ConnectionLost(peer=str(self.peer), transport="shm", cause="the process has exited")
        self._around.ledger.process_gone(self.peer, error)
        if self.over:
            self._gone()
        else:
            self._finish(error, clean=True)

    def _stop_watching(self) -> None:
        if self._pidfd >= 0:
            self._around.loop.remove_reader(self._pidfd)
            os.close(self._pidfd)
            self._pidfd = -1

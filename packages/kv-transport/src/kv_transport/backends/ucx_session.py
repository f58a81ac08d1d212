"""The owner's end of a UCX connection: hands out remote keys, verifies what was placed, confirms what was read.

A remote key does not know tickets: whoever has one writes until the endpoint is gone. So a grant that ends early asks
the writer to confirm, and one that does not answer in time loses its endpoint, after which nothing of it lands here.
"""

import asyncio
from collections.abc import Callable
from functools import partial
from typing import Protocol

from kv_core.checksum import crc64
from kv_core.errors import KVError
from kv_transport import limits
from kv_transport.backends.base import Surroundings
from kv_transport.backends.rma_session import RmaSession, landed_checks
from kv_transport.backends.ucx_wire import UcxConnection
from kv_transport.errors import FrameRefused
from kv_transport.frames import (
    Data,
    Frame,
    FromInitiator,
    Keyed,
    Map,
    Read,
    decode_from_initiator,
    encode,
    pack_checks,
    refusal,
)
from kv_transport.lease_table import Serving
from kv_transport.ledger_items import Landing
from kv_transport.types import PeerName
from kv_transport.workers import WorkerPool

_POLITE_S = 0.2
"""How long a goodbye may take to get out."""

TellKey = Callable[[int, bytes, KVError | None], None]
"""Called with the address, the key and an error, on the loop."""


class KeyCabinet(Protocol):
    """Registers regions once and gives their keys to connections; called on the loop."""

    def give_key(self, holder: object, region: int, tell: TellKey) -> None: ...
    def take_back(self, holder: object) -> None:
        """The holder's endpoint is closed: regions that nobody else has a key of are unmapped."""
        ...


class UcxSession(RmaSession):
    """See the module."""

    scheme = "ucx"

    def __init__(
        self,
        around: Surroundings,
        peer: PeerName,
        connection: UcxConnection,
        workers: WorkerPool,
        cabinet: KeyCabinet,
        on_gone: Callable[["UcxSession"], None],
    ) -> None:
        super().__init__(around, peer, lambda: None)
        self.closed = asyncio.Event()
        self.connection = connection
        self._workers = workers
        self._cabinet = cabinet
        self._on_gone = on_gone
        self._fence_timers: dict[int, asyncio.TimerHandle] = {}

    @property
    def may_lag(self) -> bool:  # type: ignore[override]  # a plain attribute where it never changes
        """What was in flight may come until our endpoint is closed."""
        return not self.closed.is_set()

    def arrive(self, body: memoryview) -> None:
        """A frame of the writer, still sealed."""
        if self.over:
            return
        try:
            frame = decode_from_initiator(self.connection.open_frame(body, str(self.peer)), str(self.peer))
        except FrameRefused as error:
            self._offence(str(error))
            return
        self._received(frame)

    def send_fence(self, ticket: int) -> None:
        super().send_fence(ticket)
        if not self.over:
            delay_s = self._around.config.fence_timeout_ms / 1000
            self._fence_timers[ticket] = self._around.loop.call_later(delay_s, self._fence_late, ticket)

    def _fence_late(self, ticket: int) -> None:
        self._fence_timers.pop(ticket, None)
        if not self.over and any(entry.grant.ticket == ticket for entry in self._around.ledger.grants()):
            self._lost("it did not confirm a fence")

    def _received_other(self, frame: FromInitiator) -> None:
        match frame:
            case Map():
                self._map(frame)
            case Read():
                self._read(frame)
            case _:
                super()._received_other(frame)

    def _map(self, frame: Map) -> None:
        ledger = self._around.ledger
        try:
            ledger.may_map(self, frame.region, frame.ticket, write=frame.write)
            nbytes = ledger.memory(frame.region).nbytes
        except KVError as error:
            self._send(refusal(frame.seq, error))
            return

        def tell(address: int, key: bytes, error: KVError | None) -> None:
            if not self.over:
                answer = refusal(frame.seq, error) if error is not None else Keyed(frame.seq, address, nbytes, key)
                self._send(answer)

        self._cabinet.give_key(self, frame.region, tell)

    def _read(self, frame: Read) -> None:
        """The peer has read: these were the bytes, if they still are what it asked for."""
        try:
            serving = self._around.ledger.reads.serve(self, frame.unit)
        except KVError as error:
            self._send(refusal(frame.seq, error))
            return
        if serving.checks:
            self._send(Data(frame.seq, pack_checks(serving.checks)))
        else:
            self._in_worker(sum(serving.sizes), partial(self._sum_served, frame.seq, serving))

    def _sum_served(self, seq: int, serving: Serving) -> None:
        view = serving.memory.data_view
        spans = zip(serving.offsets, serving.sizes, strict=True)
        checks = [crc64(view[offset : offset + size]) for offset, size in spans]
        self._around.poster.run(partial(self._answer, Data(seq, pack_checks(checks))))

    def _answer(self, frame: Frame) -> None:
        if not self.over:
            self._send(frame)

    def _verify(self, seq: int, landing: Landing) -> None:
        self._in_worker(landing.nbytes, partial(self._sum_landed, seq, landing))

    def _sum_landed(self, seq: int, landing: Landing) -> None:
        checks = landed_checks(landing)
        self._around.poster.run(partial(self._verified, seq, landing, checks))

    def _in_worker(self, nbytes: int, job: Callable[[], None]) -> None:
        if nbytes <= limits.INLINE_COPY_BYTES_MAX:
            job()
        else:
            self._workers.submit(job)

    def _send(self, frame: Frame) -> None:
        connection = self.connection
        connection.engine.call(partial(connection.send, encode(frame)))

    def _shut(self) -> None:
        for timer in self._fence_timers.values():
            timer.cancel()
        self._fence_timers.clear()
        connection, loop = self.connection, self._around.loop
        closed = partial(self._around.poster.post, self._connection_closed)
        connection.engine.call(partial(connection.close, closed, polite=True))
        loop.call_later(_POLITE_S, connection.engine.call, connection.hurry)

    def _connection_closed(self) -> None:
        """Nothing that the peer wrote can land any more, whatever it does."""
        self.closed.set()
        self._cabinet.take_back(self)
        self.writer_at_rest()

    def _gone(self) -> None:
        self._on_gone(self)

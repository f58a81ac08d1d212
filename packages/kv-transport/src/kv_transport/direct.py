"""One small unit that is posted at once: no queue and no flow, as long as nothing goes wrong.

A prepared transfer of few bytes over a standing link costs less to move than to keep books on. So the caller's own call
moves it, and this record is what there is of it until the peer has acknowledged it. Whatever else comes of it makes a
`Flow` take over: it retries, takes another link or says why not, as for any other transfer.

DP1: it is listed, counted and answered for as a flow is. DP2: its memory is at rest when the record says so, and not
before: with the acknowledgement, or with the flow.
"""

import asyncio
from collections.abc import Callable
from typing import Final, Protocol

from kv_core.clock import Clock
from kv_core.errors import KVError
from kv_transport.backends.base import Link
from kv_transport.errors import TransferTimeout
from kv_transport.types import TransferPriority, TransferStats, XferState
from kv_transport.units import Unit


class Posting(Protocol):
    """One transfer that this side posted, however it is carried."""

    @property
    def name(self) -> str: ...

    @property
    def kind(self) -> str: ...

    @property
    def link(self) -> Link | None: ...

    @property
    def state(self) -> XferState: ...

    @property
    def error(self) -> KVError | None: ...

    @property
    def at_rest(self) -> bool: ...

    @property
    def total_bytes(self) -> int: ...

    def stats(self) -> TransferStats: ...

    async def wait(self, timeout_ms: int | None) -> TransferStats: ...

    async def released(self) -> None: ...


class DirectPost:
    """See the module. Implements `Posting`; lives on the loop, made and ended by `Peer`."""

    __slots__ = ("_clock", "_heir", "_link", "_settled", "_started_ns", "_stats", "name", "on_release", "unit")

    def __init__(self, name: str, unit: Unit, link: Link, clock: Clock, on_release: Callable[[Posting], None]) -> None:
        self.name: Final = name
        self.unit: Final = unit
        self.on_release: Final = on_release
        self._link = link
        self._clock = clock
        self._started_ns = clock.monotonic_ns()
        self._stats: TransferStats | None = None
        self._heir: Posting | None = None
        self._settled: asyncio.Event | None = None

    @property
    def kind(self) -> str:
        return "xfer"

    @property
    def priority(self) -> TransferPriority:
        return self.unit.priority

    @property
    def total_bytes(self) -> int:
        return self.unit.nbytes

    @property
    def link(self) -> Link | None:
        return self._link if self._heir is None else self._heir.link

    @property
    def state(self) -> XferState:
        if self._heir is not None:
            return self._heir.state
        return XferState.POSTED if self._stats is None else XferState.DONE

    @property
    def error(self) -> KVError | None:
        return self._heir.error if self._heir is not None else None

    @property
    def at_rest(self) -> bool:
        return self._heir.at_rest if self._heir is not None else self._stats is not None

    def stats(self) -> TransferStats:
        if self._heir is not None:
            return self._heir.stats()
        return self._stats or TransferStats(duration_ns=self._clock.monotonic_ns() - self._started_ns)

    async def wait(self, timeout_ms: int | None) -> TransferStats:
        """As `Flow.wait`."""
        if timeout_ms is None:
            await self.released()
        else:
            try:
                async with asyncio.timeout(timeout_ms / 1000):
                    await self.released()
            except TimeoutError:
                late = TransferTimeout(what=self.kind, request=self.name, timeout_ms=timeout_ms, missing_layers=[])
                raise late from None
        if self.error is not None:
            raise self.error
        return self.stats()

    async def released(self) -> None:
        """As `Flow.released`."""
        if self._stats is None and self._heir is None:
            if self._settled is None:
                self._settled = asyncio.Event()
            await self._settled.wait()
        if self._heir is not None:
            await self._heir.released()

    # For the peer.

    def landed(self) -> None:
        """Its bytes are verified at their destination."""
        nbytes = self.unit.nbytes
        self._stats = TransferStats(
            nbytes=nbytes,
            wire_nbytes=nbytes,
            units=1,
            transports={self._link.scheme: nbytes},
            duration_ns=self._clock.monotonic_ns() - self._started_ns,
            codecs={"none": 1},
        )
        self.on_release(self)
        self._wake()

    def give_way(self, heir: Posting) -> None:
        """It came back: from now on this is what becomes of it."""
        self._heir = heir
        self._wake()

    def _wake(self) -> None:
        if self._settled is not None:
            self._settled.set()

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

from kv_core.errors import KVError
from kv_transport.backends.base import Link
from kv_transport.codec_choice import CodecPolicy
from kv_transport.errors import TransferTimeout
from kv_transport.types import TransferPriority, TransferStats, XferOp, XferState
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


class DirectHost(Protocol):
    """Who makes direct posts: their peer."""

    def direct_settled(self, post: "DirectPost", error: KVError | None) -> None: ...


class DirectPost:
    """See the module. Implements `Posting`; lives on the loop, made and ended by `Peer`.

    The answer may lie where nobody is told of it (`Link.take_answers`): whoever asks how it stands looks there first.
    """

    __slots__ = (
        "_ended_ns",
        "_heir",
        "_host",
        "_link",
        "_waiters",
        "key",
        "name",
        "on_release",
        "policy",
        "since_ns",
        "unit",
    )

    def __init__(
        self,
        host: DirectHost,
        key: int,
        name: str,
        unit: Unit,
        link: Link,
        policy: Callable[[], CodecPolicy],
        on_release: Callable[[Posting], None],
    ) -> None:
        self.key: Final = key
        self.name: Final = name
        self.unit: Final = unit
        self.policy: Final = policy
        self.on_release: Final = on_release
        self.since_ns = 0
        self._host = host
        self._link = link
        self._ended_ns = 0
        self._heir: Posting | None = None
        self._waiters: list[asyncio.Future[None]] = []

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
    def first_link(self) -> Link:
        """The one that it was posted to."""
        return self._link

    @property
    def landed_here(self) -> bool:
        """The link that it was posted to has carried it."""
        return self._ended_ns > 0

    @property
    def state(self) -> XferState:
        if self._heir is None and self.at_rest:
            return XferState.DONE
        return XferState.POSTED if self._heir is None else self._heir.state

    @property
    def error(self) -> KVError | None:
        return self._heir.error if self._heir is not None else None

    @property
    def at_rest(self) -> bool:
        if not self._ended_ns and self._heir is None:
            self._link.take_answers()
        return self._ended_ns > 0 or (self._heir is not None and self._heir.at_rest)

    def stats(self) -> TransferStats:
        if self._heir is not None:
            return self._heir.stats()
        if not self._ended_ns:
            return TransferStats()
        nbytes = self.unit.nbytes
        return TransferStats(
            nbytes=nbytes,
            wire_nbytes=nbytes,
            units=1,
            transports={self._link.scheme: nbytes},
            duration_ns=self._ended_ns - self.since_ns,
            codecs={"none": 1},
        )

    async def wait(self, timeout_ms: int | None) -> TransferStats:
        """As `Flow.wait`."""
        if timeout_ms is None or self.at_rest:
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
        if self._pending():
            self._link.want_answers()  # it looks, too
        if self._pending():
            waiter = asyncio.get_running_loop().create_future()
            self._waiters.append(waiter)
            await waiter
        if self._heir is not None:
            await self._heir.released()

    def _pending(self) -> bool:
        return not self._ended_ns and self._heir is None

    # For the peer.

    def settle(self, error: KVError | None) -> None:
        """The link is done with it."""
        self._host.direct_settled(self, error)

    def landed(self) -> None:
        """Its bytes are verified at their destination."""
        # A put ends with the peer's answer, which was taken just now; a read asks nobody.
        self._ended_ns = self._link.heard_ns if self.unit.op is XferOp.WRITE else self._link.now_ns()
        self.on_release(self)
        self._wake()

    def give_way(self, heir: Posting) -> None:
        """It came back: from now on this is what becomes of it."""
        self._heir = heir
        self._wake()

    def _wake(self) -> None:
        for waiter in self._waiters:
            if not waiter.done():
                waiter.set_result(None)

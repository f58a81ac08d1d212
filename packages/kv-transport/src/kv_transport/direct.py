"""One unit that is posted at once: no queue and no flow, as long as nothing goes wrong.

A prepared transfer of one unit over a standing link costs less to move than to keep books on, or not much more. So the
caller's own call posts it, and moves it where it is small, and this record is what there is of it until it is verified;
the next time it is posted again.
Whatever else comes of it makes a `Flow` take over: it retries, takes another link or says why not, as for any other
transfer.

DP1: it is listed, counted and answered for as a flow is. DP2: its memory is at rest when the record says so, and not
before: with the acknowledgement (a read: when it is verified here), or with the flow. DP3: it is posted again only when
it is at rest and ended well, and who waited for it until then hears of that.
"""

import asyncio
from collections.abc import Callable
from typing import Final, Protocol

from kv_core.errors import KVError
from kv_transport.backends.base import Link
from kv_transport.codec_choice import CodecPolicy
from kv_transport.errors import TransferTimeout
from kv_transport.regions import RegionTable
from kv_transport.stats import Totals
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

    def done_well(self) -> TransferStats | None:
        """`stats`, if it has ended and every byte is verified."""
        ...

    async def released(self) -> None: ...


class DirectHost(Protocol):
    """Who makes direct posts: their peer."""

    def post_again(self, post: "DirectPost", put: int) -> bool: ...
    def direct_landed(self, post: "DirectPost") -> None: ...
    def direct_bounced(self, post: "DirectPost", error: KVError) -> None: ...


class DirectDesk:
    """What all direct posts of an agent share: its regions and sums, and what is done where a flow takes over."""

    __slots__ = ("loop", "over", "policy", "regions", "totals")

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        regions: RegionTable,
        totals: Totals,
        policy: Callable[[], CodecPolicy],
        over: Callable[[Posting], None],
    ) -> None:
        """`over` counts a flow that has ended."""
        self.loop: Final = loop
        self.regions: Final = regions
        self.totals: Final = totals
        self.policy: Final = policy
        self.over: Final = over


class DirectPost:
    """See the module. Implements `Posting`; lives on the loop, made by `Peer`.

    The answer may lie where nobody is told of it (`Link.take_answers`): whoever asks how it stands looks there first.
    """

    __slots__ = (
        "_desk",
        "_ended_ns",
        "_heir",
        "_link",
        "_waiters",
        "host",
        "name",
        "region",
        "since_ns",
        "unit",
    )

    def __init__(self, host: DirectHost, desk: DirectDesk, name: str, unit: Unit, region: int, link: Link) -> None:
        """Of a unit that is about to be posted: its host has found room for it, and holds its `region`."""
        self.host: Final = host
        self.name: Final = name
        self.unit: Final = unit
        self.region: Final = region
        self.since_ns = 0
        self._desk: Final = desk
        self._link: Final = link
        self._ended_ns = 0
        self._heir: Posting | None = None
        self._waiters: list[asyncio.Future[TransferStats | None]] = []

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
    def desk(self) -> DirectDesk:
        return self._desk

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
            nbytes, nbytes, 1, 0, {self._link.scheme: nbytes}, self._ended_ns - self.since_ns, {"none": 1}
        )

    def done_well(self) -> TransferStats | None:
        """As `Flow.done_well`."""
        if self._heir is not None:
            return self._heir.done_well()
        if not self._ended_ns:
            self._link.take_answers()
        return self.stats() if self._ended_ns else None

    async def wait(self, timeout_ms: int | None) -> TransferStats:
        """As `Flow.wait`."""
        found: TransferStats | None = None
        if timeout_ms is None or self.at_rest:
            waiter = self._told()
            if waiter is not None:
                found = await waiter
            if self._heir is not None and found is None:
                await self._heir.released()
        else:
            try:
                async with asyncio.timeout(timeout_ms / 1000):
                    found = await self._ended()
            except TimeoutError:
                late = TransferTimeout(what=self.kind, request=self.name, timeout_ms=timeout_ms, missing_layers=[])
                raise late from None
        if found is None and self.error is not None:
            raise self.error
        return found or self.stats()

    async def released(self) -> None:
        """As `Flow.released`."""
        await self._ended()

    async def _ended(self) -> TransferStats | None:
        """Its figures, if it landed meanwhile."""
        waiter = self._told()
        found = await waiter if waiter is not None else None
        if self._heir is not None and found is None:
            await self._heir.released()
        return found

    def _told(self) -> "asyncio.Future[TransferStats | None] | None":
        """Done when it has landed, with its figures, or has come back; None where that is so already.

        Figures of then: by the time its caller goes on it may be posted again.
        """
        if self._pending():
            self._link.want_answers()  # it looks, too
        if not self._pending():
            return None
        waiter: asyncio.Future[TransferStats | None] = self._desk.loop.create_future()
        self._waiters.append(waiter)
        return waiter

    def _pending(self) -> bool:
        return not self._ended_ns and self._heir is None

    # For the agent and the peer.

    def again(self, put: int) -> bool:
        """Post the unit once more, as put number `put`, if nothing else has changed than its bytes.

        Returns:
            Whether it is posted; if not, nothing has happened: it may be in flight, or need another link.

        Raises:
            UnknownRegion: our memory is not registered any more.
        """
        if not self._ended_ns:
            self._link.take_answers()
        if not self._ended_ns:
            return False
        regions = self._desk.regions
        regions.hold(self.region)
        ended_ns, self._ended_ns = self._ended_ns, 0
        if self.host.post_again(self, put):
            return True
        self._ended_ns = ended_ns
        regions.let_go(self.region)
        return False

    def settle(self, error: KVError | None) -> None:
        """The link is done with it."""
        if error is None:
            self.host.direct_landed(self)
        else:
            self.host.direct_bounced(self, error)

    def landed(self) -> None:
        """Its bytes are verified at their destination."""
        link, desk = self._link, self._desk
        # A put ends with the peer's answer, which was taken just now; a read asks nobody.
        self._ended_ns = link.heard_ns if self.unit.op is XferOp.WRITE else link.now_ns()
        desk.regions.let_go(self.region)
        desk.totals.count_put(link.scheme, self.unit.cells.nbytes)
        if self._waiters:
            self._wake()

    def heir_over(self, heir: Posting) -> None:
        """What took over has ended."""
        self._desk.regions.let_go(self.region)
        self._desk.over(heir)

    def give_way(self, heir: Posting) -> None:
        """It came back: from now on this is what becomes of it."""
        self._heir = heir
        self._wake()

    def _wake(self) -> None:
        waiters, self._waiters = self._waiters, []
        stats = self.stats() if self._heir is None else None
        for waiter in waiters:
            if not waiter.done():
                waiter.set_result(stats)

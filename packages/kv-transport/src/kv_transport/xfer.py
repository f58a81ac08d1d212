"""Prepared descriptor lists and the transfers made of them."""

from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Final, Self

from kv_core.ids import NodeId, RegionId
from kv_transport import limits
from kv_transport.descriptors import cut_units, split_pieces
from kv_transport.direct import DirectPost, Posting
from kv_transport.errors import GrantRefused, InvalidDescriptor, TransferTooLarge, XferActive
from kv_transport.regions import RegionTable, XferDesc
from kv_transport.tickets import RegionInfo
from kv_transport.types import Access, TransferPriority, TransferStats, XferOp, XferState
from kv_transport.units import Unit


class XferDlist:
    """Checked pieces of one side's memory. Made by `TransferAgent.prep_xfer_dlist`."""

    __slots__ = ("_descs", "node")

    def __init__(self, node: NodeId | None, descs: Sequence[XferDesc]) -> None:
        self.node = node
        self._descs = tuple(descs)

    def __len__(self) -> int:
        return len(self._descs)

    def pick(self, indices: Sequence[int]) -> list[XferDesc]:
        """Those pieces, in that order. Raises `InvalidDescriptor` for an index that is not there."""
        try:
            if min(indices, default=0) < 0:
                raise IndexError
            return [self._descs[index] for index in indices]
        except IndexError:
            raise InvalidDescriptor(
                what="indices", value=len(indices), reason=f"they go beyond the {len(self._descs)} prepared pieces"
            ) from None


class Xfer:
    """A transfer handle: post it with `TransferAgent.transfer`, again when it is done if you like.

    Release it, or use it as `async with`; one in flight cannot be released, since its memory is in use.
    """

    def __init__(
        self,
        name: str,
        op: XferOp,
        node: NodeId,
        local: list[XferDesc],
        remote: list[XferDesc],
        notif: bytes,
        priority: TransferPriority,
        on_release: Callable[["Xfer"], None],
    ) -> None:
        self.name = name
        self.op = op
        self.node = node
        self.local = local
        self.remote = remote
        self.notif = notif
        self.priority = priority
        self._on_release = on_release
        self._posting: Posting | None = None
        self.direct: DirectPost | None = None
        """The posting at work, or the last one, where a link moves it at once: it can be posted again."""
        self._gone = False
        self._units: list[Unit] = []
        self.total_bytes: Final = sum(desc.nbytes for desc in local)
        self.regions: Final = frozenset(int(desc.region) for desc in local)

    @property
    def state(self) -> XferState:
        if self._gone:
            return XferState.RELEASED
        return self._posting.state if self._posting is not None else XferState.PENDING

    def units(self, regions: RegionTable, unit_bytes: Callable[[int], int]) -> list[Unit]:
        """For the agent: what to post, made once however often the transfer is posted."""
        if not self._units:
            self._units = plain_units(self, regions, unit_bytes(self.total_bytes))
        return self._units

    def begin(self, posting: Posting) -> None:
        """For the agent: this is the posting at work."""
        self._posting = posting
        self.direct = posting if isinstance(posting, DirectPost) else None

    def require_idle(self, action: str) -> None:
        """Raise `XferActive` while it is in flight, or after it was released."""
        active = self._posting is not None and not self._posting.at_rest
        if active or (self._gone and action != "release"):
            raise XferActive(xfer=self.name, state=self.state.value, action=action)

    async def done(self, timeout_ms: int | None = None) -> TransferStats:
        """Until every byte is verified at its destination.

        Raises:
            TransferTimeout: not within `timeout_ms`. The transfer goes on; its memory stays in use.
            XferActive: it was never posted.
            TransportError: it failed and its memory is free.
        """
        if self._posting is None:
            raise XferActive(xfer=self.name, state=self.state.value, action="waiting before it is posted")
        return self._posting.done_well() or await self._posting.wait(timeout_ms)

    def release(self) -> None:
        """End the handle. Raises `XferActive` while its memory is in use. Idempotent."""
        self.require_idle("release")
        if not self._gone:
            self._gone = True
            self.direct = None
            self._on_release(self)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Waits until the memory is free, then releases."""
        if self._posting is not None:
            await self._posting.released()
        self.release()


def check_pairs(
    op: XferOp,
    mine: Sequence[XferDesc],
    theirs: Sequence[XferDesc],
    region_of: Callable[[RegionId], RegionInfo],
    notif: bytes,
) -> None:
    """Whether these pieces can be moved between.

    Args:
        region_of: what the peer says about a region of its own.

    Raises:
        InvalidDescriptor: the lists do not fit together, or a read carries a notification.
        GrantRefused: the peer has not opened that region for this operation.
        TransferTooLarge: the notification is too long.
    """
    if not mine or len(mine) != len(theirs):
        raise InvalidDescriptor(what="lists", value=[len(mine), len(theirs)], reason="need as many of each, not none")
    for ours, other in zip(mine, theirs, strict=True):
        if ours.nbytes != other.nbytes:
            raise InvalidDescriptor(what="pieces", value=[ours.nbytes, other.nbytes], reason="lengths differ")
    allowed = (Access.WRITE.value,) if op is XferOp.WRITE else (Access.READ.value, Access.WRITE.value)
    for region in {desc.region for desc in theirs}:
        if region_of(region).access not in allowed:
            raise GrantRefused(ticket=0, reason=f"the peer has not opened region {region} for {op.value}")
    if op is XferOp.READ and notif:
        raise InvalidDescriptor(what="notif", value=len(notif), reason="a read tells its peer nothing")
    check_notif(notif)


def check_notif(payload: bytes) -> None:
    """Raise `TransferTooLarge` for more than one notification holds."""
    if len(payload) > limits.NOTIF_BYTES_MAX:
        raise TransferTooLarge(what="notification", size=len(payload), limit=limits.NOTIF_BYTES_MAX)


def plain_units(xfer: Xfer, regions: RegionTable, unit_bytes: int) -> list[Unit]:
    """Units of one local and one remote region each; the last one carries the notification."""
    groups: dict[tuple[RegionId, RegionId], list[tuple[int, int, int]]] = {}
    for mine, theirs in zip(xfer.local, xfer.remote, strict=True):
        groups.setdefault((mine.region, theirs.region), []).append((mine.offset, theirs.offset, mine.nbytes))
    units = []
    for (mine_region, their_region), pieces in groups.items():
        cells = split_pieces(pieces, min(limits.COPY_PIECE_BYTES, unit_bytes))
        memory = regions.get(mine_region).memory
        units += [
            Unit(xfer.op, xfer.priority, int(their_region), memory, cells.part(start, end))
            for start, end in cut_units(cells.sizes, unit_bytes)
        ]
    units[-1].notif = xfer.notif
    return units

"""Synchronisation: a replica that is new, or behind further than logs reach, takes the state of a peer.

The one that lacks it pulls pages; whoever serves keeps nothing between them. A server that is new itself gives only the
purges that it kept over its restart. The pages are not one moment's picture,
because the server goes on; they are made one by keeping, for the origins whose claims are sent (`snapshots`), the dot
at which the first page was made, and by replaying what came after it over them, each claim against the dot it carries.
Purges and entries are staged, claims are written as they come (they are hints). At the end everything becomes true in
one step: when all that the server had applied at the last page is either applied here, or parked and ready to follow
the snapshots.

Y1: the vector after the commit covers the server's at the last page, and is closed under dependencies. Y2: until the
commit nothing of an origin in `snapshots` is applied. Y3: a synchronisation that is given up leaves a state that the
logs or another synchronisation make right; its vector never claimed what is not there. Y4: of a request that ended, and
whose end the server's last vector covers, nothing is alive after the commit, also where the server has forgotten it:
who missed such an end takes the whole state, and what is not in it has ended.
"""

from dataclasses import dataclass, field
from enum import IntEnum
from typing import Annotated, Final

import msgspec

from kv_consistency import limits
from kv_consistency.claims import PAGE_ROW_BYTES, ShelfKey
from kv_consistency.entries import SHARDS
from kv_consistency.errors import MalformedUpdateError
from kv_consistency.hlc import Timestamp
from kv_consistency.messages import ClaimPage, EntryRow, SyncPage, SyncRequest
from kv_consistency.state import Changes, State
from kv_consistency.update import HASH_BYTES, ROW_NBYTES, RaiseCount, Tier
from kv_consistency.version_vector import Origin, Reach, VersionVector
from kv_core import limits as core_limits
from kv_core.ids import NodeId, RequestId

_ROW_BYTES: Final = 96
_NODE_BYTES: Final = 24


class _Phase(IntEnum):
    """What a page begins with, in order; `RESTORED` is all that a new server has."""

    RESTORED = 0
    RAISES = 1
    ENTRIES = 2
    CLAIMS = 3


class _Cursor(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Where a page begins: at which purge, at which shard of entries after which request, or at which origin, shelf and
    part of claims."""

    phase: _Phase
    index: Annotated[int, msgspec.Meta(ge=0, le=limits.MAX_RAISES)] = 0
    after: Annotated[str, msgspec.Meta(max_length=core_limits.MAX_NAME_BYTES)] = ""
    digest: Annotated[bytes, msgspec.Meta(max_length=HASH_BYTES)] = b""
    tier: Tier = Tier.DEVICE
    shape: Annotated[bytes, msgspec.Meta(max_length=limits.MAX_SHAPE_BYTES)] = b""
    part: Annotated[int, msgspec.Meta(ge=-1, le=255)] = -1


_ENCODE: Final = msgspec.msgpack.Encoder().encode
_DECODE: Final = msgspec.msgpack.Decoder(_Cursor).decode


def make_page(state: State, request: SyncRequest, stamp: Timestamp, bytes_max: int, ready: bool, peer: str) -> SyncPage:
    """The page that a request asks for.

    Raises:
        MalformedUpdateError: a cursor that is not ours.
    """
    cursor = _cursor_of(request, peer)
    if not ready:
        at = cursor.index if cursor.phase is _Phase.RESTORED else 0
        rows = state.scopes.rows()
        upto = at + max(1, bytes_max // ROW_NBYTES)
        more = _ENCODE(_Cursor(_Phase.RESTORED, upto)) if upto < len(rows) else b""
        return SyncPage(
            request.session,
            request.cursor,
            more,
            stamp.wall_ns,
            stamp.logical,
            raises=tuple(rows[at:upto]),
            ready=False,
        )
    first = cursor.phase is _Phase.RESTORED
    if first:
        cursor = _Cursor(_Phase.RAISES)
    have = VersionVector.of(request.have)
    snapshots: tuple[Reach, ...] = _choose_snapshots(state, have) if first else ()
    origins = tuple(reach.origin for reach in snapshots) if first else request.snapshots
    writer = _PageWriter(state, have, origins, bytes_max)
    cursor_next = writer.fill(cursor)
    return SyncPage(
        session=request.session,
        asked=request.cursor,
        cursor=b"" if cursor_next is None else _ENCODE(cursor_next),
        wall_ns=stamp.wall_ns,
        logical=stamp.logical,
        vector=state.buffer.vector().to_wire() if first or cursor_next is None else (),
        collected=state.entries.collected().to_wire() if first or cursor_next is None else (),
        snapshots=snapshots,
        floors=state.buffer.floors() if first else (),
        over=tuple(state.lives.over()) if first else (),
        raises=tuple(writer.raises),
        entries=tuple(writer.entries),
        claims=tuple(writer.claims),
    )


def _cursor_of(request: SyncRequest, peer: str) -> _Cursor:
    """Where the page begins, checked: a cursor comes back from outside."""
    if not request.cursor:
        return _Cursor(_Phase.RESTORED)
    try:
        cursor = _DECODE(request.cursor)
    except (msgspec.DecodeError, ValueError) as error:
        raise MalformedUpdateError(what="sync cursor", peer=peer, reason=str(error)) from None
    ends = {_Phase.ENTRIES: SHARDS, _Phase.CLAIMS: len(request.snapshots)}
    end = ends.get(cursor.phase)
    if end is not None and cursor.index >= end:
        raise MalformedUpdateError(what="sync cursor", peer=peer, reason=f"{cursor.index} of {end}")
    return cursor


def _choose_snapshots(state: State, have: VersionVector) -> tuple[Reach, ...]:
    """Origins whose claims are sent: where the log does not reach back, or is longer than the claims."""
    chosen = []
    for reach in state.buffer.vector().to_wire():
        behind = have[reach.origin]
        if behind >= reach.n:
            continue
        low = state.log.low(reach.origin)
        shelves = state.claims.shelves(reach.origin).values()
        claims_nbytes = sum(shelf.size for shelf in shelves) * PAGE_ROW_BYTES
        if (
            low is None
            or low > behind + 1
            or state.log.nbytes_from(reach.origin, behind + 1) > 2 * claims_nbytes + 1024
        ):
            chosen.append(reach)
    return tuple(chosen)


class _PageWriter:
    """Fills one page from a cursor on."""

    def __init__(self, state: State, have: VersionVector, origins: tuple[Origin, ...], bytes_max: int) -> None:
        self._state = state
        self._have = have
        self._origins = origins
        self._left = bytes_max
        self.raises: list[RaiseCount] = []
        self.entries: list[EntryRow] = []
        self.claims: list[ClaimPage] = []

    def fill(self, cursor: _Cursor) -> _Cursor | None:
        """Fill the page; returns where the next one begins, None when all was sent."""
        if cursor.phase is _Phase.RAISES:
            rows = self._state.scopes.published()
            upto = cursor.index + max(1, self._left // ROW_NBYTES)
            self.raises = rows[cursor.index : upto]
            self._left -= ROW_NBYTES * len(self.raises)
            if upto < len(rows):
                return _Cursor(_Phase.RAISES, upto)
            cursor = _Cursor(_Phase.ENTRIES)
        if cursor.phase is _Phase.ENTRIES:
            for shard in range(cursor.index, SHARDS):
                after = cursor.after if shard == cursor.index else ""
                for row in self._state.entries.rows(shard, self._have, RequestId(after)):
                    if self._left <= 0:
                        return _Cursor(_Phase.ENTRIES, shard, after)
                    self.entries.append(row)
                    self._left -= _ROW_BYTES + len(row.entry.request_id) + _NODE_BYTES * len(row.entry.nodes)
                    after = row.entry.request_id
            cursor = _Cursor(_Phase.CLAIMS)
        for i in range(cursor.index, len(self._origins)):
            stopped = self._fill_claims(i, cursor if i == cursor.index else _Cursor(_Phase.CLAIMS, i))
            if stopped is not None:
                return stopped
        return None

    def _fill_claims(self, index: int, cursor: _Cursor) -> _Cursor | None:
        origin = self._origins[index]
        begin = (cursor.digest, cursor.tier, cursor.shape)
        shelves = self._state.claims.shelves(origin)
        for key in sorted(key for key in shelves if key >= begin):
            # A shelf that was split since the last page is sent again from its first part: harmless, pages replace.
            parts = range(-1, 0) if shelves[key].parts is None else range(256)
            for part in parts:
                if key == begin and part < cursor.part:
                    continue
                if self._left <= 0:
                    return _Cursor(_Phase.CLAIMS, index, "", *key, part)
                page = self._state.claims.page(origin, key, part)
                self.claims.append(page)
                self._left -= 64 + len(page.hashes) + len(page.meta)
        return None


@dataclass(slots=True)
class Session:
    """One synchronisation, at the side that pulls."""

    number: int
    peer: NodeId
    have: VersionVector
    deadline_ns: int
    cursor: bytes = b""
    started: bool = False
    snapshots: dict[Origin, int] = field(default_factory=dict)
    seen: dict[Origin, set[ShelfKey]] = field(default_factory=dict)
    floors: tuple[Origin, ...] = ()
    raises: list[RaiseCount] = field(default_factory=list)
    entries: list[EntryRow] = field(default_factory=list)
    base: VersionVector = field(default_factory=VersionVector)
    collected: VersionVector = field(default_factory=VersionVector)
    target: VersionVector | None = None

    @property
    def whole(self) -> bool:
        """Whether all entries are taken, and not only those whose writes are not covered by what is here."""
        return not self.have

    def misses_ends(self, page: SyncPage, state: State) -> bool:
        """Whether the server has forgotten requests whose end is not here, so that their entries would stay alive.
        A whole state shows what was forgotten before its first page, since it is not in it."""
        buffer, shown = state.buffer, VersionVector()
        if self.whole:
            shown = self.collected if self.started else VersionVector.of(page.collected)
        return any(
            reach.n > max(buffer.available(reach.origin), shown[reach.origin]) and not buffer.retired(reach.origin)
            for reach in page.collected
        )

    def request(self) -> SyncRequest:
        """What to ask for next."""
        return SyncRequest(self.number, self.have.to_wire(), tuple(self.snapshots), self.cursor)

    def go_on(self, cursor: bytes, deadline_ns: int) -> None:
        """A page came: the next one is wanted from that cursor on, by that time."""
        self.cursor, self.deadline_ns = cursor, deadline_ns

    def take(self, page: SyncPage, state: State, changes: Changes) -> None:
        """Take the page that was asked for."""
        if not self.started:
            self.started = True
            self.floors = page.floors
            self.base = VersionVector.of(page.vector)
            for reach in page.snapshots:
                # What was applied in the meantime needs no snapshot any more.
                if reach.n > state.buffer.applied(reach.origin) and not state.buffer.retired(reach.origin):
                    self.snapshots[reach.origin] = reach.n
                    self.seen[reach.origin] = set()
                    state.buffer.freeze(reach.origin, reach.n)
        self.raises += page.raises
        self.entries += page.entries
        if len(self.entries) > limits.MAX_ENTRIES or len(self.raises) > limits.MAX_RAISES:
            raise MalformedUpdateError(what="synchronisation", peer=self.peer, reason="it does not end")
        for claims in page.claims:
            base = self.snapshots.get(claims.origin)
            if base is None or state.lives.is_over(claims.origin):
                continue
            self.seen[claims.origin].add((claims.namespace.digest, claims.tier, claims.shape))
            highest = state.take_claims(claims, base, changes)
            state.replayed[claims.origin] = max(highest, state.replayed.get(claims.origin, 0))
        if not page.cursor:
            self.target = VersionVector.of(page.vector)
        if page.collected:
            self.collected = VersionVector.of(page.collected)

    def complete(self, state: State) -> bool:
        """Whether everything the server had at the last page can be had here now."""
        buffer = state.buffer
        return self.target is not None and all(
            buffer.retired(origin) or buffer.available(origin) >= self.target[origin] for origin in self.target
        )

    def commit(self, state: State, changes: Changes) -> None:
        """Make it true, in one step."""
        assert self.target is not None
        for origin, base in self.snapshots.items():
            state.claims.drop_unseen(origin, self.seen[origin], base, changes.claims)
            state.log.restart_at(origin, base)
            changes.advanced[origin] = None
        state.take_raises(self.raises, changes)
        if self.whole and state.entries.size:
            state.forget_entries({row.entry.request_id for row in self.entries}, self.base, changes)
        for row in self.entries:
            state.take_row(row, changes)
        state.entries.note_collected(self.collected)
        state.apply(state.buffer.thaw(advance=True), changes)
        for floor in (*self.floors, *state.buffer.floors()):
            state.retire(floor, changes)
            state.entries.retire(floor)

    def abandon(self, state: State, changes: Changes) -> None:
        """Give it up: what was frozen goes on from where it was."""
        state.apply(state.buffer.thaw(advance=False), changes)

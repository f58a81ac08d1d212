"""The KV of requests: one register for each, which many may write and the greatest write wins.

The order of writes to one request is `(owner epoch, ended, purges followed, length, stamp)`. It is total, so replicas
that have the same writes have the same entries, whatever the order they came in; and because an owner epoch fences the
ones below it, an ended request stays ended, and a longer prefix never gives way to a shorter one.

E1: the entry of a request is the greatest write applied. E2: within one owner epoch and set of purges its length only
grows. E3: an ended entry is kept until every living member has applied the write that ended it and nothing older can
come any more; what is forgotten then is remembered as `collected`, so that whoever missed the end can tell.
"""

from collections import deque
from collections.abc import Callable, Container, Iterator
from enum import Enum
from typing import Final

import msgspec
import xxhash

from kv_consistency import limits
from kv_consistency.hlc import Timestamp
from kv_consistency.messages import EntryRow
from kv_consistency.update import EntryWritten, NamespaceRef, OwnerEpoch
from kv_consistency.version_vector import Dot, Origin, VersionVector
from kv_core.ids import RequestId

SHARDS: Final = 256
_LENGTH_BITS: Final = 21
_WALL_BITS: Final = 63
_LOGICAL_BITS: Final = 32
_STAMP_BITS: Final = _WALL_BITS + _LOGICAL_BITS
_PURGES_BITS: Final = 32
_LENGTH_SHIFT: Final = _STAMP_BITS
_PURGES_SHIFT: Final = _LENGTH_SHIFT + _LENGTH_BITS
_ENDED: Final = 1 << (_PURGES_SHIFT + _PURGES_BITS)
_HOMES_MAX: Final = 1 << 16
_FIRST: Final = RequestId("")


class Home(msgspec.Struct, frozen=True, gc=False, cache_hash=True):
    """What many entries have in common, kept once: writer, owner, storage nodes, namespace."""

    writer: Origin
    epoch: OwnerEpoch
    nodes: tuple[Origin, ...]
    namespace: NamespaceRef | None


class Row(msgspec.Struct, gc=False):
    """One entry. `rank` packs everything of the order but the owner epoch; `access_ns` is local."""

    rank: int
    n: int
    checksum: int
    home: Home
    access_ns: int

    @property
    def seq_len(self) -> int:
        """Tokens of KV."""
        return self.rank >> _LENGTH_SHIFT & ((1 << _LENGTH_BITS) - 1)

    @property
    def ended(self) -> bool:
        """Whether the request is over."""
        return self.rank >= _ENDED

    @property
    def purges(self) -> int:
        """How many purges of its namespace it followed."""
        return self.rank >> _PURGES_SHIFT & ((1 << _PURGES_BITS) - 1)

    @property
    def stamp(self) -> Timestamp:
        """The stamp of the write."""
        wall = self.rank >> _LOGICAL_BITS & ((1 << _WALL_BITS) - 1)
        return Timestamp(wall, self.rank & ((1 << _LOGICAL_BITS) - 1), self.home.writer.node)

    @property
    def dot(self) -> Dot:
        """The dot of the write."""
        return Dot(self.home.writer, self.n)


class Outcome(Enum):
    """What a write did to its entry."""

    LOST = "lost"
    WRITTEN = "written"
    FENCED = "fenced"
    """Written, and it fences work for a former owner."""
    ENDED = "ended"
    REFUSED = "refused"
    """The table is full."""


class EntryTable:
    """All entries of one replica."""

    __slots__ = ("_collected", "_ended", "_entries_max", "_forgotten", "_homes", "_shards", "refused", "size")

    def __init__(self, entries_max: int = limits.MAX_ENTRIES) -> None:
        self._entries_max = entries_max
        self._shards: list[dict[RequestId, Row]] = [{} for _ in range(SHARDS)]
        self._homes: dict[Home, Home] = {}
        self._ended: deque[tuple[RequestId, Dot]] = deque()
        self._forgotten: dict[RequestId, OwnerEpoch] = {}
        self._collected: dict[Origin, int] = {}
        self.size = 0
        self.refused = 0

    @property
    def full(self) -> bool:
        """Whether no new request can be taken."""
        return self.size >= self._entries_max

    def get(self, request_id: RequestId) -> Row | None:
        """The entry of a request, ended or not."""
        return self._shards[_shard(request_id)].get(request_id)

    def apply(self, dot: Dot, wall_ns: int, logical: int, op: EntryWritten, now_ns: int) -> Outcome:
        """Apply one write."""
        shard = self._shards[_shard(op.request_id)]
        old = shard.get(op.request_id)
        rank = (
            (_ENDED if op.ended else 0)
            | min(op.namespace_epoch, (1 << _PURGES_BITS) - 1) << _PURGES_SHIFT
            | op.seq_len << _LENGTH_SHIFT
            | wall_ns << _LOGICAL_BITS
            | logical
        )
        if old is None:
            over = self._forgotten.get(op.request_id)
            if over is not None and op.epoch <= over:
                return Outcome.LOST  # what ended stays ended, also where the end is forgotten
            if self.size >= self._entries_max:
                self.refused += 1
                return Outcome.REFUSED
            self.size += 1
        elif not _above(op.epoch, rank, dot, old):
            return Outcome.LOST
        shard[op.request_id] = Row(rank, dot.n, op.checksum, self._home(dot.origin, op), now_ns)
        if op.ended:
            self._ended.append((op.request_id, dot))
            return Outcome.ENDED
        if old is not None and old.home.epoch < op.epoch:
            return Outcome.FENCED
        return Outcome.WRITTEN

    def collect(self, stable: VersionVector) -> None:
        """Forget ended entries that `stable` covers: everybody has applied their end, and whatever was written to
        them before."""
        while self._ended and stable.covers(self._ended[0][1]):
            request_id, dot = self._ended.popleft()
            shard = self._shards[_shard(request_id)]
            row = shard.get(request_id)
            if row is not None and row.ended and row.dot == dot:
                self._forget(request_id, row)
                self._collected[dot.origin] = max(dot.n, self._collected.get(dot.origin, 0))

    def collected(self) -> VersionVector:
        """The writes up to which ended entries were forgotten, here or where this table was taken from: whoever lacks
        one of them may hold an entry for alive of which nothing is left here."""
        return VersionVector(self._collected)

    def note_collected(self, collected: VersionVector) -> None:
        """What this table was taken from had forgotten that."""
        for origin in collected:
            self._collected[origin] = max(collected[origin], self._collected.get(origin, 0))

    def retire(self, floor: Origin) -> None:
        """Everybody has all of that node's lives before this one, so nobody can lack a write of theirs."""
        for origin in [o for o in self._collected if o.node == floor.node and o < floor]:
            del self._collected[origin]

    def unknown_to(self, listed: Container[RequestId], vector: VersionVector) -> list[RequestId]:
        """Entries whose writes `vector` covers and that are not in a full list made by whoever had applied it: there
        they have ended and are forgotten."""
        return [request_id for request_id, row in self if request_id not in listed and vector.covers(row.dot)]

    def forget(self, request_id: RequestId) -> None:
        """The request ended and everybody else has forgotten it."""
        row = self.get(request_id)
        if row is not None:
            self._forget(request_id, row)

    def forgotten(self, request_id: RequestId) -> bool:
        """Whether that request was known and ended; true for the last `MAX_FORGOTTEN` of them."""
        return request_id in self._forgotten

    def bury(self, request_id: RequestId) -> None:
        """The owner of a request died: it is over. Every replica does so by itself, so nothing is published."""
        row = self.get(request_id)
        if row is not None and not row.ended:
            row.rank |= _ENDED
            self._ended.append((request_id, row.dot))

    def owned_by(self, shard: int, lost: Callable[[Origin], bool]) -> list[tuple[RequestId, OwnerEpoch]]:
        """Requests of one shard that are not over and whose owner is lost."""
        found = []
        for request_id, row in self._shards[shard].items():
            owner = row.home.epoch.owner
            if owner is not None and row.rank < _ENDED and lost(owner):
                found.append((request_id, row.home.epoch))
        return found

    @property
    def num_shards(self) -> int:
        """Into how many parts the table is cut."""
        return len(self._shards)

    def shard_size(self, shard: int) -> int:
        """Entries of one shard."""
        return len(self._shards[shard])

    def rows(self, shard: int, have: VersionVector, after: RequestId = _FIRST) -> Iterator[EntryRow]:
        """The entries of one shard whose writes `have` does not cover, in order of request, behind `after`."""
        for request_id, row in sorted(self._shards[shard].items()):
            if request_id > after and not have.covers(row.dot):
                stamp, home = row.stamp, row.home
                op = EntryWritten(
                    request_id,
                    home.epoch,
                    0,
                    row.seq_len,
                    row.checksum,
                    home.nodes,
                    home.namespace,
                    row.purges,
                    row.ended,
                )
                yield EntryRow(row.dot, stamp.wall_ns, stamp.logical, op)

    def __iter__(self) -> Iterator[tuple[RequestId, Row]]:
        for shard in self._shards:
            yield from shard.items()

    def check(self) -> None:
        """Assert that the size is right and that every ended entry will be looked at."""
        assert self.size == sum(map(len, self._shards))
        waiting = {request_id for request_id, _ in self._ended}
        assert all(request_id in waiting for request_id, row in self if row.ended)

    def _forget(self, request_id: RequestId, row: Row) -> None:
        del self._shards[_shard(request_id)][request_id]
        self.size -= 1
        self._forgotten[request_id] = row.home.epoch
        if len(self._forgotten) > limits.MAX_FORGOTTEN:
            del self._forgotten[next(iter(self._forgotten))]

    def _home(self, writer: Origin, op: EntryWritten) -> Home:
        home = Home(writer, op.epoch, op.nodes, op.namespace)
        shared = self._homes.get(home)
        if shared is None:
            if len(self._homes) >= _HOMES_MAX:
                self._homes.clear()  # only sharing is lost
            shared = self._homes[home] = home
        return shared


def _above(epoch: OwnerEpoch, rank: int, dot: Dot, old: Row) -> bool:
    """Whether a write comes after what is there."""
    if epoch != old.home.epoch:
        return epoch > old.home.epoch
    if rank != old.rank:
        return rank > old.rank
    return dot > old.dot


def _shard(request_id: RequestId) -> int:
    return xxhash.xxh32_intdigest(request_id.encode()) & (SHARDS - 1)

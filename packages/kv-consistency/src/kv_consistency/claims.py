"""Who claims to hold which block: registers that only their holder writes.

A claim is (block, holder, namespace, tier, shape). Claims live on *shelves*, one for each holder, namespace, tier and
shape, as a dict from sequence hash to one integer that packs the dot, the position and the second hash, so that a
million claims are no work for the garbage collector. A shelf carries the number of purges of its namespace that its
claims followed.

K1: a shelf holds exactly what its holder's updates up to the applied one left there, and that followed every purge
known here. K2: a claim in a page of a snapshot, or an update that is replayed over one, wins by the higher dot.
K3: no step frees more than `sweep`'s budget: what is dropped is unreadable at once and freed later.
"""

import struct
from collections.abc import Iterator, Sequence
from operator import add
from typing import Final, NamedTuple

from kv_consistency import limits
from kv_consistency.effects import ClaimChange, ClaimsAdded, ClaimsRemoved, HolderDropped
from kv_consistency.messages import META_BYTES, ClaimPage
from kv_consistency.update import (
    HASH_BYTES,
    BlocksRemoved,
    BlocksStored,
    NamespaceRef,
    Tier,
    unpack_checks,
    unpack_hashes,
)
from kv_consistency.version_vector import Origin

_N_SHIFT: Final = 56
_POSITION_SHIFT: Final = 32
_ONE_POSITION: Final = 1 << _POSITION_SHIFT
_POSITION_MASK: Final = limits.MAX_POSITION
_CHECK_MASK: Final = (1 << 32) - 1
_META: Final = struct.Struct("<QII")

SPLIT_AT: Final = 4096
"""Claims at which a shelf is split in 256 parts, so that no dict grows so large that its growth stalls a step."""


ShelfKey = tuple[bytes, Tier, bytes]
"""Which shelf of a holder: namespace digest, tier, shape."""


class Overlap(NamedTuple):
    """How much of a prefix one holder has, in one shape."""

    holder: Origin
    namespace: NamespaceRef
    shape: bytes
    num_blocks: int
    tier: Tier


class Shelf:
    """The claims of one holder in one namespace, tier and shape."""

    __slots__ = ("epoch", "namespace", "parts", "size", "table")

    def __init__(self, namespace: NamespaceRef, epoch: int) -> None:
        self.namespace = namespace
        self.epoch = epoch
        self.table: dict[bytes, int] = {}
        self.parts: list[dict[bytes, int]] | None = None
        self.size = 0

    def get(self, block: bytes) -> int | None:
        """The packed claim of a block."""
        return (self.table if self.parts is None else self.parts[block[0]]).get(block)

    def tables(self) -> list[dict[bytes, int]]:
        """Every dict of it."""
        return [self.table] if self.parts is None else self.parts

    def put(self, hashes: Sequence[bytes], values: Sequence[int]) -> None:
        """Write claims, whatever was there."""
        if self.parts is None:
            self.table.update(zip(hashes, values, strict=True))
            self.size = len(self.table)
            if self.size > SPLIT_AT:
                self._split()
            return
        parts = self.parts
        for block, value in zip(hashes, values, strict=True):
            part = parts[block[0]]
            if block not in part:
                self.size += 1
            part[block] = value

    def put_one(self, block: bytes, value: int) -> int:
        """Write one claim; returns by how many there are more."""
        table = self.table if self.parts is None else self.parts[block[0]]
        before = len(table)
        table[block] = value
        if len(table) == before:
            return 0
        self.size += 1
        if self.parts is None and self.size > SPLIT_AT:
            self._split()
        return 1

    def pop(self, hashes: Sequence[bytes]) -> tuple[bytes, ...]:
        """Take claims away; returns those that were there."""
        if self.parts is None:
            table = self.table
            gone = tuple(block for block in hashes if table.pop(block, None) is not None)
        else:
            parts = self.parts
            gone = tuple(block for block in hashes if parts[block[0]].pop(block, None) is not None)
        self.size -= len(gone)
        return gone

    def _split(self) -> None:
        self.parts = [{} for _ in range(256)]
        for block, value in self.table.items():
            self.parts[block[0]][block] = value
        self.table = {}


class ClaimTable:
    """All claims that are readable at one replica."""

    __slots__ = ("_garbage", "_holders", "refused", "size")

    def __init__(self) -> None:
        self._holders: dict[Origin, dict[ShelfKey, Shelf]] = {}
        self._garbage: list[dict[bytes, int]] = []
        self.size = 0
        self.refused = 0
        """Claims beyond what one shelf may hold."""

    def store(
        self, holder: Origin, n: int, op: BlocksStored, purges: int, out: list[ClaimChange], replayed: bool = False
    ) -> None:
        """Apply one run.

        Args:
            purges: of the namespace, as applied here; a run that followed fewer is unreadable.
            replayed: a snapshot may already have brought what is newer.
        """
        epoch = op.epoch
        if epoch < purges:
            return
        key = (op.namespace.digest, op.tier, op.shape)
        shelves = self._holders.get(holder)
        shelf = None if shelves is None else shelves.get(key)
        if shelf is None or shelf.epoch != epoch:
            shelf = self._shelf(holder, key, op.namespace, epoch, out)
            if shelf is None:
                return
        column = op.hashes
        base = (n << _N_SHIFT) + (op.start << _POSITION_SHIFT)
        if len(column) == HASH_BYTES and not replayed and shelf.size < limits.MAX_CLAIMS_PER_SHELF:
            # One block: what the general case below does, without its columns.
            check = int.from_bytes(op.checks, "little")
            self.size += shelf.put_one(column, base + check)
            out.append(ClaimsAdded(holder, op.namespace, op.tier, op.shape, (column,), (check,), (op.start,)))
            return
        hashes, checks = unpack_hashes(column), unpack_checks(op.checks)
        if shelf.size + len(hashes) > limits.MAX_CLAIMS_PER_SHELF:
            self.refused += len(hashes)
            return
        positions: range | tuple[int, ...] = range(op.start, op.start + len(hashes))
        values = list(map(add, range(base, base + (len(hashes) << _POSITION_SHIFT), _ONE_POSITION), checks))
        if replayed:
            keep = [i for i, block in enumerate(hashes) if (shelf.get(block) or 0) >> _N_SHIFT < n]
            if len(keep) < len(hashes):
                hashes = tuple(hashes[i] for i in keep)
                checks = tuple(checks[i] for i in keep)
                values = [values[i] for i in keep]
                positions = tuple(positions[i] for i in keep)
        if not hashes:
            return
        before = shelf.size
        shelf.put(hashes, values)
        self.size += shelf.size - before
        out.append(ClaimsAdded(holder, op.namespace, op.tier, op.shape, hashes, checks, positions))

    def remove(self, holder: Origin, n: int, op: BlocksRemoved, out: list[ClaimChange], replayed: bool = False) -> None:
        """Apply one removal; blocks that are not claimed are ignored."""
        shelf = self.shelves(holder).get((op.namespace, op.tier, op.shape))
        if shelf is None:
            return
        hashes = unpack_hashes(op.hashes)
        if replayed:
            hashes = tuple(block for block in hashes if (shelf.get(block) or 0) >> _N_SHIFT < n)
        gone = shelf.pop(hashes)
        if gone:
            self.size -= len(gone)
            out.append(ClaimsRemoved(holder, shelf.namespace, op.tier, op.shape, gone))

    def clear(self, holder: Origin, n: int, tier: Tier | None, out: list[ClaimChange], replayed: bool = False) -> None:
        """The holder holds nothing any more in that tier, or in any."""
        shelves = self._holders.get(holder, {})
        for key in [key for key in shelves if tier is None or key[1] is tier]:
            if not replayed:
                self._drop_shelf(holder, key, shelves.pop(key), out)
                continue
            shelf = shelves[key]
            for table in shelf.tables():
                old = [block for block, value in table.items() if value >> _N_SHIFT < n]
                self._pop(holder, key, shelf, old, out)

    def drop_holder(self, holder: Origin, out: list[ClaimChange]) -> None:
        """The holder's life is over."""
        shelves = self._holders.pop(holder, None)
        if shelves:
            for shelf in shelves.values():
                self.size -= shelf.size
                self._garbage += shelf.tables()
            out.append(HolderDropped(holder))

    def drop_below(self, digest: bytes, purges: int, out: list[ClaimChange]) -> None:
        """The namespace was purged: drop every claim that did not follow all `purges`."""
        for holder, shelves in self._holders.items():
            for key in [key for key, shelf in shelves.items() if key[0] == digest and shelf.epoch < purges]:
                self._drop_shelf(holder, key, shelves.pop(key), out)

    def tidy(self) -> set[bytes]:
        """Drop shelves that hold nothing; the digests of the namespaces of those that are left."""
        used: set[bytes] = set()
        for shelves in self._holders.values():
            for key in [key for key, shelf in shelves.items() if not shelf.size]:
                del shelves[key]
            used.update(key[0] for key in shelves)
        return used

    def holders(self) -> list[Origin]:
        """Every holder that has a claim, in order."""
        return sorted(self._holders)

    def shelves(self, holder: Origin) -> dict[ShelfKey, Shelf]:
        """The shelves of a holder; not to be changed."""
        return self._holders.get(holder, {})

    def runs(self, blocks: Sequence[bytes], checks: Sequence[int] | None) -> Iterator[Overlap]:
        """Every holder that has block 0, with its shape, the length of its unbroken run of `blocks` from there, and
        the slowest tier that reading it needs. Costs one probe a shelf and a few for each block of a run."""
        for holder, shelves in self._holders.items():
            groups: dict[tuple[bytes, bytes], list[tuple[Tier, Shelf]]] = {}
            for (digest, tier, shape), shelf in shelves.items():
                if shelf.size:
                    groups.setdefault((digest, shape), []).append((tier, shelf))
            for (_, shape), group in groups.items():
                group.sort(key=lambda item: item[0])
                length, slowest = _run(group, blocks, checks)
                if length:
                    yield Overlap(holder, group[0][1].namespace, shape, length, slowest)

    def sweep(self, budget: int) -> None:
        """Free what was dropped, about `budget` claims of it."""
        while self._garbage and budget > 0:
            budget -= 1 + len(self._garbage.pop())

    def page(self, holder: Origin, key: ShelfKey, part: int) -> ClaimPage:
        """One part of a shelf for a snapshot; part -1 is a shelf that was never split."""
        shelf = self._holders[holder][key]
        table = shelf.table if part < 0 else shelf.parts[part] if shelf.parts is not None else {}
        hashes = sorted(table)
        meta = b"".join(
            _META.pack(value >> _N_SHIFT, value >> _POSITION_SHIFT & _POSITION_MASK, value & _CHECK_MASK)
            for value in map(table.__getitem__, hashes)
        )
        _, tier, shape = key
        return ClaimPage(holder, shelf.namespace, shelf.epoch, tier, shape, part, b"".join(hashes), meta)

    def take_page(self, page: ClaimPage, base: int, purges: int, out: list[ClaimChange]) -> int:
        """Replace one part of a shelf by what a snapshot says of it; claims above `base` stay unless it has newer.

        Returns:
            The highest dot in the page.
        """
        if page.epoch < purges:
            return 0
        holder, key = page.origin, (page.namespace.digest, page.tier, page.shape)
        shelf = self._shelf(holder, key, page.namespace, page.epoch, out)
        if shelf is None:
            return 0
        rows = {
            block: (n, position, check)
            for block, (n, position, check) in zip(
                unpack_hashes(page.hashes), _META.iter_unpack(page.meta), strict=True
            )
        }
        tables = shelf.tables() if page.part < 0 or shelf.parts is None else [shelf.parts[page.part]]
        stale = [
            block
            for table in tables
            for block, value in table.items()
            if (page.part < 0 or block[0] == page.part) and value >> _N_SHIFT <= base and block not in rows
        ]
        self._pop(holder, key, shelf, stale, out)
        new = [block for block, row in rows.items() if (shelf.get(block) or 0) >> _N_SHIFT < row[0]]
        if new:
            before = shelf.size
            shelf.put(new, [_pack(*rows[block]) for block in new])
            self.size += shelf.size - before
            positions = tuple(rows[block][1] for block in new)
            checks = tuple(rows[block][2] for block in new)
            out.append(ClaimsAdded(holder, page.namespace, page.tier, page.shape, tuple(new), checks, positions))
        return max((row[0] for row in rows.values()), default=0)

    def drop_unseen(self, holder: Origin, seen: set[ShelfKey], base: int, out: list[ClaimChange]) -> None:
        """At the end of a snapshot: shelves it did not name hold nothing up to `base`."""
        shelves = self._holders.get(holder, {})
        for key in [key for key in shelves if key not in seen]:
            shelf = shelves[key]
            for table in shelf.tables():
                self._pop(holder, key, shelf, [b for b, value in table.items() if value >> _N_SHIFT <= base], out)

    def rows(self) -> Iterator[tuple[Origin, ShelfKey, bytes, int, int]]:
        """Every claim as (holder, shelf, block, position, check), in no order; for tests and exports."""
        for holder, shelves in self._holders.items():
            for key, shelf in shelves.items():
                for table in shelf.tables():
                    for block, value in table.items():
                        yield holder, key, block, value >> _POSITION_SHIFT & _POSITION_MASK, value & _CHECK_MASK

    def check(self) -> None:
        """Assert that the sizes are right and every claim is in its part."""
        assert self.size == sum(shelf.size for shelves in self._holders.values() for shelf in shelves.values())
        for shelves in self._holders.values():
            for shelf in shelves.values():
                assert shelf.size == sum(map(len, shelf.tables()))
                assert shelf.parts is None or not shelf.table
                for i, part in enumerate(shelf.parts or ()):
                    assert all(block[0] == i for block in part)

    def _shelf(
        self, holder: Origin, key: ShelfKey, namespace: NamespaceRef, epoch: int, out: list[ClaimChange]
    ) -> Shelf | None:
        """The shelf to write claims of that epoch to; None when it already follows more purges."""
        shelves = self._holders.get(holder)
        if shelves is None:
            shelves = self._holders[holder] = {}
        shelf = shelves.get(key)
        if shelf is not None and shelf.epoch == epoch:
            return shelf
        if shelf is None or shelf.epoch < epoch:
            if shelf is not None:
                self._drop_shelf(holder, key, shelves.pop(key), out)
            shelf = shelves[key] = Shelf(namespace, epoch)
            return shelf
        return None

    def _drop_shelf(self, holder: Origin, key: ShelfKey, shelf: Shelf, out: list[ClaimChange]) -> None:
        self.size -= shelf.size
        for table in shelf.tables():
            if table:
                out.append(ClaimsRemoved(holder, shelf.namespace, key[1], key[2], tuple(table)))
                self._garbage.append(table)

    def _pop(self, holder: Origin, key: ShelfKey, shelf: Shelf, blocks: list[bytes], out: list[ClaimChange]) -> None:
        gone = shelf.pop(blocks)
        if gone:
            self.size -= len(gone)
            out.append(ClaimsRemoved(holder, shelf.namespace, key[1], key[2], gone))


def _pack(n: int, position: int, check: int) -> int:
    return (n << _N_SHIFT) + (position << _POSITION_SHIFT) + check


def _run(group: list[tuple[Tier, Shelf]], blocks: Sequence[bytes], checks: Sequence[int] | None) -> tuple[int, Tier]:
    """How many of `blocks` from the first on are on these shelves (fastest tier first), and the slowest tier used."""
    slowest = group[0][0]
    for i, block in enumerate(blocks):
        for tier, shelf in group:
            value = shelf.get(block)
            if value is not None and (checks is None or value & _CHECK_MASK == checks[i]):
                slowest = max(slowest, tier)
                break
        else:
            return i, slowest
    return len(blocks), slowest


PAGE_ROW_BYTES: Final = META_BYTES + 16
"""Bytes of one claim in a page."""

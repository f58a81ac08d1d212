"""The shards of tensor-parallel ranks as one block: all ranks hold it, or it is not held.

Each rank keeps its slice of every block's heads in a pool of its own: same block size, same names, other bytes. This
puts the same thing to every rank, or to none, and follows what a rank does on its own: a block that one of them evicts,
or whose bytes failed a check there, is taken out of the others too. A rank that comes back with nothing has every
group against it, and the group is absent.

G1: what is findable is findable in every rank: after each call all ranks hold the same blocks.
G2: tables, leases, pins and holds are taken in every rank or in none; a call that fails leaves nothing behind.
G3: where ranks were asked by themselves and differ, the shortest match counts. Nobody waits for anybody.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from kv_core.hashing import BlockHash, Extra, Tokens
from kv_core.ids import NodeId
from kv_prefix.block_pool import BlockPool
from kv_prefix.errors import InvalidRequestError, StaleMatchError, UnknownReceiptError
from kv_prefix.events import BlockRemoved, BlocksStored, PoolEvent, RemovalReason
from kv_prefix.pins import Receipt
from kv_prefix.pool_types import Lease, Opened, PoolMatch, PoolStats
from kv_prefix.prefix_index import Holder, HolderMatch

TakenT = TypeVar("TakenT")


@dataclass(frozen=True, slots=True)
class GroupMatch:
    """The longest prefix that every rank holds.

    Attributes:
        ranks: per rank, the match of these blocks there.
        num_blocks: full blocks; equal in every rank. Partial blocks are not matched.
        lives: which life of each rank was asked.
    """

    ranks: tuple[PoolMatch, ...]
    num_blocks: int
    lives: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class GroupReceipt:
    """The right to give back what was taken in every rank; `lives` says in which life of each."""

    receipts: tuple[Receipt, ...]
    lives: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class GroupTable:
    """A request's table in every rank."""

    receipt: GroupReceipt
    ranks: tuple[Opened, ...]


@dataclass(frozen=True, slots=True)
class GroupLease:
    """A reader's right to the shards of every rank."""

    receipt: GroupReceipt
    ranks: tuple[Lease, ...]


class GroupPool:
    """The pools of the ranks of one tensor-parallel node.

    Args:
        pools: by rank, each with its own region, all of one block size; used through this alone from now on.

    Raises:
        InvalidRequestError: no rank, or unequal block sizes.
    """

    def __init__(self, pools: Sequence[BlockPool]) -> None:
        sizes = {pool.block_size for pool in pools}
        if len(sizes) != 1:
            given = " and ".join(map(str, sorted(sizes))) or "of no rank"
            raise InvalidRequestError(name="block_size", value=given, rule="ranks need one and the same")
        self.pools = tuple(pools)
        self._lives = (0,) * len(self.pools)
        self._events: list[PoolEvent] = []

    @property
    def tp_size(self) -> int:
        """Number of ranks."""
        return len(self.pools)

    def match(
        self, namespace: bytes, block_hashes: Sequence[BlockHash], tokens: Tokens, extras: Sequence[Extra] = ()
    ) -> GroupMatch:
        """The longest prefix held by every rank (`BlockPool.match`). Changes nothing."""
        found = [pool.match(namespace, block_hashes, tokens, extras) for pool in self.pools]
        shortest = min(len(match.refs) for match in found)
        ranks = tuple(_cut(match, shortest, self.pools[0].block_size) for match in found)
        return GroupMatch(ranks, shortest, self._lives)

    def open(self, owner: str, match: GroupMatch | None = None, num_new: int = 0) -> GroupTable:
        """A table in every rank (`BlockPool.open`).

        Raises:
            NoSpaceError, StaleMatchError: some rank cannot; nothing was changed in any.
        """
        matches: Sequence[PoolMatch | None] = self._parts(match) if match else [None] * self.tp_size
        # Asked of all before the first one evicts anything.
        for pool, part in zip(self.pools, matches, strict=True):
            pool.require_open(part, num_new, use_partial=False)
        opened = tuple(
            pool.open(owner, part, num_new, use_partial=False) for pool, part in zip(self.pools, matches, strict=True)
        )
        self._settle()
        return GroupTable(GroupReceipt(tuple(one.table for one in opened), self._lives), opened)

    def commit(
        self,
        table: GroupReceipt,
        namespace: bytes,
        first_block_idx: int,
        block_hashes: Sequence[BlockHash],
        tokens: Tokens,
        extras: Sequence[Extra] = (),
    ) -> None:
        """Make blocks findable whose every shard is written (`BlockPool.commit`). What some rank cannot share, no
        rank does.

        Raises:
            UnknownReceiptError: it was given back, or a rank began anew since: its shards are not there.
            BlockMismatchError: as there; nothing is findable that was not before.
        """
        if table.lives != self._lives:
            raise UnknownReceiptError(receipt=table.receipts[0].receipt_id, owner=table.receipts[0].owner)
        try:
            for pool, receipt in zip(self.pools, table.receipts, strict=True):
                pool.commit(receipt, namespace, first_block_idx, block_hashes, tokens, extras)
        finally:
            self._settle()

    def release(self, receipt: GroupReceipt) -> None:
        """Give back what was taken, in every rank that did not begin anew since.

        Raises:
            UnknownReceiptError: it was given back already.
        """
        for rank, one in enumerate(receipt.receipts):
            if receipt.lives[rank] == self._lives[rank]:
                self.pools[rank].release(one)
        self._settle()

    def lease_match(self, reader: NodeId, match: GroupMatch, *, until_ns: int) -> GroupLease:
        """Let `reader` read the shards of a match in every rank (`BlockPool.lease_match`).

        Raises:
            StaleMatchError, LeaseLimitError: some rank cannot; nothing was changed in any.
        """
        parts = self._parts(match)
        leases = self._in_each(
            lambda rank: self.pools[rank].lease_match(reader, parts[rank], until_ns=until_ns),
            lambda lease: lease.receipt,
        )
        return GroupLease(GroupReceipt(tuple(lease.receipt for lease in leases), self._lives), leases)

    def pin(self, owner: str, match: GroupMatch) -> GroupReceipt:
        """Keep the shards of a match resident in every rank (`BlockPool.pin`).

        Raises:
            StaleMatchError, PinQuotaExceededError: some rank cannot; nothing was changed in any.
        """
        parts = self._parts(match)
        pins = self._in_each(lambda rank: self.pools[rank].pin(owner, parts[rank]), lambda receipt: receipt)
        return GroupReceipt(pins, self._lives)

    def expire(self, now_ns: int) -> None:
        """End leases and retentions whose time has passed, in every rank."""
        for pool in self.pools:
            pool.expire(now_ns)

    def drop(self, block_hash: BlockHash, reason: RemovalReason = RemovalReason.CHECK_FAILED) -> None:
        """One shard of a block is not to be used any more: neither is the block, nor what follows it."""
        for pool in self.pools:
            pool.drop(block_hash, reason)
        self._settle()

    def purge(self, namespace: bytes | None = None) -> None:
        """Drop every block of a namespace, of all when None, in every rank."""
        for pool in self.pools:
            pool.purge(namespace)
        self._settle()

    def replace_rank(self, rank: int, pool: BlockPool) -> None:
        """A rank began anew with that pool: no group has its shard, so none is held.

        What somebody holds in the other ranks stays in place until it is given back; that rank's part of it is void.
        """
        self.pools = (*self.pools[:rank], pool, *self.pools[rank + 1 :])
        self._lives = (*self._lives[:rank], self._lives[rank] + 1, *self._lives[rank + 1 :])
        self.purge()

    def take_events(self) -> list[PoolEvent]:
        """What happened to groups since the last call: stored when the last shard was, removed when the first was. Of
        the references of each event those of rank 0 are given."""
        events, self._events = self._events, []
        return events

    def stats(self) -> tuple[PoolStats, ...]:
        """Counts of each rank."""
        return tuple(pool.stats() for pool in self.pools)

    def check(self) -> None:
        """Assert G1, and what each pool asserts."""
        held = []
        for pool in self.pools:
            pool.check()
            held.append({name for run in pool.snapshot() for name in run.block_hashes})
        assert all(one == held[0] for one in held[1:])

    def _parts(self, match: GroupMatch) -> Sequence[PoolMatch]:
        """The match of each rank.

        Raises:
            StaleMatchError: a rank began anew since.
        """
        for rank, life in enumerate(match.lives):
            if life != self._lives[rank]:
                raise StaleMatchError(block_idx=0, slot=0, generation=0)
        return match.ranks

    def _in_each(self, take: Callable[[int], TakenT], receipt_of: Callable[[TakenT], Receipt]) -> tuple[TakenT, ...]:
        """Take something in each rank; when one refuses, those before it give theirs back."""
        taken: list[TakenT] = []
        try:
            taken.extend(map(take, range(self.tp_size)))
        except BaseException:
            for pool, one in zip(self.pools, taken, strict=False):
                pool.release(receipt_of(one))
            raise
        return tuple(taken)

    def _settle(self) -> None:
        """Take out of every rank what one of them lost or could not share, and tell of the groups."""
        stored: list[BlocksStored] = []
        gone: dict[BlockHash, BlockRemoved] = {}
        fresh: list[set[BlockHash]] = []
        for rank, pool in enumerate(self.pools):
            names: set[BlockHash] = set()
            for event in pool.take_events():
                if isinstance(event, BlockRemoved):
                    gone.setdefault(event.block_hash, event)
                else:
                    names.update(event.block_hashes)
                    stored += [event] if rank == 0 else []
            fresh.append(names)
        lacking = set[BlockHash]().union(*fresh) - fresh[0].intersection(*fresh[1:])
        for event in stored:
            whole = next((i for i, name in enumerate(event.block_hashes) if name in lacking), len(event.block_hashes))
            if whole:
                self._events.append(_head(event, whole, self.pools[0].block_size))
        told = set(gone)
        for name in [*gone, *sorted(lacking, key=lambda name: name.sequence)]:
            reason = gone[name].reason if name in gone else RemovalReason.PARENT_REMOVED
            for pool in self.pools:
                pool.drop(name, reason)
                for event in pool.take_events():
                    # What followed it in this rank: in no other rank is it found either, once the loop is through.
                    if isinstance(event, BlockRemoved) and event.block_hash not in lacking:
                        gone.setdefault(event.block_hash, event)
        self._events += [event for name, event in gone.items() if name in told or name not in lacking]


def group_matches(
    matches: Sequence[HolderMatch], groups: Sequence[Sequence[Holder]]
) -> list[tuple[Sequence[Holder], int]]:
    """Of ranks that are holders of their own: how many blocks each whole group holds, the longest first.

    The shortest of its ranks counts (G3), and a rank that holds nothing makes it nothing.

    Args:
        matches: what a lookup gave (`PrefixIndex.lookup`).
        groups: the ranks of each tensor-parallel node.
    """
    held = {match.holder: match.num_blocks for match in matches}
    found = [(group, min((held.get(holder, 0) for holder in group), default=0)) for group in groups]
    return sorted(((group, count) for group, count in found if count), key=lambda one: -one[1])


def _cut(match: PoolMatch, num_blocks: int, block_size: int) -> PoolMatch:
    return replace(
        match,
        block_hashes=match.block_hashes[:num_blocks],
        refs=match.refs[:num_blocks],
        partial=None,
        num_tokens=num_blocks * block_size,
    )


def _head(event: BlocksStored, num_blocks: int, block_size: int) -> BlocksStored:
    end = (event.first_block_idx + num_blocks) * block_size
    return replace(
        event,
        block_hashes=event.block_hashes[:num_blocks],
        tokens=event.tokens[: 4 * num_blocks * block_size],
        extras=tuple(extra for extra in event.extras if extra.start < end),
        refs=event.refs[:num_blocks],
    )

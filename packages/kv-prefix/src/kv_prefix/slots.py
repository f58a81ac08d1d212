"""The state of every slot, and the tree of the content in them.

Decides nothing about requests. It counts references, keeps the tree of committed blocks (whose block follows whose),
and evicts leaves when room is needed. Columns over slot numbers rather than objects: a pool of a million slots is a
dozen arrays that the garbage collector does not walk.

S1: a slot is in exactly one state. Free: no content, no reference. Pinned: referenced, or the ancestor of a referenced
    block. Cached: content and neither. `free + cached + pinned == total`.
S2: a committed block's parent is committed; children of a cached block are cached. So all cached slots can be
    evicted, leaf by leaf, and `free + cached` is exactly what can be handed out.
S3: `generation` is raised when a slot is handed out.
S4: offered to the policy are exactly the cached slots without children.
"""

from array import array
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, Final

from kv_core.hashing import TOKEN_BYTES, BlockHash, Extra
from kv_prefix.errors import NoSpaceError
from kv_prefix.events import BlockRemoved, PoolEvent, RemovalReason
from kv_prefix.eviction import EvictionPolicy

if TYPE_CHECKING:
    from kv_prefix.quotas import TenantQuotas

ROOT: Final = -1
"""Parent of block 0."""

_NONE: Final = -1
_SEVERAL: Final = -2
"""In place of a block's only child."""

_NUM_SHARDS: Final = 256
"""One dict of a million entries stops the loop for 0.1 s when it grows; a 256th of that does not."""


class SlotTable:
    """Slots `0 .. total - 1`. Callers hold what they got from `take` or `acquire` until they `release` it."""

    def __init__(
        self, total: int, block_size: int, policy: EvictionPolicy, quotas: "TenantQuotas | None" = None
    ) -> None:
        self.total = total
        self.quotas = quotas
        self.block_size = block_size
        self.block_nbytes = block_size * TOKEN_BYTES
        self.num_free = total
        self.num_cached = 0
        self.num_pinned = 0
        self.num_evicted = 0
        self.events: list[PoolEvent] = []
        self.refs = array("I", bytes(4 * total))
        self.generation = array("Q", bytes(8 * total))
        # Content; `committed` says whether the rest of a slot's columns mean anything.
        self.committed = bytearray(total)
        self.parent = array("q", [ROOT]) * total
        self.depth = array("I", bytes(4 * total))
        self.tokens: list[bytes] = [b""] * total
        self.namespace: list[bytes] = [b""] * total
        self.hash: list[BlockHash | None] = [None] * total
        self.extras: dict[int, tuple[Extra, ...]] = {}
        self._policy = policy
        # Descending, so that slots are handed out ascending and neighbours make long transfers.
        self._free = array("q", range(total - 1, -1, -1))
        self._busy_children = array("I", bytes(4 * total))
        # Nearly every block has one child at most, and a column holds that; lists are for those with more.
        self._only_child = array("q", [_NONE]) * total
        self._children: dict[int, list[int]] = {}
        self._roots: dict[bytes, list[int]] = {}
        self._by_hash: tuple[dict[bytes, int], ...] = tuple({} for _ in range(_NUM_SHARDS))

    def require(self, need: int, becoming_pinned: Sequence[int] = (), account: int = 0) -> None:
        """Check that `need` slots can be handed out to an account after these slots, if cached, were pinned.

        Raises:
            NoSpaceError: they cannot.
        """
        cached = [slot for slot in becoming_pinned if self.is_cached(slot)]
        if self.quotas is not None:
            self.quotas.require(account, need, self.quotas.count(account, cached))
        self._require_room(need, len(cached))

    def _require_room(self, need: int, becoming_pinned: int = 0) -> None:
        if need > self.num_free + self.num_cached - becoming_pinned:
            raise NoSpaceError(
                need=need,
                free=self.num_free,
                cached=self.num_cached - becoming_pinned,
                pinned=self.num_pinned + becoming_pinned,
                total=self.total,
            )

    def take(self, need: int, account: int = 0, owner: str = "") -> list[int]:
        """Hand out `need` slots with one reference each, evicting as needed; all or nothing.

        Args:
            owner: on whose behalf, for whoever asks later why a block went.

        Raises:
            NoSpaceError: fewer are free or evictable, or the account may have no more; nothing was changed.
        """
        self._require_room(need)
        if self.quotas is not None:
            self.quotas.require(account, need)
            for _ in range(self.quotas.lacking(account, need)):
                own = self.quotas.own_victim(account)
                assert own is not None, "some evictable block of an account is a leaf"
                self._policy.remove(own, True)
                parent = self._evict(owner, own)
                if parent != ROOT:
                    self._policy.offer(parent)
        if need > self.num_free:
            self._policy.evict_all(need - self.num_free, partial(self._evict, owner))
        rest = self.num_free - need
        taken = self._free[rest:].tolist()
        del self._free[rest:]
        taken.reverse()
        for slot in taken:
            self.generation[slot] += 1
            self.refs[slot] = 1
        if self.quotas is not None:
            for slot in taken:
                self.quotas.charge(slot, account)
        self.num_free -= need
        self.num_pinned += need
        return taken

    def evict(self, most: int) -> int:
        """Evict up to so many blocks, in the policy's order, before their slots are needed; returns how many."""
        count = min(most, self.num_cached)
        self._policy.evict_all(count, partial(self._evict, ""))
        return max(count, 0)

    def acquire(self, slot: int) -> None:
        """One more reference to a slot that is not free."""
        self.refs[slot] += 1
        if self.refs[slot] == 1 and not self._busy_children[slot]:
            self._became_busy(slot)

    def release(self, slot: int) -> None:
        """One reference less; the last one makes committed content evictable and frees any other slot."""
        assert self.refs[slot], f"slot {slot} is not held"
        self.refs[slot] -= 1
        if self.refs[slot]:
            return
        if not self.committed[slot]:
            self._free_slot(slot)
        elif not self._busy_children[slot]:
            self._became_idle(slot)

    def touch(self, slots: Sequence[int]) -> None:
        """Committed content was used, in this order."""
        self._policy.touch_all(slots)

    def commit(
        self,
        slot: int,
        parent: int,
        namespace: bytes,
        tokens: bytes,
        extras: tuple[Extra, ...],
        block_hash: BlockHash | None,
    ) -> None:
        """Enter a held slot's content into the tree; a part-filled block has no hash."""
        assert self.refs[slot] and not self.committed[slot]
        self.committed[slot] = True
        self.parent[slot] = parent
        self.depth[slot] = 0 if parent == ROOT else self.depth[parent] + 1
        self.tokens[slot] = tokens
        self.namespace[slot] = namespace
        self.hash[slot] = block_hash
        if extras:
            self.extras[slot] = extras
        if block_hash is not None:
            self._by_hash[block_hash.sequence[0]][block_hash.sequence] = slot
        self._link(slot)
        if parent != ROOT:
            self._busy_children[parent] += 1
            assert self.refs[parent], "the parent of a committed block is held by whoever commits it"
        name = block_hash.sequence if block_hash is not None else (parent, tokens)
        self._policy.insert(slot, name)

    def commit_behind(
        self,
        table: Sequence[int],
        first: int,
        block_hashes: Sequence[BlockHash],
        tokens: Sequence[bytes],
        extras_of: Mapping[int, tuple[Extra, ...]],
    ) -> int:
        """`commit` for the blocks of a table from position `first` on; the one before was committed just now.

        Stops at the first one that is committed or whose hash is taken; returns how many came before it.

        Args:
            block_hashes: of these blocks, as many as are to be committed.
            tokens: of each of them.
            extras_of: by position, the extras that touch a block.
        """
        parent = table[first - 1]
        assert self.refs[parent] and not self.has_children(parent)
        namespace, depth = self.namespace[parent], self.depth[parent]
        # What is looked up for each block is looked up once: a prompt may have thousands, and the loop waits for them.
        committed, by_hash, parents, depths = self.committed, self._by_hash, self.parent, self.depth
        names: list[bytes] = []
        for slot, block_hash, piece in zip(islice(table, first, None), block_hashes, tokens, strict=False):
            name = block_hash.sequence
            shard = by_hash[name[0]]
            if committed[slot] or name in shard:
                break
            shard[name] = slot
            committed[slot] = True
            depth += 1
            parents[slot], depths[slot] = parent, depth
            self.tokens[slot], self.namespace[slot], self.hash[slot] = piece, namespace, block_hash
            # The slot of an uncommitted block has no children, so this one is the only child, and the only busy one.
            self._only_child[parent] = slot
            self._busy_children[parent] = 1
            parent = slot
            names.append(name)
        run = table[first : first + len(names)]
        for block_idx, extras in extras_of.items():
            if first <= block_idx < first + len(run):
                self.extras[table[block_idx]] = extras
        self._policy.insert_all(run, names)
        return len(run)

    def withdraw(self, slot: int) -> None:
        """Take a held leaf out of the tree, keeping its bytes: its holder is about to write into it. No event."""
        assert self.refs[slot] and not self.has_children(slot)
        self._unlink(slot)

    def find(self, sequence: bytes) -> int | None:
        """The slot whose block has that sequence hash; whether it is the right block is for the caller to check."""
        return self._by_hash[sequence[0]].get(sequence) if sequence else None

    def remove_subtree(self, top: int, reason: RemovalReason) -> int:
        """Take a block and all that follow it out of the tree, tail first; returns how many full blocks that were."""
        order = [top]
        for slot in order:
            order.extend(self._siblings(slot))
        removed = 0
        for slot in reversed(order):
            removed += self.hash[slot] is not None
            self._remove(slot, reason if slot == top else _REASON_BELOW.get(reason, reason))
        return removed

    def roots(self, namespace: bytes | None) -> list[int]:
        """Every block 0 of a namespace, or of all."""
        if namespace is not None:
            return list(self._roots.get(namespace, ()))
        return [slot for slots in self._roots.values() for slot in slots]

    def committed_slots(self) -> Iterator[int]:
        """Every slot in the tree, parents before children."""
        pending = self.roots(None)
        while pending:
            slot = pending.pop()
            yield slot
            pending.extend(self._siblings(slot))

    def has_children(self, slot: int) -> bool:
        return self._only_child[slot] != _NONE

    def is_cached(self, slot: int) -> bool:
        """Committed and neither referenced nor above a referenced block."""
        return bool(self.committed[slot]) and not self.refs[slot] and not self._busy_children[slot]

    def closest_child(self, parent: int, namespace: bytes, tokens: bytes) -> tuple[int, int] | None:
        """The child of `parent` (a block 0 when `ROOT`) that begins most like `tokens`, and how many tokens agree.

        Children are sorted by tokens, and whoever shares the longest beginning with a text sorts next to it.
        """
        children = self._siblings(parent, namespace)
        at = bisect_left(children, tokens, key=self.tokens.__getitem__)
        best: tuple[int, int] | None = None
        for slot in children[max(at - 1, 0) : at + 1]:
            common = _common_tokens(self.tokens[slot], tokens)
            if common and (best is None or common > best[1]):
                best = slot, common
        return best

    def chain(self, slot: int) -> list[int]:
        """The slots from block 0 to `slot`."""
        slots = []
        while slot != ROOT:
            slots.append(slot)
            slot = self.parent[slot]
        slots.reverse()
        return slots

    def _evict(self, owner: str, slot: int) -> int:
        """Free a cached leaf, but for the policy; its parent where that is one now, else `ROOT`.

        As `_remove`, without what cannot be: a hand-out may evict thousands.
        """
        parent, block_hash = self.parent[slot], self.hash[slot]
        if block_hash is not None:
            namespace, depth = self.namespace[slot], self.depth[slot]
            self.events.append(BlockRemoved(namespace, depth, block_hash, RemovalReason.EVICTED, owner))
        if self.quotas is not None:
            self.quotas.became_cached(slot, -1)
        self._clear(slot, parent, block_hash)
        if self.quotas is not None:
            self.quotas.discharge(slot)
        self._free.append(slot)
        self.num_evicted += 1
        self.num_cached -= 1
        self.num_free += 1
        return parent if parent != ROOT and self._only_child[parent] == _NONE and not self.refs[parent] else ROOT

    def _remove(self, slot: int, reason: RemovalReason) -> None:
        """Take a leaf out of the tree; its slot is freed unless someone holds it."""
        block_hash = self.hash[slot]
        if block_hash is not None:
            self.events.append(BlockRemoved(self.namespace[slot], self.depth[slot], block_hash, reason))
        if not self.refs[slot]:
            self._count_cached(slot, -1)
            self._unlink(slot)
            self._free_slot(slot)
        else:
            self._unlink(slot)

    def _unlink(self, slot: int) -> None:
        parent = self.parent[slot]
        self._clear(slot, parent, self.hash[slot])
        self._policy.remove(slot, False)
        if parent == ROOT:
            return
        if self.refs[slot]:
            self._busy_children[parent] -= 1
            if not self._busy_children[parent] and not self.refs[parent]:
                self._became_idle(parent)
                return
        if self._only_child[parent] == _NONE and self.is_cached(parent):
            self._policy.offer(parent)

    def _clear(self, slot: int, parent: int, block_hash: BlockHash | None) -> None:
        """Take a leaf's content out of every column and list."""
        if parent != ROOT and self._only_child[parent] == slot:
            self._only_child[parent] = _NONE
        else:
            self._unlink_sibling(parent, slot)
        if block_hash is not None:
            del self._by_hash[block_hash.sequence[0]][block_hash.sequence]
        self.committed[slot] = False
        self.parent[slot] = ROOT
        self.tokens[slot] = self.namespace[slot] = b""
        self.hash[slot] = None
        if self.extras:
            self.extras.pop(slot, None)

    def _link(self, slot: int) -> None:
        parent = self.parent[slot]
        if parent == ROOT:
            siblings = self._roots.setdefault(self.namespace[slot], [])
        elif (only := self._only_child[parent]) == _NONE:
            self._only_child[parent] = slot
            return
        else:
            self._only_child[parent] = _SEVERAL
            siblings = self._children.setdefault(parent, [only])
        siblings.insert(bisect_left(siblings, self.tokens[slot], key=self.tokens.__getitem__), slot)

    def _unlink_sibling(self, parent: int, slot: int) -> None:
        siblings = self._siblings(parent, self.namespace[slot])
        at = bisect_left(siblings, self.tokens[slot], key=self.tokens.__getitem__)
        del siblings[siblings.index(slot, at)]
        if parent == ROOT:
            if not siblings:
                del self._roots[self.namespace[slot]]
        elif len(siblings) == 1:
            self._only_child[parent] = siblings[0]
            del self._children[parent]

    def _siblings(self, parent: int, namespace: bytes = b"") -> list[int]:
        """The children of a block, or every block 0 of a namespace, in order of their tokens."""
        if parent == ROOT:
            return self._roots.get(namespace, [])
        only = self._only_child[parent]
        if only == _SEVERAL:
            return self._children[parent]
        return [] if only == _NONE else [only]

    def _became_busy(self, slot: int) -> None:
        while True:
            self._count_cached(slot, -1)
            self._policy.withdraw(slot)
            parent = self.parent[slot]
            if parent == ROOT:
                return
            self._busy_children[parent] += 1
            if self.refs[parent] or self._busy_children[parent] > 1:
                return
            slot = parent

    def _became_idle(self, slot: int) -> None:
        while True:
            self._count_cached(slot, 1)
            if self._only_child[slot] == _NONE:
                self._policy.offer(slot)
            parent = self.parent[slot]
            if parent == ROOT:
                return
            self._busy_children[parent] -= 1
            if self.refs[parent] or self._busy_children[parent]:
                return
            slot = parent

    def _count_cached(self, slot: int, change: int) -> None:
        self.num_cached += change
        self.num_pinned -= change
        if self.quotas is not None:
            self.quotas.became_cached(slot, change)

    def _free_slot(self, slot: int) -> None:
        self.num_pinned -= 1
        self.num_free += 1
        if self.quotas is not None:
            self.quotas.discharge(slot)
        self._free.append(slot)

    def check(self, held: Sequence[int]) -> None:
        """Assert S1 to S4, and that references are exactly those in `held` (one entry per reference)."""
        references = [0] * self.total
        for slot in held:
            references[slot] += 1
        assert references == list(self.refs)
        free = set(self._free)
        assert len(free) == len(self._free) == self.num_free
        tree = list(self.committed_slots())
        assert len(set(tree)) == len(tree) == sum(self.committed)
        busy_children = [0] * self.total
        for slot in reversed(tree):
            parent = self.parent[slot]
            if parent != ROOT:
                assert self.committed[parent] and self.depth[slot] == self.depth[parent] + 1
                busy_children[parent] += bool(self.refs[slot] or busy_children[slot])
        assert busy_children == list(self._busy_children)
        cached = {slot for slot in tree if self.is_cached(slot)}
        pinned = {slot for slot in range(self.total) if self.refs[slot] or busy_children[slot]}
        assert not free & cached and not free & pinned and not cached & pinned
        assert (len(cached), len(pinned)) == (self.num_cached, self.num_pinned)
        assert self.num_free + self.num_cached + self.num_pinned == self.total
        if self.quotas is not None:
            self.quotas.check(sorted(cached), self._free)
        children: dict[int, list[int]] = {slot: [] for slot in tree}
        for slot in tree:
            if self.parent[slot] != ROOT:
                children[self.parent[slot]].append(slot)
        for slot in range(self.total):
            assert sorted(children.get(slot, ())) == sorted(self._siblings(slot))
            assert (self._only_child[slot] == _SEVERAL) == (slot in self._children) == (len(self._siblings(slot)) > 1)
        for siblings in (*self._children.values(), *self._roots.values()):
            assert siblings and [self.tokens[s] for s in siblings] == sorted(self.tokens[s] for s in siblings)
        hashed = {block_hash.sequence: slot for slot in tree if (block_hash := self.hash[slot]) is not None}
        assert hashed == {name: slot for shard in self._by_hash for name, slot in shard.items()}


_REASON_BELOW: Final = {RemovalReason.CHECK_FAILED: RemovalReason.PARENT_REMOVED}
"""What follows a block that failed its check is sound itself, but nothing leads to it any more."""


def _common_tokens(left: bytes, right: bytes) -> int:
    """How many tokens two texts have in common from the beginning."""
    low, high = 0, min(len(left), len(right)) // TOKEN_BYTES
    while low < high:
        middle = (low + high + 1) // 2
        if left[: middle * TOKEN_BYTES] == right[: middle * TOKEN_BYTES]:
            low = middle
        else:
            high = middle - 1
    return low

"""What lies where in one slower tier: which block is in which place, who goes when it is full.

Knows places by number and blocks by name, nothing of files, objects or time. Its owner calls it from one place,
performs the IO it plans, and tells it how that went.

C1: a place is free, being written, stored, or doomed (purged while its bytes were in use). It is handed out anew only
    when it is free.
C2: a block is findable only between the end of a store that succeeded and its removal. A store that failed leaves
    nothing.
C3: a place that is being loaded is not written: eviction takes others, a purge dooms it until the load has ended.
C4: eviction takes blocks that nothing stored follows, so a prefix shrinks from its end.
C5: places in use never exceed `limit`.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Final

from kv_core.hashing import BlockHash
from kv_prefix.events import RemovalReason
from kv_prefix.eviction import make_eviction_policy
from kv_prefix.matching import ExtrasOf
from kv_prefix.tiers.blocks import PlacedBlock, TierBlock, pack_extras, prefix_digests

GROW_AFTER: Final = 256
"""Blocks stored after which a tier that met a full medium tries to grow again."""


class _State(Enum):
    FREE = "free"
    WRITING = "writing"
    STORED = "stored"
    DOOMED = "doomed"


@dataclass(frozen=True, slots=True)
class TierStored:
    """These blocks can be loaded from now on."""

    blocks: tuple[TierBlock, ...]


@dataclass(frozen=True, slots=True)
class TierRemoved:
    """This block is not in the tier any more."""

    block: TierBlock
    reason: RemovalReason


TierEvent = TierStored | TierRemoved


@dataclass(frozen=True, slots=True)
class StorePlan:
    """First forget what lay in `forget`, durably; then write `writes`; then say `stored`."""

    forget: tuple[int, ...]
    writes: tuple[PlacedBlock, ...]


@dataclass(frozen=True, slots=True)
class TierStats:
    """A snapshot, in blocks. `refused` counts those that found no place because all were in use."""

    limit: int
    stored: int
    writing: int
    loading: int
    evicted: int
    check_failed: int
    refused: int


class TierCatalog:
    """The contents of one tier.

    Args:
        num_places: blocks that the tier may hold, at least 1.
    """

    def __init__(self, num_places: int) -> None:
        self._num_places = self._limit = num_places
        self._policy = make_eviction_policy("lru", num_places)
        self._state = [_State.FREE] * num_places
        self._count = {_State.FREE: num_places, _State.WRITING: 0, _State.STORED: 0, _State.DOOMED: 0}
        self._block: list[TierBlock | None] = [None] * num_places
        # Descending, so that places are handed out ascending and neighbours make long writes.
        self._free = list(range(num_places - 1, -1, -1))
        self._by_name: dict[bytes, int] = {}
        self._children: dict[bytes, int] = {}
        self._namespaces: dict[bytes, int] = {}
        self._loading: dict[int, int] = {}
        self._evicted = self._check_failed = self._refused = self._since_full = 0
        self._events: list[TierEvent] = []

    @property
    def num_places(self) -> int:
        """Blocks that the tier may hold."""
        return self._num_places

    def restore(self, placed: Sequence[PlacedBlock]) -> tuple[int, ...]:
        """Take up what the medium holds after a restart; returns places to forget: out of bounds, or doubled."""
        forget: list[int] = []
        kept: list[TierBlock] = []
        for item in placed:
            in_bounds = item.place < self._num_places and self._state[item.place] is _State.FREE
            if in_bounds and item.block.sequence not in self._by_name:
                self._enter(item.place, item.block)
                kept.append(item.block)
            else:
                forget.append(item.place)
        self._free = [place for place in self._free if self._state[place] is _State.FREE]
        if kept:
            self._events.append(TierStored(tuple(kept)))
        return tuple(forget)

    def adopt(self, blocks: Sequence[TierBlock]) -> tuple[PlacedBlock, ...]:
        """Take up blocks that the medium holds already, in free places: those that are not here, as far as there is
        room. Nothing is evicted for them."""
        placed: list[PlacedBlock] = []
        for block in blocks:
            if block.sequence not in self._by_name and self._free and self._num_places - len(self._free) < self._limit:
                placed.append(PlacedBlock(self._free.pop(), block))
                self._enter(placed[-1].place, block)
        if placed:
            self._events.append(TierStored(tuple(item.block for item in placed)))
        return tuple(placed)

    def get(self, block_hash: BlockHash) -> TierBlock | None:
        """The stored block of that name."""
        place = self._by_name.get(block_hash.sequence)
        block = None if place is None or self._state[place] is not _State.STORED else self._block[place]
        return block if block is not None and block.check == block_hash.check else None

    def has_any(self, namespace: bytes) -> bool:
        """Whether a block of that namespace can be loaded."""
        return namespace in self._namespaces

    def knows(self, sequence: bytes) -> bool:
        """Whether a block of that name is stored or being written."""
        return sequence in self._by_name

    def match(
        self,
        namespace: bytes,
        names: Sequence[BlockHash],
        raw: bytes,
        extras_of: ExtrasOf,
        first: int,
        digests: Sequence[bytes] | None = None,
        most: int | None = None,
    ) -> list[TierBlock]:
        """The blocks `first ..` of a prompt that are stored, up to the first that is not. Changes nothing.

        Args:
            names: of the blocks that may be matched, from block 0.
            raw: tokens of the prompt, from block 0.
            digests: what `prefix_digests` gives for the prompt, if the caller has it already.
            most: blocks to look for; None: all.
        """
        head = self.get(names[first]) if first < len(names) else None
        if head is None:
            return []
        nbytes = len(head.tokens)
        if digests is None:
            digests = list(prefix_digests(namespace, raw[: nbytes * len(names)], nbytes, extras_of))
        end = min(len(names), len(digests), first + (len(names) if most is None else most))
        matched: list[TierBlock] = []
        for block_idx in range(first, end):
            block = self.get(names[block_idx])
            tokens = raw[block_idx * nbytes : (block_idx + 1) * nbytes]
            extras = pack_extras(extras_of.get(block_idx, ()))
            # D1: the digest stands for everything before, the rest is cheap to compare outright.
            if block is None or (block.namespace, block.tokens, block.extras) != (namespace, tokens, extras):
                break
            if block.prefix_digest != digests[block_idx]:
                break
            matched.append(block)
        return matched

    def chain_to(self, block_hash: BlockHash, stop: Callable[[bytes], bool]) -> list[TierBlock]:
        """The stored blocks that lead to a block, from the first whose parent `stop`s (or is none) on.

        Empty when one of them is missing: by names alone, for a holder that is asked for a prefix it has the tokens of.
        """
        chain: list[TierBlock] = []
        block = self.get(block_hash)
        while block is not None:
            chain.append(block)
            if not block.parent or stop(block.parent):
                chain.reverse()
                return chain
            place = self._by_name.get(block.parent)
            block = None if place is None or self._state[place] is not _State.STORED else self._block[place]
        return []

    def plan_store(self, blocks: Sequence[TierBlock]) -> StorePlan:
        """Where to write blocks; those that are there already, or find no place, are left out."""
        forget: list[int] = []
        writes: list[PlacedBlock] = []
        for block in blocks:
            known = self._by_name.get(block.sequence)
            if known is not None:
                self._policy.touch(known)
                continue
            place = self._take(forget)
            if place is None:
                self._refused += 1
                continue
            self._move(place, _State.WRITING)
            self._block[place] = block
            self._by_name[block.sequence] = place
            writes.append(PlacedBlock(place, block))
        return StorePlan(tuple(forget), tuple(writes))

    def stored(self, plan: StorePlan, *, ok: bool, medium_full: bool = False) -> tuple[int, ...]:
        """A store ended; returns places to forget, of blocks that were purged meanwhile.

        Args:
            medium_full: it failed for lack of room: the tier makes do with what it has, and tries to grow later.
        """
        done: list[TierBlock] = []
        forget: list[int] = []
        for item in plan.writes:
            if self._state[item.place] is _State.DOOMED:
                if ok:
                    forget.append(item.place)
                self._free_place(item.place)
            elif ok:
                self._enter(item.place, item.block)
                done.append(item.block)
            else:
                del self._by_name[item.block.sequence]
                self._free_place(item.place)
        if done:
            self._events.append(TierStored(tuple(done)))
        if medium_full:
            self._limit, self._since_full = max(1, self._num_places - self._count[_State.FREE]), 0
        elif self._limit < self._num_places:
            self._since_full += len(done)
            if self._since_full >= GROW_AFTER:
                self._limit = self._num_places
        return tuple(forget)

    def begin_load(self, blocks: Sequence[TierBlock]) -> tuple[PlacedBlock, ...]:
        """Keep blocks in place while they are read: the longest beginning of them that is still stored."""
        placed: list[PlacedBlock] = []
        for block in blocks:
            place = self._by_name.get(block.sequence)
            if place is None or self._block[place] is not block or self._state[place] is not _State.STORED:
                break
            self._loading[place] = self._loading.get(place, 0) + 1
            self._policy.touch(place)
            self._policy.withdraw(place)
            placed.append(PlacedBlock(place, block))
        return tuple(placed)

    def end_load(self, placed: Sequence[PlacedBlock], bad: Sequence[PlacedBlock] = ()) -> tuple[int, ...]:
        """A load ended; `bad` ones failed their check or could not be read: they are absent from now on.

        Returns places to forget.
        """
        forget: list[int] = []
        for item in bad:
            if self._state[item.place] is _State.STORED and self._block[item.place] is item.block:
                self._check_failed += 1
                self._leave(item.place, RemovalReason.CHECK_FAILED)
                self._move(item.place, _State.DOOMED)
                forget.append(item.place)
        for item in placed:
            self._loading[item.place] -= 1
            if self._loading[item.place]:
                continue
            del self._loading[item.place]
            if self._state[item.place] is _State.DOOMED:
                self._free_place(item.place)
            elif item.block.sequence not in self._children:
                self._policy.offer(item.place)
        return tuple(forget)

    def purge(self, doomed: Callable[[TierBlock], bool], among: range | None = None) -> tuple[int, ...]:
        """Remove every block for which `doomed` says so; returns places to forget.

        Args:
            among: the places to look at, for who must not look at all of them in one go.
        """
        forget: list[int] = []
        for place in range(self._num_places) if among is None else among:
            block = self._block[place]
            if block is None or not doomed(block):
                continue
            if self._state[place] is _State.STORED:
                self._leave(place, RemovalReason.PURGED)
                self._move(place, _State.DOOMED)
                forget.append(place)
                if place not in self._loading:
                    self._free_place(place)
            elif self._state[place] is _State.WRITING:
                del self._by_name[block.sequence]
                self._move(place, _State.DOOMED)
        if not self._by_name:
            self._limit = self._num_places
        return tuple(forget)

    def take_events(self) -> list[TierEvent]:
        """What happened since the last call, in order."""
        events, self._events = self._events, []
        return events

    def blocks(self, among: range | None = None) -> list[TierBlock]:
        """Every stored block, by place; or those in some places."""
        places = range(self._num_places) if among is None else among
        return [b for i in places if (b := self._block[i]) is not None and self._state[i] is _State.STORED]

    def stats(self) -> TierStats:
        """Sizes and counters."""
        return TierStats(
            limit=self._limit,
            stored=self._count[_State.STORED],
            writing=self._count[_State.WRITING],
            loading=len(self._loading),
            evicted=self._evicted,
            check_failed=self._check_failed,
            refused=self._refused,
        )

    def check(self) -> None:
        """Assert C1 to C5; for tests."""
        places: dict[_State, list[int]] = {state: [] for state in _State}
        for place, state in enumerate(self._state):
            places[state].append(place)
        assert {state: len(found) for state, found in places.items()} == self._count
        assert sorted(self._free) == places[_State.FREE], "C1"
        assert all(self._block[place] is None for place in self._free), "C1"
        named = sorted(self._by_name.values())
        assert named == sorted(places[_State.STORED] + places[_State.WRITING]), "C2"
        assert all(self._state[place] in (_State.STORED, _State.DOOMED) for place in self._loading), "C3"
        children: dict[bytes, int] = {}
        for block in self.blocks():
            if block.parent:
                children[block.parent] = children.get(block.parent, 0) + 1
        assert children == self._children, "C4"
        assert Counter(block.namespace for block in self.blocks()) == self._namespaces
        assert self._num_places - len(self._free) <= max(self._limit, 1), "C5"

    def _take(self, forget: list[int]) -> int | None:
        """A place to write to, evicting if need be; None when every place is in use."""
        if self._free and self._num_places - len(self._free) < self._limit:
            return self._free.pop()
        place = self._policy.victim()
        if place is None:
            return None
        self._evicted += 1
        self._leave(place, RemovalReason.EVICTED, evicted=True)
        self._block[place] = None
        forget.append(place)
        return place

    def _enter(self, place: int, block: TierBlock) -> None:
        """A block can be found from now on."""
        self._move(place, _State.STORED)
        self._block[place] = block
        self._by_name[block.sequence] = place
        self._namespaces[block.namespace] = self._namespaces.get(block.namespace, 0) + 1
        self._policy.insert(place, block.sequence)
        if block.parent:
            self._children[block.parent] = self._children.get(block.parent, 0) + 1
            if self._children[block.parent] == 1:
                parent = self._by_name.get(block.parent)
                if parent is not None and self._state[parent] is _State.STORED:
                    self._policy.withdraw(parent)
        if block.sequence not in self._children:
            self._policy.offer(place)

    def _leave(self, place: int, reason: RemovalReason, *, evicted: bool = False) -> None:
        """A stored block cannot be found any more; its place is for the caller to move on."""
        block = self._block[place]
        assert block is not None
        del self._by_name[block.sequence]
        self._namespaces[block.namespace] -= 1
        if not self._namespaces[block.namespace]:
            del self._namespaces[block.namespace]
        self._policy.remove(place, evicted)
        self._events.append(TierRemoved(block, reason))
        if block.parent:
            self._children[block.parent] -= 1
            if not self._children[block.parent]:
                del self._children[block.parent]
                parent = self._by_name.get(block.parent)
                if parent is not None and self._state[parent] is _State.STORED and parent not in self._loading:
                    self._policy.offer(parent)

    def _move(self, place: int, state: _State) -> None:
        self._count[self._state[place]] -= 1
        self._count[state] += 1
        self._state[place] = state

    def _free_place(self, place: int) -> None:
        self._move(place, _State.FREE)
        self._block[place] = None
        self._free.append(place)

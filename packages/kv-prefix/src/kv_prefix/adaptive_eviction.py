"""The default eviction policy: LRU in which frequent use counts like a later last use, by as much as pays just now.

A conversation that came back before is likelier to come back than one seen once. So the block with the lowest `last
use + boost * floor(log2 uses)` goes first, in accesses; uses are remembered after eviction. How large a boost is right
depends on the traffic and on the size of the pool: in a pool much smaller than what returns, a boost of many times its
capacity keeps the little that is popular; where popularity moves, none at all is best. No one setting does both.

So it is measured while running, by miniature simulations (Waldspurger et al., "Cache modeling and optimization using
miniature simulations", USENIX ATC 2017): a sample of names, chosen by hash, goes through one small cache of names for
each candidate, and the pool changes over when another candidate has had significantly more hits.

A1: changing over costs nothing: slots wait in one queue for each value of `floor(log2 uses)`, in order of last use, and
    the boost is added when their heads are compared.
A2: of two candidates, the one at work stays until the other has had more hits by a margin and beyond chance.
A3: the miniatures hear of accesses when a slot is offered, a victim is asked for or many wait, and in order. A prompt's
    blocks are entered while its answer is waited for and offered when it is over, and only victims depend on who leads.
"""

from array import array
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable, Sequence
from itertools import islice
from math import inf
from typing import Final

import xxhash

from kv_prefix.eviction_queue import Ghosts, OfferedQueue, ghost_limit

MAX_FREQUENCY: Final = 8
"""Accesses beyond this many say nothing more about the next one."""

BOOSTS: Final = (0.0, 1.0, 16.0)
"""The candidates, in capacities: plain LRU, which is never far off; what suits most traffic; almost pure frequency."""

MINIATURE: Final = 4_096
"""Names that a miniature holds at most; larger pools are sampled down to it."""

WINDOW: Final = 4
"""After so many accesses a name held by a miniature, what it learned before counts half."""

MARGINS: Final = (0.005, 0.005, 0.25)
SIGMAS: Final = (1.0, 3.0, 3.0)
"""What a candidate must be better by: in hits, and in standard deviations, which are taken over batches of accesses,
for the blocks of one prompt hit or miss together. LRU needs little evidence to come back. Almost pure frequency needs a
quarter more hits: what was popular in one phase of the traffic fills the pool in the next."""

UNHEARD_MAX: Final = 512
"""When so many accesses wait, the miniatures hear of them: about a millisecond of their work."""

_BATCH: Final = 64
_NUM_LEVELS: Final = MAX_FREQUENCY.bit_length()


class AdaptivePolicy:
    """An `EvictionPolicy`. Names that are bytes are sampled; others only follow."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._queues = [OfferedQueue(capacity) for _ in range(_NUM_LEVELS)]
        self._level = bytearray(capacity)
        self._uses = bytearray(capacity)
        self._offered = bytearray(capacity)
        self._names: list[Hashable] = [None] * capacity
        self._ghosts = Ghosts(ghost_limit(capacity))
        self._duel = Duel(capacity)
        self._unheard: list[Hashable] = []
        self._now = 0

    @property
    def boost(self) -> float:
        """The boost at work, in capacities."""
        if self._unheard:
            self._hear()
        return BOOSTS[self._duel.leader]

    def insert(self, slot: int, name: Hashable) -> None:
        self._names[slot] = name
        self._uses[slot] = before = self._ghosts.take(name)
        self._level[slot] = _LEVELS[before]
        self.touch(slot)

    def insert_all(self, slots: Sequence[int], names: Sequence[Hashable]) -> None:
        uses, level = self._uses, self._level
        for slot, name, before in zip(slots, names, self._ghosts.take_all(names), strict=True):
            self._names[slot] = name
            uses[slot] = before
            level[slot] = _LEVELS[before]
        self.touch_all(slots)

    def touch(self, slot: int) -> None:
        self._now += 1
        self._uses[slot] = uses = min(self._uses[slot] + 1, MAX_FREQUENCY)
        level = _LEVELS[uses]
        self._queues[level].rank[slot] = self._now
        if level != self._level[slot]:
            self._change_level(slot, level)
        self._unheard.append(self._names[slot])
        if len(self._unheard) >= UNHEARD_MAX:
            self._hear()

    def touch_all(self, slots: Sequence[int]) -> None:
        uses_of, level_of, queues, now = self._uses, self._level, self._queues, self._now
        for slot in slots:
            now += 1
            uses_of[slot] = uses = min(uses_of[slot] + 1, MAX_FREQUENCY)
            level = _LEVELS[uses]
            queues[level].rank[slot] = now
            if level != level_of[slot]:
                self._change_level(slot, level)
        self._now = now
        names = self._names
        self._unheard += [names[slot] for slot in slots]
        if len(self._unheard) >= UNHEARD_MAX:
            self._hear()

    def offer(self, slot: int) -> None:
        if self._unheard:
            self._hear()
        self._offered[slot] = True
        self._queues[self._level[slot]].offer(slot)

    def withdraw(self, slot: int) -> None:
        self._offered[slot] = False
        self._queues[self._level[slot]].withdraw(slot)

    def victim(self) -> int | None:
        if self._unheard:
            self._hear()
        queue = self._first(BOOSTS[self._duel.leader] * self._capacity)
        if queue is None:
            return None
        slot = queue.take_lowest()
        self._offered[slot] = False
        return slot

    def evict_all(self, count: int, leave: Callable[[int], int]) -> None:
        if self._unheard:
            self._hear()
        # Nothing is used meanwhile: who leads stays as it is, and so do ranks.
        boost = BOOSTS[self._duel.leader] * self._capacity
        queues, level = self._queues, self._level
        gone: list[int] = []
        following = -1
        while len(gone) < count:
            slot = following
            if slot < 0:
                queue = self._first(boost)
                assert queue is not None, "S2: some cached slot is a leaf"
                slot = queue.take_lowest()
            gone.append(slot)
            following = leave(slot)
            if following < 0:
                continue
            rank = queues[level[slot]].rank[slot] + boost * level[slot]
            # No slot offered is below the one that just left. Where this one is, as a parent mostly is, it is the next.
            if len(gone) == count or queues[level[following]].rank[following] + boost * level[following] >= rank:
                self.offer(following)
                following = -1
        for slot in gone:
            self.remove(slot, True)

    def remove(self, slot: int, evicted: bool) -> None:
        self._offered[slot] = False
        self._queues[self._level[slot]].forget(slot)
        if evicted:
            self._ghosts.put(self._names[slot], self._uses[slot])
        self._names[slot] = None

    def _first(self, boost: float) -> OfferedQueue | None:
        """The queue whose lowest slot goes first."""
        chosen: OfferedQueue | None = None
        lowest = 0.0
        for level, queue in enumerate(self._queues):
            if queue.heap and (slot := queue.lowest()) is not None:
                rank = queue.rank[slot] + boost * level
                if chosen is None or rank < lowest:
                    chosen, lowest = queue, rank
        return chosen

    def _change_level(self, slot: int, level: int) -> None:
        self._queues[self._level[slot]].forget(slot)
        self._level[slot] = level
        if self._offered[slot]:
            self._queues[level].offer(slot)

    def _hear(self) -> None:
        """Tell the miniatures of the accesses that wait (A3)."""
        unheard, self._unheard = self._unheard, []
        self._duel.observe(unheard, self._now - len(unheard) + 1)


class Duel:
    """The miniatures, and who leads.

    Args:
        capacity: blocks of the pool.
    """

    def __init__(self, capacity: int) -> None:
        self._one_in = max(1, capacity // MINIATURE)
        size = max(1, capacity // self._one_in)
        self._miniatures = [_Miniature(size, boost * capacity) for boost in BOOSTS]
        self._uses: OrderedDict[bytes, int] = OrderedDict()
        self._max_names = ghost_limit(capacity) // self._one_in + size
        self._halve_every = WINDOW * size
        self._num_seen = 0
        self._batch = [0] * len(BOOSTS)
        self._hits = [0.0] * len(BOOSTS)
        # [i][j]: squares of the difference in hits between i and j, summed over batches.
        self._squares = [[0.0] * len(BOOSTS) for _ in BOOSTS]
        # To begin with, recorded traffic says that a pool that holds thousands of blocks gains by the middle candidate.
        self.leader = 1 if capacity > MINIATURE else 0

    def observe(self, names: Sequence[Hashable], now: int) -> None:
        """Accesses to these names in turn, the first of them the `now`th of all."""
        sample, numbers = self._sample(names, now)
        done = 0
        while done < len(sample):
            # Up to where hits are compared, or halved.
            room = min(_BATCH - self._num_seen % _BATCH, self._halve_every - self._num_seen % self._halve_every)
            part, at = sample[done : done + room], numbers[done : done + room]
            done += room
            levels = self._count_uses(part)
            for i, miniature in enumerate(self._miniatures):
                self._batch[i] += miniature.access(part, at, levels)
            self._num_seen += len(part)
            if self._num_seen % _BATCH == 0:
                self._take_batch()
                self._decide()
            if self._num_seen % self._halve_every == 0:
                self._hits = [number / 2 for number in self._hits]
                self._squares = [[number / 2 for number in row] for row in self._squares]

    def _sample(self, names: Sequence[Hashable], now: int) -> tuple[list[bytes], list[int]]:
        """The names of the sample, and the number of each one's access."""
        one_in, digest = self._one_in, xxhash.xxh3_64_intdigest
        sample: list[bytes] = []
        numbers: list[int] = []
        for number, name in enumerate(names, now):
            if isinstance(name, bytes) and (one_in == 1 or not digest(name) % one_in):
                sample.append(name)
                numbers.append(number)
        return sample, numbers

    def _count_uses(self, names: Iterable[bytes]) -> list[int]:
        """The level of use of each name, this access included."""
        known, levels = self._uses, []
        for name in names:
            uses = min(known.pop(name, 0) + 1, MAX_FREQUENCY)
            known[name] = uses
            if len(known) > self._max_names:
                known.popitem(last=False)
            levels.append(_LEVELS[uses])
        return levels

    def _take_batch(self) -> None:
        for i, hits in enumerate(self._batch):
            self._hits[i] += hits
            for j, others in enumerate(self._batch):
                self._squares[i][j] += (hits - others) ** 2
        self._batch = [0] * len(BOOSTS)

    def _decide(self) -> None:
        leader, best = self.leader, 0.0
        for rival in range(len(BOOSTS)):
            gain = self._hits[rival] - self._hits[leader]
            beyond_chance = gain * gain > SIGMAS[rival] ** 2 * self._squares[rival][leader]
            if gain > best and gain > MARGINS[rival] * self._hits[leader] and beyond_chance:
                self.leader, best = rival, gain


class _Miniature:
    """Names in a cache of fixed size, the lowest rank going first; a rank only rises while its name stays.

    A rank is the last use plus a step for each level of use. Names wait in a queue for each level, in order of last
    use, so the lowest rank of all is that of a queue's head; of equal ranks the lesser name goes first.
    """

    def __init__(self, size: int, step: float) -> None:
        self._size = size
        self._step = step
        # Without a step the level makes no difference.
        self._queues: list[OrderedDict[bytes, int]] = [OrderedDict() for _ in range(_NUM_LEVELS if step else 1)]
        self._queue_of: dict[bytes, int] = {}

    def access(self, names: Sequence[bytes], numbers: Sequence[int], levels: Sequence[int]) -> int:
        """How many of these names were there when they were used, one after the other; each is from then on.

        Args:
            numbers: of the accesses, rising.
            levels: of use.
        """
        if not self._step:
            return self._access_lru(names)
        queues, queue_of, step = self._queues, self._queue_of, self._step
        hits = 0
        for name, now, level in zip(names, numbers, levels, strict=True):
            before = queue_of.get(name)
            if before is None:
                queues[level][name] = now
                queue_of[name] = level
                if len(queue_of) > self._size:
                    self._drop_lowest()
                continue
            hits += 1
            if level >= before or now + step * level > queues[before][name] + step * before:
                del queues[before][name]
                queues[level][name] = now
                queue_of[name] = level
        return hits

    def _access_lru(self, names: Iterable[bytes]) -> int:
        """Without a step the level makes no difference, and one queue is the whole cache."""
        queue, size = self._queues[0], self._size
        hits = 0
        for name in names:
            if name in queue:
                hits += 1
                queue.move_to_end(name)
                continue
            queue[name] = 0
            if len(queue) > size:
                queue.popitem(last=False)
        return hits

    def _drop_lowest(self) -> None:
        first = self._queues[0]
        if len(first) == len(self._queue_of):
            del self._queue_of[first.popitem(last=False)[0]]
            return
        lowest, rank, dropped_from = b"", inf, first
        for level, queue in enumerate(self._queues):
            for name in islice(queue, 1):
                head = queue[name] + self._step * level
                if head < rank or (head == rank and name < lowest):
                    lowest, rank, dropped_from = name, head, queue
        del dropped_from[lowest], self._queue_of[lowest]


_LEVELS: Final = array("B", [max(uses, 1).bit_length() - 1 for uses in range(MAX_FREQUENCY + 1)])
"""floor(log2 uses)."""

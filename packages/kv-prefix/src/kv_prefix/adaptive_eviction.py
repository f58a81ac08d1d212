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

import heapq
from array import array
from collections import OrderedDict
from collections.abc import Hashable
from typing import Final

from kv_core.checksum import xxh3_64
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
"""Accesses that wait for the miniatures: some three milliseconds of their work at most, when a prompt is that long."""

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
        self._unheard: list[tuple[bytes, int]] = []
        self._now = 0

    @property
    def boost(self) -> float:
        """The boost at work, in capacities."""
        self._hear()
        return BOOSTS[self._duel.leader]

    def insert(self, slot: int, name: Hashable) -> None:
        self._names[slot] = name
        self._uses[slot] = self._ghosts.take(name)
        self._level[slot] = _level(max(self._uses[slot], 1))
        self.touch(slot)

    def touch(self, slot: int) -> None:
        self._now += 1
        self._uses[slot] = uses = min(self._uses[slot] + 1, MAX_FREQUENCY)
        level = _level(uses)
        self._queues[level].rank[slot] = self._now
        if level != self._level[slot]:
            self._queues[self._level[slot]].forget(slot)
            self._level[slot] = level
            if self._offered[slot]:
                self._queues[level].offer(slot)
        name = self._names[slot]
        if isinstance(name, bytes):
            self._unheard.append((name, self._now))
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
        boost = self.boost * self._capacity
        chosen: OfferedQueue | None = None
        lowest = 0.0
        for level, queue in enumerate(self._queues):
            slot = queue.lowest()
            if slot is not None and (chosen is None or queue.rank[slot] + boost * level < lowest):
                chosen, lowest = queue, queue.rank[slot] + boost * level
        if chosen is None:
            return None
        slot = chosen.pop()
        assert slot is not None
        self._offered[slot] = False
        return slot

    def remove(self, slot: int, evicted: bool) -> None:
        self._offered[slot] = False
        self._queues[self._level[slot]].forget(slot)
        if evicted:
            self._ghosts.put(self._names[slot], self._uses[slot])
        self._names[slot] = None

    def _hear(self) -> None:
        """Tell the miniatures of the accesses that wait (A3)."""
        unheard, self._unheard = self._unheard, []
        observe = self._duel.observe
        for name, now in unheard:
            observe(name, now)


class Duel:
    """The miniatures, and who leads.

    Args:
        capacity: blocks of the pool.
    """

    def __init__(self, capacity: int) -> None:
        self._one_in = max(1, capacity // MINIATURE)
        size = max(1, capacity // self._one_in)
        self._miniatures = [_Miniature(size) for _ in BOOSTS]
        self._steps = [boost * capacity for boost in BOOSTS]
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

    def observe(self, name: bytes, now: int) -> None:
        """An access to `name`, the `now`th of all."""
        if self._one_in > 1 and xxh3_64(name) % self._one_in:
            return
        uses = min(self._uses.pop(name, 0) + 1, MAX_FREQUENCY)
        self._uses[name] = uses
        if len(self._uses) > self._max_names:
            self._uses.popitem(last=False)
        level = _level(uses)
        for i, (miniature, step) in enumerate(zip(self._miniatures, self._steps, strict=True)):
            self._batch[i] += miniature.access(name, now + step * level)
        self._num_seen += 1
        if self._num_seen % _BATCH == 0:
            self._take_batch()
            self._decide()
        if self._num_seen % self._halve_every == 0:
            self._hits = [number / 2 for number in self._hits]
            self._squares = [[number / 2 for number in row] for row in self._squares]

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
    """Names in a cache of fixed size, the lowest rank going first; a rank only rises while its name stays."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._ranks: dict[bytes, float] = {}
        self._heap: list[tuple[float, bytes]] = []

    def access(self, name: bytes, rank: float) -> bool:
        """Whether it was there; it is from now on."""
        ranks, heap = self._ranks, self._heap
        if name in ranks:
            ranks[name] = max(rank, ranks[name])
            return True
        ranks[name] = rank
        heapq.heappush(heap, (rank, name))
        while len(ranks) > self._size:
            queued, lowest = heap[0]
            if ranks[lowest] > queued:
                heapq.heapreplace(heap, (ranks[lowest], lowest))
            else:
                heapq.heappop(heap)
                del ranks[lowest]
        return False


_LEVELS: Final = array("B", [max(uses, 1).bit_length() - 1 for uses in range(MAX_FREQUENCY + 1)])


def _level(uses: int) -> int:
    """floor(log2 uses)."""
    return _LEVELS[uses]

"""When to evict before the room is needed, so that a request's hand-out finds free slots and need not evict itself.

Decides how many, never which: that is the pool's policy. Pure; asked at a steady pace with the pool's counts. Eviction
ahead costs hits (what is evicted may have been asked for again), so both marks are 0 unless somebody sets them, and
nothing is evicted ahead while blocks still wait to be written to a slower tier: there they go for nothing.

W1: nothing is asked for until fewer than `low` slots are free, and then until `high` are.
W2: at most `EVICT_BATCH` at a time: a call bounds how long the loop stands still.
W3: what cannot be had is not asked for: with everything pinned the answer is 0, whoever asks and however often.
"""

import math
from dataclasses import dataclass
from typing import Final

from kv_prefix.errors import InvalidRequestError
from kv_prefix.pool_types import PoolStats

EVICT_BATCH: Final = 512
"""Blocks one call may ask for: about 3 ms of evicting."""


@dataclass(slots=True)
class Watermarks:
    """The marks of one pool, as shares of its slots; 0 and 0: never ahead of need.

    Raises:
        InvalidRequestError: not 0 <= low <= high <= 1, or only one of them is 0.
    """

    low: float = 0.0
    high: float = 0.0
    _filling: bool = False

    def __post_init__(self) -> None:
        if not 0.0 <= self.low <= self.high <= 1.0 or (self.low == 0.0) != (self.high == 0.0):
            raise InvalidRequestError(
                name="watermarks", value=f"{self.low} and {self.high}", rule="need 0 < low <= high <= 1, or both 0"
            )

    def step(self, stats: PoolStats, *, num_waiting: int = 0) -> int:
        """How many blocks to evict now.

        Args:
            num_waiting: blocks on their way to a slower tier.
        """
        if stats.free < self.low * stats.total:
            self._filling = True
        if not self._filling or num_waiting:
            return 0
        lacking = max(0, math.ceil(self.high * stats.total) - stats.free)
        asked = min(lacking, stats.cached, EVICT_BATCH)
        # Whoever asks evicts as many: with the last of them the high mark is reached.
        self._filling = asked < lacking
        return asked

"""The cache that knows the future: what no eviction policy can exceed, to hold them against.

Evicts what is needed again last, or never (L. A. Belady, "A study of replacement algorithms for a virtual-storage
computer", IBM Systems Journal, 1966). Of blocks that are needed again by the same request the last ones of its prompt
go first, so there is never a hole: whoever needs a block needs all before it no later.
"""

import heapq
from collections.abc import Sequence
from typing import Final

from kv_services.kvctl.replay.caches import Prompt
from kv_services.kvctl.replay.trace import TraceRequest

CLAIRVOYANT: Final = "clairvoyant"


class ClairvoyantCache:
    """One pool; its prompts must come in the order of the trace it was made from.

    Args:
        capacity_blocks: to which it is brought down after each request.
    """

    def __init__(self, requests: Sequence[TraceRequest], capacity_blocks: int) -> None:
        self._requests = requests
        self._next_uses = _next_uses(requests)
        self._capacity = capacity_blocks
        self._now = 0
        # By block: when it is needed next, and its position there. The heap has every entry that was ever true.
        self._needed: dict[int, tuple[int, int]] = {}
        self._last_needed: list[tuple[int, int, int]] = []
        self.evicted = 0

    def serve(self, prompt: Prompt) -> tuple[int, int, int, int]:
        """As `Cache.serve`; the prompt is that of the trace's next request."""
        ids, nexts = self._requests[self._now].hash_ids, self._next_uses[self._now]
        self._now += 1
        assert len(ids) == len(prompt.names)
        held = next((i for i, block_id in enumerate(ids) if block_id not in self._needed), len(ids))
        for position, (block_id, at) in enumerate(zip(ids, nexts, strict=True)):
            self._needed[block_id] = (at, position)
            heapq.heappush(self._last_needed, (-at, -position, block_id))
        while len(self._needed) > self._capacity:
            at, position, block_id = heapq.heappop(self._last_needed)
            if self._needed.get(block_id) == (-at, -position):
                del self._needed[block_id]
                self.evicted += 1
        return 0, held, 0, 0


def _next_uses(requests: Sequence[TraceRequest]) -> list[list[int]]:
    """For each block of each request, the number of the next request that has it; the number of requests if none."""
    seen: dict[int, int] = {}
    found: list[list[int]] = []
    for number in range(len(requests) - 1, -1, -1):
        ids = requests[number].hash_ids
        found.append([seen.get(block_id, len(requests)) for block_id in ids])
        seen.update(dict.fromkeys(ids, number))
    found.reverse()
    return found

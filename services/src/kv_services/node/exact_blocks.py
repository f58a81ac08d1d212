"""Which blocks hold, to the last bit, what an engine computed on this node.

A namespace of another fidelity than `exact` has both kinds: what was computed, and what a lossy codec left of it on its
way here. Only the former may go through that codec (nothing is made lossy twice), so it is remembered; whatever is not
known to be computed here counts as lossy, which costs bytes and never a bit. In a namespace of fidelity `exact` nothing
ever went through a lossy codec, and nothing needs to be remembered.
"""

from collections.abc import Sequence

import numpy as np

from kv_core.namespace import EXACT, Fidelity
from kv_transport import Arena


class ExactBlocks:
    """Remembered by generation, so that a slot's next content is not taken for its last. Thread-safe by slot."""

    def __init__(self, arena: Arena) -> None:
        self._arena = arena
        self._computed = np.zeros(arena.num_slots, np.uint64)

    def note(self, slots: Sequence[int]) -> None:
        """These blocks' present content was computed here, all of it."""
        at = list(slots)
        self._computed[at] = self._arena.generations[at]

    def all_exact(self, slots: Sequence[int]) -> bool:
        """Whether all of them are known to be exact."""
        at = list(slots)
        return bool((self._computed[at] == self._arena.generations[at]).all())

    def fidelity(self, published: Fidelity, slots: Sequence[int]) -> Fidelity:
        """Of the bytes of these blocks, which are published under `published`."""
        return EXACT if published.is_exact or self.all_exact(slots) else published

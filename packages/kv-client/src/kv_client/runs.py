"""Which slots of the client's arena are free, given out as runs so that one array shows a whole prefix. Pure.

R1: a slot is in one run at most, or free. R2: adjoining free runs are one.
"""


class SlotRuns:
    """Slots `0 .. num_slots - 1`; first fit."""

    def __init__(self, num_slots: int) -> None:
        self._free = [range(num_slots)]

    @property
    def longest(self) -> int:
        """Slots in the longest free run."""
        return max(map(len, self._free), default=0)

    @property
    def num_free(self) -> int:
        """Free slots, in runs of whatever length."""
        return sum(map(len, self._free))

    def take(self, count: int) -> range | None:
        """`count` adjoining slots, or None."""
        for index, run in enumerate(self._free):
            if len(run) >= count:
                rest = run[count:]
                self._free[index : index + 1] = [rest] if rest else []
                return run[:count]
        return None

    def give_back(self, run: range) -> None:
        """A run from `take` is free again."""
        merged: list[range] = []
        for free in sorted([*self._free, run], key=lambda one: one.start):
            if merged and merged[-1].stop == free.start:
                merged[-1] = range(merged[-1].start, free.stop)
            else:
                merged.append(free)
        self._free = merged

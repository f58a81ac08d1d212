"""Whether loading blocks from a tier is quicker than computing them, from what loads really took.

Pure: durations come in. What a load takes is fitted by least squares to `overhead + bytes * rate`, older loads counting
for less and less, so one bad load does not condemn a tier and a changed one is soon known; a load that never came back
counts with the time that was waited for it. Before its first load a tier is taken at a stated, cautious cost. One that
is skipped for its slowness is tried again now and then, or it could never be found to have recovered.
"""

from dataclasses import dataclass, field
from typing import Final

_DECAY: Final = 0.8
RETRY_AFTER: Final = 64
"""Skipped loads after which one is tried all the same, if it is small."""
RETRY_BLOCKS: Final = 8


@dataclass(frozen=True, slots=True)
class Choice:
    """What to do about blocks in a slower tier.

    Attributes:
        num_blocks: how many of them to load, from the first; 0: compute all.
        reason: the comparison in one sentence.
    """

    num_blocks: int
    reason: str


@dataclass(slots=True)
class TierCost:
    """What one tier's loads cost.

    Args:
        name: of the tier, for the sentence.
        block_nbytes: bytes of one block.
        ns_per_byte, overhead_ns: what is assumed before the first loads.
    """

    name: str
    block_nbytes: int
    ns_per_byte: float
    overhead_ns: float
    skipped: int = 0
    # Decayed sums of 1, x, y, xx, xy with x in bytes and y in nanoseconds.
    _sums: list[float] = field(default_factory=lambda: [0.0] * 5)

    def __post_init__(self) -> None:
        # What is assumed counts as two loads, a small and a large one.
        for num_blocks in (1, 64):
            nbytes = num_blocks * self.block_nbytes
            self._add(nbytes, self.overhead_ns + nbytes * self.ns_per_byte)

    def loaded(self, nbytes: int, duration_ns: int) -> None:
        """A load of so many bytes took that long, or was given up after it."""
        if nbytes <= 0:
            return
        self._sums = [_DECAY * total for total in self._sums]
        self._add(nbytes, duration_ns)
        count, x, y, xx, xy = self._sums
        spread = count * xx - x * x
        # Loads of one size say nothing about the split: the overhead stays, the rate takes it all.
        rate = (count * xy - x * y) / spread if spread > 1e-3 * xx * count else (y - count * self.overhead_ns) / x
        overhead = (y - rate * x) / count
        if rate < 0:
            rate, overhead = 0.0, y / count
        elif overhead < 0:
            rate, overhead = xy / xx, 0.0
        self.ns_per_byte, self.overhead_ns = rate, overhead

    def _add(self, nbytes: int, duration_ns: float) -> None:
        for i, value in enumerate((1.0, nbytes, duration_ns, nbytes * nbytes, nbytes * duration_ns)):
            self._sums[i] += value

    def load_ns(self, num_blocks: int) -> float:
        """What loading that many blocks is expected to take."""
        return self.overhead_ns + num_blocks * self.block_nbytes * self.ns_per_byte

    def choose(self, num_blocks: int, compute_ns_per_block: float) -> Choice:
        """Load all of these blocks, or none: a load's overhead is paid once."""
        load_ns, compute_ns = self.load_ns(num_blocks), num_blocks * compute_ns_per_block
        comparison = f"{num_blocks} blocks take {load_ns / 1e6:.1f} ms from {self.name}"
        comparison += f", {compute_ns / 1e6:.1f} ms to compute"
        if load_ns < compute_ns:
            return Choice(num_blocks, f"load: {comparison}")
        self.skipped += 1
        if self.skipped % RETRY_AFTER == 0:
            return Choice(min(num_blocks, RETRY_BLOCKS), f"load: trying {self.name} again ({comparison})")
        return Choice(0, f"compute: {comparison}")

"""What happens to frames between simulated nodes: delay, loss, duplication, clogged and cut links. Seeded."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from random import Random

from kv_bus.memory_bus import Channel
from kv_core.clock import Clock
from kv_core.ids import NodeId

Link = tuple[NodeId, NodeId]


@dataclass(slots=True)
class SimNetwork:
    """Directed links; `NetworkFaults` of the in-memory bus.

    Attributes:
        loss, duplication: chances of one frame, in [0, 1].
        cut: links that let nothing through.
        clogged: links that are slow by this many nanoseconds more.
        frames: how many were asked about.
    """

    random: Random
    clock: Clock
    loss: float = 0.0
    duplication: float = 0.0
    delay_min_ns: int = 50_000
    delay_mean_ns: int = 300_000
    cut: dict[Link, None] = field(default_factory=dict)
    clogged: dict[Link, int] = field(default_factory=dict)
    frames: int = 0
    _digest: blake2b = field(default_factory=lambda: blake2b(digest_size=16))

    def deliveries(self, source: NodeId, target: NodeId, channel: Channel, nbytes: int) -> Sequence[int]:
        self.frames += 1
        self.note(f"{source}>{target} {channel.value} {nbytes}")
        if self.random.random() < self.loss:
            return ()
        copies = 2 if self.random.random() < self.duplication else 1
        return [self._delay_ns(source, target) for _ in range(copies)]

    def is_cut(self, source: NodeId, target: NodeId) -> bool:
        return (source, target) in self.cut

    def heal(self) -> None:
        """No more faults from now on."""
        self.loss = self.duplication = 0.0
        self.cut.clear()
        self.clogged.clear()

    def note(self, text: str) -> None:
        """Add a line to the run's digest, with the time."""
        self._digest.update(f"{self.clock.monotonic_ns()} {text}\n".encode())

    @property
    def digest(self) -> str:
        """Of everything noted so far: equal runs have equal digests."""
        return self._digest.hexdigest()

    def _delay_ns(self, source: NodeId, target: NodeId) -> int:
        spread = int(self.random.expovariate(1.0) * self.delay_mean_ns)
        return self.delay_min_ns + spread + self.clogged.get((source, target), 0)

"""What happens to frames between simulated nodes: delay, loss, duplication, slow, clogged and cut links. Seeded.

One connection keeps its order, as TCP does; frames of different connections, and units of KV, overtake each other by
their delays.
"""

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
        cut: links that let nothing through, and how many faults cut each.
        clogged: links that are slow by this many nanoseconds more.
        slow: nodes that handle each frame late by this many nanoseconds.
        frames: how many were asked about.
    """

    random: Random
    clock: Clock
    loss: float = 0.0
    duplication: float = 0.0
    delay_min_ns: int = 50_000
    delay_mean_ns: int = 300_000
    cut: dict[Link, int] = field(default_factory=dict)
    clogged: dict[Link, int] = field(default_factory=dict)
    slow: dict[NodeId, int] = field(default_factory=dict)
    frames: int = 0
    _digest: blake2b = field(default_factory=lambda: blake2b(digest_size=16))

    def deliveries(self, source: NodeId, target: NodeId, channel: Channel, nbytes: int) -> Sequence[int]:
        self.frames += 1
        # `value` of an enum costs two calls, and this is asked for every frame.
        self.note(f"{source}>{target} {channel._value_} {nbytes}")
        random = self.random.random
        if self.loss and random() < self.loss:
            return ()
        if self.duplication and random() < self.duplication:
            return (self._delay_ns(source, target), self._delay_ns(source, target))
        return (self._delay_ns(source, target),)

    def is_cut(self, source: NodeId, target: NodeId) -> bool:
        return (source, target) in self.cut

    def cut_link(self, link: Link) -> None:
        """Let nothing through, until it was healed as often as it was cut."""
        self.cut[link] = self.cut.get(link, 0) + 1

    def heal_link(self, link: Link) -> bool:
        """Undo one cut; whether the link is whole again."""
        left = self.cut.get(link, 0) - 1
        if left > 0:
            self.cut[link] = left
            return False
        self.cut.pop(link, None)
        return True

    def note(self, text: str) -> None:
        """Add a line to the run's digest, with the time."""
        self._digest.update(f"{self.clock.monotonic_ns()} {text}\n".encode())

    @property
    def digest(self) -> str:
        """Of everything noted so far: equal runs have equal digests."""
        return self._digest.hexdigest()

    def _delay_ns(self, source: NodeId, target: NodeId) -> int:
        delay_ns = self.delay_min_ns + int(self.random.expovariate(1.0) * self.delay_mean_ns)
        if self.clogged:
            delay_ns += self.clogged.get((source, target), 0)
        if self.slow:
            delay_ns += self.slow.get(source, 0) + self.slow.get(target, 0)
        return delay_ns

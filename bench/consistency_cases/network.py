"""Replicas over a simulated network in one process: virtual time, seeded delays and losses, every byte counted.

Only the machines of kv-consistency run; the bus around them is a heap of messages. A broadcast is counted once for each
subscriber, as a PUB socket sends it.
"""

import heapq
import random
from collections.abc import Iterable
from typing import Final

import msgspec

from kv_consistency.effects import BroadcastUpdates, Effect, SendTo
from kv_consistency.events import Event, Instant, PeerJoined, Received, Tick
from kv_consistency.manager import KvCacheConsistencyManager
from kv_consistency.messages import ReplicaMessage
from kv_core.ids import Incarnation, NodeId

MS: Final = 1_000_000
TICK_NS: Final = 100 * MS
"""As the nodes of a cluster tick."""
_WALL_NS: Final = 1_000_000_000_000
_ENCODE: Final = msgspec.msgpack.Encoder().encode
_DELAY_MIN_NS: Final = MS // 5
_DELAY_MEAN_NS: Final = MS // 2


def block_hash(number: int) -> bytes:
    """A name for each number, as evenly spread as real ones."""
    return (number * 0x9E3779B97F4A7C15F39CC0605CEDC835 & (1 << 128) - 1).to_bytes(16, "big")


class Network:
    """`num_nodes` replicas that know each other."""

    def __init__(self, num_nodes: int) -> None:
        self.now_ns = 0
        self.sent_nbytes = 0
        self.sent_messages = 0
        self._loss = 0.0
        self._draw = random.Random(f"bench/network/{num_nodes}")
        self._heap: list[tuple[int, int, NodeId, NodeId, ReplicaMessage]] = []
        self._order = 0
        self._ticks = [(i * TICK_NS // num_nodes, i) for i in range(num_nodes)]
        self.names = [NodeId(f"node-{i:04d}") for i in range(num_nodes)]
        self.replicas = {name: KvCacheConsistencyManager(name) for name in self.names}
        for name, replica in self.replicas.items():
            for peer in self.names:
                if peer != name:
                    self.perform(name, replica.step(PeerJoined(self.at(), peer, Incarnation(1))))

    def at(self) -> Instant:
        return Instant(self.now_ns, _WALL_NS + self.now_ns)

    def lose(self, part: float) -> None:
        """From now on that part of the messages never arrives."""
        self._loss = part

    def step(self, name: NodeId, event: Event) -> None:
        self.perform(name, self.replicas[name].step(event))

    def perform(self, name: NodeId, effects: Iterable[Effect]) -> None:
        for effect in effects:
            if isinstance(effect, BroadcastUpdates):
                self._send(name, [peer for peer in self.names if peer != name], effect.batch)
            elif isinstance(effect, SendTo):
                self._send(name, [effect.peer], effect.message)

    def run(self, until_ns: int) -> None:
        """Let time pass: messages arrive, and every replica ticks at its own offset."""
        ticks = self._ticks
        while True:
            tick_ns, i = ticks[0]
            if self._heap and self._heap[0][0] <= min(tick_ns, until_ns):
                self.now_ns, _, receiver, sender, message = heapq.heappop(self._heap)
                self.step(receiver, Received(self.at(), sender, message))
            elif tick_ns <= until_ns:
                self.now_ns = tick_ns
                heapq.heapreplace(ticks, (tick_ns + TICK_NS, i))
                self.step(self.names[i], Tick(self.at()))
            else:
                self.now_ns = until_ns
                return

    def agree(self) -> bool:
        """Whether every replica has applied the same updates."""
        first, *others = self.replicas.values()
        vector = first.vector()
        return all(other.vector() == vector for other in others)

    def _send(self, sender: NodeId, receivers: list[NodeId], message: ReplicaMessage) -> None:
        self.sent_nbytes += len(_ENCODE(message)) * len(receivers)
        self.sent_messages += len(receivers)
        for receiver in receivers:
            if self._draw.random() >= self._loss:
                delay_ns = _DELAY_MIN_NS + int(self._draw.expovariate(1 / _DELAY_MEAN_NS))
                self._order += 1
                heapq.heappush(self._heap, (self.now_ns + delay_ns, self._order, receiver, sender, message))

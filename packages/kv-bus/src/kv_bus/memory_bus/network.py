"""Where the nodes of one simulated cluster meet, and what happens to frames between them.

The network uses no thread, no socket, no clock and no chance of its own: time is its loop's, all chance comes from
`NetworkFaults`, which the simulator supplies.

N1: a frame is delivered after the delay that the faults give it, more than once if they say so, or not at all. Frames
    of one connection keep their order, as TCP's do, unless the network was made unordered.
N2: a cut is tested when a frame would be delivered, so it also eats what is in flight.
N3: a frame is delivered in the context (`contextvars`) in which its receiver opened its bus, so that whatever it starts
    belongs to the receiver and not to the sender.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Protocol

from kv_bus.errors import BindFailed
from kv_core.ids import NodeId

if TYPE_CHECKING:
    from kv_bus.memory_bus.carrier import MemoryCarrier


Deliver = Callable[[], None]


class Channel(Enum):
    """What a frame is part of."""

    HANDSHAKE = "handshake"
    REQUEST = "request"
    REPLY = "reply"
    EVENT = "event"


class NetworkFaults(Protocol):
    """Decides what happens to each frame. Asked in a fixed order, so a seeded one makes a repeatable run."""

    def deliveries(self, source: NodeId, target: NodeId, channel: Channel, nbytes: int) -> Sequence[int]:
        """One delay in nanoseconds per copy that arrives; empty when the frame is lost.

        A lost request or reply breaks no connection: it is as if the peer had swallowed it.
        """
        ...

    def is_cut(self, source: NodeId, target: NodeId) -> bool:
        """Whether nothing gets from `source` to `target` now."""
        ...


class NoFaults:
    """A network that delivers everything once, after `delay_ns`."""

    __slots__ = ("_delays",)

    def __init__(self, delay_ns: int = 50_000) -> None:
        self._delays = (delay_ns,)

    def deliveries(self, source: NodeId, target: NodeId, channel: Channel, nbytes: int) -> Sequence[int]:
        return self._delays

    def is_cut(self, source: NodeId, target: NodeId) -> bool:
        return False


@dataclass(frozen=True, slots=True)
class NetworkStats:
    """What the network did with frames."""

    sent: int
    delivered: int
    lost: int
    cut: int


class Path:
    """One direction of one connection."""

    __slots__ = ("in_flight", "last_arrival", "source", "target")

    def __init__(self, source: NodeId, target: NodeId) -> None:
        self.source = source
        self.target = target
        self.last_arrival = 0.0
        self.in_flight: deque[tuple[Deliver, Deliver | None]] = deque()


class MemoryNetwork:
    """One simulated cluster's network.

    Args:
        cluster: its name, as in an allow-list.
        faults: what happens to frames.
        ordered: keep the order of frames on one connection (N1).
    """

    def __init__(self, cluster: str = "memory", faults: NetworkFaults | None = None, *, ordered: bool = True) -> None:
        self.cluster = cluster
        self.faults: NetworkFaults = faults or NoFaults()
        self._ordered = ordered
        self._nodes: dict[NodeId, MemoryCarrier] = {}
        self._barred: dict[NodeId, None] = {}
        self._connections = 0
        self._sent = self._delivered = self._lost = self._cut = 0

    def bar(self, node_id: NodeId) -> None:
        """Take the node's key out of every allow-list."""
        self._barred[node_id] = None
        for carrier in list(self._nodes.values()):
            carrier.keys_changed()

    def admit(self, node_id: NodeId) -> None:
        """Put the node's key back."""
        self._barred.pop(node_id, None)

    def is_barred(self, node_id: NodeId) -> bool:
        return node_id in self._barred

    def crash(self, node_id: NodeId) -> None:
        """The node's process is gone without a word. Its bus is deaf and dumb from now on; close it to free it."""
        carrier = self._nodes.get(node_id)
        if carrier is not None:
            carrier.vanish()

    def inject(self, owner: NodeId, target: NodeId, data: bytes) -> None:
        """Bring any bytes to `target`, as from a connection made with the key of `owner`."""
        carrier = self._nodes[target]
        asyncio.get_running_loop().call_soon(carrier.frame_arrived, owner, b"", data)

    def stats(self) -> NetworkStats:
        return NetworkStats(self._sent, self._delivered, self._lost, self._cut)

    def find(self, node_id: NodeId) -> "MemoryCarrier | None":
        """The node as the network sees it now; None when there is nobody."""
        return self._nodes.get(node_id)

    def join(self, carrier: "MemoryCarrier") -> None:
        if carrier.node_id in self._nodes:
            raise BindFailed(address=carrier.node_id, cause="Address already in use")
        self._nodes[carrier.node_id] = carrier

    def leave(self, carrier: "MemoryCarrier") -> None:
        if self._nodes.get(carrier.node_id) is carrier:
            del self._nodes[carrier.node_id]

    def next_route(self) -> bytes:
        """A name for a new connection, used once."""
        self._connections += 1
        return self._connections.to_bytes(8)

    def carry(
        self,
        path: Path,
        channel: Channel,
        nbytes: int,
        deliver: Deliver,
        on_cut: Deliver | None = None,
    ) -> None:
        """Bring a frame along `path`, as the faults will have it (N1)."""
        self._sent += 1
        delays = self.faults.deliveries(path.source, path.target, channel, nbytes)
        if not delays:
            self._lost += 1
        loop = asyncio.get_running_loop()
        receiver = self._nodes.get(path.target)
        context = None if receiver is None else receiver.context
        for delay_ns in delays:
            at = loop.time() + delay_ns / 1e9
            if self._ordered:
                # Timers of one instant come in no order, so a timer delivers whatever is next.
                at = path.last_arrival = max(at, path.last_arrival)
                path.in_flight.append((deliver, on_cut))
                loop.call_at(at, self._next_arrives, path, context=context)
            else:
                loop.call_at(at, self._arrive, path, deliver, on_cut, context=context)

    def _next_arrives(self, path: Path) -> None:
        self._arrive(path, *path.in_flight.popleft())

    def _arrive(self, path: Path, deliver: Deliver, on_cut: Deliver | None) -> None:
        if not self.faults.is_cut(path.source, path.target):
            self._delivered += 1
            deliver()
            return
        self._cut += 1
        if on_cut is not None:
            on_cut()

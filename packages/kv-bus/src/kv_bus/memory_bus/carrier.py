"""One simulated node below the seam."""

import asyncio
import contextvars
from collections.abc import Callable

from kv_bus.carrier import CarrierStats, EventSink, Frame, LinkSink, ReplyOutcome, RequestSink
from kv_bus.interface import PeerAddress
from kv_bus.memory_bus.connection import Connection
from kv_bus.memory_bus.network import Channel, MemoryNetwork
from kv_core.ids import NodeId


class MemoryCarrier:
    """A node of `network`. Addresses mean nothing here: a peer is found by its name."""

    def __init__(self, network: MemoryNetwork, node_id: NodeId) -> None:
        self.network = network
        self.node_id = node_id
        self.is_open = False
        self.context: contextvars.Context | None = None
        self.dialled: dict[Connection, None] = {}
        self.accepted: dict[bytes, Connection] = {}
        self.subscribers: dict[Connection, Callable[[Frame], None]] = {}
        self.callers: dict[bytes, Callable[[Frame], None]] = {}
        self._sink: RequestSink | None = None
        self._receives = False

    @property
    def cluster(self) -> str:
        return self.network.cluster

    async def open(self, sink: RequestSink) -> None:
        """See `Carrier.open`."""
        self.network.join(self)
        self.context = contextvars.copy_context()
        self._sink = sink
        self.is_open = self._receives = True

    def stop_receiving(self) -> None:
        """See `Carrier.stop_receiving`."""
        self._receives = False

    async def close(self) -> None:
        """See `Carrier.close`."""
        self.vanish()

    def vanish(self) -> None:
        """The node is gone; those connected to it learn of it when that reaches them."""
        self.is_open = self._receives = False
        self.network.leave(self)
        for connection in list(self.accepted.values()):
            connection.hang_up()
        self.accepted.clear()
        self.callers.clear()
        self.subscribers.clear()
        for connection in list(self.dialled):
            connection.close()

    def key_of(self, node_id: NodeId) -> str:
        """See `Carrier.key_of`."""
        return "" if self.network.is_barred(node_id) else f"key of {node_id}"

    def check_address(self, peer: PeerAddress) -> None:
        """Any address will do."""

    def connect(self, peer: PeerAddress, sink: LinkSink) -> "MemoryWire":
        """See `Carrier.connect`."""
        return MemoryWire(self, peer.node_id, sink)

    def subscribe(self, peer: PeerAddress, sink: EventSink) -> "MemoryEventWire":
        """See `Carrier.subscribe`."""
        return MemoryEventWire(self, peer.node_id, sink)

    def reply(self, route: bytes, data: bytes) -> ReplyOutcome:
        """See `Carrier.reply`."""
        connection, arrived = self.accepted.get(route), self.callers.get(route)
        if connection is None or arrived is None:
            return ReplyOutcome.GONE
        connection.send_back(Channel.REPLY, len(data), lambda: arrived(data))
        return ReplyOutcome.SENT

    def publish(self, data: bytes) -> None:
        """See `Carrier.publish`."""
        for connection, arrived in list(self.subscribers.items()):
            connection.send_back(Channel.EVENT, len(data), _bound(arrived, data))

    def flush(self) -> None:
        """Each frame left when it was sent."""

    def stats(self) -> CarrierStats:
        return CarrierStats()

    def frame_arrived(self, owner: NodeId, route: bytes, data: bytes) -> None:
        """A frame came by a connection made with the key of `owner`."""
        if not self._receives or self._sink is None:
            return
        if self.network.is_barred(owner):
            self._sink.stranger_arrived(route, data)
            return
        self._sink.request_arrived(owner, route, data)

    def keys_changed(self) -> None:
        """Somebody was barred: his subscriptions end here, as does what we have with him."""
        for connection in list(self.subscribers):
            if self.network.is_barred(connection.dialler):
                del self.subscribers[connection]
                connection.hang_up()
        if self._sink is not None:
            asyncio.get_running_loop().call_soon(self._sink.keys_changed)


class MemoryWire:
    """Requests out, replies in."""

    __slots__ = ("_carrier", "_connection", "_sink")

    def __init__(self, carrier: MemoryCarrier, peer: NodeId, sink: LinkSink) -> None:
        self._carrier = carrier
        self._sink = sink
        self._connection = Connection(carrier, peer, self)

    def send(self, data: bytes) -> bool:
        """See `Wire.send`."""
        owner, route = self._carrier.node_id, self._connection.route
        return self._connection.send(
            Channel.REQUEST, len(data), lambda remote: remote.frame_arrived(owner, route, data)
        )

    def reconnect(self) -> None:
        self._connection.reconnect()

    def close(self) -> None:
        self._connection.close()

    def made(self, remote: MemoryCarrier) -> None:
        remote.callers[self._connection.route] = self._sink.reply_arrived
        self._sink.connected()

    def lost(self, cause: str) -> None:
        self._sink.lost(cause)

    def refused(self, cause: str) -> None:
        self._sink.refused(cause)


class MemoryEventWire:
    """Events in."""

    __slots__ = ("_connection", "_sink")

    def __init__(self, carrier: MemoryCarrier, peer: NodeId, sink: EventSink) -> None:
        self._sink = sink
        self._connection = Connection(carrier, peer, self)

    def reconnect(self) -> None:
        self._connection.reconnect()

    def close(self) -> None:
        self._connection.close()

    def made(self, remote: MemoryCarrier) -> None:
        remote.subscribers[self._connection] = self._sink.event_arrived

    def lost(self, cause: str) -> None:
        """What was missed shows in the numbers of the events."""

    def refused(self, cause: str) -> None:
        self._sink.refused(cause)


def _bound(arrived: Callable[[Frame], None], data: bytes) -> Callable[[], None]:
    return lambda: arrived(data)

"""ZeroMQ as a carrier: one ROUTER for requests, one PUB for events, a DEALER and a SUB per peer that is used.

A ZeroMQ message is one packet (`packets`); what comes in several parts is refused. Routing ids are libzmq's own, new
for every connection, so that no peer can take another's name, and a reply to a connection that broke reaches nobody.
"""

import asyncio
import logging
from collections import deque
from dataclasses import dataclass
from typing import Final

import zmq

from kv_bus.carrier import CarrierStats, EventSink, LinkSink, ReplyOutcome, RequestSink
from kv_bus.errors import BindFailed, KeyFileError
from kv_bus.interface import PeerAddress
from kv_bus.keys import AllowList, AllowListSource, KeyPair
from kv_bus.limits import (
    ALLOW_LIST_POLL_NS,
    BIND_RETRY_NS,
    CLOSE_LINGER_MS,
    COPY_BYTES_MAX,
    MS,
    REPLY_RETRY_NS,
)
from kv_bus.ports import ephemeral_range
from kv_bus.zmq_bus.monitor import ConnectionEvent, Monitor
from kv_bus.zmq_bus.packets import Packet, PacketError, split
from kv_bus.zmq_bus.pump import Pump
from kv_bus.zmq_bus.sockets import new_context, parse_address, require_libzmq, server_socket
from kv_bus.zmq_bus.wires import DealerWire, Dialer, SubWire
from kv_bus.zmq_bus.zap import ZapHandler, user_id
from kv_core.clock import Clock
from kv_core.ids import Incarnation, NodeId

_log = logging.getLogger(__name__)

# As ints: operators of an `IntFlag` cost more than the call they are for.
_NOBLOCK: Final = int(zmq.NOBLOCK)
_MORE_NOBLOCK: Final = int(zmq.NOBLOCK | zmq.SNDMORE)


@dataclass(frozen=True, slots=True)
class ZmqBusConfig:
    """What a node needs to join its cluster's bus.

    Args:
        node_id: must be the owner of `keys`.
        incarnation: which life of the node this is.
        requests, events: where to bind, as `tcp://<IP>:<port>`. Take ports below the ephemeral range (`pick_ports`).
        keys: our key pair.
        allow_list: the keys of the cluster, ours among them.
    """

    node_id: NodeId
    incarnation: Incarnation
    requests: str
    events: str
    keys: KeyPair
    allow_list: AllowListSource


class ZmqCarrier:
    """See the module."""

    def __init__(self, config: ZmqBusConfig, clock: Clock) -> None:
        self._version = require_libzmq()
        self._requests_at = parse_address(config.requests)
        self._events_at = parse_address(config.events)
        listed = config.allow_list.current.keys.get(config.node_id)
        if config.keys.node_id != config.node_id or listed != config.keys.public_key:
            cause = f"the key of {config.keys.node_id} is not the one the allow-list has for {config.node_id}"
            raise KeyFileError(path="key pair", cause=cause)
        self._config = config
        self._clock = clock
        self._monotonic_ns = clock.monotonic_ns
        self._allow_list = config.allow_list
        self._known: AllowList = config.allow_list.current
        self._owners = _owners(self._known)
        self._context: zmq.Context[zmq.Socket[bytes]] | None = None
        self._sink: RequestSink | None = None
        self._zap: ZapHandler | None = None
        self._router: zmq.Socket[bytes] | None = None
        self._router_pump: Pump | None = None
        self._publisher: zmq.Socket[bytes] | None = None
        self._router_monitor: Monitor | None = None
        self._publisher_monitor: Monitor | None = None
        self._rebinding: asyncio.Task[None] | None = None
        self._dialer: Dialer | None = None
        self._poll: asyncio.TimerHandle | None = None
        self._retry: asyncio.TimerHandle | None = None
        self._skipping = False
        # Frames of the packet in hand, whose they are and where they came from.
        self._frames: deque[bytes | memoryview] = deque()
        self._frame_owner = config.node_id
        self._frame_route = b""
        self._replies: dict[bytes, Packet] = {}
        self._events = Packet()
        self._flush_due = False
        self._replies_dropped = 0
        self._turns_cut = 0
        self._refused: dict[str, int] = {}

    @property
    def cluster(self) -> str:
        return self._known.cluster

    async def open(self, sink: RequestSink) -> None:
        """See `Carrier.open`."""
        loop = asyncio.get_running_loop()
        _log.info(
            "bus starts node=%s incarnation=%d libzmq=%s requests=%s events=%s curve=on",
            self._config.node_id,
            self._config.incarnation,
            self._version,
            self._config.requests,
            self._config.events,
        )
        first, last = ephemeral_range()
        for port in (self._requests_at.port, self._events_at.port):
            if first <= port <= last:
                _log.warning("port %d is in the ephemeral range %d-%d: a client may come to hold it", port, first, last)
        self._sink = sink
        context = self._context = new_context()
        keys = self._config.keys
        try:
            # First of all, so that there is no moment in which libzmq would ask nobody.
            self._zap = ZapHandler(context, self._allow_list, self._look_at_keys, self._monotonic_ns, self._failed)
            self._router, self._router_monitor = await self._bound(zmq.ROUTER, self._config.requests)
            self._publisher, self._publisher_monitor = await self._bound(zmq.PUB, self._config.events)
        except BaseException:
            await self.close()
            raise
        self._router_pump = Pump(self._router, self._read_requests, self._monotonic_ns, self._failed)
        self._dialer = Dialer(
            context, keys, self._key_for, self._monotonic_ns, loop.call_soon, self._failed, self._count
        )
        self._poll = loop.call_later(ALLOW_LIST_POLL_NS / 1e9, self._poll_keys)

    def stop_receiving(self) -> None:
        """See `Carrier.stop_receiving`."""
        if self._router_pump is not None:
            self._turns_cut += self._router_pump.turns_cut
            self._router_pump.stop()
            self._router_pump = None

    async def close(self) -> None:
        """See `Carrier.close`."""
        self.stop_receiving()
        for timer in (self._poll, self._retry):
            if timer is not None:
                timer.cancel()
        self._poll = self._retry = None
        if self._rebinding is not None:
            self._rebinding.cancel()
            await asyncio.gather(self._rebinding, return_exceptions=True)
        for packet in self._replies.values():
            packet.busy = False
        self._flush()
        for wire in list(self._dialer.wires) if self._dialer is not None else []:
            wire.close(CLOSE_LINGER_MS)
        for monitor in (self._router_monitor, self._publisher_monitor):
            if monitor is not None:
                monitor.close()
        self._router_monitor = self._publisher_monitor = None
        for socket in (self._router, self._publisher):
            if socket is not None:
                socket.close(CLOSE_LINGER_MS)
        self._router = self._publisher = None
        if self._zap is not None:
            self._zap.close()
        context, self._context = self._context, None
        if context is not None:
            # It waits for what lingers, so not on the loop.
            await asyncio.get_running_loop().run_in_executor(None, context.term)

    def key_of(self, node_id: NodeId) -> str:
        """See `Carrier.key_of`."""
        return self._known.keys.get(node_id, "")

    def check_address(self, peer: PeerAddress) -> None:
        """See `Carrier.check_address`."""
        parse_address(peer.requests)
        parse_address(peer.events)

    def connect(self, peer: PeerAddress, sink: LinkSink) -> DealerWire:
        """See `Carrier.connect`."""
        assert self._dialer is not None, "connect before open"
        return DealerWire(self._dialer, peer, sink)

    def subscribe(self, peer: PeerAddress, sink: EventSink) -> SubWire:
        """See `Carrier.subscribe`."""
        assert self._dialer is not None, "subscribe before open"
        return SubWire(self._dialer, peer, sink)

    def reply(self, route: bytes, data: bytes) -> ReplyOutcome:
        """See `Carrier.reply`. The frame leaves at the end of this turn of the loop, with what else goes there."""
        if self._router is None:
            return ReplyOutcome.GONE
        packet = self._replies.get(route)
        if packet is None:
            packet = self._replies[route] = Packet()
        if packet.busy:
            return ReplyOutcome.BUSY
        if not packet.add(data):
            self._flush_route(route, packet)
            if packet.busy:
                return ReplyOutcome.BUSY
            packet.add(data)
        if not self._flush_due:
            self._flush_due = True
            asyncio.get_running_loop().call_soon(self._flush)
        return ReplyOutcome.SENT

    def publish(self, data: bytes) -> None:
        """See `Carrier.publish`."""
        if self._publisher is None:
            return
        if not self._events.add(data):
            self._flush_events()
            self._events.add(data)
        if not self._flush_due:
            self._flush_due = True
            asyncio.get_running_loop().call_soon(self._flush)

    def flush(self) -> None:
        """See `Carrier.flush`."""
        if self._dialer is not None:
            self._dialer.flush()
        if self._replies:
            self._flush_replies()

    def stats(self) -> CarrierStats:
        pump, zap, dialer = self._router_pump, self._zap, self._dialer
        cut = self._turns_cut + (pump.turns_cut if pump is not None else 0)
        return CarrierStats(
            turns_cut=cut + (dialer.turns_cut() if dialer is not None else 0),
            auth_admitted=zap.admitted if zap is not None else 0,
            auth_refused=zap.denied if zap is not None else 0,
            replies_dropped=self._replies_dropped,
            refused=dict(self._refused),
        )

    def _flush(self) -> None:
        self._flush_due = False
        # First whoever waits for an answer.
        self._flush_replies()
        self._flush_events()

    def _flush_replies(self) -> None:
        for route, packet in list(self._replies.items()):
            if not packet.busy:
                self._flush_route(route, packet)
            if not packet.busy:
                del self._replies[route]

    def _flush_events(self) -> None:
        if self._events and self._publisher is not None:
            self._publisher.send(self._events.join(), _NOBLOCK)
        self._events.clear()

    def _flush_route(self, route: bytes, packet: Packet) -> None:
        router = self._router
        if router is None or not packet:
            return
        try:
            router.send(route, _MORE_NOBLOCK)
        except zmq.Again:
            # The packet stays; a ROUTER says of no single peer that it takes messages again.
            packet.busy = True
            if self._retry is None:
                self._retry = asyncio.get_running_loop().call_later(REPLY_RETRY_NS / 1e9, self._retry_replies)
            return
        except zmq.ZMQError as error:
            if error.errno != zmq.EHOSTUNREACH:
                raise
            # The caller's connection broke, and it knows.
            self._replies_dropped += len(packet)
        else:
            router.send(packet.join(), _NOBLOCK)
            if self._router_pump is not None:
                self._router_pump.poke()
        packet.clear()

    async def _bound(self, kind: int, address: str) -> tuple[zmq.Socket[bytes], Monitor]:
        """A server socket, bound; our previous life may still be letting go of the port."""
        assert self._context is not None
        parsed = parse_address(address)
        socket = server_socket(self._context, kind, self._config.keys, self._known.cluster, parsed)
        monitor = Monitor(self._context, socket, self._server_event, self._monotonic_ns, self._failed)
        until_ns = self._monotonic_ns() + BIND_RETRY_NS
        while True:
            try:
                socket.bind(address)
            except zmq.ZMQError as error:
                if error.errno != zmq.EADDRINUSE or self._monotonic_ns() >= until_ns:
                    monitor.close()
                    socket.close(0)
                    raise BindFailed(address=address, cause=str(error)) from None
            else:
                return socket, monitor
            try:
                await asyncio.sleep(10 * MS / 1e9)
            except asyncio.CancelledError:
                monitor.close()
                socket.close(0)
                raise

    def _read_requests(self, limit: int) -> int:
        assert self._sink is not None
        frames, arrived = self._frames, self._sink.request_arrived
        for done in range(limit):
            if not frames and not self._read_packet():
                return done
            if frames:
                arrived(self._frame_owner, self._frame_route, frames.popleft())
        return limit

    def _read_packet(self) -> bool:
        """Take the next ZeroMQ message apart; False when there is none."""
        router = self._router
        assert router is not None
        try:
            if self._skipping:
                self._skipping = bool(router.recv(_NOBLOCK, copy=False).more)
                return True
            route = router.recv(_NOBLOCK)
            # Not copied, because only a frame of libzmq's knows the user id of its connection.
            frame = router.recv(_NOBLOCK, copy=False)
        except zmq.Again:
            return False
        if frame.more:
            self._skipping = True
            self._count("several_parts")
            return True
        owner = self._owners.get(str(frame.get("User-Id")))
        data = frame.bytes if len(frame) <= COPY_BYTES_MAX else frame.buffer
        try:
            frames = split(data)
        except PacketError as error:
            self._count("bad_packet")
            _log.debug("packet refused owner=%s cause=%s", owner, error)
            return True
        if owner is None:
            # Its key has left the list since the connection was made.
            assert self._sink is not None
            for stranger in frames:
                self._sink.stranger_arrived(route, stranger)
            return True
        self._frames.extend(frames)
        self._frame_owner, self._frame_route = owner, route
        return True

    def _server_event(self, event: ConnectionEvent, value: int) -> None:
        if event in (ConnectionEvent.AUTH_FAILED, ConnectionEvent.HANDSHAKE_FAILED):
            self._count("handshake")

    def _retry_replies(self) -> None:
        self._retry = None
        for packet in self._replies.values():
            packet.busy = False
        self._flush()
        if self._sink is not None:
            self._sink.replies_writable()

    def _poll_keys(self) -> None:
        if self._allow_list.refresh():
            self._look_at_keys()
        self._poll = asyncio.get_running_loop().call_later(ALLOW_LIST_POLL_NS / 1e9, self._poll_keys)

    def _look_at_keys(self) -> None:
        """Act on a list that changed: connections whose key is no longer the listed one end."""
        before, self._known = self._known, self._allow_list.current
        self._owners = _owners(self._known)
        if self._known.cluster != before.cluster:
            self._failed(KeyFileError(path="allow-list", cause="names another cluster now; restart to join it"))
            return
        for wire in list(self._dialer.wires) if self._dialer is not None else []:
            if wire.public_key and self._key_for(wire.node_id) not in ("", wire.public_key):
                wire.replace()
        assert self._sink is not None
        self._sink.keys_changed()
        if any(self._known.keys.get(node_id) != key for node_id, key in before.keys.items()):
            # libzmq cannot cut off one subscriber, so all have to authenticate again. They may see a gap.
            self._start_rebind()
        _log.info("allow-list changed nodes=%d", len(self._known.keys))

    def _start_rebind(self) -> None:
        if self._rebinding is None:
            self._rebinding = asyncio.get_running_loop().create_task(self._rebind_publisher())

    async def _rebind_publisher(self) -> None:
        self._flush_events()
        old, self._publisher = self._publisher, None
        if old is None:
            self._rebinding = None
            return
        if self._publisher_monitor is not None:
            self._publisher_monitor.close()
            self._publisher_monitor = None
        old.close(0)
        try:
            self._publisher, self._publisher_monitor = await self._bound(zmq.PUB, self._config.events)
        except BindFailed as error:
            self._failed(error)
        self._rebinding = None

    def _key_for(self, node_id: str) -> str:
        return self._known.keys.get(NodeId(node_id), "")

    def _count(self, cause: str) -> None:
        self._refused[cause] = self._refused.get(cause, 0) + 1

    def _failed(self, error: BaseException) -> None:
        assert self._sink is not None
        self._sink.carrier_failed(error)


def _owners(allow_list: AllowList) -> dict[str, NodeId]:
    """ZAP user id to node, for the keys that are in the list now."""
    return {user_id(node_id, key): node_id for node_id, key in allow_list.keys.items()}

"""Outgoing connections: a DEALER for requests, a SUB for events, one socket of each per peer.

A socket per peer keeps a silent one from holding up the rest, and makes it certain who sent what arrives: the owner of
the key that the socket pins.

Nothing may be queued for a connection that does not exist, or it would reach the peer's next life. libzmq's `IMMEDIATE`
sees to that, but with it libzmq throws away what had arrived and was not yet read when a connection breaks. So a DEALER
is read to its end and made anew when its connection breaks, and nothing is sent before the new one stands.
"""

from collections import deque
from collections.abc import Callable
from typing import Final

import zmq

from kv_bus.carrier import EventSink, LinkSink
from kv_bus.interface import PeerAddress
from kv_bus.keys import KeyPair
from kv_bus.limits import PACKET_MESSAGES_MAX, RECEIVE_HWM
from kv_bus.zmq_bus.monitor import ConnectionEvent, Monitor
from kv_bus.zmq_bus.packets import Packet, PacketError, split
from kv_bus.zmq_bus.pump import Pump
from kv_bus.zmq_bus.sockets import client_socket, parse_address

_HANDSHAKES_MAX: Final = 3
"""A peer that breaks off this many handshakes in a row does not have the key we expect; one may just be stopping."""

_NOBLOCK: Final = int(zmq.NOBLOCK)
"""As an int: operators of an `IntFlag` cost more than the call they are for."""

_NO_KEY: Final = "its key is not in the allow-list"


class Dialer:
    """What every outgoing connection of one node needs."""

    __slots__ = ("_cut", "call_soon", "context", "count", "due", "failed", "key_of", "keys", "monotonic_ns", "wires")

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        keys: KeyPair,
        key_of: Callable[[str], str],
        monotonic_ns: Callable[[], int],
        call_soon: Callable[[Callable[[], None]], object],
        failed: Callable[[BaseException], None],
        count: Callable[[str], None],
    ) -> None:
        self.context = context
        self.count = count
        self.keys = keys
        self.key_of = key_of
        self.monotonic_ns = monotonic_ns
        self.call_soon = call_soon
        self.failed = failed
        self.wires: dict[ClientWire, None] = {}
        self.due: dict[DealerWire, None] = {}
        """Those that have something to send at the end of this turn of the loop."""
        self._cut = 0

    def turns_cut(self) -> int:
        """Turns that ended by their budget, of all connections there are and were."""
        return self._cut + sum(wire.turns_cut for wire in self.wires)

    def flush(self) -> None:
        """Send what is due now."""
        due, self.due = self.due, {}
        for wire in due:
            wire.flush()

    def forget(self, wire: "ClientWire") -> None:
        """A connection is closed for good."""
        if self.wires.pop(wire, self) is None:
            self._cut += wire.turns_cut


class ClientWire:
    """One socket to one peer, made anew whenever it has to be connected from scratch."""

    kind = zmq.DEALER

    def __init__(
        self, dialer: Dialer, node_id: str, address: str, arrived: Callable[[bytes | memoryview], None]
    ) -> None:
        self._arrived = arrived
        self._dialer = dialer
        self.node_id = node_id
        self._address = address
        self._socket: zmq.Socket[bytes] | None = None
        self._pump: Pump | None = None
        self._monitor: Monitor | None = None
        self._handshakes_failed = 0
        self._closed = False
        self._frames: deque[bytes | memoryview] = deque()
        self.public_key = ""
        self._past_cuts = 0
        dialer.wires[self] = None
        self._open()

    @property
    def turns_cut(self) -> int:
        return self._past_cuts + (self._pump.turns_cut if self._pump is not None else 0)

    def reconnect(self) -> None:
        """Drop the connection and what it holds, and connect anew with the key the list has now."""
        self._tear_down()
        self._handshakes_failed = 0
        self._open()

    def replace(self) -> None:
        """The peer has another key now: what was on the old connection is lost, and said to be."""
        self._lost("its key changed")
        self.reconnect()

    def close(self, linger_ms: int = 0) -> None:
        self._closed = True
        self._tear_down(linger_ms)
        self._dialer.forget(self)

    def _open(self) -> None:
        dialer = self._dialer
        self.public_key = dialer.key_of(self.node_id)
        if not self.public_key:
            # Told from the loop, never from inside the call that wanted the connection.
            dialer.call_soon(self._no_key)
            return
        address = parse_address(self._address)
        socket = client_socket(dialer.context, self.kind, dialer.keys, self.public_key, address)
        self._socket = socket
        self._monitor = Monitor(dialer.context, socket, self._happened, dialer.monotonic_ns, dialer.failed)
        self._pump = Pump(socket, self._read_some, dialer.monotonic_ns, dialer.failed)
        socket.connect(self._address)

    def _tear_down(self, linger_ms: int = 0) -> None:
        if self._pump is not None:
            self._past_cuts += self._pump.turns_cut
            self._pump.stop()
            self._pump = None
        if self._monitor is not None:
            self._monitor.close()
            self._monitor = None
        self._frames.clear()
        if self._socket is not None:
            self._socket.close(linger_ms)
            self._socket = None

    def _no_key(self) -> None:
        if not self._closed and self._socket is None:
            self._refused(_NO_KEY)

    def _happened(self, event: ConnectionEvent, value: int) -> None:
        match event:
            case ConnectionEvent.CONNECTED:
                self._handshakes_failed = 0
                self._connected()
            case ConnectionEvent.DISCONNECTED:
                self._read_rest()
                self._broke()
            case ConnectionEvent.RETRIED:
                self._lost("no connection")
            case ConnectionEvent.AUTH_FAILED:
                # libzmq tries no more after this one.
                self._give_up(f"it does not admit our key (status {value})")
            case ConnectionEvent.HANDSHAKE_FAILED:
                self._handshakes_failed += 1
                if self._handshakes_failed >= _HANDSHAKES_MAX:
                    self._give_up("handshakes fail: it has another key than the allow-list says, or is no bus")

    def _give_up(self, cause: str) -> None:
        self._tear_down()
        self._refused(cause)

    def _read_rest(self) -> None:
        """What arrived before the connection closed still counts."""
        for _ in range(RECEIVE_HWM):
            if self._socket is None or not self._read_some(PACKET_MESSAGES_MAX):
                return

    def _read_some(self, limit: int) -> int:
        frames, arrived = self._frames, self._arrived
        for done in range(limit):
            if not frames and not self._read_packet():
                return done
            if frames:
                arrived(frames.popleft())
        return limit

    def _read_packet(self) -> bool:
        """Take the next ZeroMQ message apart; False when there is none."""
        if self._socket is None:
            return False
        try:
            packet = self._socket.recv(_NOBLOCK)
        except zmq.Again:
            return False
        try:
            self._frames.extend(split(packet))
        except PacketError:
            self._dialer.count("bad_packet")
        return True

    def _connected(self) -> None:
        raise NotImplementedError

    def _broke(self) -> None:
        raise NotImplementedError

    def _lost(self, cause: str) -> None:
        raise NotImplementedError

    def _refused(self, cause: str) -> None:
        raise NotImplementedError


class DealerWire(ClientWire):
    """Requests out, replies in."""

    kind = zmq.DEALER

    def __init__(self, dialer: Dialer, peer: PeerAddress, sink: LinkSink) -> None:
        self._sink = sink
        self._packet = Packet()
        self._flush_due = False
        super().__init__(dialer, peer.node_id, peer.requests, sink.reply_arrived)

    def send(self, data: bytes) -> bool:
        """See `Wire.send`. The frame leaves at the end of this turn of the loop, with what else was sent in it."""
        packet = self._packet
        if packet.busy or self._socket is None:
            return False
        if not packet.add(data):
            self.flush()
            if packet.busy:
                return False
            packet.add(data)
        self._dialer.due[self] = None
        if not self._flush_due:
            self._flush_due = True
            self._dialer.call_soon(self._flush_now)
        return True

    def close(self, linger_ms: int = 0) -> None:
        self.flush()
        super().close(linger_ms)
        self._dialer.due.pop(self, None)

    def _flush_now(self) -> None:
        self._flush_due = False
        self._dialer.due.pop(self, None)
        self.flush()

    def flush(self) -> None:
        """Send now what would leave at the end of this turn."""
        socket, pump, packet = self._socket, self._pump, self._packet
        if socket is None or pump is None or not packet:
            return
        try:
            socket.send(packet.join(), _NOBLOCK)
        except zmq.Again:
            # The packet stays; nothing overtakes it.
            packet.busy = True
            pump.writable = self._writable
        else:
            packet.clear()
            packet.busy = False
        pump.poke()

    def _writable(self) -> None:
        self.flush()
        if not self._packet.busy:
            self._sink.writable()

    def _tear_down(self, linger_ms: int = 0) -> None:
        # What was handed over and has not left goes down with the connection; the link is told that it broke.
        self._packet.clear()
        self._packet.busy = False
        super()._tear_down(linger_ms)

    def _connected(self) -> None:
        self._sink.connected()

    def _broke(self) -> None:
        if self._socket is not None:
            self._tear_down()
            self._open()
            self._lost("connection closed")

    def _lost(self, cause: str) -> None:
        self._sink.lost(cause)

    def _refused(self, cause: str) -> None:
        self._sink.refused(cause)


class SubWire(ClientWire):
    """Events in."""

    kind = zmq.SUB

    def __init__(self, dialer: Dialer, peer: PeerAddress, sink: EventSink) -> None:
        self._sink = sink
        super().__init__(dialer, peer.node_id, peer.events, sink.event_arrived)

    def _connected(self) -> None:
        """Nothing to do: what was missed shows in the numbers of the events."""

    def _broke(self) -> None:
        """As above; libzmq connects and subscribes again."""

    def _lost(self, cause: str) -> None:
        """As above."""

    def _refused(self, cause: str) -> None:
        self._sink.refused(cause)

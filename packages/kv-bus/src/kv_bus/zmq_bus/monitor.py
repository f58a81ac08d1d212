"""What libzmq says about the connections of one socket, as typed events.

Only a socket's monitor shows that a key was refused. Monitor endpoints get a name that is never used again: those
named after a descriptor collide when the descriptor is reused.
"""

import itertools
import struct
from collections.abc import Callable
from enum import Enum
from typing import Final

import zmq

from kv_bus.zmq_bus.pump import Pump

_NUMBERS: Final = itertools.count(1)
_EVENT: Final = struct.Struct("=hi")


class ConnectionEvent(Enum):
    """What happened to a connection."""

    CONNECTED = "connected"
    DISCONNECTED = "disconnected"
    RETRIED = "retried"
    AUTH_FAILED = "auth_failed"
    HANDSHAKE_FAILED = "handshake_failed"


_MEANING: Final = {
    int(zmq.EVENT_HANDSHAKE_SUCCEEDED): ConnectionEvent.CONNECTED,
    int(zmq.EVENT_DISCONNECTED): ConnectionEvent.DISCONNECTED,
    int(zmq.EVENT_CONNECT_RETRIED): ConnectionEvent.RETRIED,
    int(zmq.EVENT_HANDSHAKE_FAILED_AUTH): ConnectionEvent.AUTH_FAILED,
    int(zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL): ConnectionEvent.HANDSHAKE_FAILED,
    int(zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL): ConnectionEvent.HANDSHAKE_FAILED,
}


class Monitor:
    """Watches the connections of one socket.

    Args:
        watched: the socket; it must outlive the monitor.
        on_event: told what happened and libzmq's number for it (a ZAP status, an errno).
    """

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        watched: zmq.Socket[bytes],
        on_event: Callable[[ConnectionEvent, int], None],
        monotonic_ns: Callable[[], int],
        failed: Callable[[BaseException], None],
    ) -> None:
        self._watched = watched
        self._on_event = on_event
        name = f"inproc://kv-bus-monitor-{next(_NUMBERS)}"
        watched.monitor(name, sum(_MEANING))
        self._socket = context.socket(zmq.PAIR)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.connect(name)
        self._pump = Pump(self._socket, self._read_some, monotonic_ns, failed)

    def close(self) -> None:
        """Stop watching; before the watched socket is closed."""
        self._pump.stop()
        self._watched.disable_monitor()
        self._socket.close(0)

    def _read_some(self, limit: int) -> int:
        for done in range(limit):
            # What an event leads to may close us.
            if self._socket.closed or not self._read_one():
                return done
        return limit

    def _read_one(self) -> bool:
        try:
            frames = self._socket.recv_multipart(zmq.NOBLOCK)
        except zmq.Again:
            return False
        number, value = _EVENT.unpack(frames[0])
        meaning = _MEANING.get(number)
        if meaning is not None:
            self._on_event(meaning, value)
        return True

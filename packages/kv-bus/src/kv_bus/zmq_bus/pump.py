"""Reads one socket on the loop.

libzmq's descriptor is edge-triggered: it signals a change, not a state. So a turn reads until nothing is left or its
budget is used up; in the second case, and after every send (which may swallow the edge), another turn is scheduled.

U1: as long as messages wait, a turn is scheduled. U2: a turn is bounded in messages and time. U3: after `stop()`
nothing is read.
"""

import asyncio
from collections.abc import Callable
from typing import Final

import zmq

from kv_bus.limits import PUMP_TURN_MESSAGES, PUMP_TURN_NS

_STEP: Final = 8
"""Messages between two looks at the clock."""


class Pump:
    """Turns of one socket.

    Args:
        socket: whose descriptor is watched.
        read_some: reads and handles up to so many messages; how many it did, fewer when nothing is left.
        monotonic_ns: measures the turn.
        failed: told what escapes `read_some`: a bug; the pump stops.
    """

    __slots__ = (
        "_failed",
        "_fd",
        "_handle",
        "_loop",
        "_monotonic_ns",
        "_read_some",
        "_socket",
        "_stopped",
        "turns_cut",
        "writable",
    )

    def __init__(
        self,
        socket: zmq.Socket[bytes],
        read_some: Callable[[int], int],
        monotonic_ns: Callable[[], int],
        failed: Callable[[BaseException], None],
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._socket = socket
        self._fd = int(socket.FD)
        self._read_some = read_some
        self._monotonic_ns = monotonic_ns
        self._failed = failed
        self._handle: asyncio.Handle | None = None
        self._stopped = False
        self.turns_cut = 0
        # Set by whose send was refused: called once when the socket takes messages again.
        self.writable: Callable[[], None] | None = None
        self._loop.add_reader(self._fd, self._turn)
        self.poke()  # the edge may have come before we watched

    def poke(self) -> None:
        """Have a turn soon; to be called after every send."""
        if self._handle is None and not self._stopped:
            self._handle = self._loop.call_soon(self._turn)

    def stop(self) -> None:
        """Read nothing more (U3)."""
        if self._stopped:
            return
        self._stopped = True
        self.writable = None
        self._loop.remove_reader(self._fd)
        if self._handle is not None:
            self._handle.cancel()
            self._handle = None

    def _turn(self) -> None:
        if self._handle is not None:
            # Whichever of reader and call_soon comes first has the turn.
            self._handle.cancel()
            self._handle = None
        try:
            if self._read() and not self._stopped:
                self.turns_cut += 1
                self.poke()
            if self.writable is not None and int(self._socket.getsockopt(zmq.EVENTS)) & zmq.POLLOUT:
                callback, self.writable = self.writable, None
                callback()
        except Exception as error:  # a bug below the seam must end the bus loudly, not stop one reader silently
            self.stop()
            self._failed(error)

    def _read(self) -> bool:
        """Read one turn's worth; True when something may be left."""
        read_some = self._read_some
        until_ns = self._monotonic_ns() + PUMP_TURN_NS
        for _ in range(PUMP_TURN_MESSAGES // _STEP):
            if read_some(_STEP) < _STEP or self._stopped:
                return False
            if self._monotonic_ns() > until_ns:
                break
        return True

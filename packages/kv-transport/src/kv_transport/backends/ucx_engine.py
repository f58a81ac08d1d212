"""The thread that a UCX worker lives in: every call of UCX is made here.

As long as there is news, and a little longer, it polls: that is how a network card is heard at once, and how a peer
that sends need not wake us for each segment. Then it sleeps on the worker's event descriptor. Work is handed in by
`call` and `move`. What has happened is told by callbacks in this thread.
"""

import ctypes
import logging
import os
import select
import threading
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Final

from kv_transport import limits
from kv_transport.backends.ucp_api import Ucp, UcxStatusError
from kv_transport.backends.ucx_binding import UcxBinding, UcxDevices

_log = logging.getLogger(__name__)
TAG: Final = 0x6B76_7472_616E_7370
"""Of all our messages; who a message is for stands in its first bytes."""
MESSAGE_BYTES_MAX: Final = limits.CONTROL_FRAME_BYTES_MAX + 64
_POLLS: Final = 200
"""Turns without news before it sleeps, a fraction of a millisecond: a fabric has answered by then, and what a peer puts
here has come on."""
_DRAIN_TURNS: Final = 200
"""What is under way when it ends may take so many."""
_NAP_S: Final = 0.001
"""Sleep while operations are under way: some of them end without a word on the descriptor (closing, for one)."""
_SLEEP_S: Final = 1.0
"""A bound on sleeping, so that timers inside UCX (keep-alive) are served even if its descriptor missed one."""

Done = Callable[[str | None], None]


class _Operation:
    """Requests of which all must be over; `keep` is memory they use."""

    __slots__ = ("done", "error", "keep", "requests")

    def __init__(self, requests: list[int], done: Done, keep: object, error: str | None) -> None:
        self.requests = requests
        self.done = done
        self.keep = keep
        self.error = error


class UcxEngine:
    """See the module. `start` it, end it with `stop`."""

    def __init__(self, name: str, open_binding: Callable[[], UcxBinding]) -> None:
        self._open = open_binding
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._calls: deque[Callable[[], None]] = deque()
        self._moves: deque[Callable[[], None]] = deque()
        self._wanted = ctypes.c_int(0)
        """Others have handed something in."""
        self._operations: dict[_Operation, None] = {}
        self._arrivals: deque[_Arrival] = deque()
        self._on_message: Callable[[bytes], None] = lambda data: None
        self._stopping = False
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self.ucp: Ucp
        self.devices: UcxDevices = UcxDevices(())
        self.address = b""
        self.binding = ""

    def start(self, on_open: Callable[[BaseException | None], None], on_message: Callable[[bytes], None]) -> None:
        """Open UCX in the thread; both callbacks are called there, the first one once."""
        self._on_message = on_message
        self._on_open = on_open
        self._thread.start()

    def call(self, function: Callable[[], None]) -> None:
        """Run `function` in the thread soon, in order. From any thread; it must not raise. Dropped after `stop`."""
        self._calls.append(function)
        self._rouse()

    def move(self, function: Callable[[], None]) -> None:
        """The same for what may take as long as its bytes, as a put does that UCX copies: one a turn, in order.

        What ends is heard in between: the header of the first unit need not wait for the bytes of a whole window.
        """
        self._moves.append(function)
        self._rouse()

    def _rouse(self) -> None:
        if not self._wanted.value and self._wake >= 0:
            self._wanted.value = 1
            os.eventfd_write(self._wake, 1)

    def stop(self) -> None:
        """End the thread, the worker and the context; blocks until it is over. Idempotent.

        Raises:
            BaseException: what a call raised against its promise: a bug, never to be lost.
        """
        if self._thread.is_alive():
            self.call(self._stop)
            self._thread.join()
        if self._wake >= 0:
            wake, self._wake = self._wake, -1
            os.close(wake)
        if self._failure is not None:
            failure, self._failure = self._failure, None
            raise failure

    # In the thread.

    def watch(self, requests: list[int | None], done: Done, keep: object = None, error: str | None = None) -> None:
        """Call `done` when all are over, with the first error or None; at once when nothing is left to wait for."""
        under_way = [request for request in requests if request is not None]
        if under_way:
            self._operations[_Operation(under_way, done, keep, error)] = None
        else:
            done(error)

    def _stop(self) -> None:
        self._stopping = True

    def _run(self) -> None:
        try:
            binding = self._open()
            self.ucp = Ucp(binding.context_handle, binding.worker_handle)
            self.address, self.devices = self.ucp.address(), binding.devices
            self.binding = f"{binding.name} {binding.version}"
            efd = self.ucp.event_fd()
        except BaseException as error:
            self._on_open(error)
            return
        self._on_open(None)
        with select.epoll() as epoll:
            epoll.register(self._wake, select.EPOLLIN)
            epoll.register(efd, select.EPOLLIN)
            while not (self._stopping and not self._calls and not self._moves):
                try:
                    if self._turn() or self._stopping:
                        continue
                    if self.ucp.arm() and not self._calls and not self._moves:
                        self._sleep(epoll)
                except BaseException as failure:
                    _log.exception("ucx thread failed thread=%s", self._thread.name)
                    self._failure = self._failure or failure
            # Operations of connections are over by now; what is left are messages to peers that are gone.
            for operation in self._operations:
                for request in operation.requests:
                    self.ucp.cancel(request)
            self._drain()
        binding.close()

    def _sleep(self, epoll: select.epoll) -> None:
        for fd, _ in epoll.poll(_NAP_S if self._operations else _SLEEP_S):
            if fd == self._wake:
                # Here and only here, whatever `_wanted` says: a caller sets that first, so its work can be done and
                # forgotten before it writes. What nobody read would then wake us for ever.
                os.eventfd_read(fd)

    def _drain(self) -> None:
        for _ in range(_DRAIN_TURNS):
            if not self._operations:
                return
            self._turn()

    def _turn(self) -> bool:
        """Do what there is to do, and wait a little for more; whether anything was."""
        busy = False
        # Cleared before the queues are looked at: a call appended after this wakes us again.
        self._wanted.value = 0
        while self._calls:
            busy = True
            self._calls.popleft()()
        if self._moves:
            busy = True
            self._moves.popleft()()
        turns = 1 if self._moves or self._stopping else _POLLS
        if not self.ucp.poll(TAG, [operation.requests[-1] for operation in self._operations], self._wanted, turns):
            return busy
        while (found := self.ucp.probe(TAG)) is not None:
            self._receive(*found)
        for operation in list(self._operations):
            if self._over(operation):
                del self._operations[operation]
                operation.done(operation.error)
        return True

    def _over(self, operation: _Operation) -> bool:
        requests = operation.requests
        while requests:
            try:
                if not self.ucp.check(requests[-1]):
                    return False
            except UcxStatusError as error:
                operation.error = operation.error or str(error)
            requests.pop()
        return True

    def _receive(self, message: int, nbytes: int) -> None:
        # One that is too long is received into too little room: that ends it without taking its bytes.
        buffer = ctypes.create_string_buffer(min(nbytes, MESSAGE_BYTES_MAX) or 1)
        arrival = _Arrival(buffer, nbytes)
        self._arrivals.append(arrival)
        try:
            request = self.ucp.receive(message, buffer)
        except UcxStatusError as failed:
            self._received(arrival, str(failed))
        else:
            self.watch([request], partial(self._received, arrival))

    def _received(self, arrival: "_Arrival", error: str | None) -> None:
        """Messages are handed on in the order in which they came, though long ones take longer to receive."""
        arrival.over, arrival.error = True, error
        while self._arrivals and self._arrivals[0].over:
            first = self._arrivals.popleft()
            if first.error is None:
                self._on_message(first.buffer.raw[: first.nbytes])
            else:
                _log.warning("message dropped transport=ucx bytes=%d cause=%s", first.nbytes, first.error)


class _Arrival:
    """A message that is being received."""

    __slots__ = ("buffer", "error", "nbytes", "over")

    def __init__(self, buffer: "ctypes.Array[ctypes.c_char]", nbytes: int) -> None:
        self.buffer = buffer
        self.nbytes = nbytes
        self.over = False
        self.error: str | None = None

"""Threads that serve non-blocking sockets, so that bytes move while the event loop does other things.

Each thread has its own epoll. Everything about a socket happens in the one thread that it was given to; others hand
it calls (`call`). The kernel calls that move bytes release the interpreter lock.
"""

import logging
import os
import select
import threading
from collections import deque
from collections.abc import Callable
from typing import Protocol

from kv_transport.codec_choice import MovingMeter
from kv_transport.stream_io import DO_NOT_WAIT

_log = logging.getLogger(__name__)
_EVENTS_PER_TURN = 64


class Served(Protocol):
    """A socket in an IO thread."""

    def fileno(self) -> int: ...
    def on_events(self, events: int) -> None:
        """Readable or writable. Must not raise."""
        ...


class IoThread:
    """One thread. Make with `start`, end with `close`."""

    def __init__(self, name: str) -> None:
        self.moving = MovingMeter()
        """What its bytes cost it."""
        self._epoll = select.epoll()
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._epoll.register(self._wake, select.EPOLLIN)
        self._calls: deque[Callable[[], None]] = deque()
        self._awake = False
        self._served: dict[int, Served] = {}
        self._stopping = False
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def call(self, function: Callable[[], None]) -> None:
        """Run `function` in the thread soon, in order. From any thread; it must not raise."""
        self._calls.append(function)
        if not self._awake and not self._stopping:
            self._awake = True
            os.eventfd_write(self._wake, 1)

    def serve(self, served: Served, events: int) -> None:
        """In the thread: begin to watch."""
        self._served[served.fileno()] = served
        self._epoll.register(served.fileno(), events)

    def watch(self, served: Served, events: int) -> None:
        """In the thread: change what to watch for."""
        self._epoll.modify(served.fileno(), events)

    def drop(self, served: Served) -> None:
        """In the thread: stop watching, before the socket is closed."""
        if self._served.pop(served.fileno(), None) is not None:
            self._epoll.unregister(served.fileno())

    def others(self) -> int:
        """In the thread: what `stream_io` may wait on beside its own socket: readable when the thread has work.

        Not while calls wait: nothing would tell of them.
        """
        return DO_NOT_WAIT if self._calls else self._epoll.fileno()

    def close(self) -> None:
        """Run what was handed in, then end the thread. Idempotent.

        Raises:
            BaseException: what a call raised against its promise: a bug, never to be lost.
        """
        if not self._stopping:
            self.call(self._stop)
            self._thread.join()
            self._epoll.close()
            os.close(self._wake)
        if self._failure is not None:
            failure, self._failure = self._failure, None
            raise failure

    def _stop(self) -> None:
        self._stopping = True

    def _run(self) -> None:
        while not (self._stopping and not self._calls):
            try:
                self._turn()
            except BaseException as failure:
                _log.exception("io thread failed thread=%s", self._thread.name)
                self._failure = failure

    def _turn(self) -> None:
        for fd, events in self._epoll.poll(-1, _EVENTS_PER_TURN):
            if fd == self._wake:
                os.eventfd_read(self._wake)
                # Cleared before the queue is emptied, and before anybody waits: a call appended later wakes us again.
                self._awake = False
                continue
            served = self._served.get(fd)
            if served is not None:
                served.on_events(events)
        while self._calls:
            self._calls.popleft()()

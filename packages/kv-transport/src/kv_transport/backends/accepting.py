"""A listening socket, and a handshake for each connection that comes: a bounded number at once, none left at the end.

AC1: a connection belongs to its handshake from the first step of that on; until then it is closed here, whatever comes.
"""

import asyncio
import logging
import socket
from collections.abc import Callable, Coroutine
from functools import partial

from kv_transport import limits

_log = logging.getLogger(__name__)

Shake = Callable[[socket.socket], Coroutine[None, None, None]]
"""Proves whose a connection is, and keeps or closes it; it does not raise but for being cancelled."""


class Acceptor:
    """Takes over a listening, non-blocking socket; on the loop."""

    def __init__(self, listener: socket.socket, loop: asyncio.AbstractEventLoop, transport: str, shake: Shake) -> None:
        """`transport` is for the log."""
        self._listener = listener
        self._loop = loop
        self._transport = transport
        self._shake = shake
        self._unbegun: list[socket.socket] = []
        self._handshakes: dict[asyncio.Task[None], None] = {}
        self._closed = False
        loop.add_reader(listener.fileno(), self._accept)

    def stop_listening(self) -> None:
        """Idempotent."""
        if not self._closed:
            self._closed = True
            self._loop.remove_reader(self._listener.fileno())
            self._listener.close()

    async def close(self) -> None:
        """The same, and end the handshakes. Idempotent."""
        self.stop_listening()
        for task in list(self._handshakes):
            task.cancel()
        await asyncio.gather(*self._handshakes, return_exceptions=True)

    def _accept(self) -> None:
        while not self._closed:
            try:
                sock, _ = self._listener.accept()
            except (BlockingIOError, InterruptedError):
                return
            except OSError as error:
                _log.warning("accept failed transport=%s cause=%s", self._transport, error)
                return
            sock.setblocking(False)
            if len(self._handshakes) >= limits.PENDING_HANDSHAKES_MAX:
                sock.close()
                continue
            self._unbegun.append(sock)
            task = self._loop.create_task(self._begin(sock))
            self._handshakes[task] = None
            task.add_done_callback(partial(self._over, sock))

    async def _begin(self, sock: socket.socket) -> None:
        self._unbegun.remove(sock)
        await self._shake(sock)

    def _over(self, sock: socket.socket, task: asyncio.Task[None]) -> None:
        del self._handshakes[task]
        if sock in self._unbegun:
            self._unbegun.remove(sock)
            sock.close()  # the task was cancelled before its first step

"""A connection that comes just as an agent closes is closed, and so is one too many."""

import asyncio
import socket

import pytest

from kv_transport import limits
from kv_transport.backends.accepting import Acceptor
from tests.transport.helpers_transport import eventually


class Accepting:
    """An acceptor on loopback whose handshakes last until they are cancelled, and what became of their connections."""

    def __init__(self) -> None:
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.listener.setblocking(False)
        self.address = self.listener.getsockname()
        self.begun = self.ended = 0
        self.acceptor = Acceptor(self.listener, asyncio.get_running_loop(), "test", self.shake)

    async def shake(self, sock: socket.socket) -> None:
        self.begun += 1
        try:
            await asyncio.Event().wait()
        finally:
            sock.close()
            self.ended += 1

    def call(self) -> socket.socket:
        caller = socket.create_connection(self.address)
        caller.settimeout(10)
        return caller


async def is_closed(caller: socket.socket) -> bool:
    return await asyncio.to_thread(caller.recv, 1) == b""


async def test_a_connection_that_comes_as_all_ends_is_closed() -> None:
    """Its handshake is cancelled before its first step, which then closes nothing itself."""
    it = Accepting()
    with it.call() as caller:
        it.acceptor._accept()
        await it.acceptor.close()
        assert it.begun == 0 and await is_closed(caller)


async def test_handshakes_under_way_are_ended_and_nobody_is_listened_to_any_more() -> None:
    it = Accepting()
    with it.call() as caller:
        await eventually(lambda: it.begun == 1)
        it.acceptor.stop_listening()
        with pytest.raises(ConnectionRefusedError):
            it.call()
        await it.acceptor.close()
        await it.acceptor.close()
        assert it.begun == it.ended == 1 and await is_closed(caller)


async def test_one_too_many_is_closed_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "PENDING_HANDSHAKES_MAX", 2)
    it = Accepting()
    callers = [it.call() for _ in range(3)]
    it.acceptor._accept()
    assert await is_closed(callers[2])
    await it.acceptor.close()
    for caller in callers:
        assert await is_closed(caller)
        caller.close()

"""A connection that comes just as an agent closes is closed, over both transports that accept connections."""

import asyncio
import socket
from pathlib import Path

import pytest

from kv_transport.backends.shm import ShmBackend
from kv_transport.backends.tcp import TcpBackend
from kv_transport.config import TransportName
from tests.transport.helpers_transport import config, node


@pytest.mark.parametrize("scheme", ["tcp", "shm"])
async def test_a_connection_that_comes_as_the_agent_closes_is_closed(scheme: TransportName, tmp_path: Path) -> None:
    """Its handshake is cancelled before its first step, which then closes nothing itself."""
    async with node("decode", config(scheme, tmp_path)) as me:
        backend = next(backend for backend in me.agent._backends if backend.scheme == scheme)
        assert isinstance(backend, TcpBackend | ShmBackend)
        listener = backend._listener
        assert listener is not None
        with socket.socket(listener.family, listener.type) as caller:
            caller.connect(listener.getsockname())
            backend._accept()
            (task,) = backend._handshakes.values()
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            caller.settimeout(10)
            assert await asyncio.to_thread(caller.recv, 1) == b""

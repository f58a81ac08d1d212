"""A real etcd server of its own for a test, on ports that are free here, with its data in a folder that goes."""

import asyncio
import contextlib
import shutil
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
import pytest

from kv_services.launch import PortReservation
from kv_services.membership.etcd_client import EtcdClient, EtcdError

READY_S = 60.0
PROGRAM = shutil.which("etcd")

needs_etcd = pytest.mark.skipif(PROGRAM is None, reason="etcd is not installed (Debian: etcd-server)")


class Etcd:
    """One etcd server; `start` after `stop` goes on with the same data, unless `forget` came between."""

    def __init__(self, folder: Path, client_port: int, peer_port: int) -> None:
        self._folder = folder
        self.endpoint = f"http://127.0.0.1:{client_port}"
        self._peer = f"http://127.0.0.1:{peer_port}"
        self._process: asyncio.subprocess.Process | None = None

    async def start(self) -> None:
        assert PROGRAM is not None
        self._process = await asyncio.create_subprocess_exec(
            PROGRAM,
            *("--name", "one", "--data-dir", str(self._folder)),
            *("--listen-client-urls", self.endpoint, "--advertise-client-urls", self.endpoint),
            *("--listen-peer-urls", self._peer, "--initial-advertise-peer-urls", self._peer),
            *("--initial-cluster", f"one={self._peer}"),
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.DEVNULL,
        )
        end = asyncio.get_running_loop().time() + READY_S
        async with aiohttp.ClientSession() as http:
            while True:
                try:
                    await EtcdClient(http, self.endpoint).listing("/ready")
                    return
                except EtcdError as error:
                    assert self._process.returncode is None, self._process.returncode
                    assert asyncio.get_running_loop().time() < end, error
                    await asyncio.sleep(0.05)

    def signal(self, number: int) -> None:
        assert self._process is not None
        self._process.send_signal(number)

    async def stop(self) -> None:
        """Kill it, as a crash would."""
        if self._process is None:
            return
        with contextlib.suppress(ProcessLookupError):
            self._process.send_signal(signal.SIGKILL)
        await self._process.wait()
        self._process = None

    def forget(self) -> None:
        """Lose all data."""
        shutil.rmtree(self._folder)


@contextlib.asynccontextmanager
async def etcd_server(folder: Path) -> AsyncIterator[Etcd]:
    """A server that is gone, with its data, on the way out."""
    with PortReservation() as ports:
        etcd = Etcd(folder / "etcd", ports.take(), ports.take())
        try:
            await etcd.start()
            yield etcd
        finally:
            await etcd.stop()
            shutil.rmtree(folder / "etcd", ignore_errors=True)

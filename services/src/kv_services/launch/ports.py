"""Ports for a cluster on this machine: below the ephemeral range, found by binding, held until given back.

A port inside the ephemeral range may be taken by any outgoing connection between two starts of a process, and a
connection to a dead one may connect to itself. A port that was only looked at may be taken before it is used. So a
reservation binds each port without sharing, which fails if anybody has it, then allows sharing and never listens:
on Linux a process that sets SO_REUSEADDR, as ZeroMQ and asyncio do, can bind and listen beside it, while another
reservation cannot. The port stays ours while a process restarts.
"""

import ipaddress
import secrets
import socket
from pathlib import Path
from types import TracebackType
from typing import Final, Self

from kv_services.launch.errors import NoFreePortError

LOWEST_PORT: Final = 10_000
"""Below lie the well-known ports of other software."""

_EPHEMERAL: Final = Path("/proc/sys/net/ipv4/ip_local_port_range")
_EPHEMERAL_LOW_DEFAULT: Final = 32_768


def ephemeral_low() -> int:
    """The first port that the kernel gives to outgoing connections."""
    try:
        return int(_EPHEMERAL.read_text(encoding="ascii").split()[0])
    except (OSError, ValueError, IndexError):
        return _EPHEMERAL_LOW_DEFAULT


class PortReservation:
    """Ports of one host that no other reservation has, until `close`."""

    def __init__(self, host: str = "127.0.0.1") -> None:
        self.host = host
        self._family = socket.AF_INET6 if ipaddress.ip_address(host).version == 6 else socket.AF_INET
        self._held: dict[int, socket.socket] = {}

    def take(self) -> int:
        """Find, hold and return one free port.

        Raises:
            NoFreePortError: all are taken.
        """
        high = max(ephemeral_low(), LOWEST_PORT + 1)
        span = high - LOWEST_PORT
        start = secrets.randbelow(span)
        for offset in range(span):
            port = LOWEST_PORT + (start + offset) % span
            if port not in self._held and self._hold(port):
                return port
        raise NoFreePortError(host=self.host, low=LOWEST_PORT, high=high - 1)

    def _hold(self, port: int) -> bool:
        holder = socket.socket(self._family, socket.SOCK_STREAM)
        try:
            holder.bind((self.host, port))
            holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        except OSError:
            holder.close()
            return False
        self._held[port] = holder
        return True

    def close(self) -> None:
        """Give every port back."""
        for holder in self._held.values():
            holder.close()
        self._held.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

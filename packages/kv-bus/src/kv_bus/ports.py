"""Finds free ports for a cluster on one machine.

Taken below the ephemeral range: a port inside it can be given to any outgoing connection, and a client that keeps
connecting to a dead one may meet itself there and hold it for ever.
"""

import secrets
import socket
from pathlib import Path
from typing import Final

from kv_bus.errors import BindFailed

_RANGE_FILE: Final = Path("/proc/sys/net/ipv4/ip_local_port_range")
_FIRST: Final = 10_000
_TRIES: Final = 2_000


def ephemeral_range() -> tuple[int, int]:
    """First and last port that the system gives to outgoing connections."""
    try:
        first, last = _RANGE_FILE.read_text().split()
        return int(first), int(last)
    except (OSError, ValueError):
        return 32_768, 60_999  # not Linux, or no /proc: the usual range


def pick_ports(count: int, host: str = "127.0.0.1") -> list[int]:
    """`count` ports that were free a moment ago, below the ephemeral range, at random so that two clusters starting
    together rarely meet. Whoever binds them must still be ready to find one taken.

    Raises:
        BindFailed: there are not that many.
    """
    first, last = ephemeral_range()
    below = range(_FIRST, first) if first - _FIRST >= count else range(last + 1, 65_536)
    found: dict[int, None] = {}
    for _ in range(_TRIES):
        if len(found) == count:
            return list(found)
        port = below[secrets.randbelow(len(below))] if len(below) else 0
        if port and port not in found and _is_free(host, port):
            found[port] = None
    if len(found) == count:
        return list(found)
    raise BindFailed(address=host, cause=f"no {count} free ports outside the ephemeral range {first}-{last}")


def _is_free(host: str, port: int) -> bool:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        # Without SO_REUSEADDR: a port that somebody bound to keep it, and does not listen on yet, is not free.
        try:
            probe.bind((host, port))
        except OSError:
            return False
    return True

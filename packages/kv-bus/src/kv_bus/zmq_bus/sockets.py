"""Every socket the ZeroMQ carrier opens is made here, so that no option that safety rests on can be forgotten.

Z1: a server socket has CURVE, a ZAP domain, and refuses everybody when no ZAP handler is there (libzmq's default is to
    admit them).
Z2: a client socket pins the server's key.
Z3: every socket bounds the size of a message before it is read and the number of messages it holds.
Z4: addresses are explicit: an IP and a port, never every interface.
"""

import ipaddress
import re
from dataclasses import dataclass
from typing import Final

import zmq

from kv_bus.errors import BadAddress, LibzmqTooOld
from kv_bus.keys import KeyPair
from kv_bus.limits import (
    CONNECT_TIMEOUT_MS,
    EVENT_HWM,
    HANDSHAKE_TIMEOUT_MS,
    HEARTBEAT_INTERVAL_MS,
    HEARTBEAT_TIMEOUT_MS,
    MIN_LIBZMQ,
    PEERS_MAX,
    RECEIVE_HWM,
    RECONNECT_FIRST_MS,
    RECONNECT_MAX_MS,
    SOCKET_HWM,
)
from kv_bus.zmq_bus.packets import MAX_PACKET_BYTES

_ADDRESS: Final = re.compile(r"tcp://(\[[0-9A-Fa-f:.]+\]|[^\[\]:/]+):([0-9]{1,5})")

_CURVE_OVERHEAD: Final = 1024
"""What CURVE adds to a frame, generously."""


@dataclass(frozen=True, slots=True)
class TcpAddress:
    """An address as the bus accepts it."""

    host: ipaddress.IPv4Address | ipaddress.IPv6Address
    port: int


def require_libzmq(found: tuple[int, int, int] | None = None, has_curve: bool | None = None) -> str:
    """The version of libzmq in use.

    Raises:
        LibzmqTooOld: below `MIN_LIBZMQ`, or built without CURVE.
    """
    version = zmq.zmq_version_info() if found is None else found
    text, needed = ".".join(map(str, version)), ".".join(map(str, MIN_LIBZMQ))
    if version < MIN_LIBZMQ:
        raise LibzmqTooOld(found=text, needed=needed)
    if not (zmq.has("curve") if has_curve is None else has_curve):
        raise LibzmqTooOld(found=f"{text} without CURVE", needed=f"{needed} with CURVE")
    return text


def parse_address(text: str) -> TcpAddress:
    """Check an address.

    Raises:
        BadAddress: not `tcp://<IP>:<port>`, or not the address of one host.
    """
    match = _ADDRESS.fullmatch(text)
    if match is None:
        raise BadAddress(address=text, cause="expected tcp://<IP address>:<port>")
    try:
        host = ipaddress.ip_address(match[1].strip("[]"))
    except ValueError:
        raise BadAddress(address=text, cause=f"{match[1]} is not an IP address") from None
    port = int(match[2])
    if host.is_unspecified:
        raise BadAddress(address=text, cause="means every interface; name one")
    if host.is_multicast:
        raise BadAddress(address=text, cause="is a multicast group")
    if not 1 <= port <= 65535:
        raise BadAddress(address=text, cause="the port must be between 1 and 65535")
    return TcpAddress(host, port)


def new_context() -> zmq.Context[zmq.Socket[bytes]]:
    """A context of its own: its ZAP handler and inproc names are nobody else's."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    # Per peer a DEALER, a SUB and their monitors (two sockets each).
    context.set(zmq.MAX_SOCKETS, 6 * PEERS_MAX + 64)
    return context


def server_socket(
    context: zmq.Context[zmq.Socket[bytes]], kind: int, keys: KeyPair, domain: str, address: TcpAddress
) -> zmq.Socket[bytes]:
    """A ROUTER or PUB socket that admits only whom the ZAP handler admits (Z1), not yet bound."""
    socket = _bounded(context, kind, address)
    socket.curve_server = True
    socket.curve_secretkey = keys.secret_key.encode()
    socket.zap_domain = domain.encode()
    socket.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)
    if kind == zmq.ROUTER:
        socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
    return socket


def client_socket(
    context: zmq.Context[zmq.Socket[bytes]], kind: int, keys: KeyPair, server_key: str, address: TcpAddress
) -> zmq.Socket[bytes]:
    """A DEALER or SUB socket that talks only to the owner of `server_key` (Z2), not yet connected."""
    socket = _bounded(context, kind, address)
    socket.curve_serverkey = server_key.encode()
    socket.curve_publickey = keys.public_key.encode()
    socket.curve_secretkey = keys.secret_key.encode()
    socket.setsockopt(zmq.RECONNECT_IVL, RECONNECT_FIRST_MS)
    socket.setsockopt(zmq.RECONNECT_IVL_MAX, RECONNECT_MAX_MS)
    socket.setsockopt(zmq.CONNECT_TIMEOUT, CONNECT_TIMEOUT_MS)
    if kind == zmq.SUB:
        socket.setsockopt(zmq.SUBSCRIBE, b"")
    return socket


def _bounded(context: zmq.Context[zmq.Socket[bytes]], kind: int, address: TcpAddress) -> zmq.Socket[bytes]:
    socket = context.socket(kind)
    is_events = kind in (zmq.PUB, zmq.SUB)
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.MAXMSGSIZE, MAX_PACKET_BYTES + _CURVE_OVERHEAD)
    socket.setsockopt(zmq.SNDHWM, EVENT_HWM if is_events else SOCKET_HWM)
    socket.setsockopt(zmq.RCVHWM, EVENT_HWM if is_events else RECEIVE_HWM)
    socket.setsockopt(zmq.HANDSHAKE_IVL, HANDSHAKE_TIMEOUT_MS)
    socket.setsockopt(zmq.HEARTBEAT_IVL, HEARTBEAT_INTERVAL_MS)
    socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, HEARTBEAT_TIMEOUT_MS)
    if address.host.version == 6:
        socket.setsockopt(zmq.IPV6, 1)
    return socket

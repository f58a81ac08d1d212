"""How messages for one connection share a ZeroMQ message.

Handing a message to libzmq and waking its IO thread costs more than everything the bus does with it. So what is sent
to one connection within one turn of the loop travels together: `[length: u32 big-endian][envelope]`, once or more.

Q1: `split(join(messages)) == messages`. Q2: whatever bytes arrive, `split` returns messages that fill them exactly, or
raises. Q3: a packet is bounded in messages and bytes; one larger message travels alone.
"""

import struct
from typing import Final

from kv_bus.limits import PACKET_BYTES_MAX, PACKET_MESSAGES_MAX
from kv_core.errors import RemoteProtocolError
from kv_core.limits import MAX_MESSAGE_BYTES

_LENGTH: Final = struct.Struct(">I")

PREFIX_BYTES: Final = _LENGTH.size
MAX_PACKET_BYTES: Final = MAX_MESSAGE_BYTES + PREFIX_BYTES


class PacketError(RemoteProtocolError):
    """The lengths in a packet do not add up."""

    code = 2050
    template = "bad packet of {nbytes} bytes: {reason}"


class Packet:
    """Messages on their way to one connection."""

    __slots__ = ("_parts", "count", "nbytes")

    def __init__(self) -> None:
        self._parts: list[bytes] = []
        self.count = 0
        self.nbytes = 0

    def takes(self, data: bytes) -> bool:
        """Whether one more message of this size may join."""
        return self.count == 0 or (
            self.count < PACKET_MESSAGES_MAX and self.nbytes + len(data) + PREFIX_BYTES <= PACKET_BYTES_MAX
        )

    def add(self, data: bytes) -> None:
        self._parts.append(_LENGTH.pack(len(data)))
        self._parts.append(data)
        self.count += 1
        self.nbytes += len(data) + PREFIX_BYTES

    def join(self) -> bytes:
        """The packet as bytes."""
        return b"".join(self._parts)

    def clear(self) -> None:
        self._parts.clear()
        self.count = self.nbytes = 0


def split(packet: bytes | memoryview) -> list[bytes | memoryview]:
    """The messages in a packet, in order, as slices of it.

    Raises:
        PacketError: empty, too many messages, or lengths that do not fill the packet exactly.
    """
    messages: list[bytes | memoryview] = []
    at, end = 0, len(packet)
    while at < end:
        if end - at < PREFIX_BYTES:
            raise PacketError(nbytes=end, reason="ends inside a length")
        (nbytes,) = _LENGTH.unpack_from(packet, at)
        at += PREFIX_BYTES
        if not 0 < nbytes <= end - at:
            raise PacketError(nbytes=end, reason=f"a message of {nbytes} bytes where {end - at} are left")
        messages.append(packet[at : at + nbytes])
        at += nbytes
        if len(messages) > PACKET_MESSAGES_MAX:
            raise PacketError(nbytes=end, reason=f"more than {PACKET_MESSAGES_MAX} messages")
    if not messages:
        raise PacketError(nbytes=end, reason="it is empty")
    return messages

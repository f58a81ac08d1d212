"""How messages for one connection share a ZeroMQ message.

Handing a message to libzmq and waking its IO thread costs more than everything the bus does with it. So what is sent
to one connection within one turn of the loop travels together: `[count: u32][length: u32 each][envelopes]`, numbers
big-endian.

Q1: `split(join(messages)) == messages`. Q2: whatever bytes arrive, `split` returns messages that fill them exactly, or
raises. Q3: a packet is bounded in messages and bytes; one larger message travels alone.
"""

import struct
from typing import Final

from kv_bus.limits import PACKET_BYTES_MAX, PACKET_MESSAGES_MAX
from kv_core.errors import RemoteProtocolError
from kv_core.limits import MAX_MESSAGE_BYTES

_COUNT: Final = struct.Struct(">I")
_HEADS: Final = [struct.Struct(f">{count + 1}I") for count in range(PACKET_MESSAGES_MAX + 1)]
_LENGTHS: Final = [struct.Struct(f">{count}I") for count in range(PACKET_MESSAGES_MAX + 1)]

MAX_PACKET_BYTES: Final = MAX_MESSAGE_BYTES + _HEADS[1].size


class PacketError(RemoteProtocolError):
    """The lengths in a packet do not add up."""

    code = 2050
    template = "bad packet of {nbytes} bytes: {reason}"


class Packet:
    """Messages on their way to one connection. `busy` is for its owner: the connection takes nothing now."""

    __slots__ = ("_messages", "_nbytes", "busy")

    def __init__(self) -> None:
        self._messages: list[bytes] = []
        self._nbytes = 0
        self.busy = False

    def __len__(self) -> int:
        return len(self._messages)

    def add(self, data: bytes) -> bool:
        """Take one more message; False when it does not fit (Q3)."""
        messages = self._messages
        nbytes = self._nbytes + len(data)
        if messages and (nbytes > PACKET_BYTES_MAX or len(messages) >= PACKET_MESSAGES_MAX):
            return False
        messages.append(data)
        self._nbytes = nbytes
        return True

    def join(self) -> bytes:
        """The packet as bytes."""
        messages = self._messages
        return b"".join([_HEADS[len(messages)].pack(len(messages), *map(len, messages)), *messages])

    def clear(self) -> None:
        self._messages.clear()
        self._nbytes = 0


def split(packet: bytes | memoryview) -> list[bytes | memoryview]:
    """The messages in a packet, in order, as slices of it.

    Raises:
        PacketError: no or too many messages, an empty one, or lengths that do not fill the packet exactly.
    """
    end = len(packet)
    if end < _COUNT.size:
        raise PacketError(nbytes=end, reason="it has no count")
    (count,) = _COUNT.unpack_from(packet)
    if not 0 < count <= PACKET_MESSAGES_MAX:
        raise PacketError(nbytes=end, reason=f"{count} messages")
    at = _HEADS[count].size
    if end < at:
        raise PacketError(nbytes=end, reason="it ends among its lengths")
    lengths = _LENGTHS[count].unpack_from(packet, _COUNT.size)
    if sum(lengths) != end - at or not all(lengths):
        raise PacketError(nbytes=end, reason=f"lengths of {sum(lengths)} where {end - at} bytes are")
    messages: list[bytes | memoryview] = []
    for nbytes in lengths:
        messages.append(packet[at : at + nbytes])
        at += nbytes
    return messages

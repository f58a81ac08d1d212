"""What two agents say to each other beside the bytes themselves.

The side that connects posts operations and is called the initiator; the other one owns the memory. Frames are short
MessagePack arrays, decoded into these types and nothing else; whatever does not fit is refused with the connection.
A KV unit names its memory by ticket, layer and positions, so that the owner looks up the addresses itself and a
sender can never point elsewhere; plain regions are named by runs and checked against what the owner opened.
"""

import struct
from typing import Annotated, Final

import msgspec

from kv_core.errors import FieldValue, KVError, error_from_wire
from kv_transport import limits
from kv_transport.errors import FrameRefused, TransferTooLarge

Notification = Annotated[bytes, msgspec.Meta(max_length=limits.NOTIF_BYTES_MAX)]


class _Frame(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Base of all frames; `seq` ties an answer to its question within one connection."""


class UnitHead(_Frame, frozen=True):
    """Which memory of the owner a unit is about.

    Attributes:
        ticket: grant or lease; 0 for a region that is open to peers.
        region: the owner's region.
        layer, start, end: positions `[start, end)` of the ticket in that layer.
        runs: for an open region, flat pairs of offset and length, one per cell.
        checks: CRC-64 per cell, little endian, in order; empty when not known: of a read, or of a payload with its sums
            behind it.
        header: packed `KVCacheTransferHeader` (writes).
        notif: bytes for the owner's `notifs()` once the unit is verified.
        codec: how the payload is written, or is to be written; empty for raw bytes.
        put: with a notification: the number of the put, the same for all attempts at it, growing from 1.
    """

    ticket: int
    region: int
    layer: int = 0
    start: int = 0
    end: int = 0
    runs: list[int] = []
    checks: bytes = b""
    header: bytes = b""
    notif: Notification = b""
    codec: str = ""
    put: int = 0


class Open(_Frame, frozen=True, tag=1):
    """Initiator: I am going to write under this grant, and no other link of mine is still at it.

    Attributes:
        attempt: grows with each that I make, so that one which a broken link delivers late counts for nothing.
        fidelity: of what I have: what it went through before, or a cast between our element types.
    """

    seq: int
    ticket: int
    attempt: int
    fidelity: str = "exact"


class Opened(_Frame, frozen=True, tag=2):
    """Owner: go on; these positions are verified already (one little-endian bit field per layer)."""

    seq: int
    verified: list[bytes]


class Refused(_Frame, frozen=True, tag=3):
    """Owner: no, and why."""

    seq: int
    code: int
    fields: dict[str, str | int | float | bool | None]

    def error(self) -> KVError:
        """The error that the owner raised."""
        return error_from_wire(self.code, dict(self.fields.items()))


class Placed(_Frame, frozen=True, tag=4):
    """Initiator, shared memory: the bytes are in your memory already."""

    seq: int
    unit: UnitHead


class Write(_Frame, frozen=True, tag=5):
    """Initiator: the bytes follow."""

    seq: int
    unit: UnitHead


class Acked(_Frame, frozen=True, tag=6):
    """Owner: verified."""

    seq: int


class Read(_Frame, frozen=True, tag=7):
    """Initiator: send me these bytes."""

    seq: int
    unit: UnitHead


class Data(_Frame, frozen=True, tag=8):
    """Owner: the bytes follow; `checks` and `codec` as in `UnitHead`, and without checks `Sums` follows the bytes."""

    seq: int
    checks: bytes
    codec: str = ""


class Map(_Frame, frozen=True, tag=9):
    """Initiator: give me a descriptor of this region; `ticket` is a grant to write it, or 0 for reading."""

    seq: int
    region: int
    ticket: int
    write: bool


class Mapped(_Frame, frozen=True, tag=10):
    """Owner: here it is (beside this frame); `nbytes` of data, in an arena or as a plain buffer."""

    seq: int
    nbytes: int
    arena: bool


class Keyed(_Frame, frozen=True, tag=17):
    """Owner, ucx: the answer to Map; where the region begins in its memory, how long it is, and its remote key."""

    seq: int
    address: int
    nbytes: int
    key: bytes


class Note(_Frame, frozen=True, tag=11):
    """Initiator: bytes for your `notifs()`."""

    payload: Notification


class Fence(_Frame, frozen=True, tag=12):
    """Owner: this grant is over, stop writing under it."""

    ticket: int


class Fenced(_Frame, frozen=True, tag=13):
    """Initiator: nothing of mine writes under this grant any more."""

    ticket: int


class GiveUp(_Frame, frozen=True, tag=14):
    """Initiator: I will not complete this grant, and nothing of mine writes under it any more."""

    ticket: int
    code: int
    fields: dict[str, str | int | float | bool | None]


class Ping(_Frame, frozen=True, tag=15):
    """Either side, while there is work: I live."""


class Bye(_Frame, frozen=True, tag=16):
    """Either side: an orderly end; nothing of mine touches your memory any more."""


class Sums(_Frame, frozen=True, tag=18):
    """Either side, right behind the bytes of a `Write` or `Data` without checks: the CRC-64 of each cell.

    `header` is that of the write, now with its checksum; empty behind `Data`.
    """

    seq: int
    checks: bytes
    header: bytes = b""


class Answers(_Frame, frozen=True, tag=19):
    """Initiator, shared memory: beside this first frame is a page in which puts are answered; see `doorbell`."""


class PlacedMany(_Frame, frozen=True, tag=20):
    """Initiator, shared memory: several that were placed, told together."""

    units: list[Placed]


class AckedMany(_Frame, frozen=True, tag=21):
    """Owner: these of a `PlacedMany` are verified."""

    seqs: list[int]


FromInitiator = Open | Placed | Write | Read | Map | Note | Fenced | GiveUp | Ping | Bye | Sums | Answers | PlacedMany
FromOwner = Opened | Refused | Acked | Data | Mapped | Keyed | Fence | Ping | Bye | Sums | AckedMany
Frame = FromInitiator | FromOwner

_encoder: Final = msgspec.msgpack.Encoder()
_from_initiator: Final = msgspec.msgpack.Decoder(FromInitiator)
_from_owner: Final = msgspec.msgpack.Decoder(FromOwner)


def encode(frame: Frame) -> bytes:
    """Raises `TransferTooLarge` for a frame that the other side would refuse."""
    data = _encoder.encode(frame)
    if len(data) > limits.CONTROL_FRAME_BYTES_MAX:
        raise TransferTooLarge(what=type(frame).__name__, size=len(data), limit=limits.CONTROL_FRAME_BYTES_MAX)
    return data


def decode_from_initiator(data: bytes | memoryview, peer: str) -> FromInitiator:
    """Raises `FrameRefused` for anything that is not such a frame."""
    try:
        return _from_initiator.decode(data)
    except (msgspec.MsgspecError, RecursionError, ValueError) as error:
        raise FrameRefused(peer=peer, reason=str(error)) from error


def decode_from_owner(data: bytes | memoryview, peer: str) -> FromOwner:
    """Raises `FrameRefused` for anything that is not such a frame."""
    try:
        return _from_owner.decode(data)
    except (msgspec.MsgspecError, RecursionError, ValueError) as error:
        raise FrameRefused(peer=peer, reason=str(error)) from error


def refusal(seq: int, error: KVError) -> Refused:
    """The error in its wire form."""
    code, fields = error.to_wire()
    return Refused(seq=seq, code=code, fields=flat_fields(fields))


def flat_fields(fields: dict[str, FieldValue]) -> dict[str, str | int | float | bool | None]:
    """Fields as a frame can hold them: lists and bytes in words, long texts cut."""
    flat: dict[str, str | int | float | bool | None] = {}
    for name, value in fields.items():
        if isinstance(value, list | bytes) or (isinstance(value, int) and not -(1 << 63) <= value < 1 << 64):
            value = str(value)
        flat[name] = value[:512] if isinstance(value, str) else value
    return flat


def pack_checks(checks: list[int]) -> bytes:
    return struct.pack(f"<{len(checks)}Q", *checks)


def pack_masks(masks: list[int], num_positions: int) -> list[bytes]:
    """Bit fields of `num_positions` bits as bytes."""
    return [mask.to_bytes(-(-num_positions // 8), "little") for mask in masks]

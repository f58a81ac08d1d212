"""The manifest of a disk tier: what is written to say which block lies in which place.

A journal of frames. `[length u32][CRC-32C u32][payload]`, little-endian; the first payload is a `Header`, the others
are `Stored` or `Forgotten`. A later record of a place takes the place of an earlier one.

J1: reading ends at the first frame that is not whole and sound; what lies before it stands. So a process may be killed
    in the middle of any write, and loses at most what it had not acknowledged.
J2: a manifest of another version or shape of block is nobody's: the folder begins anew.
"""

import struct
from collections.abc import Iterator
from typing import Final

import msgspec

from kv_core.checksum import crc32c
from kv_prefix.tiers.blocks import TierBlock

VERSION: Final = 1
MAX_FRAME_BYTES: Final = 1 << 20
"""A record of the largest block: 4,096 tokens, 4,096 layers, extras."""

_PREFIX: Final = struct.Struct("<II")


class Header(msgspec.Struct, frozen=True, array_like=True, tag="tier"):
    """What the folder is for."""

    version: int
    hash_scheme: str
    block_nbytes: int
    num_layers: int
    shape: str


class Stored(msgspec.Struct, frozen=True, array_like=True, tag="+", gc=False):
    """The place holds this block."""

    place: int
    block: TierBlock


class Forgotten(msgspec.Struct, frozen=True, array_like=True, tag="-", gc=False):
    """The places hold nothing any more."""

    places: tuple[int, ...]


Record = Header | Stored | Forgotten

_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Record)


def frame(record: Record) -> bytes:
    """A record as it lies in the journal."""
    payload = _encoder.encode(record)
    return _PREFIX.pack(len(payload), crc32c(payload)) + payload


def read_frames(raw: bytes) -> Iterator[tuple[Record, int]]:
    """The sound records at the beginning of a journal, each with the position behind it."""
    at = 0
    while at + _PREFIX.size <= len(raw):
        length, check = _PREFIX.unpack_from(raw, at)
        end = at + _PREFIX.size + length
        if length > MAX_FRAME_BYTES or end > len(raw):
            return
        payload = raw[at + _PREFIX.size : end]
        if crc32c(payload) != check:
            return
        try:
            record = _decoder.decode(payload)
        except (msgspec.DecodeError, msgspec.ValidationError):
            return
        at = end
        yield record, at

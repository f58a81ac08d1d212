"""The wire form: ZeroMQ frames `[topic, sequence u64 big-endian, batch]`, the batch in MessagePack. Pure.

A batch is `[timestamp, [event, ...], data_parallel_rank]`, the rank may be absent. Events are maps with a "type".
Fields that are not known here are skipped; what lacks a needed field is refused.
"""

from typing import Annotated, Final

import msgspec
from msgspec import Meta

from kv_core import limits
from kv_prefix.events import Tier

MAX_BATCH_BYTES: Final = 16 << 20
END_OF_REPLAY: Final = -1

EngineHash = int | bytes
Token = Annotated[int, Meta(ge=0, le=limits.MAX_TOKEN_ID)]


class BadEventError(ValueError):
    """Frames that are no batch of events."""


class BlockStored(msgspec.Struct, frozen=True, tag="BlockStored", kw_only=True):
    """Consecutive blocks became readable. Hashes are the engine's own: the low 64 bits, or bytes."""

    block_hashes: list[EngineHash]
    parent_block_hash: EngineHash | None = None
    token_ids: list[Token]
    block_size: Annotated[int, Meta(ge=1, le=limits.MAX_BLOCK_SIZE)]
    lora_id: int | None = None
    medium: str | None = None
    lora_name: str | None = None
    extra_keys: list[object] | None = None


class BlockRemoved(msgspec.Struct, frozen=True, tag="BlockRemoved", kw_only=True):
    """Blocks are gone from one medium."""

    block_hashes: list[EngineHash]
    medium: str | None = None


class AllBlocksCleared(msgspec.Struct, frozen=True, tag="AllBlocksCleared", kw_only=True):
    """Nothing is held any more."""


KVEvent = BlockStored | BlockRemoved | AllBlocksCleared


class EventBatch(msgspec.Struct, frozen=True, array_like=True):
    """What one message carries."""

    ts: float
    events: list[KVEvent]
    data_parallel_rank: int | None = None


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(EventBatch)

_MEDIA: Final = {"gpu": Tier.DEVICE, "cpu": Tier.HOST, "disk": Tier.DISK, "ssd": Tier.DISK}
_NAMES: Final = {Tier.DEVICE: "gpu", Tier.HOST: "cpu", Tier.DISK: "disk", Tier.REMOTE: "remote"}


def tier_of(medium: str | None) -> Tier:
    """The tier that an engine's word for its medium means; without one it is the device."""
    return Tier.DEVICE if medium is None else _MEDIA.get(medium.lower(), Tier.REMOTE)


def medium_of(tier: Tier) -> str:
    """Our word for a tier in events."""
    return _NAMES[tier]


def encode_batch(batch: EventBatch) -> bytes:
    """A batch's payload."""
    return _encoder.encode(batch)


def decode_batch(payload: bytes) -> EventBatch:
    """Read a batch's payload.

    Raises:
        BadEventError: it is none, or too large.
    """
    if len(payload) > MAX_BATCH_BYTES:
        raise BadEventError(f"a batch of {len(payload)} bytes; at most {MAX_BATCH_BYTES}")
    try:
        return _decoder.decode(payload)
    except (msgspec.DecodeError, msgspec.ValidationError, RecursionError) as error:
        raise BadEventError(str(error)) from None


def sequence_bytes(sequence: int) -> bytes:
    """A sequence number as a frame."""
    return sequence.to_bytes(8, "big", signed=True)


def read_sequence(frame: bytes) -> int:
    """A sequence number from a frame; `END_OF_REPLAY` ends a replay.

    Raises:
        BadEventError: it is none.
    """
    if len(frame) != 8:
        raise BadEventError(f"a sequence number of {len(frame)} bytes")
    return int.from_bytes(frame, "big", signed=True)

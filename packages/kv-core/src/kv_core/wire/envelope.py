"""The envelope, and the two functions that turn them into bytes and back."""

from typing import TYPE_CHECKING, Annotated, Final, NoReturn

import msgpack
import msgspec
from msgpack.exceptions import UnpackException

from kv_core import limits
from kv_core.errors import KVError
from kv_core.ids import Incarnation, NodeId
from kv_core.wire.errors import (
    MalformedMessageError,
    MessageTooLargeError,
    SchemaMismatchError,
    UnencodableMessageError,
    UnknownMessageTypeError,
    UnregisteredMessageError,
    UnsupportedWireVersionError,
)
from kv_core.wire.schema import Entry, Message, Registry

if TYPE_CHECKING:
    Body = Message
else:
    Body = object  # msgspec then passes the body through; `decode` has already converted it

WIRE_VERSION: Final = 1
"""Raised when a change cannot be said within the rules of evolution. 1: the first."""

WIRE_REVISION: Final = 1
"""Raised when messages have grown within those rules: revisions of one wire version work together. 0: the first."""

_Uint = Annotated[int, msgspec.Meta(ge=0, le=limits.MAX_INT64)]


class Envelope(msgspec.Struct, frozen=True, array_like=True, gc=False, tag=WIRE_VERSION):
    """One message and what every receiver must know about it.

    Args:
        sender: the node that sent it; the bus checks that its key belongs to it.
        sender_incarnation: which life of the sender.
        target_incarnation: which life of the receiver is meant; 0 when it is not known or does not matter (events).
        wall_ns, logical: the sender's hybrid logical clock when it sent; the stamp's node is the sender.
        correlation_id: what a reply refers to; 0 when none is expected.
        deadline_ns: nanoseconds that were left when it was sent; 0 when there is no deadline.
        body: a registered message.
    """

    sender: Annotated[NodeId, msgspec.Meta(min_length=1, max_length=limits.MAX_NAME_BYTES)]
    sender_incarnation: Annotated[Incarnation, msgspec.Meta(ge=0, le=limits.MAX_INT64)]
    target_incarnation: Annotated[Incarnation, msgspec.Meta(ge=0, le=limits.MAX_INT64)]
    wall_ns: _Uint
    logical: Annotated[int, msgspec.Meta(ge=0, le=(1 << 32) - 1)]
    correlation_id: _Uint
    deadline_ns: _Uint
    body: Body


_ENVELOPE_LENGTH: Final = 1 + len(Envelope.__struct_fields__)
_BODY: Final = _ENVELOPE_LENGTH - 1
_SURE_NBYTES: Final = 2 * limits.MAX_MAP_LENGTH
"""No text, list or map in a message of this size can be beyond its limit."""

_BYTES: Final = (bytes,)
_ENCODE: Final = msgspec.msgpack.Encoder().encode


def encode(envelope: Envelope, registry: Registry, max_bytes: int = limits.MAX_MESSAGE_BYTES) -> bytes:
    """The envelope as bytes.

    Raises:
        UnregisteredMessageError: the body's class is not in the registry.
        UnencodableMessageError: a value that the wire cannot hold (NaN, an integer beyond 64 bits, a negative time, a
            text, list or map beyond its limit), or more than `max_bytes`. Bounds of single fields are the peer's to
            check.
    """
    body = envelope.body
    entry = registry.by_class.get(type(body))
    if entry is None:
        raise UnregisteredMessageError(name=type(body).__qualname__)
    if (
        envelope.deadline_ns < 0
        or envelope.correlation_id < 0
        or envelope.target_incarnation < 0
        or envelope.sender_incarnation < 0
        or envelope.wall_ns < 0
        or not 0 <= envelope.logical <= limits.MAX_UINT32
        or not envelope.sender
    ):
        raise UnencodableMessageError(type=entry.tag, reason="a negative number or no sender in its envelope")
    try:
        data: bytes = _ENCODE(envelope)
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        raise UnencodableMessageError(type=entry.tag, reason=str(error)) from None
    if len(data) > max_bytes:
        raise UnencodableMessageError(type=entry.tag, reason=f"{len(data)} bytes, the limit is {max_bytes}")
    if entry.walk or len(data) > _SURE_NBYTES:
        _check_own(data, entry)
    return data


def decode(
    data: bytes | bytearray | memoryview, registry: Registry, max_bytes: int = limits.MAX_MESSAGE_BYTES
) -> Envelope:
    """The envelope that `data` holds, fully checked.

    Raises:
        MessageTooLargeError: more than `max_bytes`.
        MalformedMessageError: not MessagePack, trailing bytes, beyond a limit, or not an envelope.
        UnsupportedWireVersionError: another wire version.
        UnknownMessageTypeError: a type that is not registered.
        SchemaMismatchError: fields of the body do not fit its type.
    """
    if len(data) > max_bytes:
        raise MessageTooLargeError(nbytes=len(data), limit=max_bytes)
    frame = _unpack(data)
    if type(frame) is not list or not frame or type(frame[0]) is not int:
        _malformed(data, "not an envelope")
    if frame[0] != WIRE_VERSION:
        raise UnsupportedWireVersionError(theirs=frame[0], ours=WIRE_VERSION)
    if len(frame) < _ENVELOPE_LENGTH:
        _malformed(data, f"an envelope of {len(frame)} parts, need {_ENVELOPE_LENGTH}")
    body = frame[_BODY]
    if type(body) is not list or not body or type(body[0]) not in (str, int):
        _malformed(data, "its body has no type")
    entry = registry.by_tag.get(body[0])
    if entry is None:
        raise UnknownMessageTypeError(type=_short(body[0]))
    frame[_BODY] = _convert(body, entry)
    try:
        return msgspec.convert(frame, Envelope)
    except msgspec.ValidationError as error:
        _malformed(data, str(error))


def _unpack(data: bytes | bytearray | memoryview) -> object:
    try:
        return msgpack.unpackb(
            data,
            raw=False,
            strict_map_key=True,
            object_pairs_hook=_unique_keys,
            ext_hook=_no_ext,
            max_str_len=limits.MAX_STRING_BYTES,
            max_bin_len=limits.MAX_BINARY_BYTES,
            max_array_len=limits.MAX_ARRAY_LENGTH,
            max_map_len=limits.MAX_MAP_LENGTH,
            max_ext_len=0,
        )
    except (UnpackException, ValueError, TypeError, OverflowError, RecursionError) as error:
        _malformed(data, f"{type(error).__name__}: {error}")


def _convert(body: list[object], entry: Entry) -> Message:
    if entry.walk:
        reason = _fault(body, 1)
        if reason:
            raise SchemaMismatchError(type=entry.tag, reason=reason)
    try:
        # msgspec takes text where bytes are due, and reads it as base64. Looking at the fields ourselves costs a tenth
        # of `builtin_types`, which is there for those that lie deeper.
        for at in entry.bytes_at:
            if at < len(body) and type(body[at]) is str:
                raise SchemaMismatchError(type=entry.tag, reason=f"Expected `bytes`, got `str` - at `$[{at}]`")
        if entry.deep_bytes:
            return msgspec.convert(body, entry.cls, builtin_types=_BYTES)
        return msgspec.convert(body, entry.cls)
    except (msgspec.ValidationError, KVError, RecursionError) as error:
        # KVError: a `__post_init__` of the message refused the values.
        raise SchemaMismatchError(type=entry.tag, reason=str(error)) from None


def _fault(value: object, depth: int) -> str:
    """Why a value may not cross, or nothing: NaN equals nothing, not even itself, and depth costs stack."""
    if type(value) is float:
        return "NaN" if value != value else ""
    if isinstance(value, list | dict):
        if depth > limits.MAX_NESTING_DEPTH:
            return f"nested deeper than {limits.MAX_NESTING_DEPTH}"
        for item in value.values() if isinstance(value, dict) else value:
            kind = type(item)
            if kind is float:
                if item != item:
                    return "NaN"
            elif kind is list or kind is dict:
                reason = _fault(item, depth + 1)
                if reason:
                    return reason
    return ""


def _check_own(data: bytes, entry: Entry) -> None:
    """Read what was written as a peer would, as far as limits, NaN and depth go."""
    try:
        frame = _unpack(data)
        reason = _fault(frame[_BODY], 1) if entry.walk and type(frame) is list else ""
    except MalformedMessageError as error:
        reason = str(error)
    if reason:
        raise UnencodableMessageError(type=entry.tag, reason=reason)


def _unique_keys(pairs: list[tuple[str, object]]) -> dict[str, object]:
    unique = dict(pairs)
    if len(unique) != len(pairs):
        raise ValueError("a map names a key twice")
    return unique


def _no_ext(code: int, data: bytes) -> NoReturn:
    raise ValueError(f"ext type {code}")


def _malformed(data: bytes | bytearray | memoryview, reason: str) -> NoReturn:
    raise MalformedMessageError(nbytes=len(data), reason=reason[:200])


def _short(tag: str | int) -> str | int:
    return tag[: limits.MAX_MESSAGE_TYPE_BYTES] if isinstance(tag, str) else tag

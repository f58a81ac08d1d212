"""What crosses between processes: one envelope, one typed body, MessagePack.

Define messages, register them once, encode and decode:

    class Ping(Message, frozen=True, tag="ping"):
        nonce: int

    REGISTRY = Registry(Ping)
    data = encode(Envelope(sender, incarnation, target, wall_ns, logical, 1, deadline_ns, Ping(7)), REGISTRY)
    match decode(data, REGISTRY).body:
        case Ping(nonce): ...

**Form.** An envelope is one MessagePack array: `[wire version, sender, sender incarnation, target incarnation,
stamp wall ns, stamp logical, correlation id, deadline ns, body]`; a body is an array `[type, field, ...]`. `decode`
unpacks with every size limit set, looks the type up, and converts into the registered struct. There is no other way
in: no ext types, no timestamps, no pickle.

**Evolution.** Fields are found by position: add new ones at the end and give them defaults, never remove, reorder or
retype one, never reuse a type's tag. A peer that is older skips what it does not know; a peer that is newer fills
what is missing with the defaults. What cannot be said within these rules needs a new type, or a new `WIRE_VERSION`.
Each release whose messages have grown raises `WIRE_REVISION`; that alone never keeps two processes apart.

W1: whatever bytes arrive, `decode` returns a valid envelope or raises a `WireError`. W2: `decode(encode(e)) == e`.
W3: what `encode` gives out is within every limit of the wire; only bounds of single fields can still be the peer's to
refuse.
"""

from kv_core.wire.envelope import WIRE_REVISION, WIRE_VERSION, Envelope, decode, encode
from kv_core.wire.errors import (
    InvalidSchemaError,
    MalformedMessageError,
    MessageTooLargeError,
    SchemaMismatchError,
    UnencodableMessageError,
    UnknownMessageTypeError,
    UnregisteredMessageError,
    UnsupportedWireVersionError,
    WireError,
)
from kv_core.wire.schema import ErrorReply, Message, MessageType, Registry

__all__ = [
    "WIRE_REVISION",
    "WIRE_VERSION",
    "Envelope",
    "ErrorReply",
    "InvalidSchemaError",
    "MalformedMessageError",
    "Message",
    "MessageTooLargeError",
    "MessageType",
    "Registry",
    "SchemaMismatchError",
    "UnencodableMessageError",
    "UnknownMessageTypeError",
    "UnregisteredMessageError",
    "UnsupportedWireVersionError",
    "WireError",
    "decode",
    "encode",
]

"""The bus's own messages: greeting, giving up a call, and the head of an event stream."""

from typing import Annotated, Final

import msgspec

from kv_core.limits import MAX_INT64, MAX_NAME_BYTES
from kv_core.wire import WIRE_VERSION, Message, Registry

_Name = Annotated[str, msgspec.Meta(min_length=1, max_length=MAX_NAME_BYTES)]
_Number = Annotated[int, msgspec.Meta(ge=0, le=MAX_INT64)]


class Hello(Message, frozen=True, tag="bus.hello"):
    """The first message on a link: who is there, in which life? The only one that may name no target incarnation."""

    cluster: _Name


class HelloReply(Message, frozen=True, tag="bus.hello_reply"):
    """The answer to `Hello`; its envelope names the incarnation."""

    cluster: _Name


class Cancel(Message, frozen=True, tag="bus.cancel"):
    """The caller of `call_id` waits no more."""

    call_id: _Number


class EventHead(Message, frozen=True, tag="bus.event_head"):
    """The highest sequence its sender has published; shows the loss of the last event."""

    last_sequence: _Number


CONTROL: Final = Registry(Hello, HelloReply, Cancel, EventHead)


class Header(msgspec.Struct, frozen=True, array_like=True, gc=False, tag=WIRE_VERSION):
    """The envelope without a look at its body: enough to answer a message that was refused for its body."""

    sender: _Name
    sender_incarnation: _Number
    target_incarnation: _Number
    wall_ns: _Number
    logical: _Number
    correlation_id: _Number
    deadline_ns: _Number
    body: msgspec.Raw


_DECODE_HEADER: Final = msgspec.msgpack.Decoder(Header).decode


def header_of(data: bytes | memoryview) -> Header | None:
    """The header of a message whose body was refused; None if the header is bad too.

    Only for bytes that already passed `decode`'s limits and failed on the body's type or schema.
    """
    try:
        return _DECODE_HEADER(data)
    except (msgspec.DecodeError, RecursionError):
        return None

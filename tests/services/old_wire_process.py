"""A process that says and understands no more than the first revision of the wire: `old_wire_process.py ROLE ARGS...`.

It is the product's own program, but what it sends has only the fields that revision had, and of what it receives it
sees only the types and fields that revision had, as an older build would.
"""

import sys
from collections.abc import Callable

import msgspec
from msgspec import inspect as mi

import kv_bus.calls
import kv_bus.events
import kv_bus.local
import kv_bus.serving
import kv_services.process
from kv_core import wire
from kv_core.wire import Envelope, Message, Registry, UnknownMessageTypeError
from kv_services import main
from tests.services.wire_surface import Surface, first, inner


def cut(value: object, info: mi.Type, old: Surface) -> object:
    """A decoded MessagePack value of type `info` without the fields that `old` has not."""
    if isinstance(info, mi.StructType) and isinstance(value, list):
        fields = list(info.fields)[: len(old.structs.get(info.cls.__name__, ()))]
        tagged = int(info.tag is not None)
        kept = [cut(item, field.type, old) for item, field in zip(value[tagged:], fields, strict=False)]
        return [*value[:tagged], *kept]
    if isinstance(info, mi.UnionType):
        structs = [part for part in info.types if isinstance(part, mi.StructType)]
        match structs:
            case [one] if isinstance(value, list):
                return cut(value, one, old)
            case _:
                tags = {part.tag: part for part in structs}
                named = tags.get(value[0]) if isinstance(value, list) and value and isinstance(value[0], str) else None
                return cut(value, named, old) if named else value
    if isinstance(value, list) and isinstance(info, mi.ListType | mi.VarTupleType):
        return [cut(item, info.item_type, old) for item in value]
    if isinstance(value, list) and isinstance(info, mi.TupleType):
        return [cut(item, part, old) for item, part in zip(value, info.item_types, strict=True)]
    if isinstance(value, dict) and inner(info):
        return {key: cut(item, inner(info)[0], old) for key, item in value.items()}
    return value


def known_to(revision: Surface, cls: type[Message]) -> None:
    """Return if that revision has this type of message.

    Raises:
        UnknownMessageTypeError: it has not.
    """
    tag = str(cls.__struct_config__.tag)
    if tag not in revision.types:
        raise UnknownMessageTypeError(type=tag)


def old_form(envelope: Envelope, old: Surface) -> Envelope:
    """The envelope as that revision would read it.

    Raises:
        UnknownMessageTypeError: that revision has no such type.
    """
    cls = type(envelope.body)
    known_to(old, cls)
    body = cut(msgspec.msgpack.decode(msgspec.msgpack.encode(envelope.body)), mi.type_info(cls), old)
    read: Message = msgspec.msgpack.decode(msgspec.msgpack.encode(body), type=cls)
    return msgspec.structs.replace(envelope, body=read)


def speak(revision: Surface) -> None:
    """Have this process's bus speak and understand that revision only."""

    def decode(data: bytes, registry: Registry) -> Envelope:
        return old_form(wire.decode(data, registry), revision)

    def encode(envelope: Envelope, registry: Registry) -> bytes:
        frame = msgspec.msgpack.decode(wire.encode(envelope, registry))
        frame[-1] = cut(frame[-1], mi.type_info(type(envelope.body)), revision)
        return msgspec.msgpack.encode(frame)

    vars(kv_bus.local)["encode"] = encode
    for module in (kv_bus.calls, kv_bus.events, kv_bus.serving):
        vars(module)["decode"] = decode
    vars(kv_services.process)["WIRE_REVISION"] = 0


if __name__ == "__main__":
    speak(first())
    programs: dict[str, Callable[[list[str]], None]] = {"gateway": main.gateway, "node": main.node}
    programs[sys.argv[1]](sys.argv[2:])

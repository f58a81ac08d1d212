"""What crosses between processes, as data: every message type and struct with its fields in their places.

`wire_revision_0.json` is the surface of the first revision, kept so that a later one can be held against it, and so
that a process can be made to speak and understand no more than that (`old_wire_process`). Written by

    python -m tests.services.wire_surface > tests/services/wire_revision_0.json
"""

import json
import sys
from pathlib import Path

import msgspec
from msgspec import inspect as mi

from kv_bus.control import CONTROL
from kv_consistency.messages import MESSAGES
from kv_core.wire import WIRE_VERSION, Registry
from kv_services.messages import ROLE_MESSAGES
from kv_services.sharded.messages import SHARD_MESSAGES

Field = tuple[str, str, bool]
"""Name, type, and whether it may be missing."""

FIRST = Path(__file__).with_name("wire_revision_0.json")


class Surface(msgspec.Struct, frozen=True):
    """`types` are the message types by tag, `structs` what lies in their fields, both by position."""

    version: int
    types: dict[str, str]
    structs: dict[str, list[Field]]


def registry() -> Registry:
    """Every type that a process of the cluster registers."""
    return Registry(*ROLE_MESSAGES, *SHARD_MESSAGES, *MESSAGES).include(CONTROL)


def surface(types: Registry) -> Surface:
    """The surface of what is registered."""
    structs: dict[str, list[Field]] = {}
    names = {str(entry.tag): _struct(entry.cls, structs) for entry in types}
    return Surface(WIRE_VERSION, dict(sorted(names.items())), dict(sorted(structs.items())))


def first() -> Surface:
    """The surface of revision 0."""
    return msgspec.json.decode(FIRST.read_bytes(), type=Surface)


def not_growth(old: Surface, new: Surface) -> list[str]:
    """What `new` changed of `old` that the rules of evolution do not allow."""
    faults = [
        f"type {tag!r} is {new.types.get(tag, 'gone')}" for tag, name in old.types.items() if new.types.get(tag) != name
    ]
    for struct, fields in old.structs.items():
        now = new.structs.get(struct, [])
        faults += [
            f"{struct}[{at}] was {field}, is {now[at : at + 1]}"
            for at, field in enumerate(fields)
            if now[at : at + 1] != [field]
        ]
        faults += [
            f"{struct}.{name} is new and has no default" for name, _, default in now[len(fields) :] if not default
        ]
    return faults


def inner(info: mi.Type) -> list[mi.Type]:
    """The types that a type is made of."""
    match info:
        case mi.ListType() | mi.VarTupleType():
            return [info.item_type]
        case mi.TupleType():
            return list(info.item_types)
        case mi.UnionType():
            return list(info.types)
        case mi.DictType():
            return [info.value_type]
        case _:
            return []


def _struct(cls: type[msgspec.Struct], structs: dict[str, list[Field]]) -> str:
    if cls.__name__ not in structs:
        fields: list[Field] = []
        structs[cls.__name__] = fields
        info = mi.type_info(cls)
        assert isinstance(info, mi.StructType)
        fields.extend((field.name, _name(field.type, structs), not field.required) for field in info.fields)
    return cls.__name__


def _name(info: mi.Type, structs: dict[str, list[Field]]) -> str:
    if isinstance(info, mi.StructType):
        return _struct(info.cls, structs)
    kind = type(info).__name__.removesuffix("Type").lower()
    if isinstance(info, mi.EnumType):
        return f"enum of {', '.join(repr(member.value) for member in info.cls)}"
    if isinstance(info, mi.LiteralType):
        return f"literal of {', '.join(map(repr, info.values))}"
    parts = sorted(_name(part, structs) for part in inner(info))
    return f"{kind} of {', '.join(parts)}" if parts else kind


if __name__ == "__main__":
    now = surface(registry())
    rows = [f"{json.dumps(name)}: {json.dumps(fields)}" for name, fields in now.structs.items()]
    types = json.dumps(now.types)
    sys.stdout.write(f'{{"version": {now.version}, "types": {types},\n"structs": {{\n' + ",\n".join(rows) + "\n}}\n")

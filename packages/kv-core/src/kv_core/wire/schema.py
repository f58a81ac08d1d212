"""Which message types a process understands, and what a message class may contain.

A registry is closed: a type is known or refused. At registration each class is inspected once, so that decoding pays
for a check only where the schema needs it: `walk` where a value could be NaN or nested without bound, `bytes_at` and
`deep_bytes` where msgspec would otherwise take text for base64.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import TypeVar

import msgspec
from msgspec import inspect as mi

from kv_core import limits
from kv_core.errors import KVError, error_from_wire
from kv_core.wire.errors import InvalidSchemaError

MessageType = str | int


class Message(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Base of every message; a subclass gives its wire type as `tag`:
    `class Ping(Message, frozen=True, tag="ping")` (`frozen=True` is inherited, but mypy wants to see it).

    Fields may be `int float bool str bytes None`, lists, tuples, `dict[str, ...]`, enums, literals, optional and other
    messages (structs). Limits go into `Annotated[..., msgspec.Meta(...)]` or `__post_init__`, both hold on decoding.
    Messages are not tracked by the garbage collector: never put one into a cycle.
    """


class ErrorReply(Message, frozen=True, tag="error"):
    """The answer to a request that failed: an error as code and named fields. Every registry understands it."""

    error_code: int
    error_fields: dict[str, object]

    @classmethod
    def of(cls, error: KVError) -> "ErrorReply":
        """The reply that reports `error`."""
        code, fields = error.to_wire()
        return cls(code, dict(fields))

    def to_error(self) -> KVError:
        """The error that the peer reported; a code this process does not know gives `UnknownRemoteError`."""
        return error_from_wire(self.error_code, self.error_fields)  # type: ignore[arg-type]  # decoding saw each value


@dataclass(frozen=True, slots=True)
class Entry:
    """What decoding needs to know about one type."""

    cls: type[Message]
    tag: MessageType
    bytes_at: tuple[int, ...]
    """Positions in the body of the fields that are bytes themselves."""
    deep_bytes: bool
    """Bytes also lie deeper, in lists, maps or structs."""
    walk: bool
    """Values need a look for NaN and depth."""


_MessageT = TypeVar("_MessageT", bound=type[Message])


class Registry:
    """The message types of one process, and `ErrorReply`; fill it at import, before the first message."""

    __slots__ = ("by_class", "by_tag")

    def __init__(self, *classes: type[Message]) -> None:
        self.by_tag: dict[MessageType, Entry] = {}
        self.by_class: dict[type, Entry] = {}
        every: tuple[type[Message], ...] = (ErrorReply, *classes)
        for cls in every:
            self.register(cls)

    def register(self, cls: _MessageT) -> _MessageT:
        """Add a message class; returns it, so it also serves as a decorator.

        Raises:
            InvalidSchemaError: no tag, a tag that another class has, or a field type that the wire cannot hold.
        """
        entry = _inspect(cls)
        owner = self.by_tag.setdefault(entry.tag, entry)
        if owner.cls is not cls:
            raise InvalidSchemaError(name=cls.__qualname__, reason=f"{owner.cls.__qualname__} has tag {entry.tag!r}")
        self.by_class[cls] = entry
        return cls

    def include(self, other: "Registry") -> "Registry":
        """Add all types of `other`; returns self."""
        for entry in other:
            self.register(entry.cls)
        return self

    def __iter__(self) -> Iterator[Entry]:
        return iter(tuple(self.by_tag.values()))

    def __len__(self) -> int:
        return len(self.by_tag)


@cache
def _inspect(cls: type[Message]) -> Entry:
    """Check a message class and note which checks its decoding needs.

    Raises:
        InvalidSchemaError: see `Registry.register`.
    """
    if not issubclass(cls, Message):
        raise InvalidSchemaError(name=repr(cls), reason="it is not a subclass of Message")
    name, config = cls.__qualname__, cls.__struct_config__
    tag = config.tag
    if tag is None:
        raise InvalidSchemaError(name=name, reason='it has no tag; write class Name(Message, frozen=True, tag="name")')
    if isinstance(tag, str) and not 1 <= len(tag.encode()) <= limits.MAX_MESSAGE_TYPE_BYTES:
        raise InvalidSchemaError(name=name, reason=f"its tag must have 1 to {limits.MAX_MESSAGE_TYPE_BYTES} bytes")
    if not config.array_like or not config.frozen:
        raise InvalidSchemaError(name=name, reason="messages are frozen and array_like")
    try:
        root = mi.type_info(cls)
    except (TypeError, NameError) as error:
        raise InvalidSchemaError(name=name, reason=str(error)) from None
    findings = _Visit(name, allow_any=cls is ErrorReply)
    findings.visit(root, ())
    return Entry(cls, tag, tuple(findings.bytes_at), findings.deep_bytes, findings.walk)


class _Visit:
    """One walk over a message class."""

    def __init__(self, name: str, allow_any: bool) -> None:
        self._name = name
        self._allow_any = allow_any
        self._done: set[type] = set()
        self.bytes_at: list[int] = []
        self.deep_bytes = False
        self.walk = False

    def visit(self, info: mi.Type, above: tuple[type, ...]) -> None:
        """Note what `info` needs; `above` are the structs it lies in, to find recursion."""
        match info:
            case mi.BoolType() | mi.IntType() | mi.StrType() | mi.NoneType() | mi.EnumType() | mi.LiteralType():
                pass
            case mi.FloatType():
                self.walk = True
            case mi.BytesType():
                self.deep_bytes = True
            case mi.ListType() | mi.VarTupleType():
                self.visit(info.item_type, above)
            case mi.TupleType():
                for item in info.item_types:
                    self.visit(item, above)
            case mi.UnionType():
                for member in info.types:
                    self.visit(member, above)
            case mi.DictType() if isinstance(info.key_type, mi.StrType):
                self.visit(info.value_type, above)
            case mi.StructType():
                self._struct(info, above)
            case mi.CustomType() if self._allow_any and info.cls is object:
                self.walk = True
            case _:
                kind = type(info).__name__.removesuffix("Type")
                hint = {"Set": "; its order would vary", "Dict": " unless its keys are str"}.get(kind, "")
                raise InvalidSchemaError(name=self._name, reason=f"the wire holds no field of type {kind}{hint}")

    def _struct(self, info: mi.StructType, above: tuple[type, ...]) -> None:
        if info.cls in above:
            self.walk = True  # recursive: only the walk bounds its depth
        if info.cls in self._done:
            return
        self._done.add(info.cls)
        for at, field in enumerate(info.fields, start=1):
            members = field.type.types if isinstance(field.type, mi.UnionType) else (field.type,)
            for member in members:
                if isinstance(member, mi.BytesType) and not above:
                    self.bytes_at.append(at)
                else:
                    self.visit(member, (*above, info.cls))

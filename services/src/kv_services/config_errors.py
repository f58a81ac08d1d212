"""What a wrong cluster file is told: the path of the field and what was expected there.

msgspec says where a value does not fit but seldom what would have. `explain` finds the field's type by that path and
says it: the allowed values of a choice, the bounds of a number, the known names where an unknown one was written.
"""

import difflib
import re
from typing import Final

import msgspec
from msgspec import inspect as mi

from kv_core.errors import KVError

_AT: Final = re.compile(r"^(?P<text>.*?)(?: - at `(?P<path>.*)`)?$", re.DOTALL)
_SECRET: Final = re.compile(r"\.(api_keys|operator_keys|salt)\b")
_STEP: Final = re.compile(r"\.([A-Za-z_]\w*)|\[(\d+|\.\.\.)\]")


class ConfigError(KVError):
    """A cluster file that cannot be used. Fields: `file`, `path` (as `$.node[2].bus_port`), `problem`."""

    code = 7100
    template = "{file}: {path}: {problem}"


def explain(message: str, table: object, root: type[msgspec.Struct]) -> tuple[str, str]:
    """The path and the problem that a `msgspec.ValidationError` tells of.

    Args:
        message: the error's text.
        table: what was being converted, to quote the wrong value.
        root: the struct it was being converted to.
    """
    match = _AT.match(message)
    text, path = (match["text"], match["path"] or "$") if match else (message, "$")
    expected_type, value = _resolve(path, table, root)
    if unknown := re.search(r"unknown field `([^`]*)`", text):
        name = unknown.group(1)
        known = [field.encode_name for field in _struct_fields(expected_type)]
        near = difflib.get_close_matches(name, known, n=1)
        hint = f"did you mean {near[0]}? " if near else ""
        return f"{path}.{name}", f"unknown field; {hint}expected one of {', '.join(known)}"
    if missing := re.search(r"missing required field `([^`]*)`", text):
        field = next((f for f in _struct_fields(expected_type) if f.encode_name == missing.group(1)), None)
        wanted = describe(field.type) if field else "a value"
        return f"{path}.{missing.group(1)}", f"missing; expected {wanted}"
    got = "" if _SECRET.search(path) else f", got {_quote(value)}"
    return path, f"expected {describe(expected_type)}{got}"


def describe(kind: mi.Type) -> str:
    """What may be written where that type is expected, for people."""
    match kind:
        case mi.Metadata(type=inner):
            return describe(inner)
        case mi.UnionType(types=types):
            return " or ".join(describe(one) for one in types if not isinstance(one, mi.NoneType))
        case mi.LiteralType(values=values):
            return "one of " + ", ".join(map(str, values))
        case mi.EnumType(cls=cls):
            return "one of " + ", ".join(str(member.value) for member in cls)
        case mi.BoolType():
            return "true or false"
        case mi.IntType() | mi.FloatType():
            return _number(kind)
        case mi.StrType(min_length=low, max_length=high, pattern=pattern):
            return _text(low, high, pattern)
        case mi.ListType(item_type=item, min_length=low):
            return f"a list{f' of {low} or more' if low else ''}, each {describe(item)}"
        case mi.StructType():
            return "a table"
        case _:  # the cluster file has no other type
            return type(kind).__name__


def _number(kind: mi.IntType | mi.FloatType) -> str:
    word = "a whole number" if isinstance(kind, mi.IntType) else "a number"
    low = f"from {kind.ge:.0f}" if kind.ge is not None else f"above {kind.gt:.0f}" if kind.gt is not None else ""
    high = f"to {kind.le:.0f}" if kind.le is not None else f"below {kind.lt:.0f}" if kind.lt is not None else ""
    return " ".join(filter(None, (word, low, high)))


def _text(low: int | None, high: int | None, pattern: str | None) -> str:
    if pattern is not None and "KiB" in pattern:
        return 'a size such as "512 MiB" (B, KiB, MiB, GiB, TiB)'
    if pattern is not None:
        return "a name of a-z, 0-9, '.', '_' and '-' that starts with a letter or digit, at most 63 characters"
    bounds = [f"at least {low}" if low else "", f"at most {high}" if high else ""]
    limits = " and ".join(filter(None, bounds))
    return f"text of {limits} characters" if limits else "text"


def _resolve(path: str, table: object, root: type[msgspec.Struct]) -> tuple[mi.Type, object]:
    kind: mi.Type = mi.type_info(root)
    value = table
    for step in _STEP.finditer(path):
        name, index = step.groups()
        kind = _bare(kind)
        if name is not None:
            field = next((f for f in _struct_fields(kind) if f.encode_name == name), None)
            if field is None:
                break
            kind = field.type
            value = value.get(name) if isinstance(value, dict) else None
        else:
            kind = kind.item_type if isinstance(kind, mi.ListType) else kind
            value = value[int(index)] if isinstance(value, list) and index.isdigit() else None
    return kind, value


def _bare(kind: mi.Type) -> mi.Type:
    while isinstance(kind, mi.Metadata):
        kind = kind.type
    return kind


def _struct_fields(kind: mi.Type) -> tuple[mi.Field, ...]:
    bare = _bare(kind)
    return bare.fields if isinstance(bare, mi.StructType) else ()


def _quote(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."

"""The root of every error the product raises, and its form on the wire.

An error is a class with a numeric code and named fields, and builds its own sentence from them. What may be retried
is said by the class (`RetryableError`), never by a string. On the wire an error is `(code, fields)`; a code this
process does not know arrives as `UnknownRemoteError` and keeps its fields.

Every package has one base below `KVError` and a range of codes: core 1000, bus 2000, transport 3000,
consistency 4000, prefix 5000, client 6000, services 7000.

E1: a code names one class for ever. E2: `error_from_wire(*error.to_wire())` gives the same class and, within the wire's
limits, the same fields; it never raises, whatever arrives. E3: `to_wire` gives only what the wire can hold.
"""

from collections.abc import Mapping
from typing import ClassVar, Final

from kv_core import limits

FieldValue = str | int | float | bool | bytes | None | list["FieldValue"]

_REGISTRY: Final[dict[int, type["KVError"]]] = {}
_FIELD_DEPTH_MAX: Final = 2


class KVError(Exception):
    """Base of all errors of the product.

    A leaf sets `code` (unique, checked at import) and `template`, and is raised with keyword fields:
    `raise SlotsExhausted(need=3, free=1)`. The fields are attributes' source of truth: `error.fields["need"]`.
    A leaf takes no other arguments, so that it can be rebuilt from the wire.
    """

    code: ClassVar[int] = 1000
    template: ClassVar[str] = "{detail}"

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        if "code" in cls.__dict__:
            owner = _REGISTRY.setdefault(cls.code, cls)
            if (owner.__module__, owner.__qualname__) != (cls.__module__, cls.__qualname__):
                raise TypeError(f"error code {cls.code} belongs to {owner.__module__}.{owner.__qualname__}")

    def __init__(self, /, **fields: FieldValue) -> None:
        self.fields: dict[str, FieldValue] = fields
        super().__init__(self._sentence())

    def _sentence(self) -> str:
        try:
            return self.template.format_map(self.fields)
        except (LookupError, ValueError, TypeError, AttributeError):
            # A peer of another version may have sent other fields: say what there is rather than fail.
            return f"{type(self).__name__}: {self.fields}"

    def to_wire(self) -> tuple[int, dict[str, FieldValue]]:
        """The error as `(code, fields)`; what the wire cannot hold is turned into text or cut."""
        room = [limits.MAX_ERROR_NBYTES]
        names = list(self.fields)[: limits.MAX_ERROR_FIELDS]
        return self.code, {name[: limits.MAX_NAME_BYTES]: _portable(self.fields[name], room, 0) for name in names}


class RetryableError(KVError):
    """Mix-in: the same call may succeed later, nothing was changed."""


class LocalProtocolError(KVError):
    """We broke a rule of our own: a bug on this side."""

    code = 1001


class RemoteProtocolError(KVError):
    """The peer broke the protocol."""

    code = 1002


class UnknownRemoteError(KVError):
    """A peer reported an error whose code this process does not know."""

    code = 1003
    template = "peer reported unknown error {remote_code}: {remote_fields}"


class MissingExtraError(KVError):
    """A feature was asked for whose optional dependency is not installed."""

    code = 1004
    template = "{feature} needs {module}; install it with: pip install '{package}[{extra}]'"


def error_from_wire(code: int, fields: Mapping[str, FieldValue]) -> KVError:
    """Rebuild the error that a peer reported; never raises."""
    cls = _REGISTRY.get(code)
    if cls is not None:
        try:
            return cls(**{str(name): value for name, value in fields.items()})
        except TypeError:
            pass  # a class with a constructor of its own: report it as unknown rather than lose it
    return UnknownRemoteError(remote_code=code, remote_fields=repr(dict(fields))[: limits.MAX_ERROR_TEXT])


def _portable(value: object, room: list[int], depth: int) -> FieldValue:
    """`value` as the wire can hold it, within the characters left in `room[0]`."""
    room[0] -= 8
    if value is None or isinstance(value, bool):
        return value
    if type(value) is int and limits.MIN_INT64 <= value <= limits.MAX_UINT64:
        return value
    if type(value) is float and value == value:
        return value
    length = max(min(room[0], limits.MAX_ERROR_TEXT), 0)
    if type(value) is list and depth < _FIELD_DEPTH_MAX:
        return [_portable(item, room, depth + 1) for item in value[: min(limits.MAX_ERROR_LIST, length)]]
    text = value if isinstance(value, str | bytes) else repr(value)
    room[0] -= min(len(text), length)
    return text[:length] if isinstance(text, bytes) else text[:length].encode(errors="replace").decode()

"""The root of every error the product raises, and its form on the wire.

An error is a class with a numeric code and named fields, and builds its own sentence from them. What may be retried
is said by the class (`RetryableError`), never by a string. On the wire an error is `(code, fields)`; a code this
process does not know arrives as `UnknownRemoteError` and keeps its fields.

Every package has one base below `KVError` and a range of codes: core 1000, bus 2000, transport 3000,
consistency 4000, prefix 5000, client 6000, services 7000.
"""

from collections.abc import Mapping
from typing import ClassVar, Final

FieldValue = str | int | float | bool | bytes | None | list["FieldValue"]

_REGISTRY: Final[dict[int, type["KVError"]]] = {}


class KVError(Exception):
    """Base of all errors of the product.

    A leaf sets `code` (unique, checked at import) and `template`, and is raised with keyword fields:
    `raise SlotsExhausted(need=3, free=1)`. The fields are attributes' source of truth: `error.fields["need"]`.
    """

    code: ClassVar[int] = 1000
    template: ClassVar[str] = "{detail}"

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        if "code" in cls.__dict__:
            owner = _REGISTRY.setdefault(cls.code, cls)
            if owner is not cls and owner.__qualname__ != cls.__qualname__:
                raise TypeError(f"error code {cls.code} belongs to {owner.__qualname__}")

    def __init__(self, /, **fields: FieldValue) -> None:
        self.fields: dict[str, FieldValue] = fields
        super().__init__(self._sentence())

    def _sentence(self) -> str:
        try:
            return self.template.format_map(self.fields)
        except (KeyError, IndexError, ValueError, TypeError, AttributeError):
            # A peer of another version may have sent other fields: say what there is rather than fail.
            return f"{type(self).__name__}: {self.fields}"

    def to_wire(self) -> tuple[int, dict[str, FieldValue]]:
        """The error as `(code, fields)`."""
        return self.code, dict(self.fields)


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


def error_from_wire(code: int, fields: Mapping[str, FieldValue]) -> KVError:
    """Rebuild the error that a peer reported; never raises."""
    cls = _REGISTRY.get(code)
    if cls is None:
        return UnknownRemoteError(remote_code=code, remote_fields=repr(dict(fields)))
    return cls(**{str(name): value for name, value in fields.items()})

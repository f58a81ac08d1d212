"""The names by which parts of a cluster know each other.

Each is a `NewType`, so that a request id cannot be passed where a node id is meant. An incarnation is one life of
one process: a restart gets a higher one, and whatever names the old one is refused. Names that come from outside (a
file, a command line, HTTP) go through `node_id`, `request_id` or `tenant_id`, which check them once.
"""

from typing import NewType

from kv_core import limits
from kv_core.errors import KVError

NodeId = NewType("NodeId", str)
RequestId = NewType("RequestId", str)
RegionId = NewType("RegionId", int)
TenantId = NewType("TenantId", str)
Incarnation = NewType("Incarnation", int)
Generation = NewType("Generation", int)


class InvalidIdError(KVError):
    """A name that cannot be one."""

    code = 1005
    template = "{kind} {value!r} is invalid: {reason}"


def node_id(text: str) -> NodeId:
    """A checked node name.

    Raises:
        InvalidIdError: empty, too long, or with characters that do not print.
    """
    return NodeId(_checked("node id", text))


def request_id(text: str) -> RequestId:
    """A checked request id; raises as `node_id`."""
    return RequestId(_checked("request id", text))


def tenant_id(text: str) -> TenantId:
    """A checked tenant name; raises as `node_id`."""
    return TenantId(_checked("tenant id", text))


def _checked(kind: str, text: str) -> str:
    if not text:
        raise InvalidIdError(kind=kind, value=text, reason="it is empty")
    if not text.isprintable() or text != text.strip():
        # Also keeps out lone surrogates, which no encoding holds.
        raise InvalidIdError(kind=kind, value=ascii(text)[:64], reason="it must print, without spaces around it")
    nbytes = len(text.encode())
    if nbytes > limits.MAX_NAME_BYTES:
        raise InvalidIdError(kind=kind, value=text[:64], reason=f"{nbytes} bytes, at most {limits.MAX_NAME_BYTES}")
    return text

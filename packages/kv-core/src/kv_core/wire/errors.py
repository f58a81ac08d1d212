"""Why a message was refused: the peer's faults below `WireError`, our own below `LocalProtocolError`."""

from kv_core.errors import LocalProtocolError, RemoteProtocolError


class WireError(RemoteProtocolError):
    """Base of everything that `decode` raises: the peer sent what it must not."""

    code = 1020
    template = "refused a message: {reason}"


class MalformedMessageError(WireError):
    """Not MessagePack, beyond a limit, or not in the form of an envelope."""

    code = 1021
    template = "refused a message of {nbytes} bytes: {reason}"


class MessageTooLargeError(WireError):
    """A message beyond the size limit; nothing of it was read."""

    code = 1022
    template = "refused a message of {nbytes} bytes, the limit is {limit}"


class UnsupportedWireVersionError(WireError):
    """The peer speaks another wire version."""

    code = 1023
    template = "peer speaks wire version {theirs}, this process speaks {ours}"


class UnknownMessageTypeError(WireError):
    """A type that this process did not register."""

    code = 1024
    template = "unknown message type {type!r}"


class SchemaMismatchError(WireError):
    """The fields do not fit the type."""

    code = 1025
    template = "message {type!r} does not fit its schema: {reason}"


class InvalidSchemaError(LocalProtocolError):
    """A message class that cannot be registered."""

    code = 1026
    template = "message class {name}: {reason}"


class UnregisteredMessageError(LocalProtocolError):
    """A message of a class that is not in the registry was to be sent."""

    code = 1027
    template = "message class {name} is not registered"


class UnencodableMessageError(LocalProtocolError):
    """A message whose values the wire cannot hold, or too large, was to be sent."""

    code = 1028
    template = "message {type!r} cannot be sent: {reason}"

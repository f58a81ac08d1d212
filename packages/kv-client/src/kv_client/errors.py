"""What a read of a prefix can end with. A miss, a holder that is gone and a failed check are told apart by class.

`translate` is the one place where errors of the bus, the transfers and the holder become errors of this package; the
original stays their `__cause__`.
"""

from kv_bus import errors as bus
from kv_core.errors import FieldValue, KVError, LocalProtocolError, RetryableError
from kv_prefix.errors import (
    DigestMismatchError,
    HolderLeavingError,
    LeaseExpiredError,
    LeaseLimitError,
    NoSpaceError,
    NotHeldError,
    PinQuotaExceededError,
    UnknownReceiptError,
)
from kv_transport import errors as transport


class ClientError(KVError):
    """Base of all errors of this package."""

    code = 6000


class Miss(ClientError):
    """The holder does not have this prefix, or has other tokens under its hash: compute it."""

    code = 6001
    template = "{holder} does not hold the prefix: {cause}"


class HolderLost(ClientError):
    """The holder cannot be reached, broke off, or has begun a new life. Another holder may have the prefix."""

    code = 6002
    template = "{holder} is gone: {cause}"


class CheckFailed(ClientError):
    """What the holder granted or sent is not what was asked for; none of the damaged layers is given out."""

    code = 6003
    template = "a check of what {holder} sent failed: {cause}"


class DeadlineExceeded(ClientError):
    """The call's deadline passed. A lease that the holder may have given ends by time."""

    code = 6004
    template = "reading from {holder} did not end by its deadline: {cause}"


class LeaseLost(ClientError, RetryableError):
    """The lease ended before all was read, by time or because the holder gave it up."""

    code = 6005
    template = "the lease at {holder} ended before all was read: {cause}"


class HolderRefused(ClientError):
    """The holder or the transfer refused for a reason of its own; `cause_code` is that error's code."""

    code = 6006
    template = "reading from {holder} was refused: {cause}"


class NoRoom(ClientError, RetryableError):
    """The client's arena has no run of free slots of that length; release what is no longer read."""

    code = 6007
    template = "{need} adjoining slots needed, the longest free run is {longest} of {total}"


class LayerNotReady(ClientError, LocalProtocolError):
    """A layer was read before it was verified."""

    code = 6008
    template = "layer {layer} is not verified yet"


class AlreadyReleased(ClientError, LocalProtocolError):
    """The blocks were given back, or the client is not open."""

    code = 6009
    template = "{what} is not open"


class InvalidRead(ClientError, LocalProtocolError):
    """An argument is outside what the call allows."""

    code = 6010
    template = "{name} is {value}; {rule}"


class HolderFull(ClientError, RetryableError):
    """The holder has no room for the blocks, or no room under its quota for pins; nothing was changed."""

    code = 6011
    template = "{holder} has no room: {cause}"


class WrongArrays(ClientError, LocalProtocolError):
    """The arrays to store do not fit the client's geometry."""

    code = 6012
    template = "layer {layer} of the arrays is {shape} of {dtype}; need {need}"


def translate(error: KVError, holder: str) -> ClientError:
    """`error` as one of this package; pass it on with `raise ... from error`."""
    fields: dict[str, FieldValue] = {"holder": holder, "cause": str(error), "cause_code": error.code}
    match error:
        case ClientError():
            return error
        case NotHeldError() | DigestMismatchError():
            return Miss(**fields)
        case transport.ChecksumMismatch() | transport.FrameRefused() | transport.GeometryMismatch():
            return CheckFailed(**fields)
        case transport.LeaseEnded() | transport.StaleGeneration() | LeaseExpiredError() | UnknownReceiptError():
            return LeaseLost(**fields)
        case NoSpaceError() | PinQuotaExceededError() | LeaseLimitError():
            return HolderFull(**fields)
        case bus.BusTimeout():
            return DeadlineExceeded(**fields)
        case (
            bus.PeerUnreachable()
            | bus.ConnectionLost()
            | bus.WrongIncarnation()
            | bus.ClosedWithOpenRequests()
            | bus.Draining()
            | HolderLeavingError()
            | transport.ConnectionLost()
            | transport.TransferTimeout()
            | transport.NoTransport()
            | transport.StaleIncarnation()
            | transport.UnknownPeer()
        ):
            return HolderLost(**fields)
        case transport.TransferCancelled() | transport.AgentClosed() | bus.BusClosed():
            return AlreadyReleased(what="the read")
        case _:
            return HolderRefused(**fields)

"""Errors of the services that cross from one role to another; each says what the caller may do about it."""

from kv_core.errors import KVError, RetryableError


class NodeError(KVError):
    """Base of what a node refuses or gives up."""

    code = 7020


class RequestTooLargeError(NodeError):
    """The sequence would not fit this node even if it were alone here."""

    code = 7021
    template = "{request_id} needs up to {need} blocks, {node} has {total}"


class NodeOverloadedError(NodeError, RetryableError):
    """As many requests wait here as may."""

    code = 7022
    template = "{node} is overloaded: {waiting} requests wait, the limit is {limit}"


class EpochFencedError(NodeError):
    """This epoch of the request was ended before, or a higher one is known."""

    code = 7023
    template = "{request_id} epoch {epoch} is fenced at {node}: epoch {known} is known"


class RequestExpiredError(NodeError):
    """The request's time was over before it was done."""

    code = 7024
    template = "{request_id} ran out of time at {node} while {state}"


class HandoverChecksumError(NodeError, RetryableError):
    """The entry's checksum over its block CRCs is not the sender's: no token was shown."""

    code = 7025
    template = "{request_id}: checksum over {num_blocks} blocks is {have:#x}, the sender's is {want:#x}"


class PeerDiedError(NodeError, RetryableError):
    """A node this request depended on is dead."""

    code = 7026
    template = "{request_id}: {peer} died ({cause})"


class RequestEndedError(NodeError):
    """The gateway ended the request while it was being worked on."""

    code = 7027
    template = "{request_id} was ended by its gateway: {cause}"


class UnknownRequestError(NodeError):
    """The message is about a request that is not here."""

    code = 7028
    template = "{node} does not know {request_id} epoch {epoch}"


class NoKVRoleError(NodeError):
    """The node does not do this kind of work."""

    code = 7029
    template = "{node} is a {role} node and does not {work}"


class NodeDrainingError(NodeError, RetryableError):
    """The node is leaving: it takes nothing new, and hands over what it has."""

    code = 7044
    template = "{node} is draining"


class MoveRefusedError(NodeError, RetryableError):
    """The node cannot take this prefix now."""

    code = 7045
    template = "{node} takes no prefix: {reason}"


class ReplicaEndedError(NodeError, RetryableError):
    """The replica of this process has ended, and the rest of the process is about to: nothing is waited for there."""

    code = 7046
    template = "the replica of {node} has ended: {cause}"


class LifeOverError(KVError):
    """The cluster declared this life of the process over while it was silent; a new one must begin."""

    code = 7043
    template = "{by} declared this life of {node} over (incarnation {incarnation})"

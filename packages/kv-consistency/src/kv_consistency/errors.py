"""Errors of kv-consistency: range 4000. Each says what is held and what was needed."""

from kv_core.errors import KVError, LocalProtocolError, RemoteProtocolError, RetryableError


class ConsistencyError(KVError):
    """Base of this package's errors."""

    code = 4000


class NotFoundError(ConsistencyError):
    """Nothing readable is known of the request: never registered, ended, or purged."""

    code = 4001
    template = "request {request_id!r} is not known here"


class IncompleteError(ConsistencyError, RetryableError):
    """The entry is shorter than the read needs."""

    code = 4002
    template = "request {request_id!r} has {have} tokens of KV, {need} are needed"


class StaleReplicaError(ConsistencyError, RetryableError):
    """This replica has not applied what the read must follow. `have` and `need` are texts of dots."""

    code = 4003
    template = "replica {replica} is behind: it has {have}, the read follows {need}"


class FencedError(ConsistencyError):
    """A writer of a former owner epoch; the request has a newer owner."""

    code = 4004
    template = "request {request_id!r}: epoch {epoch} is fenced by {current}"


class HolderLostError(ConsistencyError):
    """Who held it died: the only storage nodes of an entry, or the origin of an update that never got here."""

    code = 4005
    template = "{what} was held by {holders}, which is lost"


class ShrinkingUpdateError(ConsistencyError, LocalProtocolError):
    """An entry is append-only within an owner epoch."""

    code = 4006
    template = "request {request_id!r} has {have} tokens, an update to {new} would shrink it"


class SkippingUpdateError(ConsistencyError, LocalProtocolError):
    """An update that starts beyond what is registered would leave a hole."""

    code = 4007
    template = "request {request_id!r} has {have} tokens, an update from {start} on would skip some"


class RemoteClockAheadError(ConsistencyError, RemoteProtocolError):
    """A peer's stamp lies too far beyond our clock; nothing was changed."""

    code = 4010
    template = "stamp of {node!r} is {ahead_ns} ns ahead of our clock, at most {offset_max_ns} are taken"


class ClockJumpedError(ConsistencyError):
    """The wall clock ran ahead of the monotonic clock by more than the tolerance; nothing was changed."""

    code = 4011
    template = "the wall clock jumped forward by {ahead_ns} ns, at most {jump_max_ns} are taken"


class ClockBoundReachedError(ConsistencyError, RetryableError):
    """A stamp would pass the persisted bound; persist a higher one first."""

    code = 4012
    template = "no stamp beyond {bound_ns} before a higher bound is persisted"


class TokenTooLargeError(ConsistencyError, LocalProtocolError):
    """A causal token would name too many origins."""

    code = 4013
    template = "a causal token of {have} dots, at most {limit} are allowed"


class LimitReachedError(ConsistencyError):
    """A bound of limits.py; nothing was changed."""

    code = 4014
    template = "{what}: {have} of at most {limit}"


class InvalidUpdateError(ConsistencyError, LocalProtocolError):
    """An event of our own that cannot be."""

    code = 4015
    template = "{what} is invalid: {reason}"


class MalformedUpdateError(ConsistencyError, RemoteProtocolError):
    """A peer's message that cannot be; nothing was changed."""

    code = 4016
    template = "{what} from {peer!r} is invalid: {reason}"


class ReplicaFencedError(ConsistencyError):
    """The cluster holds this incarnation for dead: go on as a higher one, with a new replica."""

    code = 4017
    template = "{node!r} incarnation {incarnation} is fenced: {reason}"

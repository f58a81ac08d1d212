"""What can go wrong on the bus, each with the fields that say where.

Three questions decide a class: whose fault is it, was anything done, may the same call succeed later. An error that is
also a `RetryableError` was raised before the peer handled anything.
"""

from kv_core.errors import KVError, LocalProtocolError, RetryableError


class BusError(KVError):
    """Base of every error of kv-bus."""

    code = 2000


class MailboxFull(BusError, RetryableError):
    """An actor has as many waiting events as its bound allows."""

    code = 2001
    template = "mailbox of actor {actor} is full ({limit} events wait)"


class ActorClosed(BusError):
    """The actor takes no more events: it is draining or closed."""

    code = 2002
    template = "actor {actor} is closed"


class ActorDown(BusError, RetryableError):
    """A supervised actor is between two lives."""

    code = 2003
    template = "actor {actor} is down and waits for its restart"


class ChildGaveUp(BusError):
    """A supervised child failed more often than its policy allows."""

    code = 2004
    template = "{child} failed {failures} times within {within_ms} ms, last cause: {cause}"


class ChildEnded(BusError):
    """A supervised child returned although nobody asked it to stop."""

    code = 2005
    template = "{child} ended without being asked to"


class BusTimeout(BusError):
    """The message was handed over, no reply came by the deadline; whether it was handled is unknown."""

    code = 2010
    template = "{node} did not answer {message} within {waited_ms} ms"


class PeerUnreachable(BusError, RetryableError):
    """The message never left: there was no connection to the peer until the deadline."""

    code = 2011
    template = "no connection to {node} for {message} ({cause})"


class ConnectionLost(BusError):
    """The connection broke after the message was handed over; whether it was handled is unknown."""

    code = 2012
    template = "connection to {node} broke while {message} was unanswered"


class WrongIncarnation(BusError, RetryableError):
    """The message was meant for another life of the peer; it was not handled."""

    code = 2013
    template = "{node} is incarnation {actual}, the message was for {expected}"


class AuthRefused(BusError):
    """The peer, or we, do not admit the other's key."""

    code = 2014
    template = "authentication with {node} refused: {cause}"


class UnknownPeer(BusError):
    """No peer of this name is in the peers table."""

    code = 2015
    template = "no peer named {node}"


class PeerQueueFull(BusError, RetryableError):
    """As many messages wait for this peer as its bound allows."""

    code = 2016
    template = "queue to {node} is full ({waiting} messages, {waiting_bytes} bytes wait)"


class NoHandler(BusError):
    """The receiving node handles no message of this type."""

    code = 2018
    template = "{node} has no handler for {message}"


class Draining(BusError, RetryableError):
    """The node is about to stop and takes no new work."""

    code = 2019
    template = "{node} is draining"


class BusClosed(BusError):
    """The bus of this process is closed."""

    code = 2020
    template = "the bus of {node} is closed"


class HandlerFailed(BusError):
    """The peer's handler raised something that is no `KVError`: a bug there."""

    code = 2021
    template = "handler of {node} for {message} failed with {exception}"


class TooManyRequests(BusError, RetryableError):
    """A bound on unanswered requests is reached; the request was not handled."""

    code = 2022
    template = "{node} has {limit} unanswered requests"


class NoReply(BusError):
    """The peer's handler neither replied nor kept the request for later: a bug there."""

    code = 2023
    template = "handler of {node} for {message} gave no reply"


class UnexpectedReply(BusError):
    """The reply is of another type than the caller asked for."""

    code = 2024
    template = "{node} replied to {message} with {actual}, expected {expected}"


class WrongCluster(BusError):
    """The peer belongs to another cluster."""

    code = 2025
    template = "{node} belongs to cluster {theirs}, this node to {ours}"


class LibzmqTooOld(BusError):
    """The installed libzmq has known holes."""

    code = 2026
    template = "libzmq {found} is refused, {needed} or newer is needed"


class KeyFileError(BusError):
    """A key file or folder is missing, malformed or readable by others."""

    code = 2027
    template = "{path}: {cause}"


class AllowListError(BusError):
    """The cluster's list of keys is missing or malformed."""

    code = 2028
    template = "{path}: {cause}"


class BindFailed(BusError):
    """The address could not be bound."""

    code = 2029
    template = "cannot bind {address}: {cause}"


class BadAddress(BusError):
    """The address is not one the bus accepts."""

    code = 2030
    template = "address {address!r}: {cause}"


class ClosedWithOpenRequests(BusError):
    """The peer stopped before it answered; whether the request was handled is unknown."""

    code = 2031
    template = "{node} stopped before it answered {message}"


class AlreadyAnswered(LocalProtocolError):
    """A request was answered twice."""

    code = 2040
    template = "request {message} of {node} was already answered"


class HandlerTaken(LocalProtocolError):
    """Two handlers were registered for one message type."""

    code = 2041
    template = "{message} already has a handler"

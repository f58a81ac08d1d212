"""Everything that can go wrong while moving KV, each with the numbers that say why.

`TransportError` is the base. A class that is also `RetryableError` changed nothing and may be tried again, by the same
or another way; `recovery` decides which.
"""

from kv_core.errors import KVError, RetryableError


class TransportError(KVError):
    """Base of all errors of kv-transport."""

    code = 3000


class ConnectionLost(TransportError, RetryableError):
    """The link to a peer broke, or could not be made."""

    code = 3001
    template = "connection to {peer} over {transport} lost: {cause}"


class ChecksumMismatch(TransportError, RetryableError):
    """Bytes arrived that are not the ones that were sent. They were not shown to anybody."""

    code = 3002
    template = "CRC-64 mismatch from {peer} over {transport}: {bad} of {total} pieces of layer {layer}"


class TransferTimeout(TransportError, RetryableError):
    """A deadline passed. The transfer itself may still be running: memory is only free once it is released."""

    code = 3003
    template = "{what} of {request} did not end within {timeout_ms} ms; layers missing: {missing_layers}"


class StaleGeneration(TransportError):
    """A block reference names an earlier use of its slot."""

    code = 3004
    template = "slot {slot} of region {region} is at generation {found}, the reference says {expected}"


class ReplayedNonce(TransportError):
    """A unit whose nonce was seen before, or is older than the replay window."""

    code = 3005
    template = "nonce {nonce} from {peer} was used before or is too old (newest {newest})"


class GrantRefused(TransportError):
    """A write that no open grant allows."""

    code = 3006
    template = "grant {ticket} refused: {reason}"


class LeaseEnded(TransportError):
    """A read under a lease that was given back, ran out, or never was."""

    code = 3007
    template = "lease {ticket} refused: {reason}"


class GeometryMismatch(TransportError):
    """The two sides store KV in forms between which no conversion is defined."""

    code = 3008
    template = "{field} differs: ours is {ours}, theirs is {theirs}"


class MemoryUnavailable(TransportError, RetryableError):
    """There is not enough memory on this machine (or in its cgroup) for an arena."""

    code = 3009
    template = "an arena of {need} bytes does not fit: {available} bytes available, {reserve} kept free ({limit})"


class UnknownRegion(TransportError):
    """A region id that is not registered, or no longer."""

    code = 3010
    template = "region {region} is not registered at {node}"


class InvalidDescriptor(TransportError):
    """A piece of memory that lies outside its region, or is misused."""

    code = 3011
    template = "{what} {value!r} is invalid: {reason}"


class UnknownPeer(TransportError):
    """A node that was not introduced by `add_remote_agent`."""

    code = 3012
    template = "node {peer} was not introduced"


class StaleIncarnation(TransportError):
    """A peer that restarted, or a message meant for an earlier life of this process."""

    code = 3013
    template = "{peer} is at incarnation {found}, expected {expected}"


class AuthenticationFailed(TransportError):
    """A connection that could not prove whose it is."""

    code = 3014
    template = "connection refused: {reason}"


class TransferCancelled(TransportError):
    """The caller gave the transfer up."""

    code = 3015
    template = "transfer {request} was cancelled"


class QuarantineFull(TransportError, RetryableError):
    """Too many slots wait for a fence on one peer."""

    code = 3016
    template = "{slots} slots are in quarantine for {peer}, at most {limit} may be"


class InvalidTransition(TransportError):
    """A state machine got an event that its state does not allow: a bug on this side."""

    code = 3017
    template = "{machine} in state {state} got {event}"


class XferActive(TransportError):
    """A transfer in flight cannot be released or posted again."""

    code = 3018
    template = "transfer {xfer} is {state}; {action} is refused"


class BackendUnavailable(TransportError):
    """A transport that this installation or machine does not have."""

    code = 3019
    template = "transport {scheme} is not available: {reason}"


class FrameRefused(TransportError):
    """A peer sent what the protocol does not allow."""

    code = 3020
    template = "frame from {peer} refused: {reason}"


class AgentClosed(TransportError):
    """The agent was closed while the call was in progress."""

    code = 3021
    template = "transfer agent {node} is closed"


class NoTransport(TransportError, RetryableError):
    """No transport reaches the peer; the reasons are given one by one."""

    code = 3022
    template = "no transport reaches {peer}: {tried}"


class PeerRefused(TransportError):
    """The peer answered with an error that this process does not know."""

    code = 3023
    template = "{peer} refused: {reason}"


class TransferTooLarge(TransportError):
    """More than one message, unit or list may hold."""

    code = 3024
    template = "{what} of {size} is larger than {limit}"


class GrantBusy(TransportError, RetryableError):
    """Another connection of the same writer is still being shut down; ask again in a moment."""

    code = 3025
    template = "grant {ticket} is busy: another link of its writer is being shut down"


class CodecFailed(TransportError):
    """Cells that a codec cannot write, or bytes that it did not write."""

    code = 3026
    template = "codec {codec}: {reason}"


class DeviceUnavailable(TransportError):
    """There is no GPU to put an arena on."""

    code = 3027
    template = "no device memory: {reason}"


class LandingFull(TransportError, RetryableError):
    """Cells of other ranks have nowhere to land before hand-overs that are under way end."""

    code = 3028
    template = "{need} landing slots are needed, {free} are free"


class ForgottenPut(TransportError):
    """An attempt at a put so old that nobody knows any more whether its notification was given out. It is not."""

    code = 3029
    template = "put {put} of {peer} is older than the puts that are remembered (newest {newest})"

"""Every error of kv-prefix, with the fields that say what to do about it."""

from kv_core.errors import KVError, LocalProtocolError, RetryableError


class PrefixError(KVError):
    """Base of all errors of this package."""

    code = 5000


class NoSpaceError(PrefixError, RetryableError):
    """Fewer slots are free or evictable than are needed; nothing was changed.

    Raised at once, without waiting: the caller preempts its youngest request, or refuses the new one.
    """

    code = 5001
    template = "no space: {need} slots needed, {free} free and {cached} evictable of {total} ({pinned} pinned)"


class UnknownReceiptError(PrefixError, LocalProtocolError):
    """A table, lease or pin was given back twice, or never was ours."""

    code = 5002
    template = "receipt {receipt} of {owner!r} is not held: given back already, or never given out"


class StaleMatchError(PrefixError, RetryableError):
    """A matched block was evicted since the match was made: match again."""

    code = 5003
    template = "block {block_idx} of the match is gone (slot {slot}, generation {generation}); match again"


class NotHeldError(PrefixError):
    """The prefix asked for is not in this pool: an ordinary miss."""

    code = 5004
    template = "prefix {prefix_hash} is not held"


class DigestMismatchError(PrefixError):
    """The reader's token digest is not that of the stored tokens: hashes collided, or the reader is wrong. A miss."""

    code = 5005
    template = "tokens behind prefix {prefix_hash} are not the reader's"


class LeaseExpiredError(PrefixError):
    """The lease ended by time or was given back: its references may no longer be read."""

    code = 5006
    template = "lease {receipt} has ended"


class PinQuotaExceededError(PrefixError):
    """Pinning these blocks would exceed the quota for pinned prefixes; nothing was changed."""

    code = 5007
    template = "pinning {need} more blocks exceeds the quota: {used} of {quota} are in use"


class LeaseLimitError(PrefixError, RetryableError):
    """One reader, or all together, hold as many leases as the pool allows."""

    code = 5008
    template = "{reader!r} may not hold another lease: {held} of {limit} are held"


class BlockMismatchError(PrefixError, LocalProtocolError):
    """The blocks to commit do not fit the table: wrong count, order or size."""

    code = 5009
    template = "cannot commit: {detail}"


class HolderLimitError(PrefixError):
    """The index follows as many holders as it can, or the holder asked to come back is still being swept out."""

    code = 5010
    template = "holder {holder} cannot be added: {held} of {limit} are followed"


class UnknownPolicyError(PrefixError):
    """A policy name that is not one of the known ones; the message lists them."""

    code = 5011
    template = "unknown {kind} policy {name!r}; known are {known}"


class NoCandidateError(PrefixError, RetryableError):
    """There is no node to place a request on."""

    code = 5012
    template = "no node can take the request"


class InvalidRequestError(PrefixError, LocalProtocolError):
    """An argument is outside what the call allows."""

    code = 5013
    template = "{name} is {value}; {rule}"


class HolderLeavingError(PrefixError, RetryableError):
    """The holder is leaving the cluster: it takes nothing in, and lends nothing once its blocks are given away.

    Another node has them, or they are to be computed.
    """

    code = 5015
    template = "{node} is leaving: it takes nothing in and lends nothing any more"


class TenantQuotaError(NoSpaceError):
    """A tenant would exceed its quota of blocks, and too few of its own can be evicted; nothing was changed.

    Raised at once, whatever room others leave.
    """

    code = 5014
    template = (
        "no space for tenant {tenant!r}: {need} more blocks exceed its quota of {quota}, of which {used} are in use "
        "and {evictable} evictable"
    )

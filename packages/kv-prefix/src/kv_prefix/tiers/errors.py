"""What can go wrong below memory. None of it is a reason to fail a request: what a tier cannot give is computed."""

from kv_core.errors import RetryableError
from kv_prefix.errors import PrefixError


class TierError(PrefixError):
    """Base of the errors of tiers."""

    code = 5050


class TierFullError(TierError, RetryableError):
    """There is no room on the medium though the tier's own limit allows more; nothing was stored.

    The tier goes on with the room it has, evicting for each new block.
    """

    code = 5051
    template = "{where} is full: {reason}"


class TierIOError(TierError, RetryableError):
    """The medium failed; what was to be stored is not, what was to be read is absent."""

    code = 5052
    template = "{where} failed: {reason}"


class TierInUseError(TierError):
    """Another process has the folder."""

    code = 5053
    template = "{where} is in use by another process"


class TierConfigError(TierError):
    """A tier that cannot be: too small for one block, or a place that cannot be used."""

    code = 5054
    template = "tier {where}: {reason}"


class AwsProfileError(TierError):
    """The profile that the environment means cannot be used. Says no key and no line of a file."""

    code = 5055
    template = "AWS profile {profile!r}: {reason}"

"""What can be wrong with a trace or with how to replay it."""

from kv_core.errors import KVError


class TraceError(KVError):
    """A line of a trace is not a request."""

    code = 7500
    template = "{path}, line {line}: {reason}"


class ReplayRequestError(KVError):
    """Options that do not go together, or a request that no pool of that size can hold."""

    code = 7501
    template = "{option}: {reason}"

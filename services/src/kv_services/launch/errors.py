"""What can go wrong while processes are started."""

from kv_core.errors import KVError


class LaunchError(KVError):
    """A cluster could not be started or driven on this machine."""

    code = 7120


class ProcessExitedError(LaunchError):
    """A process ended before it was ready."""

    code = 7121
    template = "{node} ended with status {status} before it was ready; its last lines:\n{tail}"


class ProcessNotReadyError(LaunchError):
    """A process runs but did not become ready in time."""

    code = 7122
    template = "{node} was not ready after {seconds} s ({last}); its last lines:\n{tail}"


class NoFreePortError(LaunchError):
    """No port below the ephemeral range is free."""

    code = 7123
    template = "no free port on {host} between {low} and {high}"


class NotRunningError(LaunchError):
    """The process that was meant is not running."""

    code = 7124
    template = "{node} is not running"

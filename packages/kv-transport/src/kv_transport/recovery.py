"""Decides what to do about a failed transfer: one table from the kind of error to one action. Pure.

| what went wrong | action | urgency |
|---|---|---|
| the connection was lost | `FallbackToTcp`, with LZ4 | HIGH |
| bytes failed their checksum | `RetryWithBackoff`: 3 times, from 10 ms, a hardware fault of the link | NORMAL |
| no completion in time | `RetryOnAlternateNode`, not this one | HIGH |
| anything else, and what ran out of tries | `FullPrefillFallback` | CRITICAL |

R1: every error gives an action. R2: no transfer is retried for ever: a checksum mismatch has three tries, a fallback to
tcp one, and then the KV is computed again. R3: the answer depends on the task and the error only.
"""

from dataclasses import dataclass
from enum import IntEnum
from typing import Final, TypeAlias

from kv_core.ids import NodeId, RequestId
from kv_transport.errors import ChecksumMismatch, ConnectionLost, TransferTimeout

CHECKSUM_RETRIES_MAX: Final = 3
CHECKSUM_BACKOFF_FIRST_MS: Final = 10


class RecoveryUrgency(IntEnum):
    """How soon an operator should know of it; lower is sooner."""

    CRITICAL = 0
    HIGH = 1
    NORMAL = 2


@dataclass(frozen=True, slots=True)
class TransferTask:
    """A transfer that failed, as far as its recovery depends on it.

    Attributes:
        source, target: whose KV was to go where.
        transport: scheme that carried it.
        checksum_failures: how often its bytes failed their checksum before this failure.
    """

    request_id: RequestId
    source: NodeId
    target: NodeId
    transport: str = "shm"
    checksum_failures: int = 0


@dataclass(frozen=True, slots=True)
class FallbackToTcp:
    """Go on over tcp, from the first unit that was not acknowledged."""

    lz4: bool = True
    urgency: RecoveryUrgency = RecoveryUrgency.HIGH


@dataclass(frozen=True, slots=True)
class RetryWithBackoff:
    """Post the failed units again after `delay_ms`. `hardware_fault`: count it against the link."""

    delay_ms: int
    attempt: int
    attempts_max: int = CHECKSUM_RETRIES_MAX
    hardware_fault: bool = True
    urgency: RecoveryUrgency = RecoveryUrgency.NORMAL


@dataclass(frozen=True, slots=True)
class RetryOnAlternateNode:
    """Start again with another node than these."""

    exclude: tuple[NodeId, ...]
    urgency: RecoveryUrgency = RecoveryUrgency.HIGH


@dataclass(frozen=True, slots=True)
class FullPrefillFallback:
    """Give the transfer up and compute the KV again."""

    cause: str
    urgency: RecoveryUrgency = RecoveryUrgency.CRITICAL


RecoveryAction: TypeAlias = FallbackToTcp | RetryWithBackoff | RetryOnAlternateNode | FullPrefillFallback


def diagnose_transfer_failure(task: TransferTask, error: BaseException) -> RecoveryAction:
    """What to do about `error`, which ended `task`."""
    match error:
        case ChecksumMismatch() if task.checksum_failures < CHECKSUM_RETRIES_MAX:
            delay_ms = CHECKSUM_BACKOFF_FIRST_MS << task.checksum_failures
            return RetryWithBackoff(delay_ms, task.checksum_failures + 1)
        case ConnectionLost() | ConnectionError() if task.transport != "tcp":
            return FallbackToTcp()
        case TransferTimeout() | TimeoutError():
            return RetryOnAlternateNode((task.target,))
        case _:
            return FullPrefillFallback(f"{type(error).__name__}: {error}")

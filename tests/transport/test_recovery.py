"""The recovery table: every error has an action, and none is tried for ever."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kv_core.ids import NodeId, RequestId
from kv_transport import (
    FallbackToTcp,
    FullPrefillFallback,
    RetryOnAlternateNode,
    RetryWithBackoff,
    TransferTask,
    diagnose_transfer_failure,
)
from kv_transport import errors as transport_errors
from kv_transport.recovery import CHECKSUM_RETRIES_MAX, RecoveryUrgency

P, D = NodeId("prefill-1"), NodeId("decode-1")
LOST = transport_errors.ConnectionLost(peer=D, reason="gone")
TORN = transport_errors.ChecksumMismatch(peer=D, unit=1)
LATE = transport_errors.TransferTimeout(name="x", missing=[1])


def task(transport: str = "shm", checksum_failures: int = 0) -> TransferTask:
    return TransferTask(RequestId("r"), P, D, transport, checksum_failures)


def test_a_lost_connection_goes_on_over_tcp_with_lz4() -> None:
    action = diagnose_transfer_failure(task(), LOST)
    assert action == FallbackToTcp(lz4=True, urgency=RecoveryUrgency.HIGH)


def test_a_connection_lost_on_tcp_has_nothing_to_fall_back_to() -> None:
    action = diagnose_transfer_failure(task("tcp"), LOST)
    assert isinstance(action, FullPrefillFallback) and "ConnectionLost" in action.cause


def test_a_checksum_mismatch_is_tried_three_times_from_ten_milliseconds_and_counted() -> None:
    tries = [diagnose_transfer_failure(task(checksum_failures=n), TORN) for n in range(CHECKSUM_RETRIES_MAX)]
    assert tries == [RetryWithBackoff(10, 1), RetryWithBackoff(20, 2), RetryWithBackoff(40, 3)]
    assert all(isinstance(a, RetryWithBackoff) and a.hardware_fault for a in tries)
    assert all(a.urgency is RecoveryUrgency.NORMAL for a in tries)
    assert isinstance(diagnose_transfer_failure(task(checksum_failures=3), TORN), FullPrefillFallback)


@pytest.mark.parametrize("error", [LATE, TimeoutError()])
def test_a_timeout_goes_to_another_node(error: BaseException) -> None:
    action = diagnose_transfer_failure(task(), error)
    assert action == RetryOnAlternateNode((D,), RecoveryUrgency.HIGH)


@given(
    st.sampled_from([LOST, TORN, LATE, ValueError("odd"), transport_errors.GrantRefused(reason="x"), OSError(5, "io")]),
    st.sampled_from(["shm", "tcp", "ucx"]),
    st.integers(0, 9),
)
def test_whatever_fails_the_tries_end_in_computing_again(error: BaseException, transport: str, failures: int) -> None:
    steps = 0
    while True:
        action = diagnose_transfer_failure(task(transport, failures), error)
        steps += 1
        assert steps <= CHECKSUM_RETRIES_MAX + 2
        match action:
            case FallbackToTcp():
                transport = "tcp"
            case RetryWithBackoff():
                failures += 1
            case RetryOnAlternateNode(exclude):
                assert D in exclude
                return
            case FullPrefillFallback():
                assert action.urgency is RecoveryUrgency.CRITICAL
                return

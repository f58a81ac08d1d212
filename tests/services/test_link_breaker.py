"""Breakers of links, and the log of events, without a clock of their own."""

from hypothesis import given
from hypothesis import strategies as st

from kv_core.errors import KVError
from kv_core.ids import NodeId, RequestId
from kv_core.testing import ManualClock
from kv_services.event_log import EVENTS_MAX, EventLog
from kv_services.link_breaker import (
    FAILURES_MAX,
    PAUSE_FIRST_NS,
    PAUSE_MAX_NS,
    LinkBreakers,
    LinkState,
)
from kv_services.metrics import Metrics
from kv_services.node.recoverer import Recoverer
from kv_transport.errors import ChecksumMismatch, ConnectionLost, TransferTimeout
from kv_transport.recovery import FallbackToTcp, RetryWithBackoff, TransferTask

PEER = NodeId("decode-1")


def opened() -> LinkBreakers[str]:
    breakers: LinkBreakers[str] = LinkBreakers()
    for i in range(FAILURES_MAX):
        assert breakers.allows("l", 0)
        assert breakers.failed("l", 0) == (i == FAILURES_MAX - 1)
    return breakers


def test_failures_in_a_row_open_a_link_and_a_success_between_them_does_not() -> None:
    breakers = opened()
    assert not breakers.allows("l", PAUSE_FIRST_NS - 1)
    other: LinkBreakers[str] = LinkBreakers()
    for _ in range(10):
        for _ in range(FAILURES_MAX - 1):
            other.failed("l", 0)
        assert not other.succeeded("l")
    assert other.allows("l", 0)


def test_an_open_link_gets_one_trial_a_pause_and_heals_by_it() -> None:
    breakers, now_ns, pause_ns = opened(), 0, PAUSE_FIRST_NS
    for _ in range(10):
        now_ns += pause_ns
        assert breakers.allows("l", now_ns)
        breakers.tried("l", now_ns)
        assert not breakers.allows("l", now_ns)
        breakers.failed("l", now_ns)
        pause_ns = min(2 * pause_ns, PAUSE_MAX_NS)
        assert not breakers.allows("l", now_ns + pause_ns - 1)
    now_ns += pause_ns
    breakers.tried("l", now_ns)
    assert breakers.succeeded("l")
    assert breakers.state("l") is LinkState.CLOSED and breakers.allows("l", now_ns)


def test_a_trial_whose_outcome_is_never_told_is_followed_by_another() -> None:
    breakers = opened()
    breakers.tried("l", PAUSE_FIRST_NS)
    assert not breakers.allows("l", PAUSE_FIRST_NS)
    assert breakers.allows("l", 2 * PAUSE_FIRST_NS)


@given(st.lists(st.tuples(st.sampled_from(("ok", "fail", "try")), st.integers(0, 2 * PAUSE_MAX_NS)), max_size=60))
def test_whatever_happened_a_link_that_works_is_in_use_after_one_trial(history: list[tuple[str, int]]) -> None:
    breakers: LinkBreakers[str] = LinkBreakers()
    now_ns = 0
    for what, step_ns in history:
        now_ns += step_ns
        if what == "ok":
            breakers.succeeded("l")
        elif what == "fail":
            breakers.failed("l", now_ns)
        elif breakers.allows("l", now_ns):
            breakers.tried("l", now_ns)
    now_ns += PAUSE_MAX_NS
    assert breakers.allows("l", now_ns)
    breakers.tried("l", now_ns)
    breakers.succeeded("l")
    assert breakers.open_links() == []


def recoverer() -> tuple[Recoverer, EventLog, Metrics]:
    clock = ManualClock()
    events, metrics = EventLog(clock), Metrics("prefill-1", "prefill")
    return Recoverer(NodeId("prefill-1"), clock, events, metrics), events, metrics


ERRORS: list[tuple[KVError, str]] = [
    (TransferTimeout(what="transfer", request="t", timeout_ms=1, missing_layers="0"), "retry_on_alternate_node"),
    (ConnectionLost(peer="p", transport="tcp", cause="gone"), "full_prefill"),
    (ChecksumMismatch(peer="p", transport="tcp", bad=1, total=2, layer=0), "full_prefill"),
]


def test_each_failure_is_one_event_with_its_cause_and_one_count() -> None:
    for error, kind in ERRORS:
        recovery, events, metrics = recoverer()
        recovery.ended(PEER, "r1", error, reading=False)
        (event,) = events.recent()
        assert (event.kind, event.link, event.request) == (kind, "prefill-1>decode-1", "r1")
        assert str(error) in event.cause
        exposed = metrics.expose(0).decode()
        assert f'kv_recoveries_total{{action="{kind}"}} 1.0' in exposed
        assert 'kv_link_transfers_total{outcome="failed",peer="decode-1"} 1.0' in exposed


def test_what_a_transfer_does_by_itself_is_told_and_a_bad_link_is_counted_as_hardware() -> None:
    recovery, events, metrics = recoverer()
    task = TransferTask(RequestId("r"), NodeId("prefill-1"), PEER)
    recovery.inside(task, RetryWithBackoff(10, 1), ERRORS[2][0])
    recovery.inside(task, FallbackToTcp(), ERRORS[1][0])
    assert [event.kind for event in events.recent()] == ["retry_with_backoff", "fall_back_to_tcp"]
    exposed = metrics.expose(0).decode()
    assert 'kv_hardware_faults_total{peer="decode-1"} 1.0' in exposed
    assert 'kv_recoveries_total{action="fall_back_to_tcp"} 1.0' in exposed


def test_a_link_that_opens_and_closes_is_told_once_each() -> None:
    recovery, events, metrics = recoverer()
    for _ in range(FAILURES_MAX + 5):
        recovery.ended(PEER, "r", ERRORS[1][0], reading=True)
    assert not recovery.allows(PEER)
    recovery.ended(PEER, "r", None, reading=True)
    recovery.ended(PEER, "r", None, reading=True)
    kinds = [event.kind for event in events.recent()]
    assert kinds.count("link_opened") == kinds.count("link_closed") == 1
    assert {event.link for event in events.recent()} == {"decode-1>prefill-1"}
    exposed = metrics.expose(0).decode()
    assert 'kv_recoveries_total{action="link_opened"} 1.0' in exposed
    assert 'kv_recoveries_total{action="link_closed"} 1.0' in exposed


def test_the_ring_is_bounded_and_repetitions_are_counted() -> None:
    log = EventLog(ManualClock())
    for _ in range(1000):
        log.note("same", "a>b", "again")
    (event,) = log.recent()
    assert event.count == 1000
    for i in range(2 * EVENTS_MAX):
        log.note("other", f"link-{i}", "c" * 10_000)
    assert len(log.recent()) == EVENTS_MAX
    assert max(len(event.cause) for event in log.recent()) <= 500

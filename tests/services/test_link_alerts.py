"""Alerts of single links: by their latest transfers, once an episode, with both nodes in them."""

from kv_core.ids import NodeId
from kv_services.metrics import Metrics
from kv_services.monitor.health_state import AlertCleared, AlertRaised, HealthEffect, HealthSample, KvCacheHealthMonitor
from kv_services.monitor.sampling import sample_of

A = NodeId("prefill-1")


def judge(monitor: KvCacheHealthMonitor, transfers: int, failures: int) -> list[HealthEffect]:
    return monitor.step(
        HealthSample(A, reachable=True, links=(("decode-1", transfers, failures), ("decode-2", 500, 0)))
    )


def test_a_bad_link_is_one_alert_that_names_it_and_ends_when_its_latest_transfers_are_well() -> None:
    monitor = KvCacheHealthMonitor()
    assert judge(monitor, 1000, 0) == []
    assert judge(monitor, 1010, 10) == [], "ten transfers prove nothing"
    (raised,) = judge(monitor, 1020, 15)
    assert isinstance(raised, AlertRaised) and "prefill-1 and decode-1" in raised.sentence
    assert "75.0%" in raised.sentence
    assert judge(monitor, 1030, 25) == []
    assert judge(monitor, 1045, 35) == []
    (cleared,) = judge(monitor, 1070, 35)
    assert isinstance(cleared, AlertCleared)
    (again,) = judge(monitor, 1100, 40)
    assert isinstance(again, AlertRaised)


def test_a_process_that_counts_anew_is_not_taken_for_one_that_failed() -> None:
    monitor = KvCacheHealthMonitor()
    judge(monitor, 1000, 8)
    assert judge(monitor, 30, 0) == []
    (raised,) = judge(monitor, 60, 1)
    assert isinstance(raised, AlertRaised)


def test_links_are_read_from_what_a_process_serves() -> None:
    metrics = Metrics("prefill-1", "prefill")
    for outcome, count in (("ok", 7), ("failed", 2)):
        metrics.link_transfers.labels("decode-1", outcome).inc(count)
    metrics.link_transfers.labels("decode-2", "ok").inc()
    assert sample_of(A, metrics.expose(0).decode()).links == (("decode-1", 9, 2), ("decode-2", 1, 0))

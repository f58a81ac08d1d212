"""The monitor's judgement: thresholds by name, once per episode, and nothing proven by too few events."""

from dataclasses import replace

import pytest

from kv_core.ids import NodeId
from kv_services.config import HealthSection
from kv_services.metrics import THROUGHPUT_WINDOW_NS, Metrics
from kv_services.monitor.health_state import (
    MIN_EVENTS,
    MIN_TOKENS,
    AlertCleared,
    AlertRaised,
    HealthSample,
    KvCacheHealthMonitor,
)
from kv_services.monitor.sampling import sample_of

D = NodeId("decode-1")
WELL = HealthSample(
    D,
    reachable=True,
    transfers=1_000,
    transfer_failures=0,
    transfer_p99_ms=1.0,
    asked_tokens=MIN_TOKENS,
    hit_ratio=0.9,
)

CROSSED = [
    (
        "kv_transfer_failure_rate",
        replace(WELL, transfers=2_000, transfer_failures=11),
        "1.1% of its last 1000 transfers failed",
    ),
    ("kv_transfer_latency_p99", replace(WELL, transfer_p99_ms=5.1), "5.1 ms"),
    ("kv_staleness_ms", replace(WELL, staleness_ms=11.0), "lacks updates for 11 ms"),
    ("kv_replication_lag", replace(WELL, replication_lag=3, lag_origin="prefill-1"), "3 updates of prefill-1 behind"),
    (
        "kv_cache_hit_ratio",
        replace(WELL, asked_tokens=2 * MIN_TOKENS, hit_ratio=(0.9 + 0.59) / 2),
        f"59% of its last {MIN_TOKENS} prompt tokens were found",
    ),
    ("reachable", HealthSample(D, reachable=False), "does not answer"),
]


@pytest.mark.parametrize(("threshold", "sample", "words"), CROSSED, ids=[case[0] for case in CROSSED])
def test_each_threshold_is_told_once_per_episode_and_names_the_node(
    threshold: str, sample: HealthSample, words: str
) -> None:
    monitor = KvCacheHealthMonitor()
    assert monitor.step(WELL) == []
    (raised,) = monitor.step(sample)
    assert isinstance(raised, AlertRaised)
    assert (raised.node_id, raised.threshold) == (D, threshold)
    assert words in raised.sentence and D in raised.sentence
    assert monitor.step(sample) == []
    assert monitor.alerts() == [raised.sentence]
    assert monitor.step(WELL) == [AlertCleared(D, threshold)]
    assert monitor.alerts() == []


def test_the_defaults_are_the_product_s() -> None:
    limits = HealthSection()
    assert (limits.kv_transfer_failure_rate, limits.kv_staleness_ms, limits.kv_replication_lag) == (0.01, 10.0, 2)
    assert (limits.kv_cache_hit_ratio, limits.kv_transfer_latency_p99_ms) == (0.6, 5.0)


def test_a_threshold_that_is_just_met_is_not_crossed() -> None:
    monitor = KvCacheHealthMonitor()
    edge = replace(WELL, transfer_failures=10, staleness_ms=10.0, replication_lag=2, transfer_p99_ms=5.0, hit_ratio=0.6)
    assert monitor.step(edge) == []


def test_too_few_events_prove_nothing() -> None:
    monitor = KvCacheHealthMonitor()
    few = HealthSample(
        D,
        reachable=True,
        transfers=MIN_EVENTS - 1,
        transfer_failures=19,
        transfer_p99_ms=99.0,
        asked_tokens=1,
        hit_ratio=0,
    )
    assert monitor.step(few) == []


def test_an_episode_ends_when_what_comes_now_is_well_however_bad_the_past_was() -> None:
    monitor = KvCacheHealthMonitor()
    bad = replace(WELL, transfers=100, transfer_failures=50, asked_tokens=10 * MIN_TOKENS, hit_ratio=0.1)
    assert {one.threshold for one in monitor.step(bad)} == {"kv_transfer_failure_rate", "kv_cache_hit_ratio"}
    found = round(0.1 * 10 * MIN_TOKENS) + MIN_TOKENS
    better = replace(bad, transfers=100 + MIN_EVENTS, asked_tokens=11 * MIN_TOKENS, hit_ratio=found / (11 * MIN_TOKENS))
    assert monitor.step(replace(bad, transfers=100 + MIN_EVENTS - 1)) == [], "too few to say"
    assert {one.threshold for one in monitor.step(better)} == {"kv_transfer_failure_rate", "kv_cache_hit_ratio"}
    assert monitor.alerts() == []
    # And begins when what comes now is bad, however well the past was.
    long = replace(WELL, transfers=1_000_000, transfer_failures=50, asked_tokens=10**9, hit_ratio=0.9)
    assert monitor.step(long) == []
    (raised,) = monitor.step(replace(long, transfers=1_000_000 + MIN_EVENTS, transfer_failures=50 + MIN_EVENTS))
    assert "100.0% of its last 20 transfers failed" in raised.sentence if isinstance(raised, AlertRaised) else False


def test_nodes_do_not_share_an_episode() -> None:
    monitor = KvCacheHealthMonitor()
    gone = HealthSample(D, reachable=False)
    assert len(monitor.step(gone)) == 1
    assert len(monitor.step(replace(gone, node_id=NodeId("decode-2")))) == 1
    assert len(monitor.alerts()) == 2


def test_a_sample_is_what_a_process_exposes() -> None:
    metrics = Metrics("decode-1", "decode")
    metrics.found_tokens("local", 300)
    metrics.found_tokens("computed", 100)
    for _ in range(98):
        metrics.transfer_done(0, "shm", 1_000, 2_000_000, 0)
    metrics.transfer_done(0, "shm", 1_000, 40_000_000, 1)
    metrics.transfer_failed("ConnectionLost")
    metrics.lag_versions.labels("prefill-1").set(4)
    metrics.lag_seconds.set(0.25)
    exposed = metrics.expose(1).decode()
    assert 'kv_transfer_bytes_total{transport="shm"} 99000.0' in exposed
    assert "kv_transfer_retries_total 1.0" in exposed
    sample = sample_of(D, exposed)
    assert sample == HealthSample(
        D,
        reachable=True,
        transfers=100,
        transfer_failures=1,
        transfer_p99_ms=40.0,
        staleness_ms=250.0,
        replication_lag=4,
        lag_origin="prefill-1",
        asked_tokens=400,
        hit_ratio=0.75,
    )


def test_the_five_named_metrics_are_there_from_the_start() -> None:
    exposition = Metrics("n", "decode").expose(0).decode()
    for name in (
        "kv_cache_hit_ratio",
        "kv_transfer_latency_p99",
        "kv_cache_utilization_ratio",
        "kv_replication_lag_seconds",
        "kv_transfer_throughput_gbps",
    ):
        assert f"\n{name} 0.0" in exposition


def test_what_moved_long_ago_is_forgotten_though_nobody_reads_the_metrics() -> None:
    metrics = Metrics("decode-1", "decode")
    for second in range(1_000):
        metrics.transfer_done(second * 1_000_000_000, "shm", 1 << 20, 1_000, 0)
    assert len(metrics._moved) <= THROUGHPUT_WINDOW_NS // 1_000_000_000 + 1
    assert (
        f"kv_transfer_throughput_gbps {11 * 8 * (1 << 20) / THROUGHPUT_WINDOW_NS}"
        in metrics.expose(999_000_000_000).decode()
    )

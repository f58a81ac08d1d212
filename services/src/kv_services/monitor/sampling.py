"""Reads a process's Prometheus exposition into a `HealthSample`: the monitor sees what an operator's tools see."""

import math

from prometheus_client.parser import text_string_to_metric_families

from kv_core.ids import NodeId
from kv_services.monitor.health_state import HealthSample


def sample_of(node_id: NodeId, exposition: str) -> HealthSample:
    """The health figures in one process's /metrics.

    Raises:
        ValueError: it is no exposition.
    """
    totals: dict[str, float] = {}
    lag, origin, failures, transfers, asked = 0.0, "", 0.0, 0.0, 0.0
    links: dict[str, tuple[int, int]] = {}
    for family in text_string_to_metric_families(exposition):
        for one in family.samples:
            if not math.isfinite(one.value):
                raise ValueError(f"{one.name} is {one.value}")
            if one.name == "kv_replication_lag_versions" and one.value > lag:
                lag, origin = one.value, one.labels.get("origin", "")
            elif one.name == "kv_transfer_failures_total":
                failures += one.value
            elif one.name == "kv_transfer_seconds_count":
                transfers += one.value
            elif one.name == "kv_link_transfers_total":
                peer, failed = one.labels.get("peer", ""), one.labels.get("outcome") == "failed"
                count, bad = links.get(peer, (0, 0))
                links[peer] = (count + int(one.value), bad + int(one.value) * failed)
            elif one.name == "kv_prefix_tokens_total":
                asked += one.value
            elif not one.labels:
                totals[one.name] = one.value
    return HealthSample(
        node_id=node_id,
        reachable=True,
        transfers=int(transfers + failures),
        transfer_failures=int(failures),
        transfer_p99_ms=totals.get("kv_transfer_latency_p99", 0.0) * 1e3 if transfers else None,
        staleness_ms=totals.get("kv_replication_lag_seconds", 0.0) * 1e3,
        replication_lag=int(lag),
        lag_origin=origin,
        asked_tokens=int(asked),
        hit_ratio=totals.get("kv_cache_hit_ratio") if asked else None,
        links=tuple((peer, *counts) for peer, counts in sorted(links.items())),
    )

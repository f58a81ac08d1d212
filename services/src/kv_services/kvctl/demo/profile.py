"""The demo's cluster: two prefill and two decode nodes, a gateway and a monitor, with thresholds for a slow engine.

A NumPy engine on a few shared cores takes seconds where a GPU takes milliseconds, and a hand-over lasts as long as the
computation that feeds it. The thresholds here say what is still healthy for that; the defaults of the cluster file
stay those of production.
"""

import os
from pathlib import Path
from typing import Final

from kv_services.config import BusSection, ClusterConfig, HealthSection, LimitsSection, ModelSection
from kv_services.launch.local_config import local_config
from kv_services.launch.ports import PortReservation

MAX_TOKENS: Final = 32
"""Length of an answer at most."""

CONCURRENCY: Final = 4
SLOTS: Final = 256
"""KV blocks of each node: eight requests of the demo at once, and room for what is shared."""


def demo_config(ports: PortReservation, model: Path | None) -> ClusterConfig:
    """The cluster file of the demo."""
    # Every token is compared, and a prefix found in the cache is cut elsewhere than one computed whole: in fp32 the
    # rounding of that stays far below any gap between two tokens.
    section = ModelSection(kv_dtype="fp32")
    if model is not None:
        section = ModelSection(id=model.stem.lower()[:128], path=str(model.absolute()), kv_dtype="fp32")
    return local_config(
        ports,
        name="demo",
        prefill=2,
        decode=2,
        slots=SLOTS,
        compute_threads=max(1, len(os.sched_getaffinity(0)) // 4),
        model=section,
        bus=BusSection(heartbeat_interval_ms=500, suspect_after_ms=5_000, dead_after_ms=20_000),
        health=HealthSection(
            kv_transfer_failure_rate=0.01,
            kv_staleness_ms=2_000.0,
            kv_replication_lag=512,
            kv_transfer_latency_p99_ms=60_000.0,
            kv_cache_hit_ratio=0.1,
        ),
        limits=LimitsSection(request_timeout_s=600.0, lease_ms=60_000),
    )

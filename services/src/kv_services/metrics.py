"""Counts what the processes do, in one file: no other module knows the exporter.

The five `kv_*` gauges with fixed names are what operators alert on; the rest explains them. Percentiles are taken over
the last `TRANSFER_WINDOW` transfers, so that a quiet process shows its recent past rather than nothing.
Every process has its own registry, so that several in one test do not meet.
"""

from collections import deque
from typing import Final

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

TRANSFER_WINDOW: Final = 1024
THROUGHPUT_WINDOW_NS: Final = 10_000_000_000
CONTENT_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"

_SECONDS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)


class Metrics:
    """The counters and gauges of one process."""

    def __init__(self, node: str, role: str) -> None:
        self.registry = CollectorRegistry()
        reg = self.registry
        self._latencies_ns: deque[int] = deque(maxlen=TRANSFER_WINDOW)
        self._moved: deque[tuple[int, int]] = deque()
        self._hit_tokens = self._asked_tokens = 0
        self.failures = self.transfers = 0

        Gauge("kv_build_info", "Who this process is", ["node", "role"], registry=reg).labels(node, role).set(1)
        self.hit_ratio = Gauge(
            "kv_cache_hit_ratio", "Prompt tokens whose KV was found, over all prompt tokens asked for", registry=reg
        )
        self.latency_p99 = Gauge(
            "kv_transfer_latency_p99", "Seconds from first to last verified byte, 99th percentile", registry=reg
        )
        self.utilization = Gauge(
            "kv_cache_utilization_ratio", "Slots that hold KV (cached or pinned) over all slots", registry=reg
        )
        self.lag_seconds = Gauge(
            "kv_replication_lag_seconds", "Age of the oldest update known of but not applied", registry=reg
        )
        self.lag_versions = Gauge(
            "kv_replication_lag_versions", "Updates of an origin not applied here", ["origin"], registry=reg
        )
        self.throughput = Gauge(
            "kv_transfer_throughput_gbps", "Verified KV gigabits a second over the last ten seconds", registry=reg
        )

        self.prefix_tokens = Counter(
            "kv_prefix_tokens", "Prompt tokens by where their KV came from", ["source"], registry=reg
        )
        self.prefix_waits = Counter(
            "kv_prefix_waits",
            "Requests that waited for a prefix another node was computing, by what they found then",
            ["outcome"],
            registry=reg,
        )
        self.evicted_ahead = Counter("kv_evicted_ahead", "Blocks evicted before their slots were needed", registry=reg)
        self.retained = Gauge("kv_retained_blocks", "Blocks that requests asked to be kept for a while", registry=reg)
        self.tenant_blocks = Gauge(
            "kv_tenant_blocks", "Blocks in memory of each tenant, used or cached", ["tenant"], registry=reg
        )
        self.transfer_seconds = Histogram(
            "kv_transfer_seconds", "Duration of transfers", ["transport"], buckets=_SECONDS, registry=reg
        )
        self.transfer_bytes = Counter("kv_transfer_bytes", "Verified KV bytes moved", ["transport"], registry=reg)
        self.transfer_retries = Counter("kv_transfer_retries", "Transfer units posted again", registry=reg)
        self.transfer_failures = Counter("kv_transfer_failures", "Transfers that failed", ["error"], registry=reg)
        self.slots = Gauge("kv_slots", "Slots of the arena by state", ["state"], registry=reg)
        self.tier_blocks = Counter(
            "kv_tier_blocks", "Blocks of slower tiers by what happened to them", ["tier", "event"], registry=reg
        )
        self.tier_load_seconds = Histogram(
            "kv_tier_load_seconds", "Duration of loads", ["tier"], buckets=_SECONDS, registry=reg
        )
        self.tier_stored = Gauge("kv_tier_stored_blocks", "Blocks that a slower tier holds", ["tier"], registry=reg)
        self.tier_bytes = Gauge("kv_tier_used_bytes", "Bytes that a slower tier takes", ["tier"], registry=reg)
        self.requests = Counter("kv_requests", "Requests by how they ended", ["outcome"], registry=reg)
        self.request_retries = Counter("kv_request_retries", "Attempts that were followed by another", registry=reg)
        self.running = Gauge("kv_running_requests", "Requests being worked on", registry=reg)
        self.waiting = Gauge("kv_waiting_requests", "Requests waiting for slots", registry=reg)
        self.preemptions = Counter("kv_preemptions", "Requests whose slots were taken back", registry=reg)
        self.shards = Gauge("kv_shards", "Pieces of sequences held for requests larger than a node", registry=reg)
        self.shard_calls = Counter("kv_shard_calls", "Calls on pieces that were carried out", registry=reg)
        self.sharded_running = Gauge(
            "kv_sharded_requests_running", "Requests larger than a node that are coordinated here", registry=reg
        )
        self.tokens = Counter("kv_tokens", "Tokens computed", ["phase"], registry=reg)
        self.ttft = Histogram("kv_time_to_first_token_seconds", "At the gateway", buckets=_SECONDS, registry=reg)
        self.hot_copies = Counter("kv_hot_copies", "Hot prefixes that were copied to another node", registry=reg)
        self.members = Gauge("kv_members", "Members by what is known of them", ["liveness"], registry=reg)
        self.loop_lag = Gauge("kv_loop_lag_seconds", "Longest recent delay of the event loop", registry=reg)
        self.bus_refused = Gauge("kv_bus_refused", "Bus messages refused since start", registry=reg)
        self.alerts = Counter("kv_alerts", "Episodes in which a threshold was crossed", ["threshold"], registry=reg)
        self.recoveries = Counter("kv_recoveries", "Recovery actions carried out", ["action"], registry=reg)
        self.hardware_faults = Counter(
            "kv_hardware_faults", "Units to a peer whose bytes failed their checksum", ["peer"], registry=reg
        )
        self.link_transfers = Counter(
            "kv_link_transfers", "Transfers to or from a peer by how they ended", ["peer", "outcome"], registry=reg
        )

    def found_tokens(self, source: str, num_tokens: int) -> None:
        """Count prompt tokens by source: `local`, `peer`, `decode` (all hits) or `computed`."""
        self.prefix_tokens.labels(source).inc(num_tokens)
        self._asked_tokens += num_tokens
        if source != "computed":
            self._hit_tokens += num_tokens
        if self._asked_tokens:
            self.hit_ratio.set(self._hit_tokens / self._asked_tokens)

    def transfer_done(self, now_ns: int, transport: str, nbytes: int, duration_ns: int, retries: int) -> None:
        """Count a transfer whose every byte was verified."""
        self.transfers += 1
        self.transfer_seconds.labels(transport).observe(duration_ns / 1e9)
        self.transfer_bytes.labels(transport).inc(nbytes)
        self.transfer_retries.inc(retries)
        self._latencies_ns.append(duration_ns)
        self._moved.append((now_ns, nbytes))
        self._forget_moved(now_ns)

    def transfer_failed(self, error: str) -> None:
        """Count a transfer that did not end in verified bytes."""
        self.failures += 1
        self.transfers += 1
        self.transfer_failures.labels(error).inc()

    def transfer_p99_ns(self) -> int:
        """The 99th percentile of recent transfer durations; 0 without any."""
        if not self._latencies_ns:
            return 0
        ordered = sorted(self._latencies_ns)
        return ordered[min(len(ordered) - 1, (len(ordered) * 99) // 100)]

    def expose(self, now_ns: int) -> bytes:
        """The registry in Prometheus' text form, with the windowed gauges brought up to date."""
        self._forget_moved(now_ns)
        moved = sum(nbytes for _, nbytes in self._moved)
        self.throughput.set(moved * 8 / THROUGHPUT_WINDOW_NS)
        self.latency_p99.set(self.transfer_p99_ns() / 1e9)
        return generate_latest(self.registry)

    def _forget_moved(self, now_ns: int) -> None:
        """Drop what lies before the window: also when nobody ever reads the metrics, nothing piles up."""
        while self._moved and now_ns - self._moved[0][0] > THROUGHPUT_WINDOW_NS:
            self._moved.popleft()

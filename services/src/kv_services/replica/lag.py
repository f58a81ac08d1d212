"""What the gauges of replication lag say: how many updates of whom are missing here, and for how long.

G1: an age is that of an update which is still missing: once everything is applied that was known to be missing at some
moment, the age begins anew, however much came meanwhile.
G2: an origin whose life is over lags no more.
"""

from collections.abc import Mapping

from kv_consistency.version_vector import Origin, VersionVector
from kv_core.ids import NodeId
from kv_services.metrics import Metrics


class LagGauges:
    """Keeps `kv_replication_lag_versions` and `kv_replication_lag_seconds` of one process."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self._told: dict[NodeId, int] = {}
        self._awaited: dict[Origin, tuple[int, int]] = {}
        """Of an origin that lags: its last update known when it was first looked for, and when that was."""

    def measure(self, lag: Mapping[Origin, int], applied: VersionVector, now_ns: int) -> None:
        """Take a look.

        Args:
            lag: of each living origin, its updates known to exist and not applied here.
            applied: what is.
        """
        awaited = {}
        for origin, versions in lag.items():
            if versions:
                last, since_ns = self._awaited.get(origin, (0, now_ns))
                awaited[origin] = (last, since_ns) if last > applied[origin] else (applied[origin] + versions, now_ns)
        self._awaited = awaited
        oldest_ns = min((since_ns for _, since_ns in awaited.values()), default=now_ns)
        self._metrics.lag_seconds.set((now_ns - oldest_ns) / 1e9)
        by_node = {origin.node: versions for origin, versions in lag.items()}
        for node in self._told.keys() | by_node.keys():
            versions = by_node.get(node, 0)
            if self._told.get(node) != versions:
                self._metrics.lag_versions.labels(node).set(versions)
        self._told = by_node

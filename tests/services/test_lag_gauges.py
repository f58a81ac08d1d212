"""What the monitor judges replication by: what is missing now, and since when."""

from kv_consistency.version_vector import Origin, VersionVector
from kv_core.ids import Incarnation, NodeId
from kv_services.metrics import Metrics
from kv_services.replica.lag import LagGauges

A, B = Origin(NodeId("a"), Incarnation(1)), Origin(NodeId("b"), Incarnation(1))
SECOND = 1_000_000_000


class Looks:
    """Gauges, and what they show after each look."""

    def __init__(self) -> None:
        self.metrics = Metrics("n", "decode")
        self.gauges = LagGauges(self.metrics)

    def look(self, second: int, **updates: tuple[int, int]) -> float:
        """Of each origin how many updates are applied, and how many are known; gives the age in seconds."""
        named = {{"a": A, "b": B}[name]: counts for name, counts in updates.items()}
        lag = {origin: known - applied for origin, (applied, known) in named.items()}
        vector = VersionVector({origin: applied for origin, (applied, _) in named.items() if applied})
        self.gauges.measure(lag, vector, second * SECOND)
        return self.shown("kv_replication_lag_seconds")

    def shown(self, name: str) -> float:
        (line,) = [line for line in self.metrics.expose(0).decode().splitlines() if line.startswith(name + " ")]
        return float(line.rpartition(" ")[2])


def test_an_update_that_stays_missing_ages() -> None:
    looks = Looks()
    assert looks.look(0, a=(3, 3)) == 0
    assert looks.look(1, a=(3, 5)) == 0
    assert looks.look(2, a=(3, 9)) == 1
    assert looks.look(4, a=(4, 9)) == 3, "of the two that were missing at first one still is"
    assert looks.look(5, a=(9, 9)) == 0


def test_a_stream_of_updates_each_of_which_is_soon_applied_is_not_old() -> None:
    looks = Looks()
    assert [looks.look(second, a=(second, second + 1)) for second in range(1, 60)] == [0] * 59


def test_the_oldest_of_all_origins_counts() -> None:
    looks = Looks()
    looks.look(0, a=(1, 2), b=(5, 5))
    assert looks.look(3, a=(1, 2), b=(5, 6)) == 3
    assert looks.look(4, a=(2, 2), b=(5, 6)) == 1


def test_who_is_gone_lags_no_more() -> None:
    looks = Looks()
    looks.look(0, a=(1, 6), b=(1, 1))
    assert looks.shown('kv_replication_lag_versions{origin="a"}') == 5
    assert looks.look(9, b=(1, 1)) == 0
    assert looks.shown('kv_replication_lag_versions{origin="a"}') == 0

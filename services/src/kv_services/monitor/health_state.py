"""Decides which thresholds are crossed, once per episode, naming the node or link.

`KvCacheHealthMonitor` is fed one `HealthSample` per process and judges it against `HealthSection`; it knows no HTTP,
no clock and no metric. `diagnose_transfer_failure` is kv-transport's table, offered here because operators look for
it here.

H1: an alert begins when its threshold is crossed and ends when it is no longer; in between it is told once.
H2: too few events prove nothing: a rate is judged from `MIN_EVENTS` on.
H3: a node that is gone has no alerts of its own but that it is gone.
H4: a process, a link and the hits are judged by the latest `MIN_EVENTS` transfers or `MIN_TOKENS` tokens, or more, not
    by their whole past, so that an episode begins when it does and ends.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Final

from kv_core.ids import NodeId
from kv_services.config import HealthSection
from kv_transport.recovery import RecoveryAction, TransferTask
from kv_transport.recovery import diagnose_transfer_failure as _diagnose

MIN_EVENTS: Final = 20
MIN_TOKENS: Final = 2_000


@dataclass(frozen=True, slots=True)
class HealthSample:
    """What one process reported. Rates are cumulative counts; `None` where a role has no such figure."""

    node_id: NodeId
    reachable: bool
    transfers: int = 0
    transfer_failures: int = 0
    transfer_p99_ms: float | None = None
    staleness_ms: float = 0.0
    replication_lag: int = 0
    lag_origin: str = ""
    asked_tokens: int = 0
    hit_ratio: float | None = None
    links: tuple[tuple[str, int, int], ...] = ()
    """(peer, transfers, failures among them) of each link, since the process started."""
    cause: str = ""
    """Why it is not reachable."""


@dataclass(frozen=True, slots=True)
class AlertRaised:
    """A threshold was crossed."""

    node_id: NodeId
    threshold: str
    sentence: str


@dataclass(frozen=True, slots=True)
class AlertCleared:
    """It no longer is."""

    node_id: NodeId
    threshold: str


HealthEffect = AlertRaised | AlertCleared


@dataclass(slots=True)
class _Window:
    """Where two counts stood when they were last judged, and what the judgement was."""

    total: int = 0
    part: int = 0
    verdict: str = ""

    def judge(self, total: int, part: int, least: int, sentence: Callable[[float, int], str]) -> str:
        """The verdict of `sentence(share, number)` on what came since the last one, once that is enough."""
        if total < self.total or part < self.part:
            # The process began a new life and counts anew.
            self.total = self.part = 0
        number = total - self.total
        if number >= least:
            share = (part - self.part) / number
            self.total, self.part, self.verdict = total, part, sentence(share, number)
        return self.verdict


@dataclass(slots=True)
class KvCacheHealthMonitor:
    """The health of a cluster against its thresholds.

    Args:
        thresholds: from the cluster file; the defaults are the product's.
    """

    thresholds: HealthSection = field(default_factory=HealthSection)
    _up: dict[tuple[NodeId, str], str] = field(default_factory=dict)
    _windows: dict[tuple[NodeId, str], "_Window"] = field(default_factory=dict)

    def step(self, sample: HealthSample) -> list[HealthEffect]:
        """Judge one process' report."""
        crossed = self._crossed(sample)
        effects: list[HealthEffect] = []
        for threshold, sentence in crossed.items():
            key = (sample.node_id, threshold)
            if key not in self._up:
                effects.append(AlertRaised(sample.node_id, threshold, sentence))
            self._up[key] = sentence
        for key in [key for key in self._up if key[0] == sample.node_id and key[1] not in crossed]:
            del self._up[key]
            effects.append(AlertCleared(*key))
        return effects

    def forget(self, node_id: NodeId) -> list[HealthEffect]:
        """A process is no member any more: what was said of it is over."""
        cleared: list[HealthEffect] = [AlertCleared(*key) for key in self._up if key[0] == node_id]
        self._up = {key: sentence for key, sentence in self._up.items() if key[0] != node_id}
        self._windows = {key: window for key, window in self._windows.items() if key[0] != node_id}
        return cleared

    def alerts(self) -> list[str]:
        """What is crossed now, one sentence each."""
        return list(self._up.values())

    @staticmethod
    def diagnose_transfer_failure(task: TransferTask, error: BaseException) -> RecoveryAction:
        """What to do about a failed transfer; the same table that the nodes act by."""
        return _diagnose(task, error)

    def _window(self, node: NodeId, what: str) -> _Window:
        return self._windows.setdefault((node, what), _Window())

    def _failure_rates(self, sample: HealthSample) -> Iterator[tuple[str, str]]:
        """Of the process and of each of its links: the threshold's name and what is wrong; nothing when it is well."""
        node, allowed = sample.node_id, self.thresholds.kv_transfer_failure_rate

        def of_all(rate: float, number: int) -> str:
            told = f"{node}: {rate:.1%} of its last {number} transfers failed, the threshold is {allowed:.1%}"
            return told if rate > allowed else ""

        window = self._window(node, "transfers")
        yield "kv_transfer_failure_rate", window.judge(sample.transfers, sample.transfer_failures, MIN_EVENTS, of_all)
        for peer, transfers, failures in sample.links:

            def of_link(rate: float, number: int, peer: str = peer) -> str:
                told = f"{node} and {peer}: {rate:.1%} of their last {number} transfers failed, the threshold is"
                return f"{told} {allowed:.1%}" if rate > allowed else ""

            verdict = self._window(node, f"link {peer}").judge(transfers, failures, MIN_EVENTS, of_link)
            yield f"kv_transfer_failure_rate of {peer}", verdict

    def _hits(self, sample: HealthSample) -> str:
        """What is wrong with the share of prompt tokens that were found; empty when nothing is."""
        node, wanted = sample.node_id, self.thresholds.kv_cache_hit_ratio
        if sample.hit_ratio is None:
            return ""

        def sentence(ratio: float, number: int) -> str:
            told = f"{node}: {ratio:.0%} of its last {number} prompt tokens were found, the goal is {wanted:.0%}"
            return told if ratio < wanted else ""

        found = round(sample.hit_ratio * sample.asked_tokens)
        return self._window(node, "hits").judge(sample.asked_tokens, found, MIN_TOKENS, sentence)

    def _crossed(self, sample: HealthSample) -> dict[str, str]:
        node, limits = sample.node_id, self.thresholds
        if not sample.reachable:
            return {"reachable": f"{node} does not answer" + (f": {sample.cause}" if sample.cause else "")}
        crossed = {threshold: verdict for threshold, verdict in self._failure_rates(sample) if verdict}
        if sample.transfer_p99_ms is not None and sample.transfers >= MIN_EVENTS:
            goal = limits.kv_transfer_latency_p99_ms
            if sample.transfer_p99_ms > goal:
                crossed["kv_transfer_latency_p99"] = (
                    f"{node}: 1 % of its transfers take {sample.transfer_p99_ms:.1f} ms or more, the goal is {goal:g}"
                )
        if sample.staleness_ms > limits.kv_staleness_ms:
            crossed["kv_staleness_ms"] = (
                f"{node} lacks updates for {sample.staleness_ms:.0f} ms, the threshold is {limits.kv_staleness_ms:g} ms"
            )
        if sample.replication_lag > limits.kv_replication_lag:
            crossed["kv_replication_lag"] = (
                f"{node} is {sample.replication_lag} updates of {sample.lag_origin} behind,"
                f" the threshold is {limits.kv_replication_lag}"
            )
        if few := self._hits(sample):
            crossed["kv_cache_hit_ratio"] = few
        return crossed

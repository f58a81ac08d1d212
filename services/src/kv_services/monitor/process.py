"""The monitor's process: asks every other process for its metrics at a steady pace, judges, tells once per episode.

It is an observer: a cluster runs the same without it, and it learns everything anew after a restart.
"""

import asyncio
import html
import logging
from collections.abc import Sequence
from typing import Final

import aiohttp

from kv_bus.supervisor import ChildSpec
from kv_core.ids import NodeId
from kv_services.config import NodeConfig
from kv_services.http_body import read_whole
from kv_services.monitor.health_state import (
    AlertCleared,
    AlertRaised,
    HealthEffect,
    HealthSample,
    KvCacheHealthMonitor,
)
from kv_services.monitor.sampling import sample_of
from kv_services.process import Base, keep

PERIOD_S: Final = 1.0
TIMEOUT_S: Final = 2.0
EXPOSITION_BYTES_MAX: Final = 4 << 20

_log = logging.getLogger(__name__)


class Watch:
    """Asks and judges. A supervised child: `start`, `run`, `close`."""

    def __init__(self, base: Base) -> None:
        self._base = base
        self.health = KvCacheHealthMonitor(base.config.health)
        self.samples: dict[str, HealthSample] = {}
        self._closed: asyncio.Event | None = None

    async def start(self) -> None:
        self._closed = asyncio.Event()

    async def run(self) -> None:
        assert self._closed is not None
        keys = self._base.config.cluster.operator_keys
        headers = {"Authorization": f"Bearer {keys[0]}"} if keys else {}
        timeout = aiohttp.ClientTimeout(total=TIMEOUT_S)
        async with aiohttp.ClientSession(timeout=timeout, headers=headers) as session:
            while not self._closed.is_set():
                others = [node for node in self._base.processes() if node.id != self._base.node.id]
                self._forget_those_gone(others)
                for sample in await asyncio.gather(*(self._ask(session, node) for node in others)):
                    self._judge(sample)
                try:
                    await asyncio.wait_for(self._closed.wait(), PERIOD_S)
                except TimeoutError:
                    continue

    async def close(self) -> None:
        if self._closed is not None:
            self._closed.set()

    async def _ask(self, session: aiohttp.ClientSession, node: NodeConfig) -> HealthSample:
        try:
            async with session.get(f"{node.http_url}/metrics") as response:
                if response.status == 200:
                    return sample_of(node.node_id, (await read_whole(response.content, EXPOSITION_BYTES_MAX)).decode())
                cause = f"it answers {response.status}"
        except (aiohttp.ClientError, TimeoutError, ValueError) as error:
            cause = str(error) or type(error).__name__
        return HealthSample(node.node_id, reachable=False, cause=cause)

    def _forget_those_gone(self, others: Sequence[NodeConfig]) -> None:
        """Whoever is no member any more has no alerts: nobody will ask it again."""
        names = {node.id for node in others}
        for name in [name for name in self.samples if name not in names]:
            del self.samples[name]
            self._tell(self.health.forget(NodeId(name)))

    def _judge(self, sample: HealthSample) -> None:
        before = self.samples.get(sample.node_id)
        self.samples[sample.node_id] = sample
        if before is None and not sample.reachable:
            # Still starting: silence before the first answer is no fault.
            del self.samples[sample.node_id]
            return
        self._tell(self.health.step(sample))

    def _tell(self, effects: Sequence[HealthEffect]) -> None:
        for effect in effects:
            match effect:
                case AlertRaised(node_id, threshold, sentence):
                    _log.warning("alert raised node=%s threshold=%s: %s", node_id, threshold, sentence)
                    self._base.metrics.alerts.labels(threshold).inc()
                case AlertCleared(node_id, threshold):
                    _log.info("alert cleared node=%s threshold=%s", node_id, threshold)

    def page(self) -> bytes:
        """A page for people: one row a process, alerts on top."""
        rows = "".join(
            f"<tr><td>{html.escape(sample.node_id)}</td><td>{'answers' if sample.reachable else 'silent'}</td>"
            f"<td>{sample.transfers}</td><td>{sample.transfer_failures}</td><td>{_number(sample.transfer_p99_ms)}</td>"
            f"<td>{sample.replication_lag}</td><td>{_percent(sample.hit_ratio)}</td></tr>"
            for sample in self.samples.values()
        )
        alerts = "".join(f"<li>{html.escape(alert)}</li>" for alert in self.health.alerts()) or "<li>none</li>"
        name = html.escape(self._base.config.cluster.name)
        return _PAGE.format(name=name, alerts=alerts, rows=rows).encode()


_PAGE: Final = """<!doctype html><html lang="en"><head><meta charset="utf-8"><meta http-equiv="refresh" content="2">
<title>{name}</title><style>body{{font-family:system-ui,sans-serif;margin:2rem;color:#222}}
table{{border-collapse:collapse}}
td,th{{padding:.3rem .8rem;border-bottom:1px solid #ccc;text-align:left}}</style></head>
<body><h1>Cluster {name}</h1><h2>Alerts</h2><ul>{alerts}</ul><h2>Processes</h2><table>
<tr><th>process</th><th>health</th><th>transfers</th><th>failed</th>
<th>p99 ms</th><th>updates behind</th><th>hits</th></tr>
{rows}</table></body></html>
"""


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.1f}"


def _percent(value: float | None) -> str:
    return "" if value is None else f"{value:.0%}"


def build(base: Base) -> list[ChildSpec]:
    """The children of a monitor."""
    watch = Watch(base)
    base.alerts = watch.health.alerts
    page = {"/": ("text/html; charset=utf-8", watch.page)}
    return [keep("watch", watch), keep("http", base.side_http(page))]

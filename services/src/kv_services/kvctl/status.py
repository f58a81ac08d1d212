"""`kvctl status`: every process of a cluster file, asked at once, as a table or as JSON.

A process that does not answer is a row that says so, never a failure of the whole: the table is for the day on which
something is broken.
"""

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import aiohttp
import msgspec
from rich.console import Group
from rich.live import Live
from rich.table import Table

from kv_services.config import ClusterConfig, NodeConfig
from kv_services.config_file import load_config
from kv_services.http_body import read_whole
from kv_services.kvctl.output import console, messages, print_json
from kv_services.launch.signals import run_until_signal
from kv_services.membership.discovery import listed_nodes
from kv_services.membership.etcd_client import EtcdError
from kv_services.status_report import StatusReport, decode_status

REQUEST_TIMEOUT_S: Final = 3.0
STATUS_BYTES_MAX: Final = 4 << 20
WELL: Final = "ready"

_COLOURS: Final = {"ready": "green", "starting": "yellow", "draining": "yellow", "degraded": "yellow"}


class NodeStatus(msgspec.Struct, frozen=True):
    """The answer of one process, or why there is none."""

    node: NodeConfig
    report: StatusReport | None
    problem: str = ""

    @property
    def well(self) -> bool:
        """Whether it answered and has nothing to complain of."""
        return self.report is not None and self.report.state == WELL


def run(file: Path, as_json: bool, every_s: float | None) -> int:
    """Show the status once, or again and again; 1 when a process is not well (of the last time shown).

    Raises:
        ConfigError: the file is wrong.
    """
    config = load_config(file)
    if every_s is None:
        return run_until_signal(lambda hurry: _once(config, as_json))
    return run_until_signal(lambda hurry: _watch(config, as_json, every_s))


async def _once(config: ClusterConfig, as_json: bool) -> int:
    rows = await ask_all(config)
    if as_json:
        print_json(as_object(config, rows))
    else:
        console().print(render(config, rows))
    return 0 if all(row.well for row in rows) else 1


async def _watch(config: ClusterConfig, as_json: bool, every_s: float) -> int:
    if as_json:
        while True:
            print_json(as_object(config, await ask_all(config)))
            await asyncio.sleep(every_s)
    with Live(console=console(), auto_refresh=False) as live:
        while True:
            live.update(render(config, await ask_all(config)), refresh=True)
            await asyncio.sleep(every_s)


async def ask_all(config: ClusterConfig) -> list[NodeStatus]:
    """Ask every process at once; in the file's order, then those that only etcd lists."""
    nodes = {node.id: node for node in config.nodes}
    if config.cluster.discovery == "etcd":
        try:
            nodes |= {name: node for name, node in (await listed_nodes(config)).items() if name not in nodes}
        except EtcdError as error:
            messages().print(f"only the processes of the file: {error}")
    keys = config.cluster.operator_keys
    headers = {"Authorization": f"Bearer {keys[0]}"} if keys else {}
    timeout = aiohttp.ClientTimeout(total=REQUEST_TIMEOUT_S)
    async with aiohttp.ClientSession(timeout=timeout, headers=headers) as session:
        return await asyncio.gather(*(_ask(session, node) for node in nodes.values()))


async def _ask(session: aiohttp.ClientSession, node: NodeConfig) -> NodeStatus:
    try:
        async with session.get(f"{node.http_url}/status") as response:
            body = await read_whole(response.content, STATUS_BYTES_MAX)
            if response.status != 200:
                asks = response.status in (401, 403)
                why = ": it asks for one of its own cluster.operator_keys" if asks else ""
                return NodeStatus(node, None, f"answers {response.status}{why}")
        report = decode_status(body)
    except (aiohttp.ClientConnectorError, TimeoutError) as error:
        return NodeStatus(node, None, why_silent(error, REQUEST_TIMEOUT_S))
    except (aiohttp.ClientError, msgspec.DecodeError) as error:
        return NodeStatus(node, None, f"wrong answer: {error}")
    if report.node != node.id:
        return NodeStatus(node, None, f"another process answers: {report.node}")
    return NodeStatus(node, report)


def why_silent(error: Exception, timeout_s: float) -> str:
    """Why a process gave no answer, for people."""
    match error:
        case aiohttp.ClientConnectorError():
            return "does not listen"
        case TimeoutError():
            return f"no answer within {timeout_s:g} s"
        case _:
            return str(error) or type(error).__name__


def as_object(config: ClusterConfig, rows: Sequence[NodeStatus]) -> dict[str, object]:
    """What `--json` prints."""
    return {
        "cluster": config.cluster.name,
        "well": all(row.well for row in rows),
        "nodes": [
            {"node": row.node.id, "role": row.node.role.value, "url": row.node.http_url, "problem": row.problem}
            | (msgspec.to_builtins(row.report) if row.report else {})
            for row in rows
        ],
    }


def render(config: ClusterConfig, rows: Sequence[NodeStatus]) -> Group:
    """The table, and below it what is wrong."""
    titles = ("node", "role", "health", "slots free/cached/pinned", "tiers", "running", "waiting", "transport")
    table = Table(*titles, "address")
    for row in rows:
        table.add_row(row.node.id, row.node.role.value, *_cells(row), row.node.http_url)
    notes = [f"{row.node.id}: {alert}" for row in rows if row.report for alert in row.report.alerts]
    notes += _pieces(rows)
    notes += _disagreements(rows)
    notes += _mixed_wires(rows)
    well = sum(row.well for row in rows)
    return Group(table, *notes, f"{well} of {len(rows)} processes of {config.cluster.name!r} are well")


def _cells(row: NodeStatus) -> tuple[str, str, str, str, str, str]:
    report = row.report
    if report is None:
        return f"[red]{row.problem}[/red]", "", "", "", "", ""
    colour = _COLOURS[report.state]
    slots = ""
    if report.slots is not None:
        slots = f"{report.slots.free} / {report.slots.cached} / {report.slots.pinned} of {report.slots.total}"
        if report.slots.quarantined:
            slots += f", {report.slots.quarantined} quarantined"
    by_transport: dict[str, int] = {}
    for transport in report.transports.values():
        by_transport[transport] = by_transport.get(transport, 0) + 1
    used = ", ".join(f"{name} to {count}" for name, count in sorted(by_transport.items()))
    tiers = ", ".join(
        f"{name} {tier.blocks} of {tier.limit}{', [red]medium full[/red]' if tier.full else ''}"
        for name, tier in report.tiers.items()
    )
    return f"[{colour}]{report.state}[/{colour}]", slots, tiers, str(report.running), str(report.waiting), used


def _pieces(rows: Sequence[NodeStatus]) -> list[str]:
    """Requests that several nodes hold, each with where its pieces lie."""
    held: dict[tuple[str, int, str], list[str]] = {}
    for row in rows:
        for shard in row.report.shards if row.report else ():
            where = f"{row.node.id} layers {shard.layers} tokens {shard.tokens} ({shard.slots} slots)"
            held.setdefault((shard.request, shard.epoch, shard.coordinator), []).append(where)
    return [
        f"{request} attempt {epoch}, coordinated by {coordinator}, is held in pieces: {'; '.join(pieces)}"
        for (request, epoch, coordinator), pieces in sorted(held.items())
    ]


def _disagreements(rows: Sequence[NodeStatus]) -> list[str]:
    """Members that one process does not hold for alive."""
    return [
        f"{row.node.id} holds {member} for {liveness}"
        for row in rows
        if row.report
        for member, liveness in sorted(row.report.members.items())
        if liveness != "alive"
    ]


def _mixed_wires(rows: Sequence[NodeStatus]) -> list[str]:
    """Who speaks which wire, while they differ."""
    by_wire: dict[str, list[str]] = {}
    for row in rows:
        if row.report and row.report.wire:
            by_wire.setdefault(row.report.wire, []).append(row.node.id)
    if len(by_wire) < 2:
        return []
    told = "; ".join(f"{wire} {', '.join(nodes)}" for wire, nodes in sorted(by_wire.items()))
    return [f"an upgrade is under way, these wire versions work together: {told}"]

"""`kvctl drain`, `resume`, `rebalance` and `role`: what an operator has nodes do, and how far they are.

Everything goes by the nodes' side HTTP ports with the cluster file's first operator key; a node refuses without one.
"""

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

import aiohttp
import msgspec
from rich.table import Table

from kv_core.errors import KVError
from kv_services.config import ClusterConfig, NodeConfig, Role
from kv_services.config_file import load_config
from kv_services.http_body import read_whole
from kv_services.kvctl.output import console, human_bytes, messages, print_json
from kv_services.kvctl.status import NodeStatus, ask_all, why_silent
from kv_services.launch.signals import run_until_signal
from kv_services.sizes import parse_bytes
from kv_services.status_report import MoveCounts

ASK_TIMEOUT_S: Final = 10.0
ANSWER_BYTES_MAX: Final = 1 << 20
POLL_S: Final = 0.5
SILENT_MAX: Final = 20
"""Answers that a node may owe in a row before it is given up: ten seconds."""


class OperationRefusedError(KVError):
    """A node does not do what it was asked to."""

    code = 7060
    template = "{node} refuses: {cause}"


class SilentNodeError(KVError):
    """A node cannot be asked."""

    code = 7062
    template = "{node} at {url}: {cause}; kvctl status says which processes run"


class RateError(KVError):
    """A rate that cannot be read."""

    code = 7061
    template = "--rate {rate!r}: {cause}"


def drain(file: Path, node_id: str, rate: str, as_json: bool, resume: bool) -> int:
    """Have a node leave, and wait until it is safe to stop; or have it stay after all.

    Raises:
        KVError: the file, the node or the rate is wrong, or the node refuses.
    """
    config, body = load_config(file), _pace(rate)
    return run_until_signal(lambda hurry: _drain(config, node_id, body, as_json, resume))


def rebalance(file: Path, rate: str, watch: bool, as_json: bool) -> int:
    """Have all nodes share their blocks by capacity; with `watch`, wait until they have.

    Raises:
        KVError: as `drain`.
    """
    config, body = load_config(file), _pace(rate)
    return run_until_signal(lambda hurry: _rebalance(config, body, watch, as_json))


def role(file: Path, node_id: str, new: str) -> int:
    """Have a node take the other role.

    Raises:
        KVError: as `drain`.
    """
    config = load_config(file)

    async def change(hurry: asyncio.Event) -> int:
        node = await _find(config, node_id)
        if node.role not in (Role.PREFILL, Role.DECODE):
            raise OperationRefusedError(node=node_id, cause=f"a {node.role.value} stays one")
        await _post(config, node, "/role", msgspec.json.encode({"role": new}))
        console().print(f"{node_id} is a {new} node from now on; what it had begun it finishes")
        return 0

    return run_until_signal(change)


async def _drain(config: ClusterConfig, node_id: str, body: bytes, as_json: bool, resume: bool) -> int:
    node = await _find(config, node_id)
    if not node.role.holds_kv:
        raise OperationRefusedError(node=node_id, cause=f"a {node.role.value} holds no KV, so SIGTERM is all it needs")
    if resume:
        await _post(config, node, "/resume", b"")
        messages().print(f"{node_id} takes work again")
        return 0
    await _post(config, node, "/drain", body)
    (counts,) = (await _follow(config, [node_id], lambda found: found.safe_to_stop, as_json)).values()
    if counts.state == "failed":
        raise OperationRefusedError(node=node_id, cause=counts.problem)
    if not as_json:
        out = console()
        for name in counts.left_names:
            out.print(f"left: {name}")
        if counts.left > len(counts.left_names):
            out.print(f"left: {counts.left - len(counts.left_names)} more")
        if counts.on_media:
            out.print(f"{counts.on_media} blocks in slower tiers stay there; they are announced again when it restarts")
        out.print(f"{node_id} is safe to stop")
    return 0


async def _rebalance(config: ClusterConfig, body: bytes, watch: bool, as_json: bool) -> int:
    rows = await ask_all(config)
    nodes = [row.node for row in rows if row.report is not None and row.node.role.holds_kv]
    for row in rows:
        if row.report is None and row.node.role.holds_kv:
            messages().print(f"{row.node.id} is left out: {row.problem}")
    await asyncio.gather(*(_post(config, node, "/rebalance", body) for node in nodes))
    if not watch:
        messages().print(f"{len(nodes)} nodes share their blocks; kvctl status shows how far they are")
        return 0
    found = await _follow(config, [node.id for node in nodes], lambda counts: counts.state != "running", as_json)
    return 1 if any(counts.state == "failed" for counts in found.values()) else 0


async def _follow(
    config: ClusterConfig, names: Sequence[str], over: Callable[[MoveCounts], bool], as_json: bool
) -> dict[str, MoveCounts]:
    """Show how far these nodes are, until it is over for each."""
    silent = 0
    while True:
        rows = {row.node.id: row for row in await ask_all(config) if row.node.id in names}
        found = {name: row.report.moving for name, row in rows.items() if row.report and row.report.moving}
        silent = 0 if len(found) == len(names) else silent + 1
        if silent > SILENT_MAX:
            missing = ", ".join(sorted(set(names) - set(found)))
            raise OperationRefusedError(node=missing, cause="it does not answer any more")
        done = len(found) == len(names) and all(over(c) or c.state == "failed" for c in found.values())
        if as_json:
            print_json({name: msgspec.to_builtins(counts) for name, counts in found.items()})
        else:
            messages().print(_line(rows, found))
        if done:
            if not as_json:
                console().print(_table(found))
            return found
        await asyncio.sleep(POLL_S)


def _line(rows: dict[str, NodeStatus], found: dict[str, MoveCounts]) -> str:
    parts = []
    for name, counts in found.items():
        report = rows[name].report
        running = f", {report.running + report.waiting} requests" if report else ""
        parts.append(f"{name}: {counts.total - counts.open} of {counts.total} blocks seen to{running}")
    return "; ".join(parts)


def _table(found: dict[str, MoveCounts]) -> Table:
    table = Table("node", "for", "state", "blocks", "moved", "held elsewhere", "left", "bytes")
    for name, counts in found.items():
        figures = (counts.total, counts.moved, counts.elsewhere, counts.left)
        table.add_row(name, counts.kind, counts.state, *map(str, figures), human_bytes(counts.nbytes))
    return table


async def _find(config: ClusterConfig, node_id: str) -> NodeConfig:
    for row in await ask_all(config):
        if row.node.id == node_id:
            return row.node
    return config.node(node_id)


async def _post(config: ClusterConfig, node: NodeConfig, path: str, body: bytes) -> None:
    keys = config.cluster.operator_keys
    headers = {"Authorization": f"Bearer {keys[0]}"} if keys else {}
    timeout = aiohttp.ClientTimeout(total=ASK_TIMEOUT_S)
    try:
        async with (
            aiohttp.ClientSession(timeout=timeout, headers=headers) as session,
            session.post(f"{node.http_url}{path}", data=body) as response,
        ):
            raw = await read_whole(response.content, ANSWER_BYTES_MAX)
    except (aiohttp.ClientError, TimeoutError) as error:
        cause = why_silent(error, ASK_TIMEOUT_S)
        raise SilentNodeError(node=node.id, url=node.http_url, cause=cause) from error
    if response.status != 200:
        try:
            cause = str(msgspec.json.decode(raw, type=dict[str, str])["error"])
        except (msgspec.MsgspecError, KeyError):
            cause = f"it answers {response.status} to {path}"
        raise OperationRefusedError(node=node.id, cause=cause)


def _pace(rate: str) -> bytes:
    try:
        nbytes = parse_bytes(rate)
    except ValueError as error:
        raise RateError(rate=rate, cause=str(error)) from None
    if nbytes < 1:
        raise RateError(rate=rate, cause="less than a byte a second")
    return msgspec.json.encode({"bytes_per_s": nbytes})

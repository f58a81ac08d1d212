"""Real services: two clusters side by side, loopback only, seen by status, killed and back, stopped when asked.

The engine is the stub, which makes tokens by arithmetic: what is tested here is the fabric. One cluster serves all
tests of this file, in this order; the last one stops it.
"""

import asyncio
import ipaddress
import socket
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import suppress
from functools import partial
from pathlib import Path

import aiohttp
import pytest
import pytest_asyncio

from kv_core.wire import WIRE_REVISION, WIRE_VERSION
from kv_services.config import BusSection, LimitsSection, ModelSection
from kv_services.kvctl.status import NodeStatus, ask_all, render
from kv_services.launch import LocalCluster, PortReservation, ProcessState, local_config

pytestmark = [pytest.mark.integration, pytest.mark.timeout(300), pytest.mark.asyncio(loop_scope="module")]

MODEL = ModelSection(id="stub", engine="stub")
DEADLINE_S = 90.0
"""Nothing here takes that long; whatever does is stuck."""


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def cluster() -> AsyncIterator[LocalCluster]:
    with PortReservation() as ports:
        config = local_config(
            ports,
            prefill=1,
            decode=1,
            slots=64,
            model=MODEL,
            bus=BusSection(heartbeat_interval_ms=100, suspect_after_ms=5_000, dead_after_ms=10_000),
            limits=LimitsSection(request_timeout_s=120),
        )
        running = LocalCluster(config, stop_grace_s=60)  # so that only what hangs is killed
        async with running:
            yield running
        assert running.leftovers == []


async def complete(cluster: LocalCluster, prompt: str) -> dict[str, object]:
    body = {"model": MODEL.id, "prompt": prompt, "max_tokens": 8, "temperature": 0}
    async with (
        aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=120)) as session,
        session.post(f"{cluster.url('gateway')}/v1/completions", json=body) as response,
    ):
        answer: dict[str, object] = await response.json()
        assert response.status == 200, answer
        return answer


async def until(cluster: LocalCluster, wanted: str, **roles: bool) -> list[NodeStatus]:
    """Ask again until every row is well, or those named are not."""
    return await shown(
        cluster, wanted, lambda rows: all(row.well == roles.get(name.replace("-", "_"), True) for name, row in rows)
    )


async def shown(
    cluster: LocalCluster, wanted: str, condition: Callable[[Iterable[tuple[str, NodeStatus]]], bool]
) -> list[NodeStatus]:
    """Ask again until the rows, each with its node's name, are as they shall be."""
    end_s = asyncio.get_running_loop().time() + DEADLINE_S
    while True:
        rows = await ask_all(cluster.config)
        if condition([(row.node.id, row) for row in rows]):
            return rows
        told = [(row.node.id, row.problem, row.report) for row in rows]
        assert asyncio.get_running_loop().time() < end_s, f"{wanted}: {told}"
        await asyncio.sleep(0.1)


def caches(name: str, rows: Iterable[tuple[str, NodeStatus]]) -> bool:
    """Whether a node has given back what a request held, and keeps it."""
    reports = [row.report for node, row in rows if node == name]
    return any(report is not None and report.slots is not None and report.slots.cached > 0 for report in reports)


async def test_two_clusters_run_side_by_side(cluster: LocalCluster) -> None:
    with PortReservation() as ports:
        other = LocalCluster(local_config(ports, prefill=1, decode=1, slots=64, model=MODEL))
        async with other:
            answers = await asyncio.gather(complete(cluster, "the same words"), complete(other, "the same words"))
            texts = [answer["choices"] for answer in answers]
            assert texts[0] == texts[1]
            for one in (cluster, other):
                await until(one, "both clusters are well")
        assert other.leftovers == []


async def test_processes_of_one_build_speak_one_wire(cluster: LocalCluster) -> None:
    reports = [row.report for row in await until(cluster, "all are well")]
    assert {report.wire for report in reports if report is not None} == {f"{WIRE_VERSION}.{WIRE_REVISION}"}
    assert not any(
        "an upgrade" in str(line) for line in render(cluster.config, await ask_all(cluster.config)).renderables
    )


async def test_nothing_listens_outside_loopback(cluster: LocalCluster) -> None:
    inodes = set()
    for node in cluster.config.nodes:
        for link in Path(f"/proc/{cluster.pid(node.id)}/fd").iterdir():  # noqa: ASYNC240
            with suppress(FileNotFoundError):  # closed since it was listed, so it does not listen
                target = str(link.readlink())
                if target.startswith("socket:["):
                    inodes.add(target[8:-1])
    listening = []
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:  # noqa: ASYNC240
            fields = line.split()
            if fields[3] == "0A" and fields[9] in inodes:
                listening.append(_address(fields[1].split(":")[0]))
    named = sum(len(list(node.ports())) for node in cluster.config.nodes)
    assert len(listening) == named, "a port that the cluster file does not name, or one that is missing"
    assert all(address.is_loopback for address in listening)


def _address(text: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address:
    """An address as /proc/net/tcp writes it: 32-bit words in the machine's byte order."""
    raw = bytes.fromhex(text)
    words = b"".join(raw[at : at + 4][::-1] for at in range(0, len(raw), 4))
    return ipaddress.ip_address(socket.inet_ntop(socket.AF_INET if len(words) == 4 else socket.AF_INET6, words))


@pytest.mark.parametrize("method", ["POST", "PUT", "PATCH", "DELETE"])
async def test_no_route_of_a_node_changes_anything(cluster: LocalCluster, method: str) -> None:
    paths = ("/", "/healthz", "/status", "/metrics", "/run_script", "/admin", "/v1/models", "/shutdown")
    before = [row.report for row in await until(cluster, "all are well")]
    async with aiohttp.ClientSession() as session:
        for node in cluster.config.nodes:
            for path in paths:
                async with session.request(method, node.http_url + path, json={"x": 1}) as response:
                    assert response.status in (404, 405), f"{method} {path} of {node.id}"
    after = [row.report for row in await until(cluster, "all are still well")]
    for one, other in zip(before, after, strict=True):
        assert one is not None and other is not None
        assert (one.incarnation, one.slots, one.open) == (other.incarnation, other.slots, other.open)


async def test_a_node_that_is_killed_shows_in_status_and_comes_back_in_a_new_life(cluster: LocalCluster) -> None:
    await complete(cluster, "a prompt that is long enough for a few blocks of the cache, so that KV is moved")
    await until(cluster, "all are well")
    rows = {row.node.id: row for row in await shown(cluster, "KV is kept", partial(caches, "decode-1"))}
    decode, prefill = rows["decode-1"].report, rows["prefill-1"].report
    assert decode is not None and decode.slots is not None and prefill is not None
    assert decode.slots.total == 64
    assert decode.slots.cached > 0
    assert set(decode.transports.values()) | set(prefill.transports.values()) == {"shm"}
    await cluster.kill("decode-1")
    gone = {row.node.id: row for row in await until(cluster, "decode-1 is gone", decode_1=False)}
    assert gone["decode-1"].problem == "does not listen"
    await cluster.restart("decode-1")
    again = {row.node.id: row for row in await until(cluster, "all are well again")}["decode-1"].report
    assert again is not None
    assert again.incarnation > decode.incarnation
    assert cluster.state("decode-1") is ProcessState.READY


async def test_every_process_ends_well_when_it_is_asked_to_though_a_peer_is_gone(cluster: LocalCluster) -> None:
    await complete(cluster, "something to hold on to")
    await cluster.kill("prefill-1")
    for node in cluster.config.nodes:
        if node.id != "prefill-1":
            status = await cluster.stop(node.id)
            assert status == 0, f"{node.id} ended with {status}:\n{cluster.logs(node.id, 20)}"

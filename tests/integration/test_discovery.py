"""A cluster that finds its processes by etcd: some join that are in nobody's file, and etcd itself comes and goes."""

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
import msgspec
import pytest

from kv_bus.keys import AllowList, create_key_pair, read_allow_list, write_allow_list
from kv_core.ids import NodeId
from kv_services.config import ClusterConfig, EtcdSection, NodeConfig, Role
from kv_services.config_file import dump_config
from kv_services.kvctl.status import ask_all
from kv_services.launch import LocalCluster, PortReservation, local_config
from tests.integration.helpers_integration import DEADLINE_S, MODEL, Fabric, prompt, until
from tests.services.helpers_etcd import Etcd, etcd_server, needs_etcd

pytestmark = [pytest.mark.integration, pytest.mark.timeout(300), pytest.mark.asyncio, needs_etcd]

STRANGER = "prefill-9"


@contextlib.asynccontextmanager
async def stranger(fabric: Fabric, ports: PortReservation) -> AsyncIterator[asyncio.subprocess.Process]:
    """A prefill node with a file of its own that names nobody but itself; its key is admitted."""
    bus, events, http, data = (ports.take() for _ in range(4))
    node = NodeConfig(
        id=STRANGER, role=Role.PREFILL, slots=128, bus_port=bus, events_port=events, http_port=http, data_port=data
    )
    config = msgspec.structs.replace(fabric.config, nodes=[node])
    file = fabric.cluster.folder / "stranger.toml"
    file.write_text(dump_config(config))
    listed = read_allow_list(config.allow_list_path)
    public = create_key_pair(config.keys_path, NodeId(STRANGER)).public_key
    write_allow_list(config.allow_list_path, AllowList(listed.cluster, {**listed.keys, NodeId(STRANGER): public}))
    with (fabric.cluster.folder / "stranger.log").open("wb") as log:
        process = await asyncio.create_subprocess_exec(
            str(Path(sys.executable).with_name("kv-node")), "--config", str(file), "--node", STRANGER, stderr=log
        )
        try:
            yield process
        finally:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()


async def members(fabric: Fabric, node_id: str) -> dict[str, str]:
    return (await fabric.status(node_id)).members


async def no_alarm(fabric: Fabric) -> bool:
    reports = [await fabric.status(node.id) for node in fabric.config.nodes]
    return not any("etcd" in alert for report in reports for alert in report.alerts)


async def serves(fabric: Fabric, first: int, count: int = 4) -> set[str]:
    """Ask; every answer must be right. The prefill nodes that worked."""
    prompts = [prompt(first + i, 80) for i in range(count)]
    answers = await asyncio.gather(*(fabric.ask(one, 5) for one in prompts))
    for one, answer in zip(prompts, answers, strict=True):
        assert answer.is_right(one, 5), answer
    return {answer.fabric["prefill_node"] for answer in answers}


@contextlib.asynccontextmanager
async def cluster(etcd: Etcd, ports: PortReservation) -> AsyncIterator[Fabric]:
    config: ClusterConfig = local_config(ports, prefill=1, decode=1, slots=128, monitor=False, model=MODEL)
    section = msgspec.structs.replace(config.cluster, discovery="etcd")
    config = msgspec.structs.replace(config, cluster=section, etcd=EtcdSection(endpoints=[etcd.endpoint], lease_s=2))
    async with LocalCluster(config) as running:
        timeout = aiohttp.ClientTimeout(total=DEADLINE_S)
        async with aiohttp.ClientSession(timeout=timeout) as session:
            fabric = Fabric(running, session)
            for node in config.nodes:
                await fabric.all_alive(node.id, {other.id for other in config.nodes} - {node.id})
            yield fabric
    assert running.leftovers == []


async def test_nodes_of_no_file_join_and_leave_and_a_lost_etcd_stops_nobody(tmp_path: Path) -> None:
    with PortReservation() as ports:
        async with etcd_server(tmp_path) as etcd, cluster(etcd, ports) as fabric:
            names = [node.id for node in fabric.config.nodes]
            assert STRANGER not in await members(fabric, "gateway")
            async with stranger(fabric, ports) as process:
                for name in names:
                    await fabric.all_alive(name, [STRANGER])
                asked = 0

                async def worked() -> bool:
                    nonlocal asked
                    asked += 4
                    return STRANGER in await serves(fabric, asked)

                await until(worked)
                await until(lambda: all_listed(fabric, {*names, STRANGER}))

                # Lost for longer than a lease, then back with no memory of anybody.
                await etcd.stop()
                await until(lambda: alarmed(fabric))
                await asyncio.sleep(2.5)
                await fabric.all_alive("gateway", [STRANGER])
                await serves(fabric, 500)
                etcd.forget()
                await etcd.start()
                await until(lambda: no_alarm(fabric))
                await until(lambda: all_listed(fabric, {*names, STRANGER}))
                await serves(fabric, 600)

                # Standing still is as good as dead: etcd neither answers nor hangs up.
                etcd.signal(signal.SIGSTOP)
                await until(lambda: alarmed(fabric))
                await serves(fabric, 700)
                etcd.signal(signal.SIGCONT)
                await until(lambda: no_alarm(fabric))

                os.kill(process.pid, signal.SIGTERM)
                assert await process.wait() == 0
                for name in names:
                    await until(lambda name=name: gone(fabric, name))  # type: ignore[misc]
            await serves(fabric, 800)
            await fabric.settle()


async def all_listed(fabric: Fabric, names: set[str]) -> bool:
    """Whether those that etcd lists are these, and each tells of itself."""
    rows = {row.node.id: row for row in await ask_all(fabric.config)}
    return rows.keys() == names and all(row.report is not None for row in rows.values())


async def alarmed(fabric: Fabric) -> bool:
    return any("etcd" in alert for alert in (await fabric.status("gateway")).alerts)


async def gone(fabric: Fabric, name: str) -> bool:
    return STRANGER not in await members(fabric, name)

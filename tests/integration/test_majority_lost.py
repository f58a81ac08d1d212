"""Most of a cluster is gone for good at once: who is left hears too few to judge, and the directory says who went."""

from pathlib import Path

import aiohttp
import msgspec
import pytest

from kv_services.config import EtcdSection
from kv_services.launch import LocalCluster, PortReservation, local_config
from tests.integration.helpers_integration import DEADLINE_S, MODEL, Fabric, prompt, until
from tests.services.helpers_etcd import etcd_server, needs_etcd

pytestmark = [pytest.mark.integration, pytest.mark.timeout(300), pytest.mark.asyncio, needs_etcd]

LOST = ("prefill-1", "prefill-2", "decode-2")
LEFT = ("gateway", "decode-1")


async def test_a_majority_that_is_gone_for_good_is_dead_when_its_records_have_ended_and_welcome_when_it_is_back(
    tmp_path: Path,
) -> None:
    with PortReservation() as ports:
        config = local_config(ports, prefill=2, decode=2, slots=128, monitor=False, model=MODEL)
        section = msgspec.structs.replace(config.cluster, discovery="etcd")
        async with etcd_server(tmp_path) as etcd:
            endpoints = EtcdSection(endpoints=[etcd.endpoint], lease_s=2)
            config = msgspec.structs.replace(config, cluster=section, etcd=endpoints)
            async with (
                LocalCluster(config) as cluster,
                aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=DEADLINE_S)) as session,
            ):
                fabric = Fabric(cluster, session)
                names = {node.id for node in config.nodes}
                for name in names:
                    await fabric.all_alive(name, names - {name})
                first = prompt(1, 80)
                assert (await fabric.ask(first, 4)).is_right(first, 4)

                for name in LOST:
                    await cluster.kill(name)
                seen: dict[str, dict[str, str]] = {}

                async def all_dead() -> bool:
                    for name in LEFT:
                        seen[name] = (await fabric.status(name)).members
                    return all(seen[name][lost] == "dead" for name in LEFT for lost in LOST)

                await until(all_dead, lambda: str(seen))
                assert "and listed no longer" in cluster.logs("gateway")
                assert seen["gateway"]["decode-1"] == "alive"
                # Nobody waits for them any more: the node that is left does all of it.
                for seed in range(2, 6):
                    tokens = prompt(seed, 80)
                    answer = await fabric.ask(tokens, 4)
                    assert answer.is_right(tokens, 4) and answer.fabric["decode_node"] == "decode-1", answer

                for name in LOST:
                    await cluster.restart(name)
                for name in names:
                    await fabric.all_alive(name, names - {name})
                assert (await fabric.ask(first, 4)).is_right(first, 4)
                await fabric.settle()
    assert cluster.leftovers == []

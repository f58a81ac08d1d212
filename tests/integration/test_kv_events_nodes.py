"""KV events of a real node: told only of the tenants that are named, heard by a follower and by a gateway."""

import asyncio

import aiohttp
import msgspec
import pytest

from kv_core.hashing import hash_tokens
from kv_core.ids import Incarnation, NodeId
from kv_core.namespace import Namespace
from kv_prefix.prefix_index import Holder, PrefixIndex
from kv_services.config import FollowedEngine, KVEventsSection, TenantConfig
from kv_services.config_file import dump_config, parse_config
from kv_services.kv_events.follow import EngineEvents
from kv_services.kv_events.follow_state import EngineFollower
from kv_services.launch import LocalCluster, PortReservation, local_config
from kv_services.tenants import namespace_salt
from tests.integration.helpers_integration import BLOCK, MODEL, Fabric, prompt, until

pytestmark = [pytest.mark.integration, pytest.mark.timeout(200)]

KEYS = {name: f"key-of-tenant-{name}-for-tests" for name in ("told", "hidden")}
PROMPT = prompt(3, 6 * BLOCK + 1)


def namespace(tenant: str) -> Namespace:
    salt = namespace_salt(tenant, "", None)
    return Namespace(MODEL.id, "stub-1", salt=salt, dtype=MODEL.dtype, block_size=BLOCK)


async def holders(fabric: Fabric, tenant: str, key: str) -> tuple[int, dict[str, dict[str, object]]]:
    """What the gateway's index says of who holds the prompt."""
    ask = {"tenant": tenant, "tokens": list(PROMPT)}
    headers = {"Authorization": f"Bearer {key}"}
    url = f"{fabric.cluster.url('gateway')}/prefix/lookup"
    async with fabric.session.post(url, json=ask, headers=headers) as response:
        found = await response.json()
        return response.status, {one["node"]: one for one in found.get("holders", ())}


async def the_gateway_lists_what_it_follows(fabric: Fabric) -> None:
    """A followed engine holds what it told of, and is nobody to send requests to."""
    operator = fabric.config.cluster.operator_keys[0]

    found: dict[str, dict[str, object]] = {}

    async def listed() -> bool:
        found.update((await holders(fabric, "told", operator))[1])
        return all(name in found and found[name]["blocks"] == 6 for name in ("engine", "prefill-1"))

    await until(listed, lambda: str(found))
    assert found["engine"]["takes_requests"] is False and found["prefill-1"]["takes_requests"] is True
    assert "engine" not in (await holders(fabric, "hidden", operator))[1]
    assert (await holders(fabric, "told", KEYS["told"]))[0] == 403
    assert (await holders(fabric, "nobody", operator))[0] == 400


async def test_a_node_tells_of_the_tenants_that_are_named_and_of_no_other() -> None:
    with PortReservation() as ports:
        events_port, replay_port = ports.take(), ports.take()
        tenants = [TenantConfig(id=name, api_keys=[key]) for name, key in KEYS.items()]
        config = local_config(ports, prefill=1, decode=1, monitor=False, tenants=tenants, model=MODEL)
        events, replay = f"tcp://127.0.0.1:{events_port}", f"tcp://127.0.0.1:{replay_port}"
        nodes = [
            msgspec.structs.replace(node, kv_events_port=events_port, kv_replay_port=replay_port)
            if node.id == "prefill-1"
            else node
            for node in config.nodes
        ]
        follow = [FollowedEngine(name="engine", events=events, replay=replay, tenant="told", loras={"a": "1"})]
        section = KVEventsSection(tenants=["told"], follow=follow)
        cluster_section = msgspec.structs.replace(config.cluster, operator_keys=["operator-key-of-the-test"])
        config = msgspec.structs.replace(config, nodes=nodes, kv_events=section, cluster=cluster_section)
        assert parse_config(dump_config(config)).kv_events == section
        async with LocalCluster(config) as cluster, aiohttp.ClientSession() as session:
            fabric = Fabric(cluster, session)
            for name in ("gateway", "prefill-1", "decode-1"):
                await fabric.all_alive(name, {"gateway", "prefill-1", "decode-1"} - {name})
            for key in KEYS.values():
                assert (await fabric.ask(PROMPT, 2, key=key)).is_right(PROMPT, 2)
            # A follower that comes when all has happened learns it by replay, from the next event on.
            index = PrefixIndex()
            one = EngineEvents(
                Holder(NodeId("prefill-1"), Incarnation(1)), events, replay, EngineFollower(namespace("told")), index
            )
            await one.start()
            running = asyncio.get_running_loop().create_task(one.run())

            async def heard() -> bool:
                other = prompt(int(asyncio.get_running_loop().time() * 1000) % 100_000, 2 * BLOCK)
                await fabric.ask(other, 1, key=KEYS["told"])
                found = index.lookup(hash_tokens(namespace("told"), PROMPT))
                return bool(found) and found[0].num_blocks == 6

            try:
                await until(heard)
                assert not index.lookup(hash_tokens(namespace("hidden"), PROMPT))
                assert one.refused == 0 and one.follower.stats.recoveries >= 1
                await the_gateway_lists_what_it_follows(fabric)
            finally:
                await one.close()
                await running
    assert cluster.leftovers == []

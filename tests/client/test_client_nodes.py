"""A client of a prefill node's process: the KV of a real request, misses, leases that end, a node that is killed."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from kv_bus.interface import PeerAddress
from kv_bus.ports import pick_ports
from kv_client import Client, ClientConfig, HolderLost, Miss
from kv_core.block import BlockGeometry, Layout
from kv_core.ids import NodeId
from kv_core.namespace import Namespace
from kv_services.engine.interface import StoredArray
from kv_services.engine.load import STUB_GEOMETRY
from kv_services.engine.stub import StubModel
from kv_services.gateway.tenancy import OPEN_TENANT, Caller, fold_salt
from tests.client.helpers_client import admit, eventually, transport
from tests.integration.helpers_integration import BLOCK, GEOMETRY, MODEL, Fabric, prompt, running, until

pytestmark = [pytest.mark.integration, pytest.mark.timeout(200), pytest.mark.asyncio(loop_scope="module")]

PROMPT = prompt(5, 9 * BLOCK + 3)
NUM_BLOCKS = 9


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=["shm", "tcp"])
async def fabric(request: pytest.FixtureRequest) -> AsyncIterator[Fabric]:
    async with running(backend=request.param) as fabric:
        answer = await fabric.ask(PROMPT, 4)
        assert answer.is_right(PROMPT, 4)
        yield fabric


class Fetched:
    """A prefix that was read, as the engine sees memory."""

    def __init__(self, layers: list[StoredArray]) -> None:
        self._layers = layers

    geometry: BlockGeometry = GEOMETRY
    layout = Layout.LAYER_FIRST

    @property
    def num_slots(self) -> int:
        return len(self._layers[0])

    def kv(self, layer: int) -> StoredArray:
        return self._layers[layer]


def config(fabric: Fabric, name: str, folder: Path, lease_ms: int = 30_000) -> ClientConfig:
    """A reader of the prefill node, admitted while the cluster runs."""
    node_id, cluster = NodeId(name), fabric.config
    admit(cluster.keys_path, cluster.allow_list_path, node_id)
    node = cluster.node("prefill-1")
    requests, events = (f"tcp://127.0.0.1:{port}" for port in pick_ports(2))
    return ClientConfig(
        node_id=node_id,
        requests=requests,
        events=events,
        keys_folder=cluster.keys_path,
        allow_list=cluster.allow_list_path,
        holder=PeerAddress(node.node_id, node.bus_endpoint, node.events_endpoint),
        geometry=GEOMETRY,
        num_slots=16,
        transport=transport(folder if cluster.transport.backend == "shm" else None),
        timeout_ms=30_000,
        lease_ms=lease_ms,
    )


def namespace() -> Namespace:
    """Of a request without a key to an open gateway."""
    salt = fold_salt(Caller(OPEN_TENANT))
    return Namespace(MODEL.id, "stub-1", salt=salt, dtype=MODEL.dtype, block_size=BLOCK)


async def leases(fabric: Fabric) -> int:
    return (await fabric.status("prefill-1")).open.get("prefix leases", 0)


async def test_the_kv_of_a_request_is_read_and_is_what_the_engine_wrote(fabric: Fabric, tmp_path: Path) -> None:
    async with Client(config(fabric, "reader-kv", tmp_path)) as client:
        with await client.get_blocks(namespace(), PROMPT, NUM_BLOCKS) as blocks:
            await blocks.wait()
            fetched = Fetched([blocks.array(layer) for layer in range(GEOMETRY.num_layers)])
            StubModel(STUB_GEOMETRY).verify(fetched, PROMPT[: NUM_BLOCKS * BLOCK], range(NUM_BLOCKS))
            assert await leases(fabric) == 1
        # All that was open at the node ends well before the lease would by time.
        async with asyncio.timeout(10):
            await fabric.settle(["prefill-1"])


async def test_a_prompt_that_the_node_never_saw_is_a_miss(fabric: Fabric, tmp_path: Path) -> None:
    async with Client(config(fabric, "reader-miss", tmp_path)) as client:
        with pytest.raises(Miss):
            await client.get_blocks(namespace(), prompt(6, 9 * BLOCK), NUM_BLOCKS)
        other = Namespace(MODEL.id, "stub-1", salt="another tenant", dtype=MODEL.dtype, block_size=BLOCK)
        with pytest.raises(Miss):
            await client.get_blocks(other, PROMPT, NUM_BLOCKS)
        assert await leases(fabric) == 0


async def test_a_lease_that_nobody_releases_ends_by_time(fabric: Fabric, tmp_path: Path) -> None:
    async with Client(config(fabric, "reader-lost", tmp_path, lease_ms=1_500)) as client:
        blocks = await client.get_blocks(namespace(), PROMPT, NUM_BLOCKS)
        await blocks.wait()
        assert await leases(fabric) == 1

        async def ended() -> bool:
            return await leases(fabric) == 0

        await until(ended, timeout_s=20)
        # What was read stays readable: it is a copy.
        fetched = Fetched([blocks.array(layer) for layer in range(GEOMETRY.num_layers)])
        StubModel(STUB_GEOMETRY).verify(fetched, PROMPT[: NUM_BLOCKS * BLOCK], range(NUM_BLOCKS))


async def test_a_killed_node_is_a_lost_holder(fabric: Fabric, tmp_path: Path) -> None:
    async with Client(config(fabric, "reader-killed", tmp_path)) as client:
        with await client.get_blocks(namespace(), PROMPT, NUM_BLOCKS) as blocks:
            await blocks.wait()
            await fabric.cluster.kill("prefill-1")
            with pytest.raises(HolderLost):
                await client.get_blocks(namespace(), PROMPT, 1, timeout_ms=3_000)
        await eventually(lambda: client.num_free_slots == 16)

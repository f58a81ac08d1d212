"""A client of a prefill node's process: the KV of a real request, misses, leases that end, a node that is killed."""

import asyncio
import sys
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import numpy as np
import pytest
import pytest_asyncio

from kv_bus.interface import PeerAddress
from kv_bus.ports import pick_ports
from kv_client import Client, ClientConfig, HolderLost, InvalidRead, LeaseLost, Miss, WrongArrays
from kv_client.messages import NamespaceFields, PutReserved, ReservePut
from kv_core.block import BlockGeometry, Layout
from kv_core.hashing import hash_tokens, token_bytes
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


def config(
    fabric: Fabric, name: str, folder: Path, lease_ms: int = 30_000, *, renew_leases: bool = True
) -> ClientConfig:
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
        renew_leases=renew_leases,
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
    async with Client(config(fabric, "reader-lost", tmp_path, lease_ms=4_000, renew_leases=False)) as client:
        blocks = await client.get_blocks(namespace(), PROMPT, NUM_BLOCKS)
        await blocks.wait()
        assert await leases(fabric) == 1

        async def ended() -> bool:
            return await leases(fabric) == 0

        await until(ended)
        # What was read stays readable: it is a copy.
        fetched = Fetched([blocks.array(layer) for layer in range(GEOMETRY.num_layers)])
        StubModel(STUB_GEOMETRY).verify(fetched, PROMPT[: NUM_BLOCKS * BLOCK], range(NUM_BLOCKS))


def random_layers(num_blocks: int, seed: int) -> list[StoredArray]:
    shape = (num_blocks, GEOMETRY.num_planes, GEOMETRY.num_kv_heads, BLOCK, GEOMETRY.head_dim)
    random = np.random.default_rng(seed)
    return [random.integers(0, 1 << 15, shape, dtype=np.uint16) for _ in range(GEOMETRY.num_layers)]


async def test_what_is_put_is_found_and_read_back_equal_and_sent_once(fabric: Fabric, tmp_path: Path) -> None:
    tokens, layers = prompt(70, 6 * BLOCK), random_layers(6, 1)
    names = hash_tokens(namespace(), tokens)
    async with Client(config(fabric, "writer", tmp_path)) as client:
        assert (await client.lookup(namespace(), tokens)).num_blocks == 0
        stored = await client.put_blocks(namespace(), tokens[: 4 * BLOCK], [layer[:4] for layer in layers])
        assert (stored.num_blocks, stored.num_sent) == (4, 4)
        # What is there already is not sent again; what follows joins it.
        stored = await client.put_blocks(namespace(), tokens, layers)
        assert (stored.num_blocks, stored.num_sent) == (6, 2)
        again = await client.put_blocks(namespace(), tokens, layers)
        assert (again.num_sent, again.nbytes) == (0, 0)
        found = await client.lookup(namespace(), [*tokens, 1, 2, 3])
        assert found.num_blocks == 6 and found.by_tier == (0, 6, 0, 0)
        unknown = hash_tokens(namespace(), prompt(71, 2 * BLOCK))
        assert await client.batch_exists([names[5], unknown[0], names[0]]) == [True, False, True]
        with await client.get_blocks(namespace(), tokens, 6) as blocks:
            await blocks.wait()
            for layer, data in enumerate(layers):
                assert np.array_equal(blocks.array(layer), data)
        with pytest.raises(WrongArrays):
            await client.put_blocks(namespace(), tokens, layers[:-1])
        with pytest.raises(WrongArrays):
            await client.put_blocks(namespace(), tokens, [layer.astype(np.float32) for layer in layers])
        with pytest.raises(InvalidRead):
            await client.put_blocks(namespace(), tokens[:BLOCK], layers)
    async with asyncio.timeout(10):
        await fabric.settle(["prefill-1"])


async def test_a_put_that_is_never_finished_gives_its_slots_back(fabric: Fabric, tmp_path: Path) -> None:
    tokens = prompt(72, 4 * BLOCK)
    client = Client(config(fabric, "half-writer", tmp_path))
    async with client:
        raw = token_bytes(tokens)
        reserved = await client._request(
            ReservePut(NamespaceFields.of(namespace()), raw, 4, 60_000_000_000), PutReserved, None
        )
        assert reserved.grant is not None
        assert (await fabric.status("prefill-1")).open["client puts"] == 1
    # The client is gone without a word about its put: the end of its session is enough.
    async with asyncio.timeout(10):
        reports = await fabric.settle(["prefill-1"])
    assert reports[0].slots is not None and reports[0].slots.pinned == 0


async def test_pins_are_held_within_the_quota_and_given_back_once(fabric: Fabric, tmp_path: Path) -> None:
    async with Client(config(fabric, "pinner", tmp_path)) as client:
        pinned = await client.pin(namespace(), PROMPT, NUM_BLOCKS)
        assert (await fabric.status("prefill-1")).open["client pins"] == 1
        with pytest.raises(Miss):
            await client.pin(namespace(), prompt(73, 2 * BLOCK), 2)
        await client.release(pinned)
        with pytest.raises(LeaseLost):
            await client.release(pinned)
    async with asyncio.timeout(10):
        await fabric.settle(["prefill-1"])


async def test_a_session_that_broke_costs_its_pins_and_no_later_ones(fabric: Fabric, tmp_path: Path) -> None:
    """To the node its end is the client's end; a client that lives is back before it asks for anything more."""

    async def pins() -> int:
        return (await fabric.status("prefill-1")).open.get("client pins", 0)

    async def taken_back() -> bool:
        return await pins() == 0

    async with Client(config(fabric, "cut-off", tmp_path)) as client:
        lost = await client.pin(namespace(), PROMPT, NUM_BLOCKS)
        for link in client._agent.peer(NodeId("prefill-1")).links:
            await link.close()
        await until(taken_back)
        kept = await client.pin(namespace(), PROMPT, NUM_BLOCKS)
        await asyncio.sleep(1)  # the node has looked for ended sessions by then, more than once
        assert await pins() == 1
        with pytest.raises(LeaseLost):
            await client.release(lost)
        await client.release(kept)


async def test_leases_are_renewed_while_their_blocks_are_held(fabric: Fabric, tmp_path: Path) -> None:
    # Long enough to be renewed in time on a machine that is busy.
    async with Client(config(fabric, "keeper", tmp_path, lease_ms=2_000)) as client:
        with await client.get_blocks(namespace(), PROMPT, NUM_BLOCKS):
            # Two lives of a lease.
            await asyncio.sleep(4.0)
            assert await leases(fabric) == 1


async def test_a_killed_client_gives_everything_back_at_once(fabric: Fabric, tmp_path: Path) -> None:
    settings = config(fabric, "victim", tmp_path)
    arguments = example_arguments(fabric, settings, PROMPT)
    command = [sys.executable, "-m", "tests.client.client_victim", *arguments]
    process = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
    assert process.stdout is not None
    assert await asyncio.wait_for(process.stdout.readline(), 60) == b"holding\n"
    open_things = (await fabric.status("prefill-1")).open
    assert (open_things["client pins"], open_things["prefix leases"]) == (1, 1)
    process.kill()
    await process.wait()
    # The pin has no end by time, and the lease 10 s; both go with the session.
    async with asyncio.timeout(8):
        await fabric.settle(["prefill-1"])


async def test_the_example_stores_and_fetches_a_numpy_cache(fabric: Fabric, tmp_path: Path) -> None:
    tokens = prompt(74, 5 * BLOCK)
    arguments = example_arguments(fabric, config(fabric, "example", tmp_path), tokens)
    script = Path(__file__).parents[2] / "packages" / "kv-client" / "examples" / "store_a_cache.py"
    process = await asyncio.create_subprocess_exec(
        sys.executable, str(script), *arguments, stdout=asyncio.subprocess.PIPE
    )
    output, _ = await asyncio.wait_for(process.communicate(), 60)
    assert output.decode() == "sent 5 blocks, found 5, equal: True\n"


def example_arguments(fabric: Fabric, settings: ClientConfig, tokens: Sequence[int]) -> list[str]:
    """The command line of the examples for a client of these settings."""
    given = {
        "keys": settings.keys_folder,
        "allow-list": settings.allow_list,
        "name": settings.node_id,
        "holder": settings.holder.node_id,
        "holder-requests": settings.holder.requests,
        "holder-events": settings.holder.events,
        "model": MODEL.id,
        "weights": "stub-1",
        "salt": namespace().salt,
        "tokens": ",".join(map(str, tokens)),
    }
    if settings.transport.socket_folder is not None:
        given["socket-folder"] = settings.transport.socket_folder
    return [part for name, value in given.items() for part in (f"--{name}", str(value))]


async def test_a_killed_node_is_a_lost_holder(fabric: Fabric, tmp_path: Path) -> None:
    async with Client(config(fabric, "reader-killed", tmp_path)) as client:
        with await client.get_blocks(namespace(), PROMPT, NUM_BLOCKS) as blocks:
            await blocks.wait()
            await fabric.cluster.kill("prefill-1")
            with pytest.raises(HolderLost):
                await client.get_blocks(namespace(), PROMPT, 1, timeout_ms=3_000)
        await eventually(lambda: client.num_free_slots == 16)


async def test_a_client_that_is_open_finds_its_node_again_after_a_restart(fabric: Fabric, tmp_path: Path) -> None:
    """Its next call goes to the new life, which holds nothing of the old one."""
    await fabric.cluster.restart("prefill-1")
    await fabric.all_alive("gateway", ["prefill-1"])
    async with Client(config(fabric, "reader-again", tmp_path)) as client:
        tokens = prompt(77, NUM_BLOCKS * BLOCK)
        await client.put_blocks(namespace(), tokens, random_layers(NUM_BLOCKS, 77))
        assert (await client.lookup(namespace(), tokens)).num_blocks == NUM_BLOCKS
        await fabric.cluster.kill("prefill-1")
        with pytest.raises(HolderLost):
            await client.lookup(namespace(), tokens, timeout_ms=2_000)
        await fabric.cluster.restart("prefill-1")
        assert (await client.lookup(namespace(), tokens, timeout_ms=20_000)).num_blocks == 0
        await client.put_blocks(namespace(), tokens, random_layers(NUM_BLOCKS, 77), timeout_ms=20_000)
        assert (await client.lookup(namespace(), tokens)).num_blocks == NUM_BLOCKS

"""What of an earlier life a node's disk may still serve, after the weights or the tenants have changed."""

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest

from kv_core.hashing import hash_tokens
from kv_core.namespace import Namespace
from kv_prefix.events import Tier
from kv_prefix.tiers.disk import DiskShape, DiskStore
from kv_services.config import ModelSection, TenantConfig
from kv_services.launch import PortReservation, local_config
from kv_services.node.tier import NodeTier, Opened
from kv_services.node.tier_setup import blocks_to_keep
from kv_services.tenants import OPEN_TENANT, namespace_salt
from tests.services.helpers_node_tiers import GEOMETRY, NS, Node, prompt, tier_blocks

SHAPE = DiskShape(GEOMETRY.slot_layer_nbytes, GEOMETRY.num_layers, GEOMETRY.block_size, "test")
TOKENS = prompt(1, 4)


def namespace(tenant: str, secret: str, weights: str = "weights") -> Namespace:
    return replace(NS, weights_revision=weights, salt=namespace_salt(tenant, secret, None))


MINE = namespace("mine", "secret")
CASES = {
    "14 new weights": namespace("mine", "secret", weights="older"),
    "a tenant that is gone": namespace("gone", "secret"),
    "a tenant with another secret": namespace("mine", "older"),
    "the time without tenants": namespace(OPEN_TENANT, ""),
}


def begin(node: Node, folder: Path) -> NodeTier:
    """The disk tier of a life, as the cluster file of today has it."""
    tenants = (TenantConfig(id="mine", api_keys=["a-key-of-some-length"], salt="secret"),)
    with PortReservation() as ports:
        config = local_config(ports, tenants=tenants, model=ModelSection(id=NS.model_id))
    node.tiers.tiers.clear()
    tier = node.tier(Tier.DISK, Opened.of(*DiskStore.open(folder, SHAPE, 1 << 20)))
    node.tiers.add(tier)
    tier.start(blocks_to_keep(config, "weights"))
    return tier


def holders(node: Node, namespace: Namespace) -> int:
    return len(node.index.lookup(hash_tokens(namespace, TOKENS)))


@pytest.mark.parametrize("other", CASES.values(), ids=CASES)
async def test_what_may_not_stay_is_neither_claimed_nor_kept(other: Namespace, tmp_path: Path) -> None:
    node = Node()
    store, _ = DiskStore.open(tmp_path, SHAPE, 1 << 20)
    blocks = [*tier_blocks(node, TOKENS, namespace=MINE), *tier_blocks(node, TOKENS, namespace=other)]
    cells = [node.arena.cell(0, layer) for layer in range(SHAPE.num_layers)]
    plan = Opened.of(store, []).catalog.plan_store(blocks)
    store.write([(item, cells) for item in plan.writes])
    store.close()

    disk = begin(node, tmp_path)
    async with asyncio.timeout(20):
        while disk.counts().blocks != 4 or not holders(node, MINE):  # noqa: ASYNC110 - slices and threads end it
            await asyncio.sleep(0)
    assert holders(node, other) == 0
    assert {block.namespace for block in await node.tiers.everything()} == {MINE.digest}
    await disk.close()
    # Not on the medium either: the next life finds what stayed, and room for others.
    store, held = DiskStore.open(tmp_path, SHAPE, 1 << 20)
    assert {item.block.namespace for item in held} == {MINE.digest} and len(held) == 4
    store.close()
    await node.disk.close()
    node.arena.close()

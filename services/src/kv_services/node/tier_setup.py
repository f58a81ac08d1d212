"""Opens the tiers that the cluster file gives a node, and says what of an earlier life may stay in them."""

from collections.abc import Callable
from pathlib import Path
from typing import Final

from kv_consistency.update import scope_id
from kv_prefix.events import Tier
from kv_prefix.tiers.blocks import TierBlock
from kv_prefix.tiers.cost import TierCost
from kv_prefix.tiers.disk import DiskShape, DiskStore
from kv_prefix.tiers.remote import RemoteStore, require_library
from kv_prefix.tiers.spill import SpillQueue
from kv_services.config import ClusterConfig, parse_bytes
from kv_services.node.context import NodeContext
from kv_services.node.tier import NodeTier, Opened
from kv_services.purge_file import PurgeFile
from kv_services.tenants import OPEN_TENANT, tenant_mark, tenant_scope

SPILL_SHARE: Final = 16
"""At most one slot in so many is held because it is being written to a tier."""
DISK_NS_PER_BYTE: Final = 4.0
"""Assumed of a disk before the first load: 250 MB/s."""
DISK_OVERHEAD_NS: Final = 2_000_000.0
REMOTE_NS_PER_BYTE: Final = 20.0
"""Assumed of an object store before the first load: 50 MB/s."""
REMOTE_OVERHEAD_NS: Final = 50_000_000.0


def open_tiers(ctx: NodeContext, weights_revision: str) -> None:
    """Open what is configured.

    Raises:
        TierError: a tier cannot be used: its folder is in use, holds no block, or cannot be written.
        MissingExtraError: a remote tier is configured, and its library is not installed.
    """
    config = ctx.config
    ctx.tiers.keep_only(_keeper(config, weights_revision))
    shape = _shape(ctx)
    disk = config.tiers.disk
    if disk is not None:
        ctx.tiers.keep_purges(PurgeFile(config.state_path / "lives", ctx.node.id))
        folder = Path(disk.path) if disk.path else config.state_path / "tiers"
        opened = Opened.of(*DiskStore.open(folder / ctx.node.id, shape, parse_bytes(disk.size)))
        cost = TierCost("disk", shape.block_nbytes, DISK_NS_PER_BYTE, DISK_OVERHEAD_NS)
        ctx.tiers.add(_node_tier(ctx, Tier.DISK, opened, cost))

    remote = config.tiers.remote
    if remote is not None:
        require_library()
        ctx.tiers.keep_purges(PurgeFile(config.state_path / "lives", ctx.node.id))
        cost = TierCost("remote", shape.block_nbytes, REMOTE_NS_PER_BYTE, REMOTE_OVERHEAD_NS)
        ctx.tiers.open_later(
            lambda: Opened.of(
                *RemoteStore.open(remote.url, ctx.node.id, shape, parse_bytes(remote.size), remote.endpoint)
            ),
            lambda opened: _node_tier(ctx, Tier.REMOTE, opened, cost),
        )


def _shape(ctx: NodeContext) -> DiskShape:
    geometry = ctx.arena.geometry
    name = f"{geometry.dtype.value}, {geometry.num_planes} planes, {geometry.num_kv_heads} heads of {geometry.head_dim}"
    return DiskShape(geometry.slot_layer_nbytes, geometry.num_layers, geometry.block_size, name)


def _node_tier(ctx: NodeContext, tier: Tier, opened: Opened, cost: TierCost) -> NodeTier:
    in_flight = max(1, ctx.arena.num_slots // SPILL_SHARE)
    queue = SpillQueue(ctx.pool, opened.catalog, in_flight, ctx.tiers.scopes_of)
    return NodeTier(tier, opened, queue, ctx.arena, ctx.clock, ctx.metrics, cost, on_events=ctx.tiers.on_events)


def _keeper(config: ClusterConfig, weights_revision: str) -> Callable[[TierBlock], bool]:
    """Blocks of these weights, of tenants that there still are."""
    weights = scope_id("weights", f"{config.model.id}@{weights_revision}")
    tenants = [(tenant.id, tenant.salt) for tenant in config.tenants] or [(OPEN_TENANT, "")]
    allowed = {tenant_scope(tenant_mark(name, secret)) for name, secret in tenants}

    def keep(block: TierBlock) -> bool:
        scopes = {block.scopes[i : i + 8] for i in range(0, len(block.scopes), 8)}
        return weights in scopes and not allowed.isdisjoint(scopes)

    return keep

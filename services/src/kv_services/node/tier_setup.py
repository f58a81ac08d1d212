"""Opens the tiers that the cluster file gives a node, and says what of an earlier life may stay in them."""

from collections.abc import Callable
from pathlib import Path
from typing import Final

from kv_consistency.update import scope_id
from kv_core.ids import NodeId
from kv_prefix.events import Tier
from kv_prefix.tiers.blocks import PlacedBlock, TierBlock
from kv_prefix.tiers.cost import TierCost
from kv_prefix.tiers.disk import DiskShape, DiskStore
from kv_prefix.tiers.remote import RemoteStore, require_usable
from kv_prefix.tiers.spill import SpillQueue
from kv_prefix.tiers.store import TierStore
from kv_services.config import ClusterConfig, RemoteTierSection, Role
from kv_services.membership.actor import ClusterView
from kv_services.membership.state import Liveness
from kv_services.node.context import NodeContext
from kv_services.node.orphans import Orphans, Peers
from kv_services.node.tier import NodeTier, Opened
from kv_services.purge_file import PurgeFile
from kv_services.sizes import parse_bytes
from kv_services.tenants import OPEN_TENANT, tenant_mark, tenant_scope

SPILL_SHARE: Final = 16
"""At most one slot in so many is held because it is being written to a tier."""
DISK_NS_PER_BYTE: Final = 4.0
"""Assumed of a disk before the first load: 250 MB/s."""
DISK_OVERHEAD_NS: Final = 2_000_000.0
REMOTE_NS_PER_BYTE: Final = 20.0
"""Assumed of an object store before the first load: 50 MB/s."""
REMOTE_OVERHEAD_NS: Final = 50_000_000.0

OpenDisk = Callable[[Path, DiskShape, int], tuple[TierStore, list[PlacedBlock]]]
"""Opens a folder for blocks of that shape, of so many bytes; gives the medium and what it holds, oldest first."""


def open_tiers(
    ctx: NodeContext, weights_revision: str, cluster: ClusterView, open_disk: OpenDisk = DiskStore.open
) -> None:
    """Open what is configured.

    Args:
        cluster: says who is gone, whose objects are taken over.
        open_disk: makes the medium of the disk tier.

    Raises:
        TierError: a tier cannot be used: its folder is in use, holds no block, or cannot be written; the profile with
            the object store's keys is not there.
        MissingExtraError: a remote tier is configured, and its library is not installed.
    """
    config = ctx.config
    ctx.tiers.keep_only(blocks_to_keep(config, weights_revision))
    shape = _shape(ctx)
    disk = config.tiers.disk
    if disk is not None:
        ctx.tiers.keep_purges(PurgeFile(config.state_path / "lives", ctx.node.id))
        folder = Path(disk.path) if disk.path else config.state_path / "tiers"
        opened = Opened.of(*open_disk(folder / ctx.node.id, shape, parse_bytes(disk.size)))
        cost = TierCost("disk", shape.block_nbytes, DISK_NS_PER_BYTE, DISK_OVERHEAD_NS)
        ctx.tiers.add(_node_tier(ctx, Tier.DISK, opened, cost))

    remote = config.tiers.remote
    if remote is not None:
        require_usable(remote.url)
        ctx.tiers.keep_purges(PurgeFile(config.state_path / "lives", ctx.node.id))
        _open_remote(ctx, remote, shape, cluster)


def _open_remote(ctx: NodeContext, remote: RemoteTierSection, shape: DiskShape, cluster: ClusterView) -> None:
    cost = TierCost("remote", shape.block_nbytes, REMOTE_NS_PER_BYTE, REMOTE_OVERHEAD_NS)
    stores: list[RemoteStore] = []

    def open_store() -> Opened:
        settings = parse_bytes(remote.size), remote.endpoint, remote.abandoned_after_s
        store, held = RemoteStore.open(remote.url, ctx.node.id, shape, *settings)
        stores[:] = [store]
        return Opened.of(store, held)

    def make_tier(opened: Opened) -> NodeTier:
        tier = _node_tier(ctx, Tier.REMOTE, opened, cost)
        ctx.tiers.orphans = Orphans(
            *(ctx.node_id, stores[0], tier, _peers(cluster), ctx.clock, ctx.tiers.may_serve),
            abandoned_after_s=remote.abandoned_after_s,
        )
        return tier

    ctx.tiers.open_later(open_store, make_tier)


def _peers(cluster: ClusterView) -> Peers:
    members = cluster.view.members

    def liveness(node_id: NodeId) -> Liveness | None:
        member = members.get(node_id)
        return None if member is None else member.liveness

    return Peers(
        living=lambda: cluster.alive(Role.PREFILL, Role.DECODE, Role.STORE),
        liveness=liveness,
        gone=lambda: frozenset(node_id for node_id, member in members.items() if member.liveness is Liveness.DEAD),
    )


def _shape(ctx: NodeContext) -> DiskShape:
    geometry = ctx.arena.geometry
    name = f"{geometry.dtype.value}, {geometry.num_planes} planes, {geometry.num_kv_heads} heads of {geometry.head_dim}"
    return DiskShape(geometry.slot_layer_nbytes, geometry.num_layers, geometry.block_size, name)


def _node_tier(ctx: NodeContext, tier: Tier, opened: Opened, cost: TierCost) -> NodeTier:
    in_flight = max(1, ctx.arena.num_slots // SPILL_SHARE)
    queue = SpillQueue(ctx.pool, opened.catalog, in_flight, ctx.tiers.scopes_of)
    return NodeTier(tier, opened, queue, ctx.arena, ctx.clock, ctx.metrics, cost, on_events=ctx.tiers.on_events)


def blocks_to_keep(config: ClusterConfig, weights_revision: str) -> Callable[[TierBlock], bool]:
    """Which blocks of an earlier life may stay: those of these weights, of tenants that there still are."""
    weights = scope_id("weights", f"{config.model.id}@{weights_revision}")
    tenants = [(tenant.id, tenant.salt) for tenant in config.tenants] or [(OPEN_TENANT, "")]
    allowed = {tenant_scope(tenant_mark(name, secret)) for name, secret in tenants}

    def keep(block: TierBlock) -> bool:
        scopes = {block.scopes[i : i + 8] for i in range(0, len(block.scopes), 8)}
        return weights in scopes and not allowed.isdisjoint(scopes)

    return keep

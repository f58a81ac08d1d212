"""Tells of a node's KV where the cluster file says so, and of nobody's KV that is not named there."""

from kv_bus.supervisor import ChildSpec
from kv_services.kv_events.publish import EventPublisher
from kv_services.node.context import NodeContext
from kv_services.process import keep
from kv_services.tenants import OPEN_TENANT, tenant_mark, tenant_scope


def event_children(ctx: NodeContext) -> list[ChildSpec]:
    """The publisher of a node that has ports for it."""
    node, config = ctx.node, ctx.config
    if not node.kv_events_port:
        return []
    tenants = [(tenant.id, tenant.salt) for tenant in config.tenants] or [(OPEN_TENANT, "")]
    told = {tenant_scope(tenant_mark(name, secret)) for name, secret in tenants if name in config.kv_events.tenants}

    def may_tell(digest: bytes) -> bool:
        return not told.isdisjoint(ctx.replica.known(digest, ctx.block_size).scopes)

    host = f"[{node.host}]" if ":" in node.host else node.host
    publisher = EventPublisher(
        f"tcp://{host}:{node.kv_events_port}",
        f"tcp://{host}:{node.kv_replay_port}",
        ctx.block_size,
        ctx.clock,
        may_tell,
    )
    ctx.listeners.append(publisher.pool_events)
    return [keep("kv events", publisher)]

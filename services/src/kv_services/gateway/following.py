"""The engines outside the cluster whose KV a gateway's index follows."""

from kv_core.ids import Incarnation, NodeId
from kv_core.namespace import Namespace
from kv_prefix.prefix_index import Holder, PrefixIndex
from kv_services.config import ClusterConfig
from kv_services.kv_events.follow import EngineEvents
from kv_services.kv_events.follow_state import EngineFollower
from kv_services.tenants import OPEN_TENANT, namespace_salt


def followed_engines(config: ClusterConfig, index: PrefixIndex, weights_revision: str) -> list[EngineEvents]:
    """One follower for each engine of the cluster file. They serve the cluster's model, in blocks of its size."""
    secrets = {tenant.id: tenant.salt for tenant in config.tenants}
    engines = []
    for engine in config.kv_events.follow:
        tenant = engine.tenant or OPEN_TENANT
        namespace = Namespace(
            config.model.id,
            weights_revision,
            salt=namespace_salt(tenant, secrets.get(tenant, ""), None),
            dtype=config.model.dtype,
            block_size=config.model.block_size,
        )
        holder = Holder(NodeId(engine.name), Incarnation(1))
        follower = EngineFollower(namespace, dict(engine.loras))
        engines.append(EngineEvents(holder, engine.events, engine.replay, follower, index))
    return engines

"""Which tenants a node's pool counts, and what the cluster file lets each of them hold."""

from kv_prefix.quotas import AccountLimits, AccountSource
from kv_services.config import ClusterConfig, TenantConfig
from kv_services.config_errors import ConfigError
from kv_services.replica.service import ReplicaService
from kv_services.sizes import parse_bytes
from kv_services.tenants import tenant_mark, tenant_scope


def tenant_accounts(
    config: ClusterConfig, replica: ReplicaService, block_nbytes: int, block_size: int
) -> AccountSource | None:
    """An account for each tenant; None in a cluster without any.

    Raises:
        ConfigError: a quota is less than one block.
    """
    if not config.tenants:
        return None
    name_of = {tenant_scope(tenant_mark(tenant.id, tenant.salt)): tenant.id for tenant in config.tenants}

    def account_of(digest: bytes) -> str | None:
        # A namespace is purged by its tenant's scope, so that is what says whose it is.
        scopes = replica.known(digest, block_size).scopes
        return next((name_of[scope] for scope in scopes if scope in name_of), None)

    limits = {
        tenant.id: AccountLimits(_max_blocks(tenant, block_nbytes), tenant.retain_quota) for tenant in config.tenants
    }
    return AccountSource(limits, account_of)


def _max_blocks(tenant: TenantConfig, block_nbytes: int) -> int | None:
    if tenant.kv_quota is None:
        return None
    count = parse_bytes(tenant.kv_quota) // block_nbytes
    if count < 1:
        raise ConfigError(
            file="cluster", path=f"$.tenant[{tenant.id}].kv_quota", problem=f"expected at least {block_nbytes} B"
        )
    return count

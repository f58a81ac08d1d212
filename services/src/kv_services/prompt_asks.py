"""How operators name a prompt: a tenant's tokens, or a past request. The namespace is made here, so no salt travels."""

from typing import Annotated

import msgspec
import numpy as np
from msgspec import Meta

from kv_core import limits as core_limits
from kv_core.errors import KVError
from kv_core.namespace import Namespace
from kv_services.config import ClusterConfig
from kv_services.tenants import OPEN_TENANT, namespace_salt

Token = Annotated[int, Meta(ge=0, le=core_limits.MAX_TOKEN_ID)]


class UnknownTenantError(KVError):
    """The cluster file has no such tenant."""

    code = 7070
    template = "there is no tenant {tenant!r}; there are: {known}"


class UnknownPromptError(KVError):
    """The request is not remembered here, or no prompt was given."""

    code = 7071
    template = "no prompt: {cause}"


class PromptAsk(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A prompt: a tenant's tokens, or what a past request asked."""

    tenant: str = OPEN_TENANT
    cache_salt: str | None = None
    tokens: Annotated[list[Token], Meta(max_length=core_limits.MAX_TOKENS_PER_REQUEST)] = []
    request_id: Annotated[str, Meta(max_length=core_limits.MAX_NAME_BYTES)] = ""

    def token_bytes(self) -> bytes:
        """The tokens, uint32 little-endian.

        Raises:
            UnknownPromptError: there are none.
        """
        if not self.tokens:
            raise UnknownPromptError(cause="give tokens or the id of a past request")
        return np.asarray(self.tokens, dtype="<u4").tobytes()


def tenant_namespace(config: ClusterConfig, weights_revision: str, tenant: str, cache_salt: str | None) -> Namespace:
    """Where a tenant's prompts of the cluster's model lie.

    Raises:
        UnknownTenantError: the cluster file has no such tenant.
    """
    model = config.model
    return Namespace(
        model.id,
        weights_revision,
        salt=namespace_salt(tenant, tenant_secret(config, tenant), cache_salt),
        dtype=model.dtype,
        block_size=model.block_size,
    )


def tenant_secret(config: ClusterConfig, tenant: str) -> str:
    """The secret salt of a tenant; empty for whoever asks a cluster without tenants.

    Raises:
        UnknownTenantError: the cluster file has no such tenant.
    """
    for one in config.tenants:
        if one.id == tenant:
            return one.salt
    if tenant == OPEN_TENANT and not config.tenants:
        return ""
    raise UnknownTenantError(tenant=tenant, known=", ".join(one.id for one in config.tenants) or OPEN_TENANT)

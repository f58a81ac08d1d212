"""Decides who asks, and under which salt that tenant's KV is named.

N1: without keys everybody is the tenant `default`, and the front serves loopback only (`OpenGatewayError` otherwise).
N2: a key is compared in constant time with every known one; neither its text nor its length shows in timing or logs.
N3: a client names no tenant and no namespace: what it may add (`cache_salt`) is hashed below its tenant, so that two
    tenants have equal salts for no input of theirs.
"""

import hashlib
import hmac
import ipaddress
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final, Protocol

from kv_core.ids import TenantId
from kv_services.gateway.errors import AuthenticationError, OpenGatewayError, PermissionDeniedError
from kv_services.tenants import OPEN_TENANT as _OPEN
from kv_services.tenants import namespace_salt

OPEN_TENANT: Final = TenantId(_OPEN)
"""Whoever asks a gateway without keys."""

OPEN_RETAIN_TTL_MAX_S: Final = 86_400
"""For how long prompts may be kept in a cluster without tenants: a day, and in no more than half of a node's memory."""

_BEARER: Final = "bearer"


class TenantSettings(Protocol):
    """A tenant as the cluster file gives it."""

    @property
    def tenant_id(self) -> TenantId: ...
    @property
    def api_keys(self) -> Sequence[str]: ...
    @property
    def salt(self) -> str: ...
    @property
    def max_requests(self) -> int: ...
    @property
    def retain_quota(self) -> int: ...
    @property
    def retain_ttl_max_s(self) -> int: ...


@dataclass(frozen=True, slots=True)
class Caller:
    """Who makes a request.

    Attributes:
        salt: of the tenant, as configured.
        max_requests: how many it may have open; 0: no limit.
        retain_ttl_max_s: for how long it may ask to keep a prompt; 0: it may not.
    """

    tenant: TenantId
    salt: str = field(default="", repr=False)
    max_requests: int = 0
    retain_ttl_max_s: int = 0


class ApiKeys:
    """The keys of a cluster.

    Args:
        tenants: who may ask for completions; none: everybody on this machine.
        operator_keys: who may read /metrics and /status; without tenants and such keys, everybody on this machine.
    """

    def __init__(self, tenants: Iterable[TenantSettings] = (), operator_keys: Iterable[str] = ()) -> None:
        self._callers = [
            (
                _digest(key),
                Caller(
                    tenant.tenant_id,
                    tenant.salt,
                    tenant.max_requests,
                    tenant.retain_ttl_max_s if tenant.retain_quota else 0,
                ),
            )
            for tenant in tenants
            for key in tenant.api_keys
        ]
        self._operators = [_digest(key) for key in operator_keys]

    @property
    def open(self) -> bool:
        """Whether no key is asked for."""
        return not self._callers

    def check_bind(self, host: str) -> None:
        """Refuse to serve the network without keys.

        Raises:
            OpenGatewayError: no key is configured and `host` is not a loopback address.
        """
        if self.open and not is_loopback(host):
            raise OpenGatewayError(host=host)

    def caller(self, authorization: str | None) -> Caller:
        """Whose key that `Authorization` header carries.

        Raises:
            AuthenticationError: none, another scheme, or nobody's key.
        """
        if self.open:
            return Caller(OPEN_TENANT, retain_ttl_max_s=OPEN_RETAIN_TTL_MAX_S)
        given = _digest(_bearer(authorization))
        found = None
        for digest, caller in self._callers:
            if hmac.compare_digest(digest, given):
                found = caller
        if found is None:
            raise AuthenticationError(detail="incorrect API key")
        return found

    def check_operator(self, authorization: str | None) -> None:
        """Let operators pass.

        Raises:
            AuthenticationError: no key, or nobody's.
            PermissionDeniedError: a tenant's key, or no operator key is configured.
        """
        if self.open and not self._operators:
            return
        given = _digest(_bearer(authorization))
        known = False
        for digest in self._operators:
            known |= hmac.compare_digest(digest, given)
        if not known:
            if self.open:
                raise AuthenticationError(detail="incorrect operator's key")
            self.caller(authorization)
            raise PermissionDeniedError(detail="this path needs an operator's key")


def fold_salt(caller: Caller, cache_salt: str | None = None) -> str:
    """The namespace salt of a request (N3): the tenant's mark, then 32 hexadecimal digits (`kv_services.tenants`)."""
    return namespace_salt(caller.tenant, caller.salt, cache_salt)


def is_loopback(host: str) -> bool:
    """Whether that host name or address can only be this machine."""
    if host.lower().rstrip(".") == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def _bearer(authorization: str | None) -> str:
    if not authorization:
        raise AuthenticationError(detail="an API key is needed: send 'Authorization: Bearer KEY'")
    scheme, _, key = authorization.partition(" ")
    key = key.strip()
    if scheme.lower() != _BEARER or not key:
        raise AuthenticationError(detail="the Authorization header must be 'Bearer KEY'")
    return key


def _digest(key: str) -> bytes:
    # surrogateescape: a header may hold any byte, and none of them may raise.
    return hashlib.blake2b(key.encode("utf-8", "surrogateescape"), digest_size=32).digest()

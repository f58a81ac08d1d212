"""How tenants show in namespaces: a salt begins with its tenant's mark, so that all of a tenant's KV can be purged.

T1: two tenants have equal marks, or equal salts, for no input of theirs: every part is hashed with its length.
T2: a mark tells nothing of the tenant's secret salt.
"""

import hashlib
from typing import Final

from kv_consistency.update import scope_id

SEPARATOR: Final = "."
OPEN_TENANT: Final = "default"
"""Whoever asks a cluster without API keys."""
MARK_BYTES: Final = 8


def tenant_mark(tenant: str, secret: str) -> str:
    """The first part of every salt of a tenant: 16 hexadecimal digits."""
    return _digest(b"kv-tenant-mark", MARK_BYTES, (tenant, secret))


def namespace_salt(tenant: str, secret: str, cache_salt: str | None) -> str:
    """The salt of a tenant's namespace, further divided by what its client asks for: the mark, a dot, 32 digits."""
    return tenant_mark(tenant, secret) + SEPARATOR + _digest(b"kv-tenant-salt", 16, (tenant, secret, cache_salt))


def tenant_scope(salt: str) -> bytes:
    """What purges all namespaces of the tenant that this salt belongs to."""
    return scope_id("tenant", salt.partition(SEPARATOR)[0])


def _digest(person: bytes, size: int, parts: tuple[str | None, ...]) -> str:
    digest = hashlib.blake2b(digest_size=size, person=person)
    for part in parts:
        if part is None:
            digest.update(b"\x00")
        else:
            raw = part.encode()
            digest.update(b"\x01" + len(raw).to_bytes(8, "big") + raw)
    return digest.hexdigest()

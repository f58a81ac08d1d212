"""Causally consistent metadata for a distributed KV cache: clock, version vectors, update log, claims.

The facade is `KvCacheConsistencyManager`; events go in (`kv_consistency.events`), effects come out
(`kv_consistency.effects`), `MESSAGES` cross the bus unchanged. Pure: no loop, no socket, no clock.
"""

from kv_consistency.errors import (
    ConsistencyError,
    FencedError,
    HolderLostError,
    IncompleteError,
    NotFoundError,
    ReplicaFencedError,
    ShrinkingUpdateError,
    SkippingUpdateError,
    StaleReplicaError,
)
from kv_consistency.events import Instant
from kv_consistency.hlc import HybridLogicalClock, Timestamp
from kv_consistency.manager import KvCacheConsistencyManager, KvCacheEntry, PrefixHolder, PrefixOverlap
from kv_consistency.messages import MESSAGES
from kv_consistency.replica import ReplicaConfig
from kv_consistency.update import NamespaceRef, OwnerEpoch, Tier, scope_id
from kv_consistency.version_vector import CausalToken, Comparison, Dot, Origin, VersionVector, next_incarnation

__all__ = [
    "MESSAGES",
    "CausalToken",
    "Comparison",
    "ConsistencyError",
    "Dot",
    "FencedError",
    "HolderLostError",
    "HybridLogicalClock",
    "IncompleteError",
    "Instant",
    "KvCacheConsistencyManager",
    "KvCacheEntry",
    "NamespaceRef",
    "NotFoundError",
    "Origin",
    "OwnerEpoch",
    "PrefixHolder",
    "PrefixOverlap",
    "ReplicaConfig",
    "ReplicaFencedError",
    "ShrinkingUpdateError",
    "SkippingUpdateError",
    "StaleReplicaError",
    "Tier",
    "Timestamp",
    "VersionVector",
    "next_incarnation",
    "scope_id",
]

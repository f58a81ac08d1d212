"""One-sided, checked transfers of KV blocks: arenas, a transfer agent, and the engine that moves requests' KV."""

from kv_transport.agent import TransferAgent
from kv_transport.arena import Arena
from kv_transport.codecs import Codec
from kv_transport.config import TransportConfig
from kv_transport.engine import KVCacheTransferEngine
from kv_transport.futures import TransferFuture
from kv_transport.handover import Handover
from kv_transport.inbound import Inbound, LayerArrival
from kv_transport.recovery import (
    FallbackToTcp,
    FullPrefillFallback,
    RecoveryAction,
    RetryOnAlternateNode,
    RetryWithBackoff,
    TransferTask,
    diagnose_transfer_failure,
)
from kv_transport.regions import Inventory, InventoryItem, MemoryRegion, Notif, SharedBuffer, XferDesc
from kv_transport.reshard_fetch import HeadSplit, ReshardFuture
from kv_transport.reshard_push import HeadInbound, HeadLanding
from kv_transport.stats import AgentStats, PeerStats
from kv_transport.tickets import AgentMetadata, KVForm, ReadGrant, RegionInfo, WriteGrant
from kv_transport.types import Access, PeerName, TransferPriority, TransferStats, XferOp, XferState
from kv_transport.xfer import Xfer, XferDlist

__all__ = [
    "Access",
    "AgentMetadata",
    "AgentStats",
    "Arena",
    "Codec",
    "FallbackToTcp",
    "FullPrefillFallback",
    "Handover",
    "HeadInbound",
    "HeadLanding",
    "HeadSplit",
    "Inbound",
    "Inventory",
    "InventoryItem",
    "KVCacheTransferEngine",
    "KVForm",
    "LayerArrival",
    "MemoryRegion",
    "Notif",
    "PeerName",
    "PeerStats",
    "ReadGrant",
    "RecoveryAction",
    "RegionInfo",
    "ReshardFuture",
    "RetryOnAlternateNode",
    "RetryWithBackoff",
    "SharedBuffer",
    "TransferAgent",
    "TransferFuture",
    "TransferPriority",
    "TransferStats",
    "TransferTask",
    "TransportConfig",
    "WriteGrant",
    "Xfer",
    "XferDesc",
    "XferDlist",
    "XferOp",
    "XferState",
    "diagnose_transfer_failure",
]

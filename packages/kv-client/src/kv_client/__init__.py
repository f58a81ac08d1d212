"""Read, store and pin the KV of prefixes at a node, without being one.

async with Client(ClientConfig(...)) as client:
    with await client.get_blocks(namespace, tokens, num_blocks) as blocks:
        await blocks.layer_ready(0)
        use(blocks.array(0))
"""

from kv_client.blocks import PrefixBlocks
from kv_client.client import Client
from kv_client.config import ClientConfig
from kv_client.errors import (
    AlreadyReleased,
    CheckFailed,
    ClientError,
    DeadlineExceeded,
    HolderFull,
    HolderLost,
    HolderRefused,
    InvalidRead,
    LayerNotReady,
    LeaseLost,
    Miss,
    NoRoom,
    WrongArrays,
)
from kv_client.puts import PinnedPrefix, StoredPrefix
from kv_client.sync import SyncClient, SyncPrefixBlocks

__all__ = [
    "AlreadyReleased",
    "CheckFailed",
    "Client",
    "ClientConfig",
    "ClientError",
    "DeadlineExceeded",
    "HolderFull",
    "HolderLost",
    "HolderRefused",
    "InvalidRead",
    "LayerNotReady",
    "LeaseLost",
    "Miss",
    "NoRoom",
    "PinnedPrefix",
    "PrefixBlocks",
    "StoredPrefix",
    "SyncClient",
    "SyncPrefixBlocks",
    "WrongArrays",
]

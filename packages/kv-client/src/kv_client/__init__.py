"""Read the KV of shared prefixes from a node, without being one.

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
    HolderLost,
    HolderRefused,
    InvalidRead,
    LayerNotReady,
    LeaseLost,
    Miss,
    NoRoom,
)

__all__ = [
    "AlreadyReleased",
    "CheckFailed",
    "Client",
    "ClientConfig",
    "ClientError",
    "DeadlineExceeded",
    "HolderLost",
    "HolderRefused",
    "InvalidRead",
    "LayerNotReady",
    "LeaseLost",
    "Miss",
    "NoRoom",
    "PrefixBlocks",
]

"""Store a KV cache made of NumPy arrays at a node, and fetch it again. Takes the arguments of `read_a_prefix.py`."""

import numpy as np
from read_a_prefix import arguments, configure

from kv_client import SyncClient

config, namespace, tokens = configure(arguments())
g, num_blocks = config.geometry, len(tokens) // config.geometry.block_size
shape = (num_blocks, g.num_planes, g.num_kv_heads, g.block_size, g.head_dim)
layers = [np.random.default_rng(layer).integers(0, 1 << 15, shape, dtype=np.uint16) for layer in range(g.num_layers)]
with SyncClient(config) as client:
    stored = client.put_blocks(namespace, tokens, layers)
    found = client.lookup(namespace, tokens)
    with client.get_blocks(namespace, tokens, found.num_blocks) as blocks:
        blocks.wait()
        equal = all(np.array_equal(blocks.array(layer), layers[layer]) for layer in range(g.num_layers))
print(f"sent {stored.num_sent} blocks, found {found.num_blocks}, equal: {equal}")

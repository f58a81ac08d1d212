"""A client that holds a lease and a pin until it is killed. Takes the arguments of the examples."""

import sys
import time
from pathlib import Path

from kv_client import SyncClient

sys.path.insert(0, str(Path(__file__).parents[2] / "packages" / "kv-client" / "examples"))
from read_a_prefix import arguments, configure

config, namespace, tokens = configure(arguments())
client = SyncClient(config)
client.start()
num_blocks = len(tokens) // config.geometry.block_size
blocks = client.get_blocks(namespace, tokens, num_blocks)
blocks.wait()
client.pin(namespace, tokens, num_blocks)
print("holding", flush=True)
time.sleep(600)

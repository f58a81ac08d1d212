"""Read the KV of a prompt from a node of a running cluster.

    python read_a_prefix.py --keys state/keys --allow-list state/keys/allowed.toml --name reader-1 \
        --holder prefill-1 --holder-requests tcp://127.0.0.1:7101 --holder-events tcp://127.0.0.1:7102 \
        --model stub --weights stub-1 --salt SALT --tokens 1,2,3,...

`--name` needs a key pair in the folder and a line in the list. The salt is the namespace's: the one that the gateway
derived for the tenant whose request put the prompt there. Figures of the blocks default to those of the stub engine.
"""

import argparse
import asyncio
from pathlib import Path

from kv_bus.interface import PeerAddress
from kv_bus.ports import pick_ports
from kv_client import Client, ClientConfig, ClientError
from kv_core.block import BlockGeometry
from kv_core.dtypes import parse_dtype
from kv_core.ids import node_id
from kv_core.namespace import Namespace
from kv_transport import TransportConfig


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("keys", "allow-list"):
        parser.add_argument(f"--{name}", type=Path, required=True)
    for name in ("name", "holder", "holder-requests", "holder-events", "model", "weights", "tokens"):
        parser.add_argument(f"--{name}", required=True)
    parser.add_argument("--salt", default="")
    parser.add_argument("--dtype", default="bf16")
    for name, value in (("layers", 4), ("kv-heads", 2), ("head-dim", 16), ("block-size", 16)):
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--socket-folder", type=Path, help="read over shared memory, with sockets here; else over tcp")
    return parser.parse_args()


def configure(args: argparse.Namespace) -> tuple[ClientConfig, Namespace, list[int]]:
    """The client, the namespace and the tokens that the command line names."""
    dtype, tokens = parse_dtype(args.dtype), [int(token) for token in args.tokens.split(",")]
    requests, events = (f"tcp://127.0.0.1:{port}" for port in pick_ports(2))
    config = ClientConfig(
        node_id=node_id(args.name),
        requests=requests,
        events=events,
        keys_folder=args.keys,
        allow_list=args.allow_list,
        holder=PeerAddress(node_id(args.holder), args.holder_requests, args.holder_events),
        geometry=BlockGeometry(
            num_layers=args.layers,
            num_kv_heads=args.kv_heads,
            head_dim=args.head_dim,
            dtype=dtype,
            block_size=args.block_size,
        ),
        num_slots=max(1, len(tokens) // args.block_size),
        transport=TransportConfig(
            transport="shm" if args.socket_folder else "tcp",
            socket_folder=args.socket_folder,
            tcp_host=None if args.socket_folder else "127.0.0.1",
        ),
    )
    return config, Namespace(args.model, args.weights, salt=args.salt, dtype=dtype, block_size=args.block_size), tokens


async def main(args: argparse.Namespace) -> int:
    config, namespace, tokens = configure(args)
    try:
        async with Client(config) as client:
            with await client.get_blocks(namespace, tokens, len(tokens) // args.block_size) as blocks:
                for layer in range(args.layers):
                    await blocks.layer_ready(layer)
                    print(f"layer {layer}: {blocks.array(layer).shape} {blocks.array(layer).dtype}")
                stats = await blocks.wait()
                print(f"{stats.nbytes} bytes over {stats.transport}")
    except ClientError as error:
        print(f"{type(error).__name__}: {error}")
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(asyncio.run(main(arguments())))

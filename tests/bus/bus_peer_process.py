"""A node in a process of its own: `python bus_peer_process.py FOLDER NODE INCARNATION PORT PORT`.

It answers `Echo`, swallows `Slow`, publishes a counter, and stops when its standard input ends.
"""

import asyncio
import sys
from pathlib import Path

import uvloop

from kv_bus.interface import DEFERRED
from kv_bus.keys import AllowListFile, load_key_pair
from kv_bus.stamps import LamportStamper
from kv_bus.zmq_bus import ZmqBus, ZmqBusConfig
from kv_core.ids import Incarnation, NodeId
from tests.bus.helpers_bus import REGISTRY, Echo, Echoed, Noted, Slow


async def main(folder: Path, name: str, incarnation: int, requests: int, events: int) -> None:
    node_id = NodeId(name)
    config = ZmqBusConfig(
        node_id,
        Incarnation(incarnation),
        f"tcp://127.0.0.1:{requests}",
        f"tcp://127.0.0.1:{events}",
        load_key_pair(folder, node_id),
        AllowListFile(folder / "cluster.keys"),
    )
    bus = ZmqBus(config, REGISTRY, stamper=LamportStamper(node_id))
    bus.handle(Echo, lambda request: Echoed(request.message.body, request.message.number))
    bus.handle(Slow, lambda request: DEFERRED)
    await bus.start()
    print("ready", flush=True)
    loop = asyncio.get_running_loop()
    ended = loop.run_in_executor(None, sys.stdin.read)
    number = 0
    while not ended.done():
        bus.publish(Noted(number))
        number += 1
        await asyncio.sleep(0.01)
    await bus.close()


if __name__ == "__main__":
    uvloop.run(main(Path(sys.argv[1]), sys.argv[2], *map(int, sys.argv[3:6])))

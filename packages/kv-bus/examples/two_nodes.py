"""Two nodes of one cluster on this machine: a counter that is asked, and a client that listens.

Run it: `python two_nodes.py`. It makes keys in a temporary folder, binds two nodes on loopback, and ends by itself.
"""

import asyncio
import tempfile
from dataclasses import dataclass
from pathlib import Path

from kv_bus.actor import Actor
from kv_bus.errors import BusError
from kv_bus.interface import DEFERRED, Deferred, Event, GapDetected, PeerAddress, Request
from kv_bus.keys import AllowList, AllowListFile, create_key_pair, load_key_pair, write_allow_list
from kv_bus.ports import pick_ports
from kv_bus.stamps import LamportStamper
from kv_bus.supervisor import ChildSpec, Supervisor
from kv_bus.zmq_bus import ZmqBus, ZmqBusConfig
from kv_core.ids import Incarnation, NodeId
from kv_core.wire import Message, Registry

SECOND_NS = 1_000_000_000
COUNTER, CLIENT = NodeId("counter"), NodeId("client")


class Add(Message, frozen=True, tag="example.add"):
    """Add to the count; the answer is `Count`."""

    amount: int


class Count(Message, frozen=True, tag="example.count"):
    """The count; also published when it changes."""

    value: int


class CannotCountDown(BusError):
    """The counter only grows."""

    code = 2900
    template = "cannot add {amount}"


REGISTRY = Registry(Add, Count)


@dataclass(frozen=True)
class Asked:
    """An event: somebody asked for something."""

    request: Request[Add]


@dataclass(frozen=True)
class Answer:
    """An effect: tell the one who asked, and everybody."""

    request: Request[Add]
    value: int


@dataclass(frozen=True)
class Refuse:
    """An effect: tell the one who asked that it cannot be done."""

    request: Request[Add]


class CounterMachine:
    """Decides; knows no bus and no loop."""

    def __init__(self) -> None:
        self.value = 0

    def step(self, event: Asked) -> list[Answer | Refuse]:
        if event.request.message.amount < 0:
            return [Refuse(event.request)]
        self.value += event.request.message.amount
        return [Answer(event.request, self.value)]


class CounterActor(Actor[Asked, Answer | Refuse]):
    """Acts."""

    def __init__(self, bus: ZmqBus) -> None:
        super().__init__("counter", CounterMachine())
        self._bus = bus

    def perform(self, effect: Answer | Refuse) -> None:
        match effect:
            case Answer(request, value):
                request.reply(Count(value))
                self._bus.publish(Count(value))
            case Refuse(request):
                request.fail(CannotCountDown(amount=request.message.amount))


def make_bus(folder: Path, node_id: NodeId, addresses: dict[NodeId, PeerAddress]) -> ZmqBus:
    """A node of the cluster that knows all others."""
    own = addresses[node_id]
    config = ZmqBusConfig(
        node_id,
        Incarnation(1),  # a service keeps this in its state folder and raises it at every start
        requests=own.requests,
        events=own.events,
        keys=load_key_pair(folder, node_id),
        allow_list=AllowListFile(folder / "cluster.keys"),
    )
    bus = ZmqBus(config, REGISTRY, stamper=LamportStamper(node_id))
    for address in addresses.values():
        if address.node_id != node_id:
            bus.add_peer(address)
    return bus


async def main(folder: Path) -> None:
    nodes = [COUNTER, CLIENT]
    pairs = [create_key_pair(folder, node_id) for node_id in nodes]
    write_allow_list(folder / "cluster.keys", AllowList("example", {pair.node_id: pair.public_key for pair in pairs}))
    ports = pick_ports(2 * len(nodes))
    addresses = {
        node_id: PeerAddress(node_id, f"tcp://127.0.0.1:{ports[2 * i]}", f"tcp://127.0.0.1:{ports[2 * i + 1]}")
        for i, node_id in enumerate(nodes)
    }

    counter_bus = make_bus(folder, COUNTER, addresses)
    client_bus = make_bus(folder, CLIENT, addresses)
    boss = Supervisor(
        "example",
        [
            ChildSpec("counter bus", lambda: counter_bus),
            ChildSpec("counter", lambda: CounterActor(counter_bus), drain_timeout_ns=SECOND_NS),
            ChildSpec("client bus", lambda: client_bus),
        ],
    )
    counter = boss.ref("counter", Asked)

    def on_add(request: Request[Add]) -> Deferred:
        counter.post(Asked(request))  # a full mailbox raises, and the caller gets that error
        return DEFERRED

    counter_bus.handle(Add, on_add)
    await boss.start()

    heard = asyncio.Event()

    def on_event(event: Event[Message]) -> None:
        print(f"heard {event.message} as number {event.sequence} of {event.origin}")
        heard.set()

    def on_gap(gap: GapDetected) -> None:
        print(f"missed {gap.first_missing} to {gap.last_missing} of {gap.origin}")

    print("answer:", (await client_bus.request(COUNTER, Add(40), expect=Count, timeout_ns=5 * SECOND_NS)).value)
    client_bus.subscribe(COUNTER, on_event, on_gap)  # too late for the first one, and told so
    while not heard.is_set():
        await asyncio.sleep(0.05)
        print("answer:", (await client_bus.request(COUNTER, Add(1), expect=Count, timeout_ns=5 * SECOND_NS)).value)
    try:
        await client_bus.request(COUNTER, Add(-1), expect=Count, timeout_ns=5 * SECOND_NS)
    except CannotCountDown as error:
        print("refused:", error)
    print("stopped cleanly:", (await boss.stop()).clean)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as name:
        asyncio.run(main(Path(name) / "keys"))

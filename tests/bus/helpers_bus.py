"""What the bus tests share: messages, and a world of nodes over either carrier.

A scenario is `async def scenario(world)`; `run_world(kind, scenario)` runs it on a simulated network in virtual time,
or over ZeroMQ on loopback. Time-outs in scenarios bound a wait, they never decide an outcome.
"""

import asyncio
import struct
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable

import msgspec
import uvloop
import zmq

from kv_bus.control import CONTROL
from kv_bus.endpoint import Endpoint
from kv_bus.interface import Event, GapDetected, PeerAddress, PeerEvent, Stamp, Stamper
from kv_bus.keys import AllowList, KeyPair, generate_key_pair
from kv_bus.memory_bus import MemoryBus, MemoryNetwork, NetworkFaults
from kv_bus.ports import pick_ports
from kv_bus.stamps import LamportStamper
from kv_bus.zmq_bus import ZmqBus, ZmqBusConfig
from kv_core.clock import Clock, SystemClock
from kv_core.errors import KVError
from kv_core.ids import Incarnation, NodeId
from kv_core.testing import LoopClock, run_virtual
from kv_core.wire import Envelope, Message, Registry, encode

MS = 1_000_000
S = 1_000_000_000

A, B, C = NodeId("node-a"), NodeId("node-b"), NodeId("node-c")
NAMES = (A, B, C)


class Echo(Message, frozen=True, tag="test.echo"):
    """A request."""

    body: bytes
    number: int = 0


class Echoed(Message, frozen=True, tag="test.echoed"):
    """Its reply."""

    body: bytes
    number: int = 0


class Slow(Message, frozen=True, tag="test.slow"):
    """A request that its handler does not answer at once."""

    number: int = 0


class Noted(Message, frozen=True, tag="test.noted"):
    """A one-way message and an event."""

    number: int


class Foreign(Message, frozen=True, tag="test.foreign"):
    """A type that only some registries know."""

    number: int


class OtherNoted(Message, frozen=True, tag="test.noted"):
    """What a peer of another version takes for `Noted`."""

    number: str


REGISTRY = Registry(Echo, Echoed, Slow, Noted)


def frame(
    message: Message,
    sender: str,
    *,
    incarnation: int = 1,
    target: int = 1,
    call_id: int = 1,
    deadline_ns: int = S,
    registry: Registry = REGISTRY,
) -> bytes:
    """An envelope as bytes, with whatever a hostile node would write into it."""
    known = Registry().include(registry).include(CONTROL)
    envelope = Envelope(
        NodeId(sender), Incarnation(incarnation), Incarnation(target), 0, 0, call_id, deadline_ns, message
    )
    return encode(envelope, known)


class World(ABC):
    """Nodes that can reach each other."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.nodes: dict[NodeId, Endpoint] = {}

    async def node(
        self,
        name: NodeId,
        incarnation: int = 1,
        *,
        registry: Registry = REGISTRY,
        stamper: Stamper | None = None,
        start: bool = True,
    ) -> Endpoint:
        """A started node that knows all others; `Echo` is answered."""
        bus = self.make(name, Incarnation(incarnation), registry, stamper or LamportStamper(name))
        for other in NAMES:
            if other != name:
                bus.add_peer(self.address(other))
        if Echo in registry.by_class:
            bus.handle(Echo, lambda request: Echoed(request.message.body, request.message.number))
        self.nodes[name] = bus
        if start:
            await bus.start()
        return bus

    async def until(self, condition: Callable[[], bool], timeout_s: float = 20.0) -> None:
        """Wait for what must come; fail when it does not."""
        until_ns = self.clock.monotonic_ns() + int(timeout_s * 1e9)
        while not condition():
            assert self.clock.monotonic_ns() < until_ns, "waited in vain"
            await asyncio.sleep(0.002)

    @abstractmethod
    def make(self, name: NodeId, incarnation: Incarnation, registry: Registry, stamper: Stamper) -> Endpoint: ...

    @abstractmethod
    def address(self, name: NodeId) -> PeerAddress: ...

    @abstractmethod
    async def inject(self, owner: NodeId, target: NodeId, data: bytes) -> None:
        """Bring `data` to `target` over a connection made with the key of `owner`."""

    @abstractmethod
    def bar(self, name: NodeId) -> None:
        """Take a node's key out of the list."""

    @abstractmethod
    def admit(self, name: NodeId) -> None:
        """Put it back."""

    async def close(self) -> None:
        for bus in reversed(self.nodes.values()):
            await bus.close()


class MemoryWorld(World):
    """On a simulated network."""

    def __init__(self, clock: Clock, faults: NetworkFaults | None = None) -> None:
        super().__init__(clock)
        self.network = MemoryNetwork("test", faults)

    def make(self, name: NodeId, incarnation: Incarnation, registry: Registry, stamper: Stamper) -> MemoryBus:
        return MemoryBus(self.network, name, incarnation, registry, stamper=stamper, clock=self.clock)

    def address(self, name: NodeId) -> PeerAddress:
        return PeerAddress(name, f"memory:{name}", f"memory:{name}")

    async def inject(self, owner: NodeId, target: NodeId, data: bytes) -> None:
        self.network.inject(owner, target, data)

    def bar(self, name: NodeId) -> None:
        self.network.bar(name)

    def admit(self, name: NodeId) -> None:
        self.network.admit(name)


class ChangingAllowList:
    """A list that a test changes; noticed like a changed file."""

    def __init__(self, current: AllowList) -> None:
        self.current = current
        self.next = current

    def refresh(self) -> bool:
        changed = self.next != self.current
        self.current = self.next
        return changed


class ZmqWorld(World):
    """Over ZeroMQ on loopback."""

    def __init__(self) -> None:
        super().__init__(SystemClock())
        ports = pick_ports(2 * len(NAMES))
        self.ports = {name: (ports[2 * i], ports[2 * i + 1]) for i, name in enumerate(NAMES)}
        self.keys: dict[NodeId, KeyPair] = {name: generate_key_pair(name) for name in NAMES}
        self.lists: dict[NodeId, ChangingAllowList] = {}
        self.public = {name: pair.public_key for name, pair in self.keys.items()}
        self._raw: list[tuple[zmq.Context[zmq.Socket[bytes]], zmq.Socket[bytes]]] = []

    def make(self, name: NodeId, incarnation: Incarnation, registry: Registry, stamper: Stamper) -> ZmqBus:
        self.lists[name] = ChangingAllowList(AllowList("test", dict(self.public)))
        address = self.address(name)
        config = ZmqBusConfig(name, incarnation, address.requests, address.events, self.keys[name], self.lists[name])
        return ZmqBus(config, registry, stamper=stamper)

    def address(self, name: NodeId) -> PeerAddress:
        requests, events = self.ports[name]
        return PeerAddress(name, f"tcp://127.0.0.1:{requests}", f"tcp://127.0.0.1:{events}")

    async def inject(self, owner: NodeId, target: NodeId, data: bytes) -> None:
        await self.inject_packet(owner, target, [struct.pack(">II", 1, len(data)) + data])

    async def inject_packet(self, owner: NodeId, target: NodeId, parts: list[bytes]) -> None:
        """Bring any ZeroMQ message to `target`."""
        dealer = self.dealer(self.keys[owner], self.keys[target].public_key)
        dealer.connect(self.address(target).requests)
        dealer.send_multipart(parts)

    def dealer(self, keys: KeyPair, server_key: str) -> zmq.Socket[bytes]:
        """A socket that is no bus."""
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        dealer = context.socket(zmq.DEALER)
        self._raw.append((context, dealer))
        dealer.linger = 0
        dealer.curve_publickey = keys.public_key.encode()
        dealer.curve_secretkey = keys.secret_key.encode()
        dealer.curve_serverkey = server_key.encode()
        return dealer

    def bar(self, name: NodeId) -> None:
        del self.public[name]
        self._change_lists(name)

    def admit(self, name: NodeId) -> None:
        self.public[name] = self.keys[name].public_key
        self._change_lists(name)

    def _change_lists(self, but: NodeId) -> None:
        for name, source in self.lists.items():
            if name != but:
                source.next = AllowList("test", dict(self.public))

    async def close(self) -> None:
        await super().close()
        for context, socket in self._raw:
            socket.close(0)
            context.term()


Scenario = Callable[[World], Awaitable[None]]


def run_world(kind: str, scenario: Scenario) -> None:
    """Run `scenario` over `memory` or `zmq`, and fail if it left something behind."""

    async def on_memory(clock: LoopClock) -> None:
        await _in_world(MemoryWorld(clock), scenario)

    async def on_zmq() -> None:
        failures: list[dict[str, object]] = []
        asyncio.get_running_loop().set_exception_handler(lambda loop, context: failures.append(context))
        await _in_world(ZmqWorld(), scenario)
        assert not failures, failures

    if kind == "memory":
        run_virtual(on_memory)
    else:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop if kind == "zmq" else None) as runner:
            runner.run(on_zmq())


async def _in_world(world: World, scenario: Scenario) -> None:
    try:
        async with asyncio.timeout(60):
            await scenario(world)
    finally:
        await world.close()
    left = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
    assert not left, f"left behind: {left}"


class Listener:
    """Records what a subscription and a watch tell."""

    def __init__(self) -> None:
        self.events: list[Event[Message]] = []
        self.gaps: list[GapDetected] = []
        self.order: list[str] = []
        self.peers: list[PeerEvent] = []

    def on_event(self, event: Event[Message]) -> None:
        self.events.append(event)
        self.order.append(f"event {event.sequence}")

    def on_gap(self, gap: GapDetected) -> None:
        self.gaps.append(gap)
        self.order.append(f"gap {gap.first_missing}-{gap.last_missing}")

    def count(self, incarnation: int) -> int:
        return sum(event.incarnation == incarnation for event in self.events)

    def numbers(self) -> list[int]:
        return [event.message.number for event in self.events if isinstance(event.message, Noted)]


class RefusingStamper:
    """A clock that takes every remote stamp for too far ahead."""

    def __init__(self, error: Exception) -> None:
        self._inner = LamportStamper(A)
        self._error = error

    def tick(self) -> Stamp:
        return self._inner.tick()

    def merge(self, remote: Stamp, /) -> None:
        raise self._error


class MuteStamper(RefusingStamper):
    """A clock that takes remote stamps and, once `mute`, gives none: its bound cannot be kept on a full disk."""

    mute = False

    def tick(self) -> Stamp:
        if self.mute:
            raise self._error
        return self._inner.tick()

    def merge(self, remote: Stamp, /) -> None:
        self._inner.merge(remote)


def pack(value: object) -> bytes:
    """Any MessagePack."""
    return msgspec.msgpack.encode(value)


class AppError(KVError):
    """An error of a service, known to both sides."""

    code = 2990
    template = "slot {slot} of {node} is taken"


async def subscribed(world: World, publisher: object, listener: Listener) -> None:
    """Publish until the subscription is known to work."""
    before = len(listener.events)
    until_ns = world.clock.monotonic_ns() + 20 * S
    while len(listener.events) == before:
        assert world.clock.monotonic_ns() < until_ns
        publisher.publish(Noted(-1))  # type: ignore[attr-defined]
        await asyncio.sleep(0.02)
    await asyncio.sleep(0.1)


async def settled() -> None:
    """Longer than the list is looked at again."""
    await asyncio.sleep(1.2)


Run = Callable[[Scenario], None]


ZmqScenario = Callable[[ZmqWorld], Awaitable[None]]


def run_zmq(scenario: ZmqScenario) -> None:
    async def narrowed(world: World) -> None:
        assert isinstance(world, ZmqWorld)
        await scenario(world)

    run_world("zmq", narrowed)


def packet(*messages: bytes) -> bytes:
    return struct.pack(f">{len(messages) + 1}I", len(messages), *map(len, messages)) + b"".join(messages)


async def is_alive(world: ZmqWorld) -> None:
    assert await world.nodes[A].request(B, Echo(b"alive"), timeout_ns=20 * S) == Echoed(b"alive")

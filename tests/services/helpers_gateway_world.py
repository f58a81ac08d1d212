"""A gateway's cluster side in virtual time, before nodes that do as their tests say."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field

from kv_bus.interface import PeerAddress, Reply, Request
from kv_bus.memory_bus import MemoryBus, MemoryNetwork
from kv_bus.stamps import LamportStamper
from kv_consistency.update import OwnerEpoch
from kv_consistency.version_vector import Origin
from kv_core.errors import KVError
from kv_core.ids import Incarnation, NodeId, RequestId, TenantId
from kv_core.testing import LoopClock
from kv_core.wire import Registry
from kv_prefix.placement import make_placement_policy
from kv_prefix.prefix_index import PrefixIndex
from kv_services.config import BusSection, Role
from kv_services.event_log import EventLog
from kv_services.gateway.actor import ClusterCompleter, GatewayContext
from kv_services.gateway.completer import Finished, GenerationRequest, KVOptions, SamplingParams, Token
from kv_services.gateway.placing import Placer
from kv_services.gateway.stream import TokenStream
from kv_services.launch import PortReservation, local_config
from kv_services.membership.actor import ClusterView
from kv_services.messages import (
    ROLE_MESSAGES,
    Ack,
    DecodeReserved,
    EndRequest,
    Load,
    OutputToken,
    PrefillDone,
    ReserveDecode,
    RunPrefill,
    TokenBatch,
)
from kv_services.metrics import Metrics
from kv_transport.errors import ConnectionLost

GATEWAY = NodeId("gateway")
BUS = BusSection(heartbeat_interval_ms=50, suspect_after_ms=200, dead_after_ms=1_000)
BLOCK = 16


class Owners:
    """The replica, as far as a request asks for it; `refusal` is what owning and ending raise."""

    def __init__(self) -> None:
        self.epochs: dict[RequestId, int] = {}
        self.refusal: KVError | None = None

    def own(self, request_id: RequestId) -> tuple[OwnerEpoch, bytes]:
        if self.refusal is not None:
            raise self.refusal
        self.epochs[request_id] = self.epochs.get(request_id, 0) + 1
        return OwnerEpoch(self.epochs[request_id], Origin(GATEWAY, Incarnation(1))), b""

    def news(self) -> None:
        """It published everything at once."""

    def end(self, request_id: RequestId) -> None:
        if self.refusal is not None:
            raise self.refusal


@dataclass
class Answer:
    """What a request's client got, and when it was over."""

    tokens: list[int] = field(default_factory=list)
    error: KVError | None = None
    finished: Finished | None = None
    at_s: float = 0.0


class Node:
    """One node: it beats, answers what it is asked, or fails as told."""

    def __init__(self, world: "World", name: NodeId, role: Role) -> None:
        self.name = name
        self.asked: list[str] = []
        self.towards: list[str] = []
        self.ended: list[str] = []
        self.refusal: KVError | None = None
        self.fails_towards: NodeId | None = None
        self.bus = world.bus(name)
        self.view = ClusterView(self.bus, world.clock, BUS, role, {GATEWAY: Role.GATEWAY}, self._load)
        self.bus.handle(ReserveDecode, self._on_reserve)
        self.bus.handle(RunPrefill, self._on_prefill)
        self.bus.handle(EndRequest, self._on_end)
        self._life: asyncio.Task[None] | None = None

    async def start(self) -> None:
        await self.bus.start()
        await self.view.start()
        self._life = asyncio.get_running_loop().create_task(self.view.run())

    async def stop(self) -> None:
        if self._life is not None:
            await self.view.close()
            await self.bus.close()
            await asyncio.gather(self._life, return_exceptions=True)

    def _load(self) -> Load:
        return Load(slots_total=64, slots_free=64)

    def _on_reserve(self, request: Request[ReserveDecode]) -> Reply:
        message = request.message
        self.asked.append(message.request_id)
        if self.refusal is not None:
            raise self.refusal
        if message.compute_locally:
            self._decode(message.request_id, message.epoch)
            return DecodeReserved(message.request_id, message.epoch, 0, 0, None)
        return DecodeReserved(message.request_id, message.epoch, 0, 0, self.name.encode())

    def _on_prefill(self, request: Request[RunPrefill]) -> Reply:
        message = request.message
        self.asked.append(message.request_id)
        if self.refusal is not None:
            raise self.refusal
        self.towards.append(message.decode_node)
        if message.decode_node == self.fails_towards:
            raise ConnectionLost(peer=message.decode_node, transport="tcp", cause="reset")
        self.hand_over(message)
        return PrefillDone(message.request_id, message.epoch, 0, 0, 1, 1, 0, 1, 0, "shm", 1, 0, 1)

    def _on_end(self, request: Request[EndRequest]) -> Reply:
        self.ended.append(request.message.request_id)
        return Ack()

    def hand_over(self, message: RunPrefill) -> None:
        """The decode node has the KV: it decodes."""

    def _decode(self, request_id: str, epoch: int) -> None:
        batch = TokenBatch(request_id, epoch, 0, (OutputToken(7),), "length")
        self.bus.call(GATEWAY, batch, lambda _: None, timeout_ns=10**9)


class World:
    """The gateway and its nodes; those in `nodes` that are not started are silent."""

    def __init__(self, clock: LoopClock, prefill: int = 0, decode: int = 2) -> None:
        self.clock = clock
        self._network = MemoryNetwork()
        self.owners = Owners()
        with PortReservation() as ports:
            self.config = local_config(ports, prefill=prefill, decode=decode, monitor=False, bus=BUS)
        self._roles = {node.node_id: node.role for node in self.config.nodes if node.node_id != GATEWAY}
        self.gateway_bus = self.bus(GATEWAY)
        self.nodes = {name: Node(self, name, role) for name, role in self._roles.items()}
        for node in self.nodes.values():
            node.hand_over = self._handed_over  # type: ignore[method-assign]  # nodes know the gateway alone
        self.events = EventLog(clock)
        self.metrics = Metrics(GATEWAY, "gateway")
        self.view = ClusterView(self.gateway_bus, clock, BUS, Role.GATEWAY, self._roles, Load)
        policy = self.config.routing.policy
        self.ctx = GatewayContext(
            config=self.config,
            clock=clock,
            bus=self.gateway_bus,
            cluster=self.view,
            index=PrefixIndex(),
            placer=Placer(make_placement_policy(policy), make_placement_policy(policy), BLOCK),
            ownership=self.owners,
            metrics=self.metrics,
            model_id="m",
            weights_revision="w",
            events=self.events,
        )
        self.completer = ClusterCompleter(self.ctx)
        self._life: asyncio.Task[None] | None = None
        self._number = 0

    def bus(self, name: NodeId) -> MemoryBus:
        """A bus that knows all others."""
        made = MemoryBus(
            self._network,
            name,
            Incarnation(1),
            Registry(*ROLE_MESSAGES),
            stamper=LamportStamper(name),
            clock=self.clock,
        )
        for peer in [GATEWAY, *self._roles]:
            if peer != name:
                made.add_peer(PeerAddress(peer, f"memory://{peer}", f"memory://{peer}"))
        return made

    async def start(self, nodes: Sequence[str] | None = None) -> None:
        """Start the gateway and these nodes; all when None."""
        await self.gateway_bus.start()
        await self.view.start()
        await self.completer.start()
        self._life = asyncio.get_running_loop().create_task(self.view.run())
        for name, node in self.nodes.items():
            if nodes is None or name in nodes:
                await node.start()

    async def stop(self) -> None:
        await self.completer.close()
        for node in self.nodes.values():
            await node.stop()
        await self.view.close()
        await self.gateway_bus.close()
        assert self._life is not None
        await asyncio.gather(self._life, return_exceptions=True)

    def submit(self, timeout_s: float = 5.0) -> TokenStream:
        """A request for one token."""
        self._number += 1
        now_ns = self.clock.monotonic_ns()
        return self.completer.submit(
            GenerationRequest(
                request_id=RequestId(f"r{self._number}"),
                tenant=TenantId("t"),
                model="m",
                prompt_token_ids=tuple(range(40)),
                sampling=SamplingParams(max_tokens=1),
                stop_token_ids=(),
                deadline_ns=now_ns + int(timeout_s * 1e9),
                received_ns=now_ns,
                kv=KVOptions(salt=""),
            )
        )

    async def ask(self, timeout_s: float = 5.0) -> Answer:
        """Submit a request and follow it to its end."""
        answer = Answer()
        try:
            async with asyncio.timeout(10 * timeout_s):
                async for event in self.submit(timeout_s):
                    if isinstance(event, Token):
                        answer.tokens.append(event.token_id)
                    else:
                        answer.finished = event
        except KVError as error:
            answer.error = error
        answer.at_s = self.clock.monotonic_ns() / 1e9
        return answer

    def noted(self, kind: str) -> list[str]:
        """The links of the gateway's events of that kind."""
        return [event.link for event in self.events.recent() if event.kind == kind]

    def _handed_over(self, message: RunPrefill) -> None:
        self.nodes[NodeId(message.decode_node)]._decode(message.request_id, message.epoch)

"""Tokens on their way to a gateway: each arrives once and in order, whatever was lost or piled up on the way."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field

import pytest

from kv_bus.interface import PeerAddress, Reply, Request
from kv_bus.memory_bus import MemoryBus, MemoryNetwork
from kv_bus.memory_bus.network import Channel
from kv_bus.stamps import LamportStamper
from kv_core.errors import KVError
from kv_core.ids import Incarnation, NodeId, RequestId
from kv_core.testing.loop import LoopClock, run_virtual
from kv_core.wire import Registry
from kv_services.errors import NodeDrainingError, UnknownRequestError
from kv_services.messages import ROLE_MESSAGES, Ack, DecodeGaveUp, OutputToken, TokenBatch
from kv_services.node.outbox import ACK_TIMEOUT_NS, BATCH_TOKENS_MAX, TokenOutbox

NODE, GATEWAY = NodeId("decode-1"), NodeId("gateway")
R = RequestId("r")
S = 1_000_000_000


@dataclass
class Network:
    """Loses what it is told to lose."""

    lost: frozenset[Channel] = frozenset()

    def deliveries(self, source: NodeId, target: NodeId, channel: Channel, nbytes: int) -> Sequence[int]:
        return () if channel in self.lost else (50_000,)

    def is_cut(self, source: NodeId, target: NodeId) -> bool:
        return False


@dataclass
class World:
    """A node's outbox, and a gateway that puts together what arrives."""

    clock: LoopClock
    network: Network = field(default_factory=Network)
    batches: list[TokenBatch] = field(default_factory=list)
    shown: list[int] = field(default_factory=list)
    gave_up: list[DecodeGaveUp] = field(default_factory=list)
    refused: list[tuple[RequestId, int]] = field(default_factory=list)
    refusal: KVError | None = None

    async def start(self) -> None:
        meeting = MemoryNetwork(faults=self.network)
        self.buses = []
        for name, other in ((NODE, GATEWAY), (GATEWAY, NODE)):
            stamper = LamportStamper(name)
            bus = MemoryBus(meeting, name, Incarnation(1), Registry(*ROLE_MESSAGES), stamper=stamper, clock=self.clock)
            bus.add_peer(PeerAddress(other, f"memory://{other}", f"memory://{other}"))
            self.buses.append(bus)
        self.buses[1].handle(TokenBatch, self._on_tokens)
        self.buses[1].handle(DecodeGaveUp, self._on_gave_up)
        for bus in self.buses:
            await bus.start()
        self.outbox = TokenOutbox(
            self.buses[0], self.clock, lambda name, epoch, cause: self.refused.append((name, epoch))
        )

    async def stop(self) -> None:
        self.outbox.close()
        for bus in self.buses:
            await bus.close()

    def say(self, first: int, tokens: tuple[OutputToken, ...], finish: str | None = None, until_s: float = 60) -> None:
        self.outbox.tokens(R, 1, GATEWAY, int(until_s * S), first, tokens, finish)

    def _on_tokens(self, request: Request[TokenBatch]) -> Reply:
        if self.refusal is not None:
            raise self.refusal
        batch = request.message
        self.batches.append(batch)
        assert batch.first_index <= len(self.shown), "no token is skipped"
        self.shown += [token.token_id for token in batch.tokens[len(self.shown) - batch.first_index :]]
        return Ack()

    def _on_gave_up(self, request: Request[DecodeGaveUp]) -> Reply:
        self.gave_up.append(request.message)
        return Ack()


def in_world(scenario: Callable[[World], Awaitable[None]]) -> None:
    async def run(clock: LoopClock) -> None:
        world = World(clock)
        await world.start()
        try:
            await scenario(world)
        finally:
            await world.stop()

    run_virtual(run)


def test_what_piled_up_while_a_gateway_was_out_of_reach_arrives_whole_in_bounded_batches() -> None:
    """In one message it would be larger than a message may be, and never arrive though the network is well again."""
    tops = tuple((1_000_000 + i, -0.123456789 * i) for i in range(20))
    count = 30_000

    async def scenario(world: World) -> None:
        world.network.lost = frozenset((Channel.REQUEST,))
        for first in range(0, count, 100):
            tokens = tuple(OutputToken(index, -0.5, tops) for index in range(first, first + 100))
            world.say(first, tokens, "length" if first + 100 == count else None)
        await asyncio.sleep(20)
        assert world.shown == [] and len(world.outbox) == 1
        world.network.lost = frozenset()
        await asyncio.sleep(10)
        assert world.shown == list(range(count)) and len(world.outbox) == 0
        assert max(len(batch.tokens) for batch in world.batches) <= BATCH_TOKENS_MAX
        assert [batch.finish for batch in world.batches] == [None] * (len(world.batches) - 1) + ["length"]
        assert world.refused == []

    in_world(scenario)


def test_a_lost_acknowledgement_brings_a_batch_again_and_what_came_meanwhile_after_it() -> None:
    async def scenario(world: World) -> None:
        world.network.lost = frozenset((Channel.REPLY,))
        world.say(0, (OutputToken(0),))
        await asyncio.sleep(0.1)
        world.say(1, (OutputToken(1), OutputToken(2)), "stop")
        await asyncio.sleep(2 * ACK_TIMEOUT_NS / S)
        assert len(world.outbox) == 1
        world.network.lost = frozenset()
        await asyncio.sleep(2 * ACK_TIMEOUT_NS / S)
        assert world.shown == [0, 1, 2] and world.batches[-1].finish == "stop" and len(world.outbox) == 0
        assert world.refused == []

    in_world(scenario)


def test_giving_up_is_told_after_the_tokens_before_it() -> None:
    async def scenario(world: World) -> None:
        count = BATCH_TOKENS_MAX + 1
        world.say(0, tuple(map(OutputToken, range(count))))
        world.outbox.give_up(R, 1, GATEWAY, NodeDrainingError(node=NODE), may_retry=True)
        await asyncio.sleep(1)
        assert world.shown == list(range(count)) and len(world.outbox) == 0
        (told,) = world.gave_up
        assert (told.error_code, told.may_retry) == (NodeDrainingError.code, True)

    in_world(scenario)


@pytest.mark.parametrize("lost", [frozenset(), frozenset((Channel.REQUEST,))], ids=["fenced", "out of reach"])
def test_whoever_is_not_wanted_or_not_reached_in_time_is_told_once_and_leaves_nothing(lost: frozenset[Channel]) -> None:
    async def scenario(world: World) -> None:
        world.refusal = UnknownRequestError(node=GATEWAY, request_id=R, epoch=1)
        world.network.lost = lost
        world.say(0, (OutputToken(0),), until_s=5)
        await asyncio.sleep(4)
        assert bool(world.refused) == (not lost)
        await asyncio.sleep(10)
        assert world.refused == [(R, 1)] and len(world.outbox) == 0

    in_world(scenario)


def test_what_is_for_a_dead_gateway_is_dropped_and_nobody_is_asked() -> None:
    async def scenario(world: World) -> None:
        world.network.lost = frozenset((Channel.REQUEST,))
        world.say(0, (OutputToken(0),))
        world.outbox.drop_gateway(NodeId("another"))
        assert len(world.outbox) == 1
        world.outbox.drop_gateway(GATEWAY)
        world.network.lost = frozenset()
        await asyncio.sleep(60)
        assert (len(world.outbox), world.batches, world.refused) == (0, [], [])

    in_world(scenario)

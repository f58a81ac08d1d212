"""Introductions: each life of a peer is met once, its end takes nothing from the next, and nobody waits too long."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from types import SimpleNamespace
from typing import Any, cast

import pytest

from kv_bus.errors import BusTimeout
from kv_core.clock import Clock
from kv_core.ids import Incarnation, NodeId
from kv_core.testing.loop import LoopClock, run_virtual
from kv_core.wire import Message
from kv_services.config import Role
from kv_services.membership.state import Effect, MemberDied, MemberUp
from kv_services.messages import AgentIntroduced, IntroduceAgent
from kv_services.node import introductions
from kv_services.node.introductions import Introducer
from kv_transport.backends.memory_network import MemoryFaults, MemoryNetwork
from kv_transport.errors import UnknownPeer
from tests.transport.helpers_memory import hand_over, memory_node
from tests.transport.helpers_transport import Node

ME, PEER = NodeId("prefill"), NodeId("decode")
FIRST, SECOND = Incarnation(1), Incarnation(2)
S = 1_000_000_000


class World:
    """The introducer of `ME` over a real agent; membership and the bus say what the test has them say."""

    def __init__(self, clock: Clock, me: Node) -> None:
        self.clock, self.me = clock, me
        self.life = FIRST
        self.asked: list[Incarnation | None] = []
        self.answers: Callable[[], AgentIntroduced | None] = lambda: None
        self._tell: Callable[[Effect], None]
        self._handler: Callable[[Any], AgentIntroduced]
        cluster = SimpleNamespace(
            roles={PEER: Role.DECODE},
            incarnation=lambda node: self.life if node == PEER else Incarnation(0),
            on_change=lambda call: self._on_change(call),
        )
        bus = SimpleNamespace(node_id=ME, handle=self._on_handle, request=self._request, peers=tuple)
        self.introducer = Introducer(cast(Any, bus), me.agent, cast(Any, cluster), clock)
        self.introducer.listen()

    def _on_change(self, call: Callable[[Effect], None]) -> None:
        self._tell = call

    def _on_handle(self, kind: type[Message], handler: Callable[[Any], AgentIntroduced]) -> None:
        assert kind is IntroduceAgent
        self._handler = handler

    async def _request(self, node: NodeId, ask: IntroduceAgent, **options: Any) -> AgentIntroduced:
        self.asked.append(options["incarnation"])
        answer = self.answers()
        if answer is None:
            await asyncio.Event().wait()
        assert answer is not None
        return answer

    def dies(self, life: Incarnation) -> None:
        self._tell(MemberDied(PEER, life, "it was silent"))

    def comes(self, life: Incarnation) -> None:
        self.life = life
        self._tell(MemberUp(PEER, life))

    def introduced_by(self, peer: Node) -> AgentIntroduced:
        """What that life answers when it is asked."""
        mine = self.me.agent.get_agent_metadata(PEER, peer.agent.name.incarnation)
        peer.agent.add_remote_agent(mine)
        theirs = peer.agent.get_agent_metadata(ME, self.me.agent.name.incarnation)
        return AgentIntroduced(theirs.to_bytes())

    def introduces_itself(self, peer: Node) -> None:
        theirs = peer.agent.get_agent_metadata(ME, self.me.agent.name.incarnation)
        name = peer.agent.name
        reply = self._handler(
            SimpleNamespace(message=IntroduceAgent(theirs.to_bytes()), sender=name.node, incarnation=name.incarnation)
        )
        peer.agent.add_remote_agent(type(theirs).from_bytes(reply.metadata))


@asynccontextmanager
async def world(
    clock: Clock, network: MemoryNetwork | None = None
) -> AsyncIterator[tuple[World, Callable[[Incarnation], Any]]]:
    """The introducer, and what makes a life of its peer."""
    network = network or MemoryNetwork(1, MemoryFaults(delay_ns=100_000))
    async with AsyncExitStack() as stack:
        made = World(clock, await stack.enter_async_context(memory_node(ME, network, clock)))
        stack.push_async_callback(made.introducer.close)

        async def live(life: Incarnation) -> Node:
            return await stack.enter_async_context(memory_node(PEER, network, clock, incarnation=life))

        yield made, live


async def met(made: World, peer: Node, number: int) -> None:
    """KV can be handed over to that life."""
    await made.introducer.ensure(PEER, made.clock.monotonic_ns() + S)
    outcome = await hand_over(made.me, peer, number, blocks=2, timeout_ms=1_000)
    assert (outcome.sent, outcome.received, outcome.right) == (None, None, True)


def test_the_end_of_a_life_takes_nothing_from_the_one_that_introduced_itself_in_the_same_moment() -> None:
    """A peer is back before its end was dealt with: both are heard of in one turn of the loop."""

    async def main(clock: LoopClock) -> None:
        async with world(clock) as (made, live):
            first = await live(FIRST)
            made.introduces_itself(first)
            await met(made, first, 1)
            second = await live(SECOND)
            made.dies(FIRST)
            made.introduces_itself(second)
            made.comes(SECOND)
            await asyncio.sleep(1)
            await met(made, second, 2)
            made.dies(FIRST)
            await met(made, second, 3)
            assert made.asked == []

    run_virtual(main)


def test_a_life_that_introduced_itself_is_known_before_membership_heard_of_it() -> None:
    """What is asked of the old one would be refused; who waits for the list to catch up loses his first hand-over."""

    async def main(clock: LoopClock) -> None:
        async with world(clock) as (made, live):
            made.introduces_itself(await live(FIRST))
            second = await live(SECOND)
            made.introduces_itself(second)
            assert made.life == FIRST
            await met(made, second, 1)
            assert made.asked == []

    run_virtual(main)


def test_nobody_waits_for_a_silent_peer_beyond_his_own_deadline_and_one_question_is_for_all() -> None:
    async def main(clock: LoopClock) -> None:
        async with world(clock) as (made, live):
            peer = await live(FIRST)
            began_ns = clock.monotonic_ns()
            with pytest.raises(BusTimeout, match="decode did not answer IntroduceAgent within 300 ms"):
                await made.introducer.ensure(PEER, began_ns + 300_000_000)
            assert clock.monotonic_ns() - began_ns == 300_000_000
            with pytest.raises(BusTimeout):
                await made.introducer.ensure(PEER, began_ns)
            assert made.asked == [FIRST]
            made.introduces_itself(peer)
            await met(made, peer, 1)

    run_virtual(main)


def test_a_life_is_asked_once_and_a_later_one_anew() -> None:
    async def main(clock: LoopClock) -> None:
        async with world(clock) as (made, live):
            for number, life in enumerate((FIRST, SECOND), 1):
                peer = await live(life)
                made.answers = partial(made.introduced_by, peer)
                made.life = life
                await asyncio.gather(*(made.introducer.ensure(PEER, clock.monotonic_ns() + S) for _ in range(3)))
                await met(made, peer, number)
                made.dies(life)
            assert made.asked == [FIRST, SECOND]

    run_virtual(main)


def test_clients_that_are_gone_make_room_and_those_with_a_session_and_members_stay(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each comes under a name of its own, as where each job has its key; nobody says when one is gone for good."""
    monkeypatch.setattr(introductions, "CLIENTS_MAX", 4)

    async def main(clock: LoopClock) -> None:
        network = MemoryNetwork(1, MemoryFaults(delay_ns=100_000))
        async with world(clock, network) as (made, live), memory_node("stays", network, clock) as stays:
            member = await live(FIRST)
            for peer in (member, stays):
                made.introduces_itself(peer)
            await stays.agent.peer(ME).connect()
            for number in range(12):
                async with memory_node(f"client-{number}", network, clock) as client:
                    made.introduces_itself(client)
                    await client.agent.peer(ME).connect()
                    assert (await hand_over(client, made.me, number, blocks=2, timeout_ms=1_000)).right
                await asyncio.sleep(1)
            known = {peer.peer for peer in made.me.agent.stats().peers}
            assert len(known) == 1 + 4 and {"decode#1", "stays#1", "client-11#1"} < known
            with pytest.raises(UnknownPeer, match="client-0 was not introduced"):
                await made.introducer.ensure(NodeId("client-0"), clock.monotonic_ns() + S)
            await met(made, member, 20)
            assert (await hand_over(stays, made.me, 21, blocks=2, timeout_ms=1_000)).right

    run_virtual(main)

"""Makes the transfer agents of two nodes known to each other, over the authenticated bus.

An introduction is made for one life of one peer and carries the key of its sessions, so it is exchanged again when
either side begins a new life. Peers are introduced when they come up, so that no request waits for it; a request that
comes sooner asks again itself.

N1: the end of a life takes nothing from the next one, which may have introduced itself before that end was dealt with.
N2: nobody waits for an introduction beyond his own deadline.
N3: clients that are gone are forgotten when there are many, so that those who come find room, and members always.
"""

import asyncio
import logging
from collections.abc import Coroutine
from typing import Final

from kv_bus.errors import BusTimeout
from kv_bus.interface import Bus, Reply, Request
from kv_core.clock import Clock
from kv_core.errors import KVError
from kv_core.ids import Incarnation, NodeId
from kv_services.membership.actor import ClusterView
from kv_services.membership.state import Effect, MemberDied, MemberUp
from kv_services.messages import AgentIntroduced, IntroduceAgent
from kv_transport import AgentMetadata, TransferAgent
from kv_transport.errors import UnknownPeer

TIMEOUT_NS: Final = 2_000_000_000
CLIENTS_MAX: Final = 512
"""Clients, members being others, from which on those without a session make room; below what an agent can know."""

_log = logging.getLogger(__name__)


class Introducer:
    """The introductions of one node."""

    def __init__(self, bus: Bus, agent: TransferAgent, cluster: ClusterView, clock: Clock) -> None:
        self._bus = bus
        self._agent = agent
        self._cluster = cluster
        self._clock = clock
        self._known: dict[NodeId, Incarnation] = {}
        self._asking: dict[NodeId, asyncio.Task[None]] = {}
        self._closed = False
        # By task: of one peer there may be two at once, when it dies and is back before its end was dealt with.
        self._tasks: dict[asyncio.Task[None], None] = {}

    def listen(self) -> None:
        """Answer peers and follow who comes and goes."""
        self._bus.handle(IntroduceAgent, self._on_introduce)
        self._cluster.on_change(self._on_member)

    async def ensure(self, node_id: NodeId, deadline_ns: int) -> None:
        """Return when transfers with that node's present life can begin.

        Raises:
            UnknownPeer: it is a client that is not known, or not any more.
            KVError: the peer cannot be reached by the deadline, or refuses.
        """
        known = self._known.get(node_id)
        # A later life than membership has heard of introduced itself: the one it has heard of is over.
        if known is not None and known >= self._cluster.incarnation(node_id):
            return
        if node_id not in self._cluster.roles:
            # A client, whom nobody could ask; told so, it introduces itself again.
            raise UnknownPeer(peer=node_id)
        task = self._asking.get(node_id)
        if task is None:
            task = asyncio.get_running_loop().create_task(self._ask(node_id), name=f"introduce {node_id}")
            self._asking[node_id] = task
            task.add_done_callback(lambda done: self._asked(node_id, done))
        left_ns = max(0, deadline_ns - self._clock.monotonic_ns())
        await asyncio.wait([task], timeout=left_ns / 1e9)
        if not task.done():
            # Others may wait longer; whoever asks next finds it answered, or asks again.
            raise BusTimeout(node=node_id, message=IntroduceAgent.__name__, waited_ms=left_ns // 1_000_000)
        await task

    async def close(self) -> None:
        """Stop asking, and begin nothing more: members still come and go while this process stops. Idempotent."""
        self._closed = True
        tasks = [*self._asking.values(), *self._tasks]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _ask(self, node_id: NodeId) -> None:
        incarnation = self._cluster.incarnation(node_id)
        if not incarnation:
            # Its first sign of life may be the answer to this very call.
            incarnation = next(
                (peer.incarnation for peer in self._bus.peers() if peer.address.node_id == node_id), Incarnation(0)
            )
        metadata = self._agent.get_agent_metadata(node_id, incarnation)
        reply = await self._bus.request(
            node_id,
            IntroduceAgent(metadata.to_bytes()),
            expect=AgentIntroduced,
            timeout_ns=TIMEOUT_NS,
            incarnation=incarnation or None,
        )
        self._learn(AgentMetadata.from_bytes(reply.metadata))

    def _asked(self, node_id: NodeId, task: asyncio.Task[None]) -> None:
        del self._asking[node_id]
        if not task.cancelled() and task.exception() is not None:
            _log.info("not introduced peer=%s cause=%s", node_id, task.exception())

    def _on_introduce(self, request: Request[IntroduceAgent]) -> Reply:
        self._make_room(request.sender)
        self._learn(AgentMetadata.from_bytes(request.message.metadata))
        mine = self._agent.get_agent_metadata(request.sender, request.incarnation)
        return AgentIntroduced(mine.to_bytes())

    def _learn(self, metadata: AgentMetadata) -> None:
        node_id = self._agent.add_remote_agent(metadata)
        self._known[node_id] = metadata.name.incarnation

    def _make_room(self, node_id: NodeId) -> None:
        """Forget a client without a session, the one that came first, if this one would be one more than there may be.
        Nobody says when a client is gone for good; one that comes back introduces itself again."""
        members = self._cluster.roles
        clients = [client for client in self._known if client not in members]
        if node_id in members or node_id in self._known or len(clients) < CLIENTS_MAX:
            return
        connected = {item.owner.partition("#")[0] for item in self._agent.inventory().of("session")}
        gone = next((client for client in clients if client not in connected), None)
        if gone is not None:
            self._start(gone, self._agent.remove_remote_agent(gone, self._known.pop(gone)))

    def _on_member(self, effect: Effect) -> None:
        role = self._cluster.roles.get(effect.node_id)
        if role is None or not role.holds_kv:
            return
        match effect:
            # One side of each pair asks: the other learns from being asked.
            case MemberUp(node_id) if self._bus.node_id < node_id:
                self._start(node_id, self._introduce(node_id))
            case MemberDied(node_id, incarnation) if self._known.get(node_id) == incarnation:
                del self._known[node_id]
                self._start(node_id, self._agent.remove_remote_agent(node_id, incarnation))
            case _:
                pass

    async def _introduce(self, node_id: NodeId) -> None:
        try:
            await self.ensure(node_id, self._clock.monotonic_ns() + TIMEOUT_NS)
        except KVError:
            # Logged where it was asked; the first transfer asks again.
            return

    def _start(self, node_id: NodeId, work: Coroutine[object, object, None]) -> None:
        if self._closed:
            work.close()
            return
        task = asyncio.get_running_loop().create_task(work, name=f"peer {node_id}")
        self._tasks[task] = None
        task.add_done_callback(lambda done: self._tasks.pop(done, None))

"""What operators do while a simulated cluster runs: start nodes that nobody's file names, drain nodes and let them
serve again, drain nodes and stop them, change roles, purge. They ask as `kvctl` does, and keep one node of each role at
work.

P1: when a node says that it is safe to stop, each of its blocks was found elsewhere, was moved or is listed as left.
P2: nothing that a node held when it was told to purge can be found there a second later, in whichever tier.
"""

import asyncio
import contextlib
from random import Random
from typing import Final

from kv_consistency.update import scope_id
from kv_core.errors import KVError
from kv_core.ids import Incarnation
from kv_services.config import Role
from kv_services.sim.checks import CheckError
from kv_services.sim.holdings import copies_held
from kv_services.sim.node import MODEL_ID, SimNode

KINDS: Final = ("join", "drain", "leave", "role change")
PATIENCE_S: Final = 12.0
"""For how long an operator waits to be told that it is safe to stop."""
PURGE_S: Final = 1.0
"""By then a purge is carried out where it was asked for: nodes look at every tick of 250 ms."""
_LOOK_S: Final = 0.2


class Operators:
    """See the module.

    Attributes:
        refused: what broke P1.
        counts: nodes that joined, were drained to the end, and left.
    """

    def __init__(self, rng: Random, nodes: list[SimNode]) -> None:
        self._random = rng
        self._nodes = nodes
        self._tasks: dict[asyncio.Task[None], None] = {}
        self._busy: dict[str, None] = {}
        self._stops: dict[asyncio.Task[object], None] = {}
        self.refused: list[CheckError] = []
        self.counts = {"joined": 0, "drained": 0, "left": 0}

    def begin(self, kind: str) -> bool:
        """Begin to do that somewhere; False where there is no node to do it to."""
        if kind == "join":
            return self._join()
        if kind == "purge":
            return self._begin_purge()
        fit = [node for node in self._nodes if self._may_go(node)]
        if not fit:
            return False
        node = self._random.choice(fit)
        if kind == "role change":
            role = Role.DECODE if node.base.cluster.role is Role.PREFILL else Role.PREFILL
            self._start(node, self._take_role(node, role))
        else:
            self._start(node, self._drain(node, leaves=kind == "leave"))
        return True

    async def heal(self) -> None:
        """Let whoever is drained serve again, and whoever is in the file come back."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        # What was being stopped is stopped; half a node serves nobody.
        await asyncio.gather(*self._stops)
        for node in self._nodes:
            if not node.joins:
                node.away = False
            if node.running and node.base.draining:
                await self._ask(node, node.incarnation, "/resume", b"")
        await self._give_back_roles()

    async def _give_back_roles(self) -> None:
        """Where nobody is left who prefills, or decodes, let who is that by the file be it again: others took its work
        over, and began anew as what they are by the file."""
        for role in (Role.PREFILL, Role.DECODE):
            if not any(node.running and node.base.cluster.role is role for node in self._nodes):
                former = next((node for node in self._nodes if node.running and node.role is role), None)
                if former is not None:
                    await self._take_role(former, role)

    async def _take_role(self, node: SimNode, role: Role) -> None:
        await self._ask(node, node.incarnation, "/role", b'{"role": "%s"}' % role.value.encode())

    def _join(self) -> bool:
        away = [node for node in self._nodes if node.joins and node.away and node.name not in self._busy]
        if away:
            self._random.choice(away).away = False
            self.counts["joined"] += 1
        return bool(away)

    def _begin_purge(self) -> bool:
        serving = [node for node in self._nodes if _serves(node) and node.name not in self._busy]
        if serving:
            node = self._random.choice(serving)
            self._start(node, self._purge(node, node.incarnation))
        return bool(serving)

    async def _purge(self, node: SimNode, life: Incarnation) -> None:
        held: dict[tuple[object, ...], None] = {}

        async def act() -> None:
            if _lives(node, life) and node.work is not None:
                with contextlib.suppress(KVError):  # its replica is not ready, or its disk takes no clock bound
                    node.replica.purge((scope_id("model", MODEL_ID),))
                    held.update(copies_held(node.work))

        stood_ns = node.stood_still_ns
        await node.within(act())
        await asyncio.sleep(PURGE_S)
        stood = node.pauses or node.stood_still_ns > stood_ns
        if not _lives(node, life) or stood or node.ending or not node.serving:
            return
        assert node.work is not None
        left = [copy for copy in copies_held(node.work) if copy in held]
        if left:
            self.refused.append(CheckError(node=node.name, what=f"still has {len(left)} blocks that were purged"))

    def _may_go(self, node: SimNode) -> bool:
        """Whether another node of its role serves, as far as whoever stands beside it can see."""
        if node.name in self._busy or not _serves(node):
            return False
        role = node.base.cluster.role
        others = [other for other in self._nodes if other is not node and other.name not in self._busy]
        return any(_serves(other) and other.base.cluster.role is role for other in others)

    def _start(self, node: SimNode, work: "asyncio._CoroutineLike[None]") -> None:
        self._busy[node.name] = None
        task = asyncio.get_running_loop().create_task(work, name=f"operator at {node.name}")
        self._tasks[task] = None

        def ended(done: "asyncio.Task[None]") -> None:
            del self._tasks[done]
            del self._busy[node.name]

        task.add_done_callback(ended)

    async def _drain(self, node: SimNode, leaves: bool) -> None:
        life = node.incarnation
        await self._ask(node, life, "/drain", b"")
        if not leaves and self._random.random() < 0.5:
            await asyncio.sleep(self._random.random() * 2.0)
            await self._ask(node, life, "/resume", b"")
            return
        for _ in range(int(PATIENCE_S / _LOOK_S)):
            await asyncio.sleep(_LOOK_S)
            if not _lives(node, life):
                break
            if self._is_safe(node):
                await self._still_safe(node, life)
                break
        if not leaves:
            await self._ask(node, life, "/resume", b"")
        elif _lives(node, life) and not node.pauses:
            node.away = True
            self.counts["left"] += 1
            stopping = node.within(node.stop())
            self._stops[stopping] = None
            stopping.add_done_callback(lambda done: self._stops.pop(done, None))
            await asyncio.shield(stopping)
            if not node.joins:
                await asyncio.sleep(1.0 + self._random.random() * 3.0)
                node.away = False

    def _is_safe(self, node: SimNode) -> bool:
        """Whether the node says that it is safe to stop; P1."""
        assert node.work is not None
        moving = node.work.operations.moving()
        if moving is None or not moving.safe_to_stop:
            return False
        self.counts["drained"] += 1
        if moving.open or moving.total != moving.elsewhere + moving.moved + moving.left:
            self.refused.append(CheckError(node=node.name, what=f"lost count while it was drained: {moving}"))
        if len(moving.left_names) != moving.left:
            self.refused.append(CheckError(node=node.name, what=f"does not list what it keeps: {moving}"))
        return True

    async def _still_safe(self, node: SimNode, life: Incarnation) -> None:
        """Whoever is told that a node is safe to stop acts on it a moment later: it must be true then too."""
        await asyncio.sleep(_LOOK_S)
        if _lives(node, life) and not node.pauses:
            assert node.work is not None
            moving = node.work.operations.moving()
            readers = node.work.leases.readers()
            if moving is None or not moving.safe_to_stop or readers:
                what = f"was safe to stop and is not any more: {moving}, read by {sorted(readers)}"
                self.refused.append(CheckError(node=node.name, what=what))

    async def _ask(self, node: SimNode, life: Incarnation, path: str, body: bytes) -> None:
        """As over HTTP: nobody answers for a life that is over."""

        async def act() -> None:
            if _lives(node, life) and node.work is not None:
                await node.work.operations.actions()[path](body)

        await node.within(act())


def _lives(node: SimNode, life: Incarnation) -> bool:
    return node.running and not node.ending and node.incarnation == life


def _serves(node: SimNode) -> bool:
    if not node.ready or node.ending or node.pauses or node.away or node.base.draining:
        return False
    return node.base.cluster.role in (Role.PREFILL, Role.DECODE)

"""Gives a node's prefixes to others, one at a time and no faster than it was told: for leaving, and for sharing.

Decides nothing about who gets what (`move_plan`); it grants leases, asks, waits and keeps the figures. Claims follow by
themselves: whoever took a prefix publishes that he holds it, whoever drops one that he does not.
"""

import asyncio
import logging
from collections.abc import Mapping
from typing import Final, Literal

import msgspec

from kv_core.errors import KVError
from kv_core.hashing import BlockHash
from kv_core.ids import NodeId
from kv_prefix.events import RemovalReason
from kv_services.config import Role
from kv_services.membership.actor import ClusterView
from kv_services.messages import PrefixAdopted
from kv_services.node.context import NodeContext
from kv_services.node.move_plan import Chain, Forest, choose_target, depths
from kv_services.node.offering import offer
from kv_services.node.store import LeaseDesk
from kv_services.status_report import MoveCounts

TRIES: Final = 3
NAMES_MAX: Final = 100
BRING_UP_NS: Final = 20_000_000_000
"""How long one chain may take to come up from the tiers below."""

_log = logging.getLogger(__name__)


class Mover:
    """The moves of one node; one kind at a time."""

    def __init__(self, ctx: NodeContext, cluster: ClusterView, leases: LeaseDesk) -> None:
        self._ctx = ctx
        self._cluster = cluster
        self._leases = leases
        self._task: asyncio.Task[None] | None = None
        self.counts: MoveCounts | None = None

    @property
    def running(self) -> bool:
        return self._task is not None and not self._task.done()

    def give_away_all(self, bytes_per_s: float) -> None:
        """Begin to move every prefix that nobody else holds to whoever has room, of any role."""
        self._begin("drain", None, bytes_per_s)

    def give_away(self, quota: Mapping[NodeId, int], bytes_per_s: float) -> None:
        """Begin to move that many blocks to each of these, and to drop them here."""
        self._begin("rebalance", dict(quota), bytes_per_s)

    async def close(self) -> None:
        """Stop after the prefix that is under way. Idempotent."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    def _begin(self, kind: Literal["drain", "rebalance"], quota: dict[NodeId, int] | None, bytes_per_s: float) -> None:
        if self.running:
            return
        forest = Forest.of(self._ctx.pool.snapshot())
        self.counts = MoveCounts(kind, "running")
        work = self._move(forest, quota, bytes_per_s)
        self._task = asyncio.get_running_loop().create_task(work, name=f"{kind} of {self._ctx.node_id}")
        self._task.add_done_callback(self._ended)

    def _ended(self, task: "asyncio.Task[None]") -> None:
        assert self.counts is not None
        error = asyncio.CancelledError("stopped") if task.cancelled() else task.exception()
        if error is None:
            self._count(state="done")
        else:
            _log.error("moving failed node=%s cause=%r", self._ctx.node_id, error)
            self._count(state="failed", problem=str(error) or type(error).__name__)

    async def _move(self, forest: Forest, quota: dict[NodeId, int] | None, bytes_per_s: float) -> None:
        if quota is None:
            below = await self._ctx.tiers.everything()
            await asyncio.get_running_loop().run_in_executor(None, forest.add_below, below)
        self._count(total=forest.num_blocks, open=forest.num_blocks)
        for leaf in forest.leaves():
            if quota is not None and not any(quota.values()):
                self._add("left", list(forest.only_here(leaf)), say=False)
                continue
            began_ns = self._ctx.clock.monotonic_ns()
            nbytes = await self._move_one(forest, leaf, quota)
            pause_s = nbytes / bytes_per_s - (self._ctx.clock.monotonic_ns() - began_ns) / 1e9
            await asyncio.sleep(max(0.0, pause_s))

    async def _move_one(self, forest: Forest, leaf: BlockHash, quota: dict[NodeId, int] | None) -> int:
        """See to one chain; the bytes that were read of it."""
        chain = forest.chain(leaf)
        own = list(forest.only_here(leaf))
        if chain is None or (quota is not None and self._ctx.pool.prefix(leaf) is None):
            self._add("left", own)
            return 0
        size, have = len(chain.names), 0
        for _ in range(TRIES):
            depth = self._depths(chain)
            have = max(depth.values(), default=0)
            if quota is None and have == size:
                self._add("elsewhere", own)
                return 0
            room = (
                self._room()
                if quota is None
                else {node: min(free, quota[node]) for node, free in self._room().items() if quota.get(node)}
            )
            choice = choose_target(size, depth, room)
            if choice is None or not await self._is_up(chain):
                break
            target, first = choice
            if first == size:
                # The target holds it already: giving it up here is all that is left to do.
                reply = PrefixAdopted(0, 0)
            else:
                try:
                    reply = await offer(self._ctx, self._leases, chain, target, first)
                except KVError as error:
                    _log.warning("prefix not moved target=%s blocks=%d cause=%s", target, size - first, error)
                    await asyncio.sleep(0.1)
                    continue
            self._add("moved", own)
            self._count(nbytes=(self.counts.nbytes if self.counts else 0) + reply.nbytes)
            if quota is not None:
                quota[target] = max(0, quota[target] - len(own))
                self._drop(own)
            return reply.nbytes
        # In the remote tier it outlives this node: another one takes over what it left there.
        missing = 0 if quota is None and self._ctx.tiers.outlives(chain.names) else max(0, size - have)
        self._add("left", own[:missing])
        self._add("elsewhere", own[missing:])
        return 0

    async def _is_up(self, chain: Chain) -> bool:
        """Whether all of a chain is in memory, from where others read it; what lies below is brought up first."""
        if self._ctx.pool.prefix(chain.names[-1]) is not None:
            return True
        if self._ctx.tiers.outlives(chain.names):
            return False
        return await self._ctx.tiers.bring_up(chain.names, self._ctx.clock.monotonic_ns() + BRING_UP_NS)

    def _depths(self, chain: Chain) -> dict[NodeId, int]:
        readable = self._cluster.alive(Role.PREFILL, Role.DECODE, Role.STORE)
        found = self._ctx.index.lookup(chain.names)
        return depths(((match.holder.node, match.num_blocks) for match in found), readable)

    def _room(self) -> dict[NodeId, int]:
        """Free blocks of each node, by what it said last; it refuses if it was too much."""
        nodes = self._cluster.alive(Role.PREFILL, Role.DECODE, Role.STORE)
        return {node: self._cluster.load_of(node).slots_free for node in nodes if self._ctx.recovery.allows(node)}

    def _drop(self, names: list[BlockHash]) -> None:
        for name in names:
            # What somebody reads or builds on stays, and so does everything before it.
            if not self._ctx.pool.is_evictable(name):
                break
            self._ctx.pool.drop(name, RemovalReason.EVICTED)
        self._ctx.flush_pool_events()

    def _add(self, to: Literal["elsewhere", "moved", "left"], names: list[BlockHash], *, say: bool = True) -> None:
        counts = self.counts
        assert counts is not None
        left = counts.left_names
        if to == "left" and say:
            left = [*left, *(name.sequence.hex() for name in names)][:NAMES_MAX]
        number = {to: getattr(counts, to) + len(names)}
        self.counts = msgspec.structs.replace(counts, open=counts.open - len(names), left_names=left, **number)

    def _count(self, **figures: object) -> None:
        assert self.counts is not None
        self.counts = msgspec.structs.replace(self.counts, **figures)

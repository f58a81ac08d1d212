"""Sees that what everybody asks for is held by more than one node: copies hot prefixes to others, one at a time.

Decides nothing about what is hot and who acts (`hot_prefixes`) nor who takes it (`move_plan`). A copy that is refused
or fails is tried again after a while; nothing waits for one.
"""

import asyncio
import logging
from typing import Final

from kv_core.errors import KVError
from kv_core.hashing import TOKEN_BYTES, BlockHash, hash_tokens
from kv_core.ids import NodeId
from kv_core.namespace import Namespace
from kv_services.config import Role
from kv_services.event_log import EventLog
from kv_services.membership.actor import ClusterView
from kv_services.node.context import NodeContext
from kv_services.node.hot_prefixes import DEPTH_MAX, HotPrefixes, acts
from kv_services.node.move_plan import Chain, choose_target, depths
from kv_services.node.offering import offer
from kv_services.node.store import LeaseDesk

LOOK_NS: Final = 1_000_000_000
REST_NS: Final = 15_000_000_000
"""How long a prefix is left alone after nobody took it."""

BYTES_PER_S: Final = 64 << 20
_KV_ROLES: Final = (Role.PREFILL, Role.DECODE, Role.STORE)

_log = logging.getLogger(__name__)


class HotCopier:
    """The copies that one node makes. `tick` at a steady pace; `close` when it stops."""

    def __init__(self, ctx: NodeContext, cluster: ClusterView, leases: LeaseDesk, events: EventLog) -> None:
        self._ctx = ctx
        self._cluster = cluster
        self._leases = leases
        self._events = events
        self._settings = ctx.config.replication
        self.hot = HotPrefixes(self._settings.uses_per_minute)
        self._next_ns = 0
        self._resting: dict[BlockHash, int] = {}
        self._task: asyncio.Task[None] | None = None
        ctx.past.listen(self.note)

    @property
    def copying(self) -> bool:
        """Whether a prefix is being given now."""
        return self._task is not None and not self._task.done()

    def note(self, namespace: Namespace, tokens: bytes) -> None:
        """A prompt was asked for here."""
        if self._settings.copies > 1:
            # No deeper than is looked at: a long prompt has been hashed often enough.
            beginning = tokens[: TOKEN_BYTES * DEPTH_MAX * namespace.block_size]
            self.hot.note(self._ctx.clock.monotonic_ns(), hash_tokens(namespace, beginning))

    def tick(self) -> None:
        """Begin the next copy if one is due."""
        now_ns = self._ctx.clock.monotonic_ns()
        if self._settings.copies < 2 or now_ns < self._next_ns or self.copying or self._cluster.state != "serving":
            return
        self._next_ns = now_ns + LOOK_NS
        self._resting = {name: until_ns for name, until_ns in self._resting.items() if until_ns > now_ns}
        for name in self.hot.hot(now_ns):
            if name not in self._resting and (chosen := self._choose(name)) is not None:
                work = self._copy(*chosen)
                self._task = asyncio.get_running_loop().create_task(work, name=f"copy of {name.sequence.hex()}")
                return

    async def close(self) -> None:
        """Give up what is under way. Idempotent."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    def _choose(self, name: BlockHash) -> tuple[Chain, NodeId, int] | None:
        """Which prefix goes to whom, and how much of it he has; None when it is not for this node to see to."""
        ctx = self._ctx
        match, tokens = ctx.pool.prefix(name), ctx.pool.prefix_tokens(name)
        if match is None or tokens is None:
            return None
        alive = self._cluster.certain(*_KV_ROLES)
        own, size = ctx.node_id, len(match.block_hashes)
        found = ctx.index.lookup(match.block_hashes)
        depth = depths(((each.holder.node, each.num_blocks) for each in found), alive)
        holders = {own, *(node for node, blocks in depth.items() if blocks == size)}
        if len(holders) >= self._settings.copies or not acts(own, holders, name):
            return None
        room = {node: self._room(node) for node in alive if node not in holders and ctx.recovery.allows(node)}
        choice = choose_target(size, depth, room)
        if choice is None:
            self._rest(name)
            return None
        return Chain(match.namespace, match.block_hashes, tokens), *choice

    def _room(self, node: NodeId) -> int:
        load = self._cluster.load_of(node)
        return load.slots_free + min(load.slots_cached, int(self._settings.share * load.slots_total))

    async def _copy(self, chain: Chain, target: NodeId, first_block: int) -> None:
        ctx, name, began_ns = self._ctx, chain.names[-1], self._ctx.clock.monotonic_ns()
        try:
            reply = await offer(ctx, self._leases, chain, target, first_block, copy=True)
        except KVError as error:
            _log.info("hot prefix not copied target=%s blocks=%d cause=%s", target, len(chain.names), error)
            self._rest(name)
            return
        ctx.metrics.hot_copies.inc()
        cause = f"a prefix of {len(chain.names)} blocks is asked for often and had too few holders"
        self._events.note("hot_prefix_copied", f"{ctx.node_id}>{target}", cause)
        took_ns = ctx.clock.monotonic_ns() - began_ns
        self._next_ns += max(0, int(reply.nbytes * 1e9 / BYTES_PER_S) - took_ns)
        # Until his claim is heard of here, the same copy would look due.
        self._resting[name] = ctx.clock.monotonic_ns() + LOOK_NS

    def _rest(self, name: BlockHash) -> None:
        self._resting[name] = self._ctx.clock.monotonic_ns() + REST_NS

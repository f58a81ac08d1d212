"""What an operator may have a node do: leave, stay after all, share its blocks, take the other role.

Leaving goes in a fixed order: nothing new is taken; what waits or runs is handed over; when nothing runs any more, the
blocks that nobody else holds go to whoever has room, or are listed; then nobody may begin to read here, and when the
last reader is done it is safe to stop, and stays so until it is told to serve again. Nothing here is undone by asking
twice.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Annotated, Final, Literal, TypeVar

import msgspec
from msgspec import Meta

from kv_services.config import Role
from kv_services.errors import NoKVRoleError
from kv_services.node.adopter import Adopter
from kv_services.node.client_desk import ClientDesk
from kv_services.node.context import NodeContext
from kv_services.node.decode import DecodeActor
from kv_services.node.decode_events import DrainBegan, DrainEnded
from kv_services.node.move_plan import share_of
from kv_services.node.mover import Mover
from kv_services.node.prefill import PrefillActor
from kv_services.node.prefill_events import PrefillDrainBegan, PrefillDrainEnded
from kv_services.node.shard_desk import ShardDesk
from kv_services.node.store import LeaseDesk
from kv_services.process import Base
from kv_services.status_report import MoveCounts

LOOK_S: Final = 0.1
HEAR_S: Final = 0.5
"""What others say at once has been heard after that."""
DEFAULT_BYTES_PER_S: Final = 64 << 20

_log = logging.getLogger(__name__)
_T = TypeVar("_T")


class Pace(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How fast blocks may move."""

    bytes_per_s: Annotated[float, Meta(ge=1, le=1e12)] = DEFAULT_BYTES_PER_S


class NewRole(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What the node shall be."""

    role: Literal["prefill", "decode"]


class Operations:
    """The operations of one node. `actions` are for the side HTTP server, which asks for an operator's key."""

    def __init__(
        self,
        base: Base,
        ctx: NodeContext,
        decode: DecodeActor,
        prefill: PrefillActor,
        leases: LeaseDesk,
        clients: ClientDesk,
        shards: ShardDesk,
    ) -> None:
        self._base = base
        self._ctx = ctx
        self._decode, self._prefill, self._shards = decode, prefill, shards
        self._leases, self._clients = leases, clients
        self.adopter = Adopter(ctx)
        self.mover = Mover(ctx, base.cluster, leases)
        self._leaving: asyncio.Task[None] | None = None
        self._safe = False

    def actions(self) -> dict[str, Callable[[bytes], Awaitable[bytes]]]:
        """What may be asked for, by path."""
        return {"/drain": self._drain, "/resume": self._resume, "/rebalance": self._rebalance, "/role": self._role}

    def moving(self) -> MoveCounts | None:
        """How far the node is with giving blocks away; while it waits for its requests to end, nothing is counted."""
        counts = self.mover.counts
        if self._leaving is not None and (counts is None or counts.kind != "drain"):
            return MoveCounts("drain", "running")
        if counts is None:
            return None
        on_media = sum(tier.blocks for tier in self._ctx.tiers.counts().values())
        return msgspec.structs.replace(counts, on_media=on_media, safe_to_stop=self._safe)

    async def close(self) -> None:
        """Stop giving and taking. Idempotent."""
        if self._leaving is not None:
            self._leaving.cancel()
            await asyncio.gather(self._leaving, return_exceptions=True)
        await self.mover.close()
        await self.adopter.close()

    async def _drain(self, body: bytes) -> bytes:
        pace = _read(body, Pace)
        if self._leaving is None:
            await self.mover.close()
            self.mover.counts = None
            _log.info("draining node=%s", self._ctx.node_id)
            self._base.draining = True
            self.adopter.refusing = "it is draining"
            self._clients.leaving = True
            self._base.cluster.say("draining")
            others = bool(self._base.cluster.alive(Role.DECODE))
            self._decode.complete(DrainBegan(hand_over=others))
            self._prefill.complete(PrefillDrainBegan())
            self._shards.drain(hand_over=others)
            work = self._leave(pace.bytes_per_s)
            self._leaving = asyncio.get_running_loop().create_task(work, name="drain")
        return self._body()

    async def _leave(self, bytes_per_s: float) -> None:
        # Who begins to leave in the same moment says so, too: neither may count on what the other holds.
        await asyncio.sleep(HEAR_S)
        while self._running():  # noqa: ASYNC110  # what runs has deadlines of its own, and no event when the last ended
            await asyncio.sleep(LOOK_S)
        self.mover.give_away_all(bytes_per_s)
        while self.mover.running:  # noqa: ASYNC110  # the same
            await asyncio.sleep(LOOK_S)
        if (counts := self.mover.counts) is not None:
            _log.info(
                "drained node=%s state=%s blocks=%d elsewhere=%d moved=%d left=%d",
                *(self._ctx.node_id, counts.state, counts.total, counts.elsewhere, counts.moved, counts.left),
            )
            if counts.state != "done":
                return
        self._leases.ending = True
        while self._busy():  # noqa: ASYNC110  # the same
            await asyncio.sleep(LOOK_S)
        # Whatever is asked for from here on is refused, so that this stays true.
        self._safe = True
        _log.info("safe to stop node=%s", self._ctx.node_id)

    async def _resume(self, body: bytes) -> bytes:
        if self._leaving is not None:
            self._leaving.cancel()
            await asyncio.gather(self._leaving, return_exceptions=True)
            self._leaving = None
            self._safe = self._leases.ending = self._clients.leaving = False
            await self.mover.close()
            self.mover.counts = None
            self._decode.complete(DrainEnded())
            self._prefill.complete(PrefillDrainEnded())
            self._shards.resume()
            self.adopter.refusing = ""
            self._base.draining = False
            self._base.cluster.say("serving")
            _log.info("serves again node=%s", self._ctx.node_id)
        return self._body()

    async def _rebalance(self, body: bytes) -> bytes:
        pace = _read(body, Pace)
        if self._leaving is None and not self.mover.running:
            cluster, own, stats = self._base.cluster, self._ctx.node_id, self._ctx.pool.stats()
            loads = {node: cluster.load_of(node) for node in cluster.alive(cluster.role)}
            held = {node: load.slots_cached for node, load in loads.items()} | {own: stats.cached}
            weights = {node: max(1, load.slots_total) for node, load in loads.items()} | {own: stats.total}
            quota = share_of(own, held, weights)
            _log.info("sharing node=%s held=%s gives=%s", own, held, quota)
            self.mover.give_away(quota, pace.bytes_per_s)
        return self._body()

    async def _role(self, body: bytes) -> bytes:
        role, cluster = Role(_read(body, NewRole).role), self._base.cluster
        if cluster.role not in (Role.PREFILL, Role.DECODE):
            raise NoKVRoleError(node=self._ctx.node_id, role=cluster.role.value, work=role.value)
        if cluster.role is not role:
            # What was begun in the former role is finished: both are at work on every node, and the role only says
            # which work gateways give it.
            _log.info("role changes node=%s from=%s to=%s", self._ctx.node_id, cluster.role.value, role.value)
            cluster.take_role(role)
            cluster.say(cluster.state)
        return msgspec.json.encode({"node": self._ctx.node_id, "role": role.value})

    def _running(self) -> bool:
        decode, prefill = self._decode.machine, self._prefill.machine
        requests = decode.num_running + decode.num_waiting + prefill.num_running + prefill.num_waiting
        return bool(requests or self._shards.busy or self._clients.num_puts)

    def _busy(self) -> bool:
        return bool(self._running() or len(self._leases) or len(self.adopter) or len(self._decode.outbox))

    def _body(self) -> bytes:
        return msgspec.json.encode(self.moving())


def _read(body: bytes, kind: type[_T]) -> _T:
    """Raises `msgspec.ValidationError` or `msgspec.DecodeError`, which the server answers with 400."""
    return msgspec.json.decode(body or b"{}", type=kind)

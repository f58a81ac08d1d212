"""Puts one node together: arena, transfers, pool, engine, and the roles over them.

Every node that holds KV is built alike and can serve leases; prefill and decode are two machines over one pool and one
compute thread. Order of starting: arena and agent, then the roles, then HTTP; stopping goes the other way, so that
nobody is served from memory that is gone.
"""

import asyncio
import contextlib
import hashlib
import logging
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from kv_bus.interface import Reply, Request
from kv_bus.supervisor import ChildSpec
from kv_core.block import Layout
from kv_core.hashing import BlockHash
from kv_core.ids import NodeId, RequestId
from kv_prefix.block_pool import BlockPool
from kv_prefix.in_flight import Wait
from kv_prefix.watermarks import Watermarks
from kv_services.closing import close_all
from kv_services.config import Role
from kv_services.engine.interface import Model
from kv_services.engine.load import STUB_GEOMETRY, EngineSpec, open_model, shard_engine
from kv_services.engine.stub import StubCost
from kv_services.engine.threads import set_blas_threads
from kv_services.in_flight_watch import InFlightWatch
from kv_services.membership.state import Effect as MemberEffect
from kv_services.membership.state import MemberDied
from kv_services.messages import Ack, EndRequest, Load
from kv_services.node.accounts import tenant_accounts
from kv_services.node.client_desk import ClientDesk
from kv_services.node.compute import Compute, ComputeThread
from kv_services.node.context import NodeContext
from kv_services.node.decode import DecodeActor
from kv_services.node.decode_events import EndAsked, PeerDied, TimePassed
from kv_services.node.decode_state import DecodeMachine
from kv_services.node.event_telling import event_children
from kv_services.node.exact_blocks import ExactBlocks
from kv_services.node.hot_copier import HotCopier
from kv_services.node.introductions import Introducer
from kv_services.node.operations import Operations
from kv_services.node.prefill import PrefillActor
from kv_services.node.prefill_events import PrefillEndAsked, PrefillPeerDied, PrefillTimePassed, PullPlan
from kv_services.node.prefill_state import PrefillMachine
from kv_services.node.prefix_desk import PrefixDesk
from kv_services.node.pull_cost import PullCost, plan_pull
from kv_services.node.recoverer import Recoverer
from kv_services.node.shard_desk import ShardDesk
from kv_services.node.sharing import Sharing
from kv_services.node.store import LeaseDesk
from kv_services.node.tier_setup import open_tiers
from kv_services.node.tiers import Tiers
from kv_services.past_requests import PastRequests
from kv_services.process import Base, keep, model_path
from kv_services.status_report import SlotCounts, TierCounts
from kv_transport import Arena, KVCacheTransferEngine, TransferAgent, TransportConfig
from kv_transport.config import TlsConfig

TICK_S: Final = 0.25
SOCKET_PATH_MAX: Final = 107
SOCKET_NAME_MAX: Final = 48
"""Room for the name that the agent gives its socket within the folder."""

_log = logging.getLogger(__name__)


class Memory:
    """A node's arena, agent and transfer engine. A supervised child: `start`, `run`, `close`."""

    def __init__(
        self, arena: Arena, agent: TransferAgent, transfers: KVCacheTransferEngine, sockets: Path | None
    ) -> None:
        self.arena, self.agent, self.transfers = arena, agent, transfers
        self._sockets = sockets
        self._closed: asyncio.Event | None = None

    async def start(self) -> None:
        self._closed = asyncio.Event()
        await self.agent.start()

    async def run(self) -> None:
        assert self._closed is not None
        await self._closed.wait()

    async def close(self) -> None:
        if self._closed is not None:
            self._closed.set()
        await self.transfers.close()
        await self.agent.close()
        self.arena.close()
        if self._sockets is not None:
            with contextlib.suppress(OSError):
                self._sockets.rmdir()


class NodeWork:
    """The roles of one node, their clockwork and their ends. A supervised child: `start`, `run`, `drain`, `close`."""

    def __init__(
        self, base: Base, ctx: NodeContext, agent: TransferAgent, introducer: Introducer, model: Model
    ) -> None:
        self._base = base
        self.ctx = ctx
        self._agent = agent
        self._introducer = introducer
        self.cost = ctx.cost
        num_slots, limits = ctx.arena.num_slots, base.config.limits
        decode = DecodeMachine(
            ctx.node_id,
            ctx.pool,
            block_size=ctx.block_size,
            num_slots=num_slots,
            max_batch=limits.max_batch,
            max_waiting=limits.node_queue,
        )
        prefill = PrefillMachine(
            ctx.node_id,
            ctx.pool,
            block_size=ctx.block_size,
            num_slots=num_slots,
            max_waiting=limits.node_queue,
            plan_pull=self._plan_pull,
            plan_wait=self._plan_wait,
        )
        self.decode = DecodeActor(ctx, model, decode)
        self.prefill = PrefillActor(ctx, model, prefill, self.cost)
        self.in_flight = InFlightWatch(base.cluster, ctx.clock, self.prefill.computation_over)
        self.watermarks = Watermarks(base.config.pool.low_watermark, base.config.pool.high_watermark)
        self.leases = LeaseDesk(ctx)
        self.shards = ShardDesk(ctx, shard_engine(model), base.events)
        self.clients = ClientDesk(ctx, self._is_member, self.leases.reader_died, self.leases.readers)
        self.operations = Operations(base, ctx, self.decode, self.prefill, self.leases, self.clients, self.shards)
        self.copier = HotCopier(ctx, base.cluster, self.leases, base.events)
        self.prefixes = PrefixDesk(ctx, model.info.weights_revision, self.in_flight.table)
        ctx.tiers.attach(ctx.prepare, ctx.flush_pool_events, Sharing(ctx, self._plan_pull).adopt)
        self._closed: asyncio.Event | None = None

    async def start(self) -> None:
        self._closed = asyncio.Event()
        if self._base.node.role in (Role.PREFILL, Role.DECODE):
            # Both, since the node may change its role, and what a gateway sends by an older view is done all the same.
            self.decode.listen()
            self.prefill.listen()
            self.shards.listen()
        self.leases.listen()
        self.clients.listen()
        self.operations.adopter.listen()
        self._introducer.listen()
        self.ctx.bus.handle(EndRequest, self._on_end)
        self._base.cluster.on_change(self._on_member)

    async def run(self) -> None:
        """Judge deadlines and leases until closed; raise when a role's actor fails."""
        assert self._closed is not None
        ends: list[asyncio.Future[Any]] = [asyncio.ensure_future(self._closed.wait())]
        ends += [asyncio.ensure_future(actor.run()) for actor in (self.decode, self.prefill)]
        ends += self.shards.running()
        try:
            while not any(end.done() for end in ends):
                self._tick()
                await asyncio.wait(ends, timeout=TICK_S, return_when=asyncio.FIRST_COMPLETED)
            for end in ends[1:]:
                if end.done():
                    end.result()
        finally:
            for end in ends:
                end.cancel()
            await asyncio.gather(*ends, return_exceptions=True)

    async def close(self) -> None:
        if self._closed is not None:
            self._closed.set()
        # A part that does not end in its time costs those behind it nothing: the thread that computes is stopped, tiers
        # write down what they can.
        await close_all(
            self.copier.close,
            self.operations.close,
            self.decode.close,
            self.prefill.close,
            self.shards.close,
            self.clients.close,
            self._close_prefixes,
            self.ctx.tiers.close,
            self._introducer.close,
            self._close_leases,
            self.ctx.compute.close,
        )

    async def _close_prefixes(self) -> None:
        self.prefixes.close()

    async def _close_leases(self) -> None:
        self.leases.close()

    def load(self) -> Load:
        """What this node says of itself in each heartbeat."""
        stats = self.ctx.pool.stats()
        decode, prefill = self.decode.machine, self.prefill.machine
        return Load(
            running=decode.num_running + prefill.num_running + len(self.shards.coordinator),
            waiting=decode.num_waiting + prefill.num_waiting,
            waiting_tokens=prefill.waiting_tokens,
            slots_total=stats.total,
            slots_free=stats.free,
            slots_cached=stats.cached,
            slots_pinned=stats.pinned,
            tokens_per_second=1e9 / self.cost.compute_ns_per_token,
        )

    def slots(self) -> SlotCounts:
        """Slots by state; those in quarantine are pinned in the pool and told apart here."""
        stats = self.ctx.pool.stats()
        quarantined = min(stats.pinned, self._agent.stats().quarantined_slots)
        return SlotCounts(stats.total, stats.free, stats.cached, stats.pinned - quarantined, quarantined)

    def transports(self) -> dict[str, str]:
        """The transport in use to each peer that KV moved to or from."""
        return {
            peer.peer.partition("#")[0]: "+".join(peer.transports) or peer.preferred
            for peer in self._agent.stats().peers
        }

    def open_things(self) -> dict[str, int]:
        """What is owned and not given back yet, by kind."""
        things: dict[str, int] = {
            "prefix leases": len(self.leases),
            "token streams": len(self.decode.outbox),
            "adoptions": len(self.operations.adopter),
            "announcements": len(self.prefill.announcer) + len(self.decode.announcer),
        }
        things |= self.clients.open_things() | self.shards.open_things()
        for hold in self.ctx.pool.holds():
            kind = f"pool {hold.receipt.kind.value}"
            things[kind] = things.get(kind, 0) + 1
        for item in self._agent.inventory().work:
            things[item.kind] = things.get(item.kind, 0) + 1
        return {kind: count for kind, count in things.items() if count}

    def _plan_pull(self, hashes: Sequence[BlockHash], have_blocks: int) -> PullPlan | None:
        readable = self._base.cluster.readable(Role.PREFILL, Role.DECODE, Role.STORE)
        usable = [node_id for node_id in readable if self.ctx.recovery.allows(node_id)]
        holders = self.ctx.index.lookup(hashes)
        return plan_pull(holders, usable, hashes, have_blocks, self.cost)

    def _plan_wait(self, hashes: Sequence[BlockHash], num_found: int, now_ns: int) -> Wait | None:
        block_ns = int(self.cost.compute_ns_per_token * self.ctx.block_size)
        fetch_ns = int(self.cost.fetch_ns(len(hashes) - num_found))
        return self.in_flight.ask(hashes, num_found, now_ns, block_ns=block_ns, fetch_ns=fetch_ns)

    def tier_counts(self) -> dict[str, TierCounts]:
        """What `/status` says of the tiers; they hear first what the pool stored a moment ago."""
        self.ctx.flush_pool_events()
        return self.ctx.tiers.counts()

    def _tick(self) -> None:
        now_ns = self.ctx.clock.monotonic_ns()
        self.decode.complete(TimePassed(now_ns))
        self.prefill.complete(PrefillTimePassed(now_ns))
        self.shards.tick(now_ns)
        self.leases.expire()
        self.clients.tick(self._sessions)
        self.ctx.telling.check()
        self.ctx.tiers.tick()
        self._evict_ahead()
        self.copier.tick()
        self._count_holders()

    def _evict_ahead(self) -> None:
        """Make room before it is needed, where the cluster file wants that; never of what is on its way down."""
        pool, tiers = self.ctx.pool, self.ctx.tiers.counts()
        waiting = sum(tier.waiting for tier in tiers.values())
        count = pool.evict(self.watermarks.step(pool.stats(), num_waiting=waiting))
        if count:
            self.ctx.metrics.evicted_ahead.inc(count)
            self.ctx.flush_pool_events()

    def _count_holders(self) -> None:
        metrics, pool = self.ctx.metrics, self.ctx.pool
        metrics.retained.set(pool.stats().retained)
        for tenant, account in pool.accounts().items():
            metrics.tenant_blocks.labels(tenant).set(account.used)

    def _sessions(self) -> set[str]:
        return {item.owner for item in self._agent.inventory().of("session")}

    def _is_member(self, node_id: NodeId) -> bool:
        return node_id in self._base.cluster.roles

    def _on_end(self, request: Request[EndRequest]) -> Reply:
        message = request.message
        request_id = RequestId(message.request_id)
        self.decode.complete(EndAsked(request_id, message.epoch, message.cause))
        self.prefill.complete(PrefillEndAsked(request_id, message.epoch, message.cause))
        self.shards.end(request_id, message.epoch, message.cause)
        return Ack()

    def _on_member(self, effect: MemberEffect) -> None:
        if isinstance(effect, MemberDied):
            self.decode.complete(PeerDied(effect.node_id, effect.cause))
            self.decode.outbox.drop_gateway(effect.node_id)
            self.prefill.complete(PrefillPeerDied(effect.node_id, effect.cause))
            self.shards.died(effect)
            self.leases.reader_died(effect.node_id)


def socket_folder(state_path: Path, node_id: str) -> Path:
    """Where a node's unix sockets lie: with its state, or in a short place of its own when the path would be too long
    for a socket (108 bytes)."""
    folder = state_path / "sockets" / node_id
    if len(str(folder)) + SOCKET_NAME_MAX <= SOCKET_PATH_MAX:
        return folder
    digest = hashlib.blake2b(str(folder).encode(), digest_size=8).hexdigest()
    return Path(tempfile.gettempdir()) / f"kv-sockets-{os.getuid()}-{digest}"


def tls_files(folder: str, node_id: str) -> TlsConfig | None:
    """A node's certificate and key, and the authority, where the cluster file wants TLS."""
    if not folder:
        return None
    base = Path(folder)
    return TlsConfig(base / f"{node_id}.pem", base / f"{node_id}.key", base / "ca.pem")


def build(base: Base) -> list[ChildSpec]:
    """The children of a node that holds KV.

    Raises:
        KVError: the weights or the memory are not to be had.
    """
    config, node = base.config, base.node
    set_blas_threads(node.compute_threads)
    settings = config.model
    cost = StubCost(prefill_token_ns=settings.stub_token_us * 1_000 // STUB_GEOMETRY.num_layers)
    model = open_model(EngineSpec(settings.engine, model_path(config), settings.max_context, stub_cost=cost))
    base.serves(config.model.id, model.info.weights_revision)
    geometry = model.info.geometry.block_geometry(config.model.dtype, config.model.block_size)
    arena = Arena.create(geometry, node.num_slots(geometry.block_nbytes), Layout(config.model.layout), name=node.id)
    transport = config.transport
    sockets = None if transport.backend == "tcp" else socket_folder(config.state_path, node.id)
    agent = TransferAgent(
        node.node_id,
        base.incarnation,
        TransportConfig(
            transport=transport.backend,
            socket_folder=sockets,
            tcp_host=None if transport.backend == "shm" else node.host,
            tcp_port=node.data_port,
            tcp_streams=transport.streams,
            allow_ucx=transport.allow_ucx,
            window_size=transport.window_size,
            unit_bytes=transport.unit_bytes,
            codec=transport.codec,
            tls=tls_files(transport.tls_folder, node.id),
        ),
        base.clock,
    )
    work = assemble(base, model, arena, agent, ComputeThread(node.node_id))
    open_tiers(work.ctx, model.info.weights_revision, base.cluster)
    nbytes = arena.num_slots * geometry.block_nbytes
    _log.info("arena node=%s slots=%d bytes=%d layout=%s", node.id, arena.num_slots, nbytes, config.model.layout)
    return [
        keep("memory", Memory(arena, agent, work.ctx.transfers, sockets)),
        keep("work", work),
        *event_children(work.ctx),
        keep("http", base.side_http(actions=work.operations.actions() | work.prefixes.actions())),
    ]


def assemble(base: Base, model: Model, arena: Arena, agent: TransferAgent, compute: Compute) -> NodeWork:
    """The roles of one node over that memory and engine; `base` speaks of them from now on."""
    region = agent.register_memory(arena).region
    introducer = Introducer(base.bus, agent, base.cluster, base.clock)
    geometry = arena.geometry
    accounts = tenant_accounts(base.config, base.replica, geometry.block_nbytes, geometry.block_size)
    pool = BlockPool(arena.num_slots, geometry.block_size, region=region, accounts=accounts)
    cost = PullCost(arena.geometry.block_nbytes, arena.geometry.block_size)
    recovery = Recoverer(base.node.node_id, base.clock, base.events, base.metrics)
    ctx = NodeContext(
        config=base.config,
        node=base.node,
        clock=base.clock,
        bus=base.bus,
        arena=arena,
        region=region,
        pool=pool,
        index=base.index,
        transfers=KVCacheTransferEngine(agent),
        compute=compute,
        replica=base.replica,
        introductions=introducer,
        metrics=base.metrics,
        cost=cost,
        past=PastRequests(),
        exact=ExactBlocks(arena),
        tiers=Tiers(pool, base.replica, base.clock, arena.num_slots, cost),
        recovery=recovery,
    )
    agent.on_recovery = recovery.inside
    work = NodeWork(base, ctx, agent, introducer, model)
    base.load, base.slots, base.transports, base.open_things = work.load, work.slots, work.transports, work.open_things
    base.codecs = work.prefill.codec_choices
    base.alerts = ctx.tiers.problems
    base.tiers, base.moving, base.shards = work.tier_counts, work.operations.moving, work.shards.status
    return work

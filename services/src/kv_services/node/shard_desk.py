"""A node's part in sequences larger than one node: the pieces that it holds and the requests that it coordinates."""

import asyncio
from typing import Any, Final

from kv_core.ids import RequestId
from kv_services.engine.sharding import ShardEngine
from kv_services.event_log import EventLog
from kv_services.membership.state import MemberDied
from kv_services.node.context import NodeContext
from kv_services.node.decode_events import DrainBegan, DrainEnded, EndAsked, PeerDied, TimePassed
from kv_services.node.shard_coordinator import ShardCoordinator
from kv_services.node.shard_coordinator_state import ShardCoordinatorMachine
from kv_services.node.shard_worker import ShardWorker
from kv_services.node.shard_worker_state import Caller, CallerDied, ShardWorkerMachine
from kv_services.sharded.messages import PASS_BYTES
from kv_services.status_report import ShardStatus

_MS: Final = 1_000_000


class ShardDesk:
    """The worker and the coordinator of one node.

    Args:
        engine: None when the node's engine cannot compute on pieces.
    """

    def __init__(self, ctx: NodeContext, engine: ShardEngine | None, events: EventLog) -> None:
        limits = ctx.config.limits
        self.worker = ShardWorker(
            ctx,
            engine,
            ShardWorkerMachine(
                ctx.node_id,
                ctx.pool,
                num_layers=ctx.num_layers,
                block_size=ctx.block_size,
                max_shards=limits.node_queue,
            ),
        )
        self.coordinator = ShardCoordinator(
            ctx,
            engine,
            ShardCoordinatorMachine(
                ctx.node_id,
                num_layers=ctx.num_layers,
                block_size=ctx.block_size,
                pass_tokens=engine.shapes.pass_tokens(PASS_BYTES) if engine is not None else 1,
                max_requests=limits.max_batch,
            ),
            self.worker,
            events,
            ctx.config.sharding.step_timeout_ms * _MS,
        )

    @property
    def busy(self) -> bool:
        """Whether a request depends on this node."""
        return bool(len(self.worker) or len(self.coordinator) or len(self.coordinator.outbox))

    def listen(self) -> None:
        """Take requests from the bus."""
        self.worker.listen()
        self.coordinator.listen()

    def running(self) -> list["asyncio.Future[Any]"]:
        """The ends of both actors: each fails when its actor does."""
        return [asyncio.ensure_future(actor.run()) for actor in (self.worker, self.coordinator)]

    def status(self) -> list[ShardStatus]:
        """The pieces that are held."""
        return self.worker.status()

    def open_things(self) -> dict[str, int]:
        """What is owned and not given back yet, by kind."""
        return {
            "pieces of sequences": len(self.worker),
            "sharded requests": len(self.coordinator),
            "token streams in pieces": len(self.coordinator.outbox),
        }

    def tick(self, now_ns: int) -> None:
        """Judge deadlines."""
        self.worker.complete(TimePassed(now_ns))
        self.coordinator.complete(TimePassed(now_ns))

    def end(self, request_id: RequestId, epoch: int, cause: str) -> None:
        """The gateway ends that epoch."""
        self.coordinator.complete(EndAsked(request_id, epoch, cause))

    def died(self, effect: MemberDied) -> None:
        """Membership declared a process dead."""
        self.worker.complete(CallerDied(Caller(effect.node_id, effect.incarnation)))
        self.coordinator.complete(PeerDied(effect.node_id, effect.cause))
        self.coordinator.outbox.drop_gateway(effect.node_id)

    def drain(self, *, hand_over: bool) -> None:
        """The node is leaving: no new piece, and with `hand_over` those that are held are computed again elsewhere."""
        self.coordinator.complete(DrainBegan(hand_over))
        self.worker.complete(DrainBegan(hand_over))

    def resume(self) -> None:
        """The node stays after all."""
        self.coordinator.complete(DrainEnded())
        self.worker.complete(DrainEnded())

    async def close(self) -> None:
        """Stop: nobody is told, peers learn of it by the node's end. Idempotent."""
        await self.coordinator.close()
        await self.worker.close()

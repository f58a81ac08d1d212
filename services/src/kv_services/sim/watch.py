"""Production parts that tell the oracle what they do: the replica and the stamper of one life."""

from collections.abc import Callable

from kv_bus.interface import Stamp, Stamper
from kv_consistency.effects import BroadcastUpdates, Effect, Issued
from kv_consistency.events import NOTHING, Event, Instant, LocalRemove, LocalStore, Received
from kv_consistency.hlc import Timestamp
from kv_consistency.manager import KvCacheConsistencyManager
from kv_consistency.replica import ReplicaConfig
from kv_consistency.update import OwnerEpoch
from kv_consistency.version_vector import CausalToken, Origin
from kv_core.ids import Incarnation, NodeId, RequestId
from kv_services.sim.causality import CausalOracle, LifeHistory


class WatchedManager(KvCacheConsistencyManager):
    """A replica whose every update, application and accepted read the oracle sees.

    Args:
        blocks_changed: told after each claim of this node's own pool.
    """

    def __init__(
        self,
        node: NodeId,
        incarnation: Incarnation,
        config: ReplicaConfig,
        oracle: CausalOracle,
        life: LifeHistory,
        blocks_changed: Callable[[], None],
    ) -> None:
        super().__init__(node, incarnation, config)
        self._oracle = oracle
        self._blocks_changed = blocks_changed
        self.life = life

    def step(self, event: Event) -> list[Effect]:
        effects = super().step(event)
        if effects and isinstance(effects[0], Issued):
            for effect in effects:
                if isinstance(effect, BroadcastUpdates):
                    self._oracle.published(self.origin, effect.batch.updates)
                    for update in effect.batch.updates:
                        self._oracle.stamped(self.life, update.wall_ns, update.logical)
            if isinstance(event, LocalStore | LocalRemove):
                self._blocks_changed()
        elif isinstance(event, Received):
            self._oracle.applied(self.origin, self.vector(), self._over())
        return effects

    def verify_readable(
        self,
        request_id: RequestId,
        required_seq_len: int,
        *,
        after: CausalToken = NOTHING,
        epoch: OwnerEpoch | None = None,
        at: Instant | None = None,
    ) -> Timestamp:
        version = super().verify_readable(request_id, required_seq_len, after=after, epoch=epoch, at=at)
        self._oracle.read(self.origin, self.vector(), self._over(), request_id, required_seq_len, epoch, after)
        return version

    def _over(self) -> "Over":
        return Over(self)


class Over:
    """The lives that a replica knows to be over, asked for one by one."""

    def __init__(self, manager: KvCacheConsistencyManager) -> None:
        self._manager = manager

    def __contains__(self, origin: Origin) -> bool:
        return self._manager.is_over(origin)


class WatchedStamper:
    """A `Stamper` whose every stamp and receipt the oracle sees."""

    def __init__(self, stamper: Stamper, manager: WatchedManager, oracle: CausalOracle) -> None:
        self._stamper = stamper
        self._manager = manager
        self._oracle = oracle

    def tick(self) -> Stamp:
        stamp = self._stamper.tick()
        self._oracle.stamped(self._manager.life, stamp.wall_ns, stamp.logical)
        return stamp

    def merge(self, remote: Stamp, /) -> None:
        self._stamper.merge(remote)
        last = self._manager.clock.last
        self._oracle.received(self._manager.life, remote, (last.wall_ns, last.logical))

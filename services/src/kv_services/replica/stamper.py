"""One clock for a process: the bus stamps its envelopes by the replica's clock, within the bound that is on disk."""

import asyncio
from collections.abc import Callable

from kv_bus.interface import Stamp
from kv_consistency.errors import ClockBoundReachedError
from kv_consistency.events import Instant
from kv_consistency.hlc import Timestamp, restart_wait_ns
from kv_consistency.manager import KvCacheConsistencyManager
from kv_core.clock import Clock


async def wait_out(bound_ns: int, clock: Clock) -> None:
    """Return when stamps that begin at the former life's bound are ones that peers take.

    A life ends at most one horizon before its bound, so a restart is held up by less than that.
    """
    wait_ns = restart_wait_ns(bound_ns, clock.wall_ns())
    if wait_ns:
        await asyncio.sleep(wait_ns / 1e9)


class ReplicaStamper:
    """Stamps the bus's envelopes by the replica's own clock, so that a process has one clock. A wall that jumps is not
    followed, a peer that is too far ahead is refused; the replica's service says both in its log.

    Args:
        renew: puts a higher clock bound on disk. A process that stood still, or started slowly, for longer than its
            bound reaches has no other way to its next stamp.
    """

    def __init__(
        self, manager: KvCacheConsistencyManager, clock: Clock, renew: Callable[[], None] | None = None
    ) -> None:
        self._manager = manager
        self._monotonic_ns, self._wall_ns = clock.monotonic_ns, clock.wall_ns
        self._renew = renew

    def tick(self) -> Stamp:
        try:
            stamp = self._manager.stamp(self._now())
        except ClockBoundReachedError as error:
            self._raise_bound(error)
            stamp = self._manager.stamp(self._now())
        return Stamp(stamp.wall_ns, stamp.logical, stamp.node)

    def merge(self, remote: Stamp, /) -> None:
        seen = Timestamp(remote.wall_ns, remote.logical, remote.node_id)
        try:
            self._manager.follow(seen, self._now())
        except ClockBoundReachedError as error:
            self._raise_bound(error)
            self._manager.follow(seen, self._now())

    def _now(self) -> Instant:
        return Instant(self._monotonic_ns(), self._wall_ns())

    def _raise_bound(self, error: ClockBoundReachedError) -> None:
        if self._renew is None:
            raise error
        self._renew()

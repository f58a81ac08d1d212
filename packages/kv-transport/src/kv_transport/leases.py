"""Read leases of this agent's blocks: they end by time, by release, or with the agent."""

import asyncio
from collections.abc import Callable
from functools import partial

from kv_core.clock import Clock
from kv_transport.arena import Arena
from kv_transport.errors import InvalidDescriptor, LeaseEnded
from kv_transport.lease_table import Lease, LeaseTable
from kv_transport.tickets import ReadGrant

LEASE_MS_MAX = 24 * 3_600_000


class LeaseKeeper:
    """Gives leases an end. Lives on the loop."""

    def __init__(self, table: LeaseTable, loop: asyncio.AbstractEventLoop, clock: Clock) -> None:
        self._table = table
        self._loop = loop
        self._clock = clock
        self._timers: dict[int, asyncio.TimerHandle] = {}
        self._ends_ns: dict[int, int] = {}

    def grant(self, arena: Arena, draft: Callable[[int], ReadGrant]) -> ReadGrant:
        """Enter the lease that `draft` makes for a free place in the arena's table.

        Raises:
            TransferTooLarge: `LEASES_MAX` are alive on the arena.
            InvalidDescriptor: a block is not sealed, so nobody could verify what was read.
        """
        grant = draft(self._table.free_index(arena))
        for slot in grant.slots:
            unsealed = [
                layer for layer in range(grant.layer_start, grant.layer_end) if not int(arena.checks[layer, slot])
            ]
            if unsealed:
                raise InvalidDescriptor(what="block", value=slot, reason=f"layers {unsealed} are not sealed")
        self._table.enter(Lease(grant, arena))
        self._arm(grant.ticket, grant.lease_ms)
        return grant

    def renew(self, ticket: int, lease_ms: int) -> None:
        """Let it live `lease_ms` from now. Raises `LeaseEnded` when it is over."""
        if ticket not in self._timers:
            raise LeaseEnded(ticket=ticket, reason="it is over, or never was")
        _require_time(lease_ms)
        self._timers.pop(ticket).cancel()
        self._arm(ticket, lease_ms)

    def release(self, ticket: int) -> None:
        """End it now. Idempotent."""
        timer = self._timers.pop(ticket, None)
        if timer is not None:
            timer.cancel()
            del self._ends_ns[ticket]
            self._table.end(ticket)

    def left_ms(self, ticket: int) -> int:
        """Until it ends by itself; 0 when it is over."""
        return max(0, self._ends_ns.get(ticket, 0) - self._clock.monotonic_ns()) // 1_000_000

    def close(self) -> None:
        """End all. Idempotent."""
        for ticket in list(self._timers):
            self.release(ticket)

    def _arm(self, ticket: int, lease_ms: int) -> None:
        _require_time(lease_ms)
        self._ends_ns[ticket] = self._clock.monotonic_ns() + lease_ms * 1_000_000
        self._timers[ticket] = self._loop.call_later(lease_ms / 1000, partial(self.release, ticket))


def _require_time(lease_ms: int) -> None:
    if not 1 <= lease_ms <= LEASE_MS_MAX:
        raise InvalidDescriptor(what="lease_ms", value=lease_ms, reason=f"1 to {LEASE_MS_MAX}")

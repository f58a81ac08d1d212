"""A hybrid logical clock: stamps near wall time that never contradict causality.

Decides the next stamp of one node. It reads no time: each call brings a wall reading and, where a forward jump shall
be told from idleness, a monotonic one. After Kulkarni et al., "Logical Physical Clocks" (2014); as in DESIGN of
CockroachDB's clock the wall may never pass a persisted bound. Different from there: `merge` ticks, so a receipt has
its own stamp.

I1: each stamp of a node exceeds its last. I2: `merge(r) > r`. I3: a stamp's wall is at least the reading given.
I4: `logical` is 0 when the reading leads; an overflow carries into the wall. I5: a refused remote stamp changes
nothing. I6: a wall that steps back never moves the clock back; it is counted. I7: a forward jump beyond the tolerance
is raised, not absorbed. I8: no stamp passes the persisted bound, and a restart begins at it. I9: stamps are totally
ordered by `(wall_ns, logical, node)`; that order is not causality: only version vectors tell before from concurrent.
"""

from dataclasses import dataclass
from typing import Annotated, Final

import msgspec

from kv_consistency import limits
from kv_consistency.errors import (
    ClockBoundReachedError,
    ClockJumpedError,
    InvalidUpdateError,
    RemoteClockAheadError,
)
from kv_core import limits as core_limits
from kv_core.ids import NodeId

_REBASE_NS: Final = 1_000_000_000
_DRIFT_DIVISOR: Final = 1000
"""A wall may steadily gain or lose a thousandth of the time passed (NTP slews by half of that); what it gains beyond
that adds up until it counts as a jump."""


class Timestamp(msgspec.Struct, frozen=True, order=True, array_like=True, gc=False):
    """A stamp: wall nanoseconds, a 32-bit counter within them, and the node that issued it."""

    wall_ns: Annotated[int, msgspec.Meta(ge=0, le=core_limits.MAX_INT64)]
    logical: Annotated[int, msgspec.Meta(ge=0, le=limits.MAX_LOGICAL)]
    node: NodeId

    def __str__(self) -> str:
        return f"{self.wall_ns}.{self.logical}@{self.node}"


def restart_wait_ns(
    bound_ns: int,
    wall_ns: int,
    horizon_ns: int = limits.CLOCK_HORIZON_NS,
    offset_max_ns: int = limits.OFFSET_MAX_NS,
) -> int:
    """How long a life that begins at the bound of the one before must keep silent: until its stamps lie half of the
    tolerance ahead of the wall, so that peers take them whose walls are behind by less than the other half. Never
    longer than a horizon: a clock that was further ahead than that was so together with its peers."""
    return min(horizon_ns, max(0, bound_ns - wall_ns - offset_max_ns // 2))


@dataclass(frozen=True, slots=True)
class ClockStats:
    """A snapshot. `offset_max_seen_ns` is the furthest that an accepted remote stamp lay beyond our state."""

    last: Timestamp
    bound_ns: int | None
    back_steps: int
    jumps: int
    refused: int
    offset_max_seen_ns: int


class HybridLogicalClock:
    """The clock of one node.

    Args:
        node: whose stamps these are.
        offset_max_ns: how far a remote stamp's wall may lie beyond our state.
        jump_max_ns: how far a reading may run ahead of the monotonic clock.
        floor_ns: stamps begin here; a restart gives the bound that it persisted.
        bound_ns: stamps stay below this wall until `extend_bound`; None: not persisted, no bound.
    """

    __slots__ = (
        "_back_steps",
        "_bound",
        "_jump_max",
        "_jumps",
        "_led",
        "_logical",
        "_node",
        "_offset_max",
        "_offset_seen",
        "_reading",
        "_reference",
        "_refused",
        "_wall",
    )

    def __init__(
        self,
        node: NodeId,
        *,
        offset_max_ns: int = limits.OFFSET_MAX_NS,
        jump_max_ns: int = limits.JUMP_MAX_NS,
        floor_ns: int = 0,
        bound_ns: int | None = None,
    ) -> None:
        if offset_max_ns < 0 or jump_max_ns < 0 or floor_ns < 0:
            raise InvalidUpdateError(what="clock setting", reason="durations and the floor are not negative")
        self._node = node
        self._offset_max = offset_max_ns
        self._jump_max = jump_max_ns
        self._bound = bound_ns
        self._wall = floor_ns
        self._led = floor_ns
        self._logical = 0
        self._reading = 0
        self._reference: tuple[int, int] | None = None
        self._back_steps = self._jumps = self._refused = self._offset_seen = 0

    @property
    def last(self) -> Timestamp:
        """The highest stamp issued or taken as a floor."""
        return Timestamp(self._wall, self._logical, self._node)

    @property
    def wall_ns(self) -> int:
        """The wall part of `last`."""
        return self._wall

    @property
    def bound_ns(self) -> int | None:
        """The persisted bound of walls."""
        return self._bound

    def tick(self, wall_ns: int, now_ns: int | None = None) -> Timestamp:
        """The stamp of a local event.

        Args:
            wall_ns: wall reading.
            now_ns: monotonic reading taken with it; without it no forward jump can be told.

        Raises:
            ClockJumpedError, ClockBoundReachedError: nothing was changed but the counters.
        """
        if now_ns is not None:
            self.check_jump(wall_ns, now_ns)
        if wall_ns > self._wall:
            wall, logical = wall_ns, 0
        else:
            wall, logical = self._wall, self._logical + 1
            if logical > limits.MAX_LOGICAL:
                wall, logical = wall + 1, 0
        if self._bound is not None and wall >= self._bound:
            raise ClockBoundReachedError(bound_ns=self._bound)
        if wall_ns < self._reading:
            self._back_steps += 1
        self._reading = wall_ns
        self._wall, self._logical = wall, logical
        return Timestamp(wall, logical, self._node)

    def merge(self, remote: Timestamp, wall_ns: int, now_ns: int | None = None) -> Timestamp:
        """The stamp of receiving something that carries `remote`: above both it and everything issued here.

        Raises:
            RemoteClockAheadError: `remote` lies more than `offset_max_ns` beyond our state and reading.
            ClockJumpedError, ClockBoundReachedError: as `tick`.
        """
        if now_ns is not None:
            self.check_jump(wall_ns, now_ns)
        own = self._wall
        far = remote.wall_ns
        ahead = far - (own if own > wall_ns else wall_ns)
        if ahead > self._offset_max:
            self._refused += 1
            raise RemoteClockAheadError(node=remote.node, ahead_ns=ahead, offset_max_ns=self._offset_max)
        if wall_ns > own and wall_ns > far:
            wall, logical = wall_ns, 0
        else:
            if own > far:
                wall, logical = own, self._logical + 1
            elif far > own:
                wall, logical = far, remote.logical + 1
            else:
                wall, logical = own, max(self._logical, remote.logical) + 1
            if logical > limits.MAX_LOGICAL:
                wall, logical = wall + 1, 0
        if self._bound is not None and wall >= self._bound:
            raise ClockBoundReachedError(bound_ns=self._bound)
        if wall_ns < self._reading:
            self._back_steps += 1
        if ahead > self._offset_seen:
            self._offset_seen = ahead
        if far > self._led:
            self._led = far
        self._reading = wall_ns
        self._wall, self._logical = wall, logical
        return Timestamp(wall, logical, self._node)

    def adopt_floor(self, peer: Timestamp, wall_ns: int, offset_max_ns: int = limits.JOIN_OFFSET_MAX_NS) -> None:
        """Follow a peer's stamp when joining, further than `merge` would: a cluster whose walls were set back lives
        ahead of them, and would lock newcomers out.

        Raises:
            RemoteClockAheadError: further than `offset_max_ns` beyond our state and reading.
        """
        ahead = peer.wall_ns - max(self._wall, wall_ns)
        if ahead > offset_max_ns:
            self._refused += 1
            raise RemoteClockAheadError(node=peer.node, ahead_ns=ahead, offset_max_ns=offset_max_ns)
        if (peer.wall_ns, peer.logical) > (self._wall, self._logical):
            if self._bound is not None and peer.wall_ns >= self._bound:
                raise ClockBoundReachedError(bound_ns=self._bound)
            self._wall, self._logical = peer.wall_ns, peer.logical
            self._led = max(self._led, peer.wall_ns)

    def extend_bound(self, bound_ns: int) -> None:
        """`bound_ns` is on disk now; a lower one than before changes nothing."""
        if self._bound is None or bound_ns > self._bound:
            self._bound = bound_ns

    def check_jump(self, wall_ns: int, now_ns: int) -> None:
        """Compare the wall with the monotonic clock; `tick` and `merge` do so when they are given both.

        Raises:
            ClockJumpedError: the wall ran ahead by more than the tolerance.
        """
        reference = self._reference
        if reference is None:
            self._reference = (now_ns, wall_ns)
            return
        elapsed = now_ns - reference[0]
        expected = reference[1] + elapsed
        ahead = wall_ns - expected
        drift = elapsed // _DRIFT_DIVISOR
        if ahead > self._jump_max + drift and wall_ns > self._led + self._jump_max:
            # A wall that only goes to where a peer's stamp has taken our clock already is no news.
            self._jumps += 1
            raise ClockJumpedError(ahead_ns=ahead, jump_max_ns=self._jump_max)
        if elapsed >= _REBASE_NS:
            # A wall that was set back is expected to return: the reference follows it no faster than any drift.
            self._reference = (now_ns, expected + max(-drift, min(ahead, drift)))

    def accept_wall(self, wall_ns: int, now_ns: int) -> None:
        """Trust the wall clock again as it reads now, after a jump that a person or a peer has confirmed."""
        self._reference = (now_ns, wall_ns)

    def expected_wall_ns(self, now_ns: int) -> int:
        """What the wall should read at `now_ns` by the monotonic clock; our state where no reading was taken."""
        if self._reference is None:
            return self._wall
        return self._reference[1] + now_ns - self._reference[0]

    def stats(self) -> ClockStats:
        """Counters."""
        return ClockStats(self.last, self._bound, self._back_steps, self._jumps, self._refused, self._offset_seen)

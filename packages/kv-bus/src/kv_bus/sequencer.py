"""Decides, for one subscription to one origin, which events are new, which are missing and which are repeats.

Pure. A publisher numbers its events 1, 2, 3, ... within one incarnation, over all message types. PUB/SUB promises
nothing, so the subscriber looks at the numbers: what it can know is that something is missing, and it says so at
once; filling the gap is the business of whoever keeps the log.

S1: events of an incarnation that is not the newest seen are never delivered.
S2: within an incarnation the delivered sequences only grow.
S3: after each step, every sequence from the start to the highest one seen was either delivered or named in exactly
    one gap.
S4: an event that comes late into a named gap is dropped as a repeat: it was already given up to whoever fills gaps.
"""

from dataclasses import dataclass
from typing import Final

from kv_core.errors import LocalProtocolError
from kv_core.ids import Incarnation, NodeId

NO_LIFE: Final = Incarnation(0)
"""No incarnation is known. Real ones start at 1."""


@dataclass(frozen=True, slots=True)
class GapDetected:
    """The events `first_missing` to `last_missing` (both included) of this life of `origin` did not arrive."""

    origin: NodeId
    incarnation: Incarnation
    first_missing: int
    last_missing: int


@dataclass(frozen=True, slots=True)
class OriginRestarted:
    """The origin began a new life; its numbers start again at 1."""

    origin: NodeId
    incarnation: Incarnation
    previous: Incarnation


@dataclass(frozen=True, slots=True)
class Accept:
    """The event just seen is the next one: deliver it."""

    sequence: int


@dataclass(frozen=True, slots=True)
class SequencerStats:
    """A snapshot of one sequencer."""

    incarnation: Incarnation
    highest: int
    delivered: int
    repeats: int
    stale: int
    gaps: int
    missing: int


Effect = Accept | GapDetected | OriginRestarted


class Sequencer:
    """The numbers of one origin, as one subscriber has seen them.

    Args:
        origin: whose events these are.
        incarnation: the life the subscriber already knows, or 0.
        after: the highest sequence of that life it already has.
    """

    __slots__ = ("_delivered", "_gaps", "_highest", "_incarnation", "_missing", "_repeats", "_stale", "origin")

    def __init__(self, origin: NodeId, incarnation: Incarnation = NO_LIFE, after: int = 0) -> None:
        if after < 0 or (after > 0 and incarnation == 0):
            raise LocalProtocolError(detail=f"no incarnation to be after {after} of")
        self.origin = origin
        self._incarnation = incarnation
        self._highest = after
        self._delivered = self._repeats = self._stale = self._gaps = self._missing = 0

    def event_seen(self, incarnation: Incarnation, sequence: int) -> list[Effect]:
        """An event arrived. Effects in order: a restart, then a gap before it, then its acceptance."""
        if incarnation == self._incarnation and sequence == self._highest + 1:
            self._highest = sequence  # the usual case, first
            self._delivered += 1
            return [Accept(sequence)]
        if sequence < 1:
            raise LocalProtocolError(detail=f"events are numbered from 1, not {sequence}")
        effects = self._new_life(incarnation)
        if incarnation < self._incarnation:
            self._stale += 1
            return effects
        if sequence <= self._highest:
            self._repeats += 1
            return effects
        effects += self._missing_up_to(sequence - 1)
        self._highest = sequence
        self._delivered += 1
        effects.append(Accept(sequence))
        return effects

    def event_lost(self, incarnation: Incarnation, sequence: int) -> list[Effect]:
        """An event arrived, but its content could not be used: it is missing like one that did not arrive."""
        return self.head_seen(incarnation, sequence)

    def head_seen(self, incarnation: Incarnation, last_sequence: int) -> list[Effect]:
        """The origin said that `last_sequence` is the highest it published (0: none yet)."""
        effects = self._new_life(incarnation)
        if incarnation < self._incarnation:
            self._stale += 1
            return effects
        return effects + self._missing_up_to(last_sequence)

    def stats(self) -> SequencerStats:
        return SequencerStats(
            self._incarnation,
            self._highest,
            self._delivered,
            self._repeats,
            self._stale,
            self._gaps,
            self._missing,
        )

    def _new_life(self, incarnation: Incarnation) -> list[Effect]:
        if incarnation <= self._incarnation:
            return []
        previous, self._incarnation, self._highest = self._incarnation, incarnation, 0
        # The first life ever seen is no restart.
        return [OriginRestarted(self.origin, incarnation, previous)] if previous else []

    def _missing_up_to(self, last: int) -> list[Effect]:
        first = self._highest + 1
        if last < first:
            return []
        self._highest = last
        self._gaps += 1
        self._missing += last - first + 1
        return [GapDetected(self.origin, self._incarnation, first, last)]

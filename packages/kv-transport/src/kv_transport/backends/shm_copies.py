"""One unit over shared memory: what must be so before its bytes are copied, the copy, and what must be so after it.

A write is checked against the sums that its source was sealed with, or that were taken of it while it was read; a read
against those that the holder keeps beside its blocks. What the peer could have changed meanwhile, the generation of a
slot and the lease, is looked at again when the bytes are here.
"""

from collections.abc import Callable
from typing import Final

import numpy as np

from kv_transport.arena import ArenaView
from kv_transport.copying import SharedCopy
from kv_transport.errors import ChecksumMismatch, GeometryMismatch, LeaseEnded
from kv_transport.regions import MappedBuffer
from kv_transport.ticket_checks import require_generations
from kv_transport.tickets import ReadGrant, WriteGrant
from kv_transport.types import XferOp
from kv_transport.units import Unit, remote_shape

Mapping = ArenaView | MappedBuffer
"""A region of a peer, mapped here."""

_SHARE_NBYTES: Final = 2 << 20
"""What it takes for one more thread to be worth waking: it copies that in some 100 us."""


class UnitCopy:
    """See the module. `prepare` comes first, by one thread; then any number may `help`; one is told to `finish`."""

    __slots__ = ("_arena", "_copy", "_expected", "_lease", "_memory", "_peer", "_stopped", "helpers", "unit")

    def __init__(self, unit: Unit, memory: Mapping, threads: int, peer: str, stopped: Callable[[], bool]) -> None:
        """`threads` is how many there are; `peer` is for errors."""
        self.unit: Final = unit
        self._memory: Final = memory
        self._arena: Final = memory if isinstance(memory, ArenaView) else None
        self._lease: Final = unit.ticket if isinstance(unit.ticket, ReadGrant) else None
        self._peer: Final = peer
        self._stopped: Final = stopped
        self._expected: list[int] = []
        self._copy: SharedCopy | None = None
        self.helpers: Final = max(0, min(threads, len(unit.cells), unit.nbytes // _SHARE_NBYTES) - 1)
        """Threads that are worth having beside the first."""

    @property
    def prepares_fast(self) -> bool:
        """Whether `prepare` has nothing to look at."""
        return self.unit.ticket is None and self.unit.arena is None

    def prepare(self) -> None:
        """Before the first byte is copied.

        Raises:
            GeometryMismatch, StaleGeneration, LeaseEnded: it must not be.
        """
        unit, ticket = self.unit, self.unit.ticket
        if ticket is not None:
            self._require_shape(ticket)
        if self._lease is not None:
            self._require_lease(self._lease)
        elif unit.op is XferOp.WRITE:
            if ticket is not None and self._arena is not None:
                require_generations(self._arena, ticket, unit.start, unit.end)
            if unit.arena is not None:
                self._expected = unit.take_checks()
        writes = unit.op is XferOp.WRITE
        self._copy = SharedCopy(
            self._memory if writes else unit.local,
            unit.local if writes else self._memory,
            unit.cells,
            into_local=not writes,
            sums_source=not self._expected and self._lease is None,
            stopped=self._stopped,
        )

    def help(self) -> bool:
        """As `SharedCopy.help`."""
        assert self._copy is not None
        return self._copy.help()

    def finish(self) -> list[int]:
        """When every byte is copied: the CRC-64 of each cell, which is what it should be.

        Raises:
            ChecksumMismatch, StaleGeneration, LeaseEnded: it is not; nobody may believe these bytes.
        """
        assert self._copy is not None
        unit, checks = self.unit, self._copy.arrived
        if self._lease is None:
            self._compare(checks, self._expected or self._copy.read)
            return checks
        assert self._arena is not None
        slots = np.array(self._lease.slots[unit.start : unit.end], np.int64)
        expected = [int(check) for check in self._arena.checks[unit.layer, slots]]
        # After the copy: had the slots been given to other content meanwhile, this shows it.
        require_generations(self._arena, self._lease, unit.start, unit.end)
        self._require_lease(self._lease)
        self._compare(checks, expected)
        unit.store_checks(checks)
        return checks

    def _require_shape(self, ticket: WriteGrant | ReadGrant) -> None:
        theirs = self._arena.shape if self._arena is not None else None
        expected = remote_shape(ticket.form, ticket.num_slots)
        if theirs != expected:
            raise GeometryMismatch(field="arena", ours=str(expected), theirs=str(theirs))

    def _require_lease(self, lease: ReadGrant) -> None:
        """The holder marks live leases in the arena itself."""
        assert self._arena is not None
        if int(self._arena.leases[lease.lease_index]) != lease.ticket:
            raise LeaseEnded(ticket=lease.ticket, reason="its holder has ended it")

    def _compare(self, checks: list[int], expected: list[int]) -> None:
        if checks != expected:
            bad = sum(ours != theirs for ours, theirs in zip(checks, expected, strict=True))
            raise ChecksumMismatch(peer=self._peer, transport="shm", bad=bad, total=len(checks), layer=self.unit.layer)

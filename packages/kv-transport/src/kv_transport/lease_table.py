"""Which blocks peers may read right now, and where they lie.

A lease is alive here and in the table at the head of its arena, which readers that map the arena look at themselves:
before the copy, and again after it. Thread-safe: IO threads serve reads while the loop ends leases.
"""

import threading
from dataclasses import dataclass
from typing import Final

import numpy as np

from kv_core.block import BlockGeometry
from kv_transport import limits
from kv_transport.arena import Arena
from kv_transport.codecs import Codec, wire_codec
from kv_transport.errors import GrantRefused, LeaseEnded, TransferTooLarge
from kv_transport.frames import UnitHead
from kv_transport.ledger_items import Session
from kv_transport.regions import Memory, RegionTable
from kv_transport.ticket_checks import require_generations, unpack_runs
from kv_transport.tickets import ReadGrant
from kv_transport.types import Access


@dataclass(frozen=True, slots=True)
class Lease:
    """One live read lease."""

    grant: ReadGrant
    arena: Arena


@dataclass(frozen=True, slots=True, eq=False)
class Serving:
    """Bytes that a peer may read: where they lie, their checksums (empty if they have none yet), how to write them."""

    memory: Memory
    offsets: list[int]
    sizes: list[int]
    checks: list[int]
    codec: Codec = Codec.NONE
    geometry: BlockGeometry | None = None


class LeaseTable:
    """See the module."""

    def __init__(self, regions: RegionTable) -> None:
        self._regions: Final = regions
        self._lock = threading.Lock()
        self._leases: dict[int, Lease] = {}

    def enter(self, lease: Lease) -> None:
        """Begin a lease; its region stays registered until `end`."""
        grant = lease.grant
        with self._lock:
            self._regions.use(grant.region)
            self._leases[grant.ticket] = lease
            lease.arena.leases[grant.lease_index] = grant.ticket

    def free_index(self, arena: Arena) -> int:
        """Raises `TransferTooLarge` when `LEASES_MAX` are alive on this arena."""
        free = np.flatnonzero(arena.leases == 0)
        if not len(free):
            raise TransferTooLarge(what="list of leases", size=limits.LEASES_MAX + 1, limit=limits.LEASES_MAX)
        return int(free[0])

    def end(self, ticket: int) -> bool:
        """Take a lease away; False if it is over already."""
        with self._lock:
            lease = self._leases.pop(ticket, None)
            if lease is None:
                return False
            if not lease.arena.closed:
                lease.arena.leases[lease.grant.lease_index] = 0
            self._regions.unuse(lease.grant.region)
            return True

    def serve(self, session: Session, head: UnitHead) -> Serving:
        """The bytes that a peer asks to read.

        Raises:
            LeaseEnded, StaleGeneration, GrantRefused, UnknownRegion, InvalidDescriptor, FrameRefused.
        """
        codec = wire_codec(head.codec, str(session.peer))
        if not head.ticket:
            if not codec.lossless:
                raise GrantRefused(ticket=0, reason=f"plain bytes in {codec.value}")
            region = self._regions.get(head.region)
            if region.access is Access.NONE:
                raise GrantRefused(ticket=0, reason=f"region {head.region} is not open for reading")
            offsets, sizes = unpack_runs(head, region.nbytes, session.peer)
            return Serving(region.memory, offsets, sizes, [], codec)
        with self._lock:
            lease = self._leases.get(head.ticket)
        if lease is None:
            raise LeaseEnded(ticket=head.ticket, reason="it is over, or never was")
        grant, arena = lease.grant, lease.arena
        inside = 0 <= head.start < head.end <= grant.num_positions
        if not inside or not grant.layer_start <= head.layer < grant.layer_end:
            raise LeaseEnded(ticket=head.ticket, reason=f"layer {head.layer}, [{head.start}, {head.end}) lie outside")
        if codec is not Codec.NONE and codec.value not in grant.codecs:
            raise LeaseEnded(ticket=head.ticket, reason=f"{codec.value} is not one of the codecs {grant.codecs}")
        require_generations(arena, grant, head.start, head.end)
        slots = np.array(grant.slots[head.start : head.end], np.int64)
        return Serving(
            arena,
            arena.shape.offsets(slots, head.layer).tolist(),
            [arena.shape.cell_nbytes] * len(slots),
            arena.checks[head.layer, slots].tolist(),
            codec,
            arena.geometry,
        )

    def require(self, ticket: int, region: int) -> None:
        """Raises `LeaseEnded` unless that lease is alive and about that region."""
        with self._lock:
            lease = self._leases.get(ticket)
        if lease is None or lease.grant.region != region:
            raise LeaseEnded(ticket=ticket, reason=f"it does not allow reading region {region}")

    def all(self) -> list[Lease]:
        with self._lock:
            return list(self._leases.values())

"""What the workers of a shared-memory link have in hand, and when the other side is told of it.

To tell somebody wakes a thread that takes a processor from the workers, on a machine whose processors are all copying.
So units are told several together, as long as others are still being moved: those end soon, a unit is 8 MiB a thread.

Thread-safe. J1: each job that began is handed out once, by `moved`, and is over with `told`. J2: while no
bytes are being moved nothing waits to be handed out. J3: a job is busy until it was told: what is said after the last
one of a ticket or of all, a fence's confirmation or goodbye, comes behind what was said of its bytes.
"""

import threading
from collections.abc import Sequence
from dataclasses import dataclass

from kv_core.errors import KVError
from kv_transport.frames import Placed
from kv_transport.types import TransferPriority
from kv_transport.units import Unit


@dataclass(frozen=True, slots=True, eq=False)
class Moved:
    """A unit that no worker has in hand any more.

    `placed` is what its owner must hear if it was a write that went well: a frame, or a message as `doorbell` has it.
    """

    seq: int
    unit: Unit
    error: KVError | None
    placed: Placed | bytes | None

    @property
    def ticket(self) -> int:
        return ticket_of(self.unit)


class Jobs:
    """See the module. At most `together` units are told at once."""

    def __init__(self, together: int) -> None:
        self._together = max(1, together)
        self._lock = threading.Lock()
        self._busy: dict[int, int] = {}
        self._moving = 0
        self._untold: list[Moved] = []

    def begin(self, unit: Unit) -> None:
        """A worker is about to move it."""
        ticket = ticket_of(unit)
        with self._lock:
            self._moving += 1
            self._busy[ticket] = self._busy.get(ticket, 0) + 1

    def moved(self, job: Moved) -> list[Moved]:
        """A worker is done with it: the jobs to tell of now. Urgent ones and failures do not wait."""
        at_once = job.error is not None or job.unit.priority is TransferPriority.CRITICAL
        with self._lock:
            self._moving -= 1
            self._untold.append(job)
            if self._moving and len(self._untold) < self._together and not at_once:
                return []
            taken, self._untold = self._untold, []
            return taken

    def told(self, jobs: Sequence[Moved]) -> None:
        """They are over: nothing of this side touches their memory, and what there was to say has been said."""
        with self._lock:
            for job in jobs:
                left = self._busy.pop(job.ticket) - 1
                if left:
                    self._busy[job.ticket] = left

    def busy(self, ticket: int | None = None) -> bool:
        """Whether any of that ticket, or any at all, is not over."""
        with self._lock:
            return bool(self._busy) if ticket is None else ticket in self._busy


def ticket_of(unit: Unit) -> int:
    """0 for a region that is open."""
    return unit.ticket.ticket if unit.ticket is not None else 0

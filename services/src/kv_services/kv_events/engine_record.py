"""What became of the blocks that one followed engine told of, for whoever asks later. Pure.

To be asked only of blocks that are not held: one that came back keeps its former end here until it ends again.

R1: bounded. The latest ends are kept; of blocks that end together, those that were told of last.
"""

from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import UTC, datetime
from enum import Enum
from itertools import islice
from typing import Final

MAX_GONE: Final = 65_536
"""Ends of blocks of one engine that are remembered. About 20 MB."""


class Fate(Enum):
    """How a block ended."""

    REMOVED = "the engine removed it"
    CLEARED = "the engine cleared everything"
    DROPPED = "the follower dropped everything that it knew of the engine"


@dataclass(frozen=True, slots=True)
class EventRef:
    """One batch of events of an engine.

    Attributes:
        life: which of the engine's numberings it is of, as the follower counts them.
        sequence: its number.
        sent_s: when it was sent, by the engine's own clock; seconds since 1970.
    """

    life: int
    sequence: int
    sent_s: float

    def __str__(self) -> str:
        try:
            sent = datetime.fromtimestamp(self.sent_s, UTC).isoformat(timespec="milliseconds")
        except (ValueError, OverflowError, OSError):
            sent = f"{self.sent_s} s"  # any number may stand in a peer's event
        return f"event {self.sequence}, sent {sent} by its own clock"


@dataclass(frozen=True, slots=True)
class Gone:
    """The end of a block, or of several at once.

    Attributes:
        event: the event that says so; of a drop, the one at which it was noticed.
        cause: why the follower dropped it; empty if the engine did it.
    """

    fate: Fate
    event: EventRef
    cause: str = ""


class EngineRecord:
    """See the module. Blocks go by the bytes of their `BlockHash.sequence`."""

    def __init__(self, limit: int = MAX_GONE) -> None:
        self._limit = limit
        self._gone: OrderedDict[bytes, Gone] = OrderedDict()
        self.forgot = False
        """Whether any end was left out or has been forgotten."""

    def __len__(self) -> int:
        return len(self._gone)

    def removed(self, name: bytes, gone: Gone) -> None:
        """One block ended."""
        self._gone[name] = gone
        self._gone.move_to_end(name)
        self._trim()

    def all_gone(self, latest_first: Iterable[bytes], count: int, gone: Gone) -> None:
        """All `count` blocks that the engine had ended."""
        for name in islice(latest_first, self._limit):
            self._gone[name] = gone
            self._gone.move_to_end(name)
        self.forgot = self.forgot or count > self._limit
        self._trim()

    def get(self, name: bytes) -> Gone | None:
        """How a block ended last, if that is remembered."""
        return self._gone.get(name)

    def _trim(self) -> None:
        while len(self._gone) > self._limit:
            self._gone.popitem(last=False)
            self.forgot = True

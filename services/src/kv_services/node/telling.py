"""When others hear what a node's pool stored and removed: at once where somebody waits for it, else a moment later.

A request enters its blocks and pushes others out just when its first token is waited for, and the engine's thread and
the loop share one interpreter: making claims of it there and then would hold that token up. So the claims are made
together a few milliseconds later, and leave at once, when updates that were made at once would have left too.
"""

import asyncio
from collections.abc import Callable
from typing import Final

from kv_consistency.errors import ReplicaFencedError
from kv_services.replica.outbox import PATIENCE_S

TELL_S: Final = PATIENCE_S
"""How long what the pool did waits at most, which is as long as any update may wait."""


class Telling:
    """The one timer for that."""

    def __init__(self) -> None:
        self._timer: asyncio.TimerHandle | None = None
        self._closed = False
        self._failure: Exception | None = None

    @property
    def due(self) -> bool:
        """Whether something waits to be told."""
        return self._timer is not None

    @property
    def over(self) -> bool:
        """Whether nothing is told any more: this life of the node ends, and its claims with it."""
        return self._closed

    def soon(self, tell: Callable[[], None]) -> None:
        """Call `tell` within `TELL_S`, once for all that happens until then."""
        if self._timer is None and not self._closed:
            self._timer = asyncio.get_running_loop().call_later(TELL_S, self._tell, tell)

    def check(self) -> None:
        """Raise what telling failed with: what was to be told then is told by nobody any more."""
        if self._failure is not None:
            raise self._failure

    def close(self) -> None:
        """Tell nothing more. Idempotent."""
        self._closed = True
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _tell(self, tell: Callable[[], None]) -> None:
        self._timer = None
        try:
            tell()
        except ReplicaFencedError:
            # This life is over; the replica's service ends it.
            return
        except Exception as error:  # a timer's callback has no caller: whoever runs the node asks for it (`check`)
            self._failure = error

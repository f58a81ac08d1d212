"""This node's updates on their way to the others: together with what follows within a few milliseconds.

A decode step lengthens every sequence of its batch, and each lengthening is an update; a request begins and ends, and a
prefill stores its blocks. Told one by one they would cost every member of the cluster a message each, just when that
request is to be served. Whoever must follow an update sooner than it is published is sent it along with the message
that names it (`waiting`), so nobody waits for these milliseconds.

U1: updates are published in the order they were made. U2: none waits longer than `PATIENCE_S`, which is less than the
staleness that raises an alarm. U3: what waits is bounded in updates and bytes.
"""

import asyncio
import logging
from collections.abc import Callable
from typing import Final

from kv_consistency.messages import UpdateBatch
from kv_consistency.update import estimated_nbytes
from kv_core.errors import KVError

PATIENCE_S: Final = 0.005
TOGETHER_MAX: Final = 256
TOGETHER_BYTES_MAX: Final = 64 << 10
"""What is larger by itself leaves at once, and is not sent along: it is published as soon as it could arrive so."""

_log = logging.getLogger(__name__)


class UpdateOutbox:
    """The updates of one origin that were made and not published yet."""

    def __init__(self, publish: Callable[[UpdateBatch], None]) -> None:
        self._publish = publish
        self._waiting: UpdateBatch | None = None
        self._nbytes = 0
        self._timer: asyncio.TimerHandle | None = None

    @property
    def waiting(self) -> UpdateBatch | None:
        """What is not published yet; whoever applies it has applied what was published before, or waits for that."""
        return self._waiting

    def add(self, batch: UpdateBatch) -> None:
        """Take the next updates, in order."""
        nbytes = sum(map(estimated_nbytes, batch.updates))
        waiting = self._waiting
        if waiting is not None:
            full = len(waiting.updates) + len(batch.updates) > TOGETHER_MAX
            if full or self._nbytes + nbytes > TOGETHER_BYTES_MAX:
                self.late()
                waiting = None
        updates = batch.updates if waiting is None else waiting.updates + batch.updates
        self._waiting = UpdateBatch(batch.origin, batch.head, updates)
        self._nbytes += nbytes
        if self._nbytes > TOGETHER_BYTES_MAX:
            self.late()
        elif self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(PATIENCE_S, self.late)

    def late(self) -> None:
        """Publish what waits. Whoever made it has gone on, so what the bus refuses is left to the next digest."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        batch, self._waiting, self._nbytes = self._waiting, None, 0
        if batch is None:
            return
        try:
            self._publish(batch)
        except KVError as error:
            _log.warning("updates not published count=%d cause=%s", len(batch.updates), error)

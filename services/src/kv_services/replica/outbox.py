"""This node's updates on their way to the others: at once, or together with what follows within a few milliseconds.

A decode step lengthens every sequence of its batch, and each lengthening is an update. Told one by one they would cost
every member of the cluster a message per token; nobody waits for them, so they may wait for each other.

U1: updates are published in the order they were made. U2: none waits longer than `PATIENCE_S`, which is less than the
staleness that raises an alarm. U3: what is said at once follows what waited.
"""

import asyncio
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final

from kv_consistency.messages import UpdateBatch
from kv_core.errors import KVError

PATIENCE_S: Final = 0.005
TOGETHER_MAX: Final = 256
"""Updates of one message: lengthenings take less than 256 B each, so it stays far below a message's limit."""

_log = logging.getLogger(__name__)


class UpdateOutbox:
    """The updates of one origin that were made and not published yet."""

    def __init__(self, publish: Callable[[UpdateBatch], None]) -> None:
        self._publish = publish
        self._waiting: UpdateBatch | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._patient = False

    @contextmanager
    def patient(self, may_wait: bool) -> Iterator[None]:
        """What is added inside may wait for more."""
        before, self._patient = self._patient, may_wait
        try:
            yield
        finally:
            self._patient = before

    def add(self, batch: UpdateBatch) -> None:
        """Take the next updates, in order.

        Raises:
            KVError: of the bus, for one that may not wait.
        """
        if not self._patient:
            self.late()
            self._publish(batch)
            return
        waiting = self._waiting
        if waiting is not None and len(waiting.updates) + len(batch.updates) > TOGETHER_MAX:
            self.late()
            waiting = None
        updates = batch.updates if waiting is None else waiting.updates + batch.updates
        self._waiting = UpdateBatch(batch.origin, batch.head, updates)
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(PATIENCE_S, self.late)

    def late(self) -> None:
        """Publish what waits. Whoever made it has gone on, so what the bus refuses is left to the next digest."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        batch, self._waiting = self._waiting, None
        if batch is None:
            return
        try:
            self._publish(batch)
        except KVError as error:
            _log.warning("updates not published count=%d cause=%s", len(batch.updates), error)

"""What both halves of an endpoint share: who we are, how a message becomes bytes, and what is counted."""

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import ParamSpec

from kv_bus.interface import Stamp, Stamper
from kv_core.clock import Clock
from kv_core.errors import KVError
from kv_core.ids import Incarnation, NodeId
from kv_core.wire import Envelope, Message, Registry, encode

P = ParamSpec("P")

_log = logging.getLogger(__name__)


@dataclass(slots=True)
class Counters:
    """What an endpoint counts; every figure only grows."""

    requests_received: int = 0
    notes_received: int = 0
    replies_sent: int = 0
    replies_dropped: int = 0
    events_published: int = 0
    events_received: int = 0
    gaps: int = 0
    sends_dropped: int = 0
    bytes_sent: int = 0
    bytes_received: int = 0
    refused: dict[str, int] = field(default_factory=dict)

    def refuse(self, cause: str) -> None:
        """Count one message that is not handled."""
        self.refused[cause] = self.refused.get(cause, 0) + 1


class Local:
    """This node: its name, life, clock, stamps and message types."""

    __slots__ = (
        "_stamper",
        "_tick",
        "clock",
        "counters",
        "incarnation",
        "monotonic_ns",
        "node_id",
        "registry",
        "task_factory",
    )

    def __init__(
        self, node_id: NodeId, incarnation: Incarnation, registry: Registry, stamper: Stamper, clock: Clock
    ) -> None:
        self.node_id = node_id
        self.incarnation = incarnation
        self.registry = registry
        self.clock = clock
        self.monotonic_ns = clock.monotonic_ns
        self.counters = Counters()
        self._stamper = stamper
        self._tick = stamper.tick

    def encode(self, message: Message, target_incarnation: Incarnation, correlation_id: int, deadline_ns: int) -> bytes:
        """One frame, stamped now.

        Raises:
            UnregisteredMessageError, UnencodableMessageError: as `kv_core.wire.encode`.
        """
        stamp = self._tick()
        envelope = Envelope(
            self.node_id,
            self.incarnation,
            target_incarnation,
            stamp.wall_ns,
            stamp.logical,
            correlation_id,
            deadline_ns,
            message,
        )
        data = encode(envelope, self.registry)
        self.counters.bytes_sent += len(data)
        return data

    def learn(self, envelope: Envelope) -> tuple[Stamp, KVError | None]:
        """Rise above the stamp of what arrived; the error says that the clock refuses it."""
        stamp = Stamp(envelope.wall_ns, envelope.logical, envelope.sender)
        try:
            self._stamper.merge(stamp)
        except KVError as error:
            self.counters.refuse("stamp")
            return stamp, error
        return stamp, None

    def guard(self, callback: Callable[P, object], *args: P.args, **kwargs: P.kwargs) -> None:
        """Run a user's callback; what it raises is its bug and must not stop the reader that called it."""
        try:
            callback(*args, **kwargs)
        except Exception as error:
            self.report(f"callback {callback!r} of the bus failed", error)

    def report(self, message: str, error: BaseException) -> None:
        """Say where the process listens for failures that nobody waits for; the simulator stops there."""
        asyncio.get_running_loop().call_exception_handler({"message": message, "exception": error})

"""Says what this node does about transfers that fail, and keeps the breakers of its links.

The decisions are `kv_transport.recovery`'s table and `link_breaker`'s; retries and the fall-back to tcp are carried out
inside the transfer, computing again by the prefill machine, another node by the gateway. Each is told here once, as an
event and a metric.
"""

from typing import Final

from kv_core.clock import Clock
from kv_core.errors import KVError
from kv_core.ids import NodeId, RequestId
from kv_services.event_log import EventLog
from kv_services.link_breaker import LinkBreakers
from kv_services.metrics import Metrics
from kv_transport.recovery import (
    FallbackToTcp,
    FullPrefillFallback,
    RecoveryAction,
    RetryOnAlternateNode,
    RetryWithBackoff,
    TransferTask,
    diagnose_transfer_failure,
)

_KINDS: Final[dict[type[RecoveryAction], str]] = {
    FallbackToTcp: "fall_back_to_tcp",
    RetryWithBackoff: "retry_with_backoff",
    RetryOnAlternateNode: "retry_on_alternate_node",
    FullPrefillFallback: "full_prefill",
}


def kind_of(action: RecoveryAction) -> str:
    """The name of an action in events and metrics."""
    return _KINDS[type(action)]


class Recoverer:
    """The recoveries of one node."""

    def __init__(self, node_id: NodeId, clock: Clock, events: EventLog, metrics: Metrics) -> None:
        self._node_id = node_id
        self._clock = clock
        self._events = events
        self._metrics = metrics
        self.breakers: LinkBreakers[NodeId] = LinkBreakers()

    def inside(self, task: TransferTask, action: RecoveryAction, error: KVError) -> None:
        """A transfer that is going on was helped: its bytes are sent again, or go by tcp from now on."""
        link = f"{task.source}>{task.target}"
        if isinstance(action, RetryWithBackoff) and action.hardware_fault:
            self._metrics.hardware_faults.labels(str(task.target)).inc()
        self._metrics.recoveries.labels(kind_of(action)).inc()
        self._events.note(kind_of(action), link, str(error), request=task.request_id)

    def ended(self, peer: NodeId, request_id: str, error: KVError | None, *, reading: bool) -> None:
        """A transfer with `peer` is over; with an error, what follows from it is told and the link is judged."""
        now_ns = self._clock.monotonic_ns()
        self._metrics.link_transfers.labels(str(peer), "ok" if error is None else "failed").inc()
        ends = (peer, self._node_id) if reading else (self._node_id, peer)
        link = f"{ends[0]}>{ends[1]}"
        if error is None:
            if self.breakers.succeeded(peer):
                self._metrics.recoveries.labels("link_closed").inc()
                self._events.note("link_closed", link, "a transfer went well")
            return
        # What the transfer could do by itself it has done: tcp was tried, and so were three retries.
        task = TransferTask(RequestId(request_id), *ends, transport="tcp", checksum_failures=1 << 30)
        action = diagnose_transfer_failure(task, error)
        self._metrics.recoveries.labels(kind_of(action)).inc()
        self._events.note(kind_of(action), link, f"{type(error).__name__}: {error}", request=request_id)
        if self.breakers.failed(peer, now_ns):
            self._metrics.recoveries.labels("link_opened").inc()
            self._events.note("link_opened", link, f"its last transfers failed, the last one by: {error}")

    def allows(self, peer: NodeId) -> bool:
        """Whether a transfer with `peer` may be begun that is not bound to be with him."""
        return self.breakers.allows(peer, self._clock.monotonic_ns())

    def tried(self, peer: NodeId) -> None:
        """Such a transfer is begun."""
        self.breakers.tried(peer, self._clock.monotonic_ns())

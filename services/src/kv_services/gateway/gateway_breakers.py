"""Keeps requests from nodes and links that keep failing though their nodes beat.

Two kinds of links: from this gateway to a node, judged by how reserving and decoding went there; and from a prefill to
a decode node, judged by how hand-overs between them went. Who died is membership's affair, who is full or leaves says
so itself, and what the client asked for is nobody's fault: none of that counts.

C1: a link that is open gets no request while another way is left; if none is, it is used: that costs attempts, and
    refusing would cost the request.
C2: an open link is given one request a pause, so what heals has its work back by itself (`link_breaker`).
"""

from collections.abc import Mapping
from typing import Final

from kv_bus.errors import BusError, Draining, MailboxFull, PeerQueueFull, TooManyRequests
from kv_core.clock import Clock
from kv_core.errors import KVError
from kv_core.ids import NodeId, RequestId
from kv_services.errors import HandoverChecksumError
from kv_services.event_log import EventLog
from kv_services.link_breaker import LinkBreakers
from kv_services.messages import Load
from kv_services.metrics import Metrics
from kv_services.sharded.errors import ShardLostError
from kv_transport.errors import GrantBusy, LandingFull, QuarantineFull, TransportError

_FAULTS: Final = (BusError, TransportError, HandoverChecksumError, ShardLostError)
_FULL: Final = (Draining, MailboxFull, PeerQueueFull, TooManyRequests, GrantBusy, LandingFull, QuarantineFull)
"""Of those, what only says that there is no room now."""

Loads = Mapping[NodeId, Load]


class GatewayBreakers:
    """The breakers of one gateway."""

    def __init__(self, own: NodeId, clock: Clock, events: EventLog | None, metrics: Metrics) -> None:
        self._own = own
        self._clock = clock
        self._events = events
        self._metrics = metrics
        self._links: LinkBreakers[tuple[NodeId, NodeId]] = LinkBreakers()

    def reachable(self, nodes: Loads) -> dict[NodeId, Load]:
        """Of these nodes, those that may be given a request; all of them if none may (C1)."""
        return {node: load for node, load in nodes.items() if self._allows(self._own, node)} or dict(nodes)

    def avoided(self) -> tuple[NodeId, ...]:
        """Nodes that may not be given a request just now."""
        return tuple(to for start, to in self._links.open_links() if start == self._own and not self._allows(start, to))

    def fed(self, decode: Loads, prefill: Loads) -> dict[NodeId, Load]:
        """Of the decode nodes, those that a prefill node may hand over to; all of them if there is none (C1)."""
        feeds = {node: load for node, load in decode.items() if any(self._allows(start, node) for start in prefill)}
        return feeds or dict(decode)

    def feeding(self, prefill: Loads, decode: NodeId) -> dict[NodeId, Load]:
        """Of the prefill nodes, those that may hand over to that decode node; all of them if none may (C1)."""
        feed = {node: load for node, load in prefill.items() if self._allows(node, decode)}
        return feed or dict(prefill)

    def given(self, decode: NodeId, prefill: NodeId | None = None) -> None:
        """A request is sent there: of a link whose pause is over, this is the trial."""
        now_ns = self._clock.monotonic_ns()
        self._links.tried((self._own, decode), now_ns)
        if prefill is not None:
            self._links.tried((self._own, prefill), now_ns)
            self._links.tried((prefill, decode), now_ns)

    def decoded(self, decode: NodeId) -> None:
        """Tokens came from there."""
        self._well(self._own, decode)

    def handed_over(self, prefill: NodeId, decode: NodeId) -> None:
        """A hand-over between these two was verified."""
        self._well(self._own, prefill)
        self._well(prefill, decode)

    def failed(self, link: tuple[NodeId, NodeId] | NodeId, error: KVError, request_id: RequestId) -> None:
        """An attempt failed: at a node, or in the hand-over from a prefill to a decode node."""
        if not isinstance(error, _FAULTS) or isinstance(error, _FULL):
            return
        if not isinstance(link, tuple):
            link = (self._own, link)
        elif isinstance(error, BusError):
            # The prefill node did not answer us, so nothing is known of its hand-over.
            link = (self._own, link[0])
        if self._links.failed(link, self._clock.monotonic_ns()):
            self._note("link_opened", link, f"its last requests failed, the last one by: {error}", request_id)

    def _allows(self, start: NodeId, to: NodeId) -> bool:
        return self._links.allows((start, to), self._clock.monotonic_ns())

    def _well(self, start: NodeId, to: NodeId) -> None:
        if self._links.succeeded((start, to)):
            self._note("link_closed", (start, to), "a request went well", RequestId(""))

    def _note(self, kind: str, link: tuple[NodeId, NodeId], cause: str, request_id: RequestId) -> None:
        self._metrics.recoveries.labels(kind).inc()
        if self._events is not None:
            self._events.note(kind, ">".join(link), cause, request=request_id)

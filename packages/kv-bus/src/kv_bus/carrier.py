"""The seam between what a bus means and how bytes move.

`Endpoint` (above the seam) knows calls, handlers, deadlines, incarnations and events; a carrier (below) knows
connections and whose key a connection was made with. ZeroMQ and the in-memory twin are carriers, and everything above
is the same code in production and simulation.

C1: a carrier names as `owner` of an incoming message only the node whose admitted key the connection was made with.
C2: a carrier calls a sink only from the loop, never from inside a call that the endpoint makes.
C3: frames of one connection arrive in the order they were sent.
C4: `send` and `reply` never block: they take the frame or say that they did not.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum
from typing import Protocol

from kv_bus.interface import PeerAddress
from kv_core.ids import NodeId

Frame = bytes | memoryview
"""An encoded envelope. A view is good until the sink returns."""


class ReplyOutcome(Enum):
    """What became of a reply handed to a carrier."""

    SENT = "sent"
    BUSY = "busy"
    GONE = "gone"


@dataclass(frozen=True, slots=True)
class CarrierStats:
    """What a carrier counts. `refused` names causes below the seam."""

    turns_cut: int = 0
    auth_admitted: int = 0
    auth_refused: int = 0
    replies_dropped: int = 0
    refused: dict[str, int] = field(default_factory=dict)


class RequestSink(Protocol):
    """Takes what arrives for this node."""

    def request_arrived(self, owner: NodeId, route: bytes, data: Frame) -> None:
        """A frame came; `route` leads back to the connection it came by."""
        ...

    def stranger_arrived(self, route: bytes, data: Frame) -> None:
        """A frame came by a connection whose key has left the allow-list since it was made."""
        ...

    def replies_writable(self) -> None:
        """A reply that was BUSY may be tried again."""
        ...

    def keys_changed(self) -> None:
        """The allow-list is another one now; the carrier has already reconnected whose key changed."""
        ...

    def carrier_failed(self, error: BaseException) -> None:
        """The carrier met a bug of its own and is of no more use."""
        ...


class LinkSink(Protocol):
    """Told what happens to one outgoing connection."""

    def connected(self) -> None:
        """The connection is made and both keys are admitted."""
        ...

    def lost(self, cause: str) -> None:
        """The connection broke, or an attempt failed; the carrier keeps trying."""
        ...

    def refused(self, cause: str) -> None:
        """The peer does not admit us, or is not who we took it for; nothing is tried before `Wire.reconnect`."""
        ...

    @property
    def reply_arrived(self) -> Callable[[Frame], None]: ...

    def writable(self) -> None:
        """`send` may be tried again."""
        ...


class EventSink(Protocol):
    """Told what arrives from one publisher."""

    def event_arrived(self, data: Frame) -> None: ...

    def refused(self, cause: str) -> None:
        """As `LinkSink.refused`."""
        ...


class Wire(Protocol):
    """An outgoing connection to one peer."""

    def send(self, data: bytes) -> bool:
        """Hand over a frame; False when the connection takes none now."""
        ...

    def reconnect(self) -> None:
        """Drop what there is and connect anew."""
        ...

    def close(self) -> None: ...


class EventWire(Protocol):
    """An outgoing connection to one publisher."""

    def reconnect(self) -> None: ...

    def close(self) -> None: ...


class Carrier(Protocol):
    """Moves frames for one node."""

    @property
    def cluster(self) -> str: ...

    async def open(self, sink: RequestSink) -> None:
        """Bind; frames may arrive from now on.

        Raises:
            BindFailed: the address is taken.
        """
        ...

    def stop_receiving(self) -> None:
        """Deliver nothing more; what was handed over still leaves."""
        ...

    async def close(self) -> None:
        """Let go of everything; what was handed over gets a moment to leave."""
        ...

    def key_of(self, node_id: NodeId) -> str:
        """The node's public key in the allow-list now; empty when it is not admitted."""
        ...

    def check_address(self, peer: PeerAddress) -> None:
        """Raise what is wrong with an address before it is used.

        Raises:
            BadAddress: not an address of this carrier.
        """
        ...

    def connect(self, peer: PeerAddress, sink: LinkSink) -> Wire:
        """Connect to where the peer takes requests. A peer without a key is reported as refused."""
        ...

    def subscribe(self, peer: PeerAddress, sink: EventSink) -> EventWire: ...

    def reply(self, route: bytes, data: bytes) -> ReplyOutcome: ...

    def publish(self, data: bytes) -> None: ...

    def flush(self) -> None:
        """Let the frames of `Wire.send` and `reply` leave that were kept to leave together."""
        ...

    def stats(self) -> CarrierStats: ...

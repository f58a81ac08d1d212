"""The peers table: who is known, where, and in which life.

I1: the incarnation known of a node only grows, also when the peer is removed and added again: death is sticky.
I2: a new life is announced once, to every watcher, before anything of that life is handled.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING

from kv_bus.errors import UnknownPeer
from kv_bus.interface import PeerAddress, PeerEvent, PeerRestarted
from kv_bus.local import Local
from kv_bus.sequencer import NO_LIFE
from kv_core.ids import Incarnation, NodeId

if TYPE_CHECKING:
    from kv_bus.calls import PeerLink
    from kv_bus.events import Origin
    from kv_bus.serving import Incoming


class Peer:
    """One line of the table. A node that only ever called us has no address."""

    __slots__ = ("address", "incarnation", "link", "node_id", "open", "origin")

    def __init__(self, node_id: NodeId) -> None:
        self.node_id = node_id
        self.address: PeerAddress | None = None
        self.incarnation: Incarnation = NO_LIFE
        self.link: PeerLink | None = None
        self.origin: Origin | None = None
        self.open: dict[int, Incoming] = {}


class PeerWatch:
    """One registered watcher."""

    __slots__ = ("_callback", "_watches")

    def __init__(self, watches: "dict[PeerWatch, None]", callback: Callable[[PeerEvent], None]) -> None:
        self._watches = watches
        self._callback = callback
        watches[self] = None

    def close(self) -> None:
        self._watches.pop(self, None)

    def tell(self, event: PeerEvent) -> None:
        self._callback(event)


class Peers:
    """Every node this one has heard of or was told of."""

    def __init__(self, local: Local) -> None:
        self._local = local
        self._peers: dict[NodeId, Peer] = {}
        self._watches: dict[PeerWatch, None] = {}
        # Told of a new life after the watchers: the endpoint's halves void what named the old one.
        self.on_new_life: list[Callable[[Peer], None]] = []

    def all(self) -> list[Peer]:
        """Every line, in the order nodes were heard of."""
        return list(self._peers.values())

    def reachable(self, node_id: NodeId) -> Peer:
        """The line of a peer with an address.

        Raises:
            UnknownPeer: there is none.
        """
        peer = self._peers.get(node_id)
        if peer is None or peer.address is None:
            raise UnknownPeer(node=node_id)
        return peer

    def find(self, node_id: NodeId) -> Peer | None:
        return self._peers.get(node_id)

    def line(self, node_id: NodeId) -> Peer:
        """The line of any node, made when it is new."""
        peer = self._peers.get(node_id)
        if peer is None:
            peer = self._peers[node_id] = Peer(node_id)
        return peer

    def seen(self, peer: Peer, incarnation: Incarnation) -> bool:
        """Something of this life of `peer` arrived; False when that life is over."""
        if incarnation == peer.incarnation:
            return True
        if incarnation < peer.incarnation:
            return False
        previous, peer.incarnation = peer.incarnation, incarnation
        if previous != NO_LIFE:
            self.tell(PeerRestarted(peer.node_id, incarnation, previous))
        for void in self.on_new_life:
            void(peer)
        return True

    def watch(self, callback: Callable[[PeerEvent], None]) -> PeerWatch:
        return PeerWatch(self._watches, callback)

    def tell(self, event: PeerEvent) -> None:
        for watch in list(self._watches):
            self._local.guard(watch.tell, event)

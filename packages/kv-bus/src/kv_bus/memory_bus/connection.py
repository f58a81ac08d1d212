"""One outgoing connection between two simulated nodes, in the states that a ZeroMQ socket's goes through.

X1: it is made by a hand-shake that meets the network's delays and cuts; one that fails is tried again after a growing
    pause. A node that is not there, or is silent, is `lost`; one that does not admit us `refused`, and then nothing is
    tried before `reconnect()`.
X2: it breaks when the other side goes, at the latest when a frame reaches the place where it was, or by heartbeat,
    which also ends it when a cut lasts.
X3: what comes back on it counts only while it is the same connection.
"""

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

from kv_bus.limits import CONNECT_TIMEOUT_MS, HEARTBEAT_TIMEOUT_MS, RECONNECT_FIRST_MS, RECONNECT_MAX_MS
from kv_bus.memory_bus.network import Channel, Path
from kv_core.ids import NodeId

if TYPE_CHECKING:
    from kv_bus.memory_bus.carrier import MemoryCarrier


class ConnectionOwner(Protocol):
    """What a connection tells whoever wanted it."""

    def made(self, remote: "MemoryCarrier") -> None: ...

    def lost(self, cause: str) -> None: ...

    def refused(self, cause: str) -> None: ...


class Connection:
    """See the module. It begins to connect at once."""

    def __init__(self, carrier: "MemoryCarrier", peer: NodeId, owner: ConnectionOwner) -> None:
        self._carrier = carrier
        self._network = carrier.network
        self._owner = owner
        self._peer = peer
        self.dialler = carrier.node_id
        self._forth = Path(carrier.node_id, peer)
        self._back = Path(peer, carrier.node_id)
        self._attempt = 0
        self._retry_ms = RECONNECT_FIRST_MS
        self._timer: asyncio.TimerHandle | None = None
        self._heartbeat: asyncio.TimerHandle | None = None
        self._remote: MemoryCarrier | None = None
        self.route = b""
        carrier.dialled[self] = None
        self._try()

    def reconnect(self) -> None:
        """Drop what there is and begin anew."""
        self._drop()
        self._retry_ms = RECONNECT_FIRST_MS
        self._try()

    def close(self) -> None:
        self._drop()
        self._carrier.dialled.pop(self, None)

    def broke(self, cause: str) -> None:
        """The other side is gone."""
        if self._remote is not None:
            self._drop()
            self._owner.lost(cause)
            self._again()

    def send(self, channel: Channel, nbytes: int, deliver: Callable[["MemoryCarrier"], None]) -> bool:
        """Bring a frame to the other side; False when there is no connection."""
        remote, route = self._remote, self.route
        if remote is None:
            return False

        def arrive() -> None:
            if remote.is_open:
                deliver(remote)
            else:
                # Nobody is there any more: the machine answers with a reset.
                self._network.carry(self._back, Channel.HANDSHAKE, 0, lambda: self._reset(route))

        self._network.carry(self._forth, channel, nbytes, arrive, self._met_cut)
        return True

    def send_back(self, channel: Channel, nbytes: int, deliver: Callable[[], None]) -> None:
        """Bring a frame from the other side to us (X3)."""
        route = self.route

        def arrive() -> None:
            if self.route == route:
                deliver()

        self._network.carry(self._back, channel, nbytes, arrive, self._met_cut)

    def hang_up(self) -> None:
        """The other side closes: we learn of it when that reaches us."""
        route = self.route
        self._network.carry(self._back, Channel.HANDSHAKE, 0, lambda: self._reset(route), self._met_cut)

    def _reset(self, route: bytes) -> None:
        if self.route == route:
            self.broke("connection closed")

    def _try(self) -> None:
        self._attempt += 1
        attempt, loop = self._attempt, asyncio.get_running_loop()
        if not self._carrier.key_of(self._peer):
            loop.call_soon(self._denied, attempt, "its key is not in the allow-list")
            return
        self._network.carry(self._forth, Channel.HANDSHAKE, 0, lambda: self._knock(attempt))
        self._timer = loop.call_later(CONNECT_TIMEOUT_MS / 1e3, self._unanswered, attempt)

    def _knock(self, attempt: int) -> None:
        """The hand-shake has reached the other machine; its answer travels back."""
        remote = self._network.find(self._peer)
        if remote is None:
            self._network.carry(self._back, Channel.HANDSHAKE, 0, lambda: self._absent(attempt))
        elif not remote.key_of(self._carrier.node_id):
            cause = "it does not admit our key"
            self._network.carry(self._back, Channel.HANDSHAKE, 0, lambda: self._denied(attempt, cause))
        else:
            self._network.carry(self._back, Channel.HANDSHAKE, 0, lambda: self._made(attempt, remote))

    def _made(self, attempt: int, remote: "MemoryCarrier") -> None:
        if attempt != self._attempt:
            return
        if not remote.is_open:
            self._absent(attempt)
            return
        self._stop_timer()
        self._attempt += 1
        self._retry_ms = RECONNECT_FIRST_MS
        self._remote = remote
        self.route = self._network.next_route()
        remote.accepted[self.route] = self
        self._arm_heartbeat()
        self._owner.made(remote)

    def _absent(self, attempt: int) -> None:
        if attempt == self._attempt:
            self._stop_timer()
            self._owner.lost("no connection")
            self._again()

    def _denied(self, attempt: int, cause: str) -> None:
        if attempt == self._attempt:
            self._stop_timer()
            self._attempt += 1
            self._owner.refused(cause)

    def _unanswered(self, attempt: int) -> None:
        self._timer = None
        if attempt == self._attempt:
            self._owner.lost("no answer")
            self._again()

    def _again(self) -> None:
        """Try after a pause, unless the owner has meanwhile closed us or begun anew."""
        if self not in self._carrier.dialled or self._timer is not None or self._remote is not None:
            return
        self._attempt += 1
        self._timer = asyncio.get_running_loop().call_later(self._retry_ms / 1e3, self._retry)
        self._retry_ms = min(2 * self._retry_ms, RECONNECT_MAX_MS)

    def _retry(self) -> None:
        self._timer = None
        self._try()

    def _met_cut(self) -> None:
        if self._remote is not None:
            self._arm_heartbeat()

    def _arm_heartbeat(self) -> None:
        if self._heartbeat is None:
            delay_s = HEARTBEAT_TIMEOUT_MS / 1e3
            self._heartbeat = asyncio.get_running_loop().call_later(delay_s, self._judge_heartbeat)

    def _judge_heartbeat(self) -> None:
        """A connection on which we only listen sends nothing that could meet a cut or a place where nobody is."""
        self._heartbeat = None
        faults, here, remote = self._network.faults, self._carrier.node_id, self._remote
        if remote is None:
            return
        if not remote.is_open or faults.is_cut(here, self._peer) or faults.is_cut(self._peer, here):
            self.broke("heartbeat missed")
        else:
            self._arm_heartbeat()

    def _drop(self) -> None:
        self._attempt += 1
        self._stop_timer()
        if self._heartbeat is not None:
            self._heartbeat.cancel()
            self._heartbeat = None
        if self._remote is not None:
            self._remote.accepted.pop(self.route, None)
            self._remote.callers.pop(self.route, None)
            self._remote.subscribers.pop(self, None)
            self._remote, self.route = None, b""

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

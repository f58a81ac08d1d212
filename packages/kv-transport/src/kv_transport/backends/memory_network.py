"""A network inside one process, for tests and the simulator: who reaches whom, when, and what goes wrong on the way.

Everything that happens is a timer of the event loop, so in virtual time (`kv_core.testing`) a run is a function of its
seed. Each directed pair of nodes draws from a stream of its own: traffic of others does not change its faults.

A connection carries frames in order. A frame that meets a cut is lost and its connection is broken for good, which
both ends learn by silence, or by a reset once the way is open again. Units do not share that order: like one-sided
operations of a network card they read and write the memory of the other side when their time comes, whatever became
of the connection meanwhile. Only a crash of their node stops them.
"""

import asyncio
import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum
from functools import partial
from typing import TYPE_CHECKING

from kv_core.ids import NodeId
from kv_transport.errors import InvalidDescriptor

if TYPE_CHECKING:
    from kv_transport.backends.memory import MemoryBackend, MemoryLink, MemorySession


@dataclass(frozen=True, slots=True)
class MemoryFaults:
    """What may befall units and frames; the chances (0 to 1) are drawn once for each unit posted, in this order.

    Attributes:
        delay_ns: least delay of every unit and frame.
        jitter_ns: mean of what is added to it, exponentially distributed; reorders units, never frames.
        bytes_per_s: what one connection carries in each direction; 0 is no limit.
        loss: the unit never happens, and nobody is told.
        late: its bytes and its completion come `late_ns` after they should.
        missing: its bytes arrive, its completion never does.
        torn: some of its bytes are not the ones that were sent.
        reused: the holder gives the slots to other content while they are being read (reads under a lease only).
    """

    delay_ns: int = 20_000
    jitter_ns: int = 0
    bytes_per_s: int = 0
    loss: float = 0.0
    late: float = 0.0
    late_ns: int = 10_000_000_000
    missing: float = 0.0
    torn: float = 0.0
    reused: float = 0.0

    def __post_init__(self) -> None:
        for name in ("delay_ns", "jitter_ns", "bytes_per_s", "late_ns"):
            if getattr(self, name) < 0:
                raise InvalidDescriptor(what=name, value=getattr(self, name), reason="at least 0")
        for name in ("loss", "late", "missing", "torn", "reused"):
            if not 0 <= getattr(self, name) <= 1:
                raise InvalidDescriptor(what=name, value=str(getattr(self, name)), reason="a chance from 0 to 1")


class Fate(Enum):
    """What becomes of one unit."""

    FINE = "fine"
    LOST = "lost"
    LATE = "late"
    MISSING = "missing"
    TORN = "torn"
    REUSED = "reused"


@dataclass(slots=True, eq=False)
class _Lane:
    """Frames on their way in one direction, in order."""

    frames: deque[Callable[[], None]] = field(default_factory=deque)
    free_s: float = 0.0
    busy_s: float = 0.0


class MemoryNetwork:
    """Where agents with `transport="memory"` meet: hand the same one to each (`TransferAgent(..., network=...)`)."""

    def __init__(self, seed: int | str = 0, faults: MemoryFaults | None = None) -> None:
        self.faults = faults or MemoryFaults()
        """Those of every pair without faults of its own; change it whenever you like."""
        self.fates: dict[Fate, int] = dict.fromkeys(Fate, 0)
        """How many units met which fate."""
        self._seed = seed
        self._pair_faults: dict[tuple[NodeId, NodeId], MemoryFaults] = {}
        self._streams: dict[tuple[NodeId, NodeId], random.Random] = {}
        self._cuts: dict[tuple[NodeId, NodeId], None] = {}
        self._backends: dict[NodeId, MemoryBackend] = {}
        self._connections: dict[MemoryConnection, None] = {}

    # What a test or a simulator does to it.

    def set_faults(self, source: NodeId, target: NodeId, faults: MemoryFaults | None) -> None:
        """Faults of what `source` sends to `target`, units that it posts included; None for the common ones again."""
        if faults is None:
            self._pair_faults.pop((source, target), None)
        else:
            self._pair_faults[source, target] = faults

    def cut(self, source: NodeId, target: NodeId) -> None:
        """Nothing of `source` reaches `target` from now on, what is on its way included."""
        self._cuts[source, target] = None

    def heal(self, source: NodeId, target: NodeId) -> None:
        """Undo `cut`. Connections that lost a frame are reset."""
        self._cuts.pop((source, target), None)
        for connection in list(self._connections):
            connection.path_changed()

    def crash(self, node: NodeId) -> None:
        """The node's process is gone, with whatever it had in flight; its peers see the exit when they can.

        Close its agent then: nothing of it reaches anybody any more. Another life may join under the same name.
        """
        self._backends.pop(node, None)
        for connection in list(self._connections):
            connection.node_crashed(node)

    # For the backend.

    def join(self, node: NodeId, backend: "MemoryBackend") -> None:
        self._backends[node] = backend

    def leave(self, node: NodeId, backend: "MemoryBackend") -> None:
        if self._backends.get(node) is backend:
            del self._backends[node]

    def backend(self, node: NodeId) -> "MemoryBackend | None":
        return self._backends.get(node)

    def is_cut(self, source: NodeId, target: NodeId) -> bool:
        return (source, target) in self._cuts

    def delay_s(self, source: NodeId, target: NodeId) -> float:
        """The delay of the next frame or unit."""
        faults = self._faults_of(source, target)
        jitter = self._stream(source, target).expovariate(1 / faults.jitter_ns) if faults.jitter_ns else 0.0
        return (faults.delay_ns + jitter) / 1e9

    def carry_s(self, source: NodeId, target: NodeId, nbytes: int) -> float:
        """How long so many bytes occupy the way."""
        rate = self._faults_of(source, target).bytes_per_s
        return nbytes / rate if rate else 0.0

    def late_s(self, source: NodeId, target: NodeId) -> float:
        return self._faults_of(source, target).late_ns / 1e9

    def fate(self, source: NodeId, target: NodeId, *, leased_read: bool) -> Fate:
        """Draw what becomes of a unit that `source` posts."""
        faults = self._faults_of(source, target)
        chances = [
            (Fate.LOST, faults.loss),
            (Fate.LATE, faults.late),
            (Fate.MISSING, faults.missing),
            (Fate.TORN, faults.torn),
            (Fate.REUSED, faults.reused),
        ]
        stream = self._stream(source, target)
        # Each is drawn, wanted or not: turning one fault on does not move the others.
        drawn = [fate for fate, chance in chances if stream.random() < chance]
        found = next((fate for fate in drawn if fate is not Fate.REUSED or leased_read), Fate.FINE)
        self.fates[found] += 1
        return found

    def pick(self, source: NodeId, target: NodeId, count: int) -> int:
        """One of `count`, for details of a fault."""
        return self._stream(source, target).randrange(count)

    def connect(self, link: "MemoryLink", session: "MemorySession") -> "MemoryConnection":
        connection = MemoryConnection(self, link, session)
        self._connections[connection] = None
        return connection

    def forget(self, connection: "MemoryConnection") -> None:
        self._connections.pop(connection, None)

    def _faults_of(self, source: NodeId, target: NodeId) -> MemoryFaults:
        return self._pair_faults.get((source, target), self.faults)

    def _stream(self, source: NodeId, target: NodeId) -> random.Random:
        stream = self._streams.get((source, target))
        if stream is None:
            name = f"{self._seed}/{len(source)}:{source}/{target}"
            stream = self._streams[source, target] = random.Random(name)
        return stream


class MemoryConnection:
    """One link with its session, and the two lanes of frames between them."""

    def __init__(self, network: MemoryNetwork, link: "MemoryLink", session: "MemorySession") -> None:
        self._network = network
        self._link = link
        self._session = session
        self._writer = link.me.node
        self._owner = link.peer.node
        self._loop: asyncio.AbstractEventLoop = link.loop
        self._lanes = {self._writer: _Lane(), self._owner: _Lane()}
        self._broken = False
        self._crashed: dict[NodeId, None] = {}
        self._at_rest = False

    @property
    def writer_crashed(self) -> bool:
        return self._writer in self._crashed

    @property
    def owner_crashed(self) -> bool:
        return self._owner in self._crashed

    def carry_unit_s(self, nbytes: int, *, write: bool) -> float:
        """When a unit's bytes are through, from now: behind those that were posted before it."""
        source, target = (self._writer, self._owner) if write else (self._owner, self._writer)
        lane, now = self._lanes[source], self._loop.time()
        lane.busy_s = max(lane.busy_s, now) + self._network.carry_s(source, target, nbytes)
        return lane.busy_s - now

    def send_to_owner(self, data: bytes) -> None:
        self._send(self._writer, self._owner, partial(self._session.arrive, data))

    def send_to_writer(self, data: bytes) -> None:
        self._send(self._owner, self._writer, partial(self._link.arrive, data))

    def writer_at_rest(self) -> None:
        """The link touches no memory any more: the owner is told as soon as the way allows it."""
        self._at_rest = True
        if self.owner_crashed:
            self._network.forget(self)
        elif not self._broken:
            self._send(self._writer, self._owner, self._rest_known)
        else:
            self._tell_rest()

    def path_changed(self) -> None:
        """A cut was healed."""
        if self._broken:
            self._reset()
            if self._at_rest:
                self._tell_rest()
        for node in self._crashed:
            self._tell_crash(node)

    def node_crashed(self, node: NodeId) -> None:
        if node in (self._writer, self._owner) and node not in self._crashed:
            self._crashed[node] = None
            self._tell_crash(node)

    def _send(self, source: NodeId, target: NodeId, deliver: Callable[[], None]) -> None:
        if source in self._crashed:
            return
        if self._broken:
            self._reset()
            return
        lane, now = self._lanes[source], self._loop.time()
        lane.frames.append(deliver)
        # Not before the frame in front of it.
        lane.free_s = max(lane.free_s, now + self._network.delay_s(source, target))
        self._loop.call_later(lane.free_s - now, partial(self._deliver, source, target))

    def _deliver(self, source: NodeId, target: NodeId) -> None:
        lane = self._lanes[source]
        frame = lane.frames.popleft()
        if source in self._crashed or target in self._crashed or self._broken:
            return
        if self._network.is_cut(source, target):
            self._broken = True
            return
        frame()

    def _reset(self) -> None:
        """Tell whoever can be reached that frames were lost."""
        for source, target, tell in self._ways():
            if not self._network.is_cut(source, target):
                self._later(source, target, partial(tell, "frames were lost on the way"))

    def _tell_rest(self) -> None:
        if not self.writer_crashed and not self._network.is_cut(self._writer, self._owner):
            self._later(self._writer, self._owner, self._rest_known)

    def _rest_known(self) -> None:
        self._session.writer_at_rest()
        self._network.forget(self)

    def _tell_crash(self, node: NodeId) -> None:
        if node == self._writer and not self._network.is_cut(node, self._owner):
            self._later(node, self._owner, self._writer_gone)
        if node == self._owner and not self._network.is_cut(node, self._writer):
            self._later(node, self._writer, partial(self._link.lose, "the process has exited"))

    def _writer_gone(self) -> None:
        self._session.writer_exited()
        self._network.forget(self)

    def _ways(self) -> list[tuple[NodeId, NodeId, Callable[[str], None]]]:
        return [(self._writer, self._owner, self._session.lose), (self._owner, self._writer, self._link.lose)]

    def _later(self, source: NodeId, target: NodeId, call: Callable[[], None]) -> None:
        self._loop.call_later(self._network.delay_s(source, target), call)

"""The oracle of order: what each stamp must exceed, and what each read may accept, by explicit histories.

It is told of every stamp that is given out, every message that is received, every update that is published and every
read that is accepted, and says what is wrong. It knows no clock: only who did what after having heard of what.

O1: a stamp exceeds every stamp in its causal past, those of the node's former lives included.
O2: an accepted read followed everything its token names, its length was registered under the reader's own epoch by an
    update applied there, and no update applied there ended the request or gave it to a newer owner.
O3: an applied update's dependencies are applied, and a replica forgets nothing of a life that is not over.
"""

from dataclasses import dataclass, field
from typing import Protocol

from kv_bus.interface import Stamp
from kv_consistency.update import EntryWritten, OwnerEpoch, Update
from kv_consistency.version_vector import CausalToken, Dot, Origin, VersionVector
from kv_core.errors import KVError
from kv_core.ids import NodeId, RequestId

StampKey = tuple[int, int]


class Lives(Protocol):
    """Lives of nodes, such as those that a replica knows to be over."""

    def __contains__(self, origin: Origin, /) -> bool: ...


class CausalityError(KVError):
    """Something was accepted or given out that the oracle refuses."""

    code = 7091
    template = "{node} {what}"


@dataclass(slots=True)
class LifeHistory:
    """What one life of a node has in its causal past: of every node, how many of its stamps."""

    node: NodeId
    past: dict[NodeId, int]


@dataclass(slots=True)
class _Entry:
    """Every write to one request, in the order of publishing."""

    writes: list[tuple[Dot, EntryWritten]] = field(default_factory=list)


class CausalOracle:
    """See the module.

    Attributes:
        refused: what was wrong, to be looked at often: raised where it happens, it could be taken for an error of the
            code under test, and be handled.
    """

    def __init__(self) -> None:
        self.refused: list[CausalityError] = []
        self._stamps: dict[NodeId, list[StampKey]] = {}
        self._sent: dict[tuple[NodeId, StampKey], tuple[dict[NodeId, int], int]] = {}
        self._entries: dict[RequestId, _Entry] = {}
        self._deps: dict[Dot, tuple[Dot, ...]] = {}
        self._vectors: dict[Origin, VersionVector] = {}
        self.num_stamps = self.num_receives = self.num_reads = self.num_updates = 0

    def _refuse(self, node: NodeId, what: str) -> None:
        self.refused.append(CausalityError(node=node, what=what))

    # O1.

    def begin_life(self, node: NodeId, forgot: bool = False) -> LifeHistory:
        """A life begins. Its former lives are in its past, since they were before it at the same place; not so when it
        `forgot` them, its disk having been cleared: nothing on the machine knows of them any more."""
        return LifeHistory(node, {} if forgot else {node: len(self._stamps.get(node, ()))})

    def stamped(self, life: LifeHistory, wall_ns: int, logical: int) -> None:
        """That life gave out a stamp."""
        node, key = life.node, (wall_ns, logical)
        for other, count in life.past.items():
            # Of one node's stamps each exceeds those before it, by this very check: the last stands for all.
            if count and (self._stamps[other][count - 1], other) >= (key, node):
                last = self._stamps[other][count - 1]
                self._refuse(node=node, what=f"stamped {key} after it had heard of {last} from {other}")
        stamps = self._stamps.setdefault(node, [])
        stamps.append(key)
        life.past[node] = len(stamps)
        self._sent[node, key] = (dict(life.past), len(stamps))
        self.num_stamps += 1

    def received(self, life: LifeHistory, stamp: Stamp, clock: StampKey) -> None:
        """That life took a message with this stamp; `clock` is its clock after that."""
        key = (stamp.wall_ns, stamp.logical)
        if clock <= key:
            self._refuse(node=life.node, what=f"took {key} from {stamp.node_id} and stands at {clock}")
        sent = self._sent.get((stamp.node_id, key))
        if sent is None:
            self._refuse(node=life.node, what=f"took {key} from {stamp.node_id}, who never gave it out")
            return
        past = life.past
        for other, count in sent[0].items():
            if count > past.get(other, 0):
                past[other] = count
        self.num_receives += 1

    # O2, O3.

    def published(self, origin: Origin, updates: tuple[Update, ...]) -> None:
        """A replica made updates of its own."""
        for update in updates:
            dot = Dot(origin, update.n)
            self._deps[dot] = update.deps
            self.num_updates += 1
            for op in update.ops:
                if isinstance(op, EntryWritten):
                    self._entries.setdefault(RequestId(op.request_id), _Entry()).writes.append((dot, op))

    def applied(self, replica: Origin, vector: VersionVector, over: Lives) -> None:
        """What a replica has applied now; `over`: lives that it knows to be over."""
        before = self._vectors.get(replica, _NOTHING)
        if vector == before:
            return
        for origin in before:
            if vector[origin] < before[origin] and origin not in over:
                self._refuse(node=replica.node, what=f"forgot updates of {origin}: {before} became {vector}")
        for origin in vector:
            # A life that is over may have been taken over as a whole, its dependencies with it.
            for n in range(before[origin] + 1, vector[origin] + 1):
                for dep in self._deps.get(Dot(origin, n), ()):
                    if vector[dep.origin] < dep.n and dep.origin not in over:
                        self._refuse(node=replica.node, what=f"applied {origin}:{n} without {dep}")
        self._vectors[replica] = vector

    def read(
        self,
        replica: Origin,
        vector: VersionVector,
        over: Lives,
        request_id: RequestId,
        length: int,
        epoch: OwnerEpoch | None,
        after: CausalToken,
    ) -> None:
        """A replica let somebody read the first `length` tokens of a request."""
        self.num_reads += 1
        for dot in after.dots:
            if vector[dot.origin] < dot.n and dot.origin not in over:
                self._refuse(node=replica.node, what=f"let {request_id} be read without {dot}")
        entry = self._entries.get(request_id)
        seen = [] if entry is None else [op for dot, op in entry.writes if vector.covers(dot) or dot.origin in over]
        sure = [] if entry is None else [op for dot, op in entry.writes if vector.covers(dot)]
        newest = max((op.epoch for op in sure), default=None)
        if epoch is not None and newest is not None and newest > epoch:
            self._refuse(node=replica.node, what=f"let {request_id} be read for {epoch}, its owner is {newest}")
        if any(op.ended and (newest is None or op.epoch >= newest) for op in sure):
            self._refuse(node=replica.node, what=f"let {request_id} be read, which has ended")
        # What a life that is over wrote may be known although the life itself is forgotten.
        of_owner = [op.seq_len for op in seen if not op.ended and (epoch is None or op.epoch == epoch)]
        if max(of_owner, default=-1) < length:
            have = max(of_owner, default=0)
            self._refuse(node=replica.node, what=f"let {length} tokens of {request_id} be read, it knew {have}")

    def requests(self) -> list[RequestId]:
        """Every request that was ever written to, oldest first."""
        return list(self._entries)


_NOTHING = VersionVector()

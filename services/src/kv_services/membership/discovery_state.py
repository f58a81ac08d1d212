"""Decides who is a member, from what a discovery service lists and from who lives.

Knows no service, no socket and no clock. Who is alive is judged by heartbeats (`membership.state`). This machine says
whose heartbeats are listened for, and where, and whose record has gone, which counts where most are silent at once.

V1: a member of the cluster file stays one, whatever is listed.
V2: a member that is no longer listed goes only when its life is over: a service that is lost, emptied or slow takes
    nobody away who still beats.
V3: after a listing as a whole, the members are those listed, those of the file, and those that still live.
V4: a record of an older life than the one known changes nothing.
V5: a life is unlisted when its record has gone and not come again. While the directory cannot be read nobody is: what
    it said before may have changed.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field

from kv_core.ids import Incarnation, NodeId
from kv_services.membership.records import NodeRecord


@dataclass(frozen=True, slots=True)
class Listing:
    """Everything that is listed now."""

    records: tuple[NodeRecord, ...]


@dataclass(frozen=True, slots=True)
class RecordPut:
    """A process is listed, or listed anew."""

    record: NodeRecord


@dataclass(frozen=True, slots=True)
class RecordGone:
    """A process is listed no longer: it left, or its lease ended."""

    node_id: NodeId


@dataclass(frozen=True, slots=True)
class ListingLost:
    """The service cannot be read any more; a `Listing` comes first when it can."""


@dataclass(frozen=True, slots=True)
class LifeBegan:
    """Heartbeats of this member are heard."""

    node_id: NodeId


@dataclass(frozen=True, slots=True)
class LifeEnded:
    """Membership holds this member for dead."""

    node_id: NodeId


Event = Listing | RecordPut | RecordGone | ListingLost | LifeBegan | LifeEnded


@dataclass(frozen=True, slots=True)
class AddMember:
    """Listen to this process; if it was a member already, at these addresses from now on."""

    record: NodeRecord


@dataclass(frozen=True, slots=True)
class RemoveMember:
    """Forget this process."""

    node_id: NodeId


Effect = AddMember | RemoveMember


@dataclass(slots=True)
class Directory:
    """The members of one cluster as one process knows them.

    Args:
        own: this process; never a member of its own.
        in_file: the other processes of the cluster file.
    """

    own: NodeId
    in_file: frozenset[NodeId]
    listed: dict[NodeId, NodeRecord] = field(default_factory=dict)
    _members: dict[NodeId, NodeRecord] = field(default_factory=dict)
    _alive: set[NodeId] = field(default_factory=set)
    _unlisted: dict[NodeId, int] = field(default_factory=dict)

    def is_unlisted(self, node_id: NodeId, incarnation: Incarnation) -> bool:
        """Whether this life was listed and is no more (V5)."""
        return self._unlisted.get(node_id) == incarnation

    def members(self) -> list[NodeRecord]:
        """Those that a record made a member, in the order they came."""
        return list(self._members.values())

    def step(self, event: Event) -> list[Effect]:
        match event:
            case Listing(records):
                return self._listing(records)
            case RecordPut(record):
                return self._put(record)
            case RecordGone(node_id):
                self._take_off(node_id)
                return self._drop_if_over([node_id])
            case ListingLost():
                self._unlisted.clear()
                return []
            case LifeBegan(node_id):
                self._alive.add(node_id)
                return []
            case LifeEnded(node_id):
                self._alive.discard(node_id)
                return self._drop_if_over([node_id])

    def check(self) -> None:
        """Assert V1 to V3."""
        assert self.own not in self._members
        for node_id in self._members:
            assert node_id in self.listed or node_id in self._alive or node_id in self.in_file, node_id

    def _listing(self, records: Iterable[NodeRecord]) -> list[Effect]:
        effects: list[Effect] = []
        now = {record.node: record for record in records}
        for node_id in [node_id for node_id in self.listed if node_id not in now]:
            self._take_off(node_id)
        for record in now.values():
            effects += self._put(record)
        return [*effects, *self._drop_if_over(list(self._members))]

    def _put(self, record: NodeRecord) -> list[Effect]:
        node_id = record.node
        if node_id == self.own:
            return []
        self._unlisted.pop(node_id, None)
        known = self._members.get(node_id)
        if known is not None and record.incarnation < known.incarnation:
            self.listed[node_id] = known
            return []
        self.listed[node_id] = self._members[node_id] = record
        return [] if known is not None and known.same_place(record) else [AddMember(record)]

    def _take_off(self, node_id: NodeId) -> None:
        record = self.listed.pop(node_id, None)
        if record is not None:
            self._unlisted[node_id] = record.incarnation

    def _drop_if_over(self, node_ids: Iterable[NodeId]) -> list[Effect]:
        effects: list[Effect] = []
        for node_id in node_ids:
            if node_id in self.listed or node_id in self._alive or node_id in self.in_file:
                continue
            self._unlisted.pop(node_id, None)
            if self._members.pop(node_id, None) is not None:
                effects.append(RemoveMember(node_id))
        return effects

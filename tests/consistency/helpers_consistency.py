"""A cluster of replicas without a network: messages wait in a list until a test delivers, loses or repeats them."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from kv_consistency.effects import (
    BroadcastUpdates,
    ClaimsAdded,
    ClaimsChanged,
    ClaimsRemoved,
    Effect,
    HolderDropped,
    SendTo,
)
from kv_consistency.events import (
    Event,
    Instant,
    LocalRemove,
    LocalStore,
    PeerDied,
    PeerJoined,
    Received,
    Removal,
    Tick,
)
from kv_consistency.manager import KvCacheConsistencyManager
from kv_consistency.messages import ReplicaMessage
from kv_consistency.replica import ReplicaConfig
from kv_consistency.update import NamespaceRef, Run, Tier, pack_hashes, scope_id
from kv_consistency.version_vector import Origin
from kv_core.ids import Incarnation, NodeId

MS = 1_000_000
NAMESPACE = NamespaceRef(b"namespace-digest", 16, (scope_id("tenant", "t"), scope_id("weights", "m@1")))
OTHER = NamespaceRef(b"another--digest!", 16, (scope_id("tenant", "u"), scope_id("weights", "m@1")))


def node(name: str) -> NodeId:
    return NodeId(name)


def life(name: str, incarnation: int = 1) -> Origin:
    return Origin(NodeId(name), Incarnation(incarnation))


def block(i: int) -> bytes:
    """The sequence hash of test block `i`; its first byte spreads over parts."""
    return bytes([i * 37 & 255]) + i.to_bytes(15, "big")


def run_of(
    blocks: Iterable[int], *, namespace: NamespaceRef = NAMESPACE, tier: Tier = Tier.HOST, start: int = 0
) -> Run:
    blocks = list(blocks)
    checks = b"".join((i * 7 & 0xFFFFFFFF).to_bytes(4, "little") for i in blocks)
    return Run(namespace, tier, start, pack_hashes(map(block, blocks)), checks)


def removal_of(blocks: Iterable[int], *, namespace: NamespaceRef = NAMESPACE, tier: Tier = Tier.HOST) -> Removal:
    return Removal(namespace.digest, tier, pack_hashes(map(block, blocks)))


@dataclass
class Flight:
    """A message on its way."""

    sender: NodeId
    receiver: NodeId
    message: ReplicaMessage
    incarnation: Incarnation


IndexKey = tuple[Origin, bytes, Tier, bytes]


@dataclass
class Member:
    """One replica, what it gave out, and the index that it feeds."""

    manager: KvCacheConsistencyManager
    given: list[Effect] = field(default_factory=list)
    index: dict[IndexKey, set[bytes]] = field(default_factory=dict)

    def feed_index(self, changed: ClaimsChanged) -> None:
        for change in changed.changes:
            match change:
                case ClaimsAdded(holder, namespace, tier, shape, hashes):
                    self.index.setdefault((holder, namespace.digest, tier, shape), set()).update(hashes)
                case ClaimsRemoved(holder, namespace, tier, shape, hashes):
                    held = self.index[holder, namespace.digest, tier, shape]
                    assert held.issuperset(hashes), "only what was added is removed"
                    held.difference_update(hashes)
                case HolderDropped(holder):
                    for key in [key for key in self.index if key[0] == holder]:
                        del self.index[key]

    def claims(self) -> dict[IndexKey, set[bytes]]:
        """What the replica holds for readable, in the form of the index."""
        table: dict[IndexKey, set[bytes]] = {}
        for holder, key, name, _, _ in self.manager._replica.state.claims.rows():
            table.setdefault((holder, *key), set()).add(name)
        return table


class Cluster:
    """Replicas, their clocks, and the messages between them."""

    def __init__(self, *names: str, config: ReplicaConfig | None = None, join: bool = True) -> None:
        self.config = config or ReplicaConfig()
        self.now_ns = 0
        self.wall_ns = 1_000_000 * MS
        self.skew: dict[NodeId, int] = {}
        self.members: dict[NodeId, Member] = {}
        self.flights: list[Flight] = []
        self.lost = 0
        self.retired: dict[Origin, int] = {}
        """How far each retired life was when it was retired."""
        for name in names:
            self.start(name, join=False)
        if join:
            for name in self.members:
                self.introduce(name)
            self.settle()

    def at(self, name: NodeId) -> Instant:
        return Instant(self.now_ns, self.wall_ns + self.now_ns + self.skew.get(name, 0))

    def start(self, name: str, incarnation: int = 1, *, join: bool = True, config: ReplicaConfig | None = None) -> None:
        """A process starts; with `join` membership tells everybody."""
        self.members[node(name)] = Member(
            KvCacheConsistencyManager(node(name), Incarnation(incarnation), config or self.config)
        )
        if join:
            self.introduce(node(name))
            for other in self.members:
                if other != name:
                    self.step(other, PeerJoined(self.at(other), node(name), member_life(self, node(name))))

    def introduce(self, name: NodeId) -> None:
        """Tell one node of all others."""
        for other in self.members:
            if other != name:
                self.step(name, PeerJoined(self.at(name), other, member_life(self, other)))

    def kill(self, name: str, tell: bool = True) -> Member:
        """A process dies; with `tell` membership tells everybody."""
        gone = self.members.pop(node(name))
        self.flights = [flight for flight in self.flights if flight.receiver != name]
        if tell:
            for other in self.members:
                self.step(other, PeerDied(self.at(other), node(name), gone.manager.origin.incarnation))
        return gone

    def step(self, name: str, event: Event) -> list[Effect]:
        member = self.members[node(name)]
        before = member.manager.vector()
        effects = member.manager.step(event)
        for origin in before:
            if member.manager._replica.state.buffer.retired(origin):
                self.retired[origin] = max(before[origin], self.retired.get(origin, 0))
        self.perform(node(name), effects)
        return effects

    def perform(self, name: NodeId, effects: list[Effect]) -> None:
        member = self.members[name]
        origin = member.manager.origin
        member.given += effects
        for effect in effects:
            match effect:
                case BroadcastUpdates(batch):
                    self.flights += [
                        Flight(name, other, batch, origin.incarnation) for other in self.members if other != name
                    ]
                case SendTo(peer, message):
                    if peer in self.members:
                        self.flights.append(Flight(name, peer, message, origin.incarnation))
                case ClaimsChanged():
                    member.feed_index(effect)
                case _:
                    pass

    def drain(self, name: str) -> list[Effect]:
        """Perform what the facade's methods left to do."""
        effects = self.manager(name).drain()
        self.perform(node(name), effects)
        return effects

    def manager(self, name: str) -> KvCacheConsistencyManager:
        return self.members[node(name)].manager

    def store(self, name: str, blocks: Iterable[int], **kind: object) -> list[Effect]:
        run = run_of(blocks, **kind)  # type: ignore[arg-type]  # passed through to run_of
        return self.step(name, LocalStore(self.at(node(name)), (run,)))

    def remove(self, name: str, blocks: Iterable[int], **kind: object) -> list[Effect]:
        gone = removal_of(blocks, **kind)  # type: ignore[arg-type]  # passed through to removal_of
        return self.step(name, LocalRemove(self.at(node(name)), (gone,)))

    def deliver(self, index: int = 0, keep: bool = False) -> list[Effect]:
        """Deliver one message; with `keep` it stays and will come again."""
        flight = self.flights[index] if keep else self.flights.pop(index)
        if flight.receiver not in self.members:
            return []
        at = self.at(flight.receiver)
        return self.step(flight.receiver, Received(at, flight.sender, flight.message, flight.incarnation))

    def lose(self, which: Callable[[Flight], bool]) -> int:
        """Lose messages; returns how many."""
        before = len(self.flights)
        self.flights = [flight for flight in self.flights if not which(flight)]
        self.lost += before - len(self.flights)
        return before - len(self.flights)

    def advance(self, ns: int) -> None:
        """Time passes and everybody is told."""
        self.now_ns += ns
        for name in list(self.members):
            self.step(name, Tick(self.at(name)))

    def deliver_all(self) -> None:
        while self.flights:
            self.deliver()

    def settle(self, rounds: int = 60, ns: int = 50 * MS) -> None:
        """Let everything arrive and time pass until replicas had every occasion to agree."""
        for _ in range(rounds):
            self.deliver_all()
            self.advance(ns)
        self.deliver_all()

    def check(self) -> None:
        for member in self.members.values():
            member.manager.check()
            held = {key: names for key, names in member.index.items() if names}
            assert held == member.claims(), "the index was fed what the replica holds"


def member_life(cluster: Cluster, name: NodeId) -> Incarnation:
    return cluster.members[name].manager.origin.incarnation


def readable_state(member: Member) -> object:
    """Everything that two replicas must agree on."""
    replica = member.manager._replica
    entries = {}
    for request_id, row in replica.state.entries:
        try:
            version = replica.readable(request_id, 0)
        except Exception as error:
            version = type(error)  # type: ignore[assignment]  # only compared
        if not row.ended:
            entries[request_id] = (version, row.seq_len, row.checksum, row.home)
    claims = {
        (holder, key, name, position, check) for holder, key, name, position, check in replica.state.claims.rows()
    }
    return replica.state.buffer.vector(), entries, claims, replica.state.scopes.rows()

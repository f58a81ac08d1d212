"""Replicas against a naive twin, under any order, loss, duplication, death and rebirth.

After every step each replica's state equals the twin's fold of exactly the updates that the replica says it applied,
and what it applied is closed under dependencies. When faults stop, all replicas are equal.
"""

from dataclasses import replace

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kv_consistency.effects import BroadcastUpdates, Effect
from kv_consistency.errors import ConsistencyError
from kv_consistency.events import (
    Event,
    LocalClear,
    LocalEnd,
    LocalOwn,
    LocalRaise,
    LocalRegister,
    LocalRemove,
    LocalStore,
)
from kv_consistency.replica import ReplicaConfig
from kv_consistency.update import RaiseCount, ScopesRestored, Tier
from kv_consistency.version_vector import Dot, Origin
from kv_core.ids import NodeId, RequestId
from tests.consistency.helpers_consistency import (
    MS,
    NAMESPACE,
    OTHER,
    Cluster,
    Member,
    readable_state,
    removal_of,
    run_of,
)
from tests.consistency.oracle_consistency import Truth

NAMES = ("a", "b", "c", "d")
NUM_BLOCKS = 12
REQUESTS = ("r0", "r1", "r2")
SCOPES = (NAMESPACE.digest, NAMESPACE.scopes[0], NAMESPACE.scopes[1], OTHER.digest)

KINDS = (
    *("store",) * 4,
    *("remove",) * 2,
    "clear",
    *("register",) * 3,
    *("own",) * 2,
    "end",
    *("raise",) * 2,
    *("deliver",) * 6,
    *("burst",) * 3,
    *("repeat",) * 2,
    *("lose",) * 2,
    "lose_link",
    "tick",
    "kill",
    "start",
    "step_wall",
)
steps = st.tuples(st.sampled_from(KINDS), st.integers(0, 3), st.integers(0, 1 << 16), st.integers(0, 1 << 16))


class Run:
    """One run: a cluster, the truth beside it, and the steps."""

    def __init__(self, config: ReplicaConfig) -> None:
        self.truth = Truth()
        self.lives: set[Origin] = set()
        self.over: set[Origin] = set()
        self.ended_by: dict[str, set[Origin]] = {}
        self.kept: dict[NodeId, tuple[RaiseCount, ...]] = {}
        """The purges on the disk of each node that died."""
        self.cluster = Cluster(*NAMES[:3], config=config)
        self.births = {name: 2 if name in NAMES[:3] else 1 for name in NAMES}
        self.lives |= {member.manager.origin for member in self.cluster.members.values()}

    def applied(self, member: Member) -> frozenset[Dot]:
        """The dots a replica has applied: those of its vector, and of retired lives all that everybody had."""
        state = member.manager._replica.state
        reach = {origin: state.buffer.applied(origin) for origin in state.buffer.vector()}
        reach |= {origin: n for origin, n in self.cluster.retired.items() if state.buffer.retired(origin)}
        return frozenset(Dot(origin, n) for origin, upto in reach.items() for n in range(1, upto + 1))

    def step(self, kind: str, who: int, x: int, y: int) -> None:
        cluster = self.cluster
        names = sorted(cluster.members)
        name = names[who % len(names)]
        match kind:
            case "deliver" | "repeat" if cluster.flights:
                cluster.deliver(x % len(cluster.flights), keep=kind == "repeat")
            case "burst":
                for _ in range(min(len(cluster.flights), 1 + x % 12)):
                    cluster.deliver(y % len(cluster.flights))
            case "lose" if cluster.flights:
                cluster.flights.pop(x % len(cluster.flights))
            case "lose_link":
                other = names[x % len(names)]
                cluster.lose(lambda flight: (flight.sender, flight.receiver) == (name, other))
            case "tick":
                cluster.advance((1 + x % 400) * MS)
            case "step_wall":
                cluster.skew[name] = (x % 400 - 200) * MS
            case "kill" if len(names) > 2:
                self.over.add(cluster.members[name].manager.origin)
                self.kept[name] = cluster.kill(name).manager.raises()
            case "start" if len(names) < len(NAMES):
                absent = [absent for absent in NAMES if absent not in names]
                newcomer = absent[x % len(absent)]
                kept = self.kept.get(NodeId(newcomer), ()) if y % 2 else ()
                config = replace(cluster.config, raises=kept)
                cluster.start(newcomer, self.births[newcomer], config=config)
                self.births[newcomer] += 1
                self.lives.add(cluster.members[NodeId(newcomer)].manager.origin)
            case _:
                self.say(name, kind, x, y)
        self.check()

    def say(self, name: NodeId, kind: str, x: int, y: int) -> None:
        """A local event; what is refused changes nothing."""
        event = self.event(name, kind, x, y)
        if event is None:
            return
        member = self.cluster.members[name]
        past = self.applied(member)
        self.record_restored()
        was = readable_state(member)
        try:
            effects = self.cluster.step(name, event)
        except ConsistencyError:
            assert readable_state(member) == was, "a refused event changes nothing"
            return
        self.record(effects, past)

    def event(self, name: NodeId, kind: str, x: int, y: int) -> Event | None:
        at = self.cluster.at(name)
        member = self.cluster.members[name]
        request = RequestId(REQUESTS[x % len(REQUESTS)])
        namespace = (NAMESPACE, OTHER)[y % 2]
        tier = (Tier.HOST, Tier.DISK)[x % 2]
        first = y % NUM_BLOCKS
        some = range(first, min(NUM_BLOCKS, first + 1 + x % 5))
        used_up = member.manager.origin not in self.ended_by.get(request, {member.manager.origin})
        row = member.manager._replica.state.entries.get(request)
        match kind:
            case "store":
                return LocalStore(at, (run_of(some, namespace=namespace, tier=tier, start=first),))
            case "remove":
                return LocalRemove(at, (removal_of(some, namespace=namespace, tier=tier),))
            case "clear":
                return LocalClear(at, (None, Tier.HOST, Tier.DISK)[x % 3])
            case "raise":
                return LocalRaise(at, (SCOPES[x % len(SCOPES)],))
            case "register" if not used_up:
                have = 0 if row is None else row.seq_len
                holders = (name, sorted(self.cluster.members)[y % len(self.cluster.members)])
                grown = have + y % 50
                return LocalRegister(at, request, grown, holders, checksum=x, namespace=(None, namespace)[x % 2])
            case "own" if not used_up:
                return LocalOwn(at, request, keep=bool(y % 2))
            case "end" if not used_up:
                return LocalEnd(at, request)
        return None

    def record(self, effects: list[Effect], past: frozenset[Dot]) -> None:
        for effect in effects:
            if isinstance(effect, BroadcastUpdates):
                for update in effect.batch.updates:
                    dot = Dot(effect.batch.origin, update.n)
                    self.truth.issued(dot, update, past)
                    past |= {dot}
                    for op in update.ops:
                        if getattr(op, "ended", False):
                            # A request id is not used again; lives that begin later do not know that it was.
                            self.ended_by.setdefault(op.request_id, set(self.lives))  # type: ignore[union-attr]

    def record_restored(self) -> None:
        """What replicas publish by themselves, which is purges from a disk."""
        for member in self.cluster.members.values():
            for effect in member.given:
                if isinstance(effect, BroadcastUpdates):
                    for update in effect.batch.updates:
                        dot = Dot(effect.batch.origin, update.n)
                        if dot not in self.truth.updates:
                            assert all(isinstance(op, ScopesRestored) for op in update.ops)
                            self.truth.issued(dot, update, frozenset())
            member.given.clear()

    def check(self) -> None:
        self.record_restored()
        self.cluster.check()
        for member in self.cluster.members.values():
            self.check_member(member)

    def check_member(self, member: Member) -> None:
        applied = self.applied(member)
        assert self.truth.closed(applied), "what is applied is closed under dependencies"
        over = frozenset(self.over)
        replica = member.manager._replica
        entries = {
            request_id: (row.seq_len, row.checksum, row.dot, row.home.epoch)
            for request_id, row in replica.state.entries
            if not row.ended
            and (row.home.epoch.owner is None or not replica.state.lives.is_over(row.home.epoch.owner))
            and not replica.state.purged(row.home.namespace, row.purges)
        }
        kept = replica.state.scopes.unpublished()
        assert entries == self.truth.entries(applied, over, kept)
        replaying = {
            origin for origin, upto in replica.state.replayed.items() if upto > replica.state.buffer.applied(origin)
        }
        if replica.session is None and not replaying:
            claims = {(holder, *key, name, position) for holder, key, name, position, _ in replica.state.claims.rows()}
            assert claims == self.truth.claims(applied, over, kept)

    def settle(self) -> None:
        for _ in range(40):
            self.cluster.deliver_all()
            self.cluster.advance(100 * MS)
        self.cluster.deliver_all()
        self.check()
        members = list(self.cluster.members.values())
        assert all(member.manager.ready for member in members)
        first = readable_state(members[0])
        for member in members[1:]:
            assert readable_state(member) == first, "replicas converge"
        for member in members:
            assert member.manager._replica.session is None
            assert member.manager._replica.state.buffer.parked == 0
            assert not any(member.manager.lag().values())
            assert not member.manager._replica.state.scopes.unpublished()


SMALL_LOGS = ReplicaConfig(
    log_bytes_max=1500, digest_interval_ns=50 * MS, retire_after_ns=300 * MS, reply_bytes_max=600
)
USUAL = ReplicaConfig(digest_interval_ns=50 * MS, retire_after_ns=300 * MS)


def follow(config: ReplicaConfig, taken: list[tuple[str, int, int, int]]) -> None:
    run = Run(config)
    for step in taken:
        run.step(*step)
    run.settle()


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
@given(st.lists(steps, max_size=60))
def test_replicas_equal_a_naive_twin_at_every_step_and_each_other_at_the_end(
    taken: list[tuple[str, int, int, int]],
) -> None:
    follow(USUAL, taken)


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
@given(st.lists(steps, max_size=60))
def test_they_do_so_when_logs_are_too_short_and_state_is_synchronised(
    taken: list[tuple[str, int, int, int]],
) -> None:
    follow(SMALL_LOGS, taken)

"""Waiting for what another node computes: several prefill machines that hear each other's announcements, some lost.

The oracle is the world itself: who computes what, who lives. A wait may not outlive the computation it is for, unless
the word of its end was lost, and then not its announced time.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from hypothesis import given, settings
from hypothesis import strategies as st

from kv_core.hashing import BlockHash
from kv_core.ids import NodeId, RegionId, RequestId
from kv_prefix.block_pool import BlockPool
from kv_prefix.in_flight import InFlight, Wait
from kv_services.node.announcements import AnnounceBlocks, WithdrawBlocks
from kv_services.node.prefill_events import (
    AwaitedEnded,
    HandoverEnded,
    NoteWaited,
    NoteWaiting,
    PrefillComputed,
    PrefillDrainBegan,
    PrefillEndAsked,
    PrefillEvent,
    PrefillTimePassed,
    Pulled,
    PullPlan,
    ReplyDone,
    ReplyFailed,
    StartPrefill,
    StartPull,
    WaitOutcome,
)
from kv_services.node.prefill_job import JobState
from kv_services.node.prefill_state import PrefillMachine
from tests.services.helpers_prefill import BLOCK, OOPS, STATS, Tokens, ask

BLOCK_NS = 10
SLACK_NS = 30
PROMPT = tuple(range(40))


class One:
    """One node: its machine, what it heard of the others, and whether it lives."""

    def __init__(self, name: str, world: "World") -> None:
        self.name, self.world = name, world
        self.heard = InFlight()
        self.lives = True
        self.compute: StartPrefill | None = None
        self.pull: StartPull | None = None
        self.open: set[RequestId] = set()
        self.asked: set[RequestId] = set()
        self.waits: dict[RequestId, Wait] = {}
        self.outcomes: list[WaitOutcome] = []
        self.computed = 0
        self.m = PrefillMachine(
            NodeId(name),
            BlockPool(64, BLOCK, region=RegionId(1)),
            block_size=BLOCK,
            num_slots=64,
            max_waiting=99,
            plan_pull=self.plan_pull,
            plan_wait=self.plan_wait,
        )

    def plan_pull(self, hashes: Sequence[BlockHash], have: int) -> PullPlan | None:
        """Fetch what any living node has finished."""
        best = max(
            (next((i for i, name in enumerate(hashes) if name not in one.has), len(hashes)), one.name)
            for one in self.world.nodes
        )
        return PullPlan(NodeId(best[1]), have, best[0] - have) if best[0] > have else None

    def plan_wait(self, hashes: Sequence[BlockHash], found: int, now_ns: int) -> Wait | None:
        return self.heard.ask(hashes, found, now_ns=now_ns, ns_per_block=BLOCK_NS, fetch_ns=1)

    @property
    def has(self) -> set[BlockHash]:
        return self.world.finished[self.name] if self.lives else set()

    def step(self, event: PrefillEvent) -> None:
        if not self.lives:
            return
        for effect in self.m.step(event):
            match effect:
                case StartPrefill():
                    self.compute = effect
                case StartPull():
                    self.pull = effect
                case AnnounceBlocks():
                    self.world.announce(self, effect)
                case WithdrawBlocks(request_id, epoch):
                    self.world.withdraw(self, f"{self.name}/{request_id}/{epoch}")
                case NoteWaiting(request_id, _, wait):
                    self.waits[request_id] = wait
                case NoteWaited(request_id, _, outcome):
                    del self.waits[request_id]
                    self.outcomes.append(outcome)
                case ReplyDone() | ReplyFailed():
                    self.asked.discard(effect.request_id)
                    self.waits.pop(effect.request_id, None)
                case _:
                    pass  # memory and hand-overs: `test_prefill_model`
        self.m.check()


@dataclass
class World:
    """Everything. `lose` loses the word that a computation ended."""

    names: str = "ab"
    now: int = 1
    lose: bool = False
    nodes: list[One] = field(default_factory=list)
    running: dict[str, tuple[BlockHash, ...]] = field(default_factory=dict)
    finished: dict[str, set[BlockHash]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.finished = {name: set() for name in self.names}
        self.nodes = [One(name, self) for name in self.names]

    def announce(self, source: One, effect: AnnounceBlocks) -> None:
        owner = f"{source.name}/{effect.request_id}/{effect.epoch}"
        self.running[owner] = effect.block_hashes
        ready = self.now + len(effect.block_hashes) * BLOCK_NS
        for one in self.others(source):
            one.heard.announce(
                owner, effect.block_hashes, start_ns=ready, ns_per_block=0, until_ns=2 * ready - self.now + SLACK_NS
            )

    def withdraw(self, source: One, owner: str) -> None:
        del self.running[owner]
        if not self.lose:
            for one in self.others(source):
                one.heard.withdraw(owner)
                one.step(AwaitedEnded(owner))

    def others(self, source: One) -> list[One]:
        return [one for one in self.nodes if one is not source and one.lives]

    def ask(self, node: int, name: str, tokens: Tokens) -> None:
        one = self.nodes[node]
        if one.lives:
            one.asked.add(RequestId(name))
            one.step(ask(name, tokens=tokens, now_ns=self.now, deadline_ns=10_000))

    def end_compute(self, one: One, *, ok: bool = True) -> None:
        job, one.compute = one.compute, None
        assert job is not None
        if ok:
            owner = f"{one.name}/{job.request_id}/{job.epoch}"
            self.finished[one.name] |= set(self.running.get(owner, ()))
            one.computed += job.stop - job.start
            one.open.add(job.request_id)
        one.step(PrefillComputed(self.now, job.request_id, job.epoch, None if ok else OOPS))
        one.step(HandoverEnded(job.request_id, job.epoch, STATS if ok else OOPS))

    def end_pull(self, one: One) -> None:
        pull, one.pull = one.pull, None
        assert pull is not None
        one.step(Pulled(pull.request_id, pull.epoch, nbytes=1))
        job = one.m.job(pull.request_id, pull.epoch)
        if job is not None and not job.computing and job.handover_open:
            one.step(HandoverEnded(pull.request_id, pull.epoch, STATS))

    def die(self, one: One) -> None:
        one.lives, one.compute, one.pull = False, None, None
        one.asked.clear()
        one.waits.clear()
        for owner in [owner for owner in self.running if owner.startswith(one.name)]:
            del self.running[owner]
            for other in self.others(one):
                other.heard.withdraw(owner)
                other.step(AwaitedEnded(owner))

    def pass_time(self, by: int) -> None:
        self.now += by
        for one in self.nodes:
            one.heard.expire(self.now)
            one.step(PrefillTimePassed(self.now))

    def check(self) -> None:
        """R6: whoever waits, waits for something that runs, or whose end it was not told of and whose time is not over;
        and holds nothing."""
        for one in self.nodes:
            for request_id, wait in one.waits.items():
                job = one.m.job(request_id, 1)
                if job is None or job.state is not JobState.AWAITING:
                    continue  # over; what it found is said at its turn
                assert self.now < wait.until_ns
                assert wait.owner in self.running or self.lose, (one.name, wait)


def begun(names: str = "ab") -> World:
    """The first node has computed for a while, so that waiting for it is quicker than beginning anew."""
    w = World(names)
    w.ask(0, "first", PROMPT)
    w.pass_time(40)
    return w


def test_a_second_request_elsewhere_waits_and_computes_only_its_own_rest() -> None:
    w = begun()
    a, b = w.nodes
    w.ask(1, "second", (*PROMPT[:36], *range(100, 109)))
    assert a.compute is not None and b.compute is None and set(b.waits) == {"second"}
    assert b.m.num_waiting == 1
    w.end_compute(a)
    w.check()
    assert b.pull is not None and b.pull.plan == PullPlan(NodeId("a"), 0, 9)
    assert b.outcomes == [WaitOutcome.FOUND]
    w.end_pull(b)
    assert b.compute is not None and b.compute.start == 36


def test_others_are_served_while_one_waits() -> None:
    w = begun()
    w.ask(1, "second", PROMPT)
    w.ask(1, "third", tuple(range(200, 220)))
    b = w.nodes[1]
    assert set(b.waits) == {"second"} and b.compute is not None and b.compute.request_id == "third"


def test_what_fails_or_dies_is_waited_for_no_longer() -> None:
    for end in ("fail", "die"):
        w = begun()
        a, b = w.nodes
        w.ask(1, "second", PROMPT)
        if end == "fail":
            w.end_compute(a, ok=False)
        else:
            w.die(a)
        assert b.waits == {} and b.outcomes == [WaitOutcome.MISSING]
        assert b.compute is not None and b.compute.start == 0


def test_a_silent_owner_costs_the_announced_time_and_a_request_waits_once() -> None:
    w = begun("abc")
    b = w.nodes[1]
    w.ask(1, "second", PROMPT)
    until = b.waits[RequestId("second")].until_ns
    # Somebody else announces the same in time: this request has waited.
    w.pass_time(until - w.now - 1)
    assert set(b.waits) == {"second"}
    w.ask(2, "third", PROMPT)
    w.pass_time(1)
    assert b.waits == {} and b.outcomes == [WaitOutcome.TIMED_OUT] and b.compute is not None


def test_whoever_waited_does_not_wait_again_whatever_is_proposed() -> None:
    def always(hashes: Sequence[BlockHash], found: int, now_ns: int) -> Wait:
        return Wait("x", len(hashes), now_ns + 10, now_ns + 100, 5)

    for end in (AwaitedEnded("x"), PrefillTimePassed(100)):
        m = PrefillMachine(
            NodeId("p"),
            BlockPool(16, BLOCK, region=RegionId(1)),
            block_size=BLOCK,
            num_slots=16,
            max_waiting=9,
            plan_pull=lambda hashes, have: None,
            plan_wait=always,
        )
        m.step(ask("r"))
        assert m.num_waiting == 1 and m.awaits("x")
        started = [effect for effect in m.step(end) if isinstance(effect, StartPrefill)]
        assert len(started) == 1 and not m.awaits("x")
        m.check()


def test_who_waits_can_be_ended_and_is_refused_by_a_draining_node() -> None:
    for event in (PrefillEndAsked(RequestId("second"), 1, "gone"), PrefillDrainBegan()):
        w = begun()
        w.ask(1, "second", PROMPT)
        b = w.nodes[1]
        b.step(event)
        assert b.asked == set() and b.m.num_waiting == 0
        b.step(AwaitedEnded("a/first/1"))
        assert b.compute is None


STEPS = st.lists(
    st.tuples(
        st.sampled_from(
            ["ask", "ask", "ask", "computed", "computed", "failed", "pulled", "pulled", "time", "die", "end"]
        ),
        st.integers(0, 2),
        st.integers(0, 60),
    ),
    max_size=60,
)


@settings(max_examples=80, deadline=None)
@given(STEPS, st.booleans())
def test_no_wait_outlives_what_it_is_for_and_every_request_ends(steps: list[tuple[str, int, int]], lose: bool) -> None:
    w = World("abc", lose=lose)
    for number, (step, node, pick) in enumerate(steps):
        one = w.nodes[node]
        match step:
            case "ask":
                w.ask(
                    node,
                    f"r{number}",
                    (*PROMPT[: pick % 30], *range(100 * (pick % 3), 100 * (pick % 3) + pick % 9 + 2)),
                )
            case "computed" | "failed" if one.compute is not None:
                w.end_compute(one, ok=step == "computed")
            case "pulled" if one.pull is not None:
                w.end_pull(one)
            case "time":
                w.pass_time(pick)
            case "die" if pick < 10:
                w.die(one)
            case "end" if one.asked:
                one.step(PrefillEndAsked(sorted(one.asked)[pick % len(one.asked)], 1, "gone"))
        w.check()
    for _ in range(200):
        for one in w.nodes:
            if one.compute is not None:
                w.end_compute(one)
            elif one.pull is not None:
                w.end_pull(one)
        w.pass_time(7)
        w.check()
    # What only has to be handed over was ended as soon as it was opened, but for what was held already.
    for one in w.nodes:
        if not one.lives:
            continue
        for request_id in sorted(one.asked):
            job = one.m.job(request_id, 1)
            assert job is None or job.handover_open, job
        assert one.m.num_waiting == 0

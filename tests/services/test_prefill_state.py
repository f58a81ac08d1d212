"""The prefill machine over a real pool: turns, fetching, hand-overs, fencing, and which bytes lie where when sent."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kv_core.block import BlockRef
from kv_core.errors import KVError, LocalProtocolError, RetryableError
from kv_core.hashing import BlockHash, hash_tokens
from kv_core.ids import NodeId, RegionId, RequestId
from kv_core.namespace import Namespace
from kv_prefix.block_pool import BlockPool
from kv_services.errors import (
    EpochFencedError,
    NodeDrainingError,
    NodeOverloadedError,
    PeerDiedError,
    RequestEndedError,
    RequestExpiredError,
    RequestTooLargeError,
)
from kv_services.node.prefill_events import (
    AbortHandover,
    AnnounceBlocks,
    CancelCompute,
    FinishHandover,
    HandoverEnded,
    HandoverStats,
    NoteWaited,
    NoteWaiting,
    OpenHandover,
    PrefillAsked,
    PrefillComputed,
    PrefillEffect,
    PrefillEndAsked,
    PrefillEvent,
    PrefillPeerDied,
    PrefillTimePassed,
    PrepareBlocks,
    Pulled,
    PullPlan,
    ReplyDone,
    ReplyFailed,
    StartPrefill,
    StartPull,
    WithdrawBlocks,
)
from kv_services.node.prefill_state import PrefillMachine

BLOCK = 4
NS = Namespace("m", "w", block_size=BLOCK)
G, D, H = NodeId("g"), NodeId("d"), NodeId("h")
R = RequestId("r")
T = TypeVar("T")
OOPS = RetryableError(detail="oops")
STATS = HandoverStats(nbytes=640, units=5, retries=0, transport="shm", duration_ns=7)
Tokens = tuple[int, ...]


def never(hashes: Sequence[BlockHash], have: int) -> PullPlan | None:
    return None


def all_missing(hashes: Sequence[BlockHash], have: int) -> PullPlan | None:
    return PullPlan(H, have, len(hashes) - have) if have < len(hashes) else None


class Planner:
    """Fetches as many blocks as it is told to."""

    def __init__(self) -> None:
        self.num_blocks = 0

    def __call__(self, hashes: Sequence[BlockHash], have: int) -> PullPlan | None:
        num_blocks = min(self.num_blocks, len(hashes) - have)
        return PullPlan(H, have, num_blocks) if num_blocks > 0 else None


def machine(
    num_slots: int = 16, max_waiting: int = 3, plan_pull: Planner | None = None, *, pull_all: bool = False
) -> tuple[PrefillMachine, BlockPool]:
    pool = BlockPool(num_slots, BLOCK, region=RegionId(1))
    planner = plan_pull or (all_missing if pull_all else never)
    made = PrefillMachine(
        NodeId("p"), pool, block_size=BLOCK, num_slots=num_slots, max_waiting=max_waiting, plan_pull=planner
    )
    return made, pool


def ask(
    name: str = "r",
    epoch: int = 1,
    tokens: Tokens = tuple(range(9)),
    *,
    first_block: int = 0,
    deadline_ns: int = 1_000,
    now_ns: int = 0,
) -> PrefillAsked:
    return PrefillAsked(now_ns, RequestId(name), epoch, G, NS, tokens, D, first_block, deadline_ns)


def of(effects: list[PrefillEffect], kind: type[T]) -> list[T]:
    return [effect for effect in effects if isinstance(effect, kind)]


def computed(name: str = "r", epoch: int = 1, error: KVError | None = None, now_ns: int = 0) -> PrefillComputed:
    return PrefillComputed(now_ns, RequestId(name), epoch, error)


def sent(name: str = "r", epoch: int = 1) -> HandoverEnded:
    return HandoverEnded(RequestId(name), epoch, STATS)


def serve(m: PrefillMachine, name: str = "r", tokens: Tokens = tuple(range(9))) -> list[PrefillEffect]:
    """One request from its asking to its answer."""
    effects = m.step(ask(name, tokens=tokens))
    if of(effects, StartPrefill):
        m.step(computed(name))
    return [*effects, *m.step(sent(name))]


def test_a_prompt_is_computed_and_handed_over_without_its_last_token() -> None:
    m, pool = machine()
    effects = m.step(ask(first_block=1))
    (opened,), (compute,) = of(effects, OpenHandover), of(effects, StartPrefill)
    assert (opened.first_block, opened.ready_blocks, len(opened.refs)) == (1, 0, 2)
    assert (compute.start, compute.stop, compute.refs) == (0, 8, opened.refs)
    assert m.step(computed()) == [FinishHandover(R, 1, 8), WithdrawBlocks(R, 1)]
    (done,) = of(m.step(sent()), ReplyDone)
    assert (done.local_tokens, done.pulled_tokens, done.computed_tokens, done.stats) == (0, 0, 8, STATS)
    assert pool.stats().pinned == 0 and pool.stats().cached == 2


def test_the_next_prompt_finds_what_was_computed_while_its_hand_over_still_runs() -> None:
    m, _ = machine()
    m.step(ask("a", tokens=tuple(range(13))))
    assert of(m.step(ask("b", tokens=tuple(range(14)))), StartPrefill) == []
    (compute,) = of(m.step(computed("a")), StartPrefill)
    assert (compute.request_id, compute.start, compute.stop) == ("b", 12, 13)


def test_a_prompt_that_is_held_is_sent_without_computing() -> None:
    m, _ = machine()
    serve(m, "a")
    effects = m.step(ask("b"))
    assert of(effects, StartPrefill) == []
    (opened,) = of(effects, OpenHandover)
    assert opened.ready_blocks == 2
    assert of(effects, FinishHandover) == [FinishHandover(RequestId("b"), 1, 8)]
    (done,) = of(m.step(sent("b")), ReplyDone)
    assert (done.local_tokens, done.computed_tokens) == (8, 0)


def test_a_tail_that_is_held_alone_is_continued_in_place_but_sealed_again() -> None:
    m, _ = machine()
    first = of(serve(m, "a", tuple(range(7))), OpenHandover)[0]
    effects = m.step(ask("b", tokens=tuple(range(7))))
    # Six tokens are here, but the second block's checksums went with its generation: computing a token seals it.
    (compute,), (opened,) = of(effects, StartPrefill), of(effects, OpenHandover)
    assert (compute.start, compute.stop, compute.copy) == (5, 6, None)
    assert opened.ready_blocks == 1
    assert opened.refs[1].slot == first.refs[1].slot
    assert opened.refs[1].generation > first.refs[1].generation


def test_the_beginning_of_a_held_block_is_copied_before_it_is_sent() -> None:
    m, pool = machine()
    serve(m, "a")
    effects = m.step(ask("b", tokens=tuple(range(7))))
    (compute,) = of(effects, StartPrefill)
    assert compute.copy is not None and compute.copy.num_tokens == 2
    assert (compute.start, compute.stop) == (5, 6)
    assert pool.stats().pinned == 3
    m.step(computed("b"))
    # The source is wanted until the copy was made, and no longer.
    assert pool.stats().pinned == 2
    (done,) = of(m.step(sent("b")), ReplyDone)
    assert (done.local_tokens, done.computed_tokens) == (5, 1)
    assert pool.stats().pinned == 0


def test_what_another_node_holds_is_fetched_and_only_the_rest_computed() -> None:
    m, _ = machine(pull_all=True)
    effects = m.step(ask(tokens=tuple(range(11))))
    (pull,) = of(effects, StartPull)
    assert (pull.plan, len(pull.refs)) == (PullPlan(H, 0, 2), 2)
    assert of(effects, OpenHandover) == []
    effects = m.step(Pulled(R, 1, nbytes=99))
    (opened,), (compute,) = of(effects, OpenHandover), of(effects, StartPrefill)
    assert opened.ready_blocks == 2
    assert (compute.start, compute.stop) == (8, 10)
    m.step(computed())
    (done,) = of(m.step(sent()), ReplyDone)
    assert (done.local_tokens, done.pulled_tokens, done.computed_tokens, done.bytes_pulled) == (0, 8, 2, 99)


def test_a_fetch_that_failed_costs_time_and_not_the_request() -> None:
    m, _ = machine(pull_all=True)
    m.step(ask())
    effects = m.step(Pulled(R, 1, error=OOPS))
    assert of(effects, ReplyFailed) == []
    assert [(e.start, e.stop) for e in of(effects, StartPrefill)] == [(0, 8)]
    assert of(effects, OpenHandover)[0].ready_blocks == 0


def test_one_prompt_at_a_time_in_order_of_arrival() -> None:
    m, _ = machine()
    for name, base in (("a", 0), ("b", 100), ("c", 200)):
        m.step(ask(name, tokens=tuple(range(base, base + 9))))
    assert (m.num_waiting, m.num_running, m.waiting_tokens) == (2, 1, 16)
    order = [of(m.step(computed(name)), StartPrefill) for name in ("a", "b", "c")]
    assert [[e.request_id for e in effects] for effects in order] == [["b"], ["c"], []]


def test_a_prompt_waits_until_there_is_room_and_holds_nothing_meanwhile() -> None:
    m, pool = machine(num_slots=4)
    m.step(ask("a", tokens=tuple(range(13))))
    m.step(ask("b", tokens=tuple(range(100, 113))))
    # Computed, but the hand-over still reads the blocks.
    assert of(m.step(computed("a")), StartPrefill) == []
    assert pool.stats().pinned == 3
    assert of(m.step(sent("a")), StartPrefill)[0].request_id == "b"


def test_refusals_say_why() -> None:
    m, _ = machine(num_slots=4, max_waiting=1)
    (big,) = of(m.step(ask("big", tokens=tuple(range(18)))), ReplyFailed)
    assert isinstance(big.error, RequestTooLargeError)
    (beyond,) = of(m.step(ask("beyond", first_block=2)), ReplyFailed)
    assert isinstance(beyond.error, LocalProtocolError)
    m.step(ask("a"))
    m.step(ask("b"))
    (full,) = of(m.step(ask("c")), ReplyFailed)
    assert isinstance(full.error, NodeOverloadedError)
    m.step(PrefillEndAsked(RequestId("late"), 3, "gone"))
    (late,) = of(m.step(ask("late", 3)), ReplyFailed)
    assert isinstance(late.error, EpochFencedError)
    m, _ = machine()
    m.draining = True
    (drained,) = of(m.step(ask()), ReplyFailed)
    assert isinstance(drained.error, NodeDrainingError)


def test_a_higher_epoch_replaces_the_lower_one() -> None:
    m, _ = machine()
    m.step(ask(epoch=1))
    effects = m.step(ask(epoch=2))
    (failed,) = of(effects, ReplyFailed)
    assert (failed.epoch, type(failed.error)) == (1, RequestEndedError)
    assert CancelCompute(R, 1) in effects
    assert [e.epoch for e in of(effects, AbortHandover)] == [1]
    # Its turn comes when the other's thread is out of the way.
    assert of(effects, StartPrefill) == []
    assert [e.epoch for e in of(m.step(computed(epoch=1, error=OOPS)), StartPrefill)] == [2]
    (again,) = of(m.step(ask(epoch=1)), ReplyFailed)
    assert isinstance(again.error, EpochFencedError)


def test_an_epoch_that_ended_by_itself_is_not_begun_again() -> None:
    for end in (HandoverEnded(R, 1, OOPS), PrefillTimePassed(1_000), sent()):
        m, _ = machine()
        m.step(ask())
        m.step(computed())
        m.step(end)
        (again,) = of(m.step(ask()), ReplyFailed)
        assert isinstance(again.error, EpochFencedError)


def test_a_hand_over_keeps_the_blocks_it_reads_though_equal_ones_took_their_place() -> None:
    m, pool = machine()
    (opened,) = of(m.step(ask()), OpenHandover)
    # Another role of the node commits the same blocks before this prompt's are complete.
    tokens = tuple(range(8))
    other = pool.open("other", num_new=2)
    pool.commit(other.table, NS.digest, 0, hash_tokens(NS, tokens), tokens)
    m.step(computed())
    assert pool.stats().pinned == 4
    assert pool.hold("reader", opened.refs)


def test_blocks_stay_until_neither_thread_nor_hand_over_can_touch_them() -> None:
    for first, second in ((computed(error=OOPS), sent()), (sent(), computed(error=OOPS))):
        m, pool = machine()
        m.step(ask())
        (failed,) = of(m.step(PrefillEndAsked(R, 1, "gone")), ReplyFailed)
        assert isinstance(failed.error, RequestEndedError)
        assert pool.stats().pinned == 2
        m.step(first)
        assert pool.stats().pinned == 2
        assert of(m.step(second), ReplyFailed) == []
        assert pool.stats().pinned == 0


def test_blocks_of_an_ended_fetch_stay_until_it_is_over() -> None:
    m, pool = machine(pull_all=True)
    m.step(ask())
    m.step(PrefillEndAsked(R, 1, "gone"))
    assert pool.stats().pinned == 2
    assert m.step(Pulled(R, 1)) == []
    assert pool.stats().pinned == 0


def test_failures_are_told_with_their_cause() -> None:
    m, _ = machine()
    m.step(ask())
    effects = m.step(computed(error=OOPS))
    assert ReplyFailed(R, 1, OOPS) in effects and AbortHandover(R, 1, OOPS) in effects
    m, _ = machine()
    m.step(ask())
    effects = m.step(HandoverEnded(R, 1, OOPS))
    assert ReplyFailed(R, 1, OOPS) in effects and CancelCompute(R, 1) in effects


@pytest.mark.parametrize("peer", [G, D])
def test_a_dead_gateway_or_decode_node_ends_its_requests(peer: NodeId) -> None:
    m, _ = machine()
    m.step(ask("a"))
    m.step(ask("b"))
    errors = [e.error for e in of(m.step(PrefillPeerDied(peer, "silent")), ReplyFailed)]
    assert len(errors) == 2 and all(isinstance(error, PeerDiedError) for error in errors)
    assert m.step(PrefillPeerDied(NodeId("other"), "silent")) == []


def test_a_deadline_is_kept_while_waiting_too() -> None:
    m, _ = machine()
    m.step(ask("a", deadline_ns=5_000))
    m.step(ask("b", deadline_ns=100))
    assert m.step(PrefillTimePassed(99)) == []
    (failed,) = of(m.step(PrefillTimePassed(100)), ReplyFailed)
    assert failed.request_id == "b" and isinstance(failed.error, RequestExpiredError)


def test_times_are_counted_from_asking_and_from_the_turn() -> None:
    m, _ = machine()
    m.step(ask("a", now_ns=10))
    m.step(ask("b", tokens=tuple(range(100, 109)), now_ns=20))
    m.step(computed("a", now_ns=50))
    m.step(computed("b", now_ns=80))
    (done,) = of(m.step(sent("b")), ReplyDone)
    assert (done.queued_ns, done.compute_ns) == (30, 30)


def test_what_cannot_have_happened_is_refused() -> None:
    m, _ = machine()
    for event in (computed(), sent(), Pulled(R, 1)):
        with pytest.raises(LocalProtocolError):
            m.step(event)
    m.step(ask())
    with pytest.raises(LocalProtocolError):
        m.step(sent())


@dataclass
class Sending:
    """A hand-over as its sender has it."""

    tokens: Tokens
    refs: tuple[BlockRef, ...]
    first_block: int
    finishing: bool = False
    aborted: bool = False


@dataclass
class World:
    """What actor, thread, peers and memory would hold: the oracle of what is under way, and of every slot's bytes.

    A slot's bytes are the tokens they were made from, all from the sequence's first on.
    """

    m: PrefillMachine
    pool: BlockPool
    asked: dict[tuple[RequestId, int], Tokens] = field(default_factory=dict)
    unanswered: set[tuple[RequestId, int]] = field(default_factory=set)
    verified: set[tuple[RequestId, int]] = field(default_factory=set)
    pull: StartPull | None = None
    compute: StartPrefill | None = None
    sending: dict[tuple[RequestId, int], Sending] = field(default_factory=dict)
    generations: dict[int, int] = field(default_factory=dict)
    bytes_in: dict[int, Tokens] = field(default_factory=dict)
    sealed: set[int] = field(default_factory=set)
    announced: dict[tuple[RequestId, int], tuple[BlockHash, ...]] = field(default_factory=dict)

    def step(self, event: PrefillEvent) -> None:
        for effect in self.m.step(event):
            self.perform(effect)
        self.m.check()
        self.pool.check()
        for refs in (self.pull.refs if self.pull else (), self.compute.refs if self.compute else ()):
            self.still_stand(refs)
        for sending in self.sending.values():
            self.still_stand(sending.refs)

    def still_stand(self, refs: Sequence[BlockRef]) -> None:
        """R2: what is being read or written was not handed out again."""
        assert all(self.generations[ref.slot] == ref.generation for ref in refs)

    def write(self, tokens: Tokens, refs: Sequence[BlockRef], first_block: int, end: int) -> None:
        for block, ref in enumerate(refs, first_block):
            self.bytes_in[ref.slot] = tokens[: min(end, (block + 1) * BLOCK)]
            self.sealed.add(ref.slot)

    def holds(self, ref: BlockRef, block: int, tokens: Tokens) -> bool:
        """Whether the slot has the KV of this block of `tokens`, sealed."""
        want = tokens[: (block + 1) * BLOCK]
        return ref.slot in self.sealed and self.bytes_in[ref.slot][: len(want)] == want

    def perform(self, effect: PrefillEffect) -> None:
        match effect:
            case PrepareBlocks(refs):
                for ref in refs:
                    assert ref.generation > self.generations.get(ref.slot, 0)
                    self.generations[ref.slot] = ref.generation
                    self.sealed.discard(ref.slot)
            case StartPull():
                assert self.pull is None and self.compute is None
                self.pull = effect
            case OpenHandover(request_id, epoch, decode_node, first_block, ready, refs):
                tokens = self.asked[request_id, epoch][:-1]
                assert decode_node == D and len(refs) == -(-len(tokens) // BLOCK)
                assert all(self.holds(ref, block, tokens) for block, ref in enumerate(refs[:ready]))
                assert (request_id, epoch) not in self.sending
                self.sending[request_id, epoch] = Sending(tokens, refs, first_block)
            case StartPrefill(request_id, epoch, tokens, start, stop, refs, _):
                assert self.pull is None and self.compute is None
                assert tokens == self.asked[request_id, epoch] and 0 <= start < stop == len(tokens) - 1
                written = {ref.slot for ref in refs[start // BLOCK :]}
                for key, sending in self.sending.items():
                    # Nobody else sends what is about to be written.
                    assert key == (request_id, epoch) or not written & {ref.slot for ref in sending.refs}
                self.compute = effect
            case AnnounceBlocks(request_id, epoch, hashes, num_tokens):
                assert self.compute is None and not self.announced
                tokens = self.asked[request_id, epoch][:-1]
                assert hashes and hashes == tuple(hash_tokens(NS, tokens)[-len(hashes) :])
                assert num_tokens > (len(hashes) - 1) * BLOCK
                self.announced[request_id, epoch] = hashes
            case WithdrawBlocks(request_id, epoch):
                assert self.compute is None
                del self.announced[request_id, epoch]
            case NoteWaiting() | NoteWaited():
                raise AssertionError("nobody computes elsewhere")
            case CancelCompute(request_id, epoch):
                assert self.compute is not None
                assert (self.compute.request_id, self.compute.epoch) == (request_id, epoch)
            case FinishHandover(request_id, epoch, num_tokens):
                sending = self.sending[request_id, epoch]
                assert num_tokens == len(sending.tokens) and not sending.finishing
                sending.finishing = True
            case AbortHandover(request_id, epoch):
                self.sending[request_id, epoch].aborted = True
            case ReplyDone():
                key = (effect.request_id, effect.epoch)
                self.unanswered.remove(key)
                self.verified.remove(key)
                counted = effect.local_tokens + effect.pulled_tokens + effect.computed_tokens
                assert counted == len(self.asked[key]) - 1
            case ReplyFailed(request_id, epoch):
                self.unanswered.remove((request_id, epoch))

    def end_compute(self, error: KVError | None) -> None:
        job, self.compute = self.compute, None
        assert job is not None
        if job.copy is not None:
            self.bytes_in[job.copy.dst.slot] = self.bytes_in[job.copy.src.slot][: job.start + 1]
        first = job.start // BLOCK
        if error is None:
            before = self.bytes_in[job.refs[first].slot] if job.start % BLOCK else job.tokens[: job.start]
            # What is computed reads all KV before it.
            assert all(self.holds(ref, block, job.tokens) for block, ref in enumerate(job.refs[:first]))
            assert before[: job.start] == job.tokens[: job.start]
            self.write(job.tokens, job.refs[first:], first, job.stop)
        self.step(PrefillComputed(0, job.request_id, job.epoch, error))

    def end_pull(self, error: KVError | None) -> None:
        pull, self.pull = self.pull, None
        assert pull is not None
        if error is None:
            self.write(pull.tokens, pull.refs, pull.plan.first_block, len(pull.tokens))
        self.step(Pulled(pull.request_id, pull.epoch, nbytes=10, error=error))

    def end_sending(self, key: tuple[RequestId, int], error: KVError | None) -> None:
        sending = self.sending.pop(key)
        if error is None:
            for block, ref in enumerate(sending.refs):
                assert self.holds(ref, block, sending.tokens), (key, block)
            self.verified.add(key)
        self.step(HandoverEnded(*key, result=error or STATS))


def enabled(w: World) -> list[str]:
    """What can happen next, the likely things more than once."""
    kinds = ["ask", "ask", "end", "time"]
    if w.pull is not None:
        kinds += ["pulled"] * 3
    if w.compute is not None:
        kinds += ["computed"] * 4
    if any(sending.finishing for sending in w.sending.values()):
        kinds += ["sent"] * 4
    if w.sending:
        kinds += ["broken"]
    return kinds


def prompt(pick: int, number: int) -> Tokens:
    """Prompts that share beginnings of many lengths."""
    common = number % 12
    return (*range(common), *range(pick * 100, pick * 100 + 2 + number // 12 * 3))


def happen(w: World, kind: str, now: int, pick: int, number: int, epochs: dict[int, int]) -> None:
    """Let one thing happen."""
    name = RequestId(f"r{pick}")
    error = OOPS if number % 7 == 3 else None
    match kind:
        case "ask":
            epochs[pick] += 1
            tokens = prompt(pick % 2 * 5, number)
            key = (name, epochs[pick])
            w.asked[key] = tokens
            w.unanswered.add(key)
            first_block = number % -(-(len(tokens) - 1) // BLOCK)
            w.step(ask(name, epochs[pick], tokens, first_block=first_block, deadline_ns=now + 60, now_ns=now))
        case "pulled":
            w.end_pull(error)
        case "computed":
            w.end_compute(error)
        case "sent":
            ready = [key for key, sending in w.sending.items() if sending.finishing]
            w.end_sending(ready[pick % len(ready)], None)
        case "broken":
            w.end_sending(list(w.sending)[pick % len(w.sending)], OOPS)
        case "end":
            w.step(PrefillEndAsked(name, max(1, epochs[pick] - number % 2), "end"))
        case _:
            w.step(PrefillTimePassed(now))


@settings(max_examples=150, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 839), st.integers(0, 3), st.integers(0, 40)), min_size=10, max_size=120),
    st.integers(5, 14),
)
def test_every_block_that_is_sent_is_whole_and_nothing_is_lost_or_leaked(
    run: list[tuple[int, int, int]], num_slots: int
) -> None:
    planner = Planner()
    m, pool = machine(num_slots, plan_pull=planner)
    w = World(m, pool)
    epochs = dict.fromkeys(range(4), 0)
    for now, (choice, pick, number) in enumerate(run):
        planner.num_blocks = max(0, number % 5 - 2)
        kinds = enabled(w)
        happen(w, kinds[choice % len(kinds)], now, pick, number, epochs)
    w.step(PrefillPeerDied(G, "over"))
    while w.pull or w.compute or w.sending:
        if w.pull:
            w.end_pull(OOPS)
        if w.compute:
            w.end_compute(OOPS)
        for key in list(w.sending):
            w.end_sending(key, OOPS)
    assert pool.stats().pinned == 0 and pool.holds() == []
    assert m.num_running == m.num_waiting == 0
    assert w.unanswered == set() and w.announced == {}

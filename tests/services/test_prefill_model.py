"""The prefill machine and a world that keeps the bytes: whatever happens in whatever order, what is sent is whole."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from hypothesis import given, settings
from hypothesis import strategies as st

from kv_core.block import BlockRef
from kv_core.errors import KVError
from kv_core.hashing import BlockHash, hash_tokens
from kv_core.ids import RequestId
from kv_prefix.block_pool import BlockPool
from kv_services.node.announcements import AnnounceBlocks, WithdrawBlocks
from kv_services.node.prefill_events import (
    AbortHandover,
    CancelCompute,
    FinishHandover,
    HandoverEnded,
    NoteWaited,
    NoteWaiting,
    OpenHandover,
    PrefillComputed,
    PrefillEffect,
    PrefillEndAsked,
    PrefillEvent,
    PrefillPeerDied,
    PrefillTimePassed,
    PrepareBlocks,
    Pulled,
    ReplyDone,
    ReplyFailed,
    StartPrefill,
    StartPull,
)
from kv_services.node.prefill_state import PrefillMachine
from tests.services.helpers_prefill import (
    BLOCK,
    NS,
    OOPS,
    STATS,
    D,
    G,
    Planner,
    Tokens,
    ask,
    machine,
)


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
    bytes_in: dict[int, Sequence[int]] = field(default_factory=dict)
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

    def write(self, tokens: Sequence[int], refs: Sequence[BlockRef], first_block: int, end: int) -> None:
        for block, ref in enumerate(refs, first_block):
            self.bytes_in[ref.slot] = tokens[: min(end, (block + 1) * BLOCK)]
            self.sealed.add(ref.slot)

    def holds(self, ref: BlockRef, block: int, tokens: Sequence[int]) -> bool:
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

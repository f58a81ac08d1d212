"""The decode machine over a real pool: admission, batching, preemption, fencing, and who may still touch memory."""

from dataclasses import dataclass, field
from typing import TypeVar

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kv_core.errors import KVError, RetryableError
from kv_core.hashing import BlockHash, hash_tokens
from kv_core.ids import NodeId, RegionId, RequestId
from kv_core.namespace import Namespace
from kv_prefix.block_pool import BlockPool
from kv_services.engine.interface import Parked
from kv_services.errors import EpochFencedError, NodeOverloadedError, RequestExpiredError, RequestTooLargeError
from kv_services.messages import OutputToken, Sampling
from kv_services.node.announcements import AnnounceBlocks, WithdrawBlocks
from kv_services.node.decode_events import (
    CloseInbound,
    Computed,
    DecodeEffect,
    DecodeEvent,
    DrainBegan,
    EndAsked,
    GiveUp,
    HandoverFailed,
    HandoverVerified,
    InboundClosed,
    LayerArrived,
    NotePreempted,
    OpenInbound,
    PeerDied,
    PrepareSlots,
    RefuseReserve,
    RegisterLength,
    ReplyReserved,
    ReserveAsked,
    Retire,
    SendTokens,
    StartCompute,
    StartStep,
    StepFinished,
    StepItem,
    StepOutcome,
    TimePassed,
)
from kv_services.node.decode_state import DecodeMachine

NS = Namespace("m", "w", block_size=4)
G = NodeId("g")
T = TypeVar("T")
OOPS = RetryableError(detail="oops")


def machine(num_slots: int = 16, max_batch: int = 4, max_waiting: int = 3) -> tuple[DecodeMachine, BlockPool]:
    pool = BlockPool(num_slots, 4, region=RegionId(1))
    made = DecodeMachine(
        NodeId("d"), pool, block_size=4, num_slots=num_slots, max_batch=max_batch, max_waiting=max_waiting
    )
    return made, pool


def ask(
    name: str = "r",
    epoch: int = 1,
    tokens: tuple[int, ...] = tuple(range(9)),
    *,
    max_tokens: int = 8,
    local: bool = False,
    deadline_ns: int = 1_000,
) -> ReserveAsked:
    sampling = Sampling(max_tokens, 0.0, 1.0, 0, (999,))
    return ReserveAsked(0, RequestId(name), epoch, G, NS, tokens, 0, sampling, deadline_ns, local)


def of(effects: list[DecodeEffect], kind: type[T]) -> list[T]:
    return [effect for effect in effects if isinstance(effect, kind)]


def outcome(item: StepItem, token: int) -> StepOutcome:
    return StepOutcome(item.request_id, item.epoch, OutputToken(token))


def arrive(m: DecodeMachine, name: str = "r", epoch: int = 1) -> list[DecodeEffect]:
    m.step(LayerArrived(RequestId(name), epoch, 2))
    return m.step(HandoverVerified(RequestId(name), epoch))


def test_a_reserve_grants_what_the_prompt_lacks_and_no_more() -> None:
    m, pool = machine()
    effects = m.step(ask())
    (opened,) = of(effects, OpenInbound)
    # Tokens 0..7 are handed over in two blocks; the third block is for the last token, computed here.
    assert (opened.first_block, len(opened.refs), opened.cached_tokens) == (0, 2, 0)
    assert [len(e.refs) for e in of(effects, PrepareSlots)] == [3]
    assert pool.stats().pinned == 3
    assert of(effects, StartStep) == []


def test_the_first_step_begins_with_the_first_layer_and_its_token_waits_for_the_last_byte() -> None:
    m, _ = machine()
    m.step(ask())
    (step,) = of(m.step(LayerArrived(RequestId("r"), 1, 1)), StartStep)
    assert step.items[0].arriving and step.items[0].position == 8
    # The step came to the end before the sender's checksum did.
    assert of(m.step(StepFinished((outcome(step.items[0], 50),))), SendTokens) == []
    effects = m.step(HandoverVerified(RequestId("r"), 1))
    (sent,) = of(effects, SendTokens)
    assert (sent.first_index, sent.tokens) == (0, (OutputToken(50),))
    assert len(of(effects, StartStep)) == 1


def test_a_parked_sequence_steps_again_when_its_layer_is_there() -> None:

    m, _ = machine()
    m.step(ask())
    assert len(of(m.step(LayerArrived(RequestId("r"), 1, 1)), StartStep)) == 1
    parked = Parked(1, np.zeros(1, np.float32))
    assert of(m.step(StepFinished((StepOutcome(RequestId("r"), 1, parked),))), StartStep) == []
    (again,) = of(m.step(LayerArrived(RequestId("r"), 1, 2)), StartStep)
    assert again.items[0].parked is parked


def test_a_prompt_that_is_held_already_needs_no_hand_over() -> None:
    m, _ = machine()
    m.step(ask())
    arrive(m)
    # Blocks become findable between steps: the first one is under way since the first layer came.
    m.step(StepFinished((StepOutcome(RequestId("r"), 1, OutputToken(5)),)))
    effects = m.step(ask("s", tokens=tuple(range(9))))
    assert of(effects, OpenInbound) == []
    assert of(effects, ReplyReserved) == [ReplyReserved(RequestId("s"), 1, 8)]


def test_two_equal_prompts_end_up_in_the_same_blocks() -> None:
    m, pool = machine()
    m.step(ask("r"))
    m.step(ask("s"))
    assert pool.stats().pinned == 6
    arrive(m, "r")
    arrive(m, "s")
    m.step(StepFinished((StepOutcome(RequestId("r"), 1, OutputToken(7)),)))
    pool.check()
    assert pool.stats().pinned == 4


def test_a_stop_token_and_the_length_limit_end_the_answer() -> None:
    for token, limit, reason in ((999, 8, "stop"), (5, 1, "length")):
        m, pool = machine()
        m.step(ask(max_tokens=limit, local=True))
        (step,) = of(m.step(Computed(RequestId("r"), 1)), StartStep)
        effects = m.step(StepFinished((outcome(step.items[0], token),)))
        assert of(effects, SendTokens)[0].finish == reason
        assert of(effects, Retire) == [Retire(RequestId("r"), 1)]
        assert pool.stats().pinned == 0


def test_the_youngest_gives_way_and_goes_on_when_there_is_room() -> None:
    m, pool = machine(num_slots=7, max_batch=2)
    m.step(ask("old", tokens=tuple(range(11)), max_tokens=12, local=True))
    m.step(ask("young", tokens=tuple(range(100, 111)), max_tokens=12, local=True))
    m.step(Computed(RequestId("old"), 1))
    m.step(Computed(RequestId("young"), 1))
    produced, preempted = {"old": 0, "young": 0}, []
    # The step that began when only the old one was ready.
    items: tuple[StepItem, ...] = (StepItem(RequestId("old"), 1, 10, 10, (), False, None, ask().sampling),)
    for _ in range(60):
        effects = m.step(StepFinished(tuple(outcome(item, 5) for item in items)))
        for item in items:
            produced[item.request_id] += 1
        steps = of(effects, StartStep)
        while computes := of(effects, StartCompute):
            preempted += [effect.request_id for effect in of(effects, NotePreempted)]
            effects = m.step(Computed(computes[0].request_id, 1))
            steps += of(effects, StartStep)
        preempted += [effect.request_id for effect in of(effects, NotePreempted)]
        pool.check()
        m.check()
        if not steps:
            break
        (items,) = (step.items for step in steps)
    assert produced == {"old": 12, "young": 12}
    assert preempted and set(preempted) == {"young"}
    assert pool.stats().pinned == 0


def test_slots_that_a_peer_may_write_are_never_taken_back_for_an_older_request() -> None:
    m, pool = machine(num_slots=6)
    m.step(ask("old", tokens=tuple(range(7)), local=True))
    m.step(ask("young", tokens=tuple(range(100, 109))))
    effects = m.step(Computed(RequestId("old"), 1))
    while steps := of(effects, StartStep):
        effects = m.step(StepFinished(tuple(outcome(item, 5) for item in steps[0].items)))
        m.check()
        pool.check()
    assert of(effects, NotePreempted) == [NotePreempted(RequestId("old"), 1)]
    arrive(m, "young")
    m.check()


def test_a_hand_over_verified_in_mid_step_leaves_the_slots_under_the_step_alone() -> None:
    m, _ = machine()
    m.step(ask("r"))
    m.step(ask("s"))
    m.step(LayerArrived(RequestId("r"), 1, 1))
    m.step(HandoverVerified(RequestId("r"), 1))
    m.step(LayerArrived(RequestId("s"), 1, 1))
    (step,) = of(m.step(StepFinished((StepOutcome(RequestId("r"), 1, OutputToken(5)),))), StartStep)
    under_step = {item.request_id: item.slots for item in step.items}
    assert set(under_step) == {"r", "s"}
    m.step(HandoverVerified(RequestId("s"), 1))
    seq = m.sequence(RequestId("s"), 1)
    assert seq is not None and tuple(ref.slot for ref in seq.refs) == under_step[RequestId("s")]
    m.step(StepFinished(tuple(outcome(item, 5) for item in step.items)))
    assert tuple(ref.slot for ref in seq.refs)[:2] == under_step[RequestId("r")][:2]


def test_refusals_say_why() -> None:
    m, _ = machine(num_slots=4, max_waiting=1)
    assert isinstance(of(m.step(ask("big", max_tokens=30)), RefuseReserve)[0].error, RequestTooLargeError)
    m.step(ask("a"))
    m.step(ask("b", tokens=tuple(range(50, 59))))
    assert isinstance(of(m.step(ask("c")), RefuseReserve)[0].error, NodeOverloadedError)
    m.step(EndAsked(RequestId("late"), 3, "gone"))
    assert isinstance(of(m.step(ask("late", 3)), RefuseReserve)[0].error, EpochFencedError)


def test_a_higher_epoch_replaces_the_lower_one() -> None:
    m, _ = machine()
    m.step(ask(epoch=1))
    effects = m.step(ask(epoch=2))
    assert CloseInbound(RequestId("r"), 1) in effects
    assert of(effects, OpenInbound)[0].epoch == 2
    assert m.step(HandoverVerified(RequestId("r"), 1)) == []
    assert isinstance(of(m.step(ask(epoch=1)), RefuseReserve)[0].error, EpochFencedError)


def test_slots_of_an_open_hand_over_are_kept_until_the_peer_can_write_no_more() -> None:
    m, pool = machine()
    m.step(ask())
    effects = m.step(EndAsked(RequestId("r"), 1, "gone"))
    assert CloseInbound(RequestId("r"), 1) in effects
    assert pool.stats().pinned == 3
    m.step(InboundClosed(RequestId("r"), 1))
    assert pool.stats().pinned == 0


def test_slots_of_a_running_step_are_kept_until_it_is_over() -> None:
    m, pool = machine()
    m.step(ask(local=True))
    (step,) = of(m.step(Computed(RequestId("r"), 1)), StartStep)
    m.step(EndAsked(RequestId("r"), 1, "gone"))
    assert pool.stats().pinned == 3
    effects = m.step(StepFinished((outcome(step.items[0], 5),)))
    assert of(effects, SendTokens) == []
    assert pool.stats().pinned == 0


def test_a_failed_hand_over_gives_the_request_up() -> None:
    m, pool = machine()
    m.step(ask())
    (gave_up,) = of(m.step(HandoverFailed(RequestId("r"), 1, OOPS)), GiveUp)
    assert gave_up.may_retry and gave_up.error is OOPS
    assert pool.stats().pinned == 0


@pytest.mark.parametrize("with_step", [False, True])
@pytest.mark.parametrize(
    "end",
    [
        HandoverFailed(RequestId("r"), 1, OOPS),
        EndAsked(RequestId("r"), 1, "gone"),
        TimePassed(1_000),
        PeerDied(G, "silent"),
        DrainBegan(hand_over=True),
    ],
    ids=lambda end: type(end).__name__,
)
def test_what_a_hand_over_brought_that_was_not_verified_as_a_whole_is_found_by_nobody(
    end: DecodeEvent, with_step: bool
) -> None:
    """Every layer may be there, and a first token made of them: without the last word it may still be wrong."""
    tokens = tuple(range(9))

    def arriving() -> tuple[DecodeMachine, BlockPool, StepItem]:
        m, pool = machine()
        m.step(ask(tokens=tokens))
        (step,) = of(m.step(LayerArrived(RequestId("r"), 1, 2)), StartStep)
        return m, pool, step.items[0]

    def found(pool: BlockPool) -> int:
        return len(pool.match(NS.digest, hash_tokens(NS, tokens), tokens).refs)

    m, pool, item = arriving()
    m.step(StepFinished((outcome(item, 5),)))
    assert found(pool) == 0
    m.step(HandoverVerified(RequestId("r"), 1))
    assert found(pool) == 2

    m, pool, item = arriving()
    if with_step:
        m.step(StepFinished((outcome(item, 5),)))
    if of(m.step(end), CloseInbound):
        m.step(InboundClosed(RequestId("r"), 1))
    if not with_step:
        m.step(StepFinished((outcome(item, 5),)))
    assert found(pool) == pool.stats().pinned == pool.stats().cached == 0


def test_a_deadline_is_kept_while_waiting_too() -> None:
    m, _ = machine(num_slots=4)
    m.step(ask("a", deadline_ns=5_000))
    m.step(ask("b", tokens=tuple(range(50, 59)), deadline_ns=100))
    (refused,) = of(m.step(TimePassed(100)), RefuseReserve)
    assert refused.request_id == "b" and isinstance(refused.error, RequestExpiredError)


def test_a_dead_gateway_leaves_nothing_behind() -> None:
    m, pool = machine()
    m.step(ask("a", local=True))
    m.step(ask("b", tokens=(1, 2)))
    m.step(PeerDied(G, "silent"))
    m.step(Computed(RequestId("a"), 1))
    m.step(InboundClosed(RequestId("b"), 1))
    assert pool.stats().pinned == 0
    assert m.num_running == m.num_waiting == 0


@dataclass
class World:
    """What actor, peers and gateways would hold: the oracle of what is under way."""

    m: DecodeMachine
    pool: BlockPool
    inbound: dict[tuple[RequestId, int], bool] = field(default_factory=dict)
    computing: list[tuple[RequestId, int]] = field(default_factory=list)
    announced: dict[tuple[RequestId, int], set[BlockHash]] = field(default_factory=dict)
    step_items: tuple[StepItem, ...] | None = None
    unanswered: set[tuple[RequestId, int]] = field(default_factory=set)
    sent: dict[tuple[RequestId, int], int] = field(default_factory=dict)
    ended: set[tuple[RequestId, int]] = field(default_factory=set)
    generations: dict[int, int] = field(default_factory=dict)

    def step(self, event: DecodeEvent) -> None:
        for effect in self.m.step(event):
            self.perform(effect)
        self.m.check()
        self.pool.check()
        for item in self.step_items or ():
            seq = self.m.sequence(item.request_id, item.epoch)
            # The step works on these slots: they must stay what they are.
            assert seq is None or tuple(ref.slot for ref in seq.refs) == item.slots

    def busy_slots(self) -> set[int]:
        return {slot for item in self.step_items or () for slot in item.slots}

    def perform(self, effect: DecodeEffect) -> None:
        match effect:
            case PrepareSlots(refs):
                # Never hand out what a running step may touch.
                assert not {ref.slot for ref in refs} & self.busy_slots()
                for ref in refs:
                    assert ref.generation > self.generations.get(ref.slot, 0)
                    self.generations[ref.slot] = ref.generation
            case OpenInbound(request_id, epoch):
                self.unanswered.remove((request_id, epoch))
                self.inbound[request_id, epoch] = False
            case CloseInbound(request_id, epoch):
                assert (request_id, epoch) in self.inbound
                self.inbound[request_id, epoch] = True
            case ReplyReserved(request_id, epoch) | RefuseReserve(request_id, epoch):
                self.unanswered.discard((request_id, epoch))
            case AnnounceBlocks(request_id, epoch, hashes):
                # D7: of those that are still wanted, no two compute one block.
                others = [names for key, names in self.announced.items() if self.m.sequence(*key) is not None]
                assert (request_id, epoch) not in self.announced
                assert not any(names.intersection(hashes) for names in others)
                self.announced[request_id, epoch] = set(hashes)
            case WithdrawBlocks(request_id, epoch):
                assert (request_id, epoch) not in self.computing
                del self.announced[request_id, epoch]
            case StartCompute(request_id, epoch):
                self.computing.append((request_id, epoch))
            case StartStep(items):
                assert self.step_items is None and items
                assert len({slot for item in items for slot in item.slots[-1:]}) == len(items)
                self.step_items = items
            case SendTokens(request_id, epoch, _, first_index, tokens, finish):
                key = (request_id, epoch)
                assert key not in self.ended
                # D3: nothing is shown before every byte behind it was verified.
                assert key not in self.inbound
                assert first_index == self.sent.get(key, 0)
                self.sent[key] = first_index + len(tokens)
                if finish:
                    self.ended.add(key)
            case GiveUp(request_id, epoch):
                assert (request_id, epoch) not in self.ended
                self.ended.add((request_id, epoch))
            case RegisterLength() | Retire() | NotePreempted():
                pass


def enabled(w: World) -> list[str]:
    """What can happen next, the likely things more than once."""
    kinds = ["ask", "end", "time"]
    if any(not closing for closing in w.inbound.values()):
        kinds += ["layer", "layer", "verify", "verify", "fail"]
    if any(w.inbound.values()):
        kinds += ["closed"]
    if w.computing:
        kinds += ["compute", "compute"]
    if w.step_items is not None:
        kinds += ["step"] * 12
    return kinds


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 839), st.integers(0, 3), st.integers(0, 30)), min_size=10, max_size=120),
    st.integers(5, 12),
)
def test_nothing_is_lost_leaked_or_written_by_two_whatever_happens(
    run: list[tuple[int, int, int]], num_slots: int
) -> None:
    m, pool = machine(num_slots, max_batch=3, max_waiting=3)
    w = World(m, pool)
    epochs = dict.fromkeys(range(4), 0)
    for now, (choice, pick, number) in enumerate(run):
        kinds = enabled(w)
        happen(w, kinds[choice % len(kinds)], now, pick, number, epochs)
    w.step(PeerDied(G, "over"))
    while w.inbound or w.computing or w.step_items is not None:
        for key in list(w.inbound):
            del w.inbound[key]
            w.step(InboundClosed(*key))
        for key in w.computing[:]:
            w.computing.remove(key)
            w.step(Computed(*key))
        if w.step_items is not None:
            items, w.step_items = w.step_items, None
            w.step(StepFinished(tuple(outcome(item, 1) for item in items)))
    assert pool.stats().pinned == 0 and pool.holds() == []
    assert m.num_running == m.num_waiting == 0
    assert w.unanswered == set() and w.announced == {}


def happen(w: World, kind: str, now: int, pick: int, number: int, epochs: dict[int, int]) -> None:
    """Let one thing happen."""
    name = RequestId(f"r{pick}")
    live = [key for key, closing in w.inbound.items() if not closing]
    match kind:
        case "ask":
            epochs[pick] += 1
            # Some prompts are equal, so that blocks of two requests are one.
            prompt = tuple(range(9 + number % 8)) if number % 2 else tuple(range(pick * 50, pick * 50 + number))
            w.unanswered.add((name, epochs[pick]))
            w.step(ask(name, epochs[pick], prompt or (1,), local=number % 3 == 0, deadline_ns=now + 90))
        case "layer":
            w.step(LayerArrived(*live[pick % len(live)], num_layers=1 + number % 4))
        case "verify" | "fail":
            key = live[pick % len(live)]
            del w.inbound[key]
            w.step(HandoverVerified(*key) if kind == "verify" else HandoverFailed(*key, error=OOPS))
        case "closed":
            key = next(key for key, closing in w.inbound.items() if closing)
            del w.inbound[key]
            w.step(InboundClosed(*key))
        case "compute":
            key = w.computing.pop(pick % len(w.computing))
            w.step(Computed(*key, error=OOPS if number == 7 else None))
        case "step":
            assert w.step_items is not None
            items, w.step_items = w.step_items, None
            w.step(StepFinished(tuple(_result(item, number + i) for i, item in enumerate(items))))
        case "end":
            w.step(EndAsked(name, max(1, epochs[pick] - number % 2), "end"))
        case _:
            w.step(TimePassed(now))


def _result(item: StepItem, number: int) -> StepOutcome:

    result: OutputToken | Parked | KVError
    if item.arriving and number % 3 == 0:
        result = Parked(1, np.zeros(1, np.float32))
    elif number % 31 == 5:
        result = OOPS
    else:
        result = OutputToken(999 if number % 29 == 0 else number)
    return StepOutcome(item.request_id, item.epoch, result)

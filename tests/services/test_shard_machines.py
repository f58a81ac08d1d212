"""The machines of sharded requests: any order of messages and any fault ends right or with an error; nothing leaks."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kv_core.errors import LocalProtocolError, RemoteProtocolError, RetryableError
from kv_core.ids import Incarnation, NodeId, RegionId, RequestId
from kv_core.sharding import InvalidPlanError, Placement
from kv_prefix.block_pool import BlockPool
from kv_prefix.errors import TenantQuotaError
from kv_prefix.quotas import AccountLimits, AccountSource
from kv_services.errors import (
    EpochFencedError,
    NodeDrainingError,
    NodeOverloadedError,
    RequestExpiredError,
    UnknownRequestError,
)
from kv_services.node.decode_events import (
    DrainBegan,
    DrainEnded,
    EndAsked,
    GiveUp,
    PeerDied,
    RefuseReserve,
    ReplyReserved,
    Retire,
    SendTokens,
)
from kv_services.node.shard_worker_state import (
    AnswerOpened,
    CallAsked,
    CallEnded,
    Caller,
    CloseAsked,
    OpenAsked,
    RefuseAsk,
    ShardWorkerMachine,
    StartCall,
)
from kv_services.sharded.errors import ShardLostError, ShardOrderError, ShardRefusedError
from kv_services.sharded.plan import SequenceSize, ShardMode, plan_pieces
from tests.services.helpers_shard_world import BLOCK, DEADLINE_NS, GATEWAY, LAYERS, LIFE, NAMESPACE, R, World

A, B, C, D = (NodeId(name) for name in "abcd")
PROMPT, COUNT = tuple(range(30)), 5
SIZE = SequenceSize(LAYERS, len(PROMPT) + COUNT - 1, BLOCK)
ROOM = {A: 4, B: 4, C: 4, D: 4}
MODES = (ShardMode.LAYER, ShardMode.SEQUENCE, ShardMode.HYBRID)


def cut(mode: ShardMode, *, without: tuple[NodeId, ...] = ()) -> tuple[Placement, ...]:
    room = {node: 4 for node in ROOM if node not in without}
    return plan_pieces(R, mode, SIZE, room, ((A, B), (C, D)))


def world(seed: int = 0, slots: int = 4) -> World:
    return World(random.Random(seed), dict.fromkeys(ROOM, slots))


def expected() -> list[int]:
    """A token's id is its position."""
    return list(range(len(PROMPT), len(PROMPT) + COUNT))


@given(seed=st.integers(0, 10**6), mode=st.sampled_from(MODES))
def test_in_any_order_of_messages_every_token_comes_once_and_every_slot_goes_back(seed: int, mode: ShardMode) -> None:
    w = world(seed)
    w.reserve(cut(mode)[0].node, cut(mode), PROMPT, COUNT)
    w.run()
    assert w.tokens == expected()
    assert [type(effect) for effect in w.told if not isinstance(effect, SendTokens)] == [ReplyReserved, Retire]
    assert w.nothing_left() and not w.asks


faults = st.lists(
    st.tuples(
        st.integers(0, 60), st.sampled_from(["kill holder", "fail call", "end", "gateway dies", "expire", "drain"])
    ),
    min_size=1,
    max_size=3,
)


@given(seed=st.integers(0, 10**6), mode=st.sampled_from(MODES), schedule=faults)
def test_whatever_fails_the_gateway_hears_of_it_once_and_nothing_is_left(
    seed: int, mode: ShardMode, schedule: list[tuple[int, str]]
) -> None:
    w = world(seed)
    pieces = cut(mode)
    at = pieces[0].node
    w.reserve(at, pieces, PROMPT, COUNT)
    ended_by_gateway = False
    for steps, fault in schedule:
        w.run(steps)
        match fault:
            case "kill holder":
                victim = pieces[-1].node
                if w.nodes[victim].alive:
                    w.kill(victim)
            case "fail call":
                w.fail_calls += 1
            case "end":
                ended_by_gateway = True
                w.coordinate(at, EndAsked(R, 1, "client gone"))
            case "gateway dies":
                ended_by_gateway = True
                w.coordinate(at, PeerDied(GATEWAY, "silent"))
            case "expire":
                w.expire()
            case _:
                w.coordinate(at, DrainBegan(hand_over=True))
    w.run()
    assert w.tokens == expected()[: len(w.tokens)]
    verdicts = w.of(RefuseReserve, GiveUp)
    finished = bool(w.tokens) and len(w.tokens) == COUNT
    assert len(verdicts) <= 1
    assert finished or verdicts or ended_by_gateway
    assert not (finished and verdicts)
    assert len(w.of(Retire)) == 1
    assert w.nothing_left()


@given(seed=st.integers(0, 10**6), mode=st.sampled_from(MODES), steps=st.integers(0, 150), dies=st.booleans())
def test_a_newer_epoch_at_another_coordinator_fences_the_older_one_and_finishes(
    seed: int, mode: ShardMode, steps: int, dies: bool
) -> None:
    w = world(seed)
    first = cut(mode)
    w.reserve(first[0].node, first, PROMPT, COUNT)
    w.run(steps)
    sent = w.tokens
    if len(sent) == COUNT:
        return
    w.told.clear()
    if dies:
        w.kill(first[0].node)
    second = plan_pieces(R, ShardMode.SEQUENCE, SIZE, {B: 4, C: 4, D: 4} if dies else ROOM, ())
    w.reserve(second[-1].node, second, (*PROMPT, *sent), COUNT - len(sent), epoch=2)
    w.run()
    # Where it takes a piece of the older epoch, it waits for that piece's last call and no longer.
    second_only = [effect for effect in w.told if effect.epoch == 2]
    assert not [effect for effect in second_only if isinstance(effect, RefuseReserve | GiveUp)]
    answers = [effect.tokens[0] for effect in second_only if isinstance(effect, SendTokens)]
    assert [token.token_id for token in answers] == expected()[len(sent) :]
    w.coordinate(first[0].node, EndAsked(R, 1, "another attempt"))
    w.run()
    w.expire()
    w.run()
    assert w.nothing_left()


def test_one_refusal_closes_every_piece_and_is_told_with_the_node_to_blame() -> None:
    for full in (A, B, C):
        w = world()
        w.nodes[full].pool.open("another request", None, 4)
        w.reserve(A, cut(ShardMode.SEQUENCE, without=(D,)), PROMPT, COUNT)
        w.run()
        (refusal,) = w.of(RefuseReserve)
        assert isinstance(refusal, RefuseReserve) and isinstance(refusal.error, ShardRefusedError)
        assert refusal.error.fields["node"] == full
        assert isinstance(refusal.error, RetryableError)
        assert all(
            node.pool.stats().free == node.pool.stats().total - 4 * (name == full) for name, node in w.nodes.items()
        )


def test_a_holders_death_is_a_lost_piece_that_may_be_tried_again_and_names_it() -> None:
    w = world()
    w.reserve(A, cut(ShardMode.LAYER, without=(D,)), PROMPT, COUNT)
    while not w.tokens:
        w.run(1)
    w.kill(C)
    w.run()
    (told,) = w.of(GiveUp)
    assert isinstance(told, GiveUp) and told.may_retry
    assert isinstance(told.error, ShardLostError) and told.error.fields["node"] == C
    assert w.nothing_left()


def test_an_error_that_another_node_would_make_too_is_not_tried_again() -> None:
    w = world()
    w.reserve(A, cut(ShardMode.LAYER, without=(D,)), PROMPT, COUNT)
    w.run()
    assert w.tokens == expected()
    w.told.clear()
    w.reserve(A, cut(ShardMode.LAYER, without=(D,)), PROMPT, COUNT, epoch=2)
    while not w.tokens:
        w.run(1)
    w.expire()
    (told,) = w.of(GiveUp)
    assert isinstance(told, GiveUp) and isinstance(told.error, RequestExpiredError) and not told.may_retry
    w.run()
    assert w.nothing_left()


def test_a_reserve_is_refused_for_a_wrong_plan_while_leaving_and_when_its_epoch_is_over() -> None:
    w = world()
    machine = w.nodes[A].coordinator
    holes = (Placement(0, 3, 0, 16, A), Placement(0, 3, 20, 34, B))
    short = (Placement(0, 3, 0, 16, A), Placement(0, 3, 16, 32, B))
    for epoch, pieces in enumerate((holes, short), start=1):
        w.reserve(A, pieces, PROMPT, COUNT, epoch=epoch)
        refusal = w.told.pop()
        assert isinstance(refusal, RefuseReserve) and isinstance(refusal.error, InvalidPlanError)
    w.coordinate(A, DrainBegan(hand_over=False))
    w.reserve(A, cut(ShardMode.LAYER), PROMPT, COUNT, epoch=3)
    refusal = w.told.pop()
    assert isinstance(refusal, RefuseReserve) and isinstance(refusal.error, NodeDrainingError)
    w.coordinate(A, DrainEnded())
    w.reserve(A, cut(ShardMode.LAYER), PROMPT, COUNT, epoch=3)
    refusal = w.told.pop()
    assert isinstance(refusal, RefuseReserve) and isinstance(refusal.error, EpochFencedError)
    assert machine.sequences == []


def test_an_end_that_comes_before_its_reserve_keeps_it_from_beginning() -> None:
    w = world()
    w.coordinate(A, EndAsked(R, 2, "client gone"))
    for epoch in (1, 2):
        w.reserve(A, cut(ShardMode.LAYER), PROMPT, COUNT, epoch=epoch)
        refusal = w.told.pop()
        assert isinstance(refusal, RefuseReserve) and isinstance(refusal.error, EpochFencedError)
    assert w.nodes[A].coordinator.sequences == [] and not w.asks
    w.reserve(A, cut(ShardMode.LAYER), PROMPT, COUNT, epoch=3)
    w.run()
    assert w.tokens == expected()


def ask_open(ask: int, epoch: int, piece: Placement, caller: Caller) -> OpenAsked:
    return OpenAsked(ask, R, epoch, caller, NAMESPACE, piece, DEADLINE_NS)


def test_calls_out_of_order_from_others_or_outside_the_piece_are_refused_and_nothing_runs() -> None:
    machine, caller = world().nodes[A].worker, Caller(B, LIFE)
    piece = Placement(0, 2, 8, 20, A)
    assert isinstance(machine.step(ask_open(1, 1, piece, caller))[-1], AnswerOpened)

    def refusal(layer: int | None, start: int, count: int, stores: bool, by: Caller = caller, epoch: int = 1) -> type:
        (effect,) = machine.step(CallAsked(9, R, epoch, by, layer, start, count, stores))
        machine.check()
        assert isinstance(effect, RefuseAsk), effect
        return type(effect.error)

    assert refusal(0, 12, 4, True) is ShardOrderError  # tokens 8 to 11 were never written
    assert refusal(0, 20, 1, False) is ShardOrderError  # reads what is not there
    assert refusal(0, 10, 1, False) is RemoteProtocolError  # its own tokens, unstored
    assert refusal(2, 8, 4, True) is RemoteProtocolError  # another layer
    assert refusal(0, 8, 13, True) is RemoteProtocolError  # beyond the piece
    assert refusal(0, 8, 0, True) is RemoteProtocolError
    assert refusal(0, 8, 4, True, Caller(C, LIFE)) is UnknownRequestError
    assert refusal(0, 8, 4, True, Caller(B, Incarnation(2))) is UnknownRequestError
    assert refusal(0, 8, 4, True, epoch=2) is UnknownRequestError
    assert isinstance(machine.step(CallAsked(2, R, 1, caller, 0, 8, 4, True))[0], StartCall)
    assert refusal(1, 8, 4, True) is RemoteProtocolError  # one call at a time
    machine.step(CallEnded(R, 1, failed=True))
    assert refusal(0, 12, 4, True) is ShardOrderError  # what failed was not stored
    with pytest.raises(LocalProtocolError):
        machine.step(CallEnded(R, 1, failed=False))


def test_slots_of_a_piece_that_ends_in_a_call_go_back_with_it_and_its_successor_waits_for_them() -> None:
    node, caller = world(slots=3).nodes[A], Caller(B, LIFE)
    machine, piece = node.worker, Placement(0, 3, 0, 12, A)
    machine.step(ask_open(1, 1, piece, caller))
    machine.step(CallAsked(2, R, 1, caller, None, 0, 4, True))
    assert machine.step(ask_open(3, 2, piece, Caller(C, LIFE))) == []
    assert node.pool.stats().free == 0
    effects = machine.step(CallEnded(R, 1, failed=False))
    assert isinstance(effects[-1], AnswerOpened) and effects[-1].ask == 3
    machine.check()
    # Of what the older epoch wrote nothing counts.
    assert isinstance(machine.step(CallAsked(4, R, 2, Caller(C, LIFE), None, 4, 4, True))[0], RefuseAsk)
    machine.step(CloseAsked(R, 2))
    assert node.pool.stats().free == 3
    assert isinstance(machine.step(ask_open(5, 2, piece, caller))[0], RefuseAsk)  # what ended stays ended


def test_a_waiting_successor_is_refused_when_it_is_closed_or_its_coordinator_dies() -> None:
    node, caller = world(slots=3).nodes[A], Caller(B, LIFE)
    machine, piece = node.worker, Placement(0, 3, 0, 12, A)
    machine.step(ask_open(1, 1, piece, caller))
    machine.step(CallAsked(2, R, 1, caller, None, 0, 4, True))
    machine.step(ask_open(3, 2, piece, Caller(C, LIFE)))
    (refused,) = machine.step(CloseAsked(R, 2))
    assert isinstance(refused, RefuseAsk) and refused.ask == 3
    machine.step(CallEnded(R, 1, failed=False))
    assert node.pool.stats().free == 3 and machine.shards == []


def test_a_worker_takes_no_more_pieces_than_it_may_and_none_that_are_none() -> None:
    machine, caller = world(slots=40).nodes[A].worker, Caller(B, LIFE)
    for number in range(8):
        opened = OpenAsked(number, RequestId(f"r{number}"), 1, caller, NAMESPACE, Placement(0, 3, 0, 8, A), DEADLINE_NS)
        assert isinstance(machine.step(opened)[-1], AnswerOpened)
    (refused,) = machine.step(ask_open(9, 1, Placement(0, 3, 0, 8, A), caller))
    assert isinstance(refused, RefuseAsk) and isinstance(refused.error, NodeOverloadedError)
    for piece in (
        Placement(0, 4, 0, 8, A),
        Placement(0, 3, 2, 8, A),
        Placement(0, 3, 0, 8, B),
        Placement(1, 1, 0, 8, A),
    ):
        (refused,) = machine.step(ask_open(10, 1, piece, caller))
        assert isinstance(refused, RefuseAsk) and isinstance(refused.error, RemoteProtocolError)


def test_a_worker_that_leaves_finishes_what_it_has_or_hands_it_over_as_it_is_told() -> None:
    machine, caller = world().nodes[A].worker, Caller(B, LIFE)
    machine.step(ask_open(1, 1, Placement(0, 1, 0, 8, A), caller))
    machine.step(DrainBegan(hand_over=False))
    other = OpenAsked(2, RequestId("other"), 1, caller, NAMESPACE, Placement(0, 1, 0, 8, A), DEADLINE_NS)
    (refused,) = machine.step(other)
    assert isinstance(refused, RefuseAsk) and isinstance(refused.error, NodeDrainingError)
    assert isinstance(machine.step(CallAsked(3, R, 1, caller, None, 0, 4, True))[0], StartCall)
    machine.step(CallEnded(R, 1, failed=False))
    machine.step(DrainBegan(hand_over=True))
    (refused,) = machine.step(CallAsked(4, R, 1, caller, None, 4, 4, True))
    assert isinstance(refused, RefuseAsk) and isinstance(refused.error, NodeDrainingError)
    machine.step(DrainEnded())
    assert isinstance(machine.step(CallAsked(5, R, 1, caller, None, 4, 4, True))[0], StartCall)


def test_a_piece_is_charged_to_its_tenant_and_refused_beyond_the_quota_whatever_room_there_is() -> None:
    accounts = AccountSource({"small": AccountLimits(max_blocks=3)}, {NAMESPACE: "small"}.get)
    pool, caller = BlockPool(40, BLOCK, region=RegionId(1), accounts=accounts), Caller(B, LIFE)
    machine = ShardWorkerMachine(A, pool, num_layers=LAYERS, block_size=BLOCK, max_shards=8)
    assert isinstance(machine.step(ask_open(1, 1, Placement(0, 3, 0, 8, A), caller))[-1], AnswerOpened)
    assert pool.accounts()["small"].used == 2
    other = OpenAsked(2, RequestId("other"), 1, caller, NAMESPACE, Placement(0, 3, 0, 8, A), DEADLINE_NS)
    (refused,) = machine.step(other)
    assert isinstance(refused, RefuseAsk) and isinstance(refused.error, TenantQuotaError)
    free = OpenAsked(3, RequestId("other"), 2, caller, b"o" * 16, Placement(0, 3, 0, 8, A), DEADLINE_NS)
    assert isinstance(machine.step(free)[-1], AnswerOpened)
    machine.step(CloseAsked(R, 1))
    assert pool.accounts()["small"].used == 0

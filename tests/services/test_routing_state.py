"""One request's route: tokens once and in order, one verdict, nothing left reserved."""

from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kv_core.errors import KVError, RetryableError
from kv_core.ids import NodeId
from kv_services.gateway.routing_state import (
    ClientGone,
    DeadlinePassed,
    DecodeFailed,
    Deliver,
    Effect,
    EndAt,
    Event,
    Fail,
    Leave,
    NodeDied,
    NoteRetry,
    PauseThenRetry,
    Place,
    Placed,
    PlacementFailed,
    PrefillEnded,
    RequestRoute,
    Reserved,
    ReserveFailed,
    RetryDue,
    RouteState,
    SendPrefill,
    SendReserve,
    Started,
    Succeed,
    TextComplete,
    TokensArrived,
)
from kv_services.messages import OutputToken

P0, P1, D0, D1 = (NodeId(n) for n in ("p0", "p1", "d0", "d1"))
OOPS = RetryableError(detail="oops")


def tokens(*ids: int) -> tuple[OutputToken, ...]:
    return tuple(OutputToken(i) for i in ids)


def running(route: RequestRoute) -> None:
    route.step(Started())
    route.step(Placed(D0, P0))
    route.step(Reserved(1, needs_prefill=True))


def new() -> RequestRoute:
    return RequestRoute(max_attempts=3, retry_delay_ns=10)


def test_the_plain_path() -> None:
    r = new()
    assert r.step(Started()) == [Place(())]
    assert r.step(Placed(D0, P0)) == [SendReserve(D0, P0, 1, 0)]
    assert r.step(Reserved(1, needs_prefill=True)) == [SendPrefill(P0, D0, 1)]
    assert r.step(PrefillEnded(1)) == []
    assert r.step(TokensArrived(1, 0, tokens(5, 6))) == [Deliver(0, tokens(5, 6))]
    assert r.step(TokensArrived(1, 2, tokens(7), finish="stop")) == [Deliver(2, tokens(7)), Succeed("stop")]


def test_an_answer_that_outruns_the_report_of_its_hand_over_waits_for_the_figures() -> None:
    r = new()
    running(r)
    assert r.step(TokensArrived(1, 0, tokens(5), finish="stop")) == [Deliver(0, tokens(5))]
    assert r.step(NodeDied(D0, OOPS)) == []
    assert r.step(PrefillEnded(1)) == [Succeed("stop")]


def test_a_complete_answer_is_not_lost_with_its_prefill_node() -> None:
    for last in (NodeDied(P0, OOPS), PrefillEnded(1, OOPS)):
        r = new()
        running(r)
        r.step(TokensArrived(1, 0, tokens(5), finish="stop"))
        assert r.step(last) == [Succeed("stop")]


@pytest.mark.parametrize("event", [TextComplete(), ClientGone()])
def test_a_prefill_node_reports_after_the_answer_though_nobody_reads_on(event: Event) -> None:
    """Ended before its report it would keep nothing of a prompt that is to be kept."""
    r = new()
    running(r)
    r.step(TokensArrived(1, 0, tokens(5), finish="length"))
    assert r.step(event) == []
    assert r.step(PrefillEnded(1)) == [Succeed("length")]


def test_a_stop_string_in_the_first_tokens_ends_the_decode_node_and_waits_for_the_prefill_node() -> None:
    r = new()
    running(r)
    r.step(TokensArrived(1, 0, tokens(5)))
    assert r.step(TextComplete()) == [EndAt(D0, 1, "stop string")]
    assert r.step(TokensArrived(1, 1, tokens(6))) == []
    assert r.step(PrefillEnded(1)) == [Succeed("stop")]


def test_a_stop_string_in_the_tokens_of_a_former_attempt_ends_a_hand_over_that_is_for_nobody() -> None:
    r = new()
    running(r)
    r.step(TokensArrived(1, 0, tokens(5)))
    r.step(NodeDied(D0, OOPS))
    r.step(RetryDue())
    r.step(Placed(D1, P0))
    r.step(Reserved(2, needs_prefill=True))
    assert r.step(TextComplete()) == [EndAt(P0, 2, "stop string"), EndAt(D1, 2, "stop string"), Succeed("stop")]


def test_a_repeated_batch_is_shown_once() -> None:
    r = new()
    running(r)
    r.step(TokensArrived(1, 0, tokens(5, 6)))
    assert r.step(TokensArrived(1, 0, tokens(5, 6))) == []
    assert r.step(TokensArrived(1, 1, tokens(6, 7))) == [Deliver(2, tokens(7))]


def test_a_gap_in_the_tokens_ends_the_attempt_and_not_the_request() -> None:
    r = new()
    running(r)
    effects = r.step(TokensArrived(1, 3, tokens(9)))
    assert EndAt(D0, 1, "attempt failed") in effects
    assert PauseThenRetry(10) in effects


def test_tokens_of_a_former_owner_are_refused() -> None:
    r = new()
    running(r)
    r.step(TokensArrived(1, 0, tokens(5)))
    r.step(NodeDied(D0, OOPS))
    assert r.step(RetryDue()) == [Place((D0,))]
    assert r.step(Placed(D1, P0)) == [SendReserve(D1, P0, 2, 1)]
    assert r.step(TokensArrived(1, 1, tokens(66))) == []
    r.step(Reserved(2, needs_prefill=False))
    assert r.step(TokensArrived(2, 1, tokens(6), finish="length")) == [Deliver(1, tokens(6)), Succeed("length")]


def test_a_prefill_node_that_dies_after_the_hand_over_harms_nobody() -> None:
    r = new()
    running(r)
    r.step(PrefillEnded(1))
    assert r.step(NodeDied(P0, OOPS)) == []


def test_a_prefill_node_that_dies_in_the_hand_over_is_left_out_of_the_next_attempt() -> None:
    r = new()
    running(r)
    effects = r.step(NodeDied(P0, OOPS))
    assert EndAt(D0, 1, "attempt failed") in effects
    assert r.step(RetryDue()) == [Place((P0,))]


def test_attempts_end() -> None:
    r = new()
    r.step(Started())
    for attempt in (1, 2):
        effects = r.step(PlacementFailed(OOPS))
        assert effects == [NoteRetry(attempt, OOPS), PauseThenRetry(10 << (attempt - 1))]
        r.step(RetryDue())
    assert r.step(PlacementFailed(OOPS)) == [Fail(OOPS)]


def test_a_stop_string_ends_the_decode_node() -> None:
    r = new()
    running(r)
    r.step(PrefillEnded(1))
    assert r.step(TextComplete()) == [EndAt(D0, 1, "stop string"), Succeed("stop")]


def test_a_reserve_that_timed_out_is_ended_where_it_may_have_succeeded() -> None:
    r = new()
    r.step(Started())
    r.step(Placed(D0, P0))
    assert EndAt(D0, 1, "attempt failed") in r.step(ReserveFailed(1, OOPS, may_retry=True))


def test_a_hand_over_that_nobody_was_asked_for_ends_the_attempt() -> None:
    r = RequestRoute(max_attempts=1, retry_delay_ns=10)
    r.step(Started())
    r.step(Placed(D0, None))
    effects = r.step(Reserved(1, needs_prefill=True))
    assert effects[0] == EndAt(D0, 1, "attempt failed")
    assert isinstance(effects[-1], Fail)
    assert "nobody was asked for" in str(effects[-1].error)


@dataclass
class World:
    """What a gateway's actor and its nodes would hold: the oracle of what is reserved where."""

    route: RequestRoute
    held: set[tuple[NodeId, int]] = field(default_factory=set)
    dead: set[NodeId] = field(default_factory=set)
    shown: list[int] = field(default_factory=list)
    verdicts: list[Effect] = field(default_factory=list)

    def perform(self, effects: list[Effect]) -> None:
        for effect in effects:
            assert not self.verdicts
            match effect:
                case SendReserve(decode, _, epoch, num_confirmed):
                    assert num_confirmed == len(self.shown)
                    self.held.add((decode, epoch))
                case SendPrefill(prefill, _, epoch):
                    self.held.add((prefill, epoch))
                case EndAt(node_id, epoch):
                    self.held.discard((node_id, epoch))
                case Deliver(first_index, fresh):
                    assert first_index == len(self.shown)
                    self.shown += [t.token_id for t in fresh]
                case Succeed() | Fail() | Leave():
                    self.verdicts.append(effect)
                case _:
                    pass


ENABLED = {
    RouteState.PLACING: ("placed", "placed", "placed", "unplaced", "died", "stale"),
    RouteState.RESERVING: ("reserved", "reserved", "reserved", "refused", "died", "stale"),
    RouteState.RUNNING: ("prefilled", "tokens", "tokens", "lost", "stale", "decode_failed", "died", "died"),
    RouteState.FINISHING: ("prefilled", "died", "stale"),
    RouteState.WAITING: ("retry", "retry", "died", "stale"),
}


@given(
    st.lists(st.tuples(st.integers(0, 23), st.integers(0, 3), st.booleans()), max_size=40),
    st.sampled_from(["deadline", "gone", "text"]),
)
def test_whatever_happens_one_verdict_and_nothing_left_reserved(run: list[tuple[int, int, bool]], end: str) -> None:
    w = World(RequestRoute(max_attempts=6, retry_delay_ns=10))
    r = w.route
    w.perform(r.step(Started()))
    for choice, pick, flag in run:
        if r.state is RouteState.DONE:
            break
        enabled = ENABLED[r.state]
        event = _event(enabled[choice % len(enabled)], pick, flag, w)
        if event is None:
            continue
        if isinstance(event, PrefillEnded) and event.epoch == r.epoch and r.prefill is not None:
            w.held.discard((r.prefill, r.epoch))
        if isinstance(event, NodeDied):
            w.held = {(n, e) for n, e in w.held if n != event.node_id}
        if isinstance(event, TokensArrived) and event.finish and event.epoch == r.epoch and r.decode is not None:
            if event.first_index <= r.num_confirmed and r.state is RouteState.RUNNING:
                w.held.discard((r.decode, r.epoch))
        w.perform(r.step(event))
    ends: dict[str, Event] = {"deadline": DeadlinePassed(OOPS), "gone": ClientGone(), "text": TextComplete()}
    last = ends[end]
    w.perform(r.step(last))
    if r.state is RouteState.FINISHING and r.prefill is not None:
        w.held.discard((r.prefill, r.epoch))
        w.perform(r.step(PrefillEnded(r.epoch)))
    assert r.state is RouteState.DONE
    assert len(w.verdicts) == 1
    assert w.held == set()
    assert w.shown == list(range(len(w.shown)))


def _event(kind: str, pick: int, flag: bool, w: World) -> Event | None:
    r = w.route
    n = len(w.shown)
    match kind, r.state:
        case "placed", RouteState.PLACING:
            return Placed((D0, D1)[pick % 2], (P0, P1, None)[pick % 3])
        case "unplaced", RouteState.PLACING:
            return PlacementFailed(OOPS)
        case "reserved", RouteState.RESERVING:
            return Reserved(r.epoch, flag)
        case "refused", RouteState.RESERVING:
            return ReserveFailed(r.epoch, OOPS, flag)
        case "prefilled", (RouteState.RUNNING | RouteState.FINISHING) if r.prefill_running:
            return PrefillEnded(r.epoch, OOPS if flag else None)
        case "tokens", RouteState.RUNNING:
            start = max(0, n - pick)
            batch = tokens(*range(start, n + 2))
            return TokensArrived(r.epoch, start, batch, finish="stop" if flag and pick == 3 else None)
        case "lost", RouteState.RUNNING:
            return TokensArrived(r.epoch, n + 1 + pick, tokens(n + 1 + pick))
        case "stale", _:
            return TokensArrived(r.epoch - 1, n, tokens(999))
        case "decode_failed", RouteState.RUNNING:
            return DecodeFailed(r.epoch, OOPS, flag)
        case "died", _:
            return NodeDied((P0, P1, D0, D1)[pick], KVError(detail="died"))
        case "retry", RouteState.WAITING:
            return RetryDue()
        case _:
            return None

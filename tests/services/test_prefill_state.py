"""The prefill machine over a real pool: turns, fetching, hand-overs, fencing, and which bytes lie where when sent."""

import pytest

from kv_core.errors import LocalProtocolError
from kv_core.hashing import hash_tokens
from kv_core.ids import NodeId, RequestId
from kv_services.errors import (
    EpochFencedError,
    NodeDrainingError,
    NodeOverloadedError,
    PeerDiedError,
    RequestEndedError,
    RequestExpiredError,
    RequestTooLargeError,
)
from kv_services.node.announcements import WithdrawBlocks
from kv_services.node.prefill_events import (
    AbortHandover,
    CancelCompute,
    FinishHandover,
    HandoverEnded,
    OpenHandover,
    PrefillEndAsked,
    PrefillPeerDied,
    PrefillTimePassed,
    Pulled,
    PullPlan,
    ReplyDone,
    ReplyFailed,
    StartPrefill,
    StartPull,
)
from tests.services.helpers_prefill import NS, OOPS, STATS, D, G, H, R, ask, computed, machine, of, sent, serve


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

"""What every bus must do, over both carriers."""

import asyncio
import pickle
from collections.abc import Callable

import pytest

from kv_bus.errors import (
    AuthRefused,
    BusClosed,
    BusTimeout,
    ClosedWithOpenRequests,
    ConnectionLost,
    Draining,
    HandlerFailed,
    HandlerTaken,
    NoHandler,
    NoReply,
    PeerUnreachable,
    TooManyRequests,
    UnexpectedReply,
    UnknownPeer,
    WrongIncarnation,
)
from kv_bus.interface import DEFERRED, Deferred, PeerDown, PeerRefused, PeerRestarted, PeerState, PeerUp, Request
from kv_bus.limits import PEER_QUEUE_MAX, SEND_TTL_NS
from kv_core.errors import KVError, LocalProtocolError, RetryableError
from kv_core.ids import Incarnation, NodeId
from kv_core.wire import (
    Message,
    Registry,
    SchemaMismatchError,
    UnencodableMessageError,
    UnknownMessageTypeError,
    UnregisteredMessageError,
)
from tests.bus.helpers_bus import (
    MS,
    A,
    B,
    C,
    Echo,
    Echoed,
    Foreign,
    Listener,
    MuteStamper,
    Noted,
    OtherNoted,
    RefusingStamper,
    S,
    Scenario,
    Slow,
    World,
    frame,
    pack,
    run_world,
)

KINDS = ["memory", "zmq", "zmq-stock"]


class AppError(KVError):
    """An error of a service, known to both sides."""

    code = 2990
    template = "slot {slot} of {node} is taken"


@pytest.fixture(params=KINDS)
def run(request: pytest.FixtureRequest) -> Callable[[Scenario], None]:
    kind: str = request.param
    return lambda scenario: run_world(kind, scenario)


Run = Callable[[Scenario], None]


def test_a_request_gets_its_reply(run: Run) -> None:
    async def scenario(world: World) -> None:
        a, b = await world.node(A), await world.node(B)
        reply = await a.request(B, Echo(b"body", 7), expect=Echoed, timeout_ns=20 * S)
        assert (reply.body, reply.number) == (b"body", 7)
        back = await b.request(A, Echo(b"back"), timeout_ns=20 * S)
        assert back == Echoed(b"back")
        assert a.stats().calls.waiting == b.stats().calls.waiting == 0

    run(scenario)


def test_many_requests_at_once_each_get_their_own_reply(run: Run) -> None:
    async def scenario(world: World) -> None:
        a, _ = await world.node(A), await world.node(B)
        replies = await asyncio.gather(
            *(a.request(B, Echo(b"x" * (n % 50), n), expect=Echoed, timeout_ns=20 * S) for n in range(600))
        )
        assert [reply.number for reply in replies] == list(range(600))
        assert [len(reply.body) for reply in replies] == [n % 50 for n in range(600)]

    run(scenario)


def test_requests_to_one_peer_arrive_in_the_order_they_were_made(run: Run) -> None:
    async def scenario(world: World) -> None:
        a, b = await world.node(A), await world.node(B)
        seen: list[int] = []

        def on_noted(request: Request[Noted]) -> None:
            seen.append(request.message.number)

        b.handle(Noted, on_noted)
        for number in range(500):  # the first ones wait for the link
            a.send(B, Noted(number))
        await world.until(lambda: len(seen) == 500)
        for number in range(500, 700):
            a.send(B, Noted(number))
        await world.until(lambda: len(seen) == 700)
        assert seen == list(range(700))

    run(scenario)


def test_a_handler_sees_who_asked_in_which_life_and_until_when(run: Run) -> None:
    async def scenario(world: World) -> None:
        a, b = await world.node(A, 5), await world.node(B)
        seen: list[Request[Slow]] = []

        def on_slow(request: Request[Slow]) -> Message:
            seen.append(request)
            return Noted(1)

        b.handle(Slow, on_slow)
        before = world.clock.monotonic_ns()
        await a.request(B, Slow(), timeout_ns=20 * S)
        (request,) = seen
        assert (request.sender, request.incarnation, request.wants_reply) == (A, 5, True)
        assert before < request.deadline_ns <= world.clock.monotonic_ns() + 20 * S
        assert request.stamp.node_id == A and request.done

    run(scenario)


def test_an_error_of_the_handler_is_raised_at_the_caller_with_its_fields(run: Run) -> None:
    async def scenario(world: World) -> None:
        a, b = await world.node(A), await world.node(B)

        def on_slow(request: Request[Slow]) -> Message:
            raise AppError(slot=7, node=B)

        b.handle(Slow, on_slow)
        with pytest.raises(AppError, match="slot 7 of node-b is taken") as caught:
            await a.request(B, Slow(), timeout_ns=20 * S)
        assert caught.value.fields == {"slot": 7, "node": "node-b"}

    run(scenario)


def test_a_bug_of_a_handler_reaches_the_caller_typed_and_the_process_loudly() -> None:
    async def scenario(world: World) -> None:
        loop, told = asyncio.get_running_loop(), []
        loop.set_exception_handler(lambda _, context: told.append(context["exception"]))
        a, b = await world.node(A), await world.node(B)

        async def on_slow(request: Request[Slow]) -> Message:
            raise ZeroDivisionError("secret detail")

        b.handle(Slow, on_slow)
        with pytest.raises(HandlerFailed) as caught:
            await a.request(B, Slow(), timeout_ns=20 * S)
        assert "secret" not in str(caught.value)
        assert [type(error) for error in told] == [ZeroDivisionError]
        assert (await a.request(B, Echo(b"still there"))) == Echoed(b"still there")

    run_world("memory", scenario)
    run_world("zmq", scenario)


def test_a_handler_may_answer_later(run: Run) -> None:
    async def scenario(world: World) -> None:
        a, b = await world.node(A), await world.node(B)
        kept: list[Request[Slow]] = []

        def on_slow(request: Request[Slow]) -> Deferred:
            kept.append(request)
            return DEFERRED

        b.handle(Slow, on_slow)
        calls = [asyncio.ensure_future(a.request(B, Slow(n), timeout_ns=20 * S)) for n in range(3)]
        await world.until(lambda: len(kept) == 3)
        assert [(found.sender, found.message) for found in b.open_requests()] == [(A, "Slow")] * 3
        kept[2].reply(Noted(2))
        kept[0].reply(Noted(0))
        kept[1].fail(AppError(slot=1, node=B))
        assert await calls[0] == Noted(0)
        assert await calls[2] == Noted(2)
        with pytest.raises(AppError):
            await calls[1]
        assert b.open_requests() == ()
        with pytest.raises(LocalProtocolError):
            kept[0].reply(Noted(0))

    run(scenario)


def test_an_async_handler_runs_beside_the_others(run: Run) -> None:
    async def scenario(world: World) -> None:
        a, b = await world.node(A), await world.node(B)
        gate = asyncio.Event()

        async def on_slow(request: Request[Slow]) -> Message:
            await gate.wait()
            return Noted(request.message.number)

        b.handle(Slow, on_slow)
        slow = asyncio.ensure_future(a.request(B, Slow(3), timeout_ns=20 * S))
        assert await a.request(B, Echo(b"quick"), timeout_ns=20 * S) == Echoed(b"quick")
        assert not slow.done() and b.stats().handler_jobs == 1
        gate.set()
        assert await slow == Noted(3)
        await world.until(lambda: b.stats().handler_jobs == 0)

    run(scenario)


def test_a_handler_that_gives_no_reply_fails_its_caller_at_once(run: Run) -> None:
    async def scenario(world: World) -> None:
        a, b = await world.node(A), await world.node(B)
        b.handle(Slow, lambda request: None)
        with pytest.raises(NoReply):
            await a.request(B, Slow(), timeout_ns=20 * S)

    run(scenario)


def test_a_reply_of_another_type_than_expected_is_an_error(run: Run) -> None:
    async def scenario(world: World) -> None:
        a, _ = await world.node(A), await world.node(B)
        with pytest.raises(UnexpectedReply, match="Echoed, expected Noted"):
            await a.request(B, Echo(b""), expect=Noted, timeout_ns=20 * S)

    run(scenario)


def test_a_deadline_ends_the_wait_and_the_late_reply_reaches_nobody(run: Run) -> None:
    async def scenario(world: World) -> None:
        a, b = await world.node(A), await world.node(B)
        await a.request(B, Echo(b"link is up"), timeout_ns=20 * S)
        kept: list[Request[Slow]] = []
        abandoned: list[bool] = []

        def on_slow(request: Request[Slow]) -> Deferred:
            kept.append(request)
            request.on_abandoned(lambda: abandoned.append(True))
            return DEFERRED

        b.handle(Slow, on_slow)
        with pytest.raises(BusTimeout, match="did not answer Slow within 100 ms"):
            await a.request(B, Slow(), timeout_ns=100 * MS)
        await world.until(lambda: abandoned == [True])
        assert kept[0].done and b.open_requests() == ()
        kept[0].reply(Noted(1))
        assert b.stats().replies_dropped == 1
        assert await a.request(B, Echo(b"next"), timeout_ns=20 * S) == Echoed(b"next")
        assert a.stats().calls.expired == 1

    run(scenario)


def test_a_deadline_cancels_the_handler_that_works_for_it(run: Run) -> None:
    async def scenario(world: World) -> None:
        a, b = await world.node(A), await world.node(B)
        ended: list[str] = []

        async def on_slow(request: Request[Slow]) -> Message:
            try:
                await asyncio.sleep(3600)
            except asyncio.CancelledError:
                ended.append("cancelled")
                raise
            return Noted(1)

        b.handle(Slow, on_slow)
        with pytest.raises(BusTimeout):
            await a.request(B, Slow(), timeout_ns=200 * MS)
        await world.until(lambda: ended == ["cancelled"])
        await world.until(lambda: b.stats().handler_jobs == 0)

    run(scenario)


def test_a_caller_that_is_cancelled_cancels_the_handler_too(run: Run) -> None:
    async def scenario(world: World) -> None:
        a, b = await world.node(A), await world.node(B)
        states: list[str] = []

        async def on_slow(request: Request[Slow]) -> Message:
            states.append("began")
            try:
                await asyncio.sleep(3600)
            finally:
                states.append("ended")
            return Noted(1)

        b.handle(Slow, on_slow)
        call = asyncio.ensure_future(a.request(B, Slow(), timeout_ns=3000 * S))
        await world.until(lambda: states == ["began"])
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        await world.until(lambda: states == ["began", "ended"])
        await world.until(lambda: b.stats().open_requests == 0 and b.stats().handler_jobs == 0)
        assert a.stats().calls.waiting == 0

    run(scenario)


def test_a_call_cancelled_before_it_left_is_never_sent(run: Run) -> None:
    async def scenario(world: World) -> None:
        a = await world.node(A)
        outcomes: list[object] = []
        call = a.call(B, Echo(b"never"), outcomes.append, timeout_ns=30 * S)
        call.cancel()
        call.cancel()
        b = await world.node(B)
        assert await a.request(B, Echo(b"seen"), timeout_ns=20 * S) == Echoed(b"seen")
        assert outcomes == [] and b.stats().requests_received == 1

    run(scenario)


def test_a_message_too_large_is_refused_before_it_is_sent_and_the_largest_passes(run: Run) -> None:
    async def scenario(world: World) -> None:
        a, _ = await world.node(A), await world.node(B)
        with pytest.raises(UnencodableMessageError, match="the limit is"):
            await a.request(B, Echo(b"x" * (8 << 20)))
        body = b"x" * ((8 << 20) - 200)
        assert await a.request(B, Echo(body), timeout_ns=20 * S) == Echoed(body)

    run(scenario)


def test_a_reply_too_large_is_an_error_on_both_sides() -> None:
    async def scenario(world: World) -> None:
        told: list[BaseException] = []
        asyncio.get_running_loop().set_exception_handler(lambda _, context: told.append(context["exception"]))
        a, b = await world.node(A), await world.node(B)
        kept: list[Request[Slow]] = []

        def on_slow(request: Request[Slow]) -> Deferred:
            kept.append(request)
            return DEFERRED

        b.handle(Slow, on_slow)
        call = asyncio.ensure_future(a.request(B, Slow(), timeout_ns=20 * S))
        await world.until(lambda: bool(kept))
        with pytest.raises(UnencodableMessageError):
            kept[0].reply(Echoed(b"x" * (9 << 20)))
        with pytest.raises(HandlerFailed):
            await call

    run_world("memory", scenario)
    run_world("zmq", scenario)


def test_a_type_without_handler_and_a_type_unknown_to_the_peer_are_typed_errors(run: Run) -> None:
    async def scenario(world: World) -> None:
        a = await world.node(A, registry=Registry(Echo, Echoed, Slow, Foreign))
        b = await world.node(B)
        with pytest.raises(NoHandler, match="node-b has no handler for Slow"):
            await a.request(B, Slow(), timeout_ns=20 * S)
        with pytest.raises(UnknownMessageTypeError, match=r"test\.foreign"):
            await a.request(B, Foreign(1), timeout_ns=20 * S)
        assert b.stats().refused == {"no_handler": 1, "UnknownMessageTypeError": 1}
        with pytest.raises(UnregisteredMessageError):
            await b.request(A, Foreign(1))

    run(scenario)


def test_a_reply_that_the_caller_does_not_understand_fails_the_call_at_once(run: Run) -> None:
    async def scenario(world: World) -> None:
        a = await world.node(A)
        b = await world.node(B, registry=Registry(Echo, Echoed, Slow, Foreign))
        b.handle(Slow, lambda request: Foreign(1))
        with pytest.raises(UnknownMessageTypeError):
            await a.request(B, Slow(), timeout_ns=20 * S)

    run(scenario)


def test_fields_that_do_not_fit_are_refused_with_the_reason(run: Run) -> None:
    async def scenario(world: World) -> None:
        a = await world.node(A, registry=Registry(Echo, Echoed, OtherNoted))
        b = await world.node(B)
        b.handle(Noted, lambda request: Noted(1))
        with pytest.raises(SchemaMismatchError, match=r"test\.noted"):
            await a.request(B, OtherNoted("one"), timeout_ns=20 * S)

    run(scenario)


def test_registering_twice_or_what_is_not_registered_is_refused(run: Run) -> None:
    async def scenario(world: World) -> None:
        a = await world.node(A)
        with pytest.raises(HandlerTaken):
            a.handle(Echo, lambda request: None)
        with pytest.raises(UnregisteredMessageError):
            a.handle(Foreign, lambda request: None)

    run(scenario)


def test_an_unknown_peer_is_refused_at_once(run: Run) -> None:
    async def scenario(world: World) -> None:
        a = await world.node(A)
        with pytest.raises(UnknownPeer, match="no peer named nobody"):
            await a.request(NodeId("nobody"), Echo(b""))
        a.remove_peer(B)
        with pytest.raises(UnknownPeer):
            a.send(B, Noted(1))
        with pytest.raises(UnknownPeer):
            a.subscribe(B, print, print)

    run(scenario)


def test_a_peer_that_is_not_there_is_unreachable_and_nothing_was_done(run: Run) -> None:
    async def scenario(world: World) -> None:
        a = await world.node(A)
        with pytest.raises(PeerUnreachable, match="no connection to node-b for Echo") as caught:
            await a.request(B, Echo(b""), timeout_ns=150 * MS)
        assert isinstance(caught.value, RetryableError)
        a.send(B, Noted(1))  # waits for a link, and is not missed
        await world.node(B)
        assert await a.request(B, Echo(b"now"), timeout_ns=20 * S) == Echoed(b"now")

    run(scenario)


def test_a_queue_to_an_absent_peer_is_bounded(run: Run) -> None:
    async def scenario(world: World) -> None:
        a = await world.node(A)
        with pytest.raises(RetryableError, match="queue to node-b is full"):
            for _ in range(PEER_QUEUE_MAX + 1):
                a.send(B, Noted(1))
        (status,) = [peer for peer in a.peers() if peer.address.node_id == B]
        assert status.queued == PEER_QUEUE_MAX
        with pytest.raises(RetryableError, match="is full"):
            await a.request(B, Echo(b""))

    run(scenario)


def test_a_silent_peer_delays_no_call_to_another(run: Run) -> None:
    async def scenario(world: World) -> None:
        a, b, _ = await world.node(A), await world.node(B), await world.node(C)
        await a.request(B, Echo(b"up"), timeout_ns=20 * S)

        def swallow(request: Request[Slow]) -> Deferred:
            return DEFERRED

        b.handle(Slow, swallow)
        stuck = [asyncio.ensure_future(a.request(B, Slow(n), timeout_ns=30 * S)) for n in range(200)]
        for number in range(20):
            reply = await a.request(C, Echo(b"", number), expect=Echoed, timeout_ns=20 * S)
            assert reply.number == number
        assert not any(call.done() for call in stuck)
        for call in stuck:
            call.cancel()
        await asyncio.gather(*stuck, return_exceptions=True)

    run(scenario)


def test_a_restarted_peer_is_a_new_incarnation_and_the_next_call_reaches_it(run: Run) -> None:
    async def scenario(world: World) -> None:
        a, b = await world.node(A), await world.node(B)
        listener = Listener()
        a.watch_peers(listener.peers.append)
        await a.request(B, Echo(b"first life"), timeout_ns=20 * S)
        await b.close()
        await world.until(lambda: isinstance(listener.peers[-1], PeerDown))
        await world.node(B, 2)
        assert await a.request(B, Echo(b"second life"), timeout_ns=20 * S) == Echoed(b"second life")
        kinds = [type(event) for event in listener.peers]
        assert kinds == [PeerUp, PeerDown, PeerRestarted, PeerUp]
        assert listener.peers[2] == PeerRestarted(B, Incarnation(2), Incarnation(1))
        (status,) = [peer for peer in a.peers() if peer.address.node_id == B]
        assert (status.state, status.incarnation, status.connects) == (PeerState.UP, 2, 2)

    run(scenario)


def test_a_call_meant_for_a_past_life_is_refused_and_not_handled(run: Run) -> None:
    async def scenario(world: World) -> None:
        a, b = await world.node(A), await world.node(B)
        await a.request(B, Echo(b""), timeout_ns=20 * S, incarnation=Incarnation(1))
        await b.close()
        await world.until(lambda: a.peers()[0].state is not PeerState.UP)
        b = await world.node(B, 2)
        with pytest.raises(WrongIncarnation, match="node-b is incarnation 2, the message was for 1"):
            await a.request(B, Echo(b""), timeout_ns=20 * S, incarnation=Incarnation(1))
        with pytest.raises(WrongIncarnation):
            a.send(B, Noted(1), incarnation=Incarnation(1))
        assert b.stats().requests_received == 0

    run(scenario)


def test_a_peer_that_dies_with_a_call_open_fails_it_at_once(run: Run) -> None:
    async def scenario(world: World) -> None:
        a, b = await world.node(A), await world.node(B)
        arrived: list[Request[Slow]] = []

        def on_slow(request: Request[Slow]) -> Deferred:
            arrived.append(request)
            return DEFERRED

        b.handle(Slow, on_slow)
        call = asyncio.ensure_future(a.request(B, Slow(), timeout_ns=3000 * S))
        await world.until(lambda: len(arrived) == 1)
        b._carrier.stop_receiving()
        await b._carrier.close()  # as a killed process: without the answers that `close` of the bus gives
        with pytest.raises(ConnectionLost, match="broke while Slow was unanswered"):
            await call

    run(scenario)


def test_a_closing_peer_answers_what_is_open_with_an_error(run: Run) -> None:
    async def scenario(world: World) -> None:
        a, b = await world.node(A), await world.node(B)
        arrived: list[Request[Slow]] = []

        def on_slow(request: Request[Slow]) -> Deferred:
            arrived.append(request)
            return DEFERRED

        b.handle(Slow, on_slow)
        call = asyncio.ensure_future(a.request(B, Slow(), timeout_ns=3000 * S))
        await world.until(lambda: len(arrived) == 1)
        await b.close()
        with pytest.raises(ClosedWithOpenRequests):
            await call

    run(scenario)


def test_a_draining_node_finishes_what_is_open_and_refuses_what_is_new(run: Run) -> None:
    async def scenario(world: World) -> None:
        a, b = await world.node(A), await world.node(B)
        gate = asyncio.Event()

        async def on_slow(request: Request[Slow]) -> Message:
            await gate.wait()
            return await b.request(A, Echo(b"a call of its own"), timeout_ns=20 * S)

        b.handle(Slow, on_slow)
        running = asyncio.ensure_future(b.run())
        call = asyncio.ensure_future(a.request(B, Slow(), timeout_ns=30 * S))
        await world.until(lambda: b.stats().open_requests == 1)
        drained = asyncio.ensure_future(b.drain(20 * S))
        with pytest.raises(Draining) as caught:
            await a.request(B, Echo(b"new"), timeout_ns=20 * S)
        assert isinstance(caught.value, RetryableError)
        gate.set()
        assert await call == Echoed(b"a call of its own")
        assert await drained is True
        await running
        with pytest.raises(BusClosed):
            await b.request(A, Echo(b""))

    run(scenario)


def test_a_drain_that_takes_too_long_is_cut_short_and_says_so(run: Run) -> None:
    async def scenario(world: World) -> None:
        a, b = await world.node(A), await world.node(B)
        b.handle(Slow, lambda request: DEFERRED)
        call = asyncio.ensure_future(a.request(B, Slow(), timeout_ns=30 * S))
        await world.until(lambda: b.stats().open_requests == 1)
        assert await b.drain(50 * MS) is False
        with pytest.raises(ClosedWithOpenRequests):
            await call

    run(scenario)


def test_a_draining_node_does_not_wait_for_farewells_to_the_dead(run: Run) -> None:
    async def scenario(world: World) -> None:
        a, b = await world.node(A), await world.node(B)
        await a.request(B, Echo(b""), timeout_ns=20 * S)
        await b.close()
        await world.until(lambda: a.peers()[0].state is not PeerState.UP)
        for number in range(3):
            a.send(B, Noted(number))
        # They would end by themselves in twice that time.
        assert await a.drain(SEND_TTL_NS // 2) is True
        assert a.stats().calls.waiting == 0
        assert a.stats().sends_dropped == 3

    run(scenario)


def test_a_draining_node_still_delivers_its_first_words(run: Run) -> None:
    async def scenario(world: World) -> None:
        a, b = await world.node(A), await world.node(B)
        seen: list[int] = []
        b.handle(Noted, lambda request: seen.append(request.message.number))
        a.send(B, Noted(7))  # the connection is not made yet
        assert await a.drain(20 * S) is True
        await world.until(lambda: seen == [7])

    run(scenario)


def test_a_node_that_can_say_nothing_any_more_still_closes(run: Run) -> None:
    async def scenario(world: World) -> None:
        stamper = MuteStamper(AppError(slot=1, node=B))
        a, b = await world.node(A), await world.node(B, stamper=stamper)
        b.handle(Slow, lambda request: DEFERRED)
        call = asyncio.ensure_future(a.request(B, Slow(), timeout_ns=30 * S))
        await world.until(lambda: b.stats().open_requests == 1)
        stamper.mute = True
        await b.close()
        with pytest.raises(ConnectionLost):
            await call
        assert b.stats().replies_dropped == 1

    run(scenario)


def test_closing_fails_own_calls_and_may_be_repeated(run: Run) -> None:
    async def scenario(world: World) -> None:
        a, b = await world.node(A), await world.node(B)
        b.handle(Slow, lambda request: DEFERRED)
        call = asyncio.ensure_future(a.request(B, Slow(), timeout_ns=30 * S))
        await world.until(lambda: b.stats().open_requests == 1)
        await asyncio.gather(a.close(), a.close())
        await a.close()
        with pytest.raises(BusClosed):
            await call
        with pytest.raises(BusClosed):
            a.publish(Noted(1))
        with pytest.raises(BusClosed):
            a.send(B, Noted(1))

    run(scenario)


def test_events_reach_subscribers_in_order_with_their_numbers(run: Run) -> None:
    async def scenario(world: World) -> None:
        a, b = await world.node(A), await world.node(B, 3)
        listener = Listener()
        subscription = a.subscribe(B, listener.on_event, listener.on_gap)
        await _subscribed(world, b, listener)
        base = listener.events[-1].sequence
        assert [b.publish(Noted(n)) for n in range(300)] == list(range(base + 1, base + 301))
        await world.until(lambda: listener.numbers()[-300:] == list(range(300)))
        event = listener.events[-1]
        assert (event.origin, event.incarnation, event.stamp.node_id) == (B, 3, B)
        subscription.close()
        subscription.close()
        count = len(listener.events)
        b.publish(Noted(1))
        await a.request(B, Echo(b""), timeout_ns=20 * S)
        await asyncio.sleep(0.05)
        assert len(listener.events) == count

    run(scenario)


def test_a_late_subscriber_is_told_what_it_missed_even_if_nothing_more_is_published(run: Run) -> None:
    async def scenario(world: World) -> None:
        a, b = await world.node(A), await world.node(B)
        for number in range(5):
            b.publish(Noted(number))
        await asyncio.sleep(0.1)
        listener, knowing = Listener(), Listener()
        a.subscribe(B, listener.on_event, listener.on_gap)
        a.subscribe(B, knowing.on_event, knowing.on_gap, incarnation=Incarnation(1), after=3)
        await world.until(lambda: bool(listener.gaps and knowing.gaps))
        assert listener.order == ["gap 1-5"]
        assert knowing.order == ["gap 4-5"]
        assert a.stats().gaps == 2

    run(scenario)


def test_an_event_that_cannot_be_read_is_a_gap_and_later_ones_still_arrive(run: Run) -> None:
    async def scenario(world: World) -> None:
        a = await world.node(A)
        b = await world.node(B, registry=Registry(Noted, Foreign))
        listener = Listener()
        a.subscribe(B, listener.on_event, listener.on_gap)
        await _subscribed(world, b, listener)
        listener.order.clear()
        lost = b.publish(Foreign(1))
        b.publish(Noted(2))
        await world.until(lambda: len(listener.order) == 2)
        assert listener.order == [f"gap {lost}-{lost}", f"event {lost + 1}"]
        assert a.stats().refused["UnknownMessageTypeError"] == 1

    run(scenario)


def test_a_restarted_publisher_begins_anew_and_the_subscriber_is_told(run: Run) -> None:
    async def scenario(world: World) -> None:
        a, b = await world.node(A), await world.node(B)
        listener = Listener()
        restarts: list[tuple[int, int]] = []
        a.subscribe(
            B,
            listener.on_event,
            listener.on_gap,
            on_restart=lambda event: restarts.append((event.previous, event.incarnation)),
        )
        await _subscribed(world, b, listener)
        await b.close()
        b = await world.node(B, 2)
        listener.order.clear()
        await _subscribed(world, b, listener)
        assert restarts == [(1, 2)]
        assert {event.incarnation for event in listener.events} == {1, 2}

    run(scenario)


def test_an_impersonator_is_refused_and_the_node_lives(run: Run) -> None:
    async def scenario(world: World) -> None:
        a, b = await world.node(A), await world.node(B)
        await a.request(B, Echo(b""), timeout_ns=20 * S)
        received = b.stats().requests_received
        await world.inject(C, B, frame(Echo(b"I am node-a"), A))
        await world.until(lambda: b.stats().refused.get("impersonation") == 1)
        assert b.stats().requests_received == received
        assert await a.request(B, Echo(b"me"), timeout_ns=20 * S) == Echoed(b"me")

    run(scenario)


def test_a_message_of_a_past_life_or_for_another_life_is_refused(run: Run) -> None:
    async def scenario(world: World) -> None:
        a, b = await world.node(A, 7), await world.node(B, 4)
        await a.request(B, Echo(b""), timeout_ns=20 * S)
        received = b.stats().requests_received
        await world.inject(A, B, frame(Echo(b"ghost"), A, incarnation=6, target=4))
        await world.inject(A, B, frame(Echo(b"late"), A, incarnation=7, target=3))
        await world.inject(A, B, frame(Echo(b"nobody's"), A, incarnation=7, target=0))
        await world.inject(A, B, frame(Echo(b"lifeless"), A, incarnation=0, target=4))
        await world.until(lambda: b.stats().refused == {"past_life": 2, "not_for_this_life": 2})
        assert b.stats().requests_received == received

    run(scenario)


GARBAGE = {
    "empty": b"",
    "text": b"GET / HTTP/1.1\r\n\r\n",
    "nil": pack(None),
    "a map": pack({"op": "run"}),
    "an envelope too short": pack([1, "node-c"]),
    "another version": pack([99, "node-c", 1, 1, 0, 0, 1, 1, ["test.echo", b""]]),
    "a body without type": pack([1, "node-c", 1, 1, 0, 0, 1, 1, []]),
    "deep nesting": b"\x91" * 5_000 + b"\xc0",
    "deep nesting in a body": pack([1, "node-c", 1, 1, 0, 0, 1, 1])[: -0 or None] + b"\x91" * 3_000,
    "a list of 2**32 elements": b"\xdd\xff\xff\xff\xff",
    "a binary of 1 GiB": b"\xc6\x40\x00\x00\x00",
    "a string of 4 GiB": b"\xdb\xff\xff\xff\xff",
    "an ext type": b"\xc7\x04\x05abcd",
    "a negative incarnation": pack([1, "node-c", -1, 1, 0, 0, 1, 1, ["test.echo", b""]]),
    "a pickle": pickle.dumps({"cmd": "touch"}),
}


class _Touch:
    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, tuple[str, str]]:
        return open, (self.path, "w")


def test_garbage_is_counted_and_the_node_lives(run: Run, tmp_path: object) -> None:
    path = f"{tmp_path}/pickled"

    async def scenario(world: World) -> None:
        a, b = await world.node(A), await world.node(B)
        sent = 0
        for data in [*GARBAGE.values(), pickle.dumps(_Touch(path))]:
            if data:
                await world.inject(C, B, data)
                sent += 1
        await world.until(lambda: sum(b.stats().refused.values()) == sent)
        assert set(b.stats().refused) <= {"MalformedMessageError", "UnsupportedWireVersionError"}
        assert b.stats().requests_received == 0
        assert await a.request(B, Echo(b"alive"), timeout_ns=20 * S) == Echoed(b"alive")

    run(scenario)
    with pytest.raises(FileNotFoundError):
        open(path).close()


def test_a_stamp_that_our_clock_refuses_refuses_its_message(run: Run) -> None:
    async def scenario(world: World) -> None:
        a = await world.node(A)
        b = await world.node(B, stamper=RefusingStamper(AppError(slot=1, node=B)))
        with pytest.raises(AppError):
            await a.request(B, Echo(b""), timeout_ns=300 * MS)
        assert b.stats().requests_received == 0 and b.stats().refused["stamp"] >= 1

    run(scenario)


def test_a_node_whose_key_is_not_admitted_gets_a_typed_error_and_is_let_in_later(run: Run) -> None:
    async def scenario(world: World) -> None:
        a, b = await world.node(A), await world.node(B)
        listener = Listener()
        a.watch_peers(listener.peers.append)
        world.bar(A)
        await _settled()
        with pytest.raises(AuthRefused, match="node-b refused: it does not admit our key"):
            await a.request(B, Echo(b""), timeout_ns=20 * S)
        assert [type(event) for event in listener.peers] == [PeerRefused]
        with pytest.raises(AuthRefused):  # at once, without waiting for another hand-shake
            await a.request(B, Echo(b""), timeout_ns=20 * S)
        world.admit(A)
        await asyncio.sleep(0.3)
        assert await a.request(B, Echo(b"in"), timeout_ns=20 * S) == Echoed(b"in")
        assert b.stats().requests_received == 1

    run(scenario)


def test_a_node_that_loses_its_key_is_cut_off_at_once(run: Run) -> None:
    async def scenario(world: World) -> None:
        a, b = await world.node(A), await world.node(B)
        heard = Listener()
        a.subscribe(B, heard.on_event, heard.on_gap)
        await _subscribed(world, b, heard)
        await a.request(B, Echo(b""), timeout_ns=20 * S)
        await b.request(A, Echo(b""), timeout_ns=20 * S)
        received = b.stats().requests_received
        world.bar(A)
        await _settled()
        with pytest.raises(AuthRefused):
            await b.request(A, Echo(b""), timeout_ns=20 * S)
        with pytest.raises(AuthRefused):
            await a.request(B, Echo(b""), timeout_ns=20 * S)
        count = len(heard.events)
        await asyncio.sleep(0.3)
        b.publish(Noted(99))
        await asyncio.sleep(0.3)
        assert len(heard.events) == count, "a node without key still hears events"
        assert b.stats().requests_received == received

    run(scenario)


def test_unanswered_requests_of_one_peer_are_bounded(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kv_bus.serving.OPEN_REQUESTS_PER_PEER", 5)

    async def scenario(world: World) -> None:
        a, b = await world.node(A), await world.node(B)
        kept: list[Request[Slow]] = []

        def on_slow(request: Request[Slow]) -> Deferred:
            kept.append(request)
            return DEFERRED

        b.handle(Slow, on_slow)
        calls = [asyncio.ensure_future(a.request(B, Slow(n), timeout_ns=30 * S)) for n in range(6)]
        with pytest.raises(TooManyRequests):
            await calls[5]
        for request in kept:
            request.reply(Noted(request.message.number))
        assert await asyncio.gather(*calls[:5]) == [Noted(n) for n in range(5)]

    run(scenario)


def test_a_message_that_arrives_twice_while_open_is_handled_once(run: Run) -> None:
    async def scenario(world: World) -> None:
        b = await world.node(B)
        kept: list[Request[Slow]] = []

        def on_slow(request: Request[Slow]) -> Deferred:
            kept.append(request)
            return DEFERRED

        b.handle(Slow, on_slow)
        twice = frame(Slow(1), A, call_id=9)
        await world.inject(A, B, twice)
        await world.inject(A, B, twice)
        await world.until(lambda: b.stats().refused.get("repeat") == 1)
        assert len(kept) == 1

    run(scenario)


def test_a_callback_that_raises_is_reported_and_stops_nothing() -> None:
    async def scenario(world: World) -> None:
        told: list[BaseException] = []
        asyncio.get_running_loop().set_exception_handler(lambda _, context: told.append(context["exception"]))
        a, _ = await world.node(A), await world.node(B)

        def explode(outcome: object) -> None:
            raise ZeroDivisionError

        a.call(B, Echo(b""), explode, timeout_ns=20 * S)
        assert await a.request(B, Echo(b"next"), timeout_ns=20 * S) == Echoed(b"next")
        assert [type(error) for error in told] == [ZeroDivisionError]

    run_world("memory", scenario)
    run_world("zmq", scenario)


async def _subscribed(world: World, publisher: object, listener: Listener) -> None:
    """Publish until the subscription is known to work."""
    before = len(listener.events)
    until_ns = world.clock.monotonic_ns() + 20 * S
    while len(listener.events) == before:
        assert world.clock.monotonic_ns() < until_ns
        publisher.publish(Noted(-1))  # type: ignore[attr-defined]
        await asyncio.sleep(0.02)
    await asyncio.sleep(0.1)


async def _settled() -> None:
    """Longer than the list is looked at again."""
    await asyncio.sleep(1.2)

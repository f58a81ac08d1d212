"""What every bus must do, over both carriers: requests and their replies."""

import asyncio

import pytest

from kv_bus.errors import (
    BusTimeout,
    HandlerFailed,
    HandlerTaken,
    NoHandler,
    NoReply,
    UnexpectedReply,
    UnknownPeer,
)
from kv_bus.interface import DEFERRED, Deferred, Request
from kv_core.errors import LocalProtocolError
from kv_core.ids import NodeId
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
    AppError,
    B,
    Echo,
    Echoed,
    Foreign,
    Noted,
    OtherNoted,
    Run,
    S,
    Slow,
    World,
    run_world,
)


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

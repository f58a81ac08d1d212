"""What every bus must do, over both carriers, when peers are absent, die, restart, drain or close."""

import asyncio

import pytest

from kv_bus.endpoint import Endpoint
from kv_bus.errors import (
    BusClosed,
    ClosedWithOpenRequests,
    ConnectionLost,
    Draining,
    PeerUnreachable,
    WrongIncarnation,
)
from kv_bus.interface import DEFERRED, Deferred, PeerDown, PeerRestarted, PeerState, PeerUp, Request
from kv_bus.limits import PEER_QUEUE_MAX, SEND_TTL_NS
from kv_core.errors import RetryableError
from kv_core.ids import Incarnation
from kv_core.wire import (
    Message,
)
from tests.bus.helpers_bus import (
    MS,
    A,
    AppError,
    B,
    C,
    Echo,
    Echoed,
    Listener,
    MuteStamper,
    Noted,
    Run,
    S,
    Slow,
    World,
)


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


async def unanswered(world: World, a: Endpoint, b: Endpoint) -> "asyncio.Future[Message]":
    """A call from `a` that has reached its handler at `b`, which does not answer."""
    arrived: list[Request[Slow]] = []

    def on_slow(request: Request[Slow]) -> Deferred:
        arrived.append(request)
        return DEFERRED

    b.handle(Slow, on_slow)
    call = asyncio.ensure_future(a.request(B, Slow(), timeout_ns=3000 * S))
    await world.until(lambda: len(arrived) == 1)
    return call


def test_a_peer_that_dies_with_a_call_open_fails_it_at_once(run: Run) -> None:
    async def scenario(world: World) -> None:
        a, b = await world.node(A), await world.node(B)
        call = await unanswered(world, a, b)
        b._carrier.stop_receiving()
        await b._carrier.close()  # as a killed process: without the answers that `close` of the bus gives
        with pytest.raises(ConnectionLost, match="broke while Slow was unanswered"):
            await call

    run(scenario)


def test_a_closing_peer_answers_what_is_open_with_an_error(run: Run) -> None:
    async def scenario(world: World) -> None:
        a, b = await world.node(A), await world.node(B)
        call = await unanswered(world, a, b)
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

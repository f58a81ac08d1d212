"""What every bus must do, over both carriers, about impersonators, garbage, floods and keys that are not admitted."""

import asyncio
import pickle

import pytest

from kv_bus.errors import (
    AuthRefused,
    TooManyRequests,
)
from kv_bus.interface import DEFERRED, Deferred, PeerRefused, Request
from tests.bus.helpers_bus import (
    MS,
    A,
    AppError,
    B,
    C,
    Echo,
    Echoed,
    Listener,
    Noted,
    RefusingStamper,
    Run,
    S,
    Slow,
    World,
    frame,
    pack,
    run_world,
    settled,
    subscribed,
)


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
        await settled()
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
        await subscribed(world, b, heard)
        await a.request(B, Echo(b""), timeout_ns=20 * S)
        await b.request(A, Echo(b""), timeout_ns=20 * S)
        received = b.stats().requests_received
        world.bar(A)
        await settled()
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

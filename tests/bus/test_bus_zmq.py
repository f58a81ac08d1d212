"""What only ZeroMQ can get wrong: sockets, frames, ports, turns of the loop."""

import asyncio
import gc
import logging
import os
import socket
import struct

import pytest
import zmq

from kv_bus.control import CONTROL, HelloReply
from kv_bus.errors import BindFailed
from kv_bus.interface import Request
from kv_bus.keys import generate_key_pair
from kv_bus.limits import PUMP_TURN_MESSAGES
from kv_bus.ports import ephemeral_range
from kv_bus.zmq_bus.monitor import ConnectionEvent
from kv_bus.zmq_bus.packets import split
from kv_core.limits import MAX_MESSAGE_BYTES
from kv_core.wire import Envelope, Registry, decode
from tests.bus.helpers_bus import (
    REGISTRY,
    A,
    B,
    C,
    Echo,
    Echoed,
    Listener,
    Noted,
    S,
    Slow,
    ZmqWorld,
    frame,
    is_alive,
    packet,
    run_zmq,
)


def test_two_clusters_on_one_host_both_work() -> None:
    async def scenario(world: ZmqWorld) -> None:
        other = ZmqWorld()
        try:
            for each in (world, other):
                await each.node(A)
                await each.node(B)
            await asyncio.gather(is_alive(world), is_alive(other))
        finally:
            await other.close()

    run_zmq(scenario)


GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x00" + b"NULL".ljust(20, b"\0") + b"\0" + bytes(31)

RAW = {
    "text": b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
    "zeros": bytes(4096),
    "a greeting without CURVE": GREETING,
    "a frame of 1 GiB": GREETING.replace(b"NULL\0", b"CURVE") + b"\x02" + struct.pack(">Q", 1 << 30) + b"x" * 100,
    "a frame of 2**63 bytes": GREETING.replace(b"NULL\0", b"CURVE") + b"\x06" + struct.pack(">Q", 1 << 63),
    "an old protocol": b"\x01\x00",
}


@pytest.mark.parametrize("name", RAW)
def test_raw_bytes_on_either_port_do_no_harm(name: str) -> None:
    async def scenario(world: ZmqWorld) -> None:
        a, b = await world.node(A), await world.node(B)
        listener = Listener()
        a.subscribe(B, listener.on_event, listener.on_gap)
        raws = []
        try:
            for port in world.ports[B]:
                raw = socket.create_connection(("127.0.0.1", port))
                raws.append(raw)
                raw.sendall(RAW[name])
            await asyncio.sleep(0.1)
            await is_alive(world)
            await world.until(lambda: b.publish(Noted(1)) > 0 and bool(listener.events))
        finally:
            for raw in raws:
                raw.close()

    run_zmq(scenario)


def test_bad_packets_and_many_parts_from_an_admitted_key_are_counted() -> None:
    async def scenario(world: ZmqWorld) -> None:
        await world.node(A)
        b = await world.node(B)
        good = frame(Echo(b""), C)
        for parts in (
            [b""],
            [b"\0\0\0\1"],
            [packet(good)[:-1]],
            [packet(good) + b"x"],
            [struct.pack(">II", 1, 1 << 30)],
            [packet(good), packet(good)],
            [b"x"] * 1000,
        ):
            await world.inject_packet(C, B, parts)
        await world.until(lambda: b.stats().refused == {"bad_packet": 5, "several_parts": 2})
        await world.inject_packet(C, B, [packet(good, good)])
        await world.until(lambda: b.stats().requests_received == 2)
        await is_alive(world)

    run_zmq(scenario)


def test_a_frame_beyond_the_limit_ends_its_connection_unread() -> None:
    async def scenario(world: ZmqWorld) -> None:
        await world.node(A)
        b = await world.node(B)
        await world.inject_packet(C, B, [bytes(MAX_MESSAGE_BYTES + 4096)])
        await asyncio.sleep(0.5)
        assert b.stats().bytes_received == 0 and b.stats().refused == {}
        await is_alive(world)

    run_zmq(scenario)


def test_a_taken_port_is_an_error_after_a_while_and_a_freed_one_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario(world: ZmqWorld) -> None:
        for index in (0, 1):
            with socket.socket() as blocker:
                # Connections of others that linger at a port keep nobody from it.
                blocker.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                blocker.bind(("127.0.0.1", world.ports[A][index]))
                blocker.listen()
                monkeypatch.setattr("kv_bus.zmq_bus.carrier.BIND_RETRY_NS", S // 5)
                with pytest.raises(BindFailed, match="Address already in use"):
                    await world.node(A)
                monkeypatch.setattr("kv_bus.zmq_bus.carrier.BIND_RETRY_NS", 30 * S)
                freed = asyncio.get_running_loop().call_later(0.05, blocker.close)
                await world.node(A)
                freed.cancel()
                await world.nodes[A].close()

    run_zmq(scenario)


def test_a_port_in_the_ephemeral_range_is_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    async def scenario(world: ZmqWorld) -> None:
        first, _ = ephemeral_range()
        with caplog.at_level(logging.INFO):
            await world.node(A)
            assert not [record for record in caplog.records if "ephemeral" in record.message]
            for port in range(first, first + 200):
                with socket.socket() as probe:
                    if probe.connect_ex(("127.0.0.1", port)) != 0:
                        break
            world.ports[B] = (port, world.ports[B][1])
            await world.node(B)
        assert [record for record in caplog.records if f"port {port} is in the ephemeral range" in record.message]

    run_zmq(scenario)


def test_the_version_is_logged_at_the_start_and_a_secret_never(caplog: pytest.LogCaptureFixture) -> None:
    async def scenario(world: ZmqWorld) -> None:
        await world.node(A)
        b = await world.node(B)
        await is_alive(world)
        await world.inject(C, B, b"garbage")
        stranger = world.dealer(generate_key_pair(A), world.keys[B].public_key)
        stranger.connect(world.address(B).requests)
        await world.until(lambda: b.stats().auth_refused == 1 and bool(b.stats().refused))
        told = f"{world.nodes} {b.stats()} {world.keys} {b.peers()} " + caplog.text
        assert f"libzmq={zmq.zmq_version()}" in told and "curve=on" in told
        assert not any(pair.secret_key in told for pair in world.keys.values())

    with caplog.at_level(logging.DEBUG):
        run_zmq(scenario)


def test_one_turn_of_the_loop_reads_a_bounded_number_of_messages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kv_bus.zmq_bus.pump.PUMP_TURN_NS", S)  # so that only the number bounds it

    async def scenario(world: ZmqWorld) -> None:
        a, b = await world.node(A), await world.node(B)
        await is_alive(world)
        seen, per_turn, ticking = 0, [0], True

        def on_noted(request: Request[Noted]) -> None:
            nonlocal seen
            seen += 1
            per_turn[-1] += 1

        def tick() -> None:
            per_turn.append(0)
            if ticking:
                asyncio.get_running_loop().call_soon(tick)

        b.handle(Noted, on_noted)
        tick()
        for number in range(3000):
            a.send(B, Noted(number))
            if number % 500 == 499:
                await asyncio.sleep(0.01)
        await world.until(lambda: seen == 3000)
        ticking = False
        # The reader's callback and its own follow-up may fall into one turn.
        assert max(per_turn) <= 2 * PUMP_TURN_MESSAGES
        assert b.stats().turns_cut > 0

    run_zmq(scenario)


def test_a_turn_of_the_loop_is_bounded_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kv_bus.zmq_bus.pump.PUMP_TURN_NS", 0)

    async def scenario(world: ZmqWorld) -> None:
        a, b = await world.node(A), await world.node(B)
        seen = 0

        def on_noted(request: Request[Noted]) -> None:
            nonlocal seen
            seen += 1

        b.handle(Noted, on_noted)
        before = b.stats().turns_cut
        for number in range(64):
            a.send(B, Noted(number))
        await world.until(lambda: seen == 64)
        assert b.stats().turns_cut - before >= 64 // 8 - 1

    run_zmq(scenario)


class HandMadePeer:
    """Owns node B's key and address, and says whatever a test wants."""

    def __init__(self, world: ZmqWorld) -> None:
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.router = self._context.socket(zmq.ROUTER)
        self.router.curve_server = True
        self.router.curve_secretkey = world.keys[B].secret_key.encode()
        self.router.bind(world.address(B).requests)

    async def next(self) -> tuple[bytes, Envelope]:
        """The next message and where it came from."""
        while not self.router.poll(0):  # noqa: ASYNC110  # a plain socket signals no loop
            await asyncio.sleep(0.005)
        route, data = self.router.recv_multipart()
        (message,) = split(data)
        return route, decode(message, Registry().include(REGISTRY).include(CONTROL))

    def say(self, route: bytes, message: bytes) -> None:
        self.router.send_multipart([route, packet(message)])

    def close(self) -> None:
        self.router.close(200)
        self._context.term()


def test_a_reply_that_came_just_before_the_connection_broke_still_counts() -> None:
    async def scenario(world: ZmqWorld) -> None:
        a, peer = await world.node(A), HandMadePeer(world)
        call = asyncio.ensure_future(a.request(B, Echo(b"last"), timeout_ns=20 * S))
        route, hello = await peer.next()
        peer.say(route, frame(HelloReply("test"), B, call_id=hello.correlation_id))
        route, request = await peer.next()
        peer.say(route, frame(Echoed(b"words"), B, call_id=request.correlation_id))
        peer.close()
        (wire,) = a._carrier._dialer.wires  # type: ignore[attr-defined]
        assert wire._socket.poll(20_000), "the reply is there before the loop sees anything"
        wire._happened(ConnectionEvent.DISCONNECTED, 0)  # the worse of the two orders
        assert await call == Echoed(b"words")

    run_zmq(scenario)


def test_a_closed_bus_leaves_no_descriptor_and_its_ports_can_be_taken_again() -> None:
    async def scenario(world: ZmqWorld) -> None:
        counts = []
        for incarnation in range(1, 5):
            await world.node(A, incarnation)
            b = await world.node(B, incarnation)
            listener = Listener()
            b.subscribe(A, listener.on_event, listener.on_gap)
            await is_alive(world)
            await world.nodes[A].close()
            await b.close()
            gc.collect()
            counts.append(len(os.listdir("/proc/self/fd")))
        assert counts[-1] <= counts[0], counts

    run_zmq(scenario)


def test_replies_to_a_caller_that_does_not_read_are_bounded_and_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kv_bus.replies.REPLY_QUEUE_MAX", 20)
    monkeypatch.setattr("kv_bus.zmq_bus.sockets.SOCKET_HWM", 2)

    async def scenario(world: ZmqWorld) -> None:
        await world.node(A)
        b = await world.node(B)
        deaf = world.dealer(world.keys[C], world.keys[B].public_key)
        deaf.setsockopt(zmq.RCVHWM, 1)
        deaf.setsockopt(zmq.RCVBUF, 4096)
        deaf.connect(world.address(B).requests)
        sent = 0

        def heard() -> bool:
            """What is still on its way says nothing of what is dropped."""
            return b.stats().requests_received >= sent or b.stats().replies_dropped >= 10

        while b.stats().replies_dropped < 10 and sent < 400:
            for _ in range(10):
                sent += 1
                deaf.send(packet(frame(Echo(bytes(300_000)), C, call_id=sent)))
            await world.until(heard)
        assert b.stats().replies_dropped >= 10, "a deaf caller was fed without bound"
        await is_alive(world)

    run_zmq(scenario)


def test_a_flush_sends_messages_and_replies_before_the_turn_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario(world: ZmqWorld) -> None:
        a, b = await world.node(A), await world.node(B)
        await is_alive(world)
        sent: list[tuple[int, int]] = []
        send = zmq.Socket.send

        def watched(socket: zmq.Socket[bytes], data: bytes, flags: int) -> object:
            if socket.type == zmq.DEALER or (socket.type == zmq.ROUTER and zmq.SNDMORE not in zmq.Flag(flags)):
                sent.append((int(socket.type), len(split(data))))
            return send(socket, data, flags)

        monkeypatch.setattr(zmq.Socket, "send", watched)
        answered: list[tuple[int, int]] = []

        def on_slow(request: Request[Slow]) -> None:
            request.reply(Echoed(b"", request.message.number))
            before = len(sent)
            b.flush()
            answered.extend(sent[before:])

        b.handle(Slow, on_slow)
        replies: asyncio.Queue[object] = asyncio.Queue()
        a.call(B, Slow(1), replies.put_nowait, timeout_ns=20 * S)
        assert sent == []
        a.flush()
        assert sent == [(zmq.DEALER, 1)]
        a.flush()
        for number in (2, 3):
            a.call(B, Slow(number), replies.put_nowait, timeout_ns=20 * S)
        assert sent == [(zmq.DEALER, 1)], "what follows leaves together, at the end of the turn"
        assert [await replies.get() for _ in range(3)] == [Echoed(b"", number) for number in (1, 2, 3)]
        assert [one for one in sent if one[0] == zmq.DEALER] == [(zmq.DEALER, 1), (zmq.DEALER, 2)]
        assert answered == [(zmq.ROUTER, 1)] * 3

    run_zmq(scenario)

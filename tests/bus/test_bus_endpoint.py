"""The endpoint over a carrier in a test's hand: what a hostile or confused peer could send by its own connection."""

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from kv_bus.carrier import CarrierStats, EventSink, LinkSink, ReplyOutcome, RequestSink
from kv_bus.control import CONTROL, EventHead, Hello, HelloReply
from kv_bus.endpoint import Endpoint
from kv_bus.errors import BusTimeout, ConnectionLost, UnexpectedReply, WrongCluster, WrongIncarnation
from kv_bus.interface import DEFERRED, PeerAddress, PeerRestarted, PeerState
from kv_bus.limits import EVENT_HEAD_INTERVAL_NS, HELLO_TIMEOUT_NS, MAX_REQUEST_TIMEOUT_NS, SEND_TTL_NS
from kv_bus.stamps import LamportStamper
from kv_core.errors import KVError, LocalProtocolError
from kv_core.ids import Incarnation, NodeId
from kv_core.testing import LoopClock, run_virtual
from kv_core.wire import Envelope, ErrorReply, Message, Registry, SchemaMismatchError, decode
from tests.bus.helpers_bus import REGISTRY, A, B, C, Echo, Echoed, Foreign, Listener, Noted, OtherNoted, S, Slow, frame

KNOWN = Registry().include(REGISTRY).include(CONTROL)


class TestWire:
    """Remembers what was sent."""

    __test__ = False

    def __init__(self, sink: LinkSink) -> None:
        self.sink = sink
        self.sent: list[Envelope] = []
        self.reconnects = 0
        self.takes = True

    def send(self, data: bytes) -> bool:
        if self.takes:
            self.sent.append(decode(data, KNOWN))
        return self.takes

    def reconnect(self) -> None:
        self.reconnects += 1

    def close(self) -> None: ...

    def greet(self, incarnation: int = 1, message: Message | None = None) -> None:
        """Answer the greeting, as B would."""
        hello = self.sent[-1]
        assert isinstance(hello.body, Hello) and hello.target_incarnation == 0
        self.say(message or HelloReply("test"), hello.correlation_id, incarnation=incarnation)

    def say(self, message: Message, call_id: int, sender: str = B, incarnation: int = 1, target: int = 1) -> None:
        registry = Registry(Foreign, OtherNoted, Echoed)
        known = REGISTRY if type(message) in KNOWN.by_class or isinstance(message, ErrorReply) else registry
        self.sink.reply_arrived(
            frame(message, sender, incarnation=incarnation, target=target, call_id=call_id, registry=known)
        )


class TestCarrier:
    """Does nothing by itself."""

    __test__ = False
    cluster = "test"

    def __init__(self) -> None:
        self.wires: dict[str, TestWire] = {}
        self.event_sinks: dict[str, EventSink] = {}
        self.replies: list[Envelope] = []
        self.published: list[tuple[float, Envelope]] = []
        self.outcome = ReplyOutcome.SENT
        self.sink: RequestSink | None = None

    async def open(self, sink: RequestSink) -> None:
        self.sink = sink

    def stop_receiving(self) -> None: ...

    async def close(self) -> None: ...

    def key_of(self, node_id: NodeId) -> str:
        return "key"

    def check_address(self, peer: PeerAddress) -> None: ...

    def connect(self, peer: PeerAddress, sink: LinkSink) -> TestWire:
        wire = self.wires[peer.node_id] = TestWire(sink)
        return wire

    def subscribe(self, peer: PeerAddress, sink: EventSink) -> TestWire:
        self.event_sinks[peer.node_id] = sink
        return TestWire(sink)  # type: ignore[arg-type]

    def reply(self, route: bytes, data: bytes) -> ReplyOutcome:
        if self.outcome is ReplyOutcome.SENT:
            self.replies.append(decode(data, KNOWN))
        return self.outcome

    def publish(self, data: bytes) -> None:
        self.published.append((asyncio.get_running_loop().time(), decode(data, KNOWN)))

    def flush(self) -> None:
        """Nothing waits here."""

    def stats(self) -> CarrierStats:
        return CarrierStats()


Scenario = Callable[[Endpoint, TestCarrier], Awaitable[None]]


def run(scenario: Scenario) -> None:
    async def main(clock: LoopClock) -> None:
        carrier = TestCarrier()
        bus = Endpoint(A, Incarnation(1), REGISTRY, carrier, stamper=LamportStamper(A), clock=clock)
        for name in (B, C):
            bus.add_peer(PeerAddress(name, "", ""))
        await bus.start()
        await scenario(bus, carrier)
        await bus.close()

    run_virtual(main)


async def linked(bus: Endpoint, carrier: TestCarrier, name: NodeId = B, incarnation: int = 1) -> TestWire:
    """A link that is up, and nothing on it."""
    first = asyncio.ensure_future(bus.request(name, Echo(b"")))
    await asyncio.sleep(0)
    wire = carrier.wires[name]
    wire.sink.connected()
    hello = wire.sent[-1]
    wire.say(HelloReply("test"), hello.correlation_id, sender=name, incarnation=incarnation)
    wire.say(Echoed(b""), wire.sent[-1].correlation_id, sender=name, incarnation=incarnation)
    await first
    wire.sent.clear()
    return wire


def test_a_reply_counts_only_from_the_peer_and_life_that_was_asked() -> None:
    async def scenario(bus: Endpoint, carrier: TestCarrier) -> None:
        b, c = await linked(bus, carrier, B, 4), await linked(bus, carrier, C, 4)
        call = asyncio.ensure_future(bus.request(B, Echo(b"?"), timeout_ns=S))
        await asyncio.sleep(0)
        call_id = b.sent[-1].correlation_id
        assert b.sent[-1].target_incarnation == 4
        b.say(Echoed(b"as another"), call_id, sender=C, incarnation=4)
        c.say(Echoed(b"by another's link"), call_id, sender=C, incarnation=4)
        b.say(Echoed(b"of a past life"), call_id, incarnation=3)
        b.say(Echoed(b"to a past life of ours"), call_id, incarnation=4, target=0)
        b.say(Echoed(b"to nobody"), call_id + 7, incarnation=4)
        await asyncio.sleep(0)
        assert not call.done()
        assert bus.stats().refused == {"reply_not_for_us": 2, "stray_reply": 2, "past_life": 1}
        b.say(Echoed(b"right"), call_id, incarnation=4)
        assert await call == Echoed(b"right")

    run(scenario)


def test_a_new_life_that_answers_for_the_old_one_ends_all_calls_of_the_old() -> None:
    async def scenario(bus: Endpoint, carrier: TestCarrier) -> None:
        b, listener = await linked(bus, carrier), Listener()
        bus.watch_peers(listener.peers.append)
        calls = [asyncio.ensure_future(bus.request(B, Echo(b""), timeout_ns=S)) for _ in range(3)]
        await asyncio.sleep(0)
        ids = [envelope.correlation_id for envelope in b.sent]
        refusal = WrongIncarnation(node=B, expected=1, actual=2)
        b.say(ErrorReply.of(refusal), ids[0], incarnation=2)
        outcomes = await asyncio.gather(*calls, return_exceptions=True)
        assert [type(outcome) for outcome in outcomes] == [WrongIncarnation, ConnectionLost, ConnectionLost]
        assert PeerRestarted(B, Incarnation(2), Incarnation(1)) in listener.peers
        b.greet(2)
        assert bus.peers()[0].state is PeerState.UP
        # One that does not say that it refuses is not believed either.
        call = asyncio.ensure_future(bus.request(B, Echo(b""), timeout_ns=S))
        await asyncio.sleep(0)
        b.say(Echoed(b"I am somebody else by now"), b.sent[-1].correlation_id, incarnation=3)
        with pytest.raises(WrongIncarnation):
            await call

    run(scenario)


def test_a_reply_that_cannot_be_read_fails_its_call_with_the_reason() -> None:
    async def scenario(bus: Endpoint, carrier: TestCarrier) -> None:
        b = await linked(bus, carrier)
        call = asyncio.ensure_future(bus.request(B, Echo(b""), timeout_ns=S))
        await asyncio.sleep(0)
        call_id = b.sent[-1].correlation_id
        b.say(OtherNoted("x"), call_id, sender=C)  # a forged one does not end it
        await asyncio.sleep(0)
        assert not call.done()
        b.sink.reply_arrived(b"\x91" * 9)
        b.say(OtherNoted("x"), call_id)
        with pytest.raises(SchemaMismatchError):
            await call

    run(scenario)


@pytest.mark.parametrize(
    ("answer", "error"),
    [
        (HelloReply("other"), WrongCluster),
        (Echoed(b""), UnexpectedReply),
        (ErrorReply.of(WrongIncarnation(node=A, expected=1, actual=9)), WrongIncarnation),
    ],
)
def test_a_greeting_that_is_not_returned_as_it_should_fails_what_waits(answer: Message, error: type[KVError]) -> None:
    async def scenario(bus: Endpoint, carrier: TestCarrier) -> None:
        call = asyncio.ensure_future(bus.request(B, Echo(b""), timeout_ns=20 * S))
        await asyncio.sleep(0)
        carrier.wires[B].sink.connected()
        carrier.wires[B].greet(message=answer)
        with pytest.raises(error):
            await call
        assert bus.peers()[0].state is PeerState.REFUSED

    run(scenario)


def test_a_peer_that_takes_the_connection_but_does_not_speak_is_connected_anew() -> None:
    async def scenario(bus: Endpoint, carrier: TestCarrier) -> None:
        call = asyncio.ensure_future(bus.request(B, Echo(b""), timeout_ns=20 * S))
        await asyncio.sleep(0)
        wire = carrier.wires[B]
        wire.sink.connected()
        await asyncio.sleep(HELLO_TIMEOUT_NS / 1e9 + 0.01)
        assert wire.reconnects == 1 and bus.peers()[0].last_cause == "greeting unanswered"
        wire.greet()  # the answer to the greeting that was given up
        assert bus.peers()[0].state is PeerState.CONNECTING
        wire.sink.connected()
        wire.greet()
        wire.say(Echoed(b"at last"), wire.sent[-1].correlation_id)
        assert await call == Echoed(b"at last")

    run(scenario)


def test_a_busy_connection_holds_messages_back_in_order_and_a_deadline_still_ends_them() -> None:
    async def scenario(bus: Endpoint, carrier: TestCarrier) -> None:
        wire = await linked(bus, carrier)
        wire.takes = False
        late = asyncio.ensure_future(bus.request(B, Echo(b"", 0), timeout_ns=S))
        calls = [asyncio.ensure_future(bus.request(B, Echo(b"", n), timeout_ns=9 * S)) for n in (1, 2)]
        await asyncio.sleep(0)
        bus.send(B, Noted(3))
        assert bus.peers()[0].queued == 4 and wire.sent == []
        with pytest.raises(KVError, match="it takes no more messages"):
            await late
        wire.takes = True
        wire.sink.writable()
        assert [envelope.body for envelope in wire.sent] == [Echo(b"", 1), Echo(b"", 2), Noted(3)]
        assert wire.sent[2].correlation_id == 0 and 0 < wire.sent[0].deadline_ns < 9 * S
        for envelope in wire.sent[:2]:
            wire.say(Echoed(b""), envelope.correlation_id)
        await asyncio.gather(*calls)

    run(scenario)


def test_a_one_way_message_waits_only_so_long_and_is_then_counted() -> None:
    async def scenario(bus: Endpoint, carrier: TestCarrier) -> None:
        bus.send(B, Noted(1))
        await asyncio.sleep(SEND_TTL_NS / 1e9 + 0.01)
        assert bus.stats().sends_dropped == 1 and bus.peers()[0].queued == 0

    run(scenario)


def test_replies_to_a_busy_caller_wait_in_order_and_are_dropped_when_it_is_gone() -> None:
    async def scenario(bus: Endpoint, carrier: TestCarrier) -> None:
        sink = carrier.sink
        assert sink is not None
        bus.handle(Echo, lambda request: Echoed(b"", request.message.number))
        carrier.outcome = ReplyOutcome.BUSY
        for number in (1, 2):
            sink.request_arrived(B, b"route", frame(Echo(b"", number), B, call_id=number))
        carrier.outcome = ReplyOutcome.SENT
        sink.request_arrived(B, b"route", frame(Echo(b"", 3), B, call_id=3))  # must not overtake
        assert carrier.replies == []
        sink.replies_writable()
        assert [envelope.correlation_id for envelope in carrier.replies] == [1, 2, 3]
        assert bus.stats().replies_sent == 3
        carrier.outcome = ReplyOutcome.BUSY
        sink.request_arrived(B, b"route", frame(Echo(b""), B, call_id=4))
        carrier.outcome = ReplyOutcome.GONE
        sink.replies_writable()
        sink.request_arrived(B, b"route", frame(Echo(b""), B, call_id=5))
        assert bus.stats().replies_dropped == 2

    run(scenario)


def test_events_count_only_from_their_origin_and_with_a_number() -> None:
    async def scenario(bus: Endpoint, carrier: TestCarrier) -> None:
        listener = Listener()
        bus.subscribe(B, listener.on_event, listener.on_gap)
        sink = carrier.event_sinks[B]
        sink.event_arrived(frame(Noted(1), B, target=0, call_id=1))
        sink.event_arrived(frame(Noted(2), C, target=0, call_id=2))
        sink.event_arrived(frame(EventHead(9), C, target=0, call_id=0))
        sink.event_arrived(frame(Noted(3), B, target=0, call_id=0))
        sink.event_arrived(frame(Noted(3), B, incarnation=0, target=0, call_id=5))
        sink.event_arrived(b"\xc1")
        sink.event_arrived(frame(Foreign(1), C, target=0, call_id=7, registry=Registry(Foreign)))
        assert listener.order == ["event 1"]
        assert bus.stats().refused == {
            "impersonation": 2,
            "unnumbered_event": 1,
            "past_life": 1,
            "MalformedMessageError": 1,
            "UnknownMessageTypeError": 1,
        }
        sink.event_arrived(frame(EventHead(3), B, target=0, call_id=0))
        assert listener.order == ["event 1", "gap 2-3"]

    run(scenario)


def test_the_head_is_repeated_while_nothing_is_published_and_not_between_events() -> None:
    interval_s = EVENT_HEAD_INTERVAL_NS / 1e9

    async def scenario(bus: Endpoint, carrier: TestCarrier) -> None:
        await asyncio.sleep(3 * interval_s)
        assert carrier.published == []  # there is nothing to miss yet
        for number in range(20):
            bus.publish(Noted(number))
            await asyncio.sleep(0.6 * interval_s)
        assert [type(envelope.body) for _, envelope in carrier.published] == [Noted] * 20
        last_s = carrier.published[-1][0]
        await asyncio.sleep(5 * interval_s)
        heads = [(at, envelope.body) for at, envelope in carrier.published[20:]]
        assert [body for _, body in heads] == [EventHead(20)] * len(heads)
        assert heads[0][0] - last_s <= 2 * interval_s and len(heads) >= 4

    run(scenario)


def test_a_subscriber_may_close_itself_in_its_callback() -> None:
    async def scenario(bus: Endpoint, carrier: TestCarrier) -> None:
        listener = Listener()
        subscription = bus.subscribe(B, listener.on_event, lambda gap: subscription.close())
        sink = carrier.event_sinks[B]
        sink.event_arrived(frame(Noted(1), B, target=0, call_id=5))
        sink.event_arrived(frame(Noted(1), B, target=0, call_id=6))
        assert listener.order == []

    run(scenario)


def test_a_sender_in_a_new_life_gives_up_the_requests_of_its_old_one() -> None:
    async def scenario(bus: Endpoint, carrier: TestCarrier) -> None:
        sink, given_up = carrier.sink, list[bool]()
        assert sink is not None

        def on_slow(request: object) -> object:
            request.on_abandoned(lambda: given_up.append(True))  # type: ignore[attr-defined]
            return DEFERRED

        bus.handle(Slow, on_slow)  # type: ignore[arg-type]
        sink.request_arrived(B, b"r1", frame(Slow(), B, call_id=1))
        assert len(bus.open_requests()) == 1
        sink.request_arrived(B, b"r2", frame(Slow(), B, incarnation=2, call_id=1))
        assert given_up == [True] and [found.incarnation for found in bus.open_requests()] == [2]

    run(scenario)


def test_impossible_waits_are_our_own_bug_and_a_passed_deadline_is_a_time_out() -> None:
    async def scenario(bus: Endpoint, carrier: TestCarrier) -> None:
        with pytest.raises(LocalProtocolError):
            await bus.request(B, Echo(b""), timeout_ns=MAX_REQUEST_TIMEOUT_NS + 1)
        with pytest.raises(LocalProtocolError):
            await bus.request(B, Echo(b""), timeout_ns=S, deadline_ns=S)
        with pytest.raises(BusTimeout):
            await bus.request(B, Echo(b""), timeout_ns=0)
        await asyncio.sleep(1)
        with pytest.raises(BusTimeout):
            await bus.request(B, Echo(b""), deadline_ns=S // 2)

    run(scenario)


def test_a_peer_that_moves_takes_its_calls_along_by_failing_them() -> None:
    async def scenario(bus: Endpoint, carrier: TestCarrier) -> None:
        listener = Listener()
        bus.subscribe(B, listener.on_event, listener.on_gap)
        old = await linked(bus, carrier)
        call = asyncio.ensure_future(bus.request(B, Echo(b""), timeout_ns=S))
        await asyncio.sleep(0)
        bus.add_peer(PeerAddress(B, "", ""))  # the same: nothing happens
        assert not call.done() and carrier.wires[B] is old
        bus.add_peer(PeerAddress(B, "elsewhere", "elsewhere"))
        with pytest.raises(KVError):
            await call
        again = asyncio.ensure_future(bus.request(B, Echo(b""), timeout_ns=S))
        await asyncio.sleep(0)
        assert carrier.wires[B] is not old
        carrier.event_sinks[B].event_arrived(frame(Noted(1), B, target=0, call_id=1))
        assert listener.order == ["event 1"]
        again.cancel()
        await asyncio.gather(again, return_exceptions=True)

    run(scenario)

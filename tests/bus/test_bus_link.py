"""The link machine: whatever happens to the connection, every message ends exactly once."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kv_bus.errors import AuthRefused, ConnectionLost, PeerQueueFull, WrongCluster, WrongIncarnation
from kv_bus.interface import PeerDown, PeerRefused, PeerState, PeerUp
from kv_bus.limits import PEER_QUEUE_BYTES_MAX, REFUSED_RETRY_NS
from kv_bus.link import Connect, Effect, Fail, Flush, Greet, Link, Notify, Outgoing, Reconnect
from kv_core.errors import KVError
from kv_core.ids import Incarnation, NodeId
from tests.bus.helpers_bus import Noted

PEER = NodeId("peer")

KINDS = """
    submit send connected welcomed lost refused unanswered failed newer block writable answer abandon wait
""".split()

steps = st.lists(st.tuples(st.sampled_from(KINDS), st.integers(0, 3)), max_size=80)


def outgoing(number: int, incarnation: int = 0, one_way: bool = False) -> Outgoing:
    return Outgoing(number, Noted(number), 0, 0, Incarnation(incarnation), None if one_way else lambda outcome: None)


class Run:
    """Performs a link's effects and keeps account of every message."""

    def __init__(self) -> None:
        self.link = Link(PEER)
        self.now = 0
        self.alive: dict[int, Outgoing] = {}
        self.handed: list[int] = []
        self.ended: list[int] = []
        self.submitted = 0

    def perform(self, effects: list[Effect]) -> None:
        for effect in effects:
            match effect:
                case Fail(gone, _):
                    self.end(gone)
                case Flush():
                    while not self.link.blocked and (message := self.link.next_to_send()) is not None:
                        assert message.incarnation in (0, self.link.incarnation)
                        self.link.handed_over(message)
                        self.handed.append(message.call_id)
                        if message.on_outcome is None:
                            self.end(message)
                case _:
                    pass
        self.link.check()

    def end(self, message: Outgoing) -> None:
        del self.alive[message.call_id]  # a KeyError here: it ended twice
        self.ended.append(message.call_id)

    def step(self, kind: str, number: int) -> None:
        link = self.link
        match kind:
            case "submit" | "send":
                self.submitted += 1
                message = outgoing(self.submitted, number, kind == "send")
                self.alive[message.call_id] = message
                try:
                    self.perform(link.submitted(message, 10, self.now))
                except AuthRefused:
                    assert link.state is PeerState.REFUSED
                    self.end(message)
            case "connected":
                self.perform(link.connected())
            case "welcomed":
                self.perform(link.welcomed(Incarnation(number + 1)))
            case "lost":
                self.perform(link.lost("test"))
                assert not link.in_flight
            case "refused":
                self.perform(link.refused("test", self.now))
            case "unanswered":
                self.perform(link.greeting_unanswered())
            case "failed":
                self.perform(link.greeting_failed(WrongCluster(node=PEER, ours="x", theirs="y"), self.now))
                if link.state is PeerState.REFUSED:
                    self.now += REFUSED_RETRY_NS
            case "newer":
                self.perform(link.newer_life_seen(Incarnation(number + 1)))
            case "block":
                link.blocked = link.state is PeerState.UP
            case "writable":
                self.perform(link.writable())
            case "wait":
                self.now += REFUSED_RETRY_NS
            case "answer" | "abandon":
                chosen = list(self.alive.values())[number:][:1]
                for message in chosen:
                    if kind == "abandon" or message.call_id in link.in_flight:
                        assert link.left(message) == (message.call_id in self.handed)
                        self.end(message)
            case _:
                raise AssertionError(kind)
        link.check()


@given(steps)
@settings(deadline=None)
def test_every_message_ends_once_and_messages_leave_in_order(run: list[tuple[str, int]]) -> None:
    world = Run()
    for kind, number in run:
        before = world.link.incarnation
        world.step(kind, number)
        assert world.link.incarnation >= before  # L5
    assert world.handed == sorted(world.handed)  # L1
    left = world.link.take_all()
    assert sorted(message.call_id for message in left) == sorted(world.alive)
    assert sorted([*world.ended, *world.alive]) == list(range(1, world.submitted + 1))  # L2


def up(incarnation: int = 1) -> Link:
    link = Link(PEER)
    assert link.submitted(outgoing(1), 5, 0) == [Connect()]
    assert link.connected() == [Greet()]
    assert link.welcomed(Incarnation(incarnation)) == [Notify(PeerUp(PEER, Incarnation(incarnation))), Flush()]
    message = link.next_to_send()
    assert message is not None
    link.handed_over(message)
    return link


def errors_of(effects: list[Effect]) -> list[type[KVError]]:
    return [type(effect.error) for effect in effects if isinstance(effect, Fail)]


def test_a_broken_connection_fails_what_was_handed_over_and_keeps_what_waits() -> None:
    link = up()
    link.blocked = True
    link.submitted(outgoing(2), 5, 0)
    effects = link.lost("cable")
    assert errors_of(effects) == [ConnectionLost]
    assert effects[-1] == Notify(PeerDown(PEER, Incarnation(1), "cable"))
    assert link.queued == 1 and not link.in_flight


def test_a_refusal_fails_everything_and_is_asked_again_only_after_a_pause() -> None:
    link = up()
    link.blocked = True
    link.submitted(outgoing(2), 5, 0)
    effects = link.refused("no key", 1_000)
    assert errors_of(effects) == [ConnectionLost, AuthRefused]
    assert isinstance(effects[-1], Notify) and isinstance(effects[-1].event, PeerRefused)
    with pytest.raises(AuthRefused):
        link.submitted(outgoing(3), 5, 1_000 + REFUSED_RETRY_NS - 1)
    assert link.submitted(outgoing(3), 5, 1_000 + REFUSED_RETRY_NS) == [Reconnect()]


def test_messages_for_a_life_that_did_not_greet_us_are_not_sent() -> None:
    link = Link(PEER)
    link.submitted(outgoing(1, incarnation=1), 5, 0)
    link.submitted(outgoing(2, incarnation=2), 5, 0)
    link.submitted(outgoing(3), 5, 0)
    link.connected()
    assert errors_of(link.welcomed(Incarnation(2))) == [WrongIncarnation]
    assert link.queued == 2


def test_a_greeting_by_a_past_life_is_not_believed() -> None:
    link = Link(PEER, Incarnation(5))
    link.submitted(outgoing(1), 5, 0)
    link.connected()
    assert link.welcomed(Incarnation(4)) == [Reconnect()]
    assert link.state is PeerState.CONNECTING


def test_waiting_messages_are_bounded_in_bytes() -> None:
    link = Link(PEER)
    link.submitted(outgoing(1), PEER_QUEUE_BYTES_MAX, 0)
    with pytest.raises(PeerQueueFull):
        link.submitted(outgoing(2), 1, 0)
    link.check()

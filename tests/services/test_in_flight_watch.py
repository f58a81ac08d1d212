"""What others announce that they compute, as one process hears it: believed within bounds, gone with who said it."""

from collections.abc import Callable
from typing import TypeVar

from kv_bus.interface import Event, Stamp
from kv_core.block_hashes import BlockHashes
from kv_core.hashing import BlockHash
from kv_core.ids import Incarnation, NodeId
from kv_core.testing import ManualClock
from kv_core.wire import Message
from kv_services.in_flight_watch import BELIEVED_NS_MAX, InFlightWatch, owner_of
from kv_services.membership.state import Effect, MemberDied, MemberSuspected, MemberUp
from kv_services.messages import PrefixComputed, PrefixComputing

A, B = NodeId("a"), NodeId("b")
NAMES = [BlockHash(bytes([i]) * 16, i) for i in range(8)]
LIFE = Incarnation(5)
M = TypeVar("M", bound=Message)


class Cluster:
    """The part of a cluster view that a watch uses."""

    def __init__(self) -> None:
        self.published: dict[type[Message], Callable[[Event[Message]], None]] = {}
        self.listeners: list[Callable[[Effect], None]] = []

    def on_published(self, message_type: type[M], listener: Callable[[Event[M]], None]) -> None:
        self.published[message_type] = listener  # type: ignore[assignment]  # only called with events of that type

    def on_change(self, listener: Callable[[Effect], None]) -> None:
        self.listeners.append(listener)

    def say(self, origin: NodeId, message: Message, life: Incarnation = LIFE) -> None:
        self.published[type(message)](Event(origin, life, 1, Stamp(0, 0, origin), message))

    def change(self, effect: Effect) -> None:
        for listener in self.listeners:
            listener(effect)


def watch() -> tuple[InFlightWatch, Cluster, ManualClock, list[tuple[str, bytes]]]:
    cluster, clock = Cluster(), ManualClock(monotonic_ns=1_000)
    over: list[tuple[str, bytes]] = []
    made = InFlightWatch(cluster, clock, lambda owner, after: over.append((owner, after)))
    return made, cluster, clock, over


def computing(names: list[BlockHash], ready_ns: int = 100, until_ns: int = 1_000, name: str = "r/1") -> PrefixComputing:
    return PrefixComputing(name, BlockHashes.of(names).packed, ready_ns, until_ns)


def test_what_a_node_announces_is_waited_for_until_it_says_that_it_is_over() -> None:
    w, cluster, _, over = watch()
    cluster.say(A, computing(NAMES))
    wait = w.ask(NAMES, 0, 1_000, block_ns=50, fetch_ns=10)
    assert wait is not None and (wait.owner, wait.ready_ns, wait.until_ns) == (owner_of(A, LIFE, "r/1"), 1_100, 2_000)
    assert w.coming(NAMES, {}) == {A: 8} and w.coming(NAMES, {A: 3}) == {A: 5} and w.coming(NAMES, {A: 8}) == {}
    cluster.say(A, PrefixComputed("r/1", b"token"))
    assert over == [(owner_of(A, LIFE, "r/1"), b"token")]
    assert w.ask(NAMES, 0, 1_000, block_ns=50, fetch_ns=10) is None and w.coming(NAMES, {}) == {}


def test_one_node_s_computations_follow_each_other_and_another_s_do_not() -> None:
    w, cluster, _, _ = watch()
    cluster.say(A, computing(NAMES[:3]))
    w.assigned("request", A, NAMES[3:5], until_ns=9_000)
    cluster.say(B, computing(NAMES[5:]))
    assert w.coming(NAMES, {}) == {A: 5}
    assert w.coming(NAMES, {B: 5}) == {A: 5, B: 3}
    w.over("request")
    assert w.coming(NAMES, {}) == {A: 3}


def test_silence_death_and_a_new_life_end_what_was_announced_at_once() -> None:
    for effect in (
        MemberDied(A, LIFE, "silent"),
        MemberSuspected(A, LIFE, 5),
        MemberUp(A, Incarnation(LIFE + 1)),
    ):
        w, cluster, _, over = watch()
        cluster.say(A, computing(NAMES[:4]))
        w.assigned("request", A, NAMES[4:], until_ns=9_000)
        cluster.say(B, computing(NAMES[:2], name="other"))
        cluster.change(effect)
        assert w.coming(NAMES, {}) == {}
        assert {owner for owner, after in over if not after} == {owner_of(A, LIFE, "r/1"), "request"}
        w.table.check()
    w, cluster, _, over = watch()
    cluster.say(A, computing(NAMES))
    cluster.change(MemberUp(A, LIFE))
    assert w.coming(NAMES, {}) == {A: 8} and over == []


def test_announcements_run_out_and_none_is_believed_for_ever() -> None:
    w, cluster, clock, _ = watch()
    cluster.say(A, computing(NAMES, until_ns=1 << 62))
    clock.advance(BELIEVED_NS_MAX - 1)
    assert w.coming(NAMES, {}) == {A: 8}
    clock.advance(1)
    assert w.coming(NAMES, {}) == {} and len(w.table) == 0


def test_what_cannot_be_is_not_taken() -> None:
    w, cluster, _, _ = watch()
    cluster.say(A, PrefixComputing("r/1", b"x" * 21, 1, 2))
    cluster.say(A, computing(NAMES, ready_ns=5, until_ns=5))
    assert len(w.table) == 0
    cluster.say(A, PrefixComputed("never heard of"))

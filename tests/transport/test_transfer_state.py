"""One transfer, driven through every turn of events by an environment that keeps its own books."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kv_core.errors import KVError
from kv_transport import XferState, limits
from kv_transport import transfer_state as ts
from kv_transport.errors import ChecksumMismatch, ConnectionLost, GrantRefused, InvalidTransition, TransferCancelled

LOST = ConnectionLost(peer="p", transport="tcp", cause="test")
BAD = ChecksumMismatch(peer="p", transport="tcp", bad=1, total=1, layer=0)
REFUSED = GrantRefused(ticket=1, reason="test")
CANCELLED = TransferCancelled(request="r")


class World:
    """A transport and a receiver. Knows what is in flight and what has arrived, by its own count."""

    def __init__(self) -> None:
        self.machine = ts.Transfer("t", linked=False)
        self.linked = False
        self.added = self.answers = self.releases = 0
        self.sealed = False
        self.queued: set[int] = set()
        self.flying: list[int] = []
        self.backing_off: set[int] = set()
        self.arrived: set[int] = set()
        self.acknowledged: set[int] = set()
        self.bad: dict[int, int] = {}
        self.error: KVError | None = None

    @property
    def over(self) -> bool:
        return bool(self.answers)

    def step(self, event: ts.Event) -> None:
        for effect in self.machine.step(event):
            match effect:
                case ts.Enqueue(units):
                    assert self.linked and not self.over
                    known = self.queued | set(self.flying) | self.backing_off | self.acknowledged
                    assert not known.intersection(units), "posted twice"
                    self.queued.update(units)
                case ts.Dequeue(units):
                    assert self.queued.issuperset(units)
                    self.queued.difference_update(units)
                case ts.EnqueueAfter(unit, delay_ns):
                    assert delay_ns == ts.BACKOFF_FIRST_NS << (self.bad[unit] - 1)
                    self.backing_off.add(unit)
                case ts.Succeed():
                    self.answers += 1
                    assert self.sealed and self.acknowledged == set(range(self.added))
                case ts.Fail(error):
                    self.answers += 1
                    self.error = error
                case ts.Release():
                    self.releases += 1
                    assert self.answers == 1, "released before the answer"
                    assert not self.flying, "released while a unit is in flight"
        self.machine.check()
        assert self.answers <= 1 and self.releases <= 1
        assert not (self.over and self.queued)
        if self.over and self.flying:
            assert self.machine.state is XferState.ABANDONED

    # What the world does; each returns without effect where it cannot happen.

    def add(self, count: int) -> None:
        if not self.sealed and not self.over:
            first, self.added = self.added, self.added + count
            self.step(ts.Added(tuple(range(first, self.added))))

    def seal(self) -> None:
        if not self.sealed and not self.over:
            self.sealed = True
            self.step(ts.Sealed())

    def fly(self) -> None:
        if self.queued:
            unit = min(self.queued)
            self.queued.discard(unit)
            self.flying.append(unit)
            self.step(ts.Flown(unit))

    def settle(self, which: int, outcome: str) -> None:
        if not self.flying:
            return
        unit = self.flying.pop(which % len(self.flying))
        match outcome:
            case "landed":
                self.arrived.add(unit)
                self.acknowledged.add(unit)
                self.step(ts.Landed(unit))
            case "bad":
                self.bad[unit] = self.bad.get(unit, 0) + 1
                self.step(ts.Bounced(unit, ts.Bounce.BAD_BYTES, BAD))
            case "refused":
                self.step(ts.Bounced(unit, ts.Bounce.FATAL, REFUSED))
            case _:
                raise AssertionError(outcome)

    def wake(self) -> None:
        if self.backing_off and not self.over:
            self.step(ts.BackoffOver(self.backing_off.pop()))

    def break_link(self, arrives: bool) -> None:
        """The units in flight come back unanswered; the receiver may have got them all the same."""
        if not self.linked:
            return
        self.linked = False
        self.step(ts.LinkGone())
        while self.flying:
            unit = self.flying.pop()
            if arrives:
                self.arrived.add(unit)
            self.step(ts.Bounced(unit, ts.Bounce.LINK, LOST))

    def link(self) -> None:
        if not self.linked:
            self.linked = True
            held = frozenset(unit for unit in self.arrived - self.acknowledged if self.machine.is_parked(unit))
            if not self.over:
                self.acknowledged |= held
            self.step(ts.LinkBack(held))

    def stop(self) -> None:
        self.step(ts.Stopped(CANCELLED))


COMMANDS = st.one_of(
    st.tuples(st.just("add"), st.integers(1, 5)),
    st.tuples(st.just("settle"), st.integers(0, 9), st.sampled_from(["landed", "landed", "bad", "refused"])),
    st.tuples(st.just("break_link"), st.booleans()),
    st.sampled_from([("seal",), ("fly",), ("fly",), ("fly",), ("wake",), ("link",), ("link",), ("stop",)]),
)


@given(st.lists(COMMANDS, min_size=20, max_size=80))
def test_whatever_happens_the_answer_comes_once_and_memory_is_released_after_it(
    steps: list[tuple[object, ...]],
) -> None:
    world = World()
    world.add(3)
    world.link()
    for name, *arguments in steps:
        getattr(world, str(name))(*arguments)
    # Now everything goes well: it must end, and end well unless it was given up.
    world.link()
    world.seal()
    for _ in range(4 * world.added + 4):
        world.wake()
        world.fly()
        world.settle(0, "landed")
    assert world.answers == world.releases == 1
    assert world.machine.state is (XferState.DONE if world.error is None else XferState.FAILED)
    assert world.error is None or world.error is world.machine.error
    if world.error is None:
        assert max(world.bad.values(), default=0) <= limits.CHECKSUM_RETRIES_MAX
        assert world.arrived == set(range(world.added))


def test_an_abandoned_transfer_stays_pinned_until_its_last_unit_is_settled() -> None:
    world = World()
    world.link()
    world.add(3)
    world.fly()
    world.fly()
    world.stop()
    assert (world.machine.state, world.answers, world.releases) == (XferState.ABANDONED, 1, 0)
    world.settle(0, "landed")
    assert (world.machine.state, world.releases) == (XferState.ABANDONED, 0)
    world.stop()  # giving up twice changes nothing
    world.settle(0, "bad")
    assert (world.machine.state, world.releases) == (XferState.FAILED, 1)
    assert world.error is CANCELLED


def test_bad_bytes_are_tried_three_times_more_with_growing_pauses() -> None:
    machine = ts.Transfer("t")
    machine.step(ts.Added((0,)))
    pauses = []
    for _ in range(limits.CHECKSUM_RETRIES_MAX):
        machine.step(ts.Flown(0))
        (effect,) = machine.step(ts.Bounced(0, ts.Bounce.BAD_BYTES, BAD))
        assert isinstance(effect, ts.EnqueueAfter)
        pauses.append(effect.delay_ns // 1_000_000)
        assert machine.step(ts.BackoffOver(0)) == [ts.Enqueue((0,))]
    assert pauses == [10, 20, 40]
    machine.step(ts.Flown(0))
    assert machine.step(ts.Bounced(0, ts.Bounce.BAD_BYTES, BAD)) == [ts.Fail(BAD), ts.Release()]
    assert machine.retries == limits.CHECKSUM_RETRIES_MAX


def test_a_new_link_resumes_at_what_the_receiver_has_not_got() -> None:
    machine = ts.Transfer("t")
    machine.step(ts.Added((0, 1, 2, 3)))
    for unit in (0, 1, 2):
        machine.step(ts.Flown(unit))
    machine.step(ts.Landed(0))
    assert machine.step(ts.LinkGone()) == [ts.Dequeue((3,))]
    for unit in (1, 2):
        assert machine.step(ts.Bounced(unit, ts.Bounce.LINK, LOST)) == []
    assert machine.step(ts.LinkBack(frozenset({2}))) == [ts.Enqueue((1, 3))]


@pytest.mark.parametrize(
    "event", [ts.Landed(0), ts.Flown(7), ts.Bounced(0, ts.Bounce.LINK, LOST), ts.Added((0,)), ts.BackoffOver(0)]
)
def test_what_cannot_happen_is_a_bug_and_said_so(event: ts.Event) -> None:
    machine = ts.Transfer("t")
    machine.step(ts.Added((0,)))
    with pytest.raises(InvalidTransition, match="transfer t in state posted"):
        machine.step(event)

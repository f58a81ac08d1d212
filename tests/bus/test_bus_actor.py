"""Actors: one machine, one mailbox, one owner."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

import pytest

from kv_bus.actor import Actor, ActorState, Mailbox
from kv_bus.errors import ActorClosed, BusTimeout, MailboxFull
from kv_bus.limits import ACTOR_TURN_EVENTS
from kv_core.errors import KVError, LocalProtocolError
from kv_core.testing import ManualClock, run_virtual


@dataclass(frozen=True)
class Ended:
    """A job ended."""

    result: int | KVError


class Collector:
    """Turns every event into the effect to note it; an int asks for a job of so many seconds."""

    def __init__(self) -> None:
        self.seen: list[object] = []

    def step(self, event: object) -> list[object]:
        self.seen.append(event)
        if event == "explode":
            raise ZeroDivisionError("machine")
        return [event]


class Noting(Actor[object, object]):
    """Performs by noting; see `Collector`."""

    def __init__(self, *, mailbox_max: int = 8, clock: ManualClock | None = None) -> None:
        self.machine = Collector()
        super().__init__("noting", self.machine, mailbox_max=mailbox_max, clock=clock)
        self.performed: list[object] = []
        self.on_effect: Callable[[object], None] | None = None

    def perform(self, effect: object) -> None:
        self.performed.append(effect)
        if self.on_effect is not None:
            self.on_effect(effect)
        if isinstance(effect, int):
            self.start_job(effect, self.sleep(effect), Ended)

    async def sleep(self, seconds: int) -> int:
        await asyncio.sleep(seconds)
        if seconds == 3:
            raise BusTimeout(node="x", message="y", waited_ms=1)
        if seconds == 4:
            raise ZeroDivisionError("job")
        return seconds


def test_events_are_stepped_and_performed_in_order() -> None:
    async def main(clock: object) -> None:
        actor = Noting()
        for event in "abc":
            actor.post(event)
        assert actor.machine.seen == []  # never inside the caller's stack
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert actor.machine.seen == actor.performed == ["a", "b", "c"]
        await actor.close()

    run_virtual(main)


def test_a_full_mailbox_refuses_outsiders_but_no_completion() -> None:
    async def main(clock: object) -> None:
        actor = Noting(mailbox_max=2)
        actor.post("a")
        actor.post("b")
        with pytest.raises(MailboxFull, match="mailbox of actor noting is full"):
            actor.post("c")
        for number in range(10):
            actor.complete(f"done {number}")
        await asyncio.sleep(0.01)
        assert actor.machine.seen == ["a", "b", *(f"done {number}" for number in range(10))]
        actor.post("d")
        stats = actor.stats().mailbox
        assert (stats.refused, stats.overloads, stats.highest, stats.completed) == (1, 1, 12, 10)
        await actor.close()

    run_virtual(main)


def test_an_overload_is_reported_once_per_episode(caplog: pytest.LogCaptureFixture) -> None:
    mailbox: Mailbox[int] = Mailbox("box", 4)
    for _ in range(2):
        for number in range(10):
            try:
                mailbox.post(number)
            except MailboxFull:
                pass
        while len(mailbox):
            mailbox.take()
    assert [record.levelname for record in caplog.records if "mailbox full" in record.message] == ["WARNING"] * 2
    assert mailbox.stats().overloads == 2 and mailbox.stats().refused == 12


def test_a_mailbox_needs_room() -> None:
    with pytest.raises(LocalProtocolError):
        Mailbox[int]("none", 0)


def test_a_turn_is_bounded_in_events_and_in_time() -> None:
    async def main(clock: object) -> None:
        actor = Noting(mailbox_max=1000)
        for number in range(ACTOR_TURN_EVENTS + 5):
            actor.post(str(number))
        await asyncio.sleep(0)
        assert len(actor.machine.seen) == ACTOR_TURN_EVENTS
        await asyncio.sleep(0.01)
        assert len(actor.machine.seen) == ACTOR_TURN_EVENTS + 5
        await actor.close()

        slow_clock = ManualClock()
        slow = Noting(mailbox_max=1000, clock=slow_clock)
        slow.on_effect = lambda effect: slow_clock.advance(100_000)
        for number in range(60):
            slow.post(str(number))
        await asyncio.sleep(0)
        assert len(slow.machine.seen) == 8, "a turn went on for more than its time"
        await asyncio.sleep(0.01)
        assert len(slow.machine.seen) == 60
        await slow.close()

    run_virtual(main)


def test_the_outcome_of_a_job_is_an_event() -> None:
    async def main(clock: object) -> None:
        actor = Noting()
        actor.post(2)
        actor.post(3)
        await asyncio.sleep(1)
        assert actor.stats().jobs == ("2", "3")
        await asyncio.sleep(5)
        first, second = actor.machine.seen[2:]
        assert first == Ended(2)
        assert isinstance(second, Ended) and isinstance(second.result, BusTimeout)
        assert actor.stats().jobs == ()
        await actor.close()

    run_virtual(main)


def test_a_bug_ends_the_actor_and_is_raised_by_run() -> None:
    async def main(clock: object) -> None:
        for event, cause in (("explode", "machine"), (4, "job")):
            actor = Noting()
            running = asyncio.ensure_future(actor.run())
            await asyncio.sleep(0)
            actor.post(event)
            with pytest.raises(ZeroDivisionError, match=cause):
                await running
            assert actor.state is ActorState.CLOSED
            with pytest.raises(ActorClosed):
                actor.post("more")
            actor.complete("late")  # ignored
            with pytest.raises(ZeroDivisionError):
                await actor.run()

    run_virtual(main)


def test_a_bug_of_an_actor_that_nobody_runs_is_reported_to_the_loop() -> None:
    async def main(clock: object) -> None:
        told: list[dict[str, object]] = []
        asyncio.get_running_loop().set_exception_handler(lambda _, context: told.append(context))
        actor = Noting()
        actor.post("explode")
        await asyncio.sleep(0.01)
        assert isinstance(told[0]["exception"], ZeroDivisionError)

    run_virtual(main)


def test_close_cancels_jobs_in_order_forgets_the_rest_and_may_be_repeated() -> None:
    async def main(clock: object) -> None:
        actor = Noting()
        ended: list[int] = []

        async def job(number: int) -> int:
            try:
                await asyncio.sleep(3600)
            finally:
                ended.append(number)
            return number

        for number in (5, 1, 9, 2):
            actor.start_job(f"job {number}", job(number), Ended)
        running = asyncio.ensure_future(actor.run())
        await asyncio.sleep(0)
        actor.post("never seen")
        await actor.close()
        await asyncio.gather(actor.close(), actor.close())
        await running
        assert ended == [5, 1, 9, 2]
        assert actor.machine.seen == []
        with pytest.raises(LocalProtocolError):
            actor.start_job("late", job(7), Ended)

    run_virtual(main)


def test_one_job_can_be_cancelled_and_makes_no_event() -> None:
    async def main(clock: object) -> None:
        actor = Noting()
        actor.post(2)
        await asyncio.sleep(1)
        assert actor.cancel_job(2) and not actor.cancel_job(77)
        await asyncio.sleep(5)
        assert actor.machine.seen == [2] and actor.stats().jobs == ()
        with pytest.raises(LocalProtocolError):
            actor.start_job("x", actor.sleep(1), Ended)
            actor.start_job("x", actor.sleep(1), Ended)
        await actor.close()

    run_virtual(main)


def test_drain_refuses_outsiders_and_finishes_what_is_there() -> None:
    async def main(clock: object) -> None:
        actor = Noting()
        actor.post(2)
        actor.post("b")
        draining = asyncio.ensure_future(actor.drain(60 * 10**9))
        await asyncio.sleep(0.5)
        with pytest.raises(ActorClosed):
            actor.post("c")
        assert await draining is True
        assert actor.machine.seen == [2, "b", Ended(2)]
        assert actor.state is ActorState.CLOSED
        assert await actor.drain(10**9) is True

    run_virtual(main)


def test_drain_is_cut_short_at_its_timeout() -> None:
    async def main(clock: object) -> None:
        actor = Noting()
        actor.post(3600)
        await asyncio.sleep(1)
        assert await actor.drain(10**9) is False
        assert actor.state is ActorState.CLOSED and actor.stats().jobs == ()

    run_virtual(main)


def test_what_waits_for_the_end_of_a_turn_comes_once_after_its_events() -> None:
    class Waiting(Noting):
        def turn_over(self) -> None:
            self.performed.append("over")
            if self.performed.count("over") == 2:
                raise ZeroDivisionError("at the end of a turn")

    async def main(clock: object) -> None:
        actor = Waiting()
        running = asyncio.ensure_future(actor.run())
        for event in "abc":
            actor.post(event)
        await asyncio.sleep(0.01)
        assert actor.performed == ["a", "b", "c", "over"]
        actor.post("d")
        with pytest.raises(ZeroDivisionError):
            await running

    run_virtual(main)


def test_an_effect_may_close_the_actor_and_nothing_more_is_stepped() -> None:
    async def main(clock: object) -> None:
        actor = Noting()
        closing: list[asyncio.Future[None]] = []
        actor.on_effect = lambda effect: closing.append(asyncio.ensure_future(actor.close()))
        actor.post("first")
        await asyncio.sleep(0.01)
        with pytest.raises(ActorClosed):
            actor.post("second")
        await asyncio.gather(*closing)
        assert actor.machine.seen == ["first"]

    run_virtual(main)

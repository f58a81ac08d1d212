"""Supervision: order, restarts, giving up."""

import asyncio
import dataclasses
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kv_bus.actor import Actor
from kv_bus.errors import ActorDown, ChildEnded, ChildGaveUp
from kv_bus.supervisor import (
    ChildFailed,
    ChildSpec,
    ChildState,
    GiveUp,
    GiveUpNow,
    RestartAfter,
    RestartJudge,
    RestartPolicy,
    StopOutcome,
    Supervisor,
)
from kv_core.errors import LocalProtocolError
from kv_core.testing import LoopClock, run_virtual

S = 10**9
POLICY = RestartPolicy(failures_max=2, within_ns=60 * S, backoff_first_ns=S, backoff_max_ns=3 * S)


class Part:
    """A child under a test's hand."""

    def __init__(self, name: str, log: list[str]) -> None:
        self.name, self.log = name, log
        self.fate: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.start_error: Exception | None = None
        self.hang_on_close = False

    async def start(self) -> None:
        self.log.append(f"start {self.name}")
        if self.start_error is not None:
            raise self.start_error

    async def run(self) -> None:
        await self.fate

    async def close(self) -> None:
        self.log.append(f"close {self.name}")
        if self.hang_on_close:
            await asyncio.sleep(10**6)
        if not self.fate.done():
            self.fate.set_result(None)


class DrainingPart(Part):
    """One that can finish what it has begun."""

    async def drain(self, timeout_ns: int) -> bool:
        self.log.append(f"drain {self.name}")
        return timeout_ns > 5 * S


class Workshop:
    """Makes parts and remembers every life."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.lives: dict[str, list[Part]] = {}
        self.next_start_error: Exception | None = None

    def spec(
        self, name: str, kind: type[Part] = Part, give_up: GiveUp = GiveUp.STOP_ALL, drain_ns: int = 0
    ) -> ChildSpec:
        def make() -> Part:
            part = kind(name, self.log)
            part.start_error, self.next_start_error = self.next_start_error, None
            self.lives.setdefault(name, []).append(part)
            return part

        return ChildSpec(name, make, POLICY, give_up, drain_timeout_ns=drain_ns, stop_timeout_ns=2 * S)

    def break_down(self, name: str, error: BaseException | None = None) -> None:
        self.lives[name][-1].fate.set_exception(error or ZeroDivisionError(name))


Body = Callable[[Workshop, LoopClock], "asyncio.Future[None]"]


def test_children_start_in_order_and_stop_in_reverse() -> None:
    async def main(clock: LoopClock) -> None:
        shop = Workshop()
        boss = Supervisor("boss", [shop.spec("a"), shop.spec("b", DrainingPart, drain_ns=9 * S), shop.spec("c")], clock)
        await boss.start()
        running = asyncio.ensure_future(boss.run())
        report, again = await asyncio.gather(boss.stop(), boss.stop())
        await running
        assert report is again and report.clean
        assert shop.log == ["start a", "start b", "start c", "close c", "drain b", "close b", "close a"]
        assert [child.state for child in boss.stats()] == [ChildState.STOPPED] * 3

    run_virtual(main)


def test_a_child_that_cannot_start_stops_those_before_it_and_is_raised() -> None:
    async def main(clock: LoopClock) -> None:
        shop = Workshop()
        bad = shop.spec("b")

        def make_bad() -> Part:
            shop.next_start_error = OSError("port taken")
            return bad.make()  # type: ignore[return-value]

        boss = Supervisor("boss", [shop.spec("a"), ChildSpec("b", make_bad, POLICY), shop.spec("c")], clock)
        with pytest.raises(OSError, match="port taken"):
            await boss.start()
        assert shop.log == ["start a", "start b", "close b", "close a"]

    run_virtual(main)


def test_a_failed_child_is_made_anew_after_a_growing_pause_and_reported() -> None:
    async def main(clock: LoopClock) -> None:
        shop, failures = Workshop(), list[ChildFailed]()
        boss = Supervisor("boss", [shop.spec("a"), shop.spec("b")], clock, failures.append)
        await boss.start()
        shop.break_down("a")
        await asyncio.sleep(0.9)
        assert boss.child("a") is None and boss.stats()[0].state is ChildState.BACKING_OFF
        await asyncio.sleep(0.2)
        assert boss.child("a") is shop.lives["a"][1]
        shop.break_down("a")
        await asyncio.sleep(1.9)
        assert boss.child("a") is None
        await asyncio.sleep(0.2)
        assert boss.child("a") is shop.lives["a"][2]
        assert [(event.child, event.failures, event.gave_up, event.restart_in_ns) for event in failures] == [
            ("a", 1, False, S),
            ("a", 2, False, 2 * S),
        ]
        assert isinstance(failures[0].error, ZeroDivisionError)
        assert boss.stats()[0].last_cause == "ZeroDivisionError: a" and boss.stats()[0].lives == 3
        assert shop.log.count("start b") == 1, "a failure of one child touched another"
        await boss.stop()

    run_virtual(main)


def test_giving_up_stops_everything_and_run_says_why() -> None:
    async def main(clock: LoopClock) -> None:
        shop, failures = Workshop(), list[ChildFailed]()
        boss = Supervisor("boss", [shop.spec("a"), shop.spec("b"), shop.spec("c")], clock, failures.append)
        await boss.start()
        running = asyncio.ensure_future(boss.run())
        for _ in range(3):
            shop.break_down("b")
            await asyncio.sleep(4)
        with pytest.raises(ChildGaveUp, match="b failed 3 times within 60000 ms, last cause: ZeroDivisionError: b"):
            await running
        assert failures[-1].gave_up and len(failures) == 3
        assert shop.log[-2:] == ["close c", "close a"]
        assert not (await boss.stop()).clean or (await boss.stop()).outcomes[1] == ("b", StopOutcome.WAS_DOWN)

    run_virtual(main)


def test_a_child_that_may_stay_down_takes_nobody_with_it() -> None:
    async def main(clock: LoopClock) -> None:
        shop, failures = Workshop(), list[ChildFailed]()
        boss = Supervisor("boss", [shop.spec("a"), shop.spec("b", give_up=GiveUp.LEAVE_DOWN)], clock, failures.append)
        await boss.start()
        for _ in range(3):
            shop.break_down("b")
            await asyncio.sleep(4)
        assert failures[-1].gave_up
        assert [child.state for child in boss.stats()] == [ChildState.RUNNING, ChildState.DOWN]
        report = await boss.stop()
        assert dict(report.outcomes) == {"b": StopOutcome.WAS_DOWN, "a": StopOutcome.CLEAN} and report.clean

    run_virtual(main)


def test_failures_far_apart_are_forgiven() -> None:
    async def main(clock: LoopClock) -> None:
        shop = Workshop()
        boss = Supervisor("boss", [shop.spec("a")], clock)
        await boss.start()
        for _ in range(8):
            shop.break_down("a")
            await asyncio.sleep(61)
        assert boss.stats()[0].state is ChildState.RUNNING and boss.stats()[0].lives == 9
        await boss.stop()

    run_virtual(main)


def test_failing_to_start_again_counts_as_a_failure() -> None:
    async def main(clock: LoopClock) -> None:
        shop, failures = Workshop(), list[ChildFailed]()
        boss = Supervisor("boss", [shop.spec("a")], clock, failures.append)
        await boss.start()
        shop.next_start_error = OSError("still taken")
        shop.break_down("a")
        await asyncio.sleep(10)
        assert [type(event.error) for event in failures] == [ZeroDivisionError, OSError]
        assert boss.stats()[0].state is ChildState.RUNNING
        await boss.stop()

    run_virtual(main)


def test_returning_or_cancelling_oneself_unasked_is_a_failure() -> None:
    async def main(clock: LoopClock) -> None:
        shop, failures = Workshop(), list[ChildFailed]()
        boss = Supervisor("boss", [shop.spec("a")], clock, failures.append)
        await boss.start()
        shop.lives["a"][-1].fate.set_result(None)
        await asyncio.sleep(2)
        shop.lives["a"][-1].fate.cancel()
        await asyncio.sleep(5)
        assert [type(event.error) for event in failures] == [ChildEnded, ChildEnded]
        assert boss.stats()[0].state is ChildState.RUNNING
        await boss.stop()

    run_virtual(main)


def test_a_child_that_hangs_on_close_is_left_behind_and_named() -> None:
    async def main(clock: LoopClock) -> None:
        shop = Workshop()
        boss = Supervisor("boss", [shop.spec("a"), shop.spec("b"), shop.spec("c", DrainingPart, drain_ns=S)], clock)
        await boss.start()
        shop.lives["b"][0].hang_on_close = True
        report = await boss.stop()
        assert report.outcomes == (
            ("c", StopOutcome.CUT_SHORT),
            ("b", StopOutcome.HUNG),
            ("a", StopOutcome.CLEAN),
        )
        assert not report.clean

    run_virtual(main)


def test_stopping_while_a_child_backs_off_ends_at_once() -> None:
    async def main(clock: LoopClock) -> None:
        shop = Workshop()
        boss = Supervisor("boss", [shop.spec("a")], clock)
        await boss.start()
        shop.break_down("a")
        await asyncio.sleep(0.1)
        before = clock.monotonic_ns()
        await boss.close()
        assert clock.monotonic_ns() == before and len(shop.lives["a"]) == 1

    run_virtual(main)


class Counting:
    """Counts events; one makes it fail."""

    def __init__(self) -> None:
        self.seen: list[str] = []

    def step(self, event: str) -> list[str]:
        if event == "fail":
            raise ZeroDivisionError
        self.seen.append(event)
        return []


class CountingActor(Actor[str, str]):
    def perform(self, effect: str) -> None: ...


def test_a_reference_to_an_actor_survives_its_restart() -> None:
    async def main(clock: LoopClock) -> None:
        machines: list[Counting] = []

        def make() -> CountingActor:
            machines.append(Counting())
            return CountingActor("counter", machines[-1])

        boss = Supervisor("boss", [ChildSpec("counter", make, POLICY)], clock)
        reference = boss.ref("counter", str)
        with pytest.raises(ActorDown):
            reference.post("too early")
        await boss.start()
        reference.post("one")
        reference.post("fail")
        await asyncio.sleep(0.5)
        with pytest.raises(ActorDown, match="actor counter is down"):
            reference.post("between")
        await asyncio.sleep(1)
        reference.post("two")
        await asyncio.sleep(0.1)
        assert [machine.seen for machine in machines] == [["one"], ["two"]]
        assert (await boss.stop()).clean
        with pytest.raises(LocalProtocolError):
            boss.ref("nobody", str)

    run_virtual(main)


def test_a_child_that_gives_up_while_another_starts_leaves_nobody_running() -> None:
    async def main(clock: LoopClock) -> None:
        shop = Workshop()

        class Slow(Part):
            async def start(self) -> None:
                await super().start()
                await asyncio.sleep(3)
                self.log.append(f"started {self.name}")

        never = RestartPolicy(failures_max=0)
        specs = [
            dataclasses.replace(shop.spec("a"), policy=never),
            shop.spec("b", Slow),
            shop.spec("c"),
        ]
        boss = Supervisor("boss", specs, clock)
        starting = asyncio.ensure_future(boss.start())
        await asyncio.sleep(1)
        shop.break_down("a", ValueError("told that it is over"))
        with pytest.raises(ChildGaveUp, match="told that it is over"):
            await starting
        assert shop.log == ["start a", "start b", "close a", "started b", "close b"]
        assert shop.lives["b"][0].fate.done() and "c" not in shop.lives
        with pytest.raises(ChildGaveUp):
            await boss.run()
        assert [child.state for child in boss.stats()] == [ChildState.STOPPED, ChildState.STOPPED, ChildState.NEW]

    run_virtual(main)


def test_an_end_that_was_foreseen_is_one_line_of_warning_and_any_other_a_traceback(
    caplog: pytest.LogCaptureFixture,
) -> None:
    class LifeIsOver(Exception):
        pass

    async def end_by(error: Exception) -> None:
        shop = Workshop()
        spec = dataclasses.replace(shop.spec("a"), policy=RestartPolicy(failures_max=0), foreseen=(LifeIsOver,))
        supervisor = Supervisor("s", [spec])
        await supervisor.start()
        running = asyncio.ensure_future(supervisor.run())
        shop.lives["a"][-1].fate.set_exception(error)
        with pytest.raises(ChildGaveUp):
            await running

    run_virtual(lambda clock: end_by(LifeIsOver("others said so")))
    (told,) = caplog.records
    assert told.levelname == "WARNING" and not told.exc_info and "child ended supervisor=s child=a" in told.message
    assert "others said so" in told.message
    caplog.clear()
    run_virtual(lambda clock: end_by(ValueError("a fault")))
    (told,) = caplog.records
    assert told.levelname == "ERROR" and told.exc_info and "child failed supervisor=s child=a" in told.message


def test_two_children_of_one_name_are_refused() -> None:
    async def main(clock: LoopClock) -> None:
        shop = Workshop()
        with pytest.raises(LocalProtocolError):
            Supervisor("boss", [shop.spec("a"), shop.spec("a")], clock)

    run_virtual(main)


@given(st.lists(st.integers(0, 40 * S), max_size=30))
@settings(deadline=None)
def test_the_judge_gives_up_exactly_when_too_many_failures_lie_in_the_window(pauses: list[int]) -> None:
    judge, times, now = RestartJudge(POLICY), list[int](), 0
    for pause in pauses:
        now += pause
        times.append(now)
        recent = [at for at in times if at > now - POLICY.within_ns]
        verdict = judge.failed(now)
        if len(recent) > POLICY.failures_max:
            assert verdict == GiveUpNow(len(recent))
        else:
            assert verdict == RestartAfter([S, 2 * S, 3 * S][len(recent) - 1])


def test_an_impossible_policy_is_refused() -> None:
    for bad in ({"failures_max": -1}, {"within_ns": 0}, {"backoff_first_ns": 10 * S, "backoff_max_ns": S}):
        with pytest.raises(LocalProtocolError):
            RestartPolicy(**bad)

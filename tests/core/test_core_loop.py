"""The virtual-time loop: deterministic, honest about deadlocks and failures, and closed to threads and real IO."""

import asyncio
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Coroutine

import pytest

from kv_core.testing import (
    BackgroundFailureError,
    LoopClock,
    RealIOError,
    SimulationStalledError,
    ThreadInSimulationError,
    VirtualTimeLoop,
    run_virtual,
)

HOUR_NS = 3600 * 1_000_000_000


def test_an_hour_passes_at_once_and_both_clocks_see_it() -> None:
    async def main(clock: LoopClock) -> tuple[int, int, float]:
        await asyncio.sleep(3600)
        return clock.monotonic_ns(), clock.wall_ns(), asyncio.get_running_loop().time()

    assert run_virtual(main, epoch_ns=10**18) == (HOUR_NS, 10**18 + HOUR_NS, 3600.0)


def test_time_stands_still_while_something_can_run() -> None:
    async def main(clock: LoopClock) -> int:
        for _ in range(1000):
            await asyncio.sleep(0)
        return clock.monotonic_ns()

    assert run_virtual(main) == 0


def test_timers_fire_in_the_order_of_their_times() -> None:
    async def main(clock: LoopClock) -> list[tuple[int, str]]:
        fired: list[tuple[int, str]] = []

        async def at(delay: float, name: str) -> None:
            await asyncio.sleep(delay)
            fired.append((clock.monotonic_ns(), name))

        await asyncio.gather(at(0.2, "c"), at(0.1, "b"), at(0.0001, "a"), at(3, "d"))
        return fired

    seen = run_virtual(main)
    assert seen == [(100_000, "a"), (100_000_000, "b"), (200_000_000, "c"), (3_000_000_000, "d")]


def test_callbacks_run_in_the_order_in_which_they_were_scheduled() -> None:
    async def main(clock: LoopClock) -> list[int]:
        ran: list[int] = []
        for i in range(100):
            asyncio.get_running_loop().call_soon(ran.append, i)
        await asyncio.sleep(1)
        return ran

    assert run_virtual(main) == list(range(100))


def test_steps_of_a_nanosecond_are_kept_over_hours() -> None:
    async def main(clock: LoopClock) -> int:
        for _ in range(3000):
            await asyncio.sleep(1.000_000_007)
        return clock.monotonic_ns()

    assert abs(run_virtual(main) - 3000 * 1_000_000_007) <= 3000


def test_deadlines_work_in_virtual_time() -> None:
    async def main(clock: LoopClock) -> int:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(30):
                await asyncio.Event().wait()
        return clock.monotonic_ns()

    assert run_virtual(main) == 30 * 1_000_000_000


def test_a_deadlock_is_found_at_once() -> None:
    async def main(clock: LoopClock) -> None:
        await asyncio.sleep(5)
        await asyncio.Event().wait()

    with pytest.raises(SimulationStalledError, match="5000000000 ns"):
        run_virtual(main)


def test_a_loop_that_never_lets_time_pass_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kv_core.testing.loop._STILL_STEPS_MAX", 1000)

    async def main(clock: LoopClock) -> None:
        for _ in iter(int, 1):  # for ever
            await asyncio.sleep(0)

    with pytest.raises(SimulationStalledError, match="still 0 ns"):
        run_virtual(main)


async def fail_soon() -> None:
    await asyncio.sleep(1)
    raise LookupError("in the background")


def test_a_failed_task_that_nobody_holds_stops_the_run() -> None:
    reached = []

    async def main(clock: LoopClock) -> None:
        asyncio.get_running_loop().create_task(fail_soon())
        for second in range(100):
            reached.append(second)
            await asyncio.sleep(1)

    with pytest.raises(BackgroundFailureError, match="in the background") as caught:
        run_virtual(main)
    assert isinstance(caught.value.__cause__, LookupError)
    assert len(reached) < 100


def test_a_failed_task_that_is_held_but_never_awaited_fails_the_run() -> None:
    held = []

    async def main(clock: LoopClock) -> str:
        held.append(asyncio.ensure_future(fail_soon()))
        await asyncio.sleep(5)
        return "the result of a run that is not sound"

    with pytest.raises(BackgroundFailureError):
        run_virtual(main)


def test_a_failed_task_whose_failure_is_handled_does_not_fail_the_run() -> None:
    async def main(clock: LoopClock) -> str:
        results = await asyncio.gather(fail_soon(), return_exceptions=True)
        return repr(results)

    assert "in the background" in run_virtual(main)


def test_a_failing_callback_stops_the_run() -> None:
    async def main(clock: LoopClock) -> None:
        asyncio.get_running_loop().call_later(1, [].pop)
        await asyncio.sleep(5)

    with pytest.raises(BackgroundFailureError, match="pop from empty list"):
        run_virtual(main)


def test_the_failure_of_main_is_its_own() -> None:
    for error in (RuntimeError("mine"), ValueError("mine")):

        async def main(clock: LoopClock, error: Exception = error) -> None:
            raise error

        with pytest.raises(type(error), match="mine"):
            run_virtual(main)


async def use_a_thread(clock: LoopClock) -> None:
    await asyncio.to_thread(print)


async def resolve_a_name(clock: LoopClock) -> None:
    await asyncio.get_running_loop().getaddrinfo("localhost", 80)


async def call_from_a_thread(clock: LoopClock) -> None:
    loop, refused = asyncio.get_running_loop(), []

    def call() -> None:
        try:
            loop.call_soon_threadsafe(print)
        except ThreadInSimulationError as error:
            refused.append(error)

    thread = threading.Thread(target=call)
    thread.start()
    thread.join()
    raise refused[0]


@pytest.mark.parametrize("main", [use_a_thread, resolve_a_name, call_from_a_thread])
def test_threads_are_refused(main: Callable[[LoopClock], Coroutine[None, None, None]]) -> None:
    with pytest.raises(ThreadInSimulationError):
        run_virtual(main)


def test_real_io_is_refused() -> None:
    async def main(clock: LoopClock) -> None:
        loop = asyncio.get_running_loop()
        one, two = socket.socketpair()
        with one, two:
            for watch in (loop.add_reader, loop.add_writer):
                with pytest.raises(RealIOError):
                    watch(one, print)

    run_virtual(main)


def test_timers_of_one_nanosecond_fire_in_the_order_of_arming() -> None:
    async def main(clock: LoopClock) -> list[int]:
        fired: list[int] = []
        loop = asyncio.get_running_loop()
        for number in range(50):
            loop.call_at(2.0 if number % 3 else 1.0, fired.append, number)
        await asyncio.sleep(3)
        return fired

    first = [number for number in range(50) if number % 3 == 0]
    assert run_virtual(main) == first + [number for number in range(50) if number % 3]


def test_a_timer_is_due_by_the_clock_that_it_was_armed_by() -> None:
    async def main(clock: LoopClock) -> int:
        loop, early = asyncio.get_running_loop(), []

        def fire(when: float) -> None:
            if loop.time() < when:
                early.append(when)

        for number in range(3_000):
            when = number / 7 + 1e-10 * number
            loop.call_at(when, fire, when)
        await asyncio.sleep(600)
        return len(early)

    assert run_virtual(main) == 0


def test_delays_add_up_to_the_nanosecond() -> None:
    async def main(clock: LoopClock) -> int:
        for _ in range(1_000):
            await asyncio.sleep(0.01)
        return clock.monotonic_ns()

    assert run_virtual(main) == 10_000_000_000


def test_timers_that_were_cancelled_do_not_fire_and_do_not_pile_up() -> None:
    async def main(clock: LoopClock) -> list[str]:
        fired: list[str] = []
        loop = asyncio.get_running_loop()
        assert isinstance(loop, VirtualTimeLoop)
        loop.call_later(900, fired.append, "kept")
        for number in range(5_000):
            loop.call_later(1000 - number / 100, fired.append, "cancelled").cancel()
            await asyncio.sleep(0)
        assert len(loop._timers) < 500
        await asyncio.sleep(2000)
        return fired

    assert run_virtual(main) == ["kept"]


def test_a_failed_task_is_found_among_many_that_ended() -> None:
    held = []

    async def main(clock: LoopClock) -> None:
        held.append(asyncio.ensure_future(fail_soon()))
        for _ in range(5_000):
            await asyncio.ensure_future(asyncio.sleep(0))
        await asyncio.sleep(5)

    with pytest.raises(BackgroundFailureError, match="in the background"):
        run_virtual(main)


def test_calls_from_the_loops_own_thread_are_allowed() -> None:
    async def main(clock: LoopClock) -> str:
        done = asyncio.get_running_loop().create_future()
        asyncio.get_running_loop().call_soon_threadsafe(done.set_result, "done")
        return str(await done)

    assert run_virtual(main) == "done"


_A_RUN = """
import asyncio, hashlib, random
from kv_core.testing import run_virtual

async def main(clock):
    trace, queue = hashlib.sha256(), asyncio.Queue()
    async def worker(name, stream):
        for _ in range(200):
            await asyncio.sleep(stream.expovariate(1000))
            await queue.put((clock.monotonic_ns(), name))
    async def reader():
        for _ in range(1000):
            trace.update(repr(await queue.get()).encode())
    await asyncio.gather(reader(), *(worker(f"w{i}", random.Random(f"7/{i}")) for i in range(5)))
    return trace.hexdigest()

print(run_virtual(main))
"""


def test_a_run_leaves_the_same_trace_under_every_hash_seed() -> None:
    traces = set()
    for seed in ("0", "1", "2"):
        environment = {**os.environ, "PYTHONHASHSEED": seed}
        done = subprocess.run(
            [sys.executable, "-c", _A_RUN], env=environment, capture_output=True, text=True, timeout=60
        )
        assert done.returncode == 0, done.stderr
        traces.add(done.stdout)
    assert len(traces) == 1

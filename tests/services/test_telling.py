"""What a pool did is told together, within a bounded time, and never after the end."""

import asyncio
from types import SimpleNamespace

import pytest

from kv_consistency.errors import ReplicaFencedError
from kv_core.testing import ManualClock, run_virtual
from kv_services.node.process import NodeWork
from kv_services.node.telling import TELL_S, Telling


def test_what_happens_within_a_moment_is_told_once_and_in_time() -> None:
    async def main(clock: object) -> None:
        loop, told = asyncio.get_running_loop(), list[float]()
        telling, began = Telling(), loop.time()
        for _ in range(3):
            telling.soon(lambda: told.append(loop.time() - began))
            assert telling.due
            await asyncio.sleep(TELL_S / 4)
        assert told == []
        await asyncio.sleep(TELL_S)
        assert len(told) == 1 and told[0] <= TELL_S and not telling.due
        telling.soon(lambda: told.append(loop.time() - began))
        await asyncio.sleep(TELL_S)
        assert len(told) == 2

    run_virtual(main)


def test_nothing_is_told_after_the_end_and_a_fenced_life_ends_by_its_replica() -> None:
    async def main(clock: object) -> None:
        telling, told = Telling(), list[int]()
        telling.soon(lambda: told.append(1))
        telling.close()
        telling.close()
        telling.soon(lambda: told.append(2))
        await asyncio.sleep(2 * TELL_S)
        assert told == [] and not telling.due

        def fenced() -> None:
            told.append(3)
            raise ReplicaFencedError(node="n", incarnation=1, reason="it was silent")

        over = Telling()
        over.soon(fenced)
        await asyncio.sleep(2 * TELL_S)  # an error that nobody sees would end this run
        assert told == [3] and not over.due

    run_virtual(main)


def test_a_bug_in_telling_ends_the_node_and_is_no_line_in_a_log_only() -> None:
    async def main(clock: object) -> None:
        def breaks() -> None:
            raise ZeroDivisionError

        telling = Telling()
        telling.check()
        telling.soon(breaks)
        await asyncio.sleep(2 * TELL_S)
        work = object.__new__(NodeWork)
        idle = SimpleNamespace(complete=lambda event: None, tick=lambda *args: None, expire=lambda: None)
        context = SimpleNamespace(clock=ManualClock(), telling=telling, tiers=idle)
        vars(work).update(ctx=context, decode=idle, prefill=idle, shards=idle, leases=idle, clients=idle)
        with pytest.raises(ZeroDivisionError):
            work._tick()

    run_virtual(main)

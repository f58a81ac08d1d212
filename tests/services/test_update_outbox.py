"""Updates that nobody waits for leave together, in order, and never late."""

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kv_consistency.messages import UpdateBatch
from kv_consistency.update import EntryWritten, OwnerEpoch, Update
from kv_consistency.version_vector import Origin
from kv_core.errors import RetryableError
from kv_core.ids import Incarnation, NodeId, RequestId
from kv_core.testing import LoopClock, run_virtual
from kv_services.replica.outbox import PATIENCE_S, TOGETHER_MAX, UpdateOutbox

ORIGIN = Origin(NodeId("n"), Incarnation(1))
OWNER = OwnerEpoch(1, ORIGIN)


def batch(n: int) -> UpdateBatch:
    return UpdateBatch(ORIGIN, n, (Update(n, n, 0, (EntryWritten(RequestId("r"), OWNER, n - 1, n),)),))


@given(st.lists(st.tuples(st.booleans(), st.sampled_from([0.0, 0.001, 0.004, 0.02])), max_size=40))
def test_all_are_published_once_in_order_and_none_waits_longer_than_its_patience(
    steps: list[tuple[bool, float]],
) -> None:
    async def scenario(clock: LoopClock) -> None:
        made: dict[int, int] = {}
        told: list[int] = []
        late_ns: list[int] = []

        def publish(it: UpdateBatch) -> None:
            assert it.head == it.updates[-1].n
            told.extend(update.n for update in it.updates)
            late_ns.extend(clock.monotonic_ns() - made[update.n] for update in it.updates)

        outbox = UpdateOutbox(publish)
        for n, (may_wait, pause_s) in enumerate(steps, start=1):
            made[n] = clock.monotonic_ns()
            with outbox.patient(may_wait):
                outbox.add(batch(n))
            assert may_wait or told == list(range(1, n + 1))
            await asyncio.sleep(pause_s)
        await asyncio.sleep(PATIENCE_S)
        assert told == list(range(1, len(steps) + 1))
        assert all(late <= PATIENCE_S * 1e9 for late in late_ns)

    run_virtual(scenario)


def test_a_step_of_many_sequences_is_one_message() -> None:
    async def scenario(clock: LoopClock) -> None:
        told: list[UpdateBatch] = []
        outbox = UpdateOutbox(told.append)
        with outbox.patient(True):
            for n in range(1, TOGETHER_MAX + 2):
                outbox.add(batch(n))
        await asyncio.sleep(PATIENCE_S)
        assert [len(it.updates) for it in told] == [TOGETHER_MAX, 1]

    run_virtual(scenario)


def test_what_the_bus_refuses_is_said_and_stops_nothing(caplog: pytest.LogCaptureFixture) -> None:
    async def scenario(clock: LoopClock) -> None:
        def refuse(it: UpdateBatch) -> None:
            raise RetryableError(detail="closed")

        outbox = UpdateOutbox(refuse)
        with outbox.patient(True):
            outbox.add(batch(1))
        await asyncio.sleep(PATIENCE_S)
        with pytest.raises(RetryableError):
            outbox.add(batch(2))

    run_virtual(scenario)
    assert "updates not published count=1" in caplog.text

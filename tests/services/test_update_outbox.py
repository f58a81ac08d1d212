"""Updates leave together, in order, and never late; whoever needs one sooner is sent it along."""

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kv_consistency.manager import KvCacheConsistencyManager
from kv_consistency.messages import UpdateBatch
from kv_consistency.update import BlocksStored, EntryWritten, NamespaceRef, OwnerEpoch, Tier, Update
from kv_consistency.version_vector import Origin
from kv_core.errors import RetryableError
from kv_core.ids import Incarnation, NodeId, RequestId
from kv_core.testing import LoopClock, run_virtual
from kv_prefix.prefix_index import PrefixIndex
from kv_services.metrics import Metrics
from kv_services.replica.outbox import PATIENCE_S, TOGETHER_BYTES_MAX, TOGETHER_MAX, UpdateOutbox
from kv_services.replica.service import ReplicaService

ORIGIN = Origin(NodeId("n"), Incarnation(1))
OWNER = OwnerEpoch(1, ORIGIN)


def batch(n: int) -> UpdateBatch:
    return UpdateBatch(ORIGIN, n, (Update(n, n, 0, (EntryWritten(RequestId("r"), OWNER, n - 1, n),)),))


def large(n: int, nbytes: int) -> UpdateBatch:
    count = nbytes // 20
    namespace = NamespaceRef(bytes(16), 16)
    stored = BlocksStored(namespace, 0, Tier.HOST, 0, bytes(16 * count), bytes(4 * count))
    return UpdateBatch(ORIGIN, n, (Update(n, n, 0, (stored,)),))


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
        for n, (at_once, pause_s) in enumerate(steps, start=1):
            made[n] = clock.monotonic_ns()
            outbox.add(batch(n))
            waiting = outbox.waiting
            assert waiting is not None
            assert [*told, *(update.n for update in waiting.updates)] == list(range(1, n + 1))
            if at_once:
                outbox.late()
                assert outbox.waiting is None and told == list(range(1, n + 1))
            await asyncio.sleep(pause_s)
        await asyncio.sleep(PATIENCE_S)
        assert told == list(range(1, len(steps) + 1))
        assert all(late <= PATIENCE_S * 1e9 for late in late_ns)

    run_virtual(scenario)


def test_a_step_of_many_sequences_is_one_message() -> None:
    async def scenario(clock: LoopClock) -> None:
        told: list[UpdateBatch] = []
        outbox = UpdateOutbox(told.append)
        for n in range(1, TOGETHER_MAX + 2):
            outbox.add(batch(n))
        await asyncio.sleep(PATIENCE_S)
        assert [len(it.updates) for it in told] == [TOGETHER_MAX, 1]

    run_virtual(scenario)


def test_what_waits_is_bounded_in_bytes_and_what_is_larger_leaves_at_once() -> None:
    async def scenario(clock: LoopClock) -> None:
        told: list[UpdateBatch] = []
        outbox = UpdateOutbox(told.append)
        half = TOGETHER_BYTES_MAX // 2
        for n in (1, 2):
            outbox.add(large(n, half))
        assert [it.head for it in told] == [1]  # two of them, with what an update has besides its blocks, are too much
        outbox.add(large(3, TOGETHER_BYTES_MAX))
        assert [it.head for it in told] == [1, 2, 3]
        assert outbox.waiting is None

    run_virtual(scenario)


def test_what_the_bus_refuses_is_said_and_stops_nothing(caplog: pytest.LogCaptureFixture) -> None:
    async def scenario(clock: LoopClock) -> None:
        told: list[UpdateBatch] = []

        def publish(it: UpdateBatch) -> None:
            if it.head == 1:
                raise RetryableError(detail="closed")
            told.append(it)

        outbox = UpdateOutbox(publish)
        outbox.add(batch(1))
        await asyncio.sleep(PATIENCE_S)
        outbox.add(batch(2))
        await asyncio.sleep(PATIENCE_S)
        assert [it.head for it in told] == [2]

    run_virtual(scenario)
    assert "updates not published count=1" in caplog.text


class Life:
    def keep_clock_bound(self, bound_ns: int) -> None:
        """It keeps any."""


def replica(clock: LoopClock, name: str) -> ReplicaService:
    manager = KvCacheConsistencyManager(NodeId(name), Incarnation(1))
    service = ReplicaService(manager, clock, PrefixIndex(), Life(), Metrics(name, "decode"))
    service.prime()
    return service


def test_news_that_come_with_a_token_end_its_wait_at_once_and_once_only() -> None:
    async def scenario(clock: LoopClock) -> None:
        gateway, node = replica(clock, "g"), replica(clock, "d")
        owner, token = gateway.own(RequestId("r"))
        news = gateway.news()
        assert news is not None and owner.number == 1
        began_ns = clock.monotonic_ns()
        waiting = asyncio.ensure_future(node.caught_up(token, began_ns + 10**9))
        await asyncio.sleep(0)
        assert not waiting.done()
        node.hear_news(NodeId("g"), Incarnation(1), news)
        await waiting
        assert clock.monotonic_ns() == began_ns
        before = node.manager.vector
        node.hear_news(NodeId("g"), Incarnation(1), news)
        assert node.manager.vector == before
        # Whoever may not speak for an origin is not believed.
        gateway.own(RequestId("r"))
        node.hear_news(NodeId("other"), Incarnation(1), gateway.news())
        assert node.manager.vector == before
        await node.close()
        await gateway.close()

    run_virtual(scenario)

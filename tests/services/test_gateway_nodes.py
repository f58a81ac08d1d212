"""The gateway before nodes: its first moments, nodes and links that keep failing, and failures of its own."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

import pytest

from kv_bus.errors import BusTimeout, HandlerFailed, TooManyRequests
from kv_consistency.errors import FencedError, HolderLostError, ReplicaFencedError, StaleReplicaError
from kv_core.errors import KVError
from kv_core.ids import NodeId
from kv_core.testing import LoopClock, run_virtual
from kv_services.errors import NodeOverloadedError, RequestExpiredError, RequestTooLargeError, UnknownRequestError
from kv_services.gateway.errors import GatewayError, NoNodesError, fault_of
from kv_services.gateway.process import register_faults, why_unready
from kv_services.gateway.request_actor import RequestActor
from kv_services.membership.state import Effect
from kv_transport.errors import ConnectionLost, QuarantineFull
from tests.services.helpers_gateway_world import BUS, Answer, World

T = TypeVar("T")
D1, D2, P1, P2 = (NodeId(name) for name in ("decode-1", "decode-2", "prefill-1", "prefill-2"))
DEAD_S = BUS.dead_after_ms / 1000
BROKEN = HandlerFailed(node="decode-1", message="reserve_decode", exception="OSError")


def in_world(scenario: Callable[[World], Awaitable[T]], prefill: int = 0, decode: int = 2) -> T:
    """Run a scenario in a world of its own and end that."""

    async def run(clock: LoopClock) -> T:
        world = World(clock, prefill, decode)
        try:
            return await scenario(world)
        finally:
            await world.stop()

    return run_virtual(run)


def settled(world: World) -> bool:
    """Read anew each time: it changes while others run."""
    return world.view.settled


def test_a_request_in_the_first_moments_waits_until_every_node_was_heard() -> None:
    async def scenario(world: World) -> Answer:
        await world.start([])
        asking = asyncio.ensure_future(world.ask())
        await world.nodes[D2].start()
        await asyncio.sleep(DEAD_S / 2)
        assert not settled(world) and world.nodes[D2].asked == []
        assert why_unready(world.view) == "it has not heard yet of decode-1"
        await world.nodes[D1].start()
        answer = await asking
        assert why_unready(world.view) == ""
        return answer

    answer = in_world(scenario)
    assert answer.tokens == [7] and DEAD_S / 2 <= answer.at_s < DEAD_S


def test_who_is_silent_from_the_start_is_waited_for_no_longer_than_death_takes() -> None:
    async def scenario(world: World) -> Answer:
        await world.start([D2])
        return await world.ask()

    answer = in_world(scenario)
    assert answer.tokens == [7] and DEAD_S <= answer.at_s < DEAD_S + 0.2


def test_with_nobody_there_a_request_is_refused_for_now_as_soon_as_that_is_known() -> None:
    async def scenario(world: World) -> Answer:
        await world.start([])
        answer = await world.ask()
        assert why_unready(world.view) == "no decode node is alive"
        return answer

    answer = in_world(scenario)
    assert isinstance(answer.error, NoNodesError) and DEAD_S <= answer.at_s < DEAD_S + 1.0


def test_a_client_that_leaves_in_the_first_moments_leaves_nothing_behind() -> None:
    async def scenario(world: World) -> tuple[int, list[str]]:
        await world.start([])
        stream = world.submit()
        await asyncio.sleep(0.1)
        stream.cancel()
        await asyncio.sleep(0.1)
        for node in world.nodes.values():
            await node.start()
        await asyncio.sleep(0.5)
        assert settled(world)
        return world.completer.num_open + world.ctx.placer.load(D1) + world.ctx.placer.load(D2), [
            request for node in world.nodes.values() for request in node.asked
        ]

    assert in_world(scenario) == (0, [])


def test_whoever_is_idle_for_many_times_what_death_takes_is_still_a_member_and_serves() -> None:
    async def scenario(world: World) -> tuple[Answer, list[Effect]]:
        await world.start()
        await asyncio.sleep(DEAD_S / 2)
        seen: list[Effect] = []
        world.view.on_change(seen.append)
        await asyncio.sleep(30 * DEAD_S)
        return await world.ask(), seen

    answer, seen = in_world(scenario)
    assert answer.tokens == [7] and seen == []


def test_members_listed_elsewhere_are_not_missed_before_the_list_was_read() -> None:
    async def scenario(world: World) -> list[bool]:
        listed = False
        world.view.is_listed = lambda: listed
        await world.start()
        await asyncio.sleep(DEAD_S / 2)
        seen = [settled(world)]
        listed = True
        await asyncio.sleep(0.1)
        return [*seen, settled(world)]

    assert in_world(scenario) == [False, True]


async def failing(world: World, node: NodeId, error: KVError, count: int = 12) -> list[Answer]:
    """Ask one request after the other while a node refuses all of them so."""
    world.nodes[node].refusal = error
    return [await world.ask() for _ in range(count)]


def test_a_node_that_keeps_failing_gets_no_more_requests_and_has_them_back_when_it_is_well() -> None:
    async def scenario(world: World) -> None:
        await world.start()
        answers = await failing(world, D1, BROKEN)
        assert all(answer.tokens == [7] for answer in answers), "another node serves each"
        assert len(world.nodes[D1].asked) == 3, "three failures open the link"
        assert world.noted("link_opened") == ["gateway>decode-1"]
        world.nodes[D1].refusal = None
        await asyncio.sleep(1.1)
        for _ in range(8):
            assert (await world.ask()).tokens == [7]
        assert world.noted("link_closed") == ["gateway>decode-1"]
        assert len(world.nodes[D1].asked) > 4, "it has its share again"
        assert b'kv_recoveries_total{action="link_opened"} 1.0' in world.metrics.expose(0)

    in_world(scenario)


def test_a_node_that_stays_broken_costs_one_attempt_a_pause() -> None:
    async def scenario(world: World) -> int:
        await world.start()
        await failing(world, D1, BROKEN)
        before = len(world.nodes[D1].asked)
        for _ in range(100):
            await asyncio.sleep(0.1)
            assert (await world.ask()).tokens == [7]
        return len(world.nodes[D1].asked) - before

    # Ten seconds and a little with pauses of 1, 2, 4, 8 s.
    assert 2 <= in_world(scenario) <= 4


@pytest.mark.parametrize(
    "full",
    [
        NodeOverloadedError(node="decode-1", waiting=1, limit=1),
        TooManyRequests(node="decode-1", limit=1),
        QuarantineFull(slots=1, peer="prefill-1", limit=1),
    ],
    ids=lambda error: type(error).__name__,
)
def test_a_node_that_is_only_full_is_not_held_for_broken(full: KVError) -> None:
    async def scenario(world: World) -> None:
        await world.start()
        await failing(world, D1, full)
        assert world.noted("link_opened") == []
        assert len(world.nodes[D1].asked) > 3

    in_world(scenario)


def test_the_only_node_is_used_however_often_it_failed() -> None:
    async def scenario(world: World) -> None:
        await world.start()
        answers = await failing(world, D1, BROKEN, count=2)
        assert all(isinstance(answer.error, HandlerFailed) for answer in answers)
        world.nodes[D1].refusal = None
        assert (await world.ask()).tokens == [7]

    in_world(scenario, decode=1)


def test_a_link_over_which_hand_overs_fail_is_avoided_and_its_two_nodes_are_not() -> None:
    async def scenario(world: World) -> None:
        await world.start()
        world.nodes[P1].fails_towards = D1
        for _ in range(40):
            assert (await world.ask()).tokens == [7]
        assert world.noted("link_opened") == ["prefill-1>decode-1"]
        assert world.nodes[P1].towards.count(D1) == 3, "three failures open the link"
        asked = {name: len(node.asked) for name, node in world.nodes.items()}
        for _ in range(12):
            assert (await world.ask()).tokens == [7]
        assert all(len(node.asked) > asked[name] for name, node in world.nodes.items()), "both nodes work on"

    in_world(scenario, prefill=2)


def test_a_gateway_that_cannot_own_a_request_says_so_and_keeps_nothing() -> None:
    async def scenario(world: World) -> tuple[Answer, int]:
        await world.start()
        world.owners.refusal = StaleReplicaError(replica="gateway", have="nothing yet", need="all")
        answer = await world.ask()
        await asyncio.sleep(0.1)
        return answer, world.completer.num_open

    answer, still_open = in_world(scenario)
    assert isinstance(answer.error, StaleReplicaError) and answer.at_s < 1.0 and still_open == 0


def test_an_attempt_that_follows_what_is_lost_is_made_again() -> None:
    async def scenario(world: World) -> Answer:
        await world.start()
        world.nodes[D1].refusal = HolderLostError(what="an update this read follows", holders="decode-2/1")
        return await world.ask()

    assert in_world(scenario).tokens == [7]


@pytest.mark.parametrize(
    ("error", "status", "retry_after_s"),
    [
        (HandlerFailed(node="decode-1", message="reserve_decode", exception="OSError"), 503, 1),
        (BusTimeout(node="decode-1", message="reserve_decode", timeout_ms=1), 503, 1),
        (ConnectionLost(peer="decode-1", transport="tcp", cause="reset"), 503, 1),
        (UnknownRequestError(node="decode-1", request_id="r", epoch=1), 503, 1),
        (HolderLostError(what="an update", holders="gateway/1"), 503, 1),
        (ReplicaFencedError(node="gateway", seen=2), 503, 1),
        (FencedError(request_id="r", epoch="1@gateway/1", current="the loss of its owner"), 503, 1),
        (NodeOverloadedError(node="decode-1", waiting=1, limit=1), 429, 1),
        (RequestExpiredError(request_id="r", node="decode-1", state="waiting"), 504, None),
        (RequestTooLargeError(request_id="r", need=2, node="decode-1", total=1), 400, None),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, KVError) else "",
)
def test_no_failure_between_processes_is_told_as_an_internal_error(
    error: KVError, status: int, retry_after_s: int | None
) -> None:
    register_faults()
    fault = fault_of(error)
    assert (fault.status, fault.retry_after_s) == (status, retry_after_s) and fault.code != "internal_error"


def test_a_bug_in_a_request_ends_that_request_with_an_error_and_its_nodes_are_told(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    noted: list[str] = []

    def bug(self: RequestActor) -> None:
        raise ZeroDivisionError

    async def scenario(world: World) -> Answer:
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(lambda _, context: noted.append(context["message"]))
        await world.start()
        monkeypatch.setattr(RequestActor, "_feed", bug)
        answer = await world.ask()
        monkeypatch.undo()
        await asyncio.sleep(0.1)
        assert world.completer.num_open == 0
        assert [request for node in world.nodes.values() for request in node.ended] == ["r1"]
        assert (await world.ask()).tokens == [7]
        return answer

    answer = in_world(scenario)
    assert isinstance(answer.error, GatewayError) and answer.at_s < 1.0
    assert noted == ["actor request r1 failed and nobody runs it"], "a bug is no secret"

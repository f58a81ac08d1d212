"""What every bus must do, over both carriers: events and what was missed of them."""

import asyncio

from kv_core.ids import Incarnation
from kv_core.wire import (
    Registry,
)
from tests.bus.helpers_bus import (
    A,
    B,
    Echo,
    Foreign,
    Listener,
    Noted,
    Run,
    S,
    World,
    subscribed,
)


def test_events_reach_subscribers_in_order_with_their_numbers(run: Run) -> None:
    async def scenario(world: World) -> None:
        a, b = await world.node(A), await world.node(B, 3)
        listener = Listener()
        subscription = a.subscribe(B, listener.on_event, listener.on_gap)
        await subscribed(world, b, listener)
        base = listener.events[-1].sequence
        assert [b.publish(Noted(n)) for n in range(300)] == list(range(base + 1, base + 301))
        await world.until(lambda: listener.numbers()[-300:] == list(range(300)))
        event = listener.events[-1]
        assert (event.origin, event.incarnation, event.stamp.node_id) == (B, 3, B)
        subscription.close()
        subscription.close()
        count = len(listener.events)
        b.publish(Noted(1))
        await a.request(B, Echo(b""), timeout_ns=20 * S)
        await asyncio.sleep(0.05)
        assert len(listener.events) == count

    run(scenario)


def test_a_late_subscriber_is_told_what_it_missed_even_if_nothing_more_is_published(run: Run) -> None:
    async def scenario(world: World) -> None:
        a, b = await world.node(A), await world.node(B)
        for number in range(5):
            b.publish(Noted(number))
        await asyncio.sleep(0.1)
        listener, knowing = Listener(), Listener()
        a.subscribe(B, listener.on_event, listener.on_gap)
        a.subscribe(B, knowing.on_event, knowing.on_gap, incarnation=Incarnation(1), after=3)
        await world.until(lambda: bool(listener.gaps and knowing.gaps))
        assert listener.order == ["gap 1-5"]
        assert knowing.order == ["gap 4-5"]
        assert a.stats().gaps == 2

    run(scenario)


def test_an_event_that_cannot_be_read_is_a_gap_and_later_ones_still_arrive(run: Run) -> None:
    async def scenario(world: World) -> None:
        a = await world.node(A)
        b = await world.node(B, registry=Registry(Noted, Foreign))
        listener = Listener()
        a.subscribe(B, listener.on_event, listener.on_gap)
        await subscribed(world, b, listener)
        listener.order.clear()
        lost = b.publish(Foreign(1))
        b.publish(Noted(2))
        await world.until(lambda: len(listener.order) == 2)
        assert listener.order == [f"gap {lost}-{lost}", f"event {lost + 1}"]
        assert a.stats().refused["UnknownMessageTypeError"] == 1

    run(scenario)


def test_a_restarted_publisher_begins_anew_and_the_subscriber_is_told(run: Run) -> None:
    async def scenario(world: World) -> None:
        a, b = await world.node(A), await world.node(B)
        listener = Listener()
        restarts: list[tuple[int, int]] = []
        a.subscribe(
            B,
            listener.on_event,
            listener.on_gap,
            on_restart=lambda event: restarts.append((event.previous, event.incarnation)),
        )
        await subscribed(world, b, listener)
        await b.close()
        b = await world.node(B, 2)
        listener.order.clear()
        await subscribed(world, b, listener)
        assert restarts == [(1, 2)]
        assert {event.incarnation for event in listener.events} == {1, 2}

    run(scenario)

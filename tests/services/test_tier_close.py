"""A tier whose medium answers later than the node has time to close."""

import asyncio
from typing import Any

import pytest

from tests.services.helpers_node_tiers import Node, prompt


async def test_what_ends_after_the_close_was_cut_short_finds_no_way_to_the_slots() -> None:
    node = Node()
    wrong: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda loop, context: wrong.append(context))
    node.medium.gate.clear()
    for first in (1, 101):
        node.compute([*range(first, first + 24)])
    assert len(node.disk.queue) > 0, "more waits than is under way"
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.05):
            await node.tiers.close()
    node.arena.close()
    told: list[object] = []
    node.disk._on_events = lambda tier, events: told.append(events)
    node.medium.gate.set()
    while node.disk._jobs:  # noqa: ASYNC110  # a thread ends them, and tells nobody else
        await asyncio.sleep(0.01)
    assert not wrong and len(node.medium.places) == 4, "what was under way was written, and nothing more"
    assert not told, "the bus is closed by now, and this life's claims are over"


async def test_a_load_that_the_medium_holds_up_ends_with_the_node_and_gives_no_slot_back() -> None:
    node = Node()
    tokens = prompt(1, 4)
    await node.push_down(tokens, range(2, 12))
    node.medium.gate.clear()
    asked = asyncio.ensure_future(node.promote(tokens))
    while not node.disk._jobs:  # noqa: ASYNC110  # the promotion begins them, and tells nobody
        await asyncio.sleep(0)
    assert [task for task in asyncio.all_tasks() if task.get_name() == "promotion"]
    pinned = node.pool.stats().pinned
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.05):
            await node.tiers.close()
    assert [task for task in asyncio.all_tasks() if task.get_name() == "promotion"] == []
    assert node.pool.stats().pinned == pinned >= 4, "a thread may still write there"
    with pytest.raises(asyncio.CancelledError):
        await asked
    node.medium.gate.set()
    while node.disk._jobs:  # noqa: ASYNC110  # a thread ends them, and tells nobody else
        await asyncio.sleep(0.01)
    node.arena.close()

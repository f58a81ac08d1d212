"""A node that computes for longer than silence may last is busy, not dead."""

import asyncio

import msgspec
import pytest

from tests.integration.helpers_integration import MODEL, prompt, running

pytestmark = [pytest.mark.integration, pytest.mark.timeout(200), pytest.mark.asyncio]

SLOW = msgspec.structs.replace(MODEL, stub_token_us=3_000)


async def test_a_prompt_that_takes_longer_than_death_does_costs_no_node_its_life() -> None:
    async with running(model=SLOW) as fabric:
        lives = {name: (await fabric.status(name)).incarnation for name in fabric.kv_nodes}
        tokens = prompt(1, 1_600)
        loop = asyncio.get_running_loop()
        began_s = loop.time()
        asking = asyncio.ensure_future(fabric.ask(tokens, 4))
        seen: set[str] = set()
        while not asking.done():
            members = (await fabric.status("gateway")).members
            seen |= {members[name] for name in fabric.kv_nodes}
            await asyncio.sleep(0.1)
        answer = await asking
        assert loop.time() - began_s > fabric.config.bus.dead_after_ms / 1e3, "else nothing was shown"
        assert answer.is_right(tokens, 4) and answer.fabric["attempts"] == 1, answer
        assert "dead" not in seen
        assert {name: (await fabric.status(name)).incarnation for name in fabric.kv_nodes} == lives

"""What everybody asks for outlives the nodes that computed it."""

import pytest

from kv_services.config import ReplicationSection, RoutingSection
from tests.integration.helpers_integration import BLOCK, prompt, running, until

pytestmark = [pytest.mark.integration, pytest.mark.timeout(300), pytest.mark.asyncio]

SHARED = 16 * BLOCK
COUNT = 4
COPIES = 3
NODES = ("prefill-1", "prefill-2", "decode-1", "decode-2")


async def test_a_prefix_that_is_asked_for_often_is_held_once_more_and_outlives_its_first_holders() -> None:
    routing = RoutingSection(policy="consistent_hash")  # one node of each role sees all that begins alike
    replication = ReplicationSection(copies=COPIES, uses_per_minute=4.0)
    async with running(prefill=2, decode=2, routing=routing, replication=replication) as fabric:

        async def ask(seed: int) -> tuple[set[str], int]:
            """The nodes that worked on it, and how many of its tokens were found."""
            tokens = prompt(seed, SHARED + 24, SHARED)
            answer = await fabric.ask(tokens, COUNT)
            assert answer.is_right(tokens, COUNT), f"{answer}\n{fabric.last_lines()}"
            nodes = {answer.fabric["prefill_node"], answer.fabric["decode_node"]} - {None}
            return {str(node) for node in nodes}, answer.cached

        async def copies() -> float:
            return sum([await fabric.metric(node, "kv_hot_copies_total") for node in NODES])

        first = {node for seed in range(8) for node in (await ask(seed))[0]}
        assert 1 <= len(first) <= 2, first

        async def copied() -> bool:
            return await copies() >= COPIES - len(first)

        await until(copied, fabric.last_lines)
        events = [event for node in NODES for event in (await fabric.status(node)).events]
        told = [event for event in events if event.kind == "hot_prefix_copied"]
        assert told and told[0].link.split(">")[1] not in first

        left = set(NODES) - first

        async def known() -> bool:
            found = await fabric.holders(prompt(100, SHARED + 24, SHARED))
            return any(found.get(node, 0) >= SHARED // BLOCK for node in left)

        await until(known, fabric.last_lines)
        for node in first:
            await fabric.cluster.kill(node)
        await fabric.all_alive("gateway", left)
        nodes, cached = await ask(100)
        assert nodes <= left
        assert cached >= SHARED


async def test_no_copy_is_made_where_none_is_wanted() -> None:
    replication = ReplicationSection(copies=1, uses_per_minute=2.0)
    async with running(prefill=1, decode=2, replication=replication) as fabric:
        for seed in range(8):
            tokens = prompt(seed, SHARED + 24, SHARED)
            assert (await fabric.ask(tokens, COUNT)).is_right(tokens, COUNT)
        for node in ("prefill-1", "decode-1", "decode-2"):
            assert await fabric.metric(node, "kv_hot_copies_total") == 0

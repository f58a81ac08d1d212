"""The routing policies that a cluster file can name, on real processes."""

from collections import Counter
from typing import Literal

import msgspec
import pytest

from kv_prefix.placement import POLICIES
from kv_services.config import RoutingSection
from kv_services.config_file import dump_config
from tests.integration.helpers_integration import prompt, running

pytestmark = [pytest.mark.integration, pytest.mark.timeout(200)]

Policy = Literal["kv_aware", "cache_aware", "power_of_two", "round_robin", "consistent_hash"]
DECODES = 3
ROUNDS = 2


def test_a_cluster_file_can_name_every_policy_there_is() -> None:
    for name in POLICIES:
        assert msgspec.convert({"policy": name}, RoutingSection).policy == name
    with pytest.raises(msgspec.ValidationError):
        msgspec.convert({"policy": "least_loaded"}, RoutingSection)


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("policy", "most", "nodes"),
    [("round_robin", ROUNDS, DECODES), ("consistent_hash", ROUNDS * DECODES, 1)],
)
async def test_the_policy_of_the_file_is_the_one_that_places(policy: Policy, most: int, nodes: int) -> None:
    """Prompts that begin alike: in turn over all decode nodes, or by their beginning all to one."""
    async with running(prefill=1, decode=DECODES, routing=RoutingSection(policy=policy)) as fabric:
        assert f'policy = "{policy}"' in dump_config(fabric.config)
        used: Counter[str] = Counter()
        for seed in range(ROUNDS * DECODES):
            tokens = prompt(seed, 80, shared=64)
            answer = await fabric.ask(tokens, 4)
            assert answer.is_right(tokens, 4), answer
            used[str(answer.fabric["decode_node"])] += 1
        assert len(used) == nodes
        assert max(used.values()) == most


@pytest.mark.asyncio
async def test_a_short_rest_is_computed_where_it_is_decoded_and_a_long_one_is_handed_over() -> None:
    """Before anything was measured a token is expected to take a millisecond."""
    async with running(routing=RoutingSection(decode_alone_ms=300)) as fabric:
        for seed, length, moves in ((1, 256, False), (2, 400, True)):
            tokens = prompt(seed, length)
            answer = await fabric.ask(tokens, 4)
            assert answer.is_right(tokens, 4), answer
            assert (answer.moved > 0) == moves, answer
            assert bool(answer.fabric.get("prefill_node")) == moves, answer
        await fabric.settle()

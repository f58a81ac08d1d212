"""A prefix that another tenant shares is read from whichever node holds it; when that is gone, it is computed."""

import pytest

from kv_services.config import RoutingSection, TenantConfig
from tests.integration.helpers_integration import BLOCK, prompt, running

pytestmark = [pytest.mark.integration, pytest.mark.timeout(240)]

KEYS = {name: f"key-of-tenant-{name}-for-tests" for name in ("owner", "reader", "stranger")}
TENANTS = [
    TenantConfig(id="owner", api_keys=[KEYS["owner"]]),
    TenantConfig(id="reader", api_keys=[KEYS["reader"]], shares_with=["owner"]),
    TenantConfig(id="stranger", api_keys=[KEYS["stranger"]]),
]


async def test_a_shared_prefix_is_fetched_from_the_node_that_holds_it() -> None:
    async with running(
        prefill=2,
        decode=2,
        tenants=TENANTS,
        operator_keys=["operator-key-of-the-test"],
        routing=RoutingSection(policy="round_robin"),
    ) as fabric:
        first, second = prompt(3, 12 * BLOCK + 1), prompt(4, 12 * BLOCK + 1)

        async def cached(tenant: str, tokens: tuple[int, ...]) -> int:
            answer = await fabric.ask(tokens, 2, key=KEYS[tenant])
            assert answer.is_right(tokens, 2), answer
            return answer.cached

        # In turn: the owner's prompt is computed at the first nodes of each role, the reader's goes to the second ones.
        assert await cached("owner", first) == 0
        assert await cached("reader", first) == 12 * BLOCK
        longer = (*first, *prompt(5, 3 * BLOCK))
        assert await cached("owner", longer) <= 12 * BLOCK
        assert await cached("stranger", first) == 0

        # Its holders die just now: nobody may know that yet, and the answer is right all the same.
        assert await cached("owner", second) == 0
        for node in ("prefill-1", "decode-1"):
            await fabric.cluster.kill(node)
        assert await cached("reader", second) == 0
        await fabric.settle(["prefill-2", "decode-2"])
        for node in ("prefill-1", "decode-1"):
            await fabric.cluster.restart(node)

"""What a tenant may hold, and what its requests may ask to be kept, on a real cluster."""

import json
from pathlib import Path

import pytest

from kv_services.config import TenantConfig
from kv_services.config_file import dump_config
from tests.integration.helpers_integration import BLOCK, GEOMETRY, Fabric, prompt, running, until
from tests.integration.test_prefix_commands import kvctl

pytestmark = [pytest.mark.integration, pytest.mark.timeout(240)]

KEYS = {name: f"key-of-tenant-{name}-for-tests" for name in ("small", "other")}
QUOTA = 12
TENANTS = [
    TenantConfig(
        id="small",
        api_keys=[KEYS["small"]],
        kv_quota=f"{QUOTA * GEOMETRY.block_nbytes} B",
        retain_quota=4,
        retain_ttl_max_s=600,
    ),
    TenantConfig(id="other", api_keys=[KEYS["other"]]),
]


async def held(fabric: Fabric, node: str, tenant: str) -> float:
    _, text = await fabric.get(node, "/metrics")
    lines = (line.rsplit(" ", 1) for line in text.splitlines())
    return sum(float(value) for key, value in lines if key == f'kv_tenant_blocks{{tenant="{tenant}"}}')


async def test_a_tenant_has_its_share_of_blocks_and_keeps_what_it_asks_to_keep_within_it(tmp_path: Path) -> None:
    async with running(slots=64, tenants=TENANTS, operator_keys=["operator-key-of-the-test"]) as fabric:

        async def ask(tenant: str, seed: int, blocks: int, **extra: object) -> int:
            tokens = prompt(seed, blocks * BLOCK + 1)
            answer = await fabric.ask(tokens, 2, key=KEYS[tenant], **extra)
            assert answer.is_right(tokens, 2), answer
            return answer.cached

        others = await ask("other", 900, 20)
        too_long = await fabric.ask(prompt(1, (QUOTA + 1) * BLOCK + 1), 2, key=KEYS["small"])
        assert (too_long.status, too_long.error["code"]) == (429, "kv_quota_exceeded"), too_long
        assert "tenant 'small'" in too_long.error["message"] and too_long.retry_after is not None

        # Of two prompts one is kept; then four times the rest of the quota is asked for.
        kept = {"kv_retention": {"ttl_s": 600, "priority": 80}}
        assert await ask("small", 50, 3, **kept) == await ask("small", 60, 3) == others == 0
        for seed in range(100, 108):
            await ask("small", seed, 4)
        assert await ask("small", 50, 3) == 3 * BLOCK
        assert await ask("small", 60, 3) == 0
        # Room was never short: nobody else's blocks went for it.
        assert await ask("other", 900, 20) == 20 * BLOCK

        kept_now: dict[str, float] = {}

        async def kept_are(count: int) -> bool:
            kept_now.update({node: await fabric.metric(node, "kv_retained_blocks") for node in fabric.kv_nodes})
            return set(kept_now.values()) == {count}

        async def counted() -> bool:
            held_now = [await held(fabric, node, "small") for node in fabric.kv_nodes]
            assert all(count <= QUOTA for count in held_now), held_now
            return all(held_now) and await kept_are(3)

        await until(counted, lambda: str(kept_now))

        # An operator has a prompt kept: of its two blocks as many as the tenant may still retain.
        file, tokens = tmp_path / "cluster.toml", tmp_path / "tokens.json"
        file.write_text(dump_config(fabric.config))
        tokens.write_text(json.dumps(prompt(70, 2 * BLOCK + 1)))
        words = ("--tokens", str(tokens), "--tenant", "small", "--keep-s", "600", "--priority", "90")
        status, found = await kvctl(file, "warm", *words)
        assert status == 0, found

        await until(lambda: kept_are(4), lambda: str(kept_now))

        for tenant, extra, code in (
            ("other", kept, "unsupported_parameter"),
            ("small", {"kv_retention": {"ttl_s": 601}}, "invalid_value"),
        ):
            refused = await fabric.ask(prompt(1, 40), 1, key=KEYS[tenant], **extra)
            assert (refused.status, refused.error["code"]) == (400, code), refused
        await fabric.settle(fabric.kv_nodes)

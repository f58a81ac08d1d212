"""`kvctl prefix` against a real cluster with tenants: warm, pin, explain, purge; quotas; who may read whose KV."""

import asyncio
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from kv_services.config import TenantConfig
from kv_services.config_file import dump_config
from tests.integration.helpers_integration import BLOCK, Fabric, prompt, running, until

pytestmark = [pytest.mark.integration, pytest.mark.timeout(300)]

OPERATOR = "operator-key-of-the-test"
KEYS = {name: f"key-of-tenant-{name}-for-tests" for name in ("a", "b", "c")}
TENANTS = [
    TenantConfig(id="a", api_keys=[KEYS["a"]], salt="pepper", pin_quota=12, max_requests=1),
    TenantConfig(id="b", api_keys=[KEYS["b"]], shares_with=["a"]),
    TenantConfig(id="c", api_keys=[KEYS["c"]]),
]
PROMPT = prompt(3, 10 * BLOCK + 1)
LONG = prompt(9, 60 * BLOCK + 1)
"""Tokens that take more than a kilobyte as JSON."""


async def kvctl(file: Path, *words: str) -> tuple[int, Any]:
    """Exit status and JSON, or the last line, of a command."""
    command = ("prefix", words[0], str(file), *words[1:], "--json")
    pipe = asyncio.subprocess.PIPE
    program = Path(sys.executable).parent / "kvctl"
    process = await asyncio.create_subprocess_exec(str(program), *command, stdout=pipe, stderr=pipe)
    out, err = await process.communicate()
    assert process.returncode is not None
    return process.returncode, json.loads(out) if process.returncode == 0 or out.strip() else err.decode()


async def verdicts(file: Path, node: str, *words: str) -> list[str]:
    status, found = await kvctl(file, "explain", *words)
    assert status == 0, found
    return [row["verdict"] for row in found[node]["blocks"]]


async def test_prefixes_are_warmed_pinned_explained_shared_and_purged(tmp_path: Path) -> None:
    async with running(tenants=TENANTS, operator_keys=[OPERATOR]) as fabric:
        file, tokens = tmp_path / "cluster.toml", tmp_path / "tokens.json"
        file.write_text(dump_config(fabric.config))
        tokens.write_text(json.dumps(PROMPT))
        mine = ("--tokens", str(tokens), "--tenant", "a")

        assert await verdicts(file, "prefill-1", *mine) == ["never seen"] * 10
        status, found = await kvctl(file, "warm", *mine, "--pin", "system")
        assert status == 0 and found["pins"]["prefill-1"] == {"pinned": 10, "of": 10}, found
        assert await verdicts(file, "prefill-1", *mine) == ["hit"] * 10
        await fabric.all_held(PROMPT, 10, ["prefill-1"], "a")
        status, found = await kvctl(file, "lookup", *mine)
        assert status == 0 and {one["node"]: one["blocks"] for one in found["holders"]}["prefill-1"] == 10, found
        (tmp_path / "long.json").write_text(json.dumps(LONG))
        asked = ("--tokens", str(tmp_path / "long.json"), "--tenant", "a")
        assert await verdicts(file, "prefill-1", *asked) == ["never seen"] * 60
        await quotas_hold(fabric, file, tmp_path)
        await tenants_see_what_they_may(fabric, file, tokens)

        status, found = await kvctl(file, "unpin", "--name", "system")
        assert status == 0 and found["nodes"]["prefill-1"] == {"unpinned": 10}
        status, found = await kvctl(file, "unpin", "--name", "system")
        assert status == 1 and "nothing is pinned" in found
        await fabric.settle(fabric.kv_nodes)

        status, found = await kvctl(file, "pin", "--name", "again", *mine)
        assert status == 0 and found["pins"]["prefill-1"]["pinned"] == 10, found
        status, found = await kvctl(file, "purge", "--tenant", "a")
        assert status == 0, found

        async def gone() -> bool:
            seen = [await verdicts(file, node, *mine) for node in fabric.kv_nodes]
            return all(one == ["purged"] * 10 for one in seen)

        await until(gone)
        # A pin of what nobody can find any more would keep its slots for nothing.
        await fabric.settle(fabric.kv_nodes)
        # The copy that another tenant made of what was shared with it is its own.
        answer = await fabric.ask(PROMPT, 2, key=KEYS["b"])
        assert answer.is_right(PROMPT, 2) and answer.cached >= 9 * BLOCK
        answer = await fabric.ask(PROMPT, 2, key=KEYS["a"])
        assert answer.is_right(PROMPT, 2) and answer.cached == 0


async def quotas_hold(fabric: Fabric, file: Path, folder: Path) -> None:
    """Tenant a may pin 12 blocks, of which 10 are used, and have one request open."""
    other = prompt(4, 5 * BLOCK + 1)
    (folder / "other.json").write_text(json.dumps(other))
    status, found = await kvctl(file, "warm", "--tokens", str(folder / "other.json"), "--tenant", "a", "--pin", "more")
    assert status != 0 and "quota" in str(found), found
    async with fabric.session.post(
        f"{fabric.cluster.url('gateway')}/v1/completions",
        json=fabric.body(prompt(5, 40), 2_000, stream=True),
        headers={"Authorization": f"Bearer {KEYS['a']}"},
    ) as first:
        assert first.status == 200
        second = await fabric.ask(prompt(6, 40), 1, key=KEYS["a"])
        assert second.status == 429 and second.is_clear_error() and second.retry_after is not None
        assert (await fabric.ask(prompt(6, 40), 1, key=KEYS["c"])).status == 200
        first.close()

    async def over() -> bool:
        return (await fabric.status("gateway")).running == 0

    await until(over)


async def tenants_see_what_they_may(fabric: Fabric, file: Path, tokens: Path) -> None:
    """b reads what a has, c does not and is not told either; neither changes what a has."""
    assert (
        await verdicts(file, "prefill-1", "--tokens", str(tokens), "--tenant", "c")
        == ["held in another namespace"] * 10
    )
    answer = await fabric.ask(PROMPT, 2, key=KEYS["c"])
    assert answer.is_right(PROMPT, 2) and answer.cached == 0
    answer = await fabric.ask(PROMPT, 2, key=KEYS["b"])
    assert answer.is_right(PROMPT, 2) and answer.cached >= 9 * BLOCK, answer
    longer = (*PROMPT, *prompt(8, 3 * BLOCK))
    answer = await fabric.ask(longer, 2, key=KEYS["b"])
    assert answer.is_right(longer, 2)
    # What b computed behind a's prefix is not a's.
    answer = await fabric.ask(longer, 2, key=KEYS["a"])
    assert answer.is_right(longer, 2) and answer.cached <= 10 * BLOCK

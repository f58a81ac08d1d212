"""`kvctl prefix explain` against a real cluster whose gateway follows an engine outside it."""

import asyncio
import json
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import pytest

from kv_services.config import FollowedEngine, KVEventsSection
from kv_services.config_file import dump_config
from kv_services.launch import LocalCluster, PortReservation, local_config
from tests.integration.helpers_integration import BLOCK, MODEL, Fabric, prompt
from tests.integration.test_prefix_commands import kvctl
from tests.services.helpers_engine import SENT, EngineStandIn, removed, stored

pytestmark = [pytest.mark.integration, pytest.mark.timeout(200)]

OPERATOR = "operator-key-of-the-test"
PROMPT = prompt(3, 6 * BLOCK + 1)
OTHER = prompt(4, 2 * BLOCK)


async def test_nodes_and_engines_say_what_became_of_the_blocks(tmp_path: Path) -> None:
    with EngineStandIn() as engine, PortReservation() as ports:
        config = local_config(ports, prefill=1, decode=1, monitor=False, model=MODEL)
        follow = [FollowedEngine(name="vllm-1", events=engine.events, replay=engine.replay)]
        config = msgspec.structs.replace(
            config,
            kv_events=KVEventsSection(follow=follow),
            cluster=msgspec.structs.replace(config.cluster, operator_keys=[OPERATOR]),
        )
        (tmp_path / "cluster.toml").write_text(dump_config(config))
        (tmp_path / "tokens.json").write_text(json.dumps(PROMPT))
        file, tokens = tmp_path / "cluster.toml", ("--tokens", str(tmp_path / "tokens.json"))

        async def explained(*words: str) -> dict[str, Any]:
            status, found = await kvctl(file, "explain", *words)
            assert status == 0, found
            assert isinstance(found, dict)
            return found

        async with LocalCluster(config) as cluster, aiohttp.ClientSession() as session:
            fabric = Fabric(cluster, session)
            for name in ("gateway", "prefill-1", "decode-1"):
                await fabric.all_alive(name, {"gateway", "prefill-1", "decode-1"} - {name})
            found = await explained(*tokens)
            assert {row["verdict"] for row in found["vllm-1"]["blocks"]} == {"nothing heard of the engine yet"}

            # A subscription reaches a publisher when it likes: it tells of another prompt until it is heard.
            engine.tell(stored(range(4), PROMPT[: 4 * BLOCK]))
            gone = engine.tell(removed(3, 2))
            async with asyncio.timeout(90):
                while found["vllm-1"]["blocks"][0]["verdict"] != "held by the engine":
                    engine.tell(stored([100, 101], OTHER))
                    engine.answer_replays()
                    found = await explained(*tokens)
            rows = found["vllm-1"]["blocks"]
            assert [row["verdict"] for row in rows] == [
                *["held by the engine"] * 2,
                *["removed by the engine"] * 2,
                *["never announced by the engine"] * 2,
            ]
            assert rows[2]["detail"] == f"event {gone}, sent {SENT} by its own clock"
            assert [row["verdict"] for row in found["prefill-1"]["blocks"]] == ["never seen"] * 6

            body = {"model": MODEL.id, "prompt": list(PROMPT), "max_tokens": 2, "temperature": 0}
            async with session.post(f"{cluster.url('gateway')}/v1/completions", json=body) as response:
                assert response.status == 200
                request_id = response.headers["X-Request-Id"]
            by_id = await explained("--request", request_id)
            assert by_id["vllm-1"] == found["vllm-1"]
            assert [row["verdict"] for row in by_id["prefill-1"]["blocks"]] == ["hit"] * 6
            assert (await fabric.ask(PROMPT, 2)).is_right(PROMPT, 2)
    assert cluster.leftovers == []

"""`kvctl prefix explain` has what nodes and, of followed engines, gateways answer in one text and one JSON."""

import asyncio
import json
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
from aiohttp import web
from typer.testing import CliRunner, Result

from kv_services.config import ClusterSection, FollowedEngine, KVEventsSection
from kv_services.config_file import dump_config
from kv_services.kvctl import app
from kv_services.launch import PortReservation, local_config

KEY = "operator-key-of-the-test"
Said = tuple[int, dict[str, Any]]


def blocks(*rows: tuple[str, str]) -> dict[str, Any]:
    said = [
        {"block": number, "verdict": verdict, "detail": detail, "holders": []}
        for number, (verdict, detail) in enumerate(rows)
    ]
    return {"tokens": 16 * len(rows), "block_size": 16, "blocks": said}


def followed(**engines: dict[str, Any]) -> Said:
    return 200, {"engines": {name.replace("_", "-"): answer for name, answer in engines.items()}}


NODE = 200, blocks(("hit", "in this node's pool"), ("never seen", "no trace of it"))
ENGINE = blocks(("held by the engine", "vllm-1 has it in device"), ("removed by the engine", "event 7, sent then"))
GONE = blocks(("cleared by the engine", "event 3, sent then"), ("cleared by the engine", "event 3, sent then"))
NOT_HERE = 400, {"error": {"message": "no prompt: request 'cmpl-1' was not here lately"}}


class Cluster:
    """Processes that answer /prefix/explain as told, and keep what they were asked."""

    def __init__(self, answers: Mapping[str, Said]) -> None:
        self.answers = answers
        self.asked: list[tuple[str, dict[str, Any], str | None]] = []

    def app(self, node: str) -> web.Application:
        async def explain(request: web.Request) -> web.Response:
            self.asked.append((node, await request.json(), request.headers.get("Authorization")))
            status, body = self.answers[node]
            return web.json_response(body, status=status)

        served = web.Application()
        served.router.add_post("/prefix/explain", explain)
        return served


@contextmanager
def cluster(folder: Path, answers: Mapping[str, Said], engines: tuple[str, ...]) -> Iterator[tuple[str, Cluster]]:
    """The cluster file, and who answers behind it in a thread: the command has a loop of its own."""
    with PortReservation() as ports:
        config = local_config(ports, prefill=1, decode=1, gateways=2, monitor=False)
    engine_list = [FollowedEngine(name=name, events="tcp://h:1", replay="tcp://h:2") for name in engines]
    config = msgspec.structs.replace(
        config,
        kv_events=KVEventsSection(follow=engine_list),
        cluster=ClusterSection(operator_keys=[KEY]),
    )
    file, told = folder / "cluster.toml", Cluster(answers)
    file.write_text(dump_config(config))
    (folder / "tokens").write_text("1, 2, 3")
    loop, ready, runners = asyncio.new_event_loop(), threading.Event(), list[web.AppRunner]()

    async def serve() -> None:
        for node in config.nodes:
            if node.id in answers:
                runners.append(web.AppRunner(told.app(node.id)))
                await runners[-1].setup()
                await web.TCPSite(runners[-1], node.host, node.http_port).start()
        ready.set()

    async def stop() -> None:
        for runner in runners:
            await runner.cleanup()
        loop.stop()

    thread = threading.Thread(target=lambda: (loop.create_task(serve()), loop.run_forever()))
    thread.start()
    try:
        assert ready.wait(30)
        yield str(file), told
    finally:
        asyncio.run_coroutine_threadsafe(stop(), loop)
        thread.join(30)
        loop.close()


def explain(file: str, *words: str) -> Result:
    return CliRunner(env={"COLUMNS": "160"}).invoke(app, ["prefix", "explain", file, *words])


def test_engines_stand_beside_nodes_in_the_json_and_in_the_text(tmp_path: Path) -> None:
    answers = {"gateway-1": followed(vllm_1=ENGINE, vllm_2=GONE), "prefill-1": NODE, "decode-1": NODE}
    with cluster(tmp_path, answers, ("vllm-1", "vllm-2")) as (file, told):
        result = explain(file, "--tokens", str(tmp_path / "tokens"), "--json")
        assert result.exit_code == 0, result.output
        found = json.loads(result.stdout)
        assert found == {"prefill-1": NODE[1], "decode-1": NODE[1], "vllm-1": ENGINE, "vllm-2": GONE}
        assert {(node, key) for node, _, key in told.asked} == {
            (node, f"Bearer {KEY}") for node in ("gateway-1", "prefill-1", "decode-1")
        }
        assert all(ask == {"tenant": "default", "tokens": [1, 2, 3]} for _, ask, _ in told.asked)
        text = explain(file, "--tokens", str(tmp_path / "tokens")).stdout
    for line in ("vllm-1: 32 tokens", "removed by the engine", "event 7, sent then", "prefill-1: 32 tokens"):
        assert line in text
    # A run of blocks with one verdict is one line.
    assert [line.split("│")[1].strip() for line in text.splitlines() if "cleared by the engine" in line] == ["0-1"]


def test_a_past_request_is_looked_for_at_every_gateway(tmp_path: Path) -> None:
    answers = {"gateway-1": NOT_HERE, "gateway-2": followed(vllm_1=ENGINE), "prefill-1": NODE, "decode-1": NOT_HERE}
    with cluster(tmp_path, answers, ("vllm-1",)) as (file, told):
        result = explain(file, "--request", "cmpl-1", "--json")
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert found["vllm-1"] == ENGINE and "was not here lately" in found["decode-1"]
    assert all(ask == {"request_id": "cmpl-1"} for _, ask, _ in told.asked)


@pytest.mark.parametrize(
    ("answers", "why"),
    [
        ({}, "gateway-1: does not listen; gateway-2: does not listen"),
        ({"gateway-1": NOT_HERE}, "gateway-1: no prompt: request 'cmpl-1' was not here lately; gateway-2: does not"),
        ({"gateway-1": followed(other=ENGINE)}, "gateway-1: it does not follow vllm-1"),
    ],
)
def test_why_nobody_can_say_stands_in_the_engines_place(tmp_path: Path, answers: dict[str, Said], why: str) -> None:
    with cluster(tmp_path, {**answers, "prefill-1": NODE, "decode-1": NODE}, ("vllm-1",)) as (file, _):
        result = explain(file, "--request", "cmpl-1", "--json")
        assert result.exit_code == 0, result.output
        assert json.loads(result.stdout)["vllm-1"].startswith(why)
        assert "does not" in explain(file, "--request", "cmpl-1").stdout or "not here" in result.stdout


def test_without_followed_engines_no_gateway_is_asked(tmp_path: Path) -> None:
    with cluster(tmp_path, {"gateway-1": NODE, "prefill-1": NODE, "decode-1": NODE}, ()) as (file, told):
        result = explain(file, "--tokens", str(tmp_path / "tokens"), "--json")
    assert result.exit_code == 0 and set(json.loads(result.stdout)) == {"prefill-1", "decode-1"}
    assert sorted(node for node, _, _ in told.asked) == ["decode-1", "prefill-1"]

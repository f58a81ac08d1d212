"""A gateway's answers about followed engines, whose events come over real sockets from a stand-in."""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Callable
from typing import Any

import msgspec
import pytest

from kv_core.hashing import hash_tokens, token_bytes
from kv_core.namespace import Namespace
from kv_prefix.prefix_index import PrefixIndex
from kv_services.config import ClusterConfig, FollowedEngine, KVEventsSection
from kv_services.config_file import parse_config
from kv_services.gateway import following
from kv_services.gateway.errors import InvalidRequestError
from kv_services.gateway.following import FollowedExplain, followed_engines
from kv_services.kv_events import follow
from kv_services.past_requests import PastRequests
from kv_services.prompt_asks import tenant_namespace
from tests.kvctl.test_config import DECODE, GATEWAY
from tests.services.helpers_engine import CLEARED, SENT, EngineStandIn, removed, stored

BLOCK = 16
PROMPT = [i * 7 % 251 for i in range(6 * BLOCK)]


def blocks(first: int, after: int) -> list[int]:
    """The tokens of some blocks of the prompt."""
    return PROMPT[first * BLOCK : after * BLOCK]


class Gateway:
    """What a gateway has of its followed engines."""

    def __init__(self, config: ClusterConfig) -> None:
        self.index, self.past = PrefixIndex(), PastRequests()
        self.engines = followed_engines(config, self.index, "w1")
        self.explain = FollowedExplain(config, "w1", self.engines, self.index, self.past)
        self.namespace: Namespace = tenant_namespace(config, "w1", "default", None)

    async def rows(self, engine: str = "vllm-1", **ask: Any) -> list[dict[str, Any]]:
        body = msgspec.json.encode(ask or {"tokens": PROMPT})
        answer: dict[str, Any] = json.loads(await self.explain.answer(body))["engines"][engine]
        assert answer["tokens"] == len(PROMPT) and answer["block_size"] == BLOCK
        rows: list[dict[str, Any]] = answer["blocks"]
        return rows

    async def verdicts(self, engine: str = "vllm-1") -> list[str]:
        return [row["verdict"] for row in await self.rows(engine)]

    def heard(self, engine: int = 0) -> int:
        return self.engines[engine].follower.num_heard


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(30):
        while not condition():  # noqa: ASYNC110 - sockets know no event of ours
            await asyncio.sleep(0.005)


@contextlib.asynccontextmanager
async def listening(*engines: EngineStandIn) -> AsyncIterator[Gateway]:
    follow = [
        FollowedEngine(name=f"vllm-{number}", events=one.events, replay=one.replay)
        for number, one in enumerate(engines, 1)
    ]
    config = parse_config(GATEWAY + DECODE)
    gateway = Gateway(msgspec.structs.replace(config, kv_events=KVEventsSection(follow=follow)))
    running = []
    try:
        for child in gateway.engines:
            await child.start()
            running.append(asyncio.create_task(child.run()))
        yield gateway
    finally:
        for child in gateway.engines:
            await child.close()
        await asyncio.gather(*running)


async def connected(gateway: Gateway, engine: EngineStandIn, number: int = 0) -> None:
    """Tell of nothing until it is heard: a subscription reaches a publisher when it likes."""
    await until(lambda: (engine.tell(), engine.answer_replays(), gateway.heard(number))[2])
    await until(lambda: (engine.answer_replays(), gateway.heard(number) == engine.num_told)[1])


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A replay is awaited for as long as a test keeps it back."""
    monkeypatch.setattr(follow, "REPLAY_TIMEOUT_S", 300.0)


async def test_each_end_of_a_block_is_told_with_its_event() -> None:
    with EngineStandIn() as engine, EngineStandIn() as other:
        async with listening(engine, other) as gateway:
            assert await gateway.verdicts() == ["nothing heard of the engine yet"] * 6
            await connected(gateway, engine)
            assert await gateway.verdicts() == ["never announced by the engine"] * 6
            engine.tell(stored(range(4), blocks(0, 4)))
            gone = engine.tell(removed(3, 2))
            await until(lambda: gateway.heard() == engine.num_told)
            rows = await gateway.rows()
            assert [row["verdict"] for row in rows] == [
                *["held by the engine"] * 2,
                *["removed by the engine"] * 2,
                *["never announced by the engine"] * 2,
            ]
            assert rows[0] == {
                "block": 0,
                "verdict": "held by the engine",
                "detail": "vllm-1 has it in device",
                "holders": ["vllm-1"],
            }
            assert rows[2]["detail"] == f"event {gone}, sent {SENT} by its own clock" and rows[2]["holders"] == []
            cleared = engine.tell(CLEARED)
            await until(lambda: gateway.heard() == engine.num_told)
            rows = await gateway.rows()
            assert [row["verdict"] for row in rows[:4]] == [
                *["cleared by the engine"] * 2,
                *["removed by the engine"] * 2,
            ]
            assert rows[0]["detail"].startswith(f"event {cleared}, ")
            # Each engine is asked about its own events.
            assert await gateway.verdicts("vllm-2") == ["nothing heard of the engine yet"] * 6


async def test_a_gap_is_told_of_until_its_replay_has_come() -> None:
    with EngineStandIn() as engine:
        async with listening(engine) as gateway:
            await connected(gateway, engine)
            first = engine.tell(stored(range(4), blocks(0, 4)), lost=True)
            engine.tell(removed(3), lost=True)
            engine.tell()
            await until(lambda: gateway.engines[0].follower.gap is not None)
            rows = await gateway.rows()
            assert {row["verdict"] for row in rows} == {"missed in events not replayed yet"}
            assert rows[0]["detail"].startswith(f"no trace of it; events {first}-{first + 1} not here yet")
            await until(engine.answer_replays)
            await until(lambda: gateway.heard() == engine.num_told)
            assert await gateway.verdicts() == [
                *["held by the engine"] * 3,
                "removed by the engine",
                *["never announced by the engine"] * 2,
            ]


async def test_what_a_replay_cannot_give_any_more_is_told_as_lost() -> None:
    with EngineStandIn() as engine:
        async with listening(engine) as gateway:
            await connected(gateway, engine)
            engine.tell(stored(range(2), blocks(0, 2)))
            lost = engine.tell(stored(range(2, 4), blocks(2, 4), parent=1), lost=True)
            engine.kept_from = lost + 1
            engine.tell()
            await until(engine.answer_replays)
            await until(lambda: gateway.engines[0].follower.stats.resets)
            rows = await gateway.rows()
            assert [row["verdict"] for row in rows] == [
                *["dropped with all that was known of the engine"] * 2,
                *["missed in events that no replay gave"] * 4,
            ]
            assert f"no replay gave event {lost}" in rows[0]["detail"]
            engine.begin_anew()
            engine.tell(stored([7], blocks(0, 1)))
            await until(engine.answer_replays)
            await until(lambda: gateway.index.lookup(hash_tokens(gateway.namespace, PROMPT)))
            assert (await gateway.verdicts())[:3] == [
                "held by the engine",
                "dropped with all that was known of the engine",
                "never announced by the engine",
            ]


async def test_a_past_request_is_explained_by_its_id() -> None:
    with EngineStandIn() as engine:
        async with listening(engine) as gateway:
            await connected(gateway, engine)
            engine.tell(stored([1], blocks(0, 1)))
            await until(lambda: gateway.heard() == engine.num_told)
            gateway.past.note("cmpl-1", gateway.namespace, token_bytes(PROMPT))
            rows = await gateway.rows(request_id="cmpl-1")
            assert [row["verdict"] for row in rows[:2]] == ["held by the engine", "never announced by the engine"]
            with pytest.raises(InvalidRequestError, match="request 'cmpl-2' was not here lately"):
                await gateway.rows(request_id="cmpl-2")
            wrong: list[dict[str, Any]] = [
                {"tokens": PROMPT, "tenant": "nobody"},
                {"tokens": []},
                {"tokens": "all"},
                {"other": 1},
            ]
            for ask in wrong:
                with pytest.raises(InvalidRequestError):
                    await gateway.rows(**ask)


async def test_a_long_prompt_lets_the_gateways_streams_have_their_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(following, "BLOCKS_A_TURN", 2)
    with EngineStandIn() as engine:
        async with listening(engine) as gateway:
            turns = 0

            async def stream() -> None:
                nonlocal turns
                while True:
                    turns += 1
                    await asyncio.sleep(0)

            task = asyncio.create_task(stream())
            await gateway.rows()
            task.cancel()
            assert turns >= 3

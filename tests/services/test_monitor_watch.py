"""What the monitor sees of real HTTP servers: whole answers only, and nobody who is no member any more."""

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import cast

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from kv_core.ids import NodeId
from kv_services.config import ClusterConfig, NodeConfig
from kv_services.launch import PortReservation, local_config
from kv_services.metrics import Metrics
from kv_services.monitor.process import Watch
from kv_services.monitor.sampling import sample_of
from kv_services.process import Base

Answer = Callable[[web.Request], Coroutine[None, None, web.StreamResponse]]


def exposition(failures: int) -> bytes:
    """A process with that many failed transfers of 100; the failures come after the first kilobytes."""
    metrics = Metrics("decode-1", "decode")
    for number in range(100):
        if number < failures:
            metrics.transfer_failed("ConnectionLost")
        else:
            metrics.transfer_done(number, "shm", 1, 1, 0)
    return metrics.expose(0)


@asynccontextmanager
async def watching(answer: Answer, members: Callable[[ClusterConfig], list[NodeConfig]]) -> AsyncIterator[Watch]:
    """A monitor of a cluster whose decode node answers /metrics so."""
    with PortReservation() as ports:
        config = local_config(ports, prefill=0, decode=1)
    application = web.Application()
    application.router.add_get("/metrics", answer)
    node = config.node("decode-1")
    base = SimpleNamespace(
        config=config,
        node=config.node("monitor"),
        metrics=Metrics("monitor", "monitor"),
        processes=lambda: members(config),
    )
    watch = Watch(cast(Base, base))
    async with TestServer(application, host="127.0.0.1", port=node.http_port):
        await watch.start()
        running = asyncio.create_task(watch.run())
        try:
            yield watch
        finally:
            await watch.close()
            await running


async def until(holds: Callable[[], object]) -> None:
    async with asyncio.timeout(30):
        while not holds():  # noqa: ASYNC110  # the monitor asks at a pace of its own
            await asyncio.sleep(0.01)


async def test_an_answer_that_comes_in_pieces_is_read_whole() -> None:
    body = exposition(failures=50)

    async def slowly(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        for start in range(0, len(body), 1500):
            await response.write(body[start : start + 1500])
            await asyncio.sleep(0.001)
        return response

    async with watching(slowly, lambda config: [config.node("decode-1")]) as watch:
        await until(lambda: watch.samples)
        assert watch.samples["decode-1"].transfer_failures == 50
        assert any("50.0% of its last 100 transfers failed" in alert for alert in watch.health.alerts())


async def test_whoever_is_no_member_any_more_has_no_alert() -> None:
    there = True

    async def answer(_: web.Request) -> web.StreamResponse:
        return web.Response(body=exposition(failures=50))

    def members(config: ClusterConfig) -> list[NodeConfig]:
        return [config.node("decode-1")] if there else []

    async with watching(answer, members) as watch:
        await until(watch.health.alerts)
        there = False
        await until(lambda: not watch.samples)
        assert watch.health.alerts() == []


async def test_what_answers_otherwise_is_told_with_its_cause() -> None:
    asked = 0

    async def answer(_: web.Request) -> web.StreamResponse:
        nonlocal asked
        asked += 1
        return web.Response(body=exposition(failures=0)) if asked == 1 else web.Response(status=401)

    async with watching(answer, lambda config: [config.node("decode-1")]) as watch:
        await until(watch.health.alerts)
        assert watch.health.alerts() == ["decode-1 does not answer: it answers 401"]


@pytest.mark.parametrize(
    "body",
    ["kv_prefix_tokens_total +Inf\n", "kv_transfer_seconds_count NaN\n", "kv_cache_hit_ratio\n", "<html>"],
)
def test_what_is_no_exposition_of_ours_is_one_error(body: str) -> None:
    with pytest.raises(ValueError):
        sample_of(NodeId("decode-1"), body)


def test_a_count_without_its_labels_is_counted_for_no_link() -> None:
    sample = sample_of(NodeId("decode-1"), "kv_link_transfers_total 3\n")
    assert sample.links == (("", 3, 0),)

"""A node that ends waits for nothing that may never come: bytes that are being read, a writer that stands still."""

import asyncio
from types import SimpleNamespace
from typing import Any, cast

import pytest

from kv_client.messages import FinishPut, PutReserved, ReservePut
from kv_core.dtypes import DType
from kv_core.errors import KVError
from kv_core.hashing import token_bytes
from kv_core.ids import Incarnation, NodeId, RegionId
from kv_core.namespace import Namespace
from kv_core.testing import ManualClock
from kv_prefix.block_pool import BlockPool
from kv_services.closing import close_all
from kv_services.errors import MoveRefusedError
from kv_services.messages import AdoptPrefix, NamespaceFields
from kv_services.node.adopter import Adopter
from kv_services.node.client_desk import ClientDesk
from kv_services.node.context import NodeContext
from kv_services.node.process import NodeWork

SIZE = 4
NAMESPACE = Namespace("m", "w", dtype=DType.FP16, block_size=SIZE)
TOKENS = token_bytes(range(2 * SIZE))
ENDS_S = 5.0
"""A safety net: what is measured is whether it ends at all."""


class _Never:
    """A transfer or hand-over of which nothing more is heard."""

    def __init__(self) -> None:
        self.began = asyncio.Event()
        self.cancelled = False

    async def wait(self, timeout_ms: int | None = None) -> None:
        self.began.set()
        await asyncio.Event().wait()

    done = released = wait

    async def settled(self) -> None:
        assert self.cancelled, "it is in quarantine only once it was given up"

    def cancel(self) -> None:
        self.cancelled = True


class _Breaks(_Never):
    """A transfer that fails when it is told to."""

    def __init__(self, wrong: BaseException) -> None:
        super().__init__()
        self.wrong = wrong
        self.breaks = asyncio.Event()

    async def wait(self, timeout_ms: int | None = None) -> None:
        self.began.set()
        await self.breaks.wait()
        raise self.wrong


def context(pool: BlockPool, transfer: _Never) -> NodeContext:
    async def ensure(node: NodeId, deadline_ns: int) -> None:
        await asyncio.sleep(0)

    transfers = SimpleNamespace(
        fetch=lambda *args: transfer,
        grant_writes=lambda *args, **kind: SimpleNamespace(to_bytes=lambda: b"grant"),
        expect=lambda *args, **kind: transfer,
    )
    parts = SimpleNamespace(
        node_id=NodeId("n"),
        block_size=SIZE,
        pool=pool,
        clock=ManualClock(),
        transfers=transfers,
        metrics=SimpleNamespace(transfer_failed=lambda cause: None),
        recovery=SimpleNamespace(ended=lambda *args, **kind: None),
        introductions=SimpleNamespace(ensure=ensure),
        replica=SimpleNamespace(learn=lambda namespace: None, know=lambda namespace: None),
        arena=SimpleNamespace(geometry=SimpleNamespace(block_size=SIZE, dtype=DType.FP16)),
        prepare=lambda refs: None,
        flush_pool_events=lambda: None,
    )
    return cast(NodeContext, parts)


def request(message: object) -> Any:
    return SimpleNamespace(message=message, sender=NodeId("peer"), incarnation=Incarnation(1), deadline_ns=1 << 62)


async def test_a_node_that_ends_does_not_wait_for_a_prefix_that_it_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kv_services.node.adopter.ReadGrant.from_bytes", lambda data: data)
    pool, transfer = BlockPool(8, SIZE, region=RegionId(1)), _Never()
    adopter = Adopter(context(pool, transfer))
    ask = request(AdoptPrefix(NAMESPACE.digest, (), TOKENS, 0, b"grant"))
    asked = asyncio.ensure_future(adopter._on_adopt(ask))
    await transfer.began.wait()
    assert pool.stats().pinned == 2
    late = asyncio.ensure_future(adopter._on_adopt(ask))
    await asyncio.sleep(0)
    async with asyncio.timeout(ENDS_S):
        await adopter.close()
        await adopter.close()
    assert len(adopter) == 0
    assert pool.stats().pinned == 2, "bytes that are late may still be written there"
    with pytest.raises(asyncio.CancelledError):
        await asked
    with pytest.raises(MoveRefusedError):
        await late
    with pytest.raises(MoveRefusedError):
        await adopter._on_adopt(ask)


async def test_a_bug_is_told_though_its_caller_has_gone_and_a_failure_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kv_services.node.adopter.ReadGrant.from_bytes", lambda data: data)
    told: list[BaseException] = []
    asyncio.get_running_loop().set_exception_handler(lambda loop, context: told.append(context["exception"]))
    for wrong in (ZeroDivisionError(), KVError(detail="no bytes come")):
        pool, transfer = BlockPool(8, SIZE, region=RegionId(1)), _Breaks(wrong)
        adopter = Adopter(context(pool, transfer))
        asked = asyncio.ensure_future(
            adopter._on_adopt(request(AdoptPrefix(NAMESPACE.digest, (), TOKENS, 0, b"grant")))
        )
        await transfer.began.wait()
        asked.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asked
        transfer.breaks.set()
        async with asyncio.timeout(ENDS_S):
            while len(adopter):  # noqa: ASYNC110  # it ends by itself, and tells nobody
                await asyncio.sleep(0)
        assert pool.stats().free == 8
    assert [type(error) for error in told] == [ZeroDivisionError]


async def test_whatever_one_part_does_all_are_closed_and_in_their_order() -> None:
    closed: list[str] = []
    stuck = asyncio.Event()

    async def well() -> None:
        closed.append("well")

    async def hangs() -> None:
        closed.append("hangs")
        await stuck.wait()

    async def fails() -> None:
        closed.append("fails")
        raise KVError(detail="not now")

    with pytest.raises(KVError):
        await close_all(well, fails, well)
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.05):
            await close_all(well, hangs, fails, hangs, well)
    assert closed == ["well", "fails", "well", "well", "hangs", "fails", "hangs", "well"]


async def test_a_node_whose_tiers_do_not_close_in_time_still_stops_computing() -> None:
    closed: list[str] = []

    def part(name: str, *, hangs: bool = False) -> SimpleNamespace:
        async def close() -> None:
            closed.append(name)
            await asyncio.sleep(ENDS_S if hangs else 0)

        return SimpleNamespace(close=close)

    def now(name: str) -> SimpleNamespace:
        return SimpleNamespace(close=lambda: closed.append(name))

    work = object.__new__(NodeWork)
    work._closed = None
    vars(work).update({name: part(name) for name in ("copier", "decode", "prefill", "shards", "clients")})
    vars(work).update(operations=part("operations", hangs=True), prefixes=now("prefixes"), leases=now("leases"))
    vars(work).update(_introducer=part("introducer"))
    vars(work).update(ctx=SimpleNamespace(tiers=part("tiers"), compute=part("compute")))
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.05):
            await work.close()
    assert closed == [
        "copier", "operations", "decode", "prefill", "shards", "clients", "prefixes", "tiers", "introducer", "leases",
        "compute",
    ]  # fmt: skip


async def test_what_cannot_be_taken_gives_its_slots_back(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_grant(data: bytes) -> object:
        raise KVError(detail="no grant")

    monkeypatch.setattr("kv_services.node.adopter.ReadGrant.from_bytes", no_grant)
    pool = BlockPool(8, SIZE, region=RegionId(1))
    adopter = Adopter(context(pool, _Never()))
    with pytest.raises(KVError):
        await adopter._on_adopt(request(AdoptPrefix(NAMESPACE.digest, (), TOKENS, 0, b"grant")))
    assert pool.stats().free == 8


async def test_a_node_that_ends_does_not_wait_for_a_client_that_stands_still() -> None:
    pool, transfer = BlockPool(8, SIZE, region=RegionId(1)), _Never()
    desk = ClientDesk(context(pool, transfer), lambda node: False, lambda node: None, set)
    fields = NamespaceFields.of(NAMESPACE)
    reserved = await desk._on_reserve(request(ReservePut(fields, TOKENS, 2, 1_000_000)))
    assert isinstance(reserved, PutReserved)
    finishing = asyncio.ensure_future(desk._on_finish(request(FinishPut(reserved.put_id))))
    await transfer.began.wait()
    async with asyncio.timeout(ENDS_S):
        await desk.close()
    assert transfer.cancelled and pool.stats().pinned == 2
    assert [task for task in asyncio.all_tasks() if task.get_name() == f"put-{reserved.put_id}"] == []
    finishing.cancel()
    await asyncio.gather(finishing, return_exceptions=True)

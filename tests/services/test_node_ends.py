"""A node that ends waits for nothing that may never come: bytes that are being read, a writer that stands still."""

import asyncio
from types import SimpleNamespace
from typing import Any, cast

import pytest

from kv_client.messages import FinishPut, PutReserved, ReservePut
from kv_core.dtypes import DType
from kv_core.errors import KVError
from kv_core.hashing import token_bytes
from kv_core.ids import NodeId, RegionId
from kv_core.namespace import Namespace
from kv_core.testing import ManualClock
from kv_prefix.block_pool import BlockPool
from kv_services.errors import MoveRefusedError
from kv_services.messages import AdoptPrefix, NamespaceFields
from kv_services.node.adopter import Adopter
from kv_services.node.client_desk import ClientDesk
from kv_services.node.context import NodeContext

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
        introductions=SimpleNamespace(ensure=ensure),
        replica=SimpleNamespace(learn=lambda namespace: None, know=lambda namespace: None),
        arena=SimpleNamespace(geometry=SimpleNamespace(block_size=SIZE, dtype=DType.FP16)),
        prepare=lambda refs: None,
        flush_pool_events=lambda: None,
    )
    return cast(NodeContext, parts)


def request(message: object) -> Any:
    return SimpleNamespace(message=message, sender=NodeId("peer"), deadline_ns=1 << 62)


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

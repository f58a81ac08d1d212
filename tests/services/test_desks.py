"""What a node's desks keep, and for how long."""

import asyncio
import dataclasses
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest

from kv_client.errors import HolderLost, translate
from kv_client.messages import BlocksPinned, FinishPut, NamespaceFields, PinBlocks, PutStored, ReservePut, UnpinBlocks
from kv_consistency.manager import KvCacheConsistencyManager
from kv_core.clock import SystemClock
from kv_core.hashing import BlockHash, hash_tokens, token_bytes, token_digest
from kv_core.ids import Incarnation, NodeId, RegionId
from kv_core.namespace import Namespace
from kv_prefix.block_pool import BlockPool
from kv_prefix.errors import HolderLeavingError, UnknownReceiptError
from kv_prefix.prefix_index import PrefixIndex
from kv_services.metrics import Metrics
from kv_services.node.client_desk import ClientDesk, _Put
from kv_services.node.context import NodeContext
from kv_services.node.store import LeaseDesk
from kv_services.past_requests import PastRequests
from kv_services.replica import service
from kv_services.replica.service import ReplicaService
from kv_transport.errors import InvalidDescriptor
from kv_transport.types import PeerName
from tests.services.helpers_node_tiers import Life

NS = Namespace("model", "weights", block_size=4)
TOKENS = list(range(8))
LIFE = Incarnation(1)


def holding(num_slots: int) -> tuple[BlockPool, list[BlockHash]]:
    """A pool with the two blocks of `TOKENS`, and their names."""
    pool = BlockPool(num_slots, 4, region=RegionId(1))
    names = hash_tokens(NS, TOKENS)
    opened = pool.open("r", None, len(names))
    pool.commit(opened.table, NS.digest, 0, names, TOKENS)
    pool.release(opened.table)
    return pool, names


def test_past_requests_are_remembered_within_their_number_and_bytes() -> None:
    past = PastRequests(limit=3, bytes_max=100)
    for number in range(5):
        past.note(f"r{number}", NS, bytes(10))
    assert [past.get(f"r{number}") is not None for number in range(5)] == [False, False, True, True, True]
    past.note("r2", NS, bytes(20))
    past.note("long", NS, bytes(85))
    assert past.get("long") is not None and past.get("r2") is None and past.get("r4") is None
    past.note("longest", NS, bytes(1_000))
    assert past.get("longest") is not None and past.get("long") is None
    past.note("short", NS, bytes(1))
    assert past.get("short") is not None and past.get("longest") is None


def test_a_lease_that_no_grant_comes_of_pins_nothing() -> None:
    """A reader that asks for other blocks than its prefix has is refused, and holds nothing until its lease is over."""
    pool, names = holding(4)

    def refuse(*_: object, **__: object) -> None:
        raise InvalidDescriptor(what="tokens", value=[0, 12], reason="2 blocks do not hold them")

    ctx = SimpleNamespace(
        pool=pool,
        clock=SystemClock(),
        block_size=4,
        transfers=SimpleNamespace(lease_reads=refuse),
        exact=SimpleNamespace(fidelity=lambda published, slots: published),
    )
    desk = LeaseDesk(cast(NodeContext, ctx))
    with pytest.raises(InvalidDescriptor):
        desk.grant(
            NodeId("reader"),
            NS.digest,
            names[-1],
            token_digest(TOKENS),
            first_block=0,
            num_blocks=3,
            lease_ns=10**12,
        )
    assert len(desk) == 0 and not pool.holds() and pool.stats().pinned == 0


async def test_a_leaving_node_takes_no_put_and_no_pin_and_lends_nothing_once_its_blocks_are_given_away() -> None:
    """What it took in after that would be lost with it, and what it said of being safe to stop would not stay true."""
    pool, names = holding(4)

    async def known(node: NodeId, deadline_ns: int) -> None:
        assert node == "writer"

    geometry = SimpleNamespace(block_size=4, dtype=NS.dtype)
    ctx = cast(
        NodeContext,
        SimpleNamespace(
            pool=pool,
            node_id=NodeId("leaving"),
            block_size=4,
            arena=SimpleNamespace(geometry=geometry),
            introductions=SimpleNamespace(ensure=known),
        ),
    )
    clients = ClientDesk(ctx, lambda node: False, lambda node: None, set)
    clients.leaving = True
    fields, raw = NamespaceFields.of(NS), token_bytes(list(range(100, 108)))

    def asks(message: object) -> Any:
        return SimpleNamespace(message=message, sender=NodeId("writer"), incarnation=LIFE, deadline_ns=10**18)

    with pytest.raises(HolderLeavingError):
        await clients._on_reserve(asks(ReservePut(fields, raw, 2, 10**9)))
    with pytest.raises(HolderLeavingError):
        clients._on_pin(asks(PinBlocks(fields, token_bytes(TOKENS), 2)))
    leases = LeaseDesk(ctx)
    leases.ending = True
    digest = token_digest(TOKENS)
    with pytest.raises(HolderLeavingError) as refused:
        leases.grant(NodeId("r"), NS.digest, names[-1], digest, first_block=0, num_blocks=2, lease_ns=10**9)
    assert isinstance(translate(refused.value, "leaving"), HolderLost)
    assert not clients.num_puts and not len(leases) and not pool.holds() and pool.stats().pinned == 0


def test_namespaces_in_use_are_remembered_and_their_number_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forgotten by their scopes, they could not be purged with their tenant."""
    monkeypatch.setattr(service, "NAMESPACES_MAX", 8)
    manager = KvCacheConsistencyManager(NodeId("n"), Incarnation(1))
    replica = ReplicaService(manager, SystemClock(), PrefixIndex(), Life(), Metrics("n", "decode"))
    used = [replica.know(dataclasses.replace(NS, salt=f"tenant.{n}")) for n in range(3)]
    for number in range(100):
        other = replica.know(dataclasses.replace(NS, salt=f"other.{number}"))
        replica.learn(msgspec.structs.replace(other, digest=number.to_bytes(16, "big")))
        for n in range(3):
            replica.know(dataclasses.replace(NS, salt=f"tenant.{n}"))
        assert len(replica.namespaces()) <= 8
    assert [replica.known(ref.digest, 4) for ref in used] == used


async def test_how_a_put_ended_is_told_to_its_client_alone() -> None:
    """Another one that names it, by mistake or to find out, takes nothing from whoever it is for."""
    desk = ClientDesk(cast(NodeContext, SimpleNamespace()), lambda node: False, lambda node: None, set)
    done: asyncio.Future[int] = asyncio.get_running_loop().create_future()
    done.set_result(5)
    desk._ended[7] = _Put(PeerName(NodeId("writer"), LIFE), cast(Any, None), done)

    async def ask(sender: str, life: Incarnation = LIFE) -> object:
        asked = SimpleNamespace(message=FinishPut(7), sender=NodeId(sender), incarnation=life)
        return await desk._on_finish(cast(Any, asked))

    with pytest.raises(UnknownReceiptError):
        await ask("another")
    with pytest.raises(UnknownReceiptError):
        await ask("writer", Incarnation(2))
    assert await ask("writer") == PutStored(5)
    with pytest.raises(UnknownReceiptError):
        await ask("writer")


def test_the_pins_of_a_client_s_former_life_end_with_its_session_though_the_next_has_one() -> None:
    """A host that vanished shows in its session only after a silence; by then its successor may be at work."""
    pool, _ = holding(8)
    geometry = SimpleNamespace(block_size=4, dtype=NS.dtype)
    parts = SimpleNamespace(
        pool=pool,
        node_id=NodeId("n"),
        block_size=4,
        arena=SimpleNamespace(geometry=geometry),
        flush_pool_events=lambda: None,
    )
    ended: list[NodeId] = []
    desk = ClientDesk(cast(NodeContext, parts), lambda node: False, ended.append, lambda: {NodeId("reader")})
    fields = NamespaceFields.of(NS)
    sessions = {"pinner#1", "reader#1"}

    def of(life: int, message: object) -> Any:
        return SimpleNamespace(message=message, sender=NodeId("pinner"), incarnation=Incarnation(life))

    def pins() -> int:
        desk.tick(lambda: sessions)
        return desk.open_things()["client pins"]

    first = desk._on_pin(of(1, PinBlocks(fields, token_bytes(TOKENS), 2)))
    sessions.add("pinner#2")
    second = desk._on_pin(of(2, PinBlocks(fields, token_bytes(TOKENS), 2)))
    assert isinstance(first, BlocksPinned) and isinstance(second, BlocksPinned)
    assert pins() == 2 and ended == []
    sessions.remove("pinner#1")
    assert pins() == 1
    with pytest.raises(UnknownReceiptError):
        desk._on_unpin(of(2, UnpinBlocks(first.pin_id)))
    sessions.remove("reader#1")
    assert pins() == 1 and ended == ["reader"]
    desk._on_unpin(of(2, UnpinBlocks(second.pin_id)))
    assert pins() == 0 and not pool.holds()

"""What a node does for clients that are no members: it answers what it holds, takes KV in, and pins.

K1: a put becomes findable whole, after every byte was verified, or not at all; its slots go back only when its writer
    can write no more.
K2: what a client holds (leases, pins, puts) ends with its transfer session: a client that died gives everything back
    as soon as the transport sees its end (a pidfd, a broken connection), not by time alone. Pins and puts are of one
    life of a client: they end with its session though its next life has one already. Leases end by time in any case.
K3: a client pins within the pool's quota.
K4: a leaving node takes no put and no pin: what came after its blocks were given away would be lost with it. Puts that
    had begun end first, and are given away with the rest.
"""

import asyncio
import itertools
import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

from kv_bus.interface import Reply, Request
from kv_client.messages import (
    AskExist,
    BlocksPinned,
    Existing,
    FinishPut,
    LookupPrefix,
    NamespaceFields,
    PinBlocks,
    PrefixFound,
    PutReserved,
    PutStored,
    ReservePut,
    UnpinBlocks,
    Unpinned,
)
from kv_core.errors import KVError
from kv_core.hashing import BlockHash, hash_tokens
from kv_core.ids import NodeId, RequestId
from kv_core.namespace import Namespace
from kv_core.wire import Message
from kv_prefix.errors import HolderLeavingError, InvalidRequestError, NotHeldError, UnknownReceiptError
from kv_prefix.pins import Receipt
from kv_prefix.pool_types import PoolMatch
from kv_services.node.context import NodeContext
from kv_transport import Inbound
from kv_transport.types import PeerName

PUTS_PER_CLIENT_MAX: Final = 64
PUTS_REMEMBERED_MAX: Final = 1024
"""Puts that ended and whose writer has not asked for the outcome."""
PUT_TIMEOUT_MS_MAX: Final = 600_000

_log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Put:
    client: PeerName
    inbound: Inbound
    done: "asyncio.Future[int]"
    task: "asyncio.Task[None] | None" = None


@dataclass(slots=True)
class _Client:
    """What one life of a client holds."""

    pins: dict[int, Receipt] = field(default_factory=dict)
    puts: set[int] = field(default_factory=set)


class ClientDesk:
    """The clients of one node.

    Args:
        is_member: whether a sender is a process of the cluster; those are watched by membership.
        end_leases: takes back what a dead client reads.
        reads: whether a client holds leases.
    """

    def __init__(
        self,
        ctx: NodeContext,
        is_member: Callable[[NodeId], bool],
        end_leases: Callable[[NodeId], None],
        reads: Callable[[], set[NodeId]],
    ) -> None:
        self._ctx = ctx
        self._is_member = is_member
        self._end_leases = end_leases
        self._reads = reads
        self._clients: dict[PeerName, _Client] = {}
        self._puts: dict[int, _Put] = {}
        self._ended: dict[int, _Put] = {}
        self._ids = itertools.count(1)
        self.leaving = False

    @property
    def num_puts(self) -> int:
        """Puts that have not ended."""
        return len(self._puts)

    def listen(self) -> None:
        """Take requests from the bus."""
        bus = self._ctx.bus
        bus.handle(LookupPrefix, self._on_lookup)
        bus.handle(AskExist, self._on_exist)
        bus.handle(ReservePut, self._on_reserve)
        bus.handle(FinishPut, self._on_finish)
        bus.handle(PinBlocks, self._on_pin)
        bus.handle(UnpinBlocks, self._on_unpin)

    def open_things(self) -> dict[str, int]:
        """What clients hold, by kind; leases are counted by their own desk."""
        return {"client puts": len(self._puts), "client pins": sum(len(one.pins) for one in self._clients.values())}

    def tick(self, sessions: Callable[[], set[str]]) -> None:
        """Take back what clients held whose sessions ended. A client opens its session before it asks for anything.

        Args:
            sessions: the transfer sessions that are open now, as `node#incarnation`; asked only if anybody holds.
        """
        readers = {reader for reader in self._reads() if not self._is_member(reader)}
        if not self._clients and not readers:
            return
        connected = sessions()
        for client in [client for client in self._clients if str(client) not in connected]:
            self._gone(client)
        for reader in readers - {NodeId(name.partition("#")[0]) for name in connected}:
            self._end_leases(reader)

    async def close(self) -> None:
        """End every put and pin, until their slots are free or in quarantine: a stopped client holds nothing up.
        Idempotent."""
        for client in list(self._clients):
            self._gone(client)
        puts = list(self._puts.values())
        await asyncio.gather(*(put.inbound.settled() for put in puts))
        await asyncio.sleep(0)  # those whose slots are free give them back
        tasks = [put.task for put in puts if put.task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _gone(self, client: PeerName) -> None:
        held = self._clients.pop(client)
        _log.warning("client gone client=%s pins=%d puts=%d", client, len(held.pins), len(held.puts))
        for receipt in held.pins.values():
            self._ctx.pool.release(receipt)
        for put_id in held.puts:
            # Its slots go back when the transport says that nothing can be written any more.
            self._puts[put_id].inbound.cancel()
        self._ctx.flush_pool_events()

    def _on_lookup(self, request: Request[LookupPrefix]) -> Reply:
        message = request.message
        namespace = self._namespace(message.namespace)
        names = hash_tokens(namespace, message.tokens)
        match = self._match(namespace, names, message.tokens)
        below = self._ctx.tiers.below(namespace, names, message.tokens, len(match.refs))
        return PrefixFound(len(match.refs) + sum(below), (0, len(match.refs), *below))

    def _on_exist(self, request: Request[AskExist]) -> Reply:
        pool, tiers = self._ctx.pool, self._ctx.tiers
        flags = bytes(pool.prefix(name) is not None or tiers.has(name) for name in request.message.names)
        return Existing(flags)

    async def _on_reserve(self, request: Request[ReservePut]) -> Reply:
        ctx, message, client = self._ctx, request.message, _client_of(request)
        await ctx.introductions.ensure(client.node, request.deadline_ns)
        namespace, size = self._namespace(message.namespace), ctx.block_size
        names = self._names(namespace, message.tokens, message.num_blocks)
        match = self._match(namespace, names, message.tokens)
        first = len(match.refs)
        self._refuse_if_leaving()
        put_id = next(self._ids)
        if first == message.num_blocks:
            return PutReserved(put_id, first, None)
        held = self._clients.setdefault(client, _Client())
        if len(held.puts) >= PUTS_PER_CLIENT_MAX:
            raise InvalidRequestError(name="puts", value=len(held.puts), rule=f"at most {PUTS_PER_CLIENT_MAX} at once")
        ctx.replica.know(namespace)
        opened = ctx.pool.open(f"put by {client.node}", match, message.num_blocks - first, use_partial=False)
        ctx.flush_pool_events()
        refs = opened.refs[first:]
        ctx.prepare(refs)
        name = RequestId(f"put-{put_id}")
        try:
            grant = ctx.transfers.grant_writes(
                name, refs, seq_start=first * size, seq_end=message.num_blocks * size, writer=client.node
            )
        except KVError:
            ctx.pool.release(opened.table)
            raise
        timeout_ms = min(max(1, message.timeout_ns // 1_000_000), PUT_TIMEOUT_MS_MAX)
        inbound = ctx.transfers.expect(name, grant, timeout_ms=timeout_ms)
        put = _Put(client, inbound, asyncio.get_running_loop().create_future())
        self._puts[put_id] = put
        held.puts.add(put_id)
        pieces = message.tokens[4 * first * size : 4 * message.num_blocks * size]
        work = self._take_in(put_id, put, opened.table, namespace, first, names[first:], pieces)
        put.task = asyncio.get_running_loop().create_task(work, name=name)
        return PutReserved(put_id, first, grant.to_bytes())

    async def _take_in(
        self,
        put_id: int,
        put: _Put,
        table: Receipt,
        namespace: Namespace,
        first: int,
        names: list[BlockHash],
        tokens: bytes,
    ) -> None:
        """Follow one put to its end; its blocks become findable, or its slots go back."""
        ctx, error = self._ctx, None
        try:
            await put.inbound.done()
        except KVError as failure:
            error = failure
        # K1: not before the writer can write no more.
        await put.inbound.released()
        if error is None:
            ctx.pool.commit(table, namespace.digest, first, names, tokens)
        ctx.pool.release(table)
        ctx.flush_pool_events()
        del self._puts[put_id]
        # Its writer asks how it ended, sooner or later than it does.
        self._ended[put_id] = put
        while len(self._ended) > PUTS_REMEMBERED_MAX:
            del self._ended[next(iter(self._ended))]
        held = self._clients.get(put.client)
        if held is not None:
            held.puts.discard(put_id)
            self._drop_if_empty(put.client)
        if error is not None:
            _log.warning("put not stored client=%s cause=%s", put.client, error)
            put.done.set_exception(error)
            put.done.exception()  # whoever asks gets it; nobody need ask
        else:
            put.done.set_result(first + len(names))

    async def _on_finish(self, request: Request[FinishPut]) -> Reply:
        put_id = request.message.put_id
        put = self._puts.get(put_id) or self._ended.get(put_id)
        if put is None or put.client != _client_of(request):
            raise UnknownReceiptError(receipt=put_id, owner=request.sender)
        self._ended.pop(put_id, None)
        return PutStored(await asyncio.shield(put.done))

    def _on_pin(self, request: Request[PinBlocks]) -> Reply:
        message, client = request.message, _client_of(request)
        self._refuse_if_leaving()
        namespace = self._namespace(message.namespace)
        names = self._names(namespace, message.tokens, message.num_blocks)
        match = self._match(namespace, names, message.tokens)
        if len(match.refs) < message.num_blocks:
            raise NotHeldError(prefix_hash=names[-1].sequence.hex())
        receipt = self._ctx.pool.pin(f"client {client.node}", match)
        pin_id = next(self._ids)
        self._clients.setdefault(client, _Client()).pins[pin_id] = receipt
        return BlocksPinned(pin_id)

    def _on_unpin(self, request: Request[UnpinBlocks]) -> Reply:
        client = _client_of(request)
        held = self._clients.get(client)
        receipt = held.pins.pop(request.message.pin_id, None) if held else None
        if receipt is None:
            raise UnknownReceiptError(receipt=request.message.pin_id, owner=request.sender)
        self._ctx.pool.release(receipt)
        self._drop_if_empty(client)
        self._ctx.flush_pool_events()
        return Unpinned()

    def _refuse_if_leaving(self) -> None:
        if self.leaving:
            raise HolderLeavingError(node=self._ctx.node_id)

    def _drop_if_empty(self, client: PeerName) -> None:
        held = self._clients.get(client)
        if held is not None and not held.pins and not held.puts:
            del self._clients[client]

    def _namespace(self, fields: NamespaceFields) -> Namespace:
        """The namespace of a message, if its blocks could lie here.

        Raises:
            InvalidRequestError: another size of block or element type.
        """
        namespace, geometry = fields.namespace(), self._ctx.arena.geometry
        if (namespace.block_size, namespace.dtype) != (geometry.block_size, geometry.dtype):
            raise InvalidRequestError(
                name="namespace",
                value=f"{namespace.block_size} tokens of {namespace.dtype.value}",
                rule=f"this node's blocks are {geometry.block_size} tokens of {geometry.dtype.value}",
            )
        return namespace

    def _names(self, namespace: Namespace, tokens: bytes, num_blocks: int) -> list[BlockHash]:
        nbytes = 4 * num_blocks * namespace.block_size
        if len(tokens) < nbytes:
            raise InvalidRequestError(name="tokens", value=len(tokens) // 4, rule=f"{num_blocks} blocks need more")
        return hash_tokens(namespace, tokens[:nbytes])

    def _match(self, namespace: Namespace, names: list[BlockHash], tokens: bytes) -> PoolMatch:
        """The full blocks held of these names. A pool leaves a prompt's last token out, so one is put behind them."""
        raw = tokens[: 4 * len(names) * namespace.block_size] + bytes(4)
        match = self._ctx.pool.match(namespace.digest, names, raw)
        return PoolMatch(match.namespace, match.block_hashes, match.refs, None, len(match.refs) * namespace.block_size)


def _client_of(request: Request[Message]) -> PeerName:
    """The life of a client that asks; its transfer sessions have the same name."""
    return PeerName(request.sender, request.incarnation)

"""Takes prefixes that another node gives away: reads them at LOW priority, verifies, commits, claims.

A1: blocks become findable only when every byte of them was verified, and only after those before them.
A2: nothing is evicted to make room: what does not fit into free slots is refused. Only copies of hot prefixes may take
    the place of colder blocks, and all of them together no more than their share of the arena.
A3: names are computed here from the tokens; nobody's word is taken for them.
A4: a cancelled caller, a lost source or a deadline frees no slot that may still be written to. Nor does the end of the
    node, which waits for no bytes: the slots end with its pool, and the transfers close what may still be written.
"""

import asyncio
import contextlib
import dataclasses
import itertools
from typing import Final

from kv_bus.interface import Reply, Request
from kv_consistency.update import NamespaceRef
from kv_core.block import BlockRef
from kv_core.block_hashes import BlockHashes
from kv_core.checksum import crc32c
from kv_core.errors import KVError
from kv_core.hash_chain import chain_blocks
from kv_core.hashing import TOKEN_BYTES, BlockHash
from kv_core.ids import NodeId
from kv_prefix.pins import Receipt
from kv_services.errors import MoveRefusedError
from kv_services.messages import AdoptPrefix, PrefixAdopted
from kv_services.node.context import NodeContext
from kv_transport import ReadGrant, TransferPriority

ADOPTIONS_MAX: Final = 4
_AFTER: Final = bytes(TOKEN_BYTES)
"""A pool never matches the last token of what it is asked for, so one more is asked for."""


class Adopter:
    """What one node takes from others."""

    def __init__(self, ctx: NodeContext) -> None:
        self._ctx = ctx
        self._ids = itertools.count(1)
        self._tasks: dict[int, asyncio.Task[PrefixAdopted]] = {}
        self._alone: set[int] = set()  # those whose caller has gone
        self._copies: dict[BlockHash, int] = {}
        self.refusing = ""

    def __len__(self) -> int:
        """Prefixes that are being read."""
        return len(self._tasks)

    def listen(self) -> None:
        """Take requests from the bus."""
        self._ctx.bus.handle(AdoptPrefix, self._on_adopt)

    async def close(self) -> None:
        """Give up what is being read, whether its bytes come or not; its slots stay taken (A4). Idempotent."""
        self.refusing = "it is stopping"
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _on_adopt(self, request: Request[AdoptPrefix]) -> Reply:
        self._refuse_if_it_must()
        await self._ctx.introductions.ensure(request.sender, request.deadline_ns)
        self._refuse_if_it_must()
        number = next(self._ids)
        work = self._adopt(f"adoption-{number}", request.sender, request.message, request.deadline_ns)
        task = self._tasks[number] = asyncio.get_running_loop().create_task(work, name=f"adoption {number}")
        task.add_done_callback(lambda done: self._ended(number, done))
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            self._alone.add(number)
            raise

    def _refuse_if_it_must(self) -> None:
        if self.refusing or len(self._tasks) >= ADOPTIONS_MAX:
            reason = self.refusing or f"{len(self._tasks)} are on their way"
            raise MoveRefusedError(node=self._ctx.node_id, reason=reason)

    def _ended(self, number: int, task: "asyncio.Task[PrefixAdopted]") -> None:
        del self._tasks[number]
        error = None if task.cancelled() else task.exception()
        if number in self._alone and error is not None and not isinstance(error, KVError):
            # The bus tells the bugs of whoever is waited for; this one has nobody else.
            told = {"message": f"adoption {number} failed after its caller had gone", "exception": error, "task": task}
            asyncio.get_running_loop().call_exception_handler(told)
        self._alone.discard(number)

    async def _adopt(self, owner: str, source: NodeId, message: AdoptPrefix, deadline_ns: int) -> PrefixAdopted:
        ctx, first = self._ctx, message.first_block
        nbytes = ctx.block_size * TOKEN_BYTES
        if len(message.tokens) % nbytes or not 0 <= first * nbytes < len(message.tokens):
            raise MoveRefusedError(node=ctx.node_id, reason=f"{len(message.tokens)} bytes of tokens from block {first}")
        digest = message.namespace
        names = list(BlockHashes(chain_blocks(message.tokens, nbytes, digest, crc32c(digest))))
        match = ctx.pool.match(digest, names, message.tokens + _AFTER)
        if len(match.refs) < first:
            reason = f"it has {len(match.refs)} of the {first} blocks before"
            raise MoveRefusedError(node=ctx.node_id, reason=reason)
        if len(match.refs) == len(names):
            return PrefixAdopted(0, 0)
        need = len(names) - first
        self._require_room(names[-1], need, copy=message.copy)
        before = dataclasses.replace(
            match,
            block_hashes=match.block_hashes[:first],
            refs=match.refs[:first],
            partial=None,
            num_tokens=first * ctx.block_size,
        )
        ctx.replica.learn(NamespaceRef(digest, ctx.block_size, message.scopes))
        opened = ctx.pool.open(owner, before, need, use_partial=False)
        try:
            refs = opened.refs[first:]
            ctx.prepare(refs)
            moved = await self._read(owner, source, ReadGrant.from_bytes(message.grant), refs, deadline_ns)
            ctx.pool.commit(opened.table, digest, first, names[first:], message.tokens[first * nbytes :])
        except Exception:  # not a cancellation, which is the end of the node (A4)
            self._give_back(opened.table)
            raise
        self._give_back(opened.table)
        return PrefixAdopted(len(names) - len(match.refs), moved)

    def _give_back(self, table: Receipt) -> None:
        self._ctx.pool.release(table)
        self._ctx.flush_pool_events()

    def _require_room(self, last: BlockHash, need: int, *, copy: bool) -> None:
        pool = self._ctx.pool
        stats = pool.stats()
        if need <= stats.free:
            return
        if not copy:
            raise MoveRefusedError(node=self._ctx.node_id, reason=f"{need} blocks, {stats.free} are free")
        self._copies = {name: count for name, count in self._copies.items() if pool.prefix(name) is not None}
        taken, most = sum(self._copies.values()), int(self._ctx.config.replication.share * stats.total)
        if taken + need > most:
            reason = f"{need} blocks, {stats.free} are free, and copies have {taken} of {most}"
            raise MoveRefusedError(node=self._ctx.node_id, reason=reason)
        self._copies[last] = need

    async def _read(
        self, owner: str, source: NodeId, grant: ReadGrant, refs: tuple[BlockRef, ...], deadline_ns: int
    ) -> int:
        ctx = self._ctx
        future = ctx.transfers.fetch(grant, refs, TransferPriority.LOW)
        try:
            left_ns = deadline_ns - ctx.clock.monotonic_ns()
            stats = await future.wait(max(1, left_ns // 1_000_000))
        except KVError as error:
            future.cancel()
            with contextlib.suppress(KVError):
                await future.wait()
            ctx.metrics.transfer_failed(type(error).__name__)
            ctx.recovery.ended(source, owner, error, reading=True)
            raise
        now_ns = ctx.clock.monotonic_ns()
        ctx.metrics.transfer_done(now_ns, stats.transport, stats.nbytes, stats.duration_ns, stats.retries)
        ctx.recovery.ended(source, owner, None, reading=True)
        return stats.nbytes

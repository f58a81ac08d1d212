"""`Client`: reads, stores and pins the KV of prefixes at one node that holds them.

It is on the bus under a name of its own, keeps an arena and a transfer agent, and holds a read lease for each prefix.
From its introduction on it keeps one transfer session open: when that ends, the holder takes back all that it held.

L1: a lease is released with its blocks, or at `close`, and renewed in between; if the client dies it ends with its
session, and if a call ends without knowing whether the holder gave one, by time.
L2: a slot is given out again only when no transfer can write it any more.
L3: every call ends by its deadline. A holder that has restarted is introduced again, once per call.
"""

import asyncio
import logging
from collections.abc import Sequence
from types import TracebackType
from typing import Final, Self, TypeVar

from kv_bus.errors import WrongIncarnation
from kv_bus.keys import AllowListFile, load_key_pair
from kv_bus.stamps import LamportStamper
from kv_bus.zmq_bus import ZmqBus, ZmqBusConfig
from kv_client.blocks import PrefixBlocks
from kv_client.config import ClientConfig, require_duration
from kv_client.errors import AlreadyReleased, CheckFailed, DeadlineExceeded, InvalidRead, NoRoom, translate
from kv_client.messages import (
    READER_MESSAGES,
    AgentIntroduced,
    AskExist,
    BlocksPinned,
    Existing,
    IntroduceAgent,
    LeasePrefix,
    LeaseRenewed,
    LookupPrefix,
    NamespaceFields,
    PinBlocks,
    PrefixFound,
    PrefixLeased,
    PutReserved,
    ReleaseLease,
    RenewLease,
    ReservePut,
    UnpinBlocks,
    Unpinned,
)
from kv_client.puts import PinnedPrefix, Put, StoredPrefix, copy_in, require_layers
from kv_client.runs import SlotRuns
from kv_core import limits
from kv_core.block import BlockRef
from kv_core.clock import Clock, SystemClock
from kv_core.errors import KVError
from kv_core.hashing import BlockHash, Tokens, hash_tokens, token_bytes, token_digest
from kv_core.ids import Incarnation
from kv_core.namespace import Fidelity, Namespace
from kv_core.wire import Message, Registry
from kv_transport import AgentMetadata, Arena, KVCacheTransferEngine, ReadGrant, TransferAgent
from kv_transport.arena import StoredArray
from kv_transport.codecs import accepted_under
from kv_transport.errors import StaleIncarnation, UnknownPeer

CLOSE_TIMEOUT_S: Final = 2.0
RENEW_LOOK_S: Final = 1.0
"""How often leases are looked at, at least."""
_MS: Final = 1_000_000

ReplyT = TypeVar("ReplyT", bound=Message)

_log = logging.getLogger(__name__)


class Client:
    """See the module. Use as `async with Client(config) as client:`; everything belongs to its event loop.

    Raises on entry:
        KeyFileError, AllowListError, BindFailed: it cannot join the bus.
        MemoryUnavailable, InvalidDescriptor, BackendUnavailable: no arena or no transport.
    """

    def __init__(self, config: ClientConfig, clock: Clock | None = None) -> None:
        self.config: Final = config
        self._clock: Final[Clock] = clock or SystemClock()
        self._slots = SlotRuns(config.num_slots)
        self._held: set[PrefixBlocks] = set()
        self._returning: set[asyncio.Task[None]] = set()
        self._introducing = asyncio.Lock()
        self._holder_life: Incarnation | None = None
        self._renewing: asyncio.Task[None] | None = None
        self._started = self._open = False

    async def start(self) -> None:
        """Make the arena, join the bus. Nothing is sent before the first read."""
        if self._started:
            raise AlreadyReleased(what="a client that was started before")
        self._started = True
        config = self.config
        life = config.incarnation or Incarnation(self._clock.wall_ns() // 1_000_000_000)
        self._bus = ZmqBus(
            ZmqBusConfig(
                node_id=config.node_id,
                incarnation=life,
                requests=config.requests,
                events=config.events,
                keys=load_key_pair(config.keys_folder, config.node_id),
                allow_list=AllowListFile(config.allow_list),
            ),
            Registry(*READER_MESSAGES),
            stamper=LamportStamper(config.node_id),
            clock=self._clock,
        )
        self._bus.add_peer(config.holder)
        self._arena = Arena.create(config.geometry, config.num_slots, name=config.node_id)
        self._agent = TransferAgent(config.node_id, life, config.transport, self._clock)
        self._transfers = KVCacheTransferEngine(self._agent)
        try:
            self._region = self._agent.register_memory(self._arena).region
            await self._agent.start()
            await self._bus.start()
        except BaseException:
            await self._end()
            raise
        self._open = True
        if config.renew_leases:
            self._renewing = asyncio.get_running_loop().create_task(self._renew(), name="renew leases")

    async def close(self) -> None:
        """Release every prefix and leave the bus. Idempotent; arrays given out stay readable, their content not."""
        if not self._open:
            return
        self._open = False
        if self._renewing is not None:
            self._renewing.cancel()
            await asyncio.gather(self._renewing, return_exceptions=True)
        for blocks in list(self._held):
            blocks.release()
        await self._end()

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    @property
    def num_free_slots(self) -> int:
        """Slots of the client's arena that no prefix has."""
        return self._slots.num_free

    async def get_blocks(
        self, namespace: Namespace, tokens: Tokens, num_blocks: int, *, timeout_ms: int | None = None
    ) -> PrefixBlocks:
        """Lease the first `num_blocks` blocks of `tokens` at the holder and begin to read them.

        Returns when the lease is there and the transfer has begun; layers are ready one by one. `timeout_ms`, from
        now, bounds this call and every wait for its blocks.

        Raises:
            Miss: the holder has not all of these blocks.
            HolderLost, DeadlineExceeded, CheckFailed, HolderRefused: see the classes.
            NoRoom: the arena has no room; nothing was asked.
            InvalidRead, InvalidTokensError: the arguments cannot be.
        """
        if not self._open:
            raise AlreadyReleased(what="the client")
        ask = self._ask(namespace, tokens, num_blocks)
        deadline_ns = self._deadline_ns(timeout_ms)
        run = await self._take(num_blocks, deadline_ns)
        holder = self.config.holder.node_id
        try:
            leased = await self._call(ask, PrefixLeased, deadline_ns)
            try:
                blocks = self._fetch(leased, run, namespace.fidelity, deadline_ns)
            except BaseException:
                self._send_release(leased.lease_id)
                raise
        except KVError as error:
            self._slots.give_back(run)
            raise translate(error, holder) from error
        except BaseException:
            self._slots.give_back(run)
            raise
        self._held.add(blocks)
        return blocks

    async def lookup(self, namespace: Namespace, tokens: Tokens, *, timeout_ms: int | None = None) -> PrefixFound:
        """How many full blocks of `tokens` the holder has, and in which tiers. Changes nothing.

        Raises as `get_blocks`, but never `Miss`: nothing held is an answer.
        """
        ask = LookupPrefix(NamespaceFields.of(namespace), token_bytes(tokens))
        return await self._request(ask, PrefixFound, timeout_ms)

    async def batch_exists(self, names: Sequence[BlockHash], *, timeout_ms: int | None = None) -> list[bool]:
        """Which blocks of these names the holder has, each for itself. A hint: only `get_blocks` compares tokens.

        Raises as `lookup`.
        """
        found = await self._request(AskExist(tuple(names)), Existing, timeout_ms)
        if len(found.flags) != len(names):
            cause = f"{len(found.flags)} answers to {len(names)} names"
            raise CheckFailed(holder=self.config.holder.node_id, cause=cause)
        return [flag != 0 for flag in found.flags]

    async def put_blocks(
        self,
        namespace: Namespace,
        tokens: Tokens,
        layers: Sequence[StoredArray],
        *,
        timeout_ms: int | None = None,
    ) -> StoredPrefix:
        """Store the KV of the first blocks of `tokens` at the holder; returns when it can be found there.

        What the holder has already is not sent. Nothing is stored unless all of it arrives and is verified.

        Args:
            layers: per layer `(num_blocks, planes, num_kv_heads, block_size, head_dim)` in the geometry's element type
                (bf16 as uint16, fp8 as uint8).

        Raises:
            HolderFull: no room there; nothing was changed.
            NoRoom: the client's arena has no run of that many slots.
            WrongArrays, InvalidRead: the arguments cannot be.
            HolderLost, DeadlineExceeded, CheckFailed, HolderRefused: see the classes; nothing is stored.
        """
        num_blocks = require_layers(layers, self.config.geometry)
        raw = self._usable(namespace, tokens, num_blocks)
        deadline_ns = self._deadline_ns(timeout_ms)
        run = await self._take(num_blocks, deadline_ns)
        copying: asyncio.Future[None] | None = None
        try:
            put = Put(self._bus, self._transfers, self._arena, self._region, self._clock, self.config.holder.node_id)
            refs = [BlockRef(self._region, slot, self._arena.raise_generation(slot)) for slot in run]
            copying = asyncio.get_running_loop().run_in_executor(None, copy_in, self._arena, run, layers)
            await asyncio.shield(copying)
            ask = ReservePut(NamespaceFields.of(namespace), raw, num_blocks, deadline_ns - self._clock.monotonic_ns())
            reserved = await self._call(ask, PutReserved, deadline_ns)
            return await put.send(reserved, refs, num_blocks, deadline_ns, self._holder_life)
        except KVError as error:
            raise translate(error, self.config.holder.node_id) from error
        finally:
            if copying is not None and not copying.done():
                # L2: a thread goes on writing when its waiter is cancelled.
                await asyncio.wait([copying])
            self._slots.give_back(run)

    async def pin(
        self, namespace: Namespace, tokens: Tokens, num_blocks: int, *, timeout_ms: int | None = None
    ) -> PinnedPrefix:
        """Keep the first `num_blocks` blocks of `tokens` in the holder's memory until `release`, or while the session
        with the holder stands: it takes one that broke for the end of this client (`release` then raises `LeaseLost`).

        Raises:
            Miss: the holder has not all of these blocks.
            HolderFull: its quota for pins is used up.
        """
        raw = self._usable(namespace, tokens, num_blocks)
        pinned = await self._request(
            PinBlocks(NamespaceFields.of(namespace), raw, num_blocks), BlocksPinned, timeout_ms
        )
        return PinnedPrefix(pinned.pin_id, num_blocks)

    async def release(self, what: PrefixBlocks | PinnedPrefix, *, timeout_ms: int | None = None) -> None:
        """Give back blocks that were read, or a pin.

        Raises:
            LeaseLost: the pin is not ours any more.
        """
        if isinstance(what, PrefixBlocks):
            what.release()
        else:
            await self._request(UnpinBlocks(what.pin_id), Unpinned, timeout_ms)

    async def _request(self, ask: Message, expect: type[ReplyT], timeout_ms: int | None) -> ReplyT:
        if not self._open:
            raise AlreadyReleased(what="the client")
        try:
            return await self._call(ask, expect, self._deadline_ns(timeout_ms))
        except KVError as error:
            raise translate(error, self.config.holder.node_id) from error

    def _deadline_ns(self, timeout_ms: int | None) -> int:
        timeout_ms = self.config.timeout_ms if timeout_ms is None else timeout_ms
        require_duration("timeout_ms", timeout_ms)
        return self._clock.monotonic_ns() + timeout_ms * _MS

    async def _renew(self) -> None:
        """Renew each lease three times in its life; one that cannot be renewed ends its blocks by itself."""
        while True:
            shortest_ns = min((blocks.lease_ns for blocks in self._held), default=self.config.lease_ms * _MS)
            await asyncio.sleep(min(shortest_ns / 3e9, RENEW_LOOK_S))
            now_ns = self._clock.monotonic_ns()
            for blocks in list(self._held):
                if now_ns < blocks.renewed_ns + blocks.lease_ns // 3:
                    continue
                try:
                    ask = RenewLease(blocks.lease_id, self.config.lease_ms * _MS)
                    renewed = await self._call(ask, LeaseRenewed, now_ns + blocks.lease_ns // 3)
                    blocks.renewed_ns, blocks.lease_ns = self._clock.monotonic_ns(), renewed.lease_ns
                except KVError as error:
                    _log.info("lease not renewed lease=%d cause=%s", blocks.lease_id, error)

    def _usable(self, namespace: Namespace, tokens: Tokens, num_blocks: int) -> bytes:
        """The tokens of the first blocks, if blocks of that namespace fit this client.

        Raises:
            InvalidRead: they do not.
        """
        if not self._open:
            raise AlreadyReleased(what="the client")
        geometry, size = self.config.geometry, namespace.block_size
        if (size, namespace.dtype) != (geometry.block_size, geometry.dtype):
            rule = f"the client's blocks are {geometry.block_size} tokens of {geometry.dtype.value}"
            raise InvalidRead(name="namespace", value=f"{size} tokens of {namespace.dtype.value}", rule=rule)
        raw = token_bytes(tokens)
        most = min(len(raw) // 4 // size, self.config.num_slots, limits.MAX_BLOCKS_PER_MESSAGE)
        if not 1 <= num_blocks <= most:
            raise InvalidRead(name="num_blocks", value=num_blocks, rule=f"1 to {most} with these tokens and slots")
        return raw[: 4 * num_blocks * size]

    def _ask(self, namespace: Namespace, tokens: Tokens, num_blocks: int) -> LeasePrefix:
        prefix = self._usable(namespace, tokens, num_blocks)
        last = hash_tokens(namespace, prefix)[-1]
        return LeasePrefix(
            namespace=NamespaceFields.of(namespace),
            sequence=last.sequence,
            check=last.check,
            first_block=0,
            num_blocks=num_blocks,
            token_digest=token_digest(prefix),
            lease_ns=self.config.lease_ms * _MS,
        )

    async def _take(self, count: int, deadline_ns: int) -> range:
        """A run of slots, waiting for those that are about to come back."""
        while (run := self._slots.take(count)) is None:
            if not self._returning:
                raise NoRoom(need=count, longest=self._slots.longest, total=self.config.num_slots)
            left_ns = deadline_ns - self._clock.monotonic_ns()
            if left_ns <= 0:
                raise DeadlineExceeded(holder=self.config.holder.node_id, cause="released slots are still in use")
            await asyncio.wait(self._returning, timeout=left_ns / 1e9, return_when=asyncio.FIRST_COMPLETED)
        return run

    async def _call(self, ask: Message, expect: type[ReplyT], deadline_ns: int) -> ReplyT:
        """Ask the holder, introduced; again once if it has begun a new life, or has forgotten this client."""
        holder, life = self.config.holder.node_id, await self._introduced(deadline_ns)
        try:
            return await self._bus.request(holder, ask, expect=expect, deadline_ns=deadline_ns, incarnation=life)
        except (WrongIncarnation, UnknownPeer):
            # It was not handled (B2): the holder has begun a new life and knows nothing of us, or made room for others.
            if self._holder_life == life:
                self._holder_life = None
        life = await self._introduced(deadline_ns)
        return await self._bus.request(holder, ask, expect=expect, deadline_ns=deadline_ns, incarnation=life)

    async def _introduced(self, deadline_ns: int) -> Incarnation:
        """The life of the holder that knows our agent, and whose agent we know."""
        left_ns = deadline_ns - self._clock.monotonic_ns()
        try:
            # Only the wait for another call's turn: the bus ends our own, and says why.
            async with asyncio.timeout(max(0, left_ns) / 1e9):
                await self._introducing.acquire()
        except TimeoutError:
            raise DeadlineExceeded(holder=self.config.holder.node_id, cause="no introduction") from None
        try:
            if self._holder_life is not None and not await self._has_session(deadline_ns):
                self._holder_life = None
            if self._holder_life is None:
                self._holder_life = await self._introduce(deadline_ns)
            return self._holder_life
        finally:
            self._introducing.release()

    async def _has_session(self, deadline_ns: int) -> bool:
        """Whether the holder sees that we live; one that broke is made again first. Without it the holder would soon
        take back whatever it gave us now."""
        try:
            await self._connect(deadline_ns)
        except KVError as error:
            _log.info("session not made again holder=%s cause=%s", self.config.holder.node_id, error)
            return False
        return True

    async def _introduce(self, deadline_ns: int) -> Incarnation:
        seen = self._seen_life()
        try:
            return await self._introduce_to(seen, deadline_ns)
        except (StaleIncarnation, WrongIncarnation):
            # The answer was its first sign of life, or the first of a new one; an introduction is for one life.
            if self._seen_life() == seen:
                raise
        return await self._introduce_to(self._seen_life(), deadline_ns)

    async def _introduce_to(self, life: Incarnation, deadline_ns: int) -> Incarnation:
        holder = self.config.holder.node_id
        mine = IntroduceAgent(self._agent.get_agent_metadata(holder, life).to_bytes())
        reply = await self._bus.request(
            holder, mine, expect=AgentIntroduced, deadline_ns=deadline_ns, incarnation=life or None
        )
        theirs = AgentMetadata.from_bytes(reply.metadata)
        if theirs.name.node != holder:
            raise CheckFailed(holder=holder, cause=f"it introduced itself as {theirs.name.node}")
        self._agent.add_remote_agent(theirs)
        # The session by which the holder sees that we live; what it cannot connect, no transfer could.
        await self._connect(deadline_ns)
        return theirs.name.incarnation

    async def _connect(self, deadline_ns: int) -> None:
        holder, left_ns = self.config.holder.node_id, deadline_ns - self._clock.monotonic_ns()
        try:
            async with asyncio.timeout(max(0, left_ns) / 1e9):
                await self._agent.peer(holder).connect()
        except TimeoutError:
            raise DeadlineExceeded(holder=holder, cause="no transfer session") from None

    def _seen_life(self) -> Incarnation:
        holder = self.config.holder.node_id
        lives = (peer.incarnation for peer in self._bus.peers() if peer.address.node_id == holder)
        return next(lives, Incarnation(0))

    def _fetch(self, leased: PrefixLeased, run: range, fidelity: Fidelity, deadline_ns: int) -> PrefixBlocks:
        grant = ReadGrant.from_bytes(leased.grant)
        holder, geometry = self.config.holder.node_id, self.config.geometry
        granted = (grant.node, grant.seq_start, grant.seq_end, grant.layer_start, grant.layer_end, grant.num_positions)
        asked = (holder, 0, len(run) * geometry.block_size, 0, geometry.num_layers, len(run))
        if granted != asked:
            raise CheckFailed(holder=holder, cause=f"the grant is for {granted}, asked was {asked}")
        into = [BlockRef(self._region, slot, self._arena.raise_generation(slot)) for slot in run]
        return PrefixBlocks(
            holder=holder,
            lease_id=leased.lease_id,
            lease_ns=leased.lease_ns,
            future=self._transfers.fetch(grant, into, accept=accepted_under(fidelity)),
            arena=self._arena,
            run=run,
            deadline_ns=deadline_ns,
            clock=self._clock,
            on_release=self._on_release,
        )

    def _on_release(self, blocks: PrefixBlocks) -> None:
        self._held.discard(blocks)
        self._send_release(blocks.lease_id)
        task = asyncio.get_running_loop().create_task(self._give_back(blocks), name=f"release {blocks.lease_id}")
        self._returning.add(task)
        task.add_done_callback(self._returning.discard)

    async def _give_back(self, blocks: PrefixBlocks) -> None:
        await blocks.at_rest()
        self._slots.give_back(blocks.run)

    def _send_release(self, lease_id: int) -> None:
        try:
            self._bus.send(self.config.holder.node_id, ReleaseLease(lease_id), incarnation=self._holder_life)
        except KVError as error:
            _log.info("lease is left to end by time lease=%d cause=%s", lease_id, error)

    async def _end(self) -> None:
        """Transfers first: nothing may write into the arena when it goes."""
        await self._transfers.close()
        await self._agent.close()
        if self._returning:
            await asyncio.wait(self._returning, timeout=CLOSE_TIMEOUT_S)
        await self._bus.drain(int(CLOSE_TIMEOUT_S * 1e9))
        for task in list(self._returning):
            task.cancel()
        self._arena.close()

"""A node's tiers over a real pool, arena and replica, with a medium that the test can stop, fail and fill."""

import asyncio
import hashlib
import threading
from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from kv_consistency.manager import KvCacheConsistencyManager
from kv_core.block import BlockGeometry, BlockRef
from kv_core.clock import SystemClock
from kv_core.dtypes import DType
from kv_core.hashing import hash_tokens, token_bytes
from kv_core.ids import Incarnation, NodeId, RegionId
from kv_core.namespace import Namespace
from kv_prefix.block_pool import BlockPool
from kv_prefix.events import Tier
from kv_prefix.prefix_index import PrefixIndex
from kv_prefix.tiers.blocks import PlacedBlock, TierBlock, chain_digest
from kv_prefix.tiers.cost import TierCost
from kv_prefix.tiers.spill import SpillQueue
from kv_prefix.tiers.store import Cells
from kv_services.metrics import Metrics
from kv_services.node.pull_cost import PullCost
from kv_services.node.tier import NodeTier, Opened
from kv_services.node.tiers import Tiers
from kv_services.replica.service import ReplicaService
from kv_transport import Arena

GEOMETRY = BlockGeometry(num_layers=2, num_kv_heads=1, head_dim=8, dtype=DType.FP16, block_size=4)
NS = Namespace("model", "weights", salt="mark.rest", dtype=DType.FP16, block_size=4)
NODE = NodeId("node")
SLOTS = 16


class Life:
    def keep_clock_bound(self, bound_ns: int) -> None:
        pass


class Medium:
    """Places in a dict; reads and writes wait for `gate`."""

    def __init__(self, num_places: int = 64) -> None:
        self.num_places = num_places
        self.places: dict[int, list[bytes]] = {}
        self.gate = threading.Event()
        self.gate.set()
        self.error: Exception | None = None
        self.reads = 0

    def write(self, items: Sequence[tuple[PlacedBlock, Cells]], forget: Sequence[int] = ()) -> None:
        assert self.gate.wait(20)
        self.forget(forget)
        if self.error is not None:
            raise self.error
        for item, cells in items:
            self.places[item.place] = [bytes(cell) for cell in cells]

    def forget(self, places: Sequence[int]) -> None:
        for place in places:
            self.places.pop(place, None)

    def read(self, items: Sequence[tuple[PlacedBlock, Cells]]) -> list[bool]:
        self.reads += 1
        assert self.gate.wait(20)
        sound = []
        for item, cells in items:
            there = self.places.get(item.place)
            for cell, data in zip(cells, there or (), strict=False):
                cell[:] = data
            sound.append(there is not None)
        return sound

    def clear(self) -> None:
        self.places.clear()

    def used_bytes(self) -> int:
        return len(self.places)

    def close(self) -> None:
        pass


class Node:
    """What `assemble` puts together, without a bus."""

    def __init__(self, slots: int = SLOTS, num_places: int = 64) -> None:
        self.clock = SystemClock()
        self.index = PrefixIndex()
        self.metrics = Metrics("node", "prefill")
        manager = KvCacheConsistencyManager(NODE, Incarnation(1))
        self.replica = ReplicaService(manager, self.clock, self.index, Life(), self.metrics)
        self.replica.prime()
        self.replica.know(NS)
        self.arena = Arena.create(GEOMETRY, slots)
        self.pool = BlockPool(slots, 4, region=RegionId(1))
        self.cost = PullCost(GEOMETRY.block_nbytes, 4)
        self.tiers = Tiers(self.pool, self.replica, self.clock, slots, self.cost)
        self.tiers.attach(self.prepare, self.flush)
        self.medium = Medium(num_places)
        self.disk = self.tier(Tier.DISK, Opened.of(self.medium, []))
        self.tiers.add(self.disk)
        self.tiers.tick()

    def tier(self, tier: Tier, opened: Opened, spills_max: int = 4) -> NodeTier:
        queue = SpillQueue(self.pool, opened.catalog, spills_max, self.tiers.scopes_of)
        cost = TierCost(tier.name.lower(), GEOMETRY.block_nbytes, ns_per_byte=1.0, overhead_ns=1000.0)
        return NodeTier(tier, opened, queue, self.arena, self.clock, self.metrics, cost, on_events=self.tiers.on_events)

    def prepare(self, refs: Sequence[BlockRef]) -> None:
        for ref in refs:
            self.arena.raise_generation(ref.slot, ref.generation)

    def flush(self) -> None:
        events = self.pool.take_events()
        if events:
            self.replica.pool_events(events, 4)
            self.tiers.observe(events)

    def kv_of(self, tokens: list[int], block_idx: int) -> NDArray[np.float16]:
        """The KV of one block, which follows from all tokens up to it: no two blocks are alike."""
        seed = hashlib.blake2b(token_bytes(tokens[: 4 * block_idx + 4]), digest_size=8).digest()
        draw = np.random.default_rng(int.from_bytes(seed))
        values: NDArray[np.int64] = draw.integers(0, 2048, self.arena.array[0].shape)
        return values.astype(np.float16)

    def compute(self, tokens: list[int], namespace: Namespace = NS) -> None:
        """KV of a prompt's full blocks."""
        self.replica.know(namespace)
        names = hash_tokens(namespace, tokens)
        match = self.pool.match(namespace.digest, names, [*tokens, 0])
        first = len(match.refs)
        opened = self.pool.open("r", match, len(names) - first, use_partial=False)
        self.flush()
        self.prepare(opened.refs[first:])
        for i, ref in enumerate(opened.refs[first:], first):
            self.arena.array[ref.slot] = self.kv_of(tokens, i)
            self.arena.seal_block(ref.slot)
        self.pool.commit(opened.table, namespace.digest, first, names[first:], tokens[4 * first :])
        self.pool.release(opened.table)
        self.flush()

    def in_memory(self, tokens: list[int]) -> int:
        """Blocks of a prompt that memory has; each is checked to be the right bytes."""
        match = self.pool.match(NS.digest, hash_tokens(NS, tokens), [*tokens, 0])
        for i, ref in enumerate(match.refs):
            assert self.arena.verify(ref.slot)
            assert (self.arena.array[ref.slot] == self.kv_of(tokens, i)).all()
        return len(match.refs)

    async def at_rest(self) -> None:
        async with asyncio.timeout(20):
            while len(self.disk.queue) or self.disk.queue.in_flight:  # noqa: ASYNC110 - threads end it
                await asyncio.sleep(0.005)

    async def push_down(self, tokens: list[int], seeds: Iterable[int]) -> None:
        """Compute a prompt, then others of 4 blocks until memory has none of it any more; all are written down."""
        self.compute(tokens)
        await self.at_rest()
        for seed in seeds:
            self.compute(prompt(seed, 4))
            await self.at_rest()
        assert self.in_memory(tokens) == 0

    async def promote(self, tokens: list[int]) -> int:
        return await self.tiers.promote(NS, token_bytes([*tokens, 0]), self.clock.monotonic_ns() + 10**10)

    def tiers_of(self, tokens: list[int]) -> tuple[int, int, int, int]:
        found = self.index.lookup(hash_tokens(NS, tokens))
        return found[0].by_tier if found else (0, 0, 0, 0)


def prompt(seed: int, blocks: int) -> list[int]:
    return [seed * 100 + i for i in range(4 * blocks)]


def tier_blocks(
    node: Node, tokens: list[int], checks: Sequence[bytes] = (), namespace: Namespace = NS
) -> list[TierBlock]:
    """The full blocks of a prompt as a tier of `node` keeps them."""
    node.replica.know(namespace)
    scopes, epoch = node.tiers.scopes_of(namespace.digest)
    blocks: list[TierBlock] = []
    parent, digest, raw = b"", namespace.digest, token_bytes(tokens)
    for i, name in enumerate(hash_tokens(namespace, tokens)):
        piece = raw[16 * i : 16 * i + 16]
        digest = chain_digest(digest, piece, ())
        sums = checks[i] if checks else bytes(8 * GEOMETRY.num_layers)
        names = (namespace.digest, i, name.sequence, name.check, parent, digest)
        blocks.append(TierBlock(*names, piece, (), sums, scopes=scopes, epoch=epoch))
        parent = name.sequence
    return blocks

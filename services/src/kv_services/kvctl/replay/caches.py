"""What a node holds while a trace is replayed: the production pool, policies and tiers, without bytes.

A block of the trace is a block of one token here, its id; so names, matches and evictions are those of production.
`NodeCache` is a node: tail first, never a hole. `FlatCache` is the textbook cache that published figures are taken
with: any block may go, holes included, and only the unbroken run counts.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Protocol

from kv_core.hashing import BlockHashes, hash_packed
from kv_core.ids import RegionId
from kv_core.namespace import Namespace
from kv_prefix.block_pool import BlockPool
from kv_prefix.events import BlockRemoved, BlocksStored, PoolEvent, RemovalReason, Tier
from kv_prefix.eviction import make_eviction_policy
from kv_prefix.prefix_index import Holder, PrefixIndex
from kv_prefix.tiers.blocks import TierBlock, prefix_digests
from kv_prefix.tiers.catalog import TierCatalog, TierRemoved
from kv_services.kvctl.replay.errors import ReplayRequestError

NAMESPACE: Final = Namespace("replay", "trace", block_size=1)
_TOKEN: Final = 4
_AFTER: Final = bytes(_TOKEN)
"""A pool leaves a prompt's last token to compute; the trace's blocks all count, so one token is put behind them."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """One request's blocks: ids as tokens, and their names."""

    tokens: bytes
    names: BlockHashes

    @classmethod
    def of(cls, hash_ids: Sequence[int]) -> "Prompt":
        tokens = b"".join(block_id.to_bytes(_TOKEN, "little") for block_id in hash_ids)
        return cls(tokens, hash_packed(NAMESPACE, tokens))


class Cache(Protocol):
    """One node's cache. `serve` answers how many blocks of a prompt were there, by tier, and keeps the prompt."""

    evicted: int

    def serve(self, prompt: Prompt) -> tuple[int, int, int, int]: ...


class NodeCache:
    """A node's pool and the tiers below it.

    Args:
        index: told what this node holds.
        disk_blocks, remote_blocks: capacity of the tiers; 0 for none.
    """

    def __init__(
        self,
        index: PrefixIndex,
        holder: Holder,
        policy: str,
        capacity_blocks: int,
        disk_blocks: int = 0,
        remote_blocks: int = 0,
    ) -> None:
        self._index, self._holder, self._capacity = index, holder, capacity_blocks
        self._pool = BlockPool(
            capacity_blocks, 1, region=RegionId(0), policy=make_eviction_policy(policy, capacity_blocks)
        )
        sizes = ((Tier.DISK, disk_blocks), (Tier.REMOTE, remote_blocks))
        self._tiers = [(tier, TierCatalog(size)) for tier, size in sizes if size]
        self.evicted = 0

    def serve(self, prompt: Prompt) -> tuple[int, int, int, int]:
        names = prompt.names
        if len(names) > self._capacity:
            reason = f"a request has {len(names)} blocks, the pool {self._capacity}"
            raise ReplayRequestError(option="--capacity-blocks", reason=reason)
        listed = list(names)
        match = self._pool.match(NAMESPACE.digest, listed, prompt.tokens + _AFTER)
        found = [0, len(match.refs), 0, 0]
        reached = len(match.refs)
        for tier, catalog in self._tiers:
            loaded = len(catalog.match(NAMESPACE.digest, listed, prompt.tokens, {}, reached))
            found[tier] += loaded
            reached += loaded
        opened = self._pool.open("replay", match, len(names) - len(match.refs), use_partial=False)
        first = len(match.refs)
        self._pool.commit(opened.table, NAMESPACE.digest, first, listed[first:], prompt.tokens[first * _TOKEN :])
        self._pool.release(opened.table)
        self._follow(self._pool.take_events())
        if self._tiers:
            self._spill(prompt)
        return found[0], found[1], found[2], found[3]

    def _follow(self, events: Sequence[PoolEvent]) -> None:
        for event in events:
            match event:
                case BlocksStored(block_hashes=block_hashes):
                    self._index.stored(self._holder, Tier.HOST, block_hashes, consecutive=True)
                case BlockRemoved(block_hash=block_hash, reason=reason):
                    self.evicted += reason is RemovalReason.EVICTED
                    self._index.removed(self._holder, Tier.HOST, (block_hash,))

    def _spill(self, prompt: Prompt) -> None:
        """What is in memory goes down as soon as it is there, as in a node; a block that is there is used again."""
        digests = prefix_digests(NAMESPACE.digest, prompt.tokens, _TOKEN, {})
        parent, blocks = b"", []
        for block_idx, (name, digest) in enumerate(zip(prompt.names, digests, strict=True)):
            token = prompt.tokens[block_idx * _TOKEN : (block_idx + 1) * _TOKEN]
            blocks.append(
                TierBlock(NAMESPACE.digest, block_idx, name.sequence, name.check, parent, digest, token, (), b"")
            )
            parent = name.sequence
        for tier, catalog in self._tiers:
            catalog.stored(catalog.plan_store(blocks), ok=True)
            for event in catalog.take_events():
                if isinstance(event, TierRemoved):
                    self._index.removed(self._holder, tier, (event.block.block_hash,))
                else:
                    self._index.stored(self._holder, tier, [block.block_hash for block in event.blocks])


class FlatCache:
    """Blocks under a policy that may evict any of them; after each request, down to capacity.

    Args:
        longest: blocks of the longest request.
    """

    def __init__(self, index: PrefixIndex, holder: Holder, policy: str, capacity_blocks: int, longest: int) -> None:
        self._index, self._holder, self._capacity = index, holder, capacity_blocks
        # A request's blocks come before others go, so for a moment there are more than the capacity.
        self._policy = make_eviction_policy(policy, capacity_blocks + longest)
        self._slot_of: dict[bytes, int] = {}
        self._names: list[bytes] = []
        self._free: list[int] = []
        self.evicted = 0

    def serve(self, prompt: Prompt) -> tuple[int, int, int, int]:
        held = next((m.num_blocks for m in self._index.lookup(prompt.names) if m.holder == self._holder), 0)
        for name in prompt.names:
            slot = self._slot_of.get(name.sequence)
            if slot is None:
                self._insert(name.sequence)
            else:
                self._policy.touch(slot)
        self._index.stored(self._holder, Tier.HOST, prompt.names, consecutive=True)
        gone: list[bytes] = []
        while len(self._slot_of) > self._capacity:
            victim = self._policy.victim()
            assert victim is not None, "every block is offered"
            self._policy.remove(victim, evicted=True)
            gone.append(self._names[victim])
            del self._slot_of[self._names[victim]]
            self._free.append(victim)
        self._index.removed(self._holder, Tier.HOST, BlockHashes.of_columns(gone, [0] * len(gone)))
        self.evicted += len(gone)
        return 0, held, 0, 0

    def _insert(self, name: bytes) -> None:
        if self._free:
            slot = self._free.pop()
            self._names[slot] = name
        else:
            slot = len(self._names)
            self._names.append(name)
        self._slot_of[name] = slot
        self._policy.insert(slot, name)
        self._policy.offer(slot)

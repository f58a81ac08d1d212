"""What every role of one node shares: the bus, the arena and who may use it, the engine, the metadata, the counters."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from kv_bus.interface import Bus, Request
from kv_core.block import BlockRef
from kv_core.checksum import xxh3_64
from kv_core.clock import Clock
from kv_core.ids import NodeId, RegionId
from kv_core.namespace import Namespace
from kv_prefix.block_pool import BlockPool
from kv_prefix.events import PoolEvent
from kv_prefix.prefix_index import PrefixIndex
from kv_services.config import ClusterConfig, NodeConfig
from kv_services.messages import ReserveDecode, RunPrefill
from kv_services.metrics import Metrics
from kv_services.node.compute import Compute
from kv_services.node.exact_blocks import ExactBlocks
from kv_services.node.pull_cost import PullCost
from kv_services.node.recoverer import Recoverer
from kv_services.node.telling import Telling
from kv_services.node.tiers import Tiers
from kv_services.replica.service import ReplicaService
from kv_transport import Arena, KVCacheTransferEngine


class Introductions(Protocol):
    """Sees that a peer's agent is known before KV moves."""

    async def ensure(self, node_id: NodeId, deadline_ns: int) -> None:
        """Return when transfers with that node can begin."""
        ...


class PastPrompts(Protocol):
    """The prompts of the latest requests, for whoever asks why one missed."""

    def note(self, request_id: str, namespace: Namespace, tokens: bytes) -> None: ...
    def get(self, request_id: str) -> tuple[Namespace, bytes] | None: ...
    def listen(self, listener: Callable[[Namespace, bytes], None]) -> None: ...


@dataclass(frozen=True, slots=True)
class NodeContext:
    """One node's parts, made by `node.process` and shared by its roles."""

    config: ClusterConfig
    node: NodeConfig
    clock: Clock
    bus: Bus
    arena: Arena
    region: RegionId
    pool: BlockPool
    index: PrefixIndex
    transfers: KVCacheTransferEngine
    compute: Compute
    replica: ReplicaService
    introductions: Introductions
    metrics: Metrics
    cost: PullCost
    tiers: Tiers
    recovery: Recoverer
    past: PastPrompts
    exact: ExactBlocks
    listeners: list[Callable[[Sequence[PoolEvent]], None]] = field(default_factory=list)
    telling: Telling = field(default_factory=Telling)

    @property
    def node_id(self) -> NodeId:
        return self.node.node_id

    @property
    def block_size(self) -> int:
        return self.arena.geometry.block_size

    @property
    def num_layers(self) -> int:
        return self.arena.geometry.num_layers

    async def take_in(self, request: Request[ReserveDecode] | Request[RunPrefill]) -> Namespace:
        """What precedes every prompt: its gateway's word that it owns it is followed, and what lies of it in slower
        tiers comes up, beside the turns of others. Gives the namespace.

        Raises:
            StaleReplicaError, HolderLostError, ReplicaEndedError: that word cannot be followed.
        """
        message = request.message
        namespace = message.namespace.namespace()
        self.replica.hear_news(request.sender, request.incarnation, message.news)
        if message.after:
            await self.replica.caught_up(message.after, request.deadline_ns)
        self.replica.know(namespace)
        await self.tiers.promote(namespace, message.tokens, request.deadline_ns)
        self.past.note(message.request_id, namespace, message.tokens)
        return namespace

    def prepare(self, refs: Sequence[BlockRef]) -> None:
        """Make older references to these slots void, before anything is written into them (A3)."""
        # At once: a long prompt has thousands, and to look at one in the table costs as much as to look at ten.
        present: list[int] = self.arena.generations[[ref.slot for ref in refs]].tolist()
        # A part-filled block that is continued where it lies keeps its generation.
        raised = [ref for ref, generation in zip(refs, present, strict=True) if ref.generation > generation]
        self.arena.raise_generations([ref.slot for ref in raised], [ref.generation for ref in raised])

    def entry_checksum(self, slots: Sequence[int], changed: Mapping[tuple[int, int], int] | None = None) -> int:
        """XXH3 over the CRC-64 of every (block, layer), blocks in order; each CRC as 8 bytes, little-endian.

        A registered entry's is taken over its full blocks, a hand-over's over everything that was handed over.

        Args:
            changed: (layer, index in `slots`) -> the CRC-64 of that cell where a lossy codec brought it to.
        """
        # checks is [layer][slot]; an entry is read block by block.
        checks = self.arena.checks[:, list(slots)]
        for place, check in (changed or {}).items():
            checks[place] = check
        return xxh3_64(checks.T.tobytes())

    def tell_pool_events(self) -> None:
        """Publish what happened in the pool within `telling.TELL_S`."""
        if self.pool.has_events:
            self.telling.soon(self._tell_now)

    def _tell_now(self) -> None:
        self.flush_pool_events()
        self.replica.say()

    def flush_pool_events(self) -> None:
        """Publish what happened in the pool since the last call."""
        events = self.pool.take_events()
        if events:
            self.replica.pool_events(events, self.block_size)
            self.tiers.observe(events)
            for listener in self.listeners:
                listener(events)

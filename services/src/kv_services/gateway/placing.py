"""Chooses a decode and a prefill node for a request: the prefix each holds against how busy each is.

Loads are what nodes reported plus what this gateway assigned since, in blocks still to be computed; the policy itself
is kv-prefix's and pure, so several gateways with the same view choose alike.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from kv_core.hashing import BlockHash
from kv_core.ids import NodeId, RequestId
from kv_prefix.placement import Candidate, Placement, PlacementPolicy, PlacementRequest
from kv_prefix.prefix_index import HolderMatch
from kv_services.messages import Load

NO_OVERLAP = (0, 0, 0, 0)


def _all(nodes: Mapping[NodeId, Load], decode: NodeId) -> dict[NodeId, Load]:
    return dict(nodes)


@dataclass(slots=True)
class NodeChoice:
    """Where one request goes."""

    decode: Placement
    prefill: Placement | None


@dataclass(slots=True)
class Placer:
    """The placement of one gateway.

    Args:
        decode_policy, prefill_policy: one policy object each, since some keep a turn.
        block_size: tokens per block.
        alone_ms: a decode node computes itself what is expected to take it no longer than this; 0: it never does.
    """

    decode_policy: PlacementPolicy
    prefill_policy: PlacementPolicy
    block_size: int
    alone_ms: float = 0.0
    _assigned: dict[NodeId, dict[RequestId, int]] = field(default_factory=dict)

    def choose(
        self,
        request_id: RequestId,
        hashes: Sequence[BlockHash],
        num_tokens: int,
        holders: Sequence[HolderMatch],
        decode_nodes: dict[NodeId, Load],
        prefill_nodes: dict[NodeId, Load],
        coming: Mapping[NodeId, int] | None = None,
        feeding: Callable[[Mapping[NodeId, Load], NodeId], dict[NodeId, Load]] = _all,
    ) -> NodeChoice:
        """Choose among the given nodes.

        Args:
            coming: by node, how many blocks behind those that it holds it is computing already. Prompts have their turn
                one after the other, so to the next one they are as good as held.
            feeding: of the prefill nodes, those that may hand over to a decode node; at least one.

        Raises:
            NoCandidateError: there is no decode node.
        """
        overlap = {match.holder.node: match.by_tier for match in holders}
        prefix_key = hashes[0].sequence if hashes else request_id.encode()
        request = PlacementRequest(request_id.encode(), prefix_key, len(hashes))
        if not prefill_nodes:
            # The decode node will compute what it lacks.
            _add(overlap, coming)
        decode = self.decode_policy.place(request, self._candidates(decode_nodes, overlap, decoding=True))
        prefill = None
        prefill_nodes = feeding(prefill_nodes, decode.node)
        if prefill_nodes:
            _add(overlap, coming)
            prefill = self.prefill_policy.place(request, self._candidates(prefill_nodes, overlap, decoding=False))
            if self._quick(num_tokens - decode.overlap_blocks * self.block_size, prefill_nodes[prefill.node]):
                prefill = None
        return NodeChoice(decode, prefill)

    def assign(self, node_id: NodeId, request_id: RequestId, num_blocks: int) -> None:
        """Count a request towards a node's load until `done`."""
        self._assigned.setdefault(node_id, {})[request_id] = num_blocks

    def done(self, node_id: NodeId, request_id: RequestId) -> None:
        """The request is no longer this node's work."""
        self._assigned.get(node_id, {}).pop(request_id, None)

    def load(self, node_id: NodeId) -> int:
        """Blocks this gateway has assigned to a node and not yet seen done."""
        return sum(self._assigned.get(node_id, {}).values())

    def _quick(self, num_tokens: int, load: Load) -> bool:
        """Whether so many tokens are computed within `alone_ms`, at the rate of a node that computes prompts."""
        return num_tokens * 1e3 <= self.alone_ms * load.tokens_per_second

    def _candidates(
        self, nodes: dict[NodeId, Load], overlap: dict[NodeId, tuple[int, int, int, int]], *, decoding: bool
    ) -> list[Candidate]:
        return [
            Candidate(node_id, self._load_of(node_id, load, decoding=decoding), overlap.get(node_id, NO_OVERLAP))
            for node_id, load in nodes.items()
        ]

    def _load_of(self, node_id: NodeId, load: Load, *, decoding: bool) -> float:
        # What others assigned shows in the node's report; what this gateway assigned is known sooner and exactly.
        own = self.load(node_id)
        reported = load.running + load.waiting if decoding else load.waiting_tokens / self.block_size
        return max(own, reported)


def _add(overlap: dict[NodeId, tuple[int, int, int, int]], coming: Mapping[NodeId, int] | None) -> None:
    """Count blocks that are being computed as held in memory."""
    for node_id, blocks in (coming or {}).items():
        device, host, disk, remote = overlap.get(node_id, NO_OVERLAP)
        overlap[node_id] = (device, host + blocks, disk, remote)

"""Asks the rule of `oversize` with what the gateway sees of the cluster just now."""

from collections.abc import Collection, Mapping, Sequence
from typing import Protocol

from kv_core.ids import NodeId
from kv_core.sharding import Placement
from kv_services.config import Role
from kv_services.gateway.completer import GenerationRequest
from kv_services.gateway.oversize import Nodes, Oversize
from kv_services.messages import Load
from kv_services.sharded.messages import SINCE_REVISION


class SeenCluster(Protocol):
    """What is asked of the membership; see `membership.actor.ClusterView`."""

    @property
    def roles(self) -> Mapping[NodeId, Role]: ...
    def certain(self, *roles: Role) -> Sequence[NodeId]: ...
    def load_of(self, node_id: NodeId) -> Load: ...
    def wire_revision(self, node_id: NodeId) -> int: ...


def place_in_pieces(
    rule: Oversize,
    cluster: SeenCluster,
    request: GenerationRequest,
    exclude: Collection[NodeId],
    decode: Mapping[NodeId, Load],
    prefill: Mapping[NodeId, Load],
) -> tuple[Placement, ...]:
    """The pieces of a request; none when one node of `decode` (and one of `prefill`) shall hold it as a whole.

    Raises:
        ClusterTooSmallError, ClusterFullError: see `Oversize.pieces`.
    """
    both = (Role.DECODE, Role.PREFILL)
    certain = {node: cluster.load_of(node) for node in cluster.certain(*both) if _knows_pieces(cluster, node)}
    known = {node: cluster.load_of(node) for node, role in cluster.roles.items() if role in both}
    nodes = Nodes(decode, prefill, certain, known)
    return rule.pieces(request.request_id, *sizes_of(request), nodes, exclude)


def sizes_of(request: GenerationRequest) -> tuple[int, int]:
    """Tokens whose KV a prefill node holds, and tokens whose KV there will be in the end; the last one has none."""
    num_prompt = len(request.prompt_token_ids)
    return num_prompt - 1, num_prompt + request.sampling.max_tokens - 1


def _knows_pieces(cluster: SeenCluster, node_id: NodeId) -> bool:
    """While a cluster is upgraded some nodes do not know the messages yet."""
    return cluster.wire_revision(node_id) >= SINCE_REVISION

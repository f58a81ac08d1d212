"""Decides whether a request is held by several nodes, and by which; pure.

O1: what one decode node (and one prefill node, if there are any) could hold goes there, unless `above_tokens` says no.
O2: a request is refused for good only if all nodes that are known, empty, would not hold it; else it may come again.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from kv_core.ids import NodeId, RequestId
from kv_core.sharding import Placement
from kv_services.messages import Load
from kv_services.sharded.errors import ClusterFullError, ClusterTooSmallError
from kv_services.sharded.plan import SequenceSize, ShardMode, plan_pieces


@dataclass(frozen=True, slots=True)
class Nodes:
    """What the gateway knows of the nodes that hold KV.

    Attributes:
        decode, prefill: those that may be given work, by role.
        certain: those of both that were heard of just now.
        known: all of both that ever reported, dead ones too.
    """

    decode: Mapping[NodeId, Load]
    prefill: Mapping[NodeId, Load]
    certain: Mapping[NodeId, Load]
    known: Mapping[NodeId, Load]


@dataclass(frozen=True, slots=True)
class Oversize:
    """The rule of one gateway.

    Attributes:
        mode: how sequences are cut.
        above_tokens: cut from this many tokens of prompt and answer on whatever the nodes could hold; 0 for never.
        groups: of mode hybrid.
        num_layers, block_size: of the model and its blocks.
    """

    mode: ShardMode
    above_tokens: int
    groups: tuple[frozenset[NodeId], ...]
    num_layers: int
    block_size: int

    def pieces(
        self, request_id: RequestId, num_prompt: int, num_tokens: int, nodes: Nodes, exclude: Collection[NodeId]
    ) -> tuple[Placement, ...]:
        """The pieces of a request; none when a node holds it as a whole. The first one's node shall coordinate.

        Args:
            num_prompt: tokens that a prefill node would have to hold.
            num_tokens: tokens whose KV there will be in the end.
            exclude: nodes of failed attempts; used only if it does not fit otherwise.

        Raises:
            ClusterTooSmallError, ClusterFullError: as O2.
        """
        blocks = self._blocks(num_tokens)
        wanted = 0 < self.above_tokens <= num_tokens
        whole = could_hold(nodes.decode, blocks) and could_hold(nodes.prefill, self._blocks(num_prompt))
        if self.mode is ShardMode.NONE or (whole and not wanted):
            return ()
        size = SequenceSize(self.num_layers, num_tokens, self.block_size)
        room = {node: load.slots_free + load.slots_cached for node, load in nodes.certain.items()}
        for left_out in (exclude, ()):
            try:
                usable = {node: slots for node, slots in room.items() if node not in left_out}
                return plan_pieces(request_id, self.mode, size, usable, self.groups)
            except ClusterTooSmallError:
                continue
        if whole:
            return ()
        empty = {node: load.slots_total for node, load in nodes.known.items()}
        if all(empty.values()):
            plan_pieces(request_id, self.mode, size, empty, self.groups)
        # Else one of them has begun just now and has not said yet what it has.
        raise ClusterFullError(request_id=request_id, need=blocks, nodes=len(room), free=sum(room.values()))

    def roomy(
        self, decode: Mapping[NodeId, Load], prefill: Mapping[NodeId, Load], num_prompt: int, num_tokens: int
    ) -> tuple[dict[NodeId, Load], dict[NodeId, Load]]:
        """The nodes of each role that could hold the request; all of a role if none could, so that one says why not."""
        return _roomy(decode, self._blocks(num_tokens)), _roomy(prefill, self._blocks(num_prompt))

    def _blocks(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)


def could_hold(loads: Mapping[NodeId, Load], blocks: int) -> bool:
    """Whether one of these nodes could hold so many blocks, or there are no such nodes."""
    return not loads or any(_holds(load, blocks) for load in loads.values())


def oversize_rule(
    mode: str, above_tokens: int, groups: Sequence[Sequence[str]], num_layers: int, block_size: int
) -> Oversize:
    """The rule that a cluster file states."""
    sets = tuple(frozenset(NodeId(name) for name in group) for group in groups)
    return Oversize(ShardMode(mode), above_tokens, sets, num_layers, block_size)


def _roomy(loads: Mapping[NodeId, Load], blocks: int) -> dict[NodeId, Load]:
    return {node: load for node, load in loads.items() if _holds(load, blocks)} or dict(loads)


def _holds(load: Load, blocks: int) -> bool:
    # A node that has not reported yet is given the benefit of the doubt: it refuses by itself.
    return load.slots_total == 0 or load.slots_total >= blocks

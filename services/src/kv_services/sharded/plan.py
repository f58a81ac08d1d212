"""Decides how a sequence is cut over nodes none of which can hold it, and in which stages a pass runs over the pieces.

Pure. The gateway calls `plan_pieces`; the coordinator calls `stages_of` on what it was sent and trusts nothing of it.

H1  Every (layer, token) of the sequence has exactly one holder, and each piece fits the room of its node.
H2  As few nodes as possible take part, those with the most room; KV is balanced by room (`kv_core.sharding` S2).
H3  A plan is a function of its inputs.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from itertools import pairwise
from typing import Final, TypeAlias

from kv_core.ids import NodeId, RequestId
from kv_core.sharding import InvalidPlanError, Placement, plan_by_layer, plan_by_sequence
from kv_services.engine.shard_kv import slots_needed
from kv_services.sharded.errors import ClusterTooSmallError

MIN_NODES: Final = 2
"""Fewer are no cut."""


class ShardMode(Enum):
    """How sequences that one node cannot hold are cut: `[sharding] mode`."""

    AUTO = "auto"
    NONE = "none"
    LAYER = "layer"
    SEQUENCE = "sequence"
    HYBRID = "hybrid"


@dataclass(frozen=True, slots=True)
class SequenceSize:
    """What is to be held: `num_tokens` tokens of all layers, in blocks of `block_size` tokens."""

    num_layers: int
    num_tokens: int
    block_size: int

    @property
    def num_blocks(self) -> int:
        """Blocks of all layers."""
        return -(-self.num_tokens // self.block_size)


@dataclass(frozen=True, slots=True)
class Stage:
    """Consecutive layers held by the same nodes; `pieces` in the order of their tokens, cut to these layers.

    Not `split`: the only holder runs the layers. `split`: the coordinator runs them, a layer at a time, and each holder
    attends over its own tokens.
    """

    layer_start: int
    layer_end: int
    pieces: tuple[Placement, ...]
    split: bool


_Cut: TypeAlias = Callable[[SequenceSize, Mapping[NodeId, int]], tuple[Placement, ...]]


def piece_slots(piece: Placement, num_layers: int, block_size: int) -> int:
    """Slots that a piece takes of a node's arena."""
    return slots_needed(
        num_layers, piece.layer_end - piece.layer_start, piece.token_end - piece.token_start, block_size
    )


def plan_pieces(
    request_id: RequestId,
    mode: ShardMode,
    size: SequenceSize,
    room: Mapping[NodeId, int],
    groups: Sequence[Collection[NodeId]] = (),
) -> tuple[Placement, ...]:
    """Cut a sequence over nodes.

    Args:
        mode: `AUTO` is by layer where that fits, since a pass then visits each node once; else by sequence.
        room: slots that each node can give.
        groups: of `HYBRID`: nodes of one group share a request by layer; one group takes it if it can (the one with
            the most room), else several, each some of its tokens.

    Raises:
        ClusterTooSmallError: it does not fit, or `NONE`.
    """
    nodes = _by_room(room)
    pieces: tuple[Placement, ...] = ()
    if mode in (ShardMode.AUTO, ShardMode.LAYER):
        pieces = _fewest(size, nodes, _by_layer)
    if mode is ShardMode.SEQUENCE or (mode is ShardMode.AUTO and not pieces):
        pieces = _fewest(size, nodes, _by_sequence)
    if mode is ShardMode.HYBRID:
        pieces = _hybrid(size, nodes, groups)
    if not pieces:
        raise ClusterTooSmallError(
            request_id=request_id, need=size.num_blocks, mode=mode.value, nodes=len(nodes), total=sum(nodes.values())
        )
    return pieces


def stages_of(pieces: Sequence[Placement], size: SequenceSize) -> tuple[Stage, ...]:
    """The stages of a pass over these pieces.

    Raises:
        InvalidPlanError: a (layer, token) has no holder or two, or a cut inside a block (H1).
    """
    for piece in pieces:
        if not (
            0 <= piece.layer_start < piece.layer_end <= size.num_layers
            and 0 <= piece.token_start < piece.token_end <= size.num_tokens
            and piece.token_start % size.block_size == 0
        ):
            raise InvalidPlanError(reason=f"piece {piece} of {size}")
    if len({piece.node for piece in pieces}) != len(pieces):
        raise InvalidPlanError(reason="a node holds two pieces")
    borders = sorted({0, size.num_layers, *(p.layer_start for p in pieces), *(p.layer_end for p in pieces)})
    stages: list[Stage] = []
    for start, end in pairwise(borders):
        here = sorted((p for p in pieces if p.layer_start <= start < p.layer_end), key=lambda p: p.token_start)
        ends = [0, *(piece.token_end for piece in here)]
        if [piece.token_start for piece in here] != ends[:-1] or ends[-1] != size.num_tokens:
            raise InvalidPlanError(reason=f"layers {start} to {end} are not held once by {here}")
        if stages and [p.node for p in stages[-1].pieces] == [p.node for p in here]:
            start = stages.pop().layer_start
        cut = tuple(Placement(start, end, piece.token_start, piece.token_end, piece.node) for piece in here)
        stages.append(Stage(start, end, cut, split=len(cut) > 1))
    return tuple(stages)


def single_steps(stages: Sequence[Stage]) -> tuple[Stage, ...]:
    """The same with split stages taken apart into one for each layer."""
    steps: list[Stage] = []
    for stage in stages:
        if stage.split:
            layers = range(stage.layer_start, stage.layer_end)
            steps += [Stage(layer, layer + 1, stage.pieces, split=True) for layer in layers]
        else:
            steps.append(stage)
    return tuple(steps)


def pass_end(stages: Sequence[Stage], start: int, stop: int, tokens_max: int) -> int:
    """Where a pass that begins at `start` ends: at most `tokens_max` tokens on, at a multiple of it where that comes
    first, at `stop`, and never beyond the piece that takes its KV."""
    ends = [piece.token_end for stage in stages for piece in stage.pieces if piece.token_end > start]
    return min((start // tokens_max + 1) * tokens_max, stop, *ends)


def _by_room(room: Mapping[NodeId, int]) -> dict[NodeId, int]:
    return dict(sorted(((n, slots) for n, slots in room.items() if slots > 0), key=lambda item: (-item[1], item[0])))


def _fewest(size: SequenceSize, nodes: Mapping[NodeId, int], cut: _Cut) -> tuple[Placement, ...]:
    """The cut over the fewest nodes that holds the sequence; none if there is none."""
    names = list(nodes)
    for count in range(MIN_NODES, len(names) + 1):
        if pieces := cut(size, {name: nodes[name] for name in names[:count]}):
            return pieces
    return ()


def _by_layer(size: SequenceSize, nodes: Mapping[NodeId, int]) -> tuple[Placement, ...]:
    if len(nodes) > size.num_layers:
        return ()
    return _fitting(plan_by_layer(size.num_layers, size.num_tokens, nodes).placements, size, nodes)


def _by_sequence(size: SequenceSize, nodes: Mapping[NodeId, int]) -> tuple[Placement, ...]:
    if len(nodes) > size.num_blocks:
        return ()
    plan = plan_by_sequence(size.num_layers, size.num_tokens, size.block_size, nodes)
    return _fitting(plan.placements, size, nodes)


def _fitting(pieces: tuple[Placement, ...], size: SequenceSize, nodes: Mapping[NodeId, int]) -> tuple[Placement, ...]:
    fits = all(piece_slots(piece, size.num_layers, size.block_size) <= nodes[piece.node] for piece in pieces)
    return pieces if fits and len(pieces) >= MIN_NODES else ()


def _hybrid(
    size: SequenceSize, nodes: Mapping[NodeId, int], groups: Sequence[Collection[NodeId]]
) -> tuple[Placement, ...]:
    """The fewest groups, those with the most room first; tokens are cut between groups, layers inside."""
    members = [{name: nodes[name] for name in nodes if name in group} for group in groups]
    usable = sorted((group for group in members if len(group) >= MIN_NODES), key=lambda group: -sum(group.values()))
    for count in range(1, min(len(usable), size.num_blocks) + 1):
        chosen = {NodeId(str(number)): group for number, group in enumerate(usable[:count])}
        weights = {number: sum(group.values()) for number, group in chosen.items()}
        spans = plan_by_sequence(size.num_layers, size.num_tokens, size.block_size, weights).placements
        pieces: list[Placement] = []
        for span in spans:
            part = SequenceSize(size.num_layers, span.token_end - span.token_start, size.block_size)
            inside = _fewest(part, chosen[span.node], _by_layer)
            if not inside:
                break
            pieces += [Placement(p.layer_start, p.layer_end, span.token_start, span.token_end, p.node) for p in inside]
        else:
            return tuple(pieces)
    return ()

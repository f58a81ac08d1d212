"""Where the pieces of a cache live on several nodes, and the least that must move when nodes come or go.

Three strategies, all cut along whole units so that no unit has two owners:

- by layer: each node holds some layers of all tokens (unit: one layer);
- by sequence: each node holds some tokens of all layers (unit: one block of tokens);
- hybrid: nodes form groups; a request lives in one group, inside it by layer (`sharding_hybrid`).

`spread` is the decision for units of one size. Every node gets its share by weight, rounded down or up: with equal
weights no two nodes differ by more than one unit. Among all such outcomes it moves the fewest units: a node that
holds too many gives away exactly the surplus, a node that holds too few takes exactly what it lacks, and the rounding
goes to those that already hold more. Ties fall to the order in which nodes are given, so a plan is a function of its
inputs.

S1: every (layer, token) has exactly one owner. S2: shares differ from the ideal by less than one unit. S3: no plan
that keeps S2 needs fewer bytes moved. S4: what leaves a lost node has no source: it is computed again or restored.
"""

from bisect import bisect_right
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from itertools import groupby
from typing import TypeVar

from kv_core import limits
from kv_core.errors import KVError
from kv_core.ids import NodeId

Nodes = Sequence[NodeId] | Mapping[NodeId, int]
"""Nodes of equal weight, or each with its weight (say, its capacity in bytes)."""

_T = TypeVar("_T")


class InvalidPlanError(KVError):
    """A plan that cannot be made, or a place outside it."""

    code = 1090
    template = "sharding plan: {reason}"


class ShardStrategy(Enum):
    """Along which axis one cache is cut."""

    BY_LAYER = "by_layer"
    BY_SEQUENCE = "by_sequence"


@dataclass(frozen=True, slots=True)
class Placement:
    """The layers `[layer_start, layer_end)` of the tokens `[token_start, token_end)` live on `node`."""

    layer_start: int
    layer_end: int
    token_start: int
    token_end: int
    node: NodeId

    @property
    def num_cells(self) -> int:
        """Layers times tokens: multiply by `ModelGeometry.bytes_per_token_per_layer` for bytes."""
        return (self.layer_end - self.layer_start) * (self.token_end - self.token_start)


@dataclass(frozen=True, slots=True)
class Move:
    """Bring a range to `target`. `source` is None when the node that held it is lost."""

    layer_start: int
    layer_end: int
    token_start: int
    token_end: int
    source: NodeId | None
    target: NodeId

    @property
    def num_cells(self) -> int:
        """Layers times tokens, as `Placement.num_cells`."""
        return (self.layer_end - self.layer_start) * (self.token_end - self.token_start)


@dataclass(frozen=True, slots=True)
class ShardPlan:
    """Who holds what of one cache. Made by `plan_by_layer` and `plan_by_sequence`, changed by `rebalance`."""

    strategy: ShardStrategy
    num_layers: int
    num_tokens: int
    block_size: int
    placements: tuple[Placement, ...]

    def locate(self, layer: int, token: int) -> NodeId:
        """The node that holds this token's KV in this layer.

        Raises:
            InvalidPlanError: outside the plan.
        """
        if not (0 <= layer < self.num_layers and 0 <= token < self.num_tokens):
            raise InvalidPlanError(
                reason=f"layer {layer}, token {token} lies outside {self.num_layers} x {self.num_tokens}"
            )
        if self.strategy is ShardStrategy.BY_LAYER:
            at = bisect_right(self.placements, layer, key=lambda place: place.layer_start)
        else:
            at = bisect_right(self.placements, token, key=lambda place: place.token_start)
        return self.placements[at - 1].node

    def cells_by_node(self) -> dict[NodeId, int]:
        """Layers times tokens on each node that holds any."""
        cells: dict[NodeId, int] = {}
        for place in self.placements:
            cells[place.node] = cells.get(place.node, 0) + place.num_cells
        return cells

    def rebalance(
        self, nodes: Nodes, num_tokens: int | None = None, lost: Collection[NodeId] = ()
    ) -> tuple["ShardPlan", tuple[Move, ...]]:
        """The plan for these nodes (and this length), and the fewest moves that lead there.

        Args:
            nodes: all nodes from now on; a node of this plan that is missing leaves.
            num_tokens: the new length; tokens beyond the old one have no KV yet and are not moved.
            lost: nodes whose bytes are gone.

        Raises:
            InvalidPlanError: no node, a weight that is not positive, a lost node that is to stay, a shorter length.
        """
        weights = weights_of(nodes)
        num_tokens = self.num_tokens if num_tokens is None else num_tokens
        if num_tokens < self.num_tokens:
            raise InvalidPlanError(reason=f"a cache of {self.num_tokens} tokens does not shrink to {num_tokens}")
        if any(node in weights for node in lost):
            raise InvalidPlanError(reason="a lost node cannot hold anything")
        before = list(self._units())
        by_layer = self.strategy is ShardStrategy.BY_LAYER
        num_units = self.num_layers if by_layer else _num_blocks(num_tokens, self.block_size)
        after = spread([*before, *[None] * (num_units - len(before))], weights)
        plan = _plan(self.strategy, self.num_layers, num_tokens, self.block_size, after)
        return plan, tuple(self._moves(before, after, lost))

    def _units(self) -> Iterator[NodeId]:
        """The owner of each unit, in order."""
        for place in self.placements:
            if self.strategy is ShardStrategy.BY_LAYER:
                num_units = place.layer_end - place.layer_start
            else:
                num_units = _num_blocks(place.token_end - place.token_start, self.block_size)
            yield from [place.node] * num_units

    def _moves(self, before: list[NodeId], after: list[NodeId], lost: Collection[NodeId]) -> Iterator[Move]:
        for start, end, (source, target) in runs(list(zip(before, after, strict=False))):
            if source != target:
                kept = None if source in lost else source
                if self.strategy is ShardStrategy.BY_LAYER:
                    yield Move(start, end, 0, self.num_tokens, kept, target)
                else:
                    last = min(end * self.block_size, self.num_tokens)
                    yield Move(0, self.num_layers, start * self.block_size, last, kept, target)


def plan_by_layer(num_layers: int, num_tokens: int, nodes: Nodes) -> ShardPlan:
    """Layers in order over the nodes in order.

    Raises:
        InvalidPlanError: no node, a weight that is not positive, or a size out of range.
    """
    _require("layers", num_layers, limits.MAX_LAYERS)
    owners = spread([None] * num_layers, weights_of(nodes))
    return _plan(ShardStrategy.BY_LAYER, num_layers, num_tokens, 1, owners)


def plan_by_sequence(num_layers: int, num_tokens: int, block_size: int, nodes: Nodes) -> ShardPlan:
    """Blocks of tokens in order over the nodes in order; the last block may be short.

    Raises:
        InvalidPlanError: as `plan_by_layer`.
    """
    _require("tokens in a block", block_size, limits.MAX_BLOCK_SIZE)
    _require("tokens", num_tokens, limits.MAX_SHARD_UNITS * block_size)
    owners = spread([None] * _num_blocks(num_tokens, block_size), weights_of(nodes))
    return _plan(ShardStrategy.BY_SEQUENCE, num_layers, num_tokens, block_size, owners)


def spread(owners: Sequence[NodeId | None], weights: Mapping[NodeId, int]) -> list[NodeId]:
    """New owners for units of one size, balanced by weight, with the fewest units moved.

    Args:
        owners: the present owner of each unit; None, or a node without weight, means that it must move.
        weights: positive weight of each node, in the order that breaks ties.
    """
    held = dict.fromkeys(weights, 0)
    for owner in owners:
        if owner is not None and owner in held:
            held[owner] += 1
    targets = _targets(len(owners), weights, held)
    surplus = {node: held[node] - targets[node] for node in weights}
    result: list[NodeId | None] = [owner if owner in held else None for owner in owners]
    # Give away from the end, so that what a node keeps stays in one piece.
    for i in range(len(result) - 1, -1, -1):
        owner = result[i]
        if owner is not None and surplus[owner] > 0:
            surplus[owner] -= 1
            result[i] = None
    lacking = {node: -over for node, over in surplus.items() if over < 0}
    return _fill(result, lacking)


def runs(items: Sequence[_T]) -> Iterator[tuple[int, int, _T]]:
    """`(start, end, item)` for each run of equal items."""
    start = 0
    for item, group in groupby(items):
        end = start + sum(1 for _ in group)
        yield start, end, item
        start = end


def weights_of(nodes: Nodes) -> dict[NodeId, int]:
    """Checked weights, in order.

    Raises:
        InvalidPlanError: no node, the same twice, or a weight that is not a positive integer.
    """
    weights = dict(nodes) if isinstance(nodes, Mapping) else dict.fromkeys(nodes, 1)
    if not weights or len(weights) != len(nodes):
        raise InvalidPlanError(reason="no node" if not weights else "a node is named twice")
    for node, weight in weights.items():
        if type(weight) is not int or weight < 1:
            raise InvalidPlanError(reason=f"weight {weight!r} of node {node} is not a positive integer")
    return weights


def _targets(num_units: int, weights: Mapping[NodeId, int], held: Mapping[NodeId, int]) -> dict[NodeId, int]:
    """How many units each node shall hold: its share rounded down, or up for as many nodes as the sum needs.

    Rounding up a node that holds more than the rounded-down share saves one move, and no other choice saves any.
    """
    total = sum(weights.values())
    targets = {node: num_units * weight // total for node, weight in weights.items()}
    remainders = {node: num_units * weight % total for node, weight in weights.items()}
    upward = sorted(
        (node for node in weights if remainders[node]),
        key=lambda node: (held[node] <= targets[node], -remainders[node]),
    )
    for node in upward[: num_units - sum(targets.values())]:
        targets[node] += 1
    return targets


def _fill(owners: list[NodeId | None], lacking: dict[NodeId, int]) -> list[NodeId]:
    """Give the units without owner to those who lack, first to a neighbour of the gap, else in order."""
    filled: list[NodeId] = []
    for start, end, owner in list(runs(owners)):
        if owner is not None:
            filled += [owner] * (end - start)
            continue
        after = owners[end] if end < len(owners) else None
        gap = end - start
        tail: list[NodeId] = []
        if filled and filled[-1] in lacking:
            gap -= _take(filled, filled[-1], gap, lacking)
        if after is not None and after in lacking:
            gap -= _take(tail, after, gap, lacking)
        while gap:
            gap -= _take(filled, next(iter(lacking)), gap, lacking)
        filled += tail
    return filled


def _take(into: list[NodeId], node: NodeId, gap: int, lacking: dict[NodeId, int]) -> int:
    taken = min(gap, lacking[node])
    into += [node] * taken
    lacking[node] -= taken
    if not lacking[node]:
        del lacking[node]
    return taken


def _plan(
    strategy: ShardStrategy, num_layers: int, num_tokens: int, block_size: int, owners: Sequence[NodeId]
) -> ShardPlan:
    _require("layers", num_layers, limits.MAX_LAYERS)
    _require("tokens", num_tokens, limits.MAX_INT64)
    if strategy is ShardStrategy.BY_LAYER:
        placements = tuple(Placement(start, end, 0, num_tokens, node) for start, end, node in runs(owners))
    else:
        placements = tuple(
            Placement(0, num_layers, start * block_size, min(end * block_size, num_tokens), node)
            for start, end, node in runs(owners)
        )
    return ShardPlan(strategy, num_layers, num_tokens, block_size, placements)


def _num_blocks(num_tokens: int, block_size: int) -> int:
    return -(-num_tokens // block_size)


def _require(what: str, value: int, highest: int) -> None:
    if type(value) is not int or not 1 <= value <= highest:
        raise InvalidPlanError(reason=f"{value!r} {what}; need 1 to {highest}")

"""Decides which prefixes a node gives to which other node, and what stays behind. Pure.

A prefix moves as a chain: the blocks from block 0 to one that nothing here continues. What moves of it is what the
target lacks, so that no block is ever readable somewhere without the blocks before it.

V1: of the nodes with room, a chain goes to the one that lacks least of it; among equals to the one with most room.
V2: nobody is given more blocks than he said he has free: moving evicts nothing elsewhere.
V3: shares after joining or leaving are those of `kv_core.sharding.spread`: by capacity, with the fewest blocks moved.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from kv_core.hashing import BlockHash
from kv_core.ids import NodeId
from kv_core.sharding import spread
from kv_prefix.events import BlocksStored
from kv_prefix.tiers.blocks import TierBlock

UNITS_MAX: Final = 65_536
"""Shares are planned in units of at least a block, so that a plan for millions of blocks takes no longer than this."""


@dataclass(frozen=True, slots=True)
class Chain:
    """One prefix, from block 0 on; `tokens` are uint32, little-endian, of all its blocks."""

    namespace: bytes
    names: tuple[BlockHash, ...]
    tokens: bytes


@dataclass(slots=True)
class _Node:
    name: BlockHash
    namespace: bytes
    parent: "_Node | None"
    tokens: bytes
    with_extras: bool
    in_memory: bool = True
    num_children: int = 0


@dataclass(slots=True)
class Forest:
    """What a node held at one moment, as chains. Made from `BlockPool.snapshot` and what lies below."""

    num_blocks: int = 0
    _nodes: dict[bytes, _Node] = field(default_factory=dict)

    @classmethod
    def of(cls, stored: Iterable[BlocksStored]) -> "Forest":
        forest = cls()
        for run in stored:
            forest._add(run)
        return forest

    def add_below(self, blocks: Sequence[TierBlock]) -> None:
        """Add what lies in slower tiers. A block whose beginning is nowhere cannot be found, and is left out."""
        for block in sorted(blocks, key=lambda block: block.block_idx):
            parent = self._nodes.get(block.parent) if block.parent else None
            if block.sequence not in self._nodes and (parent is not None or not block.parent):
                node = _Node(
                    block.block_hash, block.namespace, parent, block.tokens, bool(block.extras), in_memory=False
                )
                self._nodes[block.sequence] = node
                if parent is not None:
                    parent.num_children += 1
                self.num_blocks += 1

    def leaves(self) -> list[BlockHash]:
        """The last block of every chain, in a stated order: those in memory first, before others come up there."""
        ends = [node for node in self._nodes.values() if not node.num_children]
        return [node.name for node in sorted(ends, key=lambda node: (not node.in_memory, node.name.sequence))]

    def chain(self, leaf: BlockHash) -> Chain | None:
        """The chain that ends in `leaf`; None when content other than tokens lies in it, which does not move."""
        nodes = list(self._up(leaf))
        if any(node.with_extras for node in nodes):
            return None
        nodes.reverse()
        return Chain(nodes[0].namespace, tuple(node.name for node in nodes), b"".join(node.tokens for node in nodes))

    def only_here(self, leaf: BlockHash) -> Iterator[BlockHash]:
        """The blocks of a chain that belong to no other, last first: each call takes them out."""
        node: _Node | None = self._nodes[leaf.sequence]
        while node is not None and not node.num_children:
            yield node.name
            del self._nodes[node.name.sequence]
            node = node.parent
            if node is not None:
                node.num_children -= 1

    def _up(self, leaf: BlockHash) -> Iterator[_Node]:
        node: _Node | None = self._nodes[leaf.sequence]
        while node is not None:
            yield node
            node = node.parent

    def _add(self, run: BlocksStored) -> None:
        parent = self._nodes.get(run.parent.sequence) if run.parent else None
        nbytes = len(run.tokens) // len(run.block_hashes)
        for i, name in enumerate(run.block_hashes):
            tokens = run.tokens[i * nbytes : (i + 1) * nbytes]
            node = _Node(name, run.namespace, parent, tokens, bool(run.extras))
            self._nodes[name.sequence] = node
            if parent is not None:
                parent.num_children += 1
            parent = node
            self.num_blocks += 1


def choose_target(
    num_blocks: int, depth: Mapping[NodeId, int], room: Mapping[NodeId, int]
) -> tuple[NodeId, int] | None:
    """Who takes a chain of that many blocks, and how many of them he has; None when nobody has room for the rest.

    Args:
        depth: how many blocks from block 0 on each node holds, where it is more than none.
        room: free blocks of each node that may be given some.
    """
    fitting = [
        (depth.get(node, 0), free, node) for node, free in room.items() if num_blocks - depth.get(node, 0) <= free
    ]
    if not fitting:
        return None
    have, _, node = max(fitting, key=lambda item: (item[0], item[1], item[2]))
    return node, have


def share_of(own: NodeId, held: Mapping[NodeId, int], weights: Mapping[NodeId, int]) -> dict[NodeId, int]:
    """How many of its blocks `own` gives to whom, so that all hold their share.

    Every node that knows the same figures plans the same, so nobody has to decide for the others.

    Args:
        held: blocks that each node holds.
        weights: capacity of each node that shall hold any from now on; `own` is among them or leaves.

    Raises:
        InvalidPlanError: no weights, or one that is not positive.
    """
    unit = max(1, -(-sum(held.values()) // UNITS_MAX))
    before = [node for node in sorted(held) for _ in range(held[node] // unit)]
    after = spread(before, {node: weights[node] for node in sorted(weights)})
    given: dict[NodeId, int] = {}
    for source, target in zip(before, after, strict=True):
        if source == own != target:
            given[target] = given.get(target, 0) + unit
    return given


def depths(matches: Iterable[tuple[NodeId, int]], allowed: Sequence[NodeId]) -> dict[NodeId, int]:
    """How deep each of `allowed` holds a chain, from an index's answer."""
    return {node: num_blocks for node, num_blocks in matches if node in allowed}

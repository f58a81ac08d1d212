"""Hybrid sharding: groups of nodes; a request lives in one group, and inside it by layer.

A new request goes to the group with the least load for its weight. `rebalance` gives back the balance after groups
changed, requests ended, or nodes came and went, with the least bytes moved.

Requests differ in size, so groups cannot be equal. The promise is: no group holds its share (by weight) plus the
largest request or more. Placing a request on the least loaded group keeps it. When groups change, the requests of a
group that is gone must move; beyond those, an overloaded group gives away the smallest total that brings it below
its bound, which is a subset-sum problem, solved exactly up to `_EXACT_WORK_MAX` and largest-first beyond.

Y1: every request has one group. Y2: after `place`, and after `rebalance`, no group breaks the promise if none did
before (`place`), or at all (`rebalance`). Y3: no other way to keep Y2 moves fewer blocks between groups. Y4: inside a
group, layers move as few as `sharding.spread` says.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Final

from kv_core import limits
from kv_core.ids import NodeId, RequestId
from kv_core.sharding import InvalidPlanError, Move, Nodes, Placement, runs, spread, weights_of

_EXACT_WORK_MAX: Final = 1 << 26
"""Requests times blocks for which the exact subset is searched: about half a second."""


@dataclass(frozen=True, slots=True)
class RequestMove:
    """One request's move of one range."""

    request_id: RequestId
    move: Move


@dataclass(frozen=True, slots=True)
class _Request:
    group: str
    num_tokens: int
    num_blocks: int


class HybridPlan:
    """Where requests live.

    Args:
        num_layers: layers of the model.
        block_size: tokens per block; load is counted in blocks.
        groups: for each group name its nodes, equal or weighted; a group's weight is the sum over its nodes.

    Raises:
        InvalidPlanError: no group, an empty group, or a node in two groups.
    """

    def __init__(self, num_layers: int, block_size: int, groups: Mapping[str, Nodes]) -> None:
        if not 1 <= num_layers <= limits.MAX_LAYERS or not 1 <= block_size <= limits.MAX_BLOCK_SIZE:
            raise InvalidPlanError(reason=f"{num_layers} layers in blocks of {block_size}")
        self._num_layers = num_layers
        self._block_size = block_size
        self._requests: dict[RequestId, _Request] = {}
        self._weights = _group_weights(groups)
        self._layers = {name: spread([None] * num_layers, nodes) for name, nodes in self._weights.items()}

    @property
    def groups(self) -> tuple[str, ...]:
        return tuple(self._weights)

    def group_of(self, request_id: RequestId) -> str:
        """The group of a request.

        Raises:
            InvalidPlanError: the request is not placed.
        """
        return self._request(request_id).group

    def place(self, request_id: RequestId, num_tokens: int) -> str:
        """Put a request of at most `num_tokens` tokens on the group with the least load; returns the group.

        Raises:
            InvalidPlanError: the request is placed already, or a length out of range.
        """
        if request_id in self._requests:
            raise InvalidPlanError(reason=f"request {request_id} is placed already")
        if not 1 <= num_tokens <= limits.MAX_TOKENS_PER_REQUEST:
            raise InvalidPlanError(reason=f"request {request_id} of {num_tokens} tokens")
        num_blocks = -(-num_tokens // self._block_size)
        group = self._least_loaded(self.load())
        self._requests[request_id] = _Request(group, num_tokens, num_blocks)
        return group

    def release(self, request_id: RequestId) -> None:
        """Forget a request.

        Raises:
            InvalidPlanError: it is not placed.
        """
        self._request(request_id)
        del self._requests[request_id]

    def load(self) -> dict[str, int]:
        """Blocks in each group."""
        load = dict.fromkeys(self._weights, 0)
        for request in self._requests.values():
            load[request.group] += request.num_blocks
        return load

    def bounds(self) -> dict[str, int]:
        """The most blocks that each group may hold now: less than its share plus the largest request."""
        total = sum(request.num_blocks for request in self._requests.values())
        largest = max((request.num_blocks for request in self._requests.values()), default=0)
        shares = {name: sum(nodes.values()) for name, nodes in self._weights.items()}
        whole = sum(shares.values())
        return {name: max(largest - (-total * share // whole) - 1, 0) for name, share in shares.items()}

    def locate(self, request_id: RequestId, layer: int) -> NodeId:
        """The node that holds this layer of a request.

        Raises:
            InvalidPlanError: the request is not placed, or no such layer.
        """
        if not 0 <= layer < self._num_layers:
            raise InvalidPlanError(reason=f"layer {layer} of {self._num_layers}")
        return self._layers[self._request(request_id).group][layer]

    def placements(self, request_id: RequestId) -> tuple[Placement, ...]:
        """Where a request's KV lives.

        Raises:
            InvalidPlanError: it is not placed.
        """
        request = self._request(request_id)
        return tuple(
            Placement(start, end, 0, request.num_tokens, node) for start, end, node in runs(self._layers[request.group])
        )

    def rebalance(self, groups: Mapping[str, Nodes], lost: Collection[NodeId] = ()) -> tuple[RequestMove, ...]:
        """Change to these groups (the same ones to balance again) with the least moved; returns the moves.

        Args:
            groups: all groups from now on, by name; a group keeps its requests as far as balance allows.
            lost: nodes whose bytes are gone.

        Raises:
            InvalidPlanError: as the constructor, or a lost node that is to stay; the plan is unchanged.
        """
        weights = _group_weights(groups)
        if any(node in nodes for node in lost for nodes in weights.values()):
            raise InvalidPlanError(reason="a lost node cannot hold anything")
        old_layers, old_requests = self._layers, dict(self._requests)
        unowned: list[NodeId | None] = [None] * self._num_layers
        self._weights = weights
        self._layers = {name: spread(old_layers.get(name, unowned), nodes) for name, nodes in weights.items()}
        self._regroup()
        return tuple(self._moves(old_requests, old_layers, lost))

    def _regroup(self) -> None:
        homeless = [name for name, request in self._requests.items() if request.group not in self._weights]
        load = dict.fromkeys(self._weights, 0)
        members: dict[str, list[RequestId]] = {name: [] for name in self._weights}
        for request_id, request in self._requests.items():
            if request.group in load:
                load[request.group] += request.num_blocks
                members[request.group].append(request_id)
        for group, bound in self.bounds().items():
            if load[group] > bound:
                sizes = [self._requests[request_id].num_blocks for request_id in members[group]]
                for i in smallest_subset(sizes, load[group] - bound):
                    homeless.append(members[group][i])
                    load[group] -= sizes[i]
        for request_id in homeless:
            request = self._requests[request_id]
            group = self._least_loaded(load)
            load[group] += request.num_blocks
            self._requests[request_id] = _Request(group, request.num_tokens, request.num_blocks)

    def _least_loaded(self, load: Mapping[str, int]) -> str:
        return min(load, key=lambda name: Fraction(load[name], sum(self._weights[name].values())))

    def _moves(
        self,
        old_requests: Mapping[RequestId, _Request],
        old_layers: Mapping[str, list[NodeId]],
        lost: Collection[NodeId],
    ) -> Iterator[RequestMove]:
        for request_id, old in old_requests.items():
            after = self._layers[self._requests[request_id].group]
            for start, end, (source, target) in runs(list(zip(old_layers[old.group], after, strict=True))):
                if source != target:
                    kept = None if source in lost else source
                    yield RequestMove(request_id, Move(start, end, 0, old.num_tokens, kept, target))

    def _request(self, request_id: RequestId) -> _Request:
        try:
            return self._requests[request_id]
        except KeyError:
            raise InvalidPlanError(reason=f"request {request_id} is not placed") from None


def smallest_subset(sizes: Sequence[int], least: int) -> list[int]:
    """Indices of a subset whose sum is at least `least` and as small as can be; `least` must not exceed the sum."""
    reach = least + max(sizes)
    if len(sizes) * reach > _EXACT_WORK_MAX:
        return _largest_first(sizes, least)
    # came_by[s] is the item by which the sum s was first reached; going back over it gives the subset, since an item
    # only extends sums that were reached without it.
    came_by = [-1] * reach
    reached = 1
    for i, size in enumerate(sizes):
        fresh = (reached << size) & ~reached & ((1 << reach) - 1)
        reached |= fresh
        for total in _bits(fresh):
            came_by[total] = i
    total = next(s for s in range(least, reach) if came_by[s] >= 0)
    chosen = []
    while total:
        chosen.append(came_by[total])
        total -= sizes[came_by[total]]
    return sorted(chosen)


def _largest_first(sizes: Sequence[int], least: int) -> list[int]:
    """A subset that is good, not best: the largest that do not overshoot, then the smallest that completes."""
    chosen = set()
    for i in sorted(range(len(sizes)), key=lambda i: -sizes[i]):
        if sizes[i] <= least:
            chosen.add(i)
            least -= sizes[i]
    if least > 0:
        chosen.add(min((i for i in range(len(sizes)) if i not in chosen), key=lambda i: sizes[i]))
    return sorted(chosen)


def _bits(mask: int) -> Iterator[int]:
    text = bin(mask)[:1:-1]
    at = text.find("1")
    while at >= 0:
        yield at
        at = text.find("1", at + 1)


def _group_weights(groups: Mapping[str, Nodes]) -> dict[str, dict[NodeId, int]]:
    if not groups:
        raise InvalidPlanError(reason="no group")
    weights = {name: weights_of(nodes) for name, nodes in groups.items()}
    everyone = [node for nodes in weights.values() for node in nodes]
    if len(everyone) != len(set(everyone)):
        raise InvalidPlanError(reason="a node is in two groups")
    return weights

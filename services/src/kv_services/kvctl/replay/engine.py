"""Replays a trace: which node each request goes to, what that node had of it, what went to make room.

Single-threaded and without time: requests come one after the other, and each is in the caches before the next. A node's
load is the blocks it had to compute so far, as the published routing figures count it.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, Literal

from kv_core.ids import Incarnation, NodeId
from kv_prefix.placement import Candidate, PlacementRequest, make_placement_policy
from kv_prefix.prefix_index import Holder, PrefixIndex
from kv_services.kvctl.replay.caches import Cache, FlatCache, NodeCache, Prompt
from kv_services.kvctl.replay.clairvoyant import CLAIRVOYANT, ClairvoyantCache
from kv_services.kvctl.replay.errors import ReplayRequestError
from kv_services.kvctl.replay.trace import TRACE_BLOCK_TOKENS, TraceRequest

Order = Literal["auto", "tail", "any"]

TEXTBOOK: Final = ("lru", "fifo")
"""Policies whose published figures are taken with a textbook cache; `auto` replays a single pool of them like that."""

NO_OVERLAP: Final = (0, 0, 0, 0)


@dataclass(frozen=True, slots=True)
class Setup:
    """What to replay a trace on.

    Attributes:
        capacity_blocks: of each node's memory.
        policy: an eviction policy, or `clairvoyant`, which knows the trace: one pool, in textbook order.
        order: `tail` evicts as a node does, never leaving a hole; `any` as a textbook cache does; `auto`: `any` for one
            pool of `lru` or `fifo`, else `tail`.
        disk_blocks, remote_blocks: of each node's lower tiers; 0 for none.
    """

    policy: str = "adaptive"
    capacity_blocks: int = 10_000
    nodes: int = 1
    router: str = "kv_aware"
    order: Order = "auto"
    disk_blocks: int = 0
    remote_blocks: int = 0

    def is_flat(self) -> bool:
        """Whether any block may go.

        Raises:
            ReplayRequestError: that was asked for together with tiers.
        """
        tiered = self.disk_blocks or self.remote_blocks
        if self.policy == CLAIRVOYANT:
            if tiered or self.nodes > 1 or self.order == "tail":
                raise ReplayRequestError(option="--policy", reason=f"{CLAIRVOYANT} is for one pool in textbook order")
            return True
        if self.order == "any" and tiered:
            raise ReplayRequestError(option="--order", reason="'any' knows no tiers below memory")
        return self.order == "any" or (
            self.order == "auto" and self.policy in TEXTBOOK and self.nodes == 1 and not tiered
        )


@dataclass(frozen=True, slots=True)
class Outcome:
    """What came of it.

    Attributes:
        order: how blocks were evicted, `tail` or `any`.
        references: blocks of all prompts.
        hits: those that were there, in whatever tier; `hits_disk` and `hits_remote` of them below memory.
        hit_rate: hits by reference; `hit_rate_tokens` weighs by tokens, `hit_rate_requests` is the mean over requests.
        load_max_over_mean: blocks to compute, of the busiest node against the mean.
    """

    policy: str
    order: str
    capacity_blocks: int
    nodes: int
    router: str
    disk_blocks: int
    remote_blocks: int
    requests: int
    references: int
    hits: int
    hits_disk: int
    hits_remote: int
    hit_rate: float
    hit_rate_tokens: float
    hit_rate_requests: float
    evicted: int
    load_max_over_mean: float


def replay(requests: Sequence[TraceRequest], setup: Setup, advance: Callable[[], None] = lambda: None) -> Outcome:
    """Replay a trace.

    Args:
        advance: called after each request.

    Raises:
        ReplayRequestError: options that do not go together, or a request larger than a node's memory.
        UnknownPolicyError: no such policy or router.
    """
    flat = setup.is_flat()
    index = PrefixIndex()
    holders = [Holder(NodeId(f"node-{i:03}"), Incarnation(1)) for i in range(setup.nodes)]
    caches: dict[NodeId, Cache] = {holder.node: _cache(index, holder, setup, flat, requests) for holder in holders}
    router = make_placement_policy(setup.router)
    loads = dict.fromkeys(caches, 0)
    totals = [0, 0, 0, 0]
    hit_tokens = num_tokens = 0
    rates = 0.0
    for number, request in enumerate(requests):
        prompt = Prompt.of(request.hash_ids)
        node = holders[0].node
        if len(holders) > 1:
            overlap = {match.holder.node: match.by_tier for match in index.lookup(prompt.names)}
            candidates = [Candidate(name, load, overlap.get(name, NO_OVERLAP)) for name, load in loads.items()]
            first = prompt.names[0].sequence if prompt.names else b""
            node = router.place(PlacementRequest(b"%d" % number, first, len(prompt.names)), candidates).node
        found = caches[node].serve(prompt)
        held = sum(found)
        loads[node] += len(prompt.names) - held
        totals = [total + one for total, one in zip(totals, found, strict=True)]
        hit_tokens += min(held * TRACE_BLOCK_TOKENS, request.input_length)
        num_tokens += request.input_length
        rates += held / len(prompt.names) if prompt.names else 0.0
        advance()
    references = sum(len(request.hash_ids) for request in requests)
    mean_load = sum(loads.values()) / len(loads)
    return Outcome(
        policy=setup.policy,
        order="any" if flat else "tail",
        capacity_blocks=setup.capacity_blocks,
        nodes=setup.nodes,
        router=setup.router,
        disk_blocks=setup.disk_blocks,
        remote_blocks=setup.remote_blocks,
        requests=len(requests),
        references=references,
        hits=sum(totals),
        hits_disk=totals[2],
        hits_remote=totals[3],
        hit_rate=sum(totals) / references if references else 0.0,
        hit_rate_tokens=hit_tokens / num_tokens if num_tokens else 0.0,
        hit_rate_requests=rates / len(requests) if requests else 0.0,
        evicted=sum(cache.evicted for cache in caches.values()),
        load_max_over_mean=max(loads.values()) / mean_load if mean_load else 1.0,
    )


def _cache(index: PrefixIndex, holder: Holder, setup: Setup, flat: bool, requests: Sequence[TraceRequest]) -> Cache:
    if setup.policy == CLAIRVOYANT:
        return ClairvoyantCache(requests, setup.capacity_blocks)
    longest = max((len(request.hash_ids) for request in requests), default=0)
    if flat:
        return FlatCache(index, holder, setup.policy, setup.capacity_blocks, longest)
    if longest > setup.capacity_blocks:
        reason = f"{setup.capacity_blocks} blocks cannot hold the longest request, which has {longest}"
        raise ReplayRequestError(option="--capacity-blocks", reason=reason)
    return NodeCache(index, holder, setup.policy, setup.capacity_blocks, setup.disk_blocks, setup.remote_blocks)

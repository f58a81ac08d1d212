"""Which node a request should run on: what it already holds of the prompt against how busy it is.

Pure scoring: the same inputs give the same node in every process, so several gateways agree without talking. Near ties
are broken by a hash of the request rather than by order, so gateways with the same stale view do not all pick the same
node. Loads are counted in blocks that still have to be computed.

L1: the order of the candidates changes nothing.
L2: a node's share of the load bounds what its cache can attract: however hot a prefix, it spreads.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, Protocol

from kv_core.checksum import xxh3_64
from kv_core.ids import NodeId
from kv_prefix.errors import NoCandidateError, UnknownPolicyError

TIER_WEIGHTS: Final = (1.0, 1.0, 0.6, 0.3)
"""What a held block is worth by tier, in blocks that need not be computed: reading disk or remote costs something."""

LOAD_WEIGHT: Final = 0.1
"""Held blocks that outweigh one block of load above the mean. At 0.25 affinity loses hits for balance that nobody
needs, at 0.02 load piles up; between 0.05 and 0.15 real traces hardly tell the difference."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """One node that could take the request.

    Attributes:
        node: its name.
        load: blocks assigned to it and not yet computed, own assignments since its last report included.
        by_tier: blocks of the request's prefix it holds, by fastest tier (`HolderMatch.by_tier`).
    """

    node: NodeId
    load: float
    by_tier: tuple[int, int, int, int] = (0, 0, 0, 0)

    @property
    def overlap_blocks(self) -> int:
        """Blocks of the request's prefix it holds, in whatever tier."""
        return sum(self.by_tier)


@dataclass(frozen=True, slots=True)
class PlacementRequest:
    """The request to place.

    Attributes:
        request_key: names the request; breaks ties and drives the hashed choices.
        prefix_key: names the prompt's beginning (its first block's hash); equal for requests that share it.
        num_blocks: full blocks of the prompt.
    """

    request_key: bytes
    prefix_key: bytes
    num_blocks: int


@dataclass(frozen=True, slots=True)
class Placement:
    """Where the request goes.

    Attributes:
        overlap_blocks: blocks of its prefix that the node holds.
        new_blocks: blocks the node has to compute; add it to the node's load.
        score: what the policy compared; higher was better.
        reason: one sentence, for the trace of the request.
    """

    node: NodeId
    overlap_blocks: int
    new_blocks: int
    score: float
    reason: str


class PlacementPolicy(Protocol):
    """A way to choose."""

    def place(self, request: PlacementRequest, candidates: Sequence[Candidate]) -> Placement:
        """Choose a node.

        Raises:
            NoCandidateError: `candidates` is empty.
        """
        ...


class KvAware:
    """Held blocks, weighed by tier, less the load above the mean. The default."""

    def place(self, request: PlacementRequest, candidates: Sequence[Candidate]) -> Placement:
        mean = _mean_load(candidates)

        def score(candidate: Candidate) -> float:
            held = sum(weight * blocks for weight, blocks in zip(TIER_WEIGHTS, candidate.by_tier, strict=True))
            return held - LOAD_WEIGHT * (candidate.load - mean)

        chosen = _best(request, candidates, score)
        return _placement(
            request,
            chosen,
            score(chosen),
            f"holds {chosen.overlap_blocks} of {request.num_blocks} blocks, load {chosen.load:.0f} (mean {mean:.0f})",
        )


class CacheAware:
    """The longest match while the load is even enough, else the least loaded node.

    Uneven means: the highest load is above the lowest by `IMBALANCE_BLOCKS` and by a factor of `IMBALANCE_RATIO`. A
    match of less than `MATCH_THRESHOLD` of the prompt counts as none.
    """

    IMBALANCE_BLOCKS: Final = 64
    IMBALANCE_RATIO: Final = 1.5
    MATCH_THRESHOLD: Final = 0.3

    def place(self, request: PlacementRequest, candidates: Sequence[Candidate]) -> Placement:
        if not candidates:
            raise NoCandidateError()
        loads = [candidate.load for candidate in candidates]
        uneven = max(loads) - min(loads) > self.IMBALANCE_BLOCKS and max(loads) > self.IMBALANCE_RATIO * min(loads)
        longest = max(candidate.overlap_blocks for candidate in candidates)
        if not uneven and longest and longest >= self.MATCH_THRESHOLD * request.num_blocks:
            chosen = _best(request, candidates, lambda c: (c.overlap_blocks, -c.load))
            return _placement(request, chosen, chosen.overlap_blocks, "longest match")
        chosen = _best(request, candidates, lambda c: (-c.load, c.overlap_blocks))
        reason = "least loaded: loads are uneven" if uneven else "least loaded: no match is long enough"
        return _placement(request, chosen, -chosen.load, reason)


class PowerOfTwo:
    """Of two nodes drawn by a hash of the request the less loaded; equal loads go by the longer match."""

    def place(self, request: PlacementRequest, candidates: Sequence[Candidate]) -> Placement:
        drawn = sorted(candidates, key=lambda c: (_draw(request.request_key, c.node), c.node))[:2]
        chosen = _best(request, drawn, lambda c: (-c.load, c.overlap_blocks))
        names = " and ".join(sorted(candidate.node for candidate in drawn))
        return _placement(request, chosen, -chosen.load, f"less loaded of {names}")


class RoundRobin:
    """Each node in turn, in order of name, whatever it holds."""

    def __init__(self) -> None:
        self._turn = 0

    def place(self, request: PlacementRequest, candidates: Sequence[Candidate]) -> Placement:
        if not candidates:
            raise NoCandidateError()
        chosen = sorted(candidates, key=lambda c: c.node)[self._turn % len(candidates)]
        self._turn += 1
        return _placement(request, chosen, 0.0, "its turn")


class ConsistentHash:
    """The node with the highest hash for the prompt's beginning (rendezvous hashing): a lost node moves only its own.

    Takes no notice of load: when all prompts begin alike they all go to one node.
    """

    def place(self, request: PlacementRequest, candidates: Sequence[Candidate]) -> Placement:
        chosen = _best(request, candidates, lambda c: _draw(request.prefix_key, c.node))
        return _placement(request, chosen, float(_draw(request.prefix_key, chosen.node)), "hash of the prompt's start")


_POLICIES: Final[dict[str, Callable[[], PlacementPolicy]]] = {
    "kv_aware": KvAware,
    "cache_aware": CacheAware,
    "power_of_two": PowerOfTwo,
    "round_robin": RoundRobin,
    "consistent_hash": ConsistentHash,
}
POLICIES: Final = tuple(_POLICIES)


def make_placement_policy(name: str) -> PlacementPolicy:
    """A policy by the name users write: `kv_aware` (the default), `cache_aware`, `power_of_two`, `round_robin` or
    `consistent_hash`.

    Raises:
        UnknownPolicyError: there is no policy of that name; the message lists them.
    """
    if name not in _POLICIES:
        raise UnknownPolicyError(kind="placement", name=name, known=", ".join(POLICIES))
    return _POLICIES[name]()


def _mean_load(candidates: Sequence[Candidate]) -> float:
    # Sorted: floats add up differently in another order, and gateways must agree to the last bit.
    return sum(sorted(candidate.load for candidate in candidates)) / len(candidates) if candidates else 0.0


def _best(
    request: PlacementRequest,
    candidates: Sequence[Candidate],
    score: Callable[[Candidate], float | tuple[float, float]],
) -> Candidate:
    """The highest score; among equals the highest hash of (request, node)."""
    if not candidates:
        raise NoCandidateError()
    return max(candidates, key=lambda c: (score(c), _draw(request.request_key, c.node), c.node))


def _draw(key: bytes, node: str) -> int:
    return xxh3_64(len(key).to_bytes(4, "little") + key + node.encode())


def _placement(request: PlacementRequest, chosen: Candidate, score: float, reason: str) -> Placement:
    overlap = chosen.overlap_blocks
    return Placement(chosen.node, overlap, max(request.num_blocks - overlap, 0), score, reason)

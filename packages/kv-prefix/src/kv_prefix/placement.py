"""Which node a request should run on: what it already holds of the prompt against how busy it is.

Pure scoring: the same inputs give the same node in every process, so several gateways agree without talking, and ties
are broken by a hash of the request rather than by order, so that they do not herd. Loads are counted in blocks that
still have to be computed.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from kv_core.ids import NodeId


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


POLICIES = ("kv_aware", "cache_aware", "power_of_two", "round_robin", "consistent_hash")


def make_placement_policy(name: str) -> PlacementPolicy:
    """A policy by the name users write: `kv_aware` (the default), `cache_aware`, `power_of_two`, `round_robin` or
    `consistent_hash`.

    Raises:
        UnknownPolicyError: there is no policy of that name; the message lists them.
    """
    raise NotImplementedError

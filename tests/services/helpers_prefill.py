"""What the tests of the prefill machine ask it, and how they read its answers."""

from collections.abc import Sequence
from typing import TypeVar

from kv_core.errors import KVError, RetryableError
from kv_core.hashing import BlockHash
from kv_core.ids import NodeId, RegionId, RequestId
from kv_core.namespace import Namespace
from kv_prefix.block_pool import BlockPool
from kv_services.node.prefill_events import (
    HandoverEnded,
    HandoverStats,
    PrefillAsked,
    PrefillComputed,
    PrefillEffect,
    PullPlan,
    StartPrefill,
)
from kv_services.node.prefill_state import PrefillMachine

BLOCK = 4
NS = Namespace("m", "w", block_size=BLOCK)
G, D, H = NodeId("g"), NodeId("d"), NodeId("h")
R = RequestId("r")
T = TypeVar("T")
OOPS = RetryableError(detail="oops")
STATS = HandoverStats(nbytes=640, units=5, retries=0, transport="shm", duration_ns=7)
Tokens = tuple[int, ...]


def never(hashes: Sequence[BlockHash], have: int) -> PullPlan | None:
    return None


def all_missing(hashes: Sequence[BlockHash], have: int) -> PullPlan | None:
    return PullPlan(H, have, len(hashes) - have) if have < len(hashes) else None


class Planner:
    """Fetches as many blocks as it is told to."""

    def __init__(self) -> None:
        self.num_blocks = 0

    def __call__(self, hashes: Sequence[BlockHash], have: int) -> PullPlan | None:
        num_blocks = min(self.num_blocks, len(hashes) - have)
        return PullPlan(H, have, num_blocks) if num_blocks > 0 else None


def machine(
    num_slots: int = 16, max_waiting: int = 3, plan_pull: Planner | None = None, *, pull_all: bool = False
) -> tuple[PrefillMachine, BlockPool]:
    pool = BlockPool(num_slots, BLOCK, region=RegionId(1))
    planner = plan_pull or (all_missing if pull_all else never)
    made = PrefillMachine(
        NodeId("p"), pool, block_size=BLOCK, num_slots=num_slots, max_waiting=max_waiting, plan_pull=planner
    )
    return made, pool


def ask(
    name: str = "r",
    epoch: int = 1,
    tokens: Tokens = tuple(range(9)),
    *,
    first_block: int = 0,
    deadline_ns: int = 1_000,
    now_ns: int = 0,
) -> PrefillAsked:
    return PrefillAsked(now_ns, RequestId(name), epoch, G, NS, tokens, D, first_block, deadline_ns)


def of(effects: list[PrefillEffect], kind: type[T]) -> list[T]:
    return [effect for effect in effects if isinstance(effect, kind)]


def computed(name: str = "r", epoch: int = 1, error: KVError | None = None, now_ns: int = 0) -> PrefillComputed:
    return PrefillComputed(now_ns, RequestId(name), epoch, error)


def sent(name: str = "r", epoch: int = 1) -> HandoverEnded:
    return HandoverEnded(RequestId(name), epoch, STATS)


def serve(m: PrefillMachine, name: str = "r", tokens: Tokens = tuple(range(9))) -> list[PrefillEffect]:
    """One request from its asking to its answer."""
    effects = m.step(ask(name, tokens=tokens))
    if of(effects, StartPrefill):
        m.step(computed(name))
    return [*effects, *m.step(sent(name))]

"""Why did it miss? Block by block, where a match ended and for which reason.

Pure questions over what the pool, the index and a bounded log of removals know; explaining changes nothing.
"""

from dataclasses import dataclass
from enum import Enum

from kv_core.hashing import BlockHash
from kv_core.ids import NodeId


class Verdict(Enum):
    """What became of one block of a prompt."""

    HIT = "hit"
    REMOTE = "held by another node"
    NEVER_SEEN = "never seen"
    EVICTED = "evicted"
    PURGED = "purged"
    CHECK_FAILED = "check failed"
    HOLDER_LOST = "holder lost"
    OTHER_NAMESPACE = "held in another namespace"
    AFTER_GAP = "held, but behind a gap"
    LAST_TOKEN = "left to compute"


@dataclass(frozen=True, slots=True)
class BlockExplanation:
    """One block of the prompt: its verdict, and a sentence with the particulars."""

    block_idx: int
    block_hash: BlockHash
    verdict: Verdict
    detail: str
    holders: tuple[NodeId, ...] = ()

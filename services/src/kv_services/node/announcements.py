"""What a node says of the blocks that it computes, while it computes them: effects of either role's machine. Pure."""

from dataclasses import dataclass

from kv_core.hashing import BlockHash
from kv_core.ids import RequestId


@dataclass(frozen=True, slots=True)
class AnnounceBlocks:
    """Tell the others that these blocks are being computed, `num_tokens` tokens in all."""

    request_id: RequestId
    epoch: int
    block_hashes: tuple[BlockHash, ...]
    num_tokens: int
    deadline_ns: int


@dataclass(frozen=True, slots=True)
class WithdrawBlocks:
    """Tell the others that this computation is over; what came of it is findable."""

    request_id: RequestId
    epoch: int

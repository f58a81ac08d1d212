"""One request on a decode node: its answer, its block table and what is busy with its memory."""

from dataclasses import dataclass, field
from enum import Enum

from kv_core.block import BlockRef
from kv_core.hashing import BlockHash, HashChain
from kv_core.namespace import Namespace
from kv_prefix.pins import Receipt
from kv_services.engine.interface import Parked
from kv_services.messages import OutputToken
from kv_services.node.answer import Answer


class SeqState(Enum):
    """Where a request stands on its decode node."""

    WAITING = "waiting for slots"
    ARRIVING = "receiving its KV"
    COMPUTING = "computing its KV"
    READY = "decoding"
    PREEMPTED = "preempted"
    CLOSING = "closing"


@dataclass(slots=True, kw_only=True)
class DecodeSequence(Answer):
    """One request on a decode node.

    Attributes:
        order: admission order; the youngest is preempted first.
        table: receipt of the block table; None while nothing is held.
        stored: KV of `tokens[:stored]` is in the blocks.
        committed: blocks of the table that are findable by others.
        layers_ready: layers of the hand-over that are verified.
        announced: others were told that its blocks are being computed.
        held: a token that was sampled before the hand-over's checksum was compared; shown only after it was.
    """

    namespace: Namespace
    order: int
    compute_locally: bool
    state: SeqState = SeqState.WAITING
    table: Receipt | None = None
    refs: list[BlockRef] = field(default_factory=list)
    hashes: list[BlockHash] = field(default_factory=list)
    stored: int = 0
    committed: int = 0
    cached_tokens: int = 0
    layers_ready: int = 0
    parked: Parked | None = None
    stepping: bool = False
    inbound_open: bool = False
    computing: bool = False
    announced: bool = False
    held: OutputToken | None = None
    ended: bool = False
    _chain: HashChain | None = None

    @property
    def busy(self) -> bool:
        """Whether somebody may still read or write the blocks: they must not be given back yet."""
        return self.stepping or self.computing or self.inbound_open

    def hash_blocks(self) -> list[BlockHash]:
        """Hashes of all full blocks of `tokens`, extended as the sequence grows."""
        if self._chain is None:
            self._chain = HashChain(self.namespace)
        self.hashes += self._chain.extend(self.tokens[self._chain.num_tokens :])
        return self.hashes

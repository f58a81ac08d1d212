"""What a node's roles know of an engine, production and stub alike.

An engine computes KV and logits; it knows no network, no pool and no request. All calls block and belong in the
node's single compute thread, never on its loop. A model keeps no state between calls: everything about a sequence is
its tokens, its block table and the bytes in the arena, so that a sequence may go on anywhere its KV is.

Invariants:
    I1  A call reads KV of a sequence only at tokens below the first one it computes, and of a layer only after
        `layer_needed(layer)` returned or `layer_ready(layer)` was true.
    I2  A call writes KV only at the tokens it computes: neither other tokens of the same block nor other slots.
    I3  `layer_written` names each block that the call writes exactly once per layer, when all its tokens of this
        call are in the arena, layers in ascending order.
    I4  In a decode step no sequence waits for another one's KV, and one that fails takes no other with it.
    I5  The KV of a token does not depend on how the tokens before it were cut into calls, beyond float rounding.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from kv_core.block import BlockGeometry, Layout
from kv_core.errors import KVError
from kv_core.geometry import ModelGeometry

FloatArray: TypeAlias = NDArray[np.float32]
StoredArray: TypeAlias = NDArray[np.float32] | NDArray[np.float16] | NDArray[np.uint16]
TokenArray: TypeAlias = NDArray[np.uint32] | Sequence[int]
BlockTable: TypeAlias = Sequence[int] | NDArray[np.intp]


class PagedKV(Protocol):
    """An arena of KV blocks as the engine sees it. `paged_kv.BufferPagedKV` makes one of any writable buffer."""

    @property
    def geometry(self) -> BlockGeometry:
        """Shape and element type of one block."""
        ...

    @property
    def layout(self) -> Layout:
        """Where layers lie; views hide it."""
        ...

    @property
    def num_slots(self) -> int:
        """Places for blocks."""
        ...

    def kv(self, layer: int) -> StoredArray:
        """That layer of every slot: a writable, possibly strided view of shape
        `(num_slots, 2 [K|V], num_kv_heads, block_size, head_dim)`; bf16 appears as uint16."""
        ...


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """What a gateway or node must know of a model.

    Attributes:
        geometry: layers, KV heads, head size and name.
        weights_revision: digest of the weights file, hexadecimal; part of the namespace.
        vocab_size: length of a logits row.
        max_context: positions the model can take.
        eos_ids: tokens that end a sequence.
    """

    geometry: ModelGeometry
    weights_revision: str
    vocab_size: int
    max_context: int
    eos_ids: tuple[int, ...]


class PrefillHooks(Protocol):
    """Calls out of a prefill, made in the compute thread; an exception of any of them ends the prefill and reaches
    its caller."""

    def layer_needed(self, layer: int) -> None:
        """KV of tokens `[0, start)` of this layer is read next; may block until it is verified to be there.
        Called once per layer, and not at all when `start` is 0."""
        ...

    def layer_written(self, layer: int, first_block: int, end_block: int) -> None:
        """Blocks `[first_block, end_block)` of the block table are complete, of this layer, as far as this call goes
        (the last one may be partly filled). Must be cheap: hand over and return."""
        ...

    def cancelled(self) -> bool:
        """Whether to stop; asked before each chunk of each layer."""
        ...


class NoHooks:
    """Everything is there, nobody listens, nobody cancels."""

    __slots__ = ()

    def layer_needed(self, layer: int) -> None:
        """Nothing to wait for."""

    def layer_written(self, layer: int, first_block: int, end_block: int) -> None:
        """Nobody to tell."""

    def cancelled(self) -> bool:
        return False


class LayerArrival(Protocol):
    """Which layers of a sequence's KV are verified to be in the arena, while it is still being transferred."""

    def layer_ready(self, layer: int) -> bool:
        """Whether KV of all tokens before the sequence's position is there, of this layer. Must be cheap and not
        block; once true it stays true. Raises `KVError` when the transfer failed: that sequence fails alone."""
        ...


@dataclass(frozen=True, slots=True)
class Parked:
    """A step that stopped before a layer whose KV was not there yet.

    Hand it back with the next step of the same sequence and position. Keeping or dropping it has no side effect.

    Attributes:
        layer: the first layer not computed.
        hidden: the engine's own intermediate state; opaque.
    """

    layer: int
    hidden: FloatArray


@dataclass(frozen=True, slots=True)
class DecodeInput:
    """One sequence of a decode step.

    Attributes:
        token: the newest token, whose KV this step computes and stores.
        position: its index in the sequence; KV of `[0, position)` is in the blocks or on its way.
        block_table: slots of the sequence, covering `position`.
        arrival: set while KV is still on its way.
        parked: what the last step gave for this sequence and position, if it parked.
    """

    token: int
    position: int
    block_table: BlockTable
    arrival: LayerArrival | None = None
    parked: Parked | None = None


@dataclass(frozen=True, slots=True)
class Stepped:
    """The step is done: KV of the token is stored in every layer, `logits` (vocab_size,) predict the next one."""

    logits: FloatArray


@dataclass(frozen=True, slots=True)
class StepFailed:
    """This sequence cannot go on (`arrival` raised, KV out of range); the others of the batch were not touched."""

    error: KVError


DecodeOutput: TypeAlias = Stepped | Parked | StepFailed


class Model(Protocol):
    """A decoder over paged KV."""

    @property
    def info(self) -> ModelInfo: ...

    def prefill(
        self, kv: PagedKV, tokens: TokenArray, start: int, block_table: BlockTable, hooks: PrefillHooks
    ) -> None:
        """Compute and store the KV of `tokens`, which stand at positions `[start, start + len(tokens))`.

        Layer by layer: one layer is finished for all tokens before the next begins, so that a hand-over can follow
        in the same order. Long prompts are cut into chunks inside a layer. Gives no logits: the last prompt token is
        always computed by `decode`.

        Args:
            kv: the arena; KV of `[0, start)` is in the sequence's blocks when `layer_needed` returns.
            tokens: at least one.
            start: any position, also in the middle of a block.
            block_table: slots of the sequence from block 0, covering the last token.
            hooks: see `PrefillHooks`; pass `NoHooks()` for none.

        Raises:
            EngineInputError: tokens, positions or block table out of range; nothing was written.
            ContextLengthError: beyond `info.max_context`; nothing was written.
            GeometryMismatchError: the arena has another shape than the model; nothing was written.
            KVRangeError: a value does not fit the arena's element type.
            ComputeCancelledError: `hooks.cancelled()` was true.
        """
        ...

    def decode(self, kv: PagedKV, batch: Sequence[DecodeInput]) -> list[DecodeOutput]:
        """One step of a batch: store the KV of each sequence's newest token and predict its next one.

        Never blocks on a transfer. The step sweeps the layers once; at each layer it computes the sequences that
        have come this far and whose KV is there. One whose KV is missing parks: it leaves the step with what it has,
        and joins again at that layer in the next step it is handed to, for no extra pass over the weights. So a
        first step overlaps its transfer, the others lose nothing, and a sequence is late by one sweep at most. When
        every sequence of a batch parked without moving, the caller should wait for an arrival before it calls again.

        Returns:
            One output per input, in order.

        Raises:
            EngineInputError, ContextLengthError, GeometryMismatchError: as for `prefill`, before anything is written.
        """
        ...


@dataclass(frozen=True, slots=True)
class ChatMessage:
    """One message of a chat: role as the model's template knows it ("system", "user", "assistant"), and text."""

    role: str
    content: str


class Detokenizer(Protocol):
    """Turns tokens of one sequence into text as they come. Never emits part of a UTF-8 character."""

    def push(self, token: int) -> str:
        """The text that this token completes; may be empty."""
        ...

    def finish(self) -> str:
        """What is left, an incomplete character as U+FFFD."""
        ...

    @property
    def state(self) -> bytes:
        """The bytes held back (at most 3); `Tokenizer.detokenizer(state)` goes on from there on another node."""
        ...


class Tokenizer(Protocol):
    """Text to tokens and back. Holds no weights: a gateway has one without loading the model."""

    @property
    def vocab_size(self) -> int: ...

    @property
    def eos_ids(self) -> tuple[int, ...]: ...

    def encode(self, text: str) -> list[int]:
        """Tokens of a raw prompt; the names of special tokens in it are read as such.

        Raises:
            TextTooLongError: over `limits.TEXT_BYTES_MAX`.
        """
        ...

    def encode_chat(self, messages: Sequence[ChatMessage]) -> list[int]:
        """Tokens of a chat, rendered by the model's template and ending where the answer begins. The names of special
        tokens inside a message are plain text: a user cannot forge a system message.

        Raises:
            ChatTemplateError: no template, or it refused the messages.
            TextTooLongError: over a limit of `limits`.
        """
        ...

    def decode(self, tokens: Sequence[int]) -> str:
        """Text of whole sequence; special tokens give nothing, broken UTF-8 gives U+FFFD."""
        ...

    def token_bytes(self, token: int) -> bytes:
        """The bytes of one token; empty for a special token.

        Raises:
            EngineInputError: no such token.
        """
        ...

    def detokenizer(self, state: bytes = b"") -> Detokenizer:
        """A detokeniser that starts with these bytes held back."""
        ...


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How a token is chosen from logits.

    Attributes:
        temperature: 0 is greedy.
        top_p: the smallest set of tokens with at least this probability is kept; in (0, 1].
        seed: with the position it keys the random draw, so that another node draws the same.
        top_logprobs: alternatives to report, 0 to `limits.TOP_LOGPROBS_MAX`; None reports no logprobs at all.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    seed: int = 0
    top_logprobs: int | None = None


@dataclass(frozen=True, slots=True)
class SampledToken:
    """A chosen token; log probabilities are those of the unscaled distribution, natural logarithm.

    Attributes:
        token: the choice.
        logprob: its log probability; None when none were asked for.
        top_logprobs: the most likely tokens with theirs, best first.
    """

    token: int
    logprob: float | None
    top_logprobs: Mapping[int, float]

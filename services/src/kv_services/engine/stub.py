"""A cheap engine whose KV bytes can be checked: for load tests and the simulator.

It computes no language, but it depends on KV as a model does: the KV of token i in a layer is a function of all
tokens up to i, made from what the KV of token i - 1 holds, and the next token is a function of every byte of KV that
it reads back, in every layer. So a byte that is wrong, missing, of another sequence or of another position gives
another token, and `expected_token` says which one was right. Control path, checks, hooks and parking are those of
the real engine.

State: `s(i) = A * s(i - 1) + B * (token(i) + 1)` modulo 2**64, A and B odd. A layer stores it as the token's first 8
bytes, masked; the other words are SplitMix64 (Steele et al. 2014) of it.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Final

import numpy as np
from numpy.typing import NDArray

from kv_core.block import BlockGeometry
from kv_core.geometry import ModelGeometry
from kv_services.engine.errors import ComputeCancelledError, KVContentError, UnsupportedStoreError
from kv_services.engine.interface import (
    BlockTable,
    DecodeInput,
    DecodeOutput,
    FloatArray,
    ModelInfo,
    PagedKV,
    PrefillHooks,
    StoredArray,
    TokenArray,
)
from kv_services.engine.paged_kv import check_geometry, slots_of, write_tokens
from kv_services.engine.stepping import Step, open_span, open_steps

Words = NDArray[np.uint64]

_A: Final = np.uint64(0xD1342543DE82EF95)
_B: Final = np.uint64(0x9E3779B97F4A7C15)
_ROOT: Final = np.uint64(0x243F6A8885A308D3)
_WORD: Final = (1 << 64) - 1
_A_INVERSE: Final = np.uint64(pow(int(_A), -1, 1 << 64))

_CERTAIN: Final = 100.0
"""Logit of the next token, all others 0: no temperature in use draws another one."""


@dataclass(frozen=True, slots=True)
class StubCost:
    """How long the stub pretends to compute, per layer, in nanoseconds; spent through the `delay` of `StubModel`."""

    prefill_token_ns: int = 0
    decode_step_ns: int = 0
    decode_sequence_ns: int = 0


class StubModel:
    """A `Model` that needs no weights.

    Args:
        geometry: any; its stored words must fill 8 bytes per head and token.
        vocab_size, max_context, eos_ids: as reported by `info`; chosen tokens are printable ASCII, so none of
            `eos_ids` below 32 or above 126 ever ends a sequence.
        cost: what to spend.
        delay: spends nanoseconds in the calling thread; the default spends none.
    """

    def __init__(
        self,
        geometry: ModelGeometry,
        vocab_size: int = 257,
        max_context: int = 1 << 17,
        eos_ids: tuple[int, ...] = (256,),
        cost: StubCost | None = None,
        delay: Callable[[int], None] | None = None,
    ) -> None:
        self._info = ModelInfo(geometry, "stub-1", vocab_size, max_context, eos_ids)
        self._cost, self._delay = cost or StubCost(), delay

    @property
    def info(self) -> ModelInfo:
        return self._info

    def prefill(
        self, kv: PagedKV, tokens: TokenArray, start: int, block_table: BlockTable, hooks: PrefillHooks
    ) -> None:
        """See `Model.prefill`."""
        span = open_span(self._info, kv, tokens, start, block_table)
        width = _words_per_token(kv.geometry)
        for layer in range(self._info.geometry.num_layers):
            view, state = kv.kv(layer), _ROOT
            if start:
                hooks.layer_needed(layer)
                state = _read_state(view, span.slots, start - 1, layer)
            for begin, end in span.chunks:
                if hooks.cancelled():
                    raise ComputeCancelledError(layer=layer, token=begin)
                self._spend(self._cost.prefill_token_ns * (end - begin))
                states = _advance(state, span.tokens[begin - start : end - start])
                state = states[-1]
                _write(view, span.slots, begin, _token_words(states, layer, width))
                hooks.layer_written(layer, begin // view.shape[3], -(-end // view.shape[3]))

    def decode(self, kv: PagedKV, batch: Sequence[DecodeInput]) -> list[DecodeOutput]:
        """See `Model.decode`."""
        steps = open_steps(self._info, kv, batch, _first_hidden)
        width = _words_per_token(kv.geometry)
        for layer in range(self._info.geometry.num_layers):
            moving = [step for step in steps if step.enters(layer)]
            if moving:
                self._spend(self._cost.decode_step_ns + self._cost.decode_sequence_ns * len(moving))
            for step in moving:
                self._decode_layer(kv.kv(layer), layer, step, width)
        for step in steps:
            if step.layer == self._info.geometry.num_layers:
                step.logits = np.zeros(self._info.vocab_size, dtype=np.float32)
                step.logits[_choice(int(_from_hidden(step.hidden)))] = _CERTAIN
        return [step.output() for step in steps]

    def _decode_layer(self, view: StoredArray, layer: int, step: Step, width: int) -> None:
        before = _read_state(view, step.reads.slots, step.position - 1, layer) if step.position else _ROOT
        state = _advance(before, np.array([step.token], dtype=np.intp))
        _write(view, step.reads.slots, step.position, _token_words(state, layer, width))
        read = _read_words(view, step.reads.slots, step.position + 1)
        step.hidden, step.layer = _to_hidden(_fold(_from_hidden(step.hidden), read, layer)), layer + 1

    def digest(self, kv: PagedKV, token: int, position: int, block_table: BlockTable) -> int:
        """64 bits of all KV that a decode step reads, own token included; the step's choice is made of them."""
        steps = open_steps(self._info, kv, [DecodeInput(token, position, block_table)], _first_hidden)
        for layer in range(self._info.geometry.num_layers):
            self._decode_layer(kv.kv(layer), layer, steps[0], _words_per_token(kv.geometry))
        return int(_from_hidden(steps[0].hidden))

    def expected_digest(self, tokens: Sequence[int], geometry: BlockGeometry) -> int:
        """What `digest` gives after `tokens` when no byte is wrong, from the definition and no arena."""
        states, width = _advance(_ROOT, np.asarray(tokens, dtype=np.intp)), _words_per_token(geometry)
        hidden = np.uint64(tokens[-1])
        for layer in range(self._info.geometry.num_layers):
            hidden = _fold(hidden, _token_words(states, layer, width), layer)
        return int(hidden)

    def expected_token(self, tokens: Sequence[int], geometry: BlockGeometry) -> int:
        """The token that follows `tokens` when no byte is wrong."""
        return _choice(self.expected_digest(tokens, geometry))

    def verify(self, kv: PagedKV, tokens: Sequence[int], block_table: BlockTable) -> None:
        """Compare a sequence's KV in the arena with what a prefill of these tokens writes.

        Raises:
            KVContentError: naming the first layer and token that differ.
        """
        check_geometry(self._info, kv)
        slots = slots_of(kv, block_table, len(tokens))
        states, width = _advance(_ROOT, np.asarray(tokens, dtype=np.intp)), _words_per_token(kv.geometry)
        for layer in range(self._info.geometry.num_layers):
            read = _read_words(kv.kv(layer), slots, len(tokens))
            wrong = (read != _token_words(states, layer, width)).any(axis=1)
            if wrong.any():
                raise KVContentError(layer=layer, token=int(wrong.argmax()))

    def _spend(self, nanoseconds: int) -> None:
        if self._delay is not None and nanoseconds:
            self._delay(nanoseconds)


def _words_per_token(geometry: BlockGeometry) -> int:
    row = geometry.head_dim * geometry.dtype.itemsize
    if row % 8 or geometry.num_planes != 2:
        raise UnsupportedStoreError(dtype=f"rows of {row} bytes", known="rows of a multiple of 8")
    return 2 * geometry.num_kv_heads * row // 8


def _advance(state: np.uint64, tokens: NDArray[np.intp]) -> Words:
    """`s` after each token. The recurrence is a geometric sum, so it needs no loop: dividing by the powers of A
    (odd, hence invertible modulo 2**64) makes it a running sum."""
    count = len(tokens)
    powers, inverses, _ = _tables(count.bit_length())
    steps = (tokens.astype(np.uint64) + np.uint64(1)) * _B
    return powers[:count] * (state + np.cumsum(steps * inverses[:count], dtype=np.uint64))


@cache
def _tables(num_bits: int) -> tuple[Words, Words, Words]:
    """Powers of A and of its inverse, from the first on, and the factors of `_fold`: fewer than `2**num_bits` of each
    are asked for, so one of these tables a power of two serves every length."""
    count = 1 << num_bits
    powers: Words = np.cumprod(np.full(count, _A, dtype=np.uint64), dtype=np.uint64)
    inverses: Words = np.cumprod(np.full(count, _A_INVERSE, dtype=np.uint64), dtype=np.uint64)
    factors: Words = _mix(np.arange(count, dtype=np.uint64)) | np.uint64(1)
    for table in (powers, inverses, factors):
        table.flags.writeable = False
    return powers, inverses, factors


def _mix(values: Words) -> Words:
    """SplitMix64's finaliser: one-to-one, and every input bit reaches every output bit."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


@cache
def _mask(layer: int) -> np.uint64:
    return np.uint64(_mix(np.array([layer + 1], dtype=np.uint64))[0])


@cache
def _offsets(layer: int, width: int) -> Words:
    """What sets a layer's words of one token apart."""
    offsets: Words = _mask(layer) + np.arange(width, dtype=np.uint64) * _B
    offsets.flags.writeable = False
    return offsets


def _token_words(states: Words, layer: int, width: int) -> Words:
    """What a layer stores for each token, `(tokens, width)`: the masked state, then words derived from it."""
    words = _mix(states[:, None] + _offsets(layer, width))
    words[:, 0] = states ^ _mask(layer)
    return words


def _fold(hidden: np.uint64, words: Words, layer: int) -> np.uint64:
    """Take every stored word of a layer into the hidden state; each one's factor is odd and its own, so that changing
    or exchanging words changes the sum."""
    factors = _tables(words.size.bit_length())[2][: words.size]
    total = int(hidden) * int(_A) + int(np.dot(words.reshape(-1), factors)) + int(_mask(layer))
    return np.uint64(_mix(np.array([total & _WORD], dtype=np.uint64))[0])


def _choice(digest: int) -> int:
    return 32 + digest % 95


def _first_hidden(token: int) -> FloatArray:
    return _to_hidden(np.uint64(token))


def _to_hidden(value: np.uint64) -> FloatArray:
    return np.array([value], dtype=np.uint64).view(np.float32)


def _from_hidden(hidden: FloatArray) -> np.uint64:
    return np.uint64(hidden.view(np.uint64)[0])


def _write(view: StoredArray, slots: NDArray[np.intp], start: int, words: Words) -> None:
    heads, dim = view.shape[2], view.shape[4]
    write_tokens(view, slots, start, words.view(view.dtype).reshape(len(words), 2, heads, dim))


def _read_words(view: StoredArray, slots: NDArray[np.intp], stop: int) -> Words:
    """The stored words of tokens `[0, stop)`, `(tokens, width)`."""
    blocks = np.ascontiguousarray(view[slots].transpose(0, 3, 1, 2, 4))
    tokens = blocks.reshape(len(slots) * view.shape[3], -1)[:stop]
    words: Words = tokens.view(np.uint64)
    return words


def _read_state(view: StoredArray, slots: NDArray[np.intp], position: int, layer: int) -> np.uint64:
    block, offset = divmod(position, view.shape[3])
    row = np.ascontiguousarray(view[slots[block], 0, 0, offset])
    return np.uint64(row.view(np.uint64)[0] ^ _mask(layer))

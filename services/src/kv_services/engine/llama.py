"""The exact reference engine: a Llama in NumPy on paged KV.

Decides in which order a call computes and when its hooks are called. Works layer-major: a layer is finished for all
tokens of a call before the next begins, so hand-over follows in layer order and weights are read once per chunk.
Attention reads the KV back from the arena after it was rounded to the stored type, so that a token computed here and
one computed where the KV was sent see the same numbers.

Keeps no state between calls and only reads its weights: one instance may serve several threads.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kv_core.errors import KVError
from kv_services.engine import limits
from kv_services.engine.elements import encode, rows_fit
from kv_services.engine.errors import ComputeCancelledError, EngineInputError, KVRangeError
from kv_services.engine.interface import (
    BlockTable,
    DecodeInput,
    DecodeOutput,
    FloatArray,
    ModelInfo,
    PagedKV,
    Parked,
    PrefillHooks,
    StepFailed,
    Stepped,
    TokenArray,
)
from kv_services.engine.llama_math import attention, linear, rms_norm, rope_tables, rotate, swiglu
from kv_services.engine.paged_kv import check_geometry, check_span, check_tokens, read_blocks, slots_of, write_tokens
from kv_services.engine.weights import LayerWeights, Weights


class LlamaModel:
    """A `Model` over opened weights."""

    def __init__(self, weights: Weights) -> None:
        shape = weights.shape
        self._weights, self._shape, self._info = weights, shape, weights.info
        self._cos, self._sin = rope_tables(shape.max_context, shape.head_dim, shape.rope_theta, weights.rope_divisors)

    @property
    def info(self) -> ModelInfo:
        return self._info

    def prefill(
        self, kv: PagedKV, tokens: TokenArray, start: int, block_table: BlockTable, hooks: PrefillHooks
    ) -> None:
        """See `Model.prefill`."""
        ids = np.asarray(tokens, dtype=np.intp)
        stop = start + len(ids)
        check_geometry(self._info, kv)
        check_span(self._info, start, stop)
        check_tokens(self._info, ids)
        slots = slots_of(kv, block_table, stop)
        context = self._context(kv, stop)
        chunks = list(_chunks(start, stop, kv.geometry.block_size))
        hidden: FloatArray = self._weights.embedding[ids]
        with np.errstate(over="ignore"):
            for layer, weights in enumerate(self._weights.layers):
                if start:
                    hooks.layer_needed(layer)
                    read_blocks(kv.kv(layer), slots, 0, -(-start // kv.geometry.block_size), context)
                for begin, end in chunks:
                    if hooks.cancelled():
                        raise ComputeCancelledError(layer=layer, token=begin)
                    rows = hidden[begin - start : end - start]
                    self._prefill_chunk(kv, layer, weights, rows, begin, slots, context, hooks)

    def _prefill_chunk(
        self,
        kv: PagedKV,
        layer: int,
        weights: LayerWeights,
        rows: FloatArray,
        begin: int,
        slots: NDArray[np.intp],
        context: FloatArray,
        hooks: PrefillHooks,
    ) -> None:
        """One layer of consecutive tokens; `rows` is their hidden state, updated in place."""
        geometry, end = kv.geometry, begin + len(rows)
        queries, keys_values = self._project(weights, rows, self._cos[begin:end], self._sin[begin:end])
        if not rows_fit(keys_values, geometry.dtype).all():
            raise KVRangeError(layer=layer, dtype=geometry.dtype.value)
        view = kv.kv(layer)
        write_tokens(view, slots, begin, encode(keys_values, geometry.dtype))
        first, last = begin // geometry.block_size, -(-end // geometry.block_size)
        hooks.layer_written(layer, first, last)
        if layer + 1 == self._shape.num_layers:
            return  # nothing reads the hidden state of the last layer: the first token comes from `decode`
        read_blocks(view, slots, first, last, context)
        mixed = np.empty((len(rows), self._shape.num_heads * self._shape.head_dim), dtype=np.float32)
        attention(queries, context, end, mixed)
        self._finish_layer(weights, rows, mixed)

    def decode(self, kv: PagedKV, batch: Sequence[DecodeInput]) -> list[DecodeOutput]:
        """See `Model.decode`."""
        check_geometry(self._info, kv)
        steps = self._steps(kv, batch)
        if not steps:
            return []
        context = self._context(kv, max(step.input.position for step in steps) + 1)
        with np.errstate(over="ignore"):
            for layer, weights in enumerate(self._weights.layers):
                moving = [step for step in steps if step.layer == layer and step.may_enter(layer)]
                if moving:
                    self._decode_layer(kv, layer, weights, moving, context)
            self._read_out([step for step in steps if step.layer == self._shape.num_layers])
        return [step.output() for step in steps]

    def _steps(self, kv: PagedKV, batch: Sequence[DecodeInput]) -> list["_Step"]:
        """The batch, checked; refused as a whole before anything is written."""
        if len(batch) > limits.BATCH_SEQUENCES_MAX:
            raise EngineInputError(field="batch", value=len(batch), expected=f"{limits.BATCH_SEQUENCES_MAX} at most")
        check_tokens(self._info, np.array([item.token for item in batch], dtype=np.intp))
        steps, targets = list[_Step](), set[int]()
        for item in batch:
            check_span(self._info, item.position, item.position + 1)
            slots = slots_of(kv, item.block_table, item.position + 1)
            targets.add(int(slots[-1]))
            if item.parked is None:
                steps.append(_Step(item, slots, 0, self._weights.embedding[item.token]))
            elif 0 <= item.parked.layer < self._shape.num_layers and item.parked.hidden.shape == (self._shape.width,):
                steps.append(_Step(item, slots, item.parked.layer, item.parked.hidden))
            else:
                raise EngineInputError(field="parked", value=item.parked.layer, expected="what this model returned")
        if len(targets) < len(batch):
            raise EngineInputError(field="batch", value="two sequences", expected="each to write a block of its own")
        return steps

    def _decode_layer(
        self, kv: PagedKV, layer: int, weights: LayerWeights, moving: list["_Step"], context: FloatArray
    ) -> None:
        geometry, view = kv.geometry, kv.kv(layer)
        rows = np.stack([step.hidden for step in moving])
        positions = [step.input.position for step in moving]
        queries, keys_values = self._project(weights, rows, self._cos[positions], self._sin[positions])
        fit = rows_fit(keys_values, geometry.dtype)
        mixed = np.zeros((len(rows), self._shape.num_heads * self._shape.head_dim), dtype=np.float32)
        for row, step in enumerate(moving):
            if not fit[row]:
                step.failure = KVRangeError(layer=layer, dtype=geometry.dtype.value)
                continue
            position = positions[row]
            write_tokens(view, step.slots, position, encode(keys_values[row : row + 1], geometry.dtype))
            read_blocks(view, step.slots, 0, len(step.slots), context)
            attention(queries[row : row + 1], context, position + 1, mixed[row : row + 1])
        self._finish_layer(weights, rows, mixed)
        for row, step in enumerate(moving):
            step.hidden, step.layer = rows[row], layer + 1

    def _read_out(self, steps: list["_Step"]) -> None:
        if steps:
            rows = np.stack([step.hidden for step in steps])
            normed = rms_norm(rows, self._weights.output_norm, self._shape.rms_eps)
            for step, logits in zip(steps, linear(normed, self._weights.output), strict=True):
                step.logits = logits

    def _project(
        self, weights: LayerWeights, rows: FloatArray, cos: FloatArray, sin: FloatArray
    ) -> tuple[FloatArray, FloatArray]:
        """Rotated queries `(rows, num_heads, head_dim)` and KV `(rows, 2, num_kv_heads, head_dim)` of a layer."""
        shape, count = self._shape, len(rows)
        projected = linear(rms_norm(rows, weights.attention_norm, shape.rms_eps), weights.qkv)
        projected = projected.reshape(count, shape.num_heads + 2 * shape.num_kv_heads, shape.head_dim)
        rotate(projected[:, : shape.num_heads + shape.num_kv_heads], cos, sin)
        keys_values = projected[:, shape.num_heads :].reshape(count, 2, shape.num_kv_heads, shape.head_dim)
        return projected[:, : shape.num_heads], keys_values

    def _finish_layer(self, weights: LayerWeights, rows: FloatArray, mixed: FloatArray) -> None:
        """Add the layer's attention and feed-forward to the hidden state, in place."""
        rows += linear(mixed, weights.attention_out)
        normed = rms_norm(rows, weights.ffn_norm, self._shape.rms_eps)
        rows += linear(swiglu(linear(normed, weights.gate_up)), weights.down)

    def _context(self, kv: PagedKV, tokens: int) -> FloatArray:
        """Room for one layer of a sequence's KV, whole blocks. Made once per call: allocating it for each layer would
        cost more than filling it."""
        geometry = kv.geometry
        whole = -(-tokens // geometry.block_size) * geometry.block_size
        return np.empty((2, geometry.num_kv_heads, whole, geometry.head_dim), dtype=np.float32)


@dataclass(slots=True)
class _Step:
    """One sequence's way through a decode step; `layer` is the first one not computed."""

    input: DecodeInput
    slots: NDArray[np.intp]
    layer: int
    hidden: FloatArray
    failure: KVError | None = None
    logits: FloatArray | None = None

    def may_enter(self, layer: int) -> bool:
        if self.failure is not None:
            return False
        if self.input.arrival is None or self.input.position == 0:
            return True
        try:
            return self.input.arrival.layer_ready(layer)
        except KVError as error:  # its transfer failed: the others of the batch go on
            self.failure = error
            return False

    def output(self) -> DecodeOutput:
        if self.failure is not None:
            return StepFailed(self.failure)
        if self.logits is not None:
            return Stepped(self.logits)
        return Parked(self.layer, self.hidden)


def _chunks(start: int, stop: int, block_size: int) -> list[tuple[int, int]]:
    """Cut positions `[start, stop)` at block borders, so that a call completes each block once (I3)."""
    size = max(limits.PREFILL_CHUNK_TOKENS // block_size, 1) * block_size
    borders = [start, *range((start // size + 1) * size, stop, size), stop]
    return list(itertools.pairwise(borders))

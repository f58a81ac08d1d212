"""The exact reference engine: a Llama in NumPy on paged KV.

Decides in which order a call computes and when its hooks are called. Works layer-major: a layer is finished for all
tokens of a call before the next begins, so hand-over follows in layer order and weights are read once per chunk.
Attention reads the KV back from the arena after it was rounded to the stored type, so that a token computed here and
one computed where the KV was sent see the same numbers.

Keeps no state between calls and only reads its weights: one instance may serve several threads.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from kv_services.engine import limits
from kv_services.engine.elements import encode, rows_fit
from kv_services.engine.errors import ComputeCancelledError, KVRangeError
from kv_services.engine.interface import (
    BlockTable,
    DecodeInput,
    DecodeOutput,
    FloatArray,
    ModelInfo,
    PagedKV,
    PrefillHooks,
    TokenArray,
)
from kv_services.engine.llama_layers import LlamaLayers
from kv_services.engine.llama_math import attend_one, attend_span, product, row_products, tile_end
from kv_services.engine.paged_kv import ReadPlan, plan_reads, read_blocks, write_tokens
from kv_services.engine.stepping import Span, Step, open_span, open_steps
from kv_services.engine.weights import LayerWeights, Weights


class LlamaModel:
    """A `Model` over opened weights.

    Args:
        weights: of `open_weights`.
        max_context: serve fewer positions than the model can take; 0 for all of them.
    """

    def __init__(self, weights: Weights, max_context: int = 0) -> None:
        self.layers = LlamaLayers(weights, max_context)
        self._shape, self._info = weights.shape, self.layers.info

    @property
    def info(self) -> ModelInfo:
        return self._info

    def prefill(
        self, kv: PagedKV, tokens: TokenArray, start: int, block_table: BlockTable, hooks: PrefillHooks
    ) -> None:
        """See `Model.prefill`."""
        span = open_span(self._info, kv, tokens, start, block_table)
        context, reads = self._context(kv, tile_end(span.stop)), plan_reads(span.slots)
        chunks = [self._chunk(span, begin, end) for begin, end in span.chunks]
        with np.errstate(over="ignore"):
            for layer, weights in enumerate(self.layers.weights):
                if start:
                    hooks.layer_needed(layer)
                    read_blocks(kv.kv(layer), reads, 0, -(-start // kv.geometry.block_size), context)
                for chunk in chunks:
                    if hooks.cancelled():
                        raise ComputeCancelledError(layer=layer, token=chunk.begin)
                    self._prefill_chunk(kv, layer, weights, chunk, reads, context, hooks)

    def _chunk(self, span: Span, begin: int, end: int) -> "_Chunk":
        first = begin // limits.PRODUCT_ROWS * limits.PRODUCT_ROWS
        rows = -(-(end - first) // limits.PRODUCT_ROWS) * limits.PRODUCT_ROWS
        hidden = np.zeros((rows, self._shape.width), dtype=np.float32)
        own = slice(begin - first, end - first)
        hidden[own] = self.layers.embed(span.tokens[begin - span.start : end - span.start])
        cos, sin = self.layers.cos, self.layers.sin
        return _Chunk(begin, end, own, hidden, cos[first : first + rows], sin[first : first + rows])

    def _prefill_chunk(
        self,
        kv: PagedKV,
        layer: int,
        weights: LayerWeights,
        chunk: "_Chunk",
        reads: ReadPlan,
        context: FloatArray,
        hooks: PrefillHooks,
    ) -> None:
        """One layer of consecutive tokens, their hidden state updated in place."""
        geometry, own = kv.geometry, chunk.own
        queries, keys_values = self.layers.project(weights, chunk.hidden, chunk.cos, chunk.sin, product)
        if not rows_fit(keys_values[own], geometry.dtype).all():
            raise KVRangeError(layer=layer, dtype=geometry.dtype.value)
        view = kv.kv(layer)
        write_tokens(view, reads.slots, chunk.begin, encode(keys_values[own], geometry.dtype))
        first, last = chunk.begin // geometry.block_size, -(-chunk.end // geometry.block_size)
        hooks.layer_written(layer, first, last)
        if layer + 1 == self._shape.num_layers:
            return  # nothing reads the hidden state of the last layer: the first token comes from `decode`
        read_blocks(view, reads, first, last, context)
        context[:, :, chunk.end : tile_end(chunk.end)] = 0
        mixed = np.zeros((len(chunk.hidden), self._shape.num_heads * self._shape.head_dim), dtype=np.float32)
        attend_span(queries[own], context, chunk.end, mixed[own])
        self.layers.finish(weights, chunk.hidden, mixed, product)

    def decode(self, kv: PagedKV, batch: Sequence[DecodeInput]) -> list[DecodeOutput]:
        """See `Model.decode`."""
        steps = open_steps(self._info, kv, batch, self.layers.embed)
        if not steps:
            return []
        context = self._context(kv, max(step.position for step in steps) + 1)
        with np.errstate(over="ignore"):
            for layer, weights in enumerate(self.layers.weights):
                if moving := [step for step in steps if step.enters(layer)]:
                    self._decode_layer(kv, layer, weights, moving, context)
            self._read_out([step for step in steps if step.layer == self._shape.num_layers and step.failure is None])
        return [step.output() for step in steps]

    def _decode_layer(
        self, kv: PagedKV, layer: int, weights: LayerWeights, moving: list[Step], context: FloatArray
    ) -> None:
        geometry, view = kv.geometry, kv.kv(layer)
        rows = np.stack([step.hidden for step in moving])
        positions = [step.position for step in moving]
        cos, sin = self.layers.cos[positions], self.layers.sin[positions]
        queries, keys_values = self.layers.project(weights, rows, cos, sin, row_products)
        fit = rows_fit(keys_values, geometry.dtype)
        mixed = np.zeros((len(rows), self._shape.num_heads * self._shape.head_dim), dtype=np.float32)
        for row, step in enumerate(moving):
            if not fit[row]:
                step.failure = KVRangeError(layer=layer, dtype=geometry.dtype.value)
                continue
            position = positions[row]
            write_tokens(view, step.reads.slots, position, encode(keys_values[row : row + 1], geometry.dtype))
            read_blocks(view, step.reads, 0, len(step.reads.slots), context)
            attend_one(queries[row], context, position + 1, mixed[row])
        self.layers.finish(weights, rows, mixed, row_products)
        for row, step in enumerate(moving):
            step.layer = layer + 1
            # A copy: what may be parked must not keep the whole batch's state alive.
            step.hidden = rows[row].copy()

    def _read_out(self, steps: list[Step]) -> None:
        if steps:
            for step, logits in zip(steps, self.layers.read_out([step.hidden for step in steps]), strict=True):
                step.logits = logits

    def _context(self, kv: PagedKV, tokens: int) -> FloatArray:
        """Room for one layer of a sequence's KV, whole blocks. Made once per call: allocating it for each layer would
        cost more than filling it."""
        geometry = kv.geometry
        whole = -(-tokens // geometry.block_size) * geometry.block_size
        return np.empty((2, geometry.num_kv_heads, whole, geometry.head_dim), dtype=np.float32)


@dataclass(frozen=True, slots=True)
class _Chunk:
    """Tokens at positions `[begin, end)` on their way through the layers; `own` are their rows in `hidden`, the others
    are padding (R2 of `llama_math`)."""

    begin: int
    end: int
    own: slice
    hidden: FloatArray
    cos: FloatArray
    sin: FloatArray

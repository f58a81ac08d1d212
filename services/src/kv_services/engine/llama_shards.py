"""The reference engine on sequences that several nodes hold: what a holder computes and what the coordinator does.

A holder of whole layers runs them (`run_layers`) on the same products, tiles and rows as `llama` does on one node, so
a sequence cut by layer has the same bits. A holder of some tokens attends over its own (`attend`); the coordinator
projects, joins the parts and finishes the layer. That changes the order of fp32 sums: where KV is stored in bf16 or
fp16, a rounding may then fall the other way.

I1 to I5 of `interface` hold; nothing of a sequence is kept between calls.
"""

from dataclasses import dataclass

import numpy as np

from kv_services.engine import limits
from kv_services.engine.elements import encode, rows_fit
from kv_services.engine.errors import EngineInputError, KVRangeError
from kv_services.engine.interface import FloatArray, ModelInfo, TokenArray
from kv_services.engine.llama_layers import Linear, LlamaLayers
from kv_services.engine.llama_math import attend_one, attend_span, product, row_products, tile_end
from kv_services.engine.paged_kv import check_geometry, check_span, check_tokens
from kv_services.engine.shard_kv import ShardKV
from kv_services.engine.shard_math import Partials, attend_part, merge_parts, mixed
from kv_services.engine.sharding import RowShapes


@dataclass(frozen=True, slots=True)
class _Rows:
    """Tokens at `[start, start + count)`; `own` are their rows among those that are multiplied (R2 of `llama_math`)."""

    hidden: FloatArray
    own: slice
    cos: FloatArray
    sin: FloatArray
    linear: Linear


class LlamaShards:
    """A `ShardEngine` over the layers of a `LlamaModel`."""

    def __init__(self, layers: LlamaLayers) -> None:
        self._layers, self._shape = layers, layers.shape

    @property
    def info(self) -> ModelInfo:
        return self._layers.info

    @property
    def shapes(self) -> RowShapes:
        """See `ShardEngine.shapes`."""
        shape = self._shape
        return RowShapes(shape.width, shape.num_heads, shape.num_kv_heads, shape.head_dim)

    def embed(self, tokens: TokenArray) -> FloatArray:
        """See `ShardEngine.embed`."""
        ids = np.asarray(tokens, dtype=np.intp)
        check_tokens(self.info, ids)
        return self._layers.embed(ids)

    def run_layers(self, kv: ShardKV, hidden: FloatArray, start: int, *, decoding: bool) -> FloatArray:
        """See `ShardEngine.run_layers`."""
        self._check(kv, hidden, start)
        if kv.tokens.start:
            raise EngineInputError(field="piece", value=str(kv.tokens), expected="one from the first token on")
        stop = start + len(hidden)
        rows = self._open(hidden, start, decoding)
        context = self._context(kv, stop if decoding else tile_end(stop))
        with np.errstate(over="ignore"):
            for layer in kv.layers:
                weights = self._layers.weights[layer]
                queries, keys_values = self._layers.project(weights, rows.hidden, rows.cos, rows.sin, rows.linear)
                self._write(kv, layer, start, keys_values[rows.own])
                kv.read(layer, stop, context)
                attended = np.zeros((len(rows.hidden), self._shape.num_heads * self._shape.head_dim), dtype=np.float32)
                if decoding:
                    attend_one(queries[0], context, stop, attended[0])
                else:
                    context[:, :, stop : tile_end(stop)] = 0
                    attend_span(queries[rows.own], context, stop, attended[rows.own])
                self._layers.finish(weights, rows.hidden, attended, rows.linear)
        return rows.hidden[rows.own]

    def project(self, layer: int, hidden: FloatArray, start: int, *, decoding: bool) -> tuple[FloatArray, FloatArray]:
        """See `ShardEngine.project`."""
        rows = self._open(hidden, start, decoding)
        with np.errstate(over="ignore"):
            queries, keys_values = self._layers.project(
                self._layers.weights[layer], rows.hidden, rows.cos, rows.sin, rows.linear
            )
        return queries[rows.own], keys_values[rows.own]

    def attend(
        self, kv: ShardKV, layer: int, queries: FloatArray, start: int, keys_values: FloatArray | None
    ) -> Partials:
        """See `ShardEngine.attend`."""
        self._check(kv, queries, start)
        if keys_values is not None:
            self._write(kv, layer, start, keys_values)
        stop = min(start + len(queries), kv.tokens.stop)
        context = self._context(kv, stop)
        kv.read(layer, stop, context)
        return attend_part(queries, start, context[:, :, : stop - kv.tokens.start], kv.tokens.start)

    def finish(
        self, layer: int, hidden: FloatArray, parts: list[Partials], start: int, *, decoding: bool
    ) -> FloatArray:
        """See `ShardEngine.finish`."""
        rows = self._open(hidden, start, decoding)
        attended = np.zeros((len(rows.hidden), self._shape.num_heads * self._shape.head_dim), dtype=np.float32)
        attended[rows.own] = mixed(merge_parts(parts))
        with np.errstate(over="ignore"):
            self._layers.finish(self._layers.weights[layer], rows.hidden, attended, rows.linear)
        return rows.hidden[rows.own]

    def read_out(self, hidden: FloatArray) -> FloatArray:
        """See `ShardEngine.read_out`."""
        logits: FloatArray = self._layers.read_out([hidden[-1]])[0]
        return logits

    def _open(self, hidden: FloatArray, start: int, decoding: bool) -> _Rows:
        """A copy of the rows, in their place among those of a product; a row that decodes is multiplied alone."""
        count = len(hidden)
        if decoding:
            if count != 1:
                raise EngineInputError(field="rows", value=count, expected="one token to decode")
            at = slice(start, start + 1)
            return _Rows(hidden.copy(), slice(0, 1), self._layers.cos[at], self._layers.sin[at], row_products)
        first = start // limits.PRODUCT_ROWS * limits.PRODUCT_ROWS
        padded = -(-(start + count - first) // limits.PRODUCT_ROWS) * limits.PRODUCT_ROWS
        own = slice(start - first, start - first + count)
        rows = np.zeros((padded, hidden.shape[1]), dtype=np.float32)
        rows[own] = hidden
        at = slice(first, first + padded)
        return _Rows(rows, own, self._layers.cos[at], self._layers.sin[at], product)

    def _check(self, kv: ShardKV, rows: FloatArray, start: int) -> None:
        check_geometry(self.info, kv.kv)
        check_span(self.info, start, start + len(rows))

    def _write(self, kv: ShardKV, layer: int, start: int, keys_values: FloatArray) -> None:
        dtype = kv.kv.geometry.dtype
        if not rows_fit(keys_values, dtype).all():
            raise KVRangeError(layer=layer, dtype=dtype.value)
        kv.write(layer, start, encode(keys_values, dtype))

    def _context(self, kv: ShardKV, stop: int) -> FloatArray:
        """Room for one layer of the piece's KV up to `stop`, whole blocks."""
        geometry = kv.kv.geometry
        whole = -(-(stop - kv.tokens.start) // geometry.block_size) * geometry.block_size
        return np.empty((2, geometry.num_kv_heads, whole, geometry.head_dim), dtype=np.float32)

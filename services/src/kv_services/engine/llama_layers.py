"""One layer of a Llama as the steps between which its KV is stored and read, and what comes before and after.

Holds the weights and the rotations and nothing of any sequence, so that whoever has the KV decides where the steps
run: `llama` on one node's blocks, `llama_shards` on pieces that several nodes hold. `rows` are tokens throughout.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from kv_services.engine import limits
from kv_services.engine.interface import FloatArray, ModelInfo
from kv_services.engine.llama_math import rms_norm, rope_tables, rotate, row_products, swiglu
from kv_services.engine.weights import LayerWeights, Weights

Linear: TypeAlias = Callable[[FloatArray, FloatArray], FloatArray]


class LlamaLayers:
    """The arithmetic of one model's layers.

    Args:
        weights: of `open_weights`.
        max_context: serve fewer positions than the model can take; 0 for all of them.
    """

    def __init__(self, weights: Weights, max_context: int = 0) -> None:
        shape, info = weights.shape, weights.info
        self._weights, self.shape = weights, shape
        self.info: ModelInfo = replace(info, max_context=min(max_context or info.max_context, info.max_context))
        # A last product's padding reaches beyond the last position.
        positions = self.info.max_context + limits.PRODUCT_ROWS
        self.cos, self.sin = rope_tables(positions, shape.head_dim, shape.rope_theta, weights.rope_divisors)

    @property
    def weights(self) -> tuple[LayerWeights, ...]:
        """Of each layer, in order."""
        return self._weights.layers

    def embed(self, tokens: int | NDArray[np.intp]) -> FloatArray:
        """The state in which tokens enter layer 0: `(width,)` of one, `(rows, width)` of several."""
        embedded: FloatArray = self._weights.embedding[tokens]
        return embedded

    def project(
        self, weights: LayerWeights, rows: FloatArray, cos: FloatArray, sin: FloatArray, linear: Linear
    ) -> tuple[FloatArray, FloatArray]:
        """Rotated queries `(rows, num_heads, head_dim)` and KV `(rows, 2, num_kv_heads, head_dim)` of a layer."""
        shape, count = self.shape, len(rows)
        projected = linear(rms_norm(rows, weights.attention_norm, shape.rms_eps), weights.qkv)
        projected = projected.reshape(count, shape.num_heads + 2 * shape.num_kv_heads, shape.head_dim)
        rotate(projected[:, : shape.num_heads + shape.num_kv_heads], cos, sin)
        keys_values = projected[:, shape.num_heads :].reshape(count, 2, shape.num_kv_heads, shape.head_dim)
        return projected[:, : shape.num_heads], keys_values

    def finish(self, weights: LayerWeights, rows: FloatArray, mixed: FloatArray, linear: Linear) -> None:
        """Add the layer's attention `(rows, num_heads * head_dim)` and its feed-forward to the hidden state, in
        place."""
        rows += linear(mixed, weights.attention_out)
        normed = rms_norm(rows, weights.ffn_norm, self.shape.rms_eps)
        rows += linear(swiglu(linear(normed, weights.gate_up)), weights.down)

    def read_out(self, rows: Sequence[FloatArray]) -> FloatArray:
        """Logits `(rows, vocab_size)` of states that left the last layer, each row alone."""
        normed = rms_norm(np.stack(rows), self._weights.output_norm, self.shape.rms_eps)
        return row_products(normed, self._weights.output)

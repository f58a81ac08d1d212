"""The arithmetic of a Llama on plain arrays: norm, rotation, attention, gated feed-forward. Pure; fp32.

Sources: RMSNorm (Zhang and Sennrich 2019), rotary embedding in the half-split form (Su et al. 2021, as in Hugging
Face's Llama), grouped-query attention (Ainslie et al. 2023), SwiGLU (Shazeer 2020).
"""

import numpy as np

from kv_services.engine import limits
from kv_services.engine.interface import FloatArray


def linear(x: FloatArray, weight: FloatArray) -> FloatArray:
    """`x @ weight.T` for `x` of `(rows, in)` and `weight` of `(out, in)`.

    A few rows go one by one: with weights far larger than the caches the time is that of reading them, a matrix
    product would first copy them into its own order, and a row's bits then do not depend on the others beside it.
    """
    rows = len(x)
    if rows > limits.SINGLE_ROWS_MAX:
        product: FloatArray = x @ weight.T
        return product
    out = np.empty((rows, len(weight)), dtype=np.float32)
    for row in range(rows):
        np.dot(weight, x[row], out=out[row])
    return out


def rms_norm(x: FloatArray, gain: FloatArray, eps: float) -> FloatArray:
    """Each row of `x` divided by its root mean square, times `gain`."""
    mean_square = np.einsum("ij,ij->i", x, x) / np.float32(x.shape[1])
    scale = 1.0 / np.sqrt(mean_square + np.float32(eps))
    normed: FloatArray = x * scale[:, None]
    normed *= gain
    return normed


def rope_tables(
    positions: int, head_dim: int, theta: float, divisors: FloatArray | None = None
) -> tuple[FloatArray, FloatArray]:
    """Cosine and sine of every position and frequency, `(positions, head_dim / 2)` each.

    Angles are multiplied in fp32, as the models were trained: at position 8,000 that differs from exact arithmetic
    by more than the tolerance of a logit.
    """
    exponents = np.arange(0, head_dim, 2, dtype=np.float32) / np.float32(head_dim)
    frequencies = (1.0 / np.power(np.float32(theta), exponents)).astype(np.float32)
    if divisors is not None:
        frequencies = frequencies / divisors
    angles = np.outer(np.arange(positions, dtype=np.float32), frequencies)
    return np.cos(angles), np.sin(angles)


def rotate(heads: FloatArray, cos: FloatArray, sin: FloatArray) -> None:
    """Rotate `(rows, heads, head_dim)` in place; `cos` and `sin` are the rows' own, `(rows, head_dim / 2)`."""
    half = heads.shape[2] // 2
    cos, sin = cos[:, None, :], sin[:, None, :]
    first, second = heads[:, :, :half], heads[:, :, half:]
    turned = first * cos - second * sin
    second *= cos
    second += first * sin
    first[...] = turned


def attention(queries: FloatArray, keys_values: FloatArray, stop: int, out: FloatArray) -> None:
    """Causal attention of the last rows of a sequence over its KV.

    Args:
        queries: `(rows, num_heads, head_dim)`, standing at positions `[stop - rows, stop)`.
        keys_values: `(2, num_kv_heads, tokens, head_dim)`, filled for `[0, stop)`.
        stop: end of the rows' positions.
        out: `(rows, num_heads * head_dim)`, overwritten.
    """
    rows, num_heads, dim = queries.shape
    kv_heads = keys_values.shape[1]
    group = num_heads // kv_heads
    scale = np.float32(1.0 / np.sqrt(dim))
    # A tile of rows sees the keys up to its own last row only: half the products of a long prompt are never made.
    tile = max(1, min(limits.ATTENTION_TILE_ROWS, limits.ATTENTION_SCORES_MAX // (num_heads * stop)))
    for begin in range(0, rows, tile):
        end = min(begin + tile, rows)
        count, visible = end - begin, stop - rows + end
        # (kv_heads, count * group, dim): one product serves all query heads of a KV head.
        q = queries[begin:end].reshape(count, kv_heads, group * dim).transpose(1, 0, 2).reshape(kv_heads, -1, dim)
        scores = (q * scale) @ keys_values[0, :, :visible].transpose(0, 2, 1)
        if count > 1:
            own = scores.reshape(kv_heads, count, group, visible)[:, :, :, visible - count :]
            own += np.triu(np.full((count, count), -np.inf, dtype=np.float32), 1)[:, None, :]
        scores -= scores.max(axis=2, keepdims=True)
        np.exp(scores, out=scores)
        mixed = scores @ keys_values[1, :, :visible]
        mixed /= scores.sum(axis=2, keepdims=True)
        out[begin:end] = mixed.reshape(kv_heads, count, group * dim).transpose(1, 0, 2).reshape(count, -1)


def swiglu(gate_up: FloatArray) -> FloatArray:
    """`silu(gate) * up` of `(rows, 2 * ffn_width)`, gate first."""
    width = gate_up.shape[1] // 2
    gate, up = gate_up[:, :width], gate_up[:, width:]
    # exp overflows to infinity for gates below -88, and gate / infinity is the right zero.
    activated = np.exp(-gate)
    activated += 1
    np.divide(gate, activated, out=activated)
    activated *= up
    return activated

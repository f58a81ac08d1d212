"""The arithmetic of a Llama on plain arrays: norm, rotation, attention, gated feed-forward. Pure; fp32.

Sources: RMSNorm (Zhang and Sennrich 2019), rotary embedding in the half-split form (Su et al. 2021, as in Hugging
Face's Llama), grouped-query attention (Ainslie et al. 2023), SwiGLU (Shazeer 2020).

A token's numbers must not depend on its company. Stored in bf16, a difference in the last bit of fp32 becomes one of
0.4 % where it tips the rounding, and some of those move a logit by 0.05: enough for another token. Therefore:

R1  Decoding multiplies each row alone, so its bits are the same in any batch.
R2  A prefill's rows stand at their position modulo `PRODUCT_ROWS` in a product of a multiple of that many rows, padded
    with zeros in front and behind: the kernels of a BLAS library treat the rows of a full group alike, and those of a
    remainder in other ways.
R3  Attention works on tiles at fixed positions, over all keys up to the tile's end: what is reduced has a length that
    follows from the position alone.

With one BLAS thread the KV of a prefill is then the same, bit for bit, however it was cut into calls. With several
threads, or another library, differences of rounding may return; nothing else depends on them.
"""

import numpy as np

from kv_services.engine import limits
from kv_services.engine.interface import FloatArray


def product(x: FloatArray, weight: FloatArray) -> FloatArray:
    """`x @ weight.T` for `x` of `(rows, in)` and `weight` of `(out, in)`, as one product (R2 is the caller's)."""
    result: FloatArray = x @ weight.T
    return result


def row_products(x: FloatArray, weight: FloatArray) -> FloatArray:
    """The same, each row alone (R1).

    The time is that of reading the weights, so several rows take turns at a piece that the cache holds: up to eight
    rows cost about what one product of them would, which first copies the weights into its own order.
    """
    rows, outputs = len(x), len(weight)
    out = np.empty((rows, outputs), dtype=np.float32)
    piece = outputs if rows == 1 else max(limits.WEIGHT_PIECE_BYTES // weight[0].nbytes // 16, 1) * 16
    for begin in range(0, outputs, piece):
        part = weight[begin : begin + piece]
        for row in range(rows):
            np.dot(part, x[row], out=out[row, begin : begin + piece])
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


def attend_one(queries: FloatArray, keys_values: FloatArray, stop: int, out: FloatArray) -> None:
    """Attention of a sequence's last token over its KV.

    Args:
        queries: `(num_heads, head_dim)`, of the token at position `stop - 1`.
        keys_values: `(2, num_kv_heads, tokens, head_dim)`, filled for `[0, stop)`.
        out: `(num_heads * head_dim,)`, overwritten.
    """
    kv_heads, dim = keys_values.shape[1], queries.shape[1]
    grouped = queries.reshape(kv_heads, -1, dim).copy()
    grouped *= _scale(dim)
    scores: FloatArray = grouped @ keys_values[0, :, :stop].transpose(0, 2, 1)
    out[:] = _weighted(scores, keys_values[1, :, :stop]).reshape(-1)


def attend_span(queries: FloatArray, keys_values: FloatArray, stop: int, out: FloatArray) -> None:
    """Causal attention of the last tokens of a sequence over its KV (R3).

    Args:
        queries: `(rows, num_heads, head_dim)`, of the tokens at positions `[stop - rows, stop)`.
        keys_values: `(2, num_kv_heads, tokens, head_dim)`, filled for `[0, stop)` and zero up to `tile_end(stop)`.
        out: `(rows, num_heads * head_dim)`, overwritten.
    """
    rows, num_heads, dim = queries.shape
    kv_heads, tile, start = keys_values.shape[1], limits.ATTENTION_TILE_ROWS, stop - rows
    group = num_heads // kv_heads
    later = np.triu(np.full((tile, tile), -np.inf, dtype=np.float32), 1)[:, None, :]
    for begin in range(start // tile * tile, stop, tile):
        end = begin + tile
        low, high = max(begin, start), min(end, stop)
        padded = np.zeros((tile, kv_heads, group * dim), dtype=np.float32)
        padded[low - begin : high - begin] = queries[low - start : high - start].reshape(-1, kv_heads, group * dim)
        padded *= _scale(dim)
        # (kv_heads, tile * group, dim): one product serves all query heads of a KV head.
        grouped = padded.transpose(1, 0, 2).reshape(kv_heads, tile * group, dim)
        mixed = np.empty_like(grouped)
        at_once = max(1, limits.ATTENTION_SCORES_MAX // (tile * group * end))
        for head in range(0, kv_heads, at_once):
            heads = slice(head, head + at_once)
            scores: FloatArray = grouped[heads] @ keys_values[0, heads, :end].transpose(0, 2, 1)
            scores.reshape(-1, tile, group, end)[:, :, :, begin:] += later
            mixed[heads] = _weighted(scores, keys_values[1, heads, :end])
        by_row = mixed.reshape(kv_heads, tile, group * dim).transpose(1, 0, 2).reshape(tile, -1)
        out[low - start : high - start] = by_row[low - begin : high - begin]


def tile_end(stop: int) -> int:
    """How far `attend_span` reads keys for tokens up to `stop`."""
    return -(-stop // limits.ATTENTION_TILE_ROWS) * limits.ATTENTION_TILE_ROWS


def _scale(dim: int) -> np.float32:
    return np.float32(1.0 / np.sqrt(dim))


def _weighted(scores: FloatArray, values: FloatArray) -> FloatArray:
    """Softmax of the scores along their last axis, times the values; `scores` is overwritten."""
    scores -= scores.max(axis=2, keepdims=True)
    np.exp(scores, out=scores)
    mixed: FloatArray = scores @ values
    mixed /= scores.sum(axis=2, keepdims=True)
    return mixed


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

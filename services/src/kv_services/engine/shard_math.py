"""Attention over a part of the keys, and joining such parts into the attention over all of them. Pure; fp32.

A part gives, per query and head, the maximum of its scores, the sum of their exponentials below that maximum, and the
values weighted by them but not yet divided. Two parts join by lowering both to the common maximum (the log-sum-exp of
online softmax: Milakov and Gimelshein 2018; as split keys in Flash-Decoding, Dao et al. 2023).

L1  Joining is associative and commutative up to rounding, and a part without keys changes nothing.
L2  No exponent is taken of a positive number, so no magnitude of scores overflows.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from kv_services.engine import limits
from kv_services.engine.interface import FloatArray

_NONE = np.float32(-np.inf)


@dataclass(frozen=True, slots=True)
class Partials:
    """What some of the keys say.

    Attributes:
        maxima: `(rows, num_heads)`, the largest score; minus infinity where no key may be seen.
        sums: `(rows, num_heads)`, of `exp(score - maximum)`.
        outputs: `(rows, num_heads, head_dim)`, of `exp(score - maximum) * value`.
    """

    maxima: FloatArray
    sums: FloatArray
    outputs: FloatArray

    @classmethod
    def empty(cls, rows: int, num_heads: int, head_dim: int) -> "Partials":
        """What no keys say."""
        return cls(
            np.full((rows, num_heads), _NONE, dtype=np.float32),
            np.zeros((rows, num_heads), dtype=np.float32),
            np.zeros((rows, num_heads, head_dim), dtype=np.float32),
        )


def attend_part(queries: FloatArray, start: int, keys_values: FloatArray, first: int) -> Partials:
    """Causal attention of consecutive tokens over the KV of some others.

    Args:
        queries: `(rows, num_heads, head_dim)`, rotated, of the tokens at positions `[start, start + rows)`.
        keys_values: `(2, num_kv_heads, tokens, head_dim)`, of the tokens at `[first, first + tokens)`; may be none.
    """
    rows, num_heads, dim = queries.shape
    kv_heads, tokens = keys_values.shape[1:3]
    group, scale = num_heads // kv_heads, np.float32(1.0 / np.sqrt(dim))
    parts = Partials.empty(rows, num_heads, dim)
    for low in range(0, rows, limits.ATTENTION_TILE_ROWS):
        high = min(low + limits.ATTENTION_TILE_ROWS, rows)
        seen = start + np.arange(low, high) - first + 1  # keys that each row may see
        end = min(tokens, int(seen[-1]))
        if end <= 0:
            continue
        count = high - low
        scaled: FloatArray = queries[low:high] * scale
        grouped = scaled.reshape(count, kv_heads, group, dim).transpose(1, 0, 2, 3)
        at_once = max(1, limits.ATTENTION_SCORES_MAX // (count * group * end))
        for head in range(0, kv_heads, at_once):
            heads = slice(head, head + at_once)
            part = grouped[heads]
            keys = keys_values[0, heads, :end].swapaxes(1, 2)
            scores: FloatArray = part.reshape(len(part), count * group, dim) @ keys
            if seen[0] < end:
                by_row = scores.reshape(-1, count, group, end).transpose(1, 0, 2, 3)
                by_row[np.broadcast_to((np.arange(end) >= seen[:, None])[:, None, None], by_row.shape)] = _NONE
            maxima: FloatArray = scores.max(axis=2, keepdims=True)
            scores -= _finite(maxima)
            np.exp(scores, out=scores)
            outputs = scores @ keys_values[1, heads, :end]
            own = slice(head * group, (head + len(part)) * group)
            parts.maxima[low:high, own] = _by_token(maxima, count)[..., 0]
            parts.sums[low:high, own] = _by_token(scores.sum(axis=2, keepdims=True), count)[..., 0]
            parts.outputs[low:high, own] = _by_token(outputs, count)
    return parts


def merge_parts(parts: Sequence[Partials]) -> Partials:
    """What the keys of all parts say together; at least one part, all of one shape."""
    maxima: FloatArray = np.maximum.reduce([part.maxima for part in parts])
    base = _finite(maxima)
    sums, outputs = np.zeros_like(maxima), np.zeros_like(parts[0].outputs)
    with np.errstate(over="ignore", under="ignore"):
        for part in parts:
            weight = np.exp(part.maxima - base)
            sums += weight * part.sums
            outputs += weight[:, :, None] * part.outputs
    return Partials(maxima, sums, outputs)


def mixed(parts: Partials) -> FloatArray:
    """The attention itself, `(rows, num_heads * head_dim)`; every query must have seen a key."""
    out: FloatArray = parts.outputs / parts.sums[:, :, None]
    return out.reshape(len(out), -1)


def _by_token(values: FloatArray, count: int) -> FloatArray:
    """`(kv_heads, count * group, n)` as `(count, kv_heads * group, n)`."""
    kv_heads, rows, last = values.shape
    return values.reshape(kv_heads, count, rows // count, last).transpose(1, 0, 2, 3).reshape(count, -1, last)


def _finite(maxima: FloatArray) -> FloatArray:
    """What scores are lowered by: nothing where there is no score, since infinity from infinity is no number."""
    lowered: FloatArray = np.where(maxima == _NONE, np.float32(0), maxima)
    return lowered

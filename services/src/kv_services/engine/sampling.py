"""Chooses a token from logits. Pure: the same logits, parameters and position give the same token on any node.

The draw is the first output of Philox4x64-10 (Salmon et al. 2011) keyed by the seed, at the counter of the token's
position: no stream to carry along, so a request goes on elsewhere in its middle. The raw output is used rather than a
NumPy distribution, since only bit streams are promised to stay the same between NumPy versions.

S1: temperature 0 takes the largest logit, the lowest token among equals. S2: otherwise tokens are ranked by
(probability, lower token first), the shortest head of that rank with at least `top_p` is kept, and the draw falls into
its cumulated probabilities. S3: log probabilities are those of the logits as they are, before temperature and top_p.
"""

import math
from typing import Final

import numpy as np
from numpy.typing import NDArray

from kv_services.engine import limits
from kv_services.engine.errors import SamplingError
from kv_services.engine.interface import FloatArray, SampledToken, SamplingParams

_CANDIDATES: Final = 256
"""Tokens ranked at first; a head that needs more is ranked in full."""


def sample(logits: FloatArray, params: SamplingParams, position: int) -> SampledToken:
    """Choose the token at `position` of the sequence (the prompt's tokens count from 0).

    Args:
        logits: `(vocab_size,)`.
        params: see `SamplingParams`.
        position: index that the chosen token will have.

    Raises:
        SamplingError: parameters out of range, or logits that are no numbers.
    """
    check_params(params)
    if position < 0:
        raise SamplingError(field="position", value=position, expected="0 or more")
    best = int(logits.argmax())  # NaN counts as the largest, so one look finds both NaN and infinity
    if not math.isfinite(logits[best]):
        raise SamplingError(field="largest logit", value=float(logits[best]), expected="a finite number")
    token = best if params.temperature == 0 else _draw(logits, params, _uniform(params.seed, position))
    if params.top_logprobs is None:
        return SampledToken(token, None, {})
    shifted = logits.astype(np.float64) - float(logits[best])
    total = math.log(float(np.exp(shifted).sum()))
    top = _ranked(logits, params.top_logprobs)
    return SampledToken(token, float(shifted[token]) - total, {int(t): float(shifted[t]) - total for t in top})


def check_params(params: SamplingParams) -> None:
    """Raises `SamplingError` for parameters out of range."""
    if not (math.isfinite(params.temperature) and params.temperature >= 0):
        raise SamplingError(field="temperature", value=params.temperature, expected="a number of 0 or more")
    if not 0 < params.top_p <= 1:
        raise SamplingError(field="top_p", value=params.top_p, expected="in (0, 1]")
    if params.top_logprobs is not None and not 0 <= params.top_logprobs <= limits.TOP_LOGPROBS_MAX:
        raise SamplingError(
            field="top_logprobs", value=params.top_logprobs, expected=f"in [0, {limits.TOP_LOGPROBS_MAX}]"
        )


def _draw(logits: FloatArray, params: SamplingParams, uniform: float) -> int:
    # The largest logit becomes 0, and the others minus infinity at worst, whose weight is the right zero.
    with np.errstate(over="ignore"):
        weights = np.exp((logits.astype(np.float64) - float(logits.max())) / params.temperature)
    if params.top_p == 1:
        # Nothing is cut, so the order does not matter for the distribution: token order needs no sort.
        kept, cumulated = None, np.cumsum(weights)
    else:
        threshold = params.top_p * float(weights.sum())
        kept = _ranked(weights, _CANDIDATES)
        cumulated = np.cumsum(weights[kept])
        if cumulated[-1] < threshold:
            kept = _ranked(weights, len(weights))
            cumulated = np.cumsum(weights[kept])
        # At least one token stays, also where rounding puts the threshold beyond the last sum.
        length = min(int(np.searchsorted(cumulated, threshold)) + 1, len(kept))
        kept, cumulated = kept[:length], cumulated[:length]
    index = min(int(np.searchsorted(cumulated, uniform * float(cumulated[-1]), side="right")), len(cumulated) - 1)
    return index if kept is None else int(kept[index])


def _ranked(values: NDArray[np.floating], count: int) -> NDArray[np.intp]:
    """The `count` tokens of the largest values, best first, the lower token first among equals."""
    if count == 0:
        return np.empty(0, dtype=np.intp)
    if count < len(values):
        bound = np.partition(values, len(values) - count)[len(values) - count]
        candidates = np.flatnonzero(values >= bound)
    else:
        candidates = np.arange(len(values))
    return candidates[np.argsort(-values[candidates], kind="stable")][:count]


def _uniform(seed: int, position: int) -> float:
    """A number in [0, 1) with 53 random bits. Seeds are taken modulo 2**64, so negative ones are fine."""
    raw = int(np.random.Philox(key=seed % (1 << 64), counter=position).random_raw())
    return float((raw >> 11) * 2.0**-53)

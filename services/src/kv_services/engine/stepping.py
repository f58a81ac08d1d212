"""What every engine does alike: checking a call, cutting a prefill, and a sequence's way through a decode step.

Here live the rules of `interface` that do not depend on the arithmetic: which calls are refused before anything is
written, that each block is completed once (I3), and that a sequence neither waits for another's KV nor fails with it
(I4).
"""

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kv_core.errors import KVError
from kv_services.engine import limits
from kv_services.engine.errors import EngineInputError
from kv_services.engine.interface import (
    BlockTable,
    DecodeInput,
    DecodeOutput,
    FloatArray,
    ModelInfo,
    PagedKV,
    Parked,
    StepFailed,
    Stepped,
    TokenArray,
)
from kv_services.engine.paged_kv import ReadPlan, check_geometry, check_span, check_tokens, plan_reads, slots_of


@dataclass(frozen=True, slots=True)
class Span:
    """A checked prefill: tokens at positions `[start, stop)`, and the slots that cover `[0, stop)`."""

    tokens: NDArray[np.intp]
    start: int
    stop: int
    slots: NDArray[np.intp]
    chunks: list[tuple[int, int]]


def open_span(info: ModelInfo, kv: PagedKV, tokens: TokenArray, start: int, block_table: BlockTable) -> Span:
    """Check a prefill and cut it at block borders, so that each block is completed once.

    Raises:
        EngineInputError, ContextLengthError, GeometryMismatchError: as `Model.prefill` says.
    """
    check_geometry(info, kv)
    ids = np.asarray(tokens, dtype=np.intp)
    stop = start + len(ids)
    check_span(info, start, stop)
    check_tokens(info, ids)
    block_size = kv.geometry.block_size
    # At borders of blocks (I3), and where possible also of products, which need no padding then.
    unit = math.lcm(block_size, limits.PRODUCT_ROWS)
    unit = unit if unit <= limits.PREFILL_CHUNK_TOKENS else block_size
    size = max(limits.PREFILL_CHUNK_TOKENS // unit, 1) * unit
    borders = [start, *range((start // size + 1) * size, stop, size), stop]
    return Span(ids, start, stop, slots_of(kv, block_table, stop), list(itertools.pairwise(borders)))


@dataclass(slots=True)
class Step:
    """One sequence's way through a decode step; `layer` is the first one not computed."""

    token: int
    position: int
    reads: ReadPlan
    layer: int
    hidden: FloatArray
    layer_ready: Callable[[int], bool] | None
    failure: KVError | None = None
    logits: FloatArray | None = None

    def enters(self, layer: int) -> bool:
        """Whether this layer is the sequence's next and its KV is there. A failed transfer ends this sequence alone."""
        if self.layer != layer or self.failure is not None:
            return False
        if self.layer_ready is None or self.position == 0:
            return True
        try:
            return self.layer_ready(layer)
        except KVError as error:
            self.failure = error
            return False

    def output(self) -> DecodeOutput:
        """What the caller gets when the sweep is over."""
        if self.failure is not None:
            return StepFailed(self.failure)
        if self.logits is not None:
            return Stepped(self.logits)
        return Parked(self.layer, self.hidden)


def open_steps(
    info: ModelInfo, kv: PagedKV, batch: Sequence[DecodeInput], first_hidden: Callable[[int], FloatArray]
) -> list[Step]:
    """Check a whole batch before anything is written.

    Args:
        first_hidden: the state in which a token enters layer 0; parked ones bring theirs, of the same shape.

    Raises:
        EngineInputError, ContextLengthError, GeometryMismatchError: as `Model.decode` says.
    """
    check_geometry(info, kv)
    if len(batch) > limits.BATCH_SEQUENCES_MAX:
        raise EngineInputError(field="batch", value=len(batch), expected=f"{limits.BATCH_SEQUENCES_MAX} at most")
    check_tokens(info, np.array([item.token for item in batch], dtype=np.intp))
    steps, written = list[Step](), set[int]()
    for item in batch:
        check_span(info, item.position, item.position + 1)
        slots = slots_of(kv, item.block_table, item.position + 1)
        written.add(int(slots[-1]))
        layer, hidden = 0, first_hidden(item.token)
        if item.parked is not None:
            if not 0 <= item.parked.layer < info.geometry.num_layers or item.parked.hidden.shape != hidden.shape:
                raise EngineInputError(field="parked", value=item.parked.layer, expected="what this model returned")
            layer, hidden = item.parked.layer, item.parked.hidden
        ready = None if item.arrival is None else item.arrival.layer_ready
        steps.append(Step(item.token, item.position, plan_reads(slots), layer, hidden, ready))
    if len(written) < len(batch):
        raise EngineInputError(field="batch", value="one block", expected="each sequence to write a block of its own")
    return steps

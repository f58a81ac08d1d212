"""The one thread of a node that computes: prefill, decode steps, sampling, and the sealing of what they wrote.

The loop hands in work and gets a future; the thread never touches a machine. Work is done in the order given, so a
node with both kinds of work alternates by whoever asks. A call that was started is never abandoned: its memory is in
use until it returns.
"""

import asyncio
import threading
from asyncio import Future, wrap_future
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol, TypeVar

import numpy as np

from kv_core.block import BlockRef
from kv_core.errors import KVError
from kv_core.ids import NodeId, RequestId
from kv_services.engine.interface import DecodeInput, LayerArrival, Model, PagedKV, Parked, StepFailed, Stepped
from kv_services.engine.interface import SamplingParams as EngineSampling
from kv_services.engine.sampling import sample
from kv_services.messages import OutputToken, Sampling
from kv_services.node.decode_events import StepItem, StepOutcome

T = TypeVar("T")


class SealedKV(PagedKV, Protocol):
    """The arena, as far as the compute thread needs it: KV views and checksums per (layer, slot)."""

    def seal(self, layer: int, slots: Iterable[int]) -> None: ...

    def seal_block(self, slot: int) -> None: ...

    def unseal(self, slot: int) -> None: ...


class LayerSink(Protocol):
    """Where a prefill's layers go as they are written; called in the compute thread."""

    def layer_written(self, layer: int, first_block: int, end_block: int) -> None: ...


class Compute(Protocol):
    """Where a node's engine runs: one call after the other, in the order given."""

    def run(self, call: Callable[[], T]) -> "Future[T]":
        """Do `call` when those before it are done. Cancelling the future does not stop a call that was started."""
        ...

    async def close(self) -> None:
        """Return when the call under way is over; those behind it are dropped. Idempotent."""
        ...


class ComputeThread:
    """A `Compute` in a thread of its own."""

    def __init__(self, node_id: NodeId) -> None:
        self._executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix=f"compute-{node_id}")

    def run(self, call: Callable[[], T]) -> "Future[T]":
        """See `Compute.run`."""
        future = wrap_future(self._executor.submit(call))
        future.add_done_callback(outcome_is_seen)
        return future

    async def close(self) -> None:
        """See `Compute.close`."""
        shutdown = partial(self._executor.shutdown, wait=True, cancel_futures=True)
        await asyncio.get_running_loop().run_in_executor(None, shutdown)


def outcome_is_seen(done: "Future[Any]") -> None:
    """For a call whose caller may have gone, its role being closed: what it failed with is then nobody's news."""
    if not done.cancelled():
        done.exception()


class _PrefillHooks:
    """Joins a prefill to its hand-over; everything it reads is there already."""

    def __init__(self, sink: LayerSink, stop: threading.Event) -> None:
        self.layer_written = sink.layer_written
        self.cancelled = stop.is_set

    def layer_needed(self, layer: int) -> None:
        """The blocks before this prefill's first token were matched or fetched as a whole."""


class SealingSink:
    """Seals what is written, for blocks that no hand-over sends: others may read them later."""

    def __init__(self, kv: SealedKV, slots: Sequence[int]) -> None:
        self._kv = kv
        self._slots = slots

    def layer_written(self, layer: int, first_block: int, end_block: int) -> None:
        self._kv.seal(layer, self._slots[first_block:end_block])


@dataclass(frozen=True, slots=True)
class BlockCopy:
    """The beginning of one block, copied to another before it is appended to."""

    src: BlockRef
    dst: BlockRef
    num_tokens: int


def run_prefill(
    model: Model,
    kv: SealedKV,
    tokens: Sequence[int],
    start: int,
    stop: int,
    slots: Sequence[int],
    sink: LayerSink,
    stop_event: threading.Event,
    copy: BlockCopy | None = None,
) -> None:
    """Compute KV of `tokens[start:stop]`; `sink` hears of each layer's blocks in the compute thread.

    Raises:
        KVError: the engine's reasons, or the hand-over's.
    """
    if copy is not None:
        for layer in range(kv.geometry.num_layers):
            view = kv.kv(layer)
            view[copy.dst.slot, :, :, : copy.num_tokens] = view[copy.src.slot, :, :, : copy.num_tokens]
    part = np.array(tokens[start:stop], dtype=np.uint32)
    model.prefill(kv, part, start, slots, _PrefillHooks(sink, stop_event))


def run_step(
    model: Model,
    kv: SealedKV,
    items: Sequence[StepItem],
    arrivals: dict[RequestId, LayerArrival],
) -> tuple[StepOutcome, ...]:
    """One decode step over `items`, sampling included; a sequence that fails fails alone."""
    block_size = kv.geometry.block_size
    for item in items:
        if not item.arriving and item.parked is None:
            kv.unseal(item.slots[item.position // block_size])
    batch = [
        DecodeInput(
            token=item.token,
            position=item.position,
            block_table=item.slots,
            arrival=arrivals.get(item.request_id) if item.arriving or item.parked else None,
            parked=item.parked,
        )
        for item in items
    ]
    outcomes: list[StepOutcome] = []
    for item, output in zip(items, model.decode(kv, batch), strict=True):
        result: OutputToken | Parked | KVError
        if isinstance(output, Stepped):
            # A hand-over still compares the checksums of what arrived: its last block is sealed after that.
            if not item.arriving and fills_block(item, block_size):
                kv.seal_block(item.slots[item.position // block_size])
            result = sample_token(output.logits, item.sampling, item.position + 1)
        else:
            result = output.error if isinstance(output, StepFailed) else output
        outcomes.append(StepOutcome(item.request_id, item.epoch, result))
    return tuple(outcomes)


def fills_block(item: StepItem, block_size: int) -> bool:
    """Whether the step of this item wrote the last token of a block."""
    return (item.position + 1) % block_size == 0


def sample_token(
    logits: "np.ndarray[tuple[int, ...], np.dtype[np.float32]]", sampling: Sampling, position: int
) -> OutputToken:
    """Choose the token at `position` from logits `(vocab_size,)`."""
    params = EngineSampling(sampling.temperature, sampling.top_p, sampling.seed, sampling.top_logprobs)
    chosen = sample(logits, params, position)
    return OutputToken(chosen.token, chosen.logprob, tuple(chosen.top_logprobs.items()))

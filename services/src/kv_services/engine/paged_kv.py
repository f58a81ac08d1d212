"""KV blocks over any writable buffer (a test's own memory, a node's registered region), and reading and writing them.

Decides how (slot, layer) becomes a view, how tokens are scattered into blocks, and how a sequence's blocks are
gathered into what attention reads. Knows nothing of who owns a slot or whether its bytes may be read; callers do.

P1: a write touches the tokens it was given and no other byte. P2: a call with impossible numbers is refused before
anything is written.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kv_core.block import BlockGeometry, Layout
from kv_core.checksum import Buffer
from kv_services.engine.elements import decode_into, stored_dtype
from kv_services.engine.errors import (
    ContextLengthError,
    EngineInputError,
    GeometryMismatchError,
    UnsupportedStoreError,
)
from kv_services.engine.interface import BlockTable, FloatArray, ModelInfo, PagedKV, StoredArray


class BufferPagedKV:
    """A `PagedKV` over the first `num_slots * geometry.block_nbytes` bytes of a buffer.

    Raises:
        UnsupportedStoreError: an element type or plane count that the engine cannot compute on.
        EngineInputError: the buffer is too small or read-only, or there are no slots.
    """

    __slots__ = ("_geometry", "_layers", "_layout", "_num_slots")

    def __init__(self, buffer: Buffer, geometry: BlockGeometry, layout: Layout, num_slots: int) -> None:
        element = stored_dtype(geometry.dtype)
        if geometry.num_planes != 2:
            raise UnsupportedStoreError(dtype=f"{geometry.num_planes} plane", known="blocks of K and V")
        need = num_slots * geometry.block_nbytes
        raw = memoryview(buffer).cast("B")
        if num_slots < 1 or raw.nbytes < need or raw.readonly:
            have = f"{raw.nbytes} {'read-only' if raw.readonly else 'writable'} bytes for {num_slots} slots"
            raise EngineInputError(field="arena", value=have, expected=f"at least 1 slot and {need} writable bytes")
        outer = (num_slots, geometry.num_layers) if layout is Layout.BLOCK_FIRST else (geometry.num_layers, num_slots)
        inner = (2, geometry.num_kv_heads, geometry.block_size, geometry.head_dim)
        pieces: StoredArray = np.frombuffer(raw[:need], dtype=element).reshape(outer + inner)
        self._geometry, self._layout, self._num_slots = geometry, layout, num_slots
        self._layers = pieces.swapaxes(0, 1) if layout is Layout.BLOCK_FIRST else pieces

    @classmethod
    def allocate(cls, geometry: BlockGeometry, num_slots: int, layout: Layout = Layout.LAYER_FIRST) -> "BufferPagedKV":
        """One over zeroed memory of its own."""
        return cls(bytearray(num_slots * geometry.block_nbytes), geometry, layout, num_slots)

    @property
    def geometry(self) -> BlockGeometry:
        return self._geometry

    @property
    def layout(self) -> Layout:
        return self._layout

    @property
    def num_slots(self) -> int:
        return self._num_slots

    def kv(self, layer: int) -> StoredArray:
        """See `PagedKV.kv`."""
        view: StoredArray = self._layers[layer]
        return view


def check_geometry(info: ModelInfo, kv: PagedKV) -> None:
    """Raises `GeometryMismatchError` unless the arena's blocks hold this model's KV."""
    have, need = kv.geometry, info.geometry
    for field, h, n in (
        ("num_layers", have.num_layers, need.num_layers),
        ("num_kv_heads", have.num_kv_heads, need.num_kv_heads),
        ("head_dim", have.head_dim, need.head_dim),
    ):
        if h != n:
            raise GeometryMismatchError(field=field, have=h, need=n)


def check_span(info: ModelInfo, start: int, stop: int) -> None:
    """Refuse positions `[start, stop)` that the model cannot take.

    Raises:
        EngineInputError: an empty or negative span.
        ContextLengthError: beyond the model's context.
    """
    if not 0 <= start < stop:
        raise EngineInputError(field="positions", value=f"[{start}, {stop})", expected="a span that is not empty")
    if stop > info.max_context:
        raise ContextLengthError(tokens=stop, limit=info.max_context)


def check_tokens(info: ModelInfo, tokens: NDArray[np.intp]) -> None:
    """Raises `EngineInputError` unless every token is one of the vocabulary."""
    if len(tokens) and not 0 <= int(tokens.min()) <= int(tokens.max()) < info.vocab_size:
        bad = tokens[(tokens < 0) | (tokens >= info.vocab_size)][0]
        raise EngineInputError(field="token", value=int(bad), expected=f"in [0, {info.vocab_size})")


def slots_of(kv: PagedKV, block_table: BlockTable, num_tokens: int) -> NDArray[np.intp]:
    """The slots that cover tokens `[0, num_tokens)`, checked.

    Raises:
        EngineInputError: too few blocks, a slot outside the arena, or one slot twice.
    """
    size = kv.geometry.block_size
    count = -(-num_tokens // size)
    slots = np.asarray(block_table, dtype=np.intp)[:count]
    if len(slots) < count:
        raise EngineInputError(field="blocks", value=len(slots), expected=f"{count} of {size} for {num_tokens} tokens")
    if not 0 <= int(slots.min()) <= int(slots.max()) < kv.num_slots:
        raise EngineInputError(field="block table", value=str(slots), expected=f"slots in [0, {kv.num_slots})")
    if len(set(slots.tolist())) < count:
        raise EngineInputError(field="block table", value=str(slots), expected="each slot once")
    return slots


def write_tokens(view: StoredArray, slots: NDArray[np.intp], start: int, values: StoredArray) -> None:
    """Store KV of consecutive tokens of one layer.

    Args:
        view: `PagedKV.kv(layer)`.
        slots: of the sequence from block 0.
        start: position of the first token.
        values: `(tokens, 2, num_kv_heads, head_dim)`, already of the stored type.
    """
    size = view.shape[3]
    done, count = 0, len(values)
    while done < count:
        block, offset = divmod(start + done, size)
        whole = (count - done) // size
        if offset == 0 and whole > 0:
            taken = whole * size
            blocks = values[done : done + taken].reshape(whole, size, *values.shape[1:])
            view[slots[block : block + whole]] = blocks.transpose(0, 2, 3, 1, 4)
        else:
            taken = min(size - offset, count - done)
            view[slots[block], :, :, offset : offset + taken] = values[done : done + taken].transpose(1, 2, 0, 3)
        done += taken


@dataclass(frozen=True, slots=True)
class ReadPlan:
    """How a sequence's blocks are gathered; made once, used for every layer.

    Attributes:
        slots: of the sequence from block 0.
        runs: `(first block, end block, slot of the first)` of neighbours in the arena, in order.
    """

    slots: NDArray[np.intp]
    runs: list[tuple[int, int, int]]


def plan_reads(slots: NDArray[np.intp]) -> ReadPlan:
    """Find the runs of neighbouring slots: each is read by one copy."""
    breaks = (np.flatnonzero(np.diff(slots) != 1) + 1).tolist()
    borders = list(zip([0, *breaks], [*breaks, len(slots)], strict=True))
    return ReadPlan(slots, [(first, end, int(slots[first])) for first, end in borders if first < end])


def read_blocks(view: StoredArray, plan: ReadPlan, first: int, end: int, out: FloatArray) -> None:
    """Gather blocks `[first, end)` of a sequence's layer as fp32.

    Args:
        view: `PagedKV.kv(layer)`.
        plan: of the sequence.
        out: `(2, num_kv_heads, tokens, head_dim)` by position; tokens `[first * size, end * size)` are filled.
    """
    size = view.shape[3]
    planes, heads, _, dim = out.shape
    target = (
        out[:, :, first * size : end * size].reshape(planes, heads, end - first, size, dim).transpose(2, 0, 1, 3, 4)
    )
    if len(plan.runs) > max(8, len(plan.slots) // 4) and view.dtype != np.float32:
        # Scattered slots: one gather costs a temporary, but less than a conversion call for each block.
        decode_into(view[plan.slots[first:end]], target)
        return
    for begin, stop, slot in plan.runs:
        low, high = max(begin, first), min(stop, end)
        if low < high:
            decode_into(view[slot + low - begin : slot + high - begin], target[low - first : high - first])

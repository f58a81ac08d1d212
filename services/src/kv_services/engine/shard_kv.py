"""Where a piece of a sequence's KV lies in a node's arena: some layers of some tokens, packed into whole slots.

A slot has room for one block in every layer of the model. A piece of `n` layers fills it with the cells of several
blocks, one after the other: the cell of block `i` and the piece's `j`-th layer is number `i * n + j`, in slot
`number // num_layers` of the piece, at that slot's layer `number % num_layers`. So a node that holds a third of the
layers holds three times the tokens, and no room is lost but in the last slot.

C1  Two cells of a piece never share bytes. C2  A write touches the tokens it was given and no other byte.
"""

import math
from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from kv_services.engine.elements import decode_into
from kv_services.engine.errors import EngineInputError
from kv_services.engine.interface import FloatArray, PagedKV, StoredArray


def slots_needed(num_layers: int, piece_layers: int, num_tokens: int, block_size: int) -> int:
    """Slots that a piece of `piece_layers` layers of `num_tokens` tokens takes of an arena of `num_layers` layers."""
    return -(-(-(-num_tokens // block_size) * piece_layers) // num_layers)


class ShardKV:
    """The KV of the layers `[layers.start, layers.stop)` of the tokens `[tokens.start, tokens.stop)` of a sequence.

    Args:
        kv: the arena.
        layers, tokens: ranges of step 1; tokens begin at a block's border.
        slots: of the piece, `slots_needed` of them, each once.

    Raises:
        EngineInputError: the numbers do not fit each other or the arena.
    """

    def __init__(self, kv: PagedKV, layers: range, tokens: range, slots: Sequence[int]) -> None:
        geometry = kv.geometry
        if not 0 <= layers.start < layers.stop <= geometry.num_layers or layers.step != 1:
            raise EngineInputError(field="layers", value=str(layers), expected=f"some of {geometry.num_layers}")
        if not 0 <= tokens.start < tokens.stop or tokens.start % geometry.block_size or tokens.step != 1:
            raise EngineInputError(field="tokens", value=str(tokens), expected="some, from a block's border on")
        need = slots_needed(geometry.num_layers, len(layers), len(tokens), geometry.block_size)
        known = np.asarray(slots, dtype=np.intp)
        if len(known) != need or len(np.unique(known)) != need:
            raise EngineInputError(field="slots", value=len(known), expected=f"{need} different ones")
        if not 0 <= int(known.min()) <= int(known.max()) < kv.num_slots:
            raise EngineInputError(field="slots", value=str(known), expected=f"in [0, {kv.num_slots})")
        self._kv, self.layers, self.tokens, self._slots = kv, layers, tokens, known
        # Blocks whose cells have the same place in their slots follow each other at this distance.
        self._period = geometry.num_layers // math.gcd(geometry.num_layers, len(layers))

    @property
    def kv(self) -> PagedKV:
        """The arena it lies in."""
        return self._kv

    def write(self, layer: int, start: int, values: StoredArray) -> None:
        """Store KV of consecutive tokens of one layer.

        Args:
            layer: of the model; one of the piece's.
            start: position of the first token in the sequence.
            values: `(tokens, 2, num_kv_heads, head_dim)`, of the stored type, all within the piece.

        Raises:
            EngineInputError: some of it lies outside the piece; nothing was written.
        """
        stop, size = start + len(values), self._kv.geometry.block_size
        self._check(layer, start, stop)
        at = start - self.tokens.start
        for done in _cuts(at, at + len(values), size):
            block, offset = divmod(done.start, size)
            slot, lane = divmod(block * len(self.layers) + layer - self.layers.start, self._kv.geometry.num_layers)
            piece = values[done.start - at : done.stop - at]
            self._kv.kv(lane)[self._slots[slot], :, :, offset : offset + len(piece)] = piece.transpose(1, 2, 0, 3)

    def read(self, layer: int, stop: int, out: FloatArray) -> None:
        """Gather one layer's KV of the piece's tokens before `stop`, as fp32.

        Args:
            out: `(2, num_kv_heads, tokens, head_dim)`, whole blocks; index 0 is the piece's first token. Filled up to
                the end of the block that holds `stop - 1`.

        Raises:
            EngineInputError: outside the piece.
        """
        self._check(layer, self.tokens.start, stop)
        geometry, size = self._kv.geometry, self._kv.geometry.block_size
        num_blocks = -(-(stop - self.tokens.start) // size)
        planes, heads, _, dim = out.shape
        target = out[:, :, : num_blocks * size].reshape(planes, heads, num_blocks, size, dim).transpose(2, 0, 1, 3, 4)
        for first in range(min(self._period, num_blocks)):
            cells = self._cells(layer, np.arange(first, num_blocks, self._period))
            lane = int(cells[0]) % geometry.num_layers
            stored = self._kv.kv(lane)[self._slots[cells // geometry.num_layers]]
            decode_into(stored, target[first :: self._period])

    def _cells(self, layer: int, blocks: NDArray[np.intp]) -> NDArray[np.intp]:
        cells: NDArray[np.intp] = blocks * len(self.layers) + (layer - self.layers.start)
        return cells

    def _check(self, layer: int, start: int, stop: int) -> None:
        if layer not in self.layers or not self.tokens.start <= start < stop <= self.tokens.stop:
            where = f"layer {layer}, tokens [{start}, {stop})"
            raise EngineInputError(field="place", value=where, expected=f"within {self.layers}, {self.tokens}")


def _cuts(start: int, stop: int, size: int) -> Iterator[range]:
    """`[start, stop)` cut at multiples of `size`."""
    while start < stop:
        end = min(stop, (start // size + 1) * size)
        yield range(start, end)
        start = end

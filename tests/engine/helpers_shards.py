"""A sequence held in pieces within one process: the stages of a plan, carried out on arenas of the test."""

from collections.abc import Iterator, Sequence

import numpy as np

from kv_core.block import Layout
from kv_core.dtypes import DType
from kv_core.ids import NodeId
from kv_core.sharding import Placement
from kv_services.engine.interface import FloatArray
from kv_services.engine.llama import LlamaModel
from kv_services.engine.llama_shards import LlamaShards
from kv_services.engine.paged_kv import BufferPagedKV
from kv_services.engine.shard_kv import ShardKV
from kv_services.sharded.plan import SequenceSize, Stage, pass_end, piece_slots, stages_of


class InProcessShards:
    """Each node of the plan is an arena of exactly as many slots as its piece takes, filled with wrong bytes."""

    def __init__(self, model: LlamaModel, pieces: Sequence[Placement], size: SequenceSize, dtype: DType) -> None:
        self.engine = LlamaShards(model.layers)
        self.stages = stages_of(pieces, size)
        geometry = model.info.geometry.block_geometry(dtype, size.block_size)
        self.held: dict[NodeId, ShardKV] = {}
        for piece in pieces:
            count = piece_slots(piece, size.num_layers, size.block_size)
            arena = BufferPagedKV(
                bytearray(b"\x7e" * ((count + 2) * geometry.block_nbytes)), geometry, _layout(piece), count + 2
            )
            slots = np.random.default_rng(piece.layer_start).permutation(count + 2)[:count].tolist()
            layers, tokens = range(piece.layer_start, piece.layer_end), range(piece.token_start, piece.token_end)
            self.held[piece.node] = ShardKV(arena, layers, tokens, slots)

    def prefill(self, tokens: Sequence[int], tokens_max: int) -> None:
        start = 0
        while start < len(tokens):
            stop = pass_end(self.stages, start, len(tokens), tokens_max)
            self._pass(self.engine.embed(tokens[start:stop]), start, decoding=False)
            start = stop

    def step(self, token: int, position: int) -> FloatArray:
        return self.engine.read_out(self._pass(self.engine.embed([token]), position, decoding=True))

    def logits(self, tokens: Sequence[int], num_prompt: int, tokens_max: int = 480) -> Iterator[FloatArray]:
        """Those after each of `tokens[num_prompt - 1:]`."""
        self.prefill(tokens[: num_prompt - 1], tokens_max)
        for position in range(num_prompt - 1, len(tokens)):
            yield self.step(tokens[position], position)

    def _pass(self, hidden: FloatArray, start: int, *, decoding: bool) -> FloatArray:
        for stage in self.stages:
            if len(stage.pieces) == 1:
                held = self.held[stage.pieces[0].node]
                assert (held.layers.start, held.layers.stop) == (stage.layer_start, stage.layer_end)
                hidden = self.engine.run_layers(held, hidden, start, decoding=decoding)
            else:
                hidden = self._split(stage, hidden, start, decoding=decoding)
        return hidden

    def _split(self, stage: Stage, hidden: FloatArray, start: int, *, decoding: bool) -> FloatArray:
        for layer in range(stage.layer_start, stage.layer_end):
            queries, keys_values = self.engine.project(layer, hidden, start, decoding=decoding)
            parts = []
            for piece in stage.pieces:
                if piece.token_start <= start:
                    own = keys_values if start < piece.token_end else None
                    parts.append(self.engine.attend(self.held[piece.node], layer, queries, start, own))
            hidden = self.engine.finish(layer, hidden, parts, start, decoding=decoding)
        return hidden


def _layout(piece: Placement) -> Layout:
    return Layout.BLOCK_FIRST if piece.layer_start % 2 or piece.token_start else Layout.LAYER_FIRST

"""What nodes that hold a sequence together ask of an engine, beyond `interface.Model`.

A pass takes some consecutive tokens through all layers: prefill in passes of many, decode in passes of one. Between
layers a token is its hidden state, which travels; its KV stays with the holder of its piece.
"""

from dataclasses import dataclass
from typing import Protocol

from kv_services.engine import limits
from kv_services.engine.interface import FloatArray, ModelInfo, TokenArray
from kv_services.engine.shard_kv import ShardKV
from kv_services.engine.shard_math import Partials


@dataclass(frozen=True, slots=True)
class RowShapes:
    """Shapes of what travels, for each token; all fp32.

    Attributes:
        width: of a hidden state.
        num_heads, head_dim: of queries and partial outputs.
        num_kv_heads: of new KV.
    """

    width: int
    num_heads: int
    num_kv_heads: int
    head_dim: int

    @property
    def nbytes_max(self) -> int:
        """The most bytes that one message carries for a token."""
        attended = self.num_heads * (self.head_dim + 2)
        asked = (self.num_heads + 2 * self.num_kv_heads) * self.head_dim
        return 4 * max(self.width, attended, asked)

    def pass_tokens(self, nbytes: int) -> int:
        """Tokens of a pass whose messages shall stay near `nbytes`: whole products of rows where that is possible."""
        count = min(nbytes // self.nbytes_max, limits.PREFILL_CHUNK_TOKENS)
        return max(count // limits.PRODUCT_ROWS * limits.PRODUCT_ROWS or count, 1)


class ShardEngine(Protocol):
    """An engine that computes on pieces. Calls block and belong in a compute thread."""

    @property
    def info(self) -> ModelInfo: ...

    @property
    def shapes(self) -> RowShapes: ...

    def embed(self, tokens: TokenArray) -> FloatArray:
        """The state `(rows, width)` in which tokens enter layer 0.

        Raises:
            EngineInputError: a token outside the vocabulary.
        """
        ...

    def run_layers(self, kv: ShardKV, hidden: FloatArray, start: int, *, decoding: bool) -> FloatArray:
        """Take tokens through all layers of a piece that holds every token before them; stores their KV.

        Args:
            hidden: `(rows, width)`, of the tokens at `[start, start + rows)` as they left the layer before.
            decoding: one token that is multiplied alone, as `Model.decode` does; else as `Model.prefill`.

        Returns:
            The state after the piece's last layer, `(rows, width)`.

        Raises:
            EngineInputError, ContextLengthError, GeometryMismatchError: nothing was written.
            KVRangeError: a value does not fit the arena's element type.
        """
        ...

    def project(self, layer: int, hidden: FloatArray, start: int, *, decoding: bool) -> tuple[FloatArray, FloatArray]:
        """Rotated queries `(rows, num_heads, head_dim)` and new KV `(rows, 2, num_kv_heads, head_dim)` of a layer."""
        ...

    def attend(
        self, kv: ShardKV, layer: int, queries: FloatArray, start: int, keys_values: FloatArray | None
    ) -> Partials:
        """What the piece's keys before or at each query say; `keys_values` of the queries' own tokens are stored first,
        where the piece holds them.

        Raises:
            As `run_layers`.
        """
        ...

    def finish(
        self, layer: int, hidden: FloatArray, parts: list[Partials], start: int, *, decoding: bool
    ) -> FloatArray:
        """The state after a layer whose attention came in parts."""
        ...

    def read_out(self, hidden: FloatArray) -> FloatArray:
        """Logits `(vocab_size,)` of the last of these tokens, which left the last layer."""
        ...

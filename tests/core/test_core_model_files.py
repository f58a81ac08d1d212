"""Geometries from models' own files: read right, or refused with file and field."""

import json
import sys
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kv_core.dtypes import DType
from kv_core.errors import MissingExtraError
from kv_core.geometry import Attention
from kv_core.model_files import (
    ModelFileError,
    geometry_from_gguf_metadata,
    geometry_from_hf_config,
    load_geometry,
    load_gguf,
    load_hf_config,
)
from kv_core.presets import preset

LLAMA: dict[str, object] = {
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "hidden_size": 8192,
    "max_position_embeddings": 8192,
}
DEEPSEEK: dict[str, object] = {
    "num_hidden_layers": 61,
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 128,
    "v_head_dim": 128,
    "max_position_embeddings": 163840,
}


def test_configs_give_what_the_presets_say() -> None:
    assert geometry_from_hf_config(LLAMA, "llama-3-70b") == preset("llama-3-70b")
    assert geometry_from_hf_config(DEEPSEEK, "deepseek-v3") == preset("deepseek-v3")


@pytest.mark.parametrize(
    ("change", "kv_heads", "head_dim", "layers"),
    [
        ({"num_key_value_heads": None}, 64, 128, 80),
        ({"head_dim": 64}, 8, 64, 80),
        ({"head_dim": None}, 8, 128, 80),
        ({"multi_query": True}, 1, 128, 80),
        ({"multi_query": True, "new_decoder_architecture": True}, 8, 128, 80),
        ({"layer_types": ["full_attention", "linear_attention"] * 40}, 8, 128, 40),
        ({"layer_types": ["sliding_attention"] * 80}, 8, 128, 80),
        ({"num_kv_shared_layers": 20}, 8, 128, 60),
    ],
)
def test_variants_of_configs_are_understood(
    change: dict[str, object], kv_heads: int, head_dim: int, layers: int
) -> None:
    geometry = geometry_from_hf_config({**LLAMA, **change}, "m")
    assert (geometry.num_kv_heads, geometry.head_dim, geometry.num_layers) == (kv_heads, head_dim, layers)


def test_older_names_of_fields_are_understood() -> None:
    gpt2 = geometry_from_hf_config({"n_layer": 12, "n_head": 12, "n_embd": 768, "n_positions": 1024}, "gpt2")
    assert (gpt2.attention, gpt2.head_dim, gpt2.max_tokens) == (Attention.MHA, 64, 1024)


def test_the_text_part_of_a_model_of_several_modalities_is_read() -> None:
    assert geometry_from_hf_config({"text_config": LLAMA, "num_hidden_layers": 3}, "m").num_layers == 80


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"num_hidden_layers": None}, "num_hidden_layers"),
        ({"num_hidden_layers": "80"}, "num_hidden_layers"),
        ({"num_hidden_layers": True}, "num_hidden_layers"),
        ({"num_hidden_layers": 0}, "num_hidden_layers"),
        ({"num_hidden_layers": 1e3}, "num_hidden_layers"),
        ({"num_hidden_layers": 10**6}, "num_layers"),
        ({"num_attention_heads": -1}, "num_attention_heads"),
        ({"num_key_value_heads": 7}, "num_kv_heads"),
        ({"num_key_value_heads": [8] * 80}, "num_key_value_heads"),
        ({"hidden_size": None}, "hidden_size"),
        ({"hidden_size": 8191}, "hidden_size"),
        ({"is_encoder_decoder": True}, "is_encoder_decoder"),
        ({"layer_types": ["full_attention"]}, "layer_types"),
        ({"layer_types": ["telepathy"] * 80}, "telepathy"),
        ({"layer_types": ["mamba"] * 80}, "no layer"),
        ({"num_kv_shared_layers": 80}, "no layer"),
        ({"kv_lora_rank": 512}, "qk_rope_head_dim"),
    ],
    ids=str,
)
def test_a_config_that_does_not_say_enough_is_refused_by_field(change: dict[str, object], field: str) -> None:
    with pytest.raises(ModelFileError, match=field) as caught:
        geometry_from_hf_config({**LLAMA, **change}, "m", "somewhere/config.json")
    assert "somewhere/config.json" in str(caught.value)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=4,
)


@given(st.dictionaries(st.sampled_from([*LLAMA, *DEEPSEEK, "head_dim", "layer_types", "text_config"]), json_values))
def test_any_json_is_read_or_refused(change: dict[str, object]) -> None:
    for base in (LLAMA, DEEPSEEK):
        try:
            assert geometry_from_hf_config({**base, **change}, "m").bytes_per_token(DType.BF16) > 0
        except ModelFileError:
            pass


def test_a_folder_is_named_after_and_its_config_read(tmp_path: Path) -> None:
    folder = tmp_path / "my-model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(LLAMA))
    assert load_geometry(folder).name == "my-model"
    assert load_geometry(folder / "config.json") == load_hf_config(folder / "config.json")
    assert load_hf_config(folder / "config.json", "llama-3-70b") == preset("llama-3-70b")


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (b"{", "JSON"),
        (b"[]", "object"),
        (b"\xff", "JSON"),
        (b"[" * 100_000, "JSON"),
        (b" " * ((1 << 20) + 1), "larger"),
    ],
    ids=["cut", "list", "not text", "deep", "large"],
)
def test_a_file_that_is_no_config_is_refused(tmp_path: Path, content: bytes, why: str) -> None:
    path = tmp_path / "config.json"
    path.write_bytes(content)
    with pytest.raises(ModelFileError, match=why):
        load_geometry(path)


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    for name in ("config.json", "model.gguf"):
        with pytest.raises(ModelFileError, match="No such file"):
            load_geometry(tmp_path / name)


def write_gguf(path: Path, architecture: str, **values: int | list[int]) -> Path:
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_name("from-gguf")
    writer.add_token_list([b"a", b"b"])
    for key, value in values.items():
        name = f"{architecture}.{key.replace('__', '.')}"
        if isinstance(value, list):
            writer.add_array(name, value)
        else:
            writer.add_uint32(name, value)
    writer.add_tensor("weight", np.zeros((4, 4), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


SMOL: dict[str, Any] = {
    "block_count": 30,
    "context_length": 8192,
    "embedding_length": 576,
    "attention__head_count": 9,
    "attention__head_count_kv": 3,
}


def test_a_gguf_file_gives_what_the_preset_says(tmp_path: Path) -> None:
    geometry = load_geometry(write_gguf(tmp_path / "model.gguf", "llama", **SMOL))
    assert geometry.name == "from-gguf"
    assert geometry.bytes_per_token(DType.FP32) == preset("smollm2-135m").bytes_per_token(DType.FP32) == 46_080


def test_gguf_layers_without_kv_are_not_counted(tmp_path: Path) -> None:
    heads = [3, 0, 0] * 10
    path = write_gguf(tmp_path / "m.gguf", "lfm2", **{**SMOL, "attention__head_count_kv": heads})
    assert (load_gguf(path).num_layers, load_gguf(path).num_kv_heads) == (10, 3)
    mixed = write_gguf(tmp_path / "n.gguf", "lfm2", **{**SMOL, "attention__head_count_kv": [3, 9, 1] * 10})
    with pytest.raises(ModelFileError, match="head_count_kv"):
        load_gguf(mixed)


@pytest.mark.parametrize(
    "sizes",
    [
        {"key_length": 192, "value_length": 128, "head_count_kv": 128},
        {"key_length": 576, "value_length": 512, "head_count_kv": 1, "key_length_mla": 192, "value_length_mla": 128},
    ],
    ids=["older files", "newer files"],
)
def test_latent_attention_in_gguf_is_understood_in_both_forms(sizes: dict[str, int]) -> None:
    metadata: dict[str, object] = {
        "general.architecture": "deepseek2",
        "deepseek2.block_count": 61,
        "deepseek2.context_length": 163840,
        "deepseek2.attention.head_count": 128,
        "deepseek2.attention.kv_lora_rank": 512,
        "deepseek2.rope.dimension_count": 64,
        **{f"deepseek2.attention.{key}": value for key, value in sizes.items()},
    }
    assert geometry_from_gguf_metadata(metadata, "deepseek-v3") == preset("deepseek-v3")


@pytest.mark.parametrize("key", ["general.architecture", "llama.block_count", "llama.attention.head_count"])
def test_gguf_metadata_without_a_key_is_refused_by_name(key: str) -> None:
    metadata: dict[str, object] = {f"llama.{name.replace('__', '.')}": value for name, value in SMOL.items()}
    metadata["general.architecture"] = "llama"
    assert geometry_from_gguf_metadata(metadata, "m").num_layers == 30
    del metadata[key]
    with pytest.raises(ModelFileError, match=key):
        geometry_from_gguf_metadata(metadata, "m")


@given(st.data())
def test_a_damaged_gguf_file_is_read_or_refused(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    folder = tmp_path_factory.getbasetemp()
    good = folder / "good.gguf"
    if not good.exists():
        write_gguf(good, "llama", **SMOL)
    raw = bytearray(good.read_bytes())
    for _ in range(data.draw(st.integers(0, 3))):
        raw[data.draw(st.integers(0, 400))] = data.draw(st.integers(0, 255))
    bad = folder / "bad.gguf"
    bad.write_bytes(raw[: data.draw(st.integers(0, len(raw)))])
    try:
        load_gguf(bad)
    except ModelFileError:
        pass


def test_without_the_extra_the_error_names_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(MissingExtraError, match=r"kv-core\[gguf\]"):
        load_geometry(tmp_path / "model.gguf")

"""KV arithmetic: the figures that people quote, and the laws behind them."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kv_core.dtypes import DType
from kv_core.geometry import Attention, InvalidGeometryError, ModelGeometry, attention_of
from kv_core.presets import UnknownModelError, preset, preset_names
from kv_core.testing.strategies import dtypes, model_geometries

LLAMA = preset("llama-3-70b")


def test_llama_3_70b_gives_both_figures_that_people_quote() -> None:
    full = LLAMA.with_attention(Attention.MHA)
    assert full.bytes_per_token_per_layer(DType.FP16) == 32_768
    assert full.bytes_per_token(DType.FP16) == 2_621_440
    assert full.bytes_per_sequence(131_072, DType.FP16) == 343_597_383_680
    assert LLAMA.bytes_per_token_per_layer(DType.FP16) == 4096
    assert LLAMA.bytes_per_token(DType.FP16) == 320 * 1024
    assert LLAMA.bytes_per_sequence(131_072, DType.FP16) == 40 << 30


@pytest.mark.parametrize(
    ("name", "dtype", "per_token"),
    [
        ("smollm2-135m", DType.FP32, 46_080),
        ("smollm2-135m", DType.BF16, 23_040),
        ("llama-2-7b", DType.FP16, 524_288),
        ("llama-2-13b", DType.FP16, 819_200),
        ("llama-2-70b", DType.FP16, 327_680),
        ("llama-3-8b", DType.BF16, 131_072),
        ("llama-3.1-8b", DType.FP8_E4M3, 65_536),
        ("llama-3.1-70b", DType.BF16, 327_680),
        ("qwen2.5-7b", DType.BF16, 57_344),
        ("qwen2.5-72b", DType.BF16, 327_680),
        ("mistral-7b", DType.BF16, 131_072),
        ("deepseek-v3", DType.BF16, 70_272),
    ],
)
def test_presets_have_the_published_sizes(name: str, dtype: DType, per_token: int) -> None:
    assert preset(name).bytes_per_token(dtype) == per_token


def test_presets_cover_what_is_promised_and_name_themselves() -> None:
    assert all(preset(name).name == name for name in preset_names())
    sizes = ["0.5b", "1.5b", "3b", "7b", "14b", "32b", "72b"]
    promised = {f"qwen2.5-{size}" for size in sizes} | {"llama-3-8b", "llama-3-70b", "llama-3.1-8b", "llama-3.1-70b"}
    assert promised | {"mistral-7b", "deepseek-v3", "smollm2-135m"} <= set(preset_names())


def test_an_unknown_model_is_refused_with_the_known_ones() -> None:
    with pytest.raises(UnknownModelError, match="llama-3-70b"):
        preset("llama-3-71b")


@given(model_geometries(), dtypes(), st.integers(0, 10_000), st.integers(0, 10_000))
def test_bytes_are_linear_in_tokens_and_layers(geometry: ModelGeometry, dtype: DType, a: int, b: int) -> None:
    size = geometry.bytes_per_sequence
    assert size(a, dtype) + size(b, dtype) == size(a + b, dtype)
    assert size(1, dtype) == geometry.bytes_per_token(dtype)
    assert size(1, dtype) == geometry.num_layers * geometry.bytes_per_token_per_layer(dtype)


@given(model_geometries(), dtypes(), st.integers(1, 64))
def test_a_block_has_the_size_of_its_tokens(geometry: ModelGeometry, dtype: DType, block_size: int) -> None:
    block = geometry.block_geometry(dtype, block_size)
    assert block.block_nbytes == geometry.bytes_per_sequence(block_size, dtype)


@given(model_geometries(), dtypes())
def test_other_attentions_share_heads_as_they_say(geometry: ModelGeometry, dtype: DType) -> None:
    full, one = geometry.with_attention(Attention.MHA), geometry.with_attention(Attention.MQA)
    assert full.bytes_per_token(dtype) == geometry.num_heads * one.bytes_per_token(dtype)
    assert full.attention is attention_of(full.num_heads, full.num_kv_heads) is Attention.MHA
    assert geometry.with_attention(geometry.attention) == geometry


@pytest.mark.parametrize(
    ("name", "attention"),
    [("llama-2-7b", Attention.GQA), ("llama-3-8b", Attention.MLA), ("deepseek-v3", Attention.GQA)],
)
def test_an_attention_whose_dimensions_are_unknown_is_refused(name: str, attention: Attention) -> None:
    with pytest.raises(InvalidGeometryError, match="unknown"):
        preset(name).with_attention(attention)


def test_latent_attention_without_compression_stores_keys_and_values_of_their_own_sizes() -> None:
    full = preset("deepseek-v3").with_attention(Attention.MHA)
    assert full.bytes_per_token_per_layer(DType.BF16) == 128 * (192 + 128) * 2
    with pytest.raises(InvalidGeometryError, match="v_head_dim"):
        full.block_geometry(DType.BF16, 16)


def test_a_rank_holds_its_layers_and_heads() -> None:
    whole = LLAMA.block_geometry(DType.FP16, 16)
    part = LLAMA.block_geometry(DType.FP16, 16, num_layers=20, tp_size=4)
    assert (part.num_layers, part.num_kv_heads) == (20, 2)
    assert part.block_nbytes * 16 == whole.block_nbytes


def test_more_ranks_than_heads_hold_copies_and_latent_vectors_are_never_split() -> None:
    assert LLAMA.block_geometry(DType.FP16, 16, tp_size=16).num_kv_heads == 1
    latent = preset("deepseek-v3")
    assert latent.block_geometry(DType.BF16, 16, tp_size=8) == latent.block_geometry(DType.BF16, 16)


@pytest.mark.parametrize("ranks", [0, 3, -1, True])
def test_ranks_that_do_not_divide_the_heads_are_refused(ranks: int) -> None:
    with pytest.raises(InvalidGeometryError, match="tp_size"):
        LLAMA.block_geometry(DType.FP16, 16, tp_size=ranks)


@pytest.mark.parametrize("num_layers", [0, 81])
def test_layers_that_the_model_has_not_are_refused(num_layers: int) -> None:
    with pytest.raises(InvalidGeometryError, match="num_layers"):
        LLAMA.block_geometry(DType.FP16, 16, num_layers=num_layers)


@pytest.mark.parametrize(
    "fields",
    [
        {"num_layers": 0},
        {"num_heads": 0},
        {"num_kv_heads": 3},
        {"num_kv_heads": 128},
        {"num_kv_heads": 64},
        {"attention": Attention.MHA},
        {"attention": Attention.MLA},
        {"head_dim": 0},
        {"head_dim": True},
        {"head_dim": 1.5},
        {"latent_dim": 512},
        {"rope_dim": 64},
        {"max_tokens": -1},
        {"v_head_dim": -1},
    ],
    ids=str,
)
def test_dimensions_that_cannot_be_are_refused(fields: dict[str, int]) -> None:
    with pytest.raises(InvalidGeometryError, match="llama-3-70b"):
        replace(LLAMA, **fields)  # type: ignore[arg-type]


def test_a_negative_length_is_refused() -> None:
    with pytest.raises(InvalidGeometryError, match="num_tokens"):
        LLAMA.bytes_per_sequence(-1, DType.FP16)

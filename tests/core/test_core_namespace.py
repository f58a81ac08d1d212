"""Identity: every field that changes the numbers or who may see them gives other names, and nothing else does."""

from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kv_core.block import Layout
from kv_core.dtypes import DType
from kv_core.hashing import hash_tokens
from kv_core.namespace import EXACT, Fidelity, InvalidNamespaceError, Namespace, Shape
from kv_core.testing.strategies import fidelities, namespaces
from tests.core import plain_hashing
from tests.core.helpers_core import fields_of

BASE = Namespace("llama", "main", "adapter", "v1", "salt", DType.BF16, EXACT, 16)
TOKENS = list(range(64))


@pytest.mark.parametrize(
    "change",
    [
        lambda ns: replace(ns, model_id="llama2"),
        lambda ns: replace(ns, weights_revision="main2"),
        lambda ns: replace(ns, lora_name="adapter2"),
        lambda ns: replace(ns, lora_revision="v2"),
        lambda ns: replace(ns, lora_name=None, lora_revision=None),
        lambda ns: replace(ns, salt="salt2"),
        lambda ns: replace(ns, salt=""),
        lambda ns: replace(ns, dtype=DType.FP8_E4M3),
        lambda ns: replace(ns, fidelity=Fidelity("fp8_e4m3", 1)),
        lambda ns: replace(ns, fidelity=Fidelity("fp8_e4m3", 2)),
        lambda ns: replace(ns, block_size=32),
    ],
)
def test_every_field_keeps_names_apart(change: Callable[[Namespace], Namespace]) -> None:
    other = change(BASE)
    ours, theirs = hash_tokens(BASE, TOKENS), hash_tokens(other, TOKENS)
    assert not {block.sequence for block in ours} & {block.sequence for block in theirs}
    assert not {block.check for block in ours} & {block.check for block in theirs}


def test_an_adapter_named_like_a_salt_is_not_that_salt() -> None:
    adapter = Namespace("m", "r", lora_name="x", lora_revision="x")
    salt = Namespace("m", "r", salt="x")
    assert adapter.digest != salt.digest


short = st.text("ab", min_size=1, max_size=2)
short_namespaces = st.builds(Namespace, short, short, short, short, short)


@given(short_namespaces, short_namespaces)
def test_moving_a_letter_over_a_border_gives_another_digest(one: Namespace, two: Namespace) -> None:
    assert (one == two) == (one.digest == two.digest)


def test_salt_ab_with_adapter_c_is_not_salt_a_with_adapter_bc() -> None:
    one = Namespace("m", "r", lora_name="c", lora_revision="v", salt="ab")
    two = Namespace("m", "r", lora_name="bc", lora_revision="v", salt="a")
    assert one.digest != two.digest


@given(namespaces(), namespaces())
def test_the_digest_is_equal_exactly_when_the_fields_are(one: Namespace, two: Namespace) -> None:
    assert (one == two) == (one.digest == two.digest) == (one.canonical() == two.canonical())
    assert one.digest == plain_hashing.namespace_digest(fields_of(one))
    assert one.check_seed == plain_hashing.crc32c(one.digest)


def test_two_adapters_over_the_same_tokens_share_no_key() -> None:
    one = Namespace("m", "r", lora_name="a", lora_revision="v1")
    two = Namespace("m", "r", lora_name="b", lora_revision="v1")
    assert not set(hash_tokens(one, TOKENS)) & set(hash_tokens(two, TOKENS))


def test_no_extras_and_an_empty_list_of_extras_are_the_same_and_an_adapter_is_found_by_its_name() -> None:
    """What an engine's event says (no extra keys; an adapter by name) must meet the query, and only that query."""
    plain, adapter = Namespace("m", "r"), Namespace("m", "r", lora_name="a", lora_revision="v1")
    stored = {block.sequence: "plain" for block in hash_tokens(plain, TOKENS)}
    stored |= {block.sequence: "adapter" for block in hash_tokens(adapter, TOKENS)}
    assert [stored[block.sequence] for block in hash_tokens(Namespace("m", "r"), TOKENS, [])] == ["plain"] * 4
    again = Namespace("m", "r", lora_name="a", lora_revision="v1")
    assert [stored[block.sequence] for block in hash_tokens(again, TOKENS, ())] == ["adapter"] * 4
    unknown = Namespace("m", "r", lora_name="b", lora_revision="v1")
    assert not any(block.sequence in stored for block in hash_tokens(unknown, TOKENS))


@pytest.mark.parametrize(
    ("what", "fields"),
    [
        ("model_id", {"model_id": ""}),
        ("model_id", {"model_id": "x" * 256}),
        ("model_id", {"model_id": "é" * 128}),
        ("model_id", {"model_id": "\ud800"}),
        ("model_id", {"model_id": 5}),
        ("weights_revision", {"weights_revision": ""}),
        ("lora_name", {"lora_name": ""}),
        ("lora_revision", {"lora_revision": None}),
        ("lora_revision", {"lora_name": None}),
        ("salt", {"salt": "x" * 256}),
        ("block_size", {"block_size": 0}),
        ("block_size", {"block_size": 4097}),
        ("block_size", {"block_size": True}),
        ("block_size", {"block_size": 16.0}),
    ],
)
def test_a_field_that_cannot_be_is_refused_by_name(what: str, fields: dict[str, object]) -> None:
    with pytest.raises(InvalidNamespaceError, match=what):
        replace(BASE, **fields)  # type: ignore[arg-type]


@given(fidelities())
def test_fidelity_reads_its_own_text(fidelity: Fidelity) -> None:
    assert Fidelity.parse(str(fidelity)) == fidelity
    assert fidelity.is_exact == (str(fidelity) == "exact")


@pytest.mark.parametrize(
    "text",
    ["", "Exact", "fp8", "fp8/", "/1", "fp8/0", "fp8/01", "fp8/-1", "fp8/1.0", "a b/1", "exact/1", "fp8/²", "x/y/1"],
)
def test_other_text_is_no_fidelity(text: str) -> None:
    with pytest.raises(InvalidNamespaceError):
        Fidelity.parse(text)


@pytest.mark.parametrize("version", [0, -1, 1 << 32, True, 1.0])
def test_a_codec_needs_a_version(version: int) -> None:
    with pytest.raises(InvalidNamespaceError):
        Fidelity("fp8", version)


def test_a_version_needs_a_codec() -> None:
    with pytest.raises(InvalidNamespaceError):
        Fidelity("", 1)


def test_a_namespace_does_not_show_its_salt_by_accident() -> None:
    assert "secret" not in repr(Namespace("m", "r", salt="secret"))


def test_shape_knows_its_layers() -> None:
    shape = Shape(Layout.LAYER_FIRST, 1, 2, 4, 10)
    assert shape.num_layers == 6


@pytest.mark.parametrize(
    "numbers", [(2, 2, 0, 1), (-1, 2, 0, 1), (0, 0, 0, 1), (0, 1, 3, 3), (0, 1, -1, 3), (0, 1, 0, 4097)]
)
def test_a_shape_that_cannot_be_is_refused(numbers: tuple[int, int, int, int]) -> None:
    with pytest.raises(InvalidNamespaceError):
        Shape(Layout.BLOCK_FIRST, *numbers)

"""The names of blocks: against the plain twin, against stored vectors, and in other processes and interpreters."""

import json
import os
import shutil
import subprocess
import sys
from array import array
from pathlib import Path

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kv_core import limits
from kv_core.block import BlockRef
from kv_core.dtypes import parse_dtype
from kv_core.hashing import (
    BlockHash,
    Extra,
    HashChain,
    InvalidTokensError,
    Tokens,
    extend,
    extend_columns,
    hash_tokens,
    local_hashes,
    token_bytes,
    token_digest,
    token_view,
)
from kv_core.ids import Generation, RegionId
from kv_core.namespace import Fidelity, Namespace
from kv_core.testing import truncated_hashes
from kv_core.testing.strategies import extras, namespaces, token_lists
from tests.core import plain_hashing
from tests.core.helpers_core import contents_of, fields_of


class Vector(msgspec.Struct):
    name: str
    namespace: tuple[str, str, str | None, str | None, str, str, str, int]
    tokens: list[int]
    extras: list[tuple[int, int, str]]
    digest: str
    blocks: list[tuple[str, int]]
    token_digest: str


STORED = (Path(__file__).parent / "hash_vectors.json").read_bytes()
VECTORS = msgspec.json.decode(STORED, type=list[Vector])
NS = Namespace("llama-3-8b", "main")


def named(namespace: Namespace, tokens: Tokens, extra: tuple[Extra, ...] = ()) -> list[tuple[bytes, int]]:
    return [(block.sequence, block.check) for block in hash_tokens(namespace, tokens, extra)]


@pytest.mark.parametrize("vector", VECTORS, ids=lambda vector: vector.name)
def test_names_are_those_of_the_stored_vectors(vector: Vector) -> None:
    model, revision, lora, lora_revision, salt, dtype, fidelity, block_size = vector.namespace
    stored, exactness = parse_dtype(dtype), Fidelity.parse(fidelity)
    namespace = Namespace(model, revision, lora, lora_revision, salt, stored, exactness, block_size)
    content = tuple(Extra(start, bytes.fromhex(digest), length) for start, length, digest in vector.extras)
    assert namespace.digest.hex() == vector.digest
    assert [(s.hex(), c) for s, c in named(namespace, vector.tokens, content)] == vector.blocks
    assert token_digest(vector.tokens, content).hex() == vector.token_digest


def test_the_stored_vectors_are_what_the_plain_twin_makes() -> None:
    assert plain_hashing.vectors() == json.loads(STORED)


@given(st.data(), namespaces(block_size=4) | namespaces(block_size=1) | namespaces(block_size=70), token_lists())
def test_names_are_those_of_the_plain_twin(data: st.DataObject, namespace: Namespace, tokens: list[int]) -> None:
    content = data.draw(extras(len(tokens)))
    expected = plain_hashing.block_names(fields_of(namespace), tokens, contents_of(content))
    assert named(namespace, tokens, tuple(content)) == expected
    assert token_digest(tokens, content) == plain_hashing.token_digest(tokens, contents_of(content))


def test_cutting_many_blocks_at_once_gives_every_block() -> None:
    tokens = array("I", range(16 * 200 + 5))
    assert named(NS, tokens) == plain_hashing.block_names(fields_of(NS), tokens)


@given(st.data(), token_lists(), st.lists(st.integers(0, 20), max_size=12))
def test_extending_in_any_steps_is_the_same_as_hashing_at_once(
    data: st.DataObject, tokens: list[int], steps: list[int]
) -> None:
    namespace = Namespace("m", "r", block_size=4)
    content = sorted(data.draw(extras(len(tokens))), key=lambda extra: extra.start)
    chain, names, at = HashChain(namespace), [], 0
    for step in [*steps, len(tokens)]:
        end = min(at + step, len(tokens))
        names += chain.extend(tokens[at:end], [extra for extra in content if at <= extra.start < end])
        at = end
    assert names == hash_tokens(namespace, tokens, content)
    assert chain.num_tokens == len(tokens)
    assert chain.last == (names[-1] if names else None)


def test_extend_continues_from_a_parent() -> None:
    tokens = list(range(64))
    whole = hash_tokens(NS, tokens)
    assert extend(NS, whole[1], 32, tokens[32:]) == whole[2:]
    assert extend_columns(NS, whole[1], 32, tokens[32:]) == (
        [b.sequence for b in whole[2:]],
        [b.check for b in whole[2:]],
    )


@pytest.mark.parametrize(("parent", "start"), [(None, 16), (BlockHash(bytes(16), 0), 0), (BlockHash(bytes(16), 0), 8)])
def test_extend_refuses_a_position_that_the_parent_cannot_have(parent: BlockHash | None, start: int) -> None:
    with pytest.raises(InvalidTokensError, match=f"position {start}"):
        extend(NS, parent, start, range(16))


def test_a_partial_block_has_no_name() -> None:
    assert hash_tokens(NS, range(15)) == []
    assert len(hash_tokens(NS, range(33))) == 2


@pytest.mark.parametrize(
    "tokens",
    [
        (5, 6, 7),
        range(5, 8),
        array("I", [5, 6, 7]),
        np.array([5, 6, 7], dtype=np.uint32),
        memoryview(array("I", [5, 6, 7])),
        memoryview(b"\x05\0\0\0\x06\0\0\0\x07\0\0\0"),
        bytearray(b"\x05\0\0\0\x06\0\0\0\x07\0\0\0"),
        np.array([5, 0, 6, 0, 7], dtype="<u4")[::2],
    ],
    ids=lambda tokens: f"{type(tokens).__name__}",
)
def test_every_form_of_tokens_gives_the_same_bytes(tokens: Tokens) -> None:
    assert token_bytes(tokens) == b"\x05\0\0\0\x06\0\0\0\x07\0\0\0"


@given(st.lists(st.integers(0, (1 << 32) - 1)))
def test_a_view_of_raw_tokens_is_their_integers_and_gives_the_same_bytes(tokens: list[int]) -> None:
    raw = b"".join(token.to_bytes(4, "little") for token in tokens)
    view = token_view(raw)
    assert list(view) == tokens and len(view) == len(tokens)
    assert token_bytes(view) == raw and token_bytes(view[1:]) == raw[4:]
    with pytest.raises(InvalidTokensError, match="whole number"):
        token_view(raw + b"x")
    with pytest.raises(TypeError):
        view[:1] = view[:1]  # type: ignore[index]


@pytest.mark.parametrize(
    "tokens",
    [
        [-1],
        [1 << 32],
        ["5"],
        [1.5],
        b"abc",
        array("Q", [1]),
        array("i", [1]),
        array("f", [1.0]),
        np.array([1], dtype=np.int64),
        np.array([[1]], dtype=np.uint32),
        "text",
        None,
        5,
    ],
    ids=repr,
)
def test_what_is_no_list_of_uint32_is_refused(tokens: Tokens) -> None:
    with pytest.raises(InvalidTokensError):
        hash_tokens(NS, tokens)


def test_too_many_tokens_are_refused() -> None:
    with pytest.raises(InvalidTokensError, match="more than"):
        hash_tokens(NS, bytes(4 * (limits.MAX_TOKENS_PER_REQUEST + 16)))


def test_two_pictures_behind_the_same_placeholders_differ_from_their_first_block_on() -> None:
    tokens = [7] * 20 + [0] * 40 + [8] * 20  # the run of placeholders begins in block 1
    first, second = Extra(20, b"picture one", 40), Extra(20, b"picture two", 40)
    one, two = hash_tokens(NS, tokens, [first]), hash_tokens(NS, tokens, [second])
    text = hash_tokens(NS, tokens)
    assert one[0] == two[0] == text[0]
    for names in zip(one[1:], two[1:], text[1:], strict=True):
        assert len({name.sequence for name in names}) == len({name.check for name in names}) == 3
    assert token_digest(tokens, [Extra(20, b"picture one", 40)]) != token_digest(
        tokens, [Extra(20, b"picture two", 40)]
    )


def test_the_same_picture_twice_gives_the_same_names() -> None:
    first, again = Extra(20, b"picture", 40), Extra(20, b"picture", 40)
    assert hash_tokens(NS, range(80), [first]) == hash_tokens(NS, range(80), [again])


def test_the_order_in_which_extras_are_given_does_not_matter() -> None:
    a, b = Extra(3, b"a"), Extra(9, b"b")
    assert hash_tokens(NS, range(16), [a, b]) == hash_tokens(NS, range(16), [b, a])
    assert token_digest(range(16), [a, b]) == token_digest(range(16), [b, a])


def test_the_borders_between_extras_are_part_of_the_name() -> None:
    names = {
        hash_tokens(NS, range(16), content)[0]
        for content in (
            [Extra(3, b"ab"), Extra(9, b"c")],
            [Extra(3, b"a"), Extra(9, b"bc")],
            [Extra(3, b"abc")],
            [Extra(9, b"abc")],
            [],
        )
    }
    assert len(names) == 5


@pytest.mark.parametrize("bad", [(-1, b"x", 1), (1, b"", 1), (1, b"x", 0), (1, b"x" * 65, 1), (1 << 20, b"x", 1)])
def test_an_extra_out_of_range_is_refused(bad: tuple[int, bytes, int]) -> None:
    with pytest.raises(InvalidTokensError):
        Extra(*bad)


def test_the_same_extra_twice_and_too_many_extras_are_refused() -> None:
    with pytest.raises(InvalidTokensError, match="twice"):
        hash_tokens(NS, range(16), [Extra(1, b"x"), Extra(1, b"x")])
    with pytest.raises(InvalidTokensError, match="extras"):
        hash_tokens(NS, range(16), [Extra(1, b"%d" % i) for i in range(limits.MAX_EXTRAS_PER_REQUEST + 1)])


def test_a_chain_refuses_content_for_tokens_that_are_named_and_stays_as_it_was() -> None:
    chain = HashChain(NS)
    chain.extend(range(20))
    with pytest.raises(InvalidTokensError, match="position 16"):
        chain.extend(range(12), [Extra(15, b"late")])
    assert chain.num_tokens == 20
    assert (
        chain.extend(range(20, 32), [Extra(16, b"in time")]) == hash_tokens(NS, range(32), [Extra(16, b"in time")])[1:]
    )


def test_equal_truncated_hashes_are_told_apart_by_the_tokens() -> None:
    """A hash that collides at will: 8 bits of the sequence hash are left, none of the check."""
    seen: dict[BlockHash, list[int]] = {}
    for salt in range(2000):
        tokens = [salt] * 16
        (name,) = truncated_hashes(hash_tokens(NS, tokens), bits=8)
        other = seen.setdefault(name, tokens)
        if other != tokens:
            assert token_digest(other) != token_digest(tokens)
            break
    else:
        pytest.fail("no collision in 8 bits")


def test_equal_child_tokens_under_another_parent_have_another_name_and_another_digest() -> None:
    child = list(range(16))
    one, two = hash_tokens(NS, [1] * 16 + child), hash_tokens(NS, [2] * 16 + child)
    assert one[1].sequence != two[1].sequence
    assert one[1].check != two[1].check
    assert local_hashes(16, [1] * 16 + child)[1] == local_hashes(16, [2] * 16 + child)[1]
    assert token_digest([1] * 16 + child) != token_digest([2] * 16 + child)


def test_local_hashes_see_tokens_and_extras_of_their_own_block_only() -> None:
    plain = local_hashes(4, range(12))
    with_picture = local_hashes(4, range(12), [Extra(5, b"picture")])
    assert [a == b for a, b in zip(plain, with_picture, strict=True)] == [True, False, True]


def test_names_and_references_are_values() -> None:
    assert len({BlockHash(b"a" * 16, 1), BlockHash(b"a" * 16, 1)}) == 1
    reference = BlockRef(RegionId(1), 2, Generation(3))
    assert reference == BlockRef(RegionId(1), 2, Generation(3))
    assert reference < BlockRef(RegionId(1), 2, Generation(4))


_IN_ANOTHER_PROCESS = """
import json, sys
from kv_core.hashing import Extra, hash_tokens, token_digest
from kv_core.namespace import Namespace
out = []
for ns in (Namespace("m", "r"), Namespace("m", "r", "adapter", "v1", "salt")):
    blocks = hash_tokens(ns, list(range(48)), [Extra(20, b"picture", 4)])
    out.append([ns.digest.hex(), [[b.sequence.hex(), b.check] for b in blocks], token_digest(list(range(48))).hex()])
json.dump(out, sys.stdout)
"""


def test_four_processes_with_different_hash_seeds_give_the_same_names() -> None:
    outputs = []
    for seed in ("0", "1", "12345", "random"):
        environment = {**os.environ, "PYTHONHASHSEED": seed}
        done = subprocess.run(
            [sys.executable, "-c", _IN_ANOTHER_PROCESS], env=environment, capture_output=True, text=True, timeout=60
        )
        assert done.returncode == 0, done.stderr
        outputs.append(json.loads(done.stdout))
    first = Namespace("m", "r")
    names = hash_tokens(first, list(range(48)), [Extra(20, b"picture", 4)])
    assert outputs[0][0][:2] == [first.digest.hex(), [[b.sequence.hex(), b.check] for b in names]]
    assert all(output == outputs[0] for output in outputs[1:])


def _other_interpreters() -> list[str]:
    found = []
    for minor in range(8, 16):
        path = shutil.which(f"python3.{minor}")
        # A name on the path may be a stand-in for a version that is not installed.
        if path and subprocess.run([path, "-c", ""], capture_output=True, timeout=60).returncode == 0:
            found.append(path)
    return found


@pytest.mark.parametrize("interpreter", _other_interpreters())
def test_other_python_versions_give_the_same_vectors(interpreter: str) -> None:
    script = Path(plain_hashing.__file__)
    done = subprocess.run([interpreter, str(script)], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == json.loads(STORED)


@pytest.mark.parametrize("interpreter", _other_interpreters())
def test_other_python_versions_give_the_same_names(interpreter: str) -> None:
    source = Path(sys.modules["kv_core.hashing"].__file__ or "").parents[1]
    environment = {**os.environ, "PYTHONPATH": str(source)}
    check = "import sys; assert sys.version_info >= (3, 11); import kv_core.hashing"
    if subprocess.run([interpreter, "-c", check], env=environment, capture_output=True, timeout=60).returncode:
        pytest.skip("it has not what kv-core needs")
    done = subprocess.run(
        [interpreter, "-c", _IN_ANOTHER_PROCESS], env=environment, capture_output=True, text=True, timeout=60
    )
    names = hash_tokens(Namespace("m", "r"), list(range(48)), [Extra(20, b"picture", 4)])
    assert json.loads(done.stdout)[0][1] == [[block.sequence.hex(), block.check] for block in names]

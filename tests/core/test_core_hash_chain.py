"""The compiled hash chain against its plain twin, and packed names against lists of them."""

import importlib
import sys
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kv_core import hash_chain
from kv_core.block_hashes import BlockHash, BlockHashes, InvalidNamesError
from kv_core.hashing import Extra, extend_packed, hash_packed, hash_tokens
from kv_core.namespace import Namespace

NAMES = st.builds(BlockHash, st.binary(min_size=16, max_size=16), st.integers(0, 2**32 - 1))
compiled = pytest.mark.skipif(not hash_chain.COMPILED, reason="installed without a compiler")


@compiled
@given(st.binary(max_size=700), st.integers(1, 80), NAMES)
def test_the_compiled_chain_gives_the_names_of_the_plain_one(raw: bytes, block_size: int, parent: BlockHash) -> None:
    """Block sizes on both sides of every boundary between XXH3's variants, and beyond what is compiled."""
    named = hash_chain.chain_blocks(raw, 4 * block_size, parent.sequence, parent.check)
    assert named == hash_chain.plain_chain_blocks(raw, 4 * block_size, parent.sequence, parent.check)


@compiled
@pytest.mark.parametrize("block_size", range(1, 58))
def test_every_block_size_agrees_over_a_chain(block_size: int) -> None:
    raw = bytes(i * i * 31 % 251 for i in range(4 * block_size * 7 + 3))
    plain = hash_chain.plain_chain_blocks(raw, 4 * block_size, bytes(range(16)), 7)
    assert hash_chain.chain_blocks(raw, 4 * block_size, bytes(range(16)), 7) == plain
    assert len(plain) == 7 * hash_chain.PACKED_BYTES


@compiled
def test_the_kernel_refuses_what_it_cannot_take() -> None:
    from kv_core import _hash_chain

    for nbytes, parent in ((3, 16), (0, 16), (-4, 16), (64, 15), (228, 16)):
        with pytest.raises(ValueError, match="parent"):
            _hash_chain.chain_blocks(b"", nbytes, bytes(parent), 0)


@given(st.lists(NAMES, max_size=9))
def test_packing_loses_nothing(names: list[BlockHash]) -> None:
    columns = [name.sequence for name in names], [name.check for name in names]
    assert hash_chain.pack_columns(*columns) == hash_chain.plain_pack_columns(*columns)
    packed = BlockHashes.of(names)
    assert (list(packed), len(packed)) == (names, len(names))
    assert packed == names and packed == tuple(names) and packed != [*names, *names, BlockHash(bytes(16), 0)]
    assert [packed[i] for i in range(-len(names), len(names))] == [*names, *names]
    for cut in (slice(1, None), slice(None, -1), slice(2, 5), slice(None, None, 2), slice(None, None, -1)):
        assert packed[cut] == names[cut]
    assert BlockHashes.of(packed) is packed


@pytest.mark.parametrize(
    ("sequences", "checks"),
    [([bytes(15)], [0]), ([bytes(17), bytes(15)], [0, 0]), ([bytes(16)], [1 << 32]), ([bytes(16)], [-1]),
     ([bytes(16)], []), ([bytes(16)], [1 << 70])],
)  # fmt: skip
def test_names_of_the_wrong_size_are_refused(sequences: list[bytes], checks: list[int]) -> None:
    with pytest.raises(InvalidNamesError):
        BlockHashes.of_columns(sequences, checks)
    with pytest.raises(ValueError, match=r".+"):
        hash_chain.plain_pack_columns(sequences, checks)


def test_half_a_name_and_a_name_that_is_not_there_are_refused() -> None:
    with pytest.raises(InvalidNamesError, match="19 bytes"):
        BlockHashes(bytes(19))
    with pytest.raises(IndexError):
        BlockHashes(bytes(20))[1]


@given(st.lists(st.integers(0, 2**32 - 1), max_size=40), st.sets(st.integers(0, 39), max_size=3))
def test_packed_hashing_equals_hashing_with_and_without_extras(tokens: list[int], starts: set[int]) -> None:
    namespace = Namespace("m", "r", block_size=3)
    extras = [Extra(start, b"picture", 5) for start in sorted(starts)]
    names = hash_tokens(namespace, tokens, extras)
    assert hash_packed(namespace, tokens, extras) == names
    if len(names) > 1:
        rest = extend_packed(namespace, names[0], 3, tokens[3:], [extra for extra in extras if extra.start >= 3])
        if all(extra.start >= 3 for extra in extras):
            assert rest == names[1:]


@pytest.fixture
def uncompiled(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The module as it is where no compiler was."""
    monkeypatch.setitem(sys.modules, "kv_core._hash_chain", None)
    monkeypatch.delattr("kv_core._hash_chain", raising=False)
    importlib.reload(hash_chain)
    yield
    monkeypatch.undo()
    importlib.reload(hash_chain)


def test_without_a_compiler_the_twin_stands_in(uncompiled: None) -> None:
    assert not hash_chain.COMPILED
    raw = bytes(range(200))
    named = hash_chain.chain_blocks(raw, 64, bytes(16), 0)
    assert named == hash_chain.plain_chain_blocks(raw, 64, bytes(16), 0)
    assert len(hash_chain.pack_columns([bytes(16)], [1])) == hash_chain.PACKED_BYTES

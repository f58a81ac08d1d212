"""The compiled table against its plain twin; both against a walk over sets through `test_prefix_index`."""

import importlib
import random
import sys
from array import array
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kv_core.block_hashes import BlockHashes
from kv_core.hashing import BlockHash
from kv_prefix import index_table
from kv_prefix.index_table import NOT_ANSWERED, TIERS, BitTable, PlainBitTable, make_bit_table, make_ranks

compiled = pytest.mark.skipif(not index_table.COMPILED, reason="installed without a compiler")


def name(i: int) -> BlockHash:
    """Names that share shard and first probe by the dozen, and a check hash that tells two of one name apart."""
    return BlockHash(((i % 3) | (i % 5) << 10 | i << 40).to_bytes(8, "little") + i.to_bytes(8, "little"), i)


NAMES = [name(i) for i in range(30)]
RANKS = array("H", [2, 0, NOT_ANSWERED, 1, 3])
OPERATIONS = st.lists(
    st.tuples(
        st.sampled_from(["run", "run", "set", "clear", "sweep", "other check"]),
        st.integers(0, 5 * TIERS - 1),
        st.integers(0, 29),
        st.integers(1, 30),
    ),
    min_size=5,
    max_size=30,
)


def sweep(table: BitTable, dead: bytes | bytearray) -> dict[bytes, int]:
    gone: dict[bytes, int] = {}
    position = 0
    while position >= 0:
        position, _, names, columns = table.sweep(position, dead, 10_000)
        gone |= dict(zip(names, columns, strict=True))
    return gone


@compiled
@given(OPERATIONS)
def test_the_compiled_table_answers_as_the_plain_one(operations: list[tuple[str, int, int, int]]) -> None:
    table, twin = make_bit_table(), PlainBitTable()
    for operation, bit, first, count in operations:
        packed = BlockHashes.of(NAMES[first : first + count]).packed
        if operation == "sweep":
            dead = bytes(column == bit // TIERS for column in range(5))
            assert sweep(table, dead) == sweep(twin, dead)
        else:
            if operation == "other check":
                packed = BlockHashes.of([BlockHash(NAMES[first].sequence, 99)]).packed
            for one in (table, twin):
                if operation == "clear":
                    one.clear(packed, bit)
                else:
                    one.set(packed, bit, operation == "run")
        assert len(table) == len(twin)
        for start in (0, first):
            packed = BlockHashes.of(NAMES[start:]).packed
            assert table.lookup(packed, RANKS) == twin.lookup(packed, RANKS)
    for block in NAMES:
        packed = BlockHashes.of([block]).packed
        assert table.get(packed) == twin.get(packed)
    assert table.lookup(b"", RANKS) == []


@compiled
@pytest.mark.parametrize("num_columns", [3, 300])
def test_tables_agree_while_they_grow_and_shrink_and_give_their_memory_back(num_columns: int) -> None:
    """Thousands of blocks under hundreds of different sets: shards and sets are resized, freed and used again."""
    draw = random.Random(num_columns)
    table, twin = make_bit_table(), PlainBitTable()
    empty = table.nbytes()
    names = [BlockHash(draw.randbytes(16), i) for i in range(6_000)]
    columns = [draw.randrange(num_columns) for _ in range(24)]
    ranks = array("H", range(num_columns))
    for _ in range(400):
        first, count = draw.randrange(len(names)), draw.randrange(1, 120)
        packed = BlockHashes.of(names[first : first + count]).packed
        bit = draw.choice(columns) * TIERS + draw.randrange(TIERS)
        if draw.random() < 0.35:
            table.clear(packed, bit)
            twin.clear(packed, bit)
        else:
            consecutive = draw.random() < 0.8
            table.set(packed, bit, consecutive)
            twin.set(packed, bit, consecutive)
    for start in range(0, len(names), 40):
        packed = BlockHashes.of(names[start : start + 80]).packed
        assert table.lookup(packed, ranks) == twin.lookup(packed, ranks)
    assert len(table) == len(twin)
    full = table.nbytes()
    for column in set(columns):
        dead = bytearray(num_columns)
        dead[column] = 1
        assert sweep(table, dead) == sweep(twin, dead)
        assert len(table) == len(twin)
    assert len(table) == 0
    assert table.nbytes() - empty < (full - empty) / 4


@compiled
def test_every_block_may_have_a_set_of_its_own_and_no_set_outlives_its_blocks() -> None:
    draw = random.Random(5)
    table, twin = make_bit_table(), PlainBitTable()
    packed = [BlockHashes.of([BlockHash(draw.randbytes(16), i)]).packed for i in range(3_000)]
    after: list[int] = []
    for _ in range(3):
        bits_of = [draw.sample(range(96), 6) for _ in packed]
        for one, bits in zip(packed, bits_of, strict=True):
            for bit in bits:
                table.set(one, bit, False)
                twin.set(one, bit, False)
        assert [table.get(one) for one in packed] == [twin.get(one) for one in packed]
        for one, bits in zip(packed, bits_of, strict=True):
            for bit in draw.sample(bits, 6):
                table.clear(one, bit)
                twin.clear(one, bit)
        assert len(table) == len(twin) == 0
        after.append(table.nbytes())
    assert after[2] - after[1] < 4_096, "sets are left behind"


@compiled
def test_removals_in_the_middle_of_a_sweep_hide_nothing_from_it() -> None:
    """A region that empties is moved to the open one, which the sweep may have passed: not before it has ended."""
    region = 4_096
    table = make_bit_table()
    draw = random.Random(6)
    names = [BlockHash(draw.randbytes(16), i) for i in range(3 * region + 10)]
    dying, staying = 0, TIERS
    for i, one in enumerate(names[: 3 * region]):
        dies = region <= i < 2 * region and i % 3 == 0
        table.set(BlockHashes.of([one]).packed, dying if dies else staying, False)
    table.clear(BlockHashes.of(names[:region]).packed, staying)
    # The first region is free, and these open it again.
    table.set(BlockHashes.of(names[3 * region :]).packed, staying, True)
    position, _, _, _ = table.sweep(0, b"\1", 0)
    table.clear(BlockHashes.of([names[i] for i in range(region, 2 * region) if i % 3]).packed, staying)
    while position >= 0:
        position, _, _, _ = table.sweep(position, b"\1", 0)
    assert [one for one in names if dying in table.get(BlockHashes.of([one]).packed)] == []
    assert len(table) == region + 10


def check_all(table: BitTable, twin: BitTable, paths: list[list[BlockHash]], ranks: "array[int]") -> None:
    for path in paths:
        packed = BlockHashes.of(path).packed
        assert table.lookup(packed, ranks) == twin.lookup(packed, ranks)


@compiled
@pytest.mark.parametrize("seed", range(3))
def test_stretches_survive_forks_holes_sweeps_and_moves(seed: int) -> None:
    """Prompts that fork from each other over several regions, told in runs and out of order; then holes of all sizes,
    until regions are sparse and move, while a sweep is under way and after it."""
    draw = random.Random(seed)
    table, twin = make_bit_table(), PlainBitTable()
    ranks = array("H", range(6))
    paths: list[list[BlockHash]] = []
    for number in range(48):
        trunk = draw.choice(paths) if paths and number % 3 else []
        shared = trunk[: draw.randrange(len(trunk) + 1)]
        paths.append(shared + [BlockHash(draw.randbytes(16), i) for i in range(draw.randrange(100, 700))])
    blocks = sorted({block for path in paths for block in path}, key=lambda block: block.sequence)
    assert len(blocks) > 3 * 4_096

    def tell(path: list[BlockHash], column: int) -> None:
        size = draw.choice([1, 16, 64, 500])
        starts = list(range(0, len(path), size))
        if draw.random() < 0.2:
            draw.shuffle(starts)
        tier = draw.randrange(TIERS)
        for start in starts:
            packed = BlockHashes.of(path[start : start + size]).packed
            table.set(packed, column * TIERS + tier, True)
            twin.set(packed, column * TIERS + tier, True)

    for column in range(6):
        for path in paths:
            if draw.random() < 0.7:
                tell(path, column)
    # A snapshot tells the rest in no order of theirs: neighbours there are nobody's children.
    rest = BlockHashes.of([block for block in blocks if draw.random() < 0.3]).packed
    table.set(rest, 5 * TIERS, False)
    twin.set(rest, 5 * TIERS, False)
    check_all(table, twin, paths, ranks)
    assert len(table) == len(twin)
    position = num_parts = 0
    dead = bytes([0, 1, 0, 0, 0, 0])
    living = array("H", [0, NOT_ANSWERED, 2, 3, 4, 5])
    while position >= 0:
        position, _, _, _ = table.sweep(position, dead, 0)
        num_parts += 1
        path = draw.choice(paths)
        first = draw.randrange(len(path))
        packed = BlockHashes.of(path[first : first + draw.choice([1, 30, 400])]).packed
        for bit in draw.sample([bit for bit in range(6 * TIERS) if bit // TIERS != 1], 8):
            table.clear(packed, bit)
            twin.clear(packed, bit)
        check_all(table, twin, paths, living)
    assert num_parts > 3
    sweep(twin, dead)
    for _ in range(40):
        path, column = draw.choice(paths), draw.randrange(6)
        if draw.random() < 0.3:
            tell(path, column)
            continue
        first = draw.randrange(len(path))
        packed = BlockHashes.of(path[first : first + draw.choice([1, 100, 700])]).packed
        for bit in range(6 * TIERS):
            table.clear(packed, bit)
            twin.clear(packed, bit)
        check_all(table, twin, paths, ranks)
    check_all(table, twin, paths, ranks)
    assert len(table) == len(twin)


@compiled
def test_a_lookup_steps_over_what_was_told_as_a_run_and_looks_at_all_else() -> None:
    """Names that are no chain show which were looked at."""
    draw = random.Random(9)
    names = [BlockHash(draw.randbytes(16), i) for i in range(512)]
    runs = [names[start : start + 64] for start in range(0, 512, 64)]
    ends = {name.sequence for run in runs for name in (run[0], run[-1])}
    asked = BlockHashes.of([name if name.sequence in ends else BlockHash(bytes(16), 0) for name in names]).packed
    table, untold = make_bit_table(), make_bit_table()
    for run in runs:
        for column in range(8):
            table.set(BlockHashes.of(run).packed, column * TIERS, True)
            untold.set(BlockHashes.of(run).packed, column * TIERS, False)
    ranks = array("H", range(8))
    assert [run[1] for run in table.lookup(asked, ranks)] == [512] * 8
    assert [run[1] for run in untold.lookup(asked, ranks)] == [1] * 8
    # A hole of one of them ends no stretch of the others' and is seen; closed again, all is as before.
    middle = BlockHashes.of(names[100:101]).packed
    table.clear(middle, 3 * TIERS)
    whole = BlockHashes.of(names).packed
    assert [run[:2] for run in table.lookup(whole, ranks)] == [(c, 512) for c in (0, 1, 2, 4, 5, 6, 7)] + [(3, 100)]
    table.set(middle, 3 * TIERS, False)
    assert [run[1] for run in table.lookup(asked, ranks)] == [512] * 8


@compiled
def test_to_be_told_that_blocks_are_a_run_makes_them_no_stretch_when_they_are_held_differently() -> None:
    packed = BlockHashes.of(NAMES[:3]).packed
    table = make_bit_table()
    table.set(packed, 0, False)
    table.set(packed[:20], TIERS, False)
    table.set(packed, 0, True)
    assert [run[:2] for run in table.lookup(packed, array("H", [0, 1]))] == [(0, 3), (1, 1)]


@compiled
@pytest.mark.parametrize("cut", [1, 2, 63, 64, 65, 200, 511])
def test_a_prompt_that_leaves_a_stretch_is_matched_up_to_there(cut: int) -> None:
    draw = random.Random(cut)
    names = [BlockHash(draw.randbytes(16), i) for i in range(512)]
    table = make_bit_table()
    table.set(BlockHashes.of(names).packed, 0, True)
    ranks = array("H", [0])
    other_name = [BlockHash(draw.randbytes(16), i) for i in range(cut, 512)]
    other_check = [BlockHash(block.sequence, block.check + 1) for block in names[cut:]]
    for rest in (other_name, other_check):
        assert table.lookup(BlockHashes.of(names[:cut] + rest).packed, ranks) == [(0, cut, (cut, 0, 0, 0))]


@compiled
def test_memory_between_the_blocks_that_stay_comes_back_too() -> None:
    table = make_bit_table()
    draw = random.Random(7)
    names = [BlockHash(draw.randbytes(16), i) for i in range(8 * 4_096)]
    for start in range(0, len(names), 10):
        table.set(BlockHashes.of(names[start : start + 3]).packed, TIERS, start < 20_000)
        if 10_000 <= start < 20_000:
            table.set(BlockHashes.of(names[start : start + 1]).packed, 2 * TIERS, True)
        table.set(BlockHashes.of(names[start + 3 : start + 10]).packed, 0, True)
    full = table.nbytes()
    sweep(table, b"\1")
    assert table.nbytes() < 0.7 * full
    ranks = array("H", [NOT_ANSWERED, 0, 1])
    for first, others in ((10, []), (10_240, [(2, 1)]), (20_480, [])):
        packed = BlockHashes.of(names[first : first + 3]).packed
        assert [run[:2] for run in table.lookup(packed, ranks)] == [(1, 3), *others]
    # What was a stretch and was moved is one still, so the name between is not looked at; neighbours do not become one.
    for first, length in ((10, 3), (20_480, 1)):
        packed = BlockHashes.of([names[first], BlockHash(bytes(16), 0), names[first + 2]]).packed
        assert [run[:2] for run in table.lookup(packed, ranks)] == [(1, length)]


@compiled
@pytest.mark.parametrize("num_blocks", [60_000, 100_000, 200_000, 400_000])
def test_hardly_anything_of_a_holder_is_left_after_its_sweep_whatever_its_size(num_blocks: int) -> None:
    table = make_bit_table()
    packed = random.Random(num_blocks).randbytes(20 * num_blocks)
    table.set(packed, 0, True)
    table.set(packed[: 20 * 2_000], TIERS, True)
    sweep(table, b"\1")
    assert len(table) == 2_000
    # A region of 96 KiB, a page of set numbers, and 256 small shards: not a part of what there was.
    assert table.nbytes() < 200_000


@compiled
def test_the_memory_is_a_few_dozen_bytes_a_block_whatever_holds_it() -> None:
    table = make_bit_table()
    draw = random.Random(1)
    names = [BlockHash(draw.randbytes(16), i) for i in range(60_000)]
    packed = BlockHashes.of(names).packed
    for column in range(256):
        table.set(packed, column * TIERS, True)
    assert table.nbytes() / len(names) < 70


@compiled
def test_what_is_no_name_bit_or_rank_is_refused() -> None:
    table = make_bit_table()
    for packed, bit in ((bytes(19), 0), (bytes(20), -1), (bytes(20), 4_096)):
        with pytest.raises(ValueError, match="names"):
            table.set(packed, bit, False)
        with pytest.raises(ValueError, match="names"):
            table.clear(packed, bit)
    with pytest.raises(ValueError, match="ranks"):
        table.lookup(bytes(19), make_ranks(1))
    with pytest.raises(ValueError, match="ranks"):
        table.lookup(bytes(20), make_ranks(1_025))
    with pytest.raises(ValueError, match="position"):
        table.sweep(-1, b"", 0)
    with pytest.raises(ValueError, match="40 bytes"):
        table.get(bytes(40))
    assert len(table) == 0


@pytest.fixture
def uncompiled(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The module as it is where no compiler was."""
    monkeypatch.setitem(sys.modules, "kv_prefix._bit_table", None)
    monkeypatch.delattr("kv_prefix._bit_table", raising=False)
    importlib.reload(index_table)
    yield
    monkeypatch.undo()
    importlib.reload(index_table)


def test_without_a_compiler_the_twin_stands_in(uncompiled: None) -> None:
    assert not index_table.COMPILED
    assert type(index_table.make_bit_table()).__name__ == "PlainBitTable"

"""The index against a plain walk over sets."""

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kv_core.hashing import BlockHash
from kv_core.ids import Incarnation, NodeId
from kv_prefix import limits
from kv_prefix.errors import HolderLimitError
from kv_prefix.events import Tier
from kv_prefix.index_table import BitTable, PlainBitTable, make_bit_table
from kv_prefix.prefix_index import Holder, HolderMatch, PrefixIndex

HOLDERS = [Holder(NodeId(f"node-{i}"), Incarnation(1)) for i in range(5)]


def name(branch: int, i: int) -> BlockHash:
    return BlockHash(bytes([i % 3]) + branch.to_bytes(7, "big") + i.to_bytes(8, "big"), i)


CHAIN = [name(0, i) for i in range(6)]
PATHS = [CHAIN, CHAIN[:2] + [name(1, i) for i in range(2, 6)], CHAIN[:4] + [name(2, i) for i in range(4, 9)]]
"""Three prompts that begin alike."""
BLOCKS = sorted({block for path in PATHS for block in path}, key=lambda block: block.sequence)
TIERS = list(Tier)

Sets = dict[Holder, dict[Tier, set[BlockHash]]]


def walk(sets: Sets, chain: list[BlockHash]) -> list[HolderMatch]:
    """The oracle: for each holder, block by block, until one is in none of its sets."""
    matches = []
    for holder, by_tier in sets.items():
        counts = [0, 0, 0, 0]
        for block in chain:
            tiers = [tier for tier in TIERS if block in by_tier[tier]]
            if not tiers:
                break
            counts[min(tiers)] += 1
        if sum(counts):
            matches.append(HolderMatch(holder, sum(counts), (counts[0], counts[1], counts[2], counts[3])))
    return sorted(matches, key=lambda m: (-m.num_blocks, m.holder))


def empty() -> dict[Tier, set[BlockHash]]:
    return {tier: set() for tier in TIERS}


OPERATIONS = st.lists(
    st.tuples(
        st.sampled_from(["stored", "stored", "stored", "scattered", "removed", "remove_holder", "sweep"]),
        st.sampled_from(HOLDERS),
        st.sampled_from(TIERS),
        st.sampled_from(PATHS),
        st.integers(0, 5),
        st.integers(1, 6),
    ),
    min_size=10,
    max_size=40,
)
"""Runs of a prompt in any order, so children come before parents, holes close, lost heads and holders come back;
"scattered" are blocks in the order of their hashes, as a snapshot has them."""


@pytest.mark.parametrize("make_table", [make_bit_table, PlainBitTable])
@given(OPERATIONS)
def test_lookups_equal_a_plain_walk_over_sets(
    make_table: Callable[[], BitTable], operations: list[tuple[str, Holder, Tier, list[BlockHash], int, int]]
) -> None:
    index, sets = PrefixIndex(make_table()), {holder: empty() for holder in HOLDERS}
    for operation, holder, tier, path, first, count in operations:
        blocks = path[first : first + count]
        if operation == "stored":
            index.stored(holder, tier, blocks, consecutive=True)
            sets[holder][tier] |= set(blocks)
        elif operation == "scattered":
            blocks = BLOCKS[first :: 7 - count]
            index.stored(holder, tier, blocks)
            sets[holder][tier] |= set(blocks)
        elif operation == "removed":
            index.removed(holder, tier, blocks)
            sets[holder][tier] -= set(blocks)
        elif operation == "remove_holder":
            index.remove_holder(holder)
            sets[holder] = empty()
        else:
            index.sweep(2)
        for asked in PATHS:
            assert index.lookup(asked) == walk(sets, asked)
        for block in BLOCKS:
            expected = {h: tuple(t for t in TIERS if block in s[t]) for h, s in sets.items()}
            assert index.tiers_of(block) == {h: tiers for h, tiers in expected.items() if tiers}
    while index.sweep(100):
        pass
    held = set().union(*(blocks for by_tier in sets.values() for blocks in by_tier.values()))
    assert (index.stats().blocks, index.stats().sweeping) == (len(held), 0)
    for asked in PATHS:
        assert index.lookup(asked) == walk(sets, asked)


def test_dropping_the_head_then_a_middle_block_ends_the_match_there() -> None:
    index = PrefixIndex()
    index.stored(HOLDERS[0], Tier.HOST, CHAIN, consecutive=True)
    index.removed(HOLDERS[0], Tier.HOST, CHAIN[:1])
    assert index.lookup(CHAIN) == []
    index.stored(HOLDERS[0], Tier.HOST, CHAIN[:1], consecutive=True)
    assert index.lookup(CHAIN)[0].num_blocks == 6
    index.removed(HOLDERS[0], Tier.HOST, CHAIN[2:3])
    assert index.lookup(CHAIN)[0].num_blocks == 2


def test_one_holders_removal_leaves_the_others() -> None:
    index = PrefixIndex()
    for holder in HOLDERS[:2]:
        index.stored(holder, Tier.HOST, CHAIN, consecutive=True)
    index.removed(HOLDERS[0], Tier.HOST, CHAIN)
    assert [match.holder for match in index.lookup(CHAIN)] == [HOLDERS[1]]


def test_a_block_counts_in_its_fastest_tier() -> None:
    index = PrefixIndex()
    index.stored(HOLDERS[0], Tier.DISK, CHAIN, consecutive=True)
    index.stored(HOLDERS[0], Tier.HOST, CHAIN[:2], consecutive=True)
    index.stored(HOLDERS[0], Tier.REMOTE, CHAIN, consecutive=True)
    assert index.lookup(CHAIN)[0].by_tier == (0, 2, 4, 0)


def test_a_restarted_node_is_another_holder() -> None:
    index = PrefixIndex()
    index.stored(HOLDERS[0], Tier.HOST, CHAIN, consecutive=True)
    index.remove_holder(HOLDERS[0])
    again = Holder(HOLDERS[0].node, Incarnation(2))
    index.stored(again, Tier.HOST, CHAIN[:1], consecutive=True)
    assert index.lookup(CHAIN) == [HolderMatch(again, 1, (0, 1, 0, 0))]


def test_a_block_with_another_check_hash_is_not_found() -> None:
    index = PrefixIndex()
    index.stored(HOLDERS[0], Tier.HOST, CHAIN, consecutive=True)
    index.stored(HOLDERS[1], Tier.HOST, [BlockHash(CHAIN[0].sequence, 99)])
    assert index.lookup([BlockHash(CHAIN[0].sequence, 99)]) == []
    assert [match.holder for match in index.lookup(CHAIN)] == [HOLDERS[0]]


def test_a_removal_needs_the_first_hash_only() -> None:
    index = PrefixIndex()
    index.stored(HOLDERS[0], Tier.HOST, CHAIN, consecutive=True)
    index.removed(HOLDERS[0], Tier.HOST, [BlockHash(CHAIN[0].sequence, 0)])
    assert index.lookup(CHAIN) == []


def test_a_column_is_not_used_again_before_its_sweep_has_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "MAX_HOLDERS", 2)
    index = PrefixIndex()
    for holder in HOLDERS[:2]:
        index.stored(holder, Tier.HOST, CHAIN, consecutive=True)
    index.remove_holder(HOLDERS[0])
    with pytest.raises(HolderLimitError):
        index.stored(HOLDERS[2], Tier.HOST, CHAIN[:1], consecutive=True)
    while index.sweep():
        pass
    index.stored(HOLDERS[2], Tier.HOST, CHAIN[:1], consecutive=True)
    assert {match.holder: match.num_blocks for match in index.lookup(CHAIN)} == {HOLDERS[1]: 6, HOLDERS[2]: 1}


def test_what_was_lost_with_a_holder_is_remembered() -> None:
    index = PrefixIndex()
    index.stored(HOLDERS[0], Tier.HOST, CHAIN, consecutive=True)
    index.stored(HOLDERS[1], Tier.HOST, CHAIN[:1], consecutive=True)
    index.remove_holder(HOLDERS[0])
    while index.sweep():
        pass
    assert index.lost_with(CHAIN[0]) is None
    assert index.lost_with(CHAIN[1]) == HOLDERS[0]


def test_256_holders_work() -> None:
    index = PrefixIndex()
    holders = [Holder(NodeId(f"n{i:03}"), Incarnation(i)) for i in range(256)]
    for i, holder in enumerate(holders):
        index.stored(holder, TIERS[i % 4], CHAIN[: i % 6 + 1], consecutive=True)
    matches = index.lookup(CHAIN)
    assert {match.holder: match.num_blocks for match in matches} == {h: i % 6 + 1 for i, h in enumerate(holders)}
    assert [match.num_blocks for match in matches] == sorted((m.num_blocks for m in matches), reverse=True)

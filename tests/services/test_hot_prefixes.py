"""Which beginnings are hot: uses fade, a common beginning is named alone, one holder acts, memory is bounded."""

from hypothesis import given
from hypothesis import strategies as st

from kv_core.hashing import BlockHash, hash_tokens
from kv_core.ids import NodeId
from kv_core.namespace import Namespace
from kv_services.node.hot_prefixes import (
    DEPTH_MAX,
    GRID_BLOCKS,
    HALF_LIFE_NS,
    REMEMBERED_MAX,
    HotPrefixes,
    acts,
)

SECOND = 1_000_000_000
NS = Namespace("m", "w", block_size=1)


def names(common: int, own: int, number: int) -> list[BlockHash]:
    """Blocks of a prompt whose first `common` are those of every prompt."""
    return hash_tokens(NS, [*range(common), *(1_000_000 * (number + 1) + i for i in range(own))])


def test_a_common_beginning_is_hot_and_what_follows_it_is_not() -> None:
    hot = HotPrefixes(uses=8)
    for number in range(12):
        hot.note(number * SECOND, names(20, 30, number))
    assert hot.hot(12 * SECOND) == [names(20, 0, 0)[15]], "the last block on the grid that all have"


def test_it_is_not_hot_before_it_was_asked_for_often_enough_and_cools_down() -> None:
    hot = HotPrefixes(uses=8)
    for _ in range(7):
        hot.note(0, names(GRID_BLOCKS, 0, 0))
    assert hot.hot(0) == []
    hot.note(0, names(GRID_BLOCKS, 0, 0))
    assert hot.hot(0) == [names(GRID_BLOCKS, 0, 0)[-1]]
    assert hot.hot(HALF_LIFE_NS // 100) == []


def test_of_two_the_hotter_comes_first() -> None:
    hot = HotPrefixes(uses=2)
    one, two = (hash_tokens(NS, [base + i for i in range(GRID_BLOCKS)]) for base in (0, 500))
    for prompt, times in ((one, 3), (two, 5)):
        for _ in range(times):
            hot.note(0, prompt)
    assert hot.hot(0) == [two[-1], one[-1]]


def test_prompts_shorter_than_the_grid_and_the_far_end_of_long_ones_are_not_followed() -> None:
    hot = HotPrefixes(uses=1)
    hot.note(0, names(GRID_BLOCKS - 1, 0, 0))
    assert len(hot) == 0
    hot.note(0, names(DEPTH_MAX + 64, 0, 0))
    assert hot.hot(0) == [names(DEPTH_MAX, 0, 0)[-1]]


def test_what_is_remembered_is_bounded_and_the_hot_stay() -> None:
    hot = HotPrefixes(uses=5)
    favourite = names(GRID_BLOCKS, 0, 0)
    for number in range(REMEMBERED_MAX + 200):
        if number % 100 == 0:
            hot.note(number * SECOND // 100, favourite)
        hot.note(number * SECOND // 100, hash_tokens(NS, [7_000_000 + number * 100 + i for i in range(GRID_BLOCKS)]))
        assert len(hot) <= REMEMBERED_MAX
    assert hot.hot((REMEMBERED_MAX + 200) * SECOND // 100) == [favourite[-1]]


@given(
    st.lists(st.tuples(st.integers(0, 5), st.integers(0, 40), st.integers(0, 20)), max_size=60),
    st.floats(1.0, 6.0),
)
def test_only_what_was_asked_often_is_named_and_no_name_is_a_beginning_of_another(
    asked: list[tuple[int, int, int]], uses: float
) -> None:
    """At one instant nothing fades, so uses can be counted plainly."""
    hot = HotPrefixes(uses)
    prompts = [names(common, own, number) for number, common, own in asked]
    for prompt in prompts:
        hot.note(0, prompt)
    counts: dict[BlockHash, int] = {}
    for prompt in prompts:
        for name in prompt[GRID_BLOCKS - 1 :: GRID_BLOCKS]:
            counts[name] = counts.get(name, 0) + 1
    often = {name for name, count in counts.items() if count >= uses}
    begun = {above for prompt in prompts for at, above in enumerate(prompt) if often & set(prompt[at + 1 :])}
    assert set(hot.hot(0)) == often - begun


@given(st.sets(st.sampled_from("abcdefgh"), min_size=1), st.integers(0, 50))
def test_exactly_one_holder_acts(holders: set[str], number: int) -> None:
    name = names(1, 1, number)[-1]
    nodes = [NodeId(node) for node in holders]
    assert sum(acts(node, nodes, name) for node in nodes) == 1
    assert not acts(NodeId("not a holder"), nodes, name)
    assert not acts(NodeId("a"), [], name)

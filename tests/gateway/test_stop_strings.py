"""Stop strings: the text depends on the text alone, however it was cut."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kv_services.gateway.stop_strings import StopMatcher

CHARS = "abé"
STOPS = st.lists(st.text(CHARS, min_size=1, max_size=5), max_size=4)


def cut_by_hand(text: str, stops: list[str]) -> str:
    """The oracle: the first end of any stop string, and the longest one that ends there."""
    for end in range(1, len(text) + 1):
        ending = [stop for stop in stops if text[:end].endswith(stop)]
        if ending:
            return text[: end - max(map(len, ending))]
    return text


@st.composite
def pieces(draw: st.DrawFn) -> list[str]:
    text = draw(st.text(CHARS, max_size=30))
    borders = sorted(draw(st.lists(st.integers(0, len(text)), max_size=8)))
    return [text[a:b] for a, b in zip([0, *borders], [*borders, len(text)], strict=True)]


@given(pieces(), STOPS)
def test_any_cut_gives_the_text_up_to_the_first_stop_string(parts: list[str], stops: list[str]) -> None:
    matcher = StopMatcher(stops)
    shown = ""
    for part in parts:
        shown += matcher.feed(part)
        assert not any(stop in shown for stop in stops)
    if not matcher.matched:
        shown += matcher.flush()
    assert shown == cut_by_hand("".join(parts), stops)


@given(pieces(), STOPS)
def test_no_more_is_held_back_than_begins_a_stop_string(parts: list[str], stops: list[str]) -> None:
    matcher = StopMatcher(stops)
    taken = shown = ""
    for part in parts:
        taken, shown = taken + part, shown + matcher.feed(part)
        if matcher.matched:
            return
        held = taken[len(shown) :]
        ends = [taken[index:] for index in range(len(taken))]
        longest = max((end for end in ends if any(stop.startswith(end) for stop in stops)), key=len, default="")
        assert held == longest


def test_the_longest_of_two_that_end_together_is_cut() -> None:
    matcher = StopMatcher(["b", "ab"])
    assert matcher.feed("xab") == "x"
    assert matcher.matched
    assert matcher.feed("more") == ""


def test_one_that_ends_earlier_wins_over_one_that_began_earlier() -> None:
    matcher = StopMatcher(["xaby", "ab"])
    assert matcher.feed("xaby") == "x"


def test_an_empty_stop_string_is_a_bug_of_the_caller() -> None:
    with pytest.raises(ValueError, match="empty stop string"):
        StopMatcher(["a", ""])

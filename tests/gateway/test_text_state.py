"""The text of an answer: whole characters, no stop string, the same however the tokens come."""

import itertools

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from kv_services.gateway.completer import FinishReason, Token
from kv_services.gateway.errors import StreamProtocolError
from kv_services.gateway.text_state import TextDelta, TextState
from tests.gateway.helpers_gateway import EOS, ByteTokenizer, finished, tokens_of

TEXTS = st.text(st.sampled_from("ab é€😀\n"), max_size=24)
BORDERS = st.lists(st.integers(0, 200), max_size=12)


def state_of(
    vocabulary: ByteTokenizer, stop: list[str] | None = None, *, max_tokens: int = 1000, eos: tuple[int, ...] = (EOS,)
) -> TextState:
    return TextState(vocabulary, stop=stop or [], stop_token_ids=eos, max_tokens=max_tokens)


def run(state: TextState, tokens: list[Token], reason: FinishReason = FinishReason.STOP) -> list[TextDelta]:
    deltas = [state.step(token) for token in tokens]
    return [*deltas, state.step(finished(reason))]


def text_of(deltas: list[TextDelta]) -> str:
    return "".join(delta.text for delta in deltas)


def split_tokens(raw: bytes, borders: list[int], vocabulary: ByteTokenizer) -> list[Token]:
    """Those bytes as tokens with borders anywhere, also inside characters."""
    cuts = sorted({border % (len(raw) + 1) for border in borders} | {0, len(raw)})
    parts = [raw[a:b] for a, b in itertools.pairwise(cuts)]
    return [Token(index, vocabulary.add(part), logprob=-1.0) for index, part in enumerate(parts)]


@given(
    TEXTS, st.lists(st.integers(0, 200), max_size=12), st.lists(st.text("ab é\n", min_size=1, max_size=4), max_size=4)
)
def test_any_split_into_tokens_gives_the_text_of_the_whole(text: str, borders: list[int], stops: list[str]) -> None:
    vocabulary = ByteTokenizer()
    in_one = run(state_of(vocabulary, stops), split_tokens(text.encode(), [], vocabulary))
    in_many = run(state_of(vocabulary, stops), split_tokens(text.encode(), borders, vocabulary))
    assert text_of(in_many) == text_of(in_one)
    assert all("\ufffd" not in delta.text for delta in in_many)
    if not any(stop in text for stop in stops):
        assert text_of(in_many) == text
    assert not any(stop in text_of(in_many) for stop in stops)


@given(st.lists(st.binary(min_size=1, max_size=3), max_size=12))
@example([b"a\xed\xa0"])
@example([b"a\xed", b"\xbf"])
@example([b"\xed\xc2"])
@example([b"\xed\xa0", b"\x80"])
def test_any_bytes_give_what_a_whole_decoder_gives_but_for_an_unfinished_end(parts: list[bytes]) -> None:
    vocabulary = ByteTokenizer()
    tokens = [Token(index, vocabulary.add(part)) for index, part in enumerate(parts)]
    shown = text_of(run(state_of(vocabulary), tokens))
    raw = b"".join(parts)
    # Only an unfinished character at the very end is left out. The whole decoder writes one U+FFFD for it, but two for
    # the beginning of a surrogate: no text has one, and yet a decoder that reads on waits for its third byte.
    surrogate = raw[-2:-1] == b"\xed" and 0xA0 <= raw[-1] <= 0xBF
    assert raw.decode("utf-8", "replace") in (shown, shown + "\ufffd" * (2 if surrogate else 1))


def test_a_character_split_over_tokens_is_shown_when_it_is_whole() -> None:
    state = state_of(ByteTokenizer())
    deltas = [state.step(token) for token in tokens_of("é😀")]
    assert [delta.text for delta in deltas] == ["", "é", "", "", "", "😀"]


def test_an_unfinished_character_is_left_out_at_the_end() -> None:
    deltas = run(state_of(ByteTokenizer()), tokens_of("a😀".encode()[:-1]), FinishReason.LENGTH)
    assert text_of(deltas) == "a"
    assert deltas[-1].finish is FinishReason.LENGTH


def test_bytes_that_begin_no_character_become_replacement_characters() -> None:
    assert text_of(run(state_of(ByteTokenizer()), tokens_of(b"a\xffb"))) == "a\ufffdb"


def test_the_end_token_ends_the_text_without_text_of_its_own() -> None:
    state = state_of(ByteTokenizer(), ["abc"])
    deltas = [state.step(token) for token in [*tokens_of("ab"), Token(2, EOS), Token(3, ord("x"))]]
    assert [delta.text for delta in deltas] == ["", "", "ab", ""]
    assert [delta.finish for delta in deltas] == [None, None, FinishReason.STOP, None]
    assert state.num_tokens == 3


def test_an_ignored_end_token_is_a_token_without_text() -> None:
    state = state_of(ByteTokenizer(), eos=())
    deltas = run(state, [Token(0, ord("a")), Token(1, EOS), Token(2, ord("b"))], FinishReason.LENGTH)
    assert text_of(deltas) == "ab"
    assert state.num_tokens == 3


def test_the_last_allowed_token_ends_the_text_and_shows_what_was_held_back() -> None:
    state = state_of(ByteTokenizer(), ["bcd"], max_tokens=3)
    deltas = [state.step(token) for token in tokens_of("abcd")]
    assert [delta.text for delta in deltas] == ["a", "", "bc", ""]
    assert deltas[2].finish is FinishReason.LENGTH


def test_a_stop_string_in_the_last_allowed_token_is_a_stop() -> None:
    state = state_of(ByteTokenizer(), ["b"], max_tokens=2)
    deltas = [state.step(token) for token in tokens_of("ab")]
    assert deltas[1] == TextDelta("", (), FinishReason.STOP)


def test_a_finish_of_the_completer_shows_what_was_held_back() -> None:
    deltas = run(state_of(ByteTokenizer(), ["bcd"]), tokens_of("abc"), FinishReason.LENGTH)
    assert [delta.text for delta in deltas] == ["a", "", "", "bc"]
    assert deltas[-1].finish is FinishReason.LENGTH


def test_tokens_are_reported_with_their_text_and_not_at_all_when_cut() -> None:
    vocabulary = ByteTokenizer()
    words = [b"one", b" t", b"wo EN", b"D", b" three"]
    tokens = [Token(index, vocabulary.add(word)) for index, word in enumerate(words)]
    state = state_of(vocabulary, [" END"])
    deltas = [state.step(token) for token in tokens]
    assert [delta.text for delta in deltas] == ["one", " t", "wo", "", ""]
    reported = [[(shown.token.index, shown.text_offset) for shown in delta.tokens] for delta in deltas]
    # The third is cut in its middle, so it is reported when the cut is known; the fourth left nothing.
    assert reported == [[(0, 0)], [(1, 3)], [], [(2, 5)], []]


@given(TEXTS, BORDERS)
def test_without_a_stop_every_token_is_reported_once_in_order(text: str, borders: list[int]) -> None:
    vocabulary = ByteTokenizer()
    tokens = split_tokens(text.encode(), borders, vocabulary)
    deltas = run(state_of(vocabulary, ["ab é€"]), tokens)
    if "ab é€" not in text:
        assert [shown.token for delta in deltas for shown in delta.tokens] == tokens


@pytest.mark.parametrize("index", [0, 2])
def test_a_token_out_of_order_is_a_bug_that_shows(index: int) -> None:
    state = state_of(ByteTokenizer())
    state.step(Token(0, ord("a")))
    with pytest.raises(StreamProtocolError, match="came where 1 was due"):
        state.step(Token(index, ord("b")))

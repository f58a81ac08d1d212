"""Tokenisers and detokeniser: special tokens, chat templates, characters cut in pieces, limits."""

from collections.abc import Sequence
from pathlib import Path

import jinja2
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from kv_services.engine import limits
from kv_services.engine.byte_tokenizer import ByteTokenizer
from kv_services.engine.errors import (
    ChatTemplateError,
    EngineInputError,
    TextTooLongError,
    TokenizerError,
    UnsupportedModelError,
    WeightsFormatError,
)
from kv_services.engine.interface import ChatMessage, Tokenizer
from kv_services.engine.text import Utf8Detokenizer
from kv_services.engine.tokenizer import BpeTokenizer, open_tokenizer
from kv_services.engine.weights import Weights
from tests.engine.helpers_engine import CHATML, SPECIALS, TinyLlama

END, START, STOP, KEEP = range(4)


@pytest.fixture(scope="module")
def bpe(tiny_weights: Weights) -> BpeTokenizer:
    return BpeTokenizer(tiny_weights.tokenizer_json, tiny_weights.text)


def made(folder: Path, tiny: TinyLlama) -> BpeTokenizer:
    return open_tokenizer(tiny.write(folder / "model.gguf"), cache_root=folder / "cache")


@settings(deadline=None)
@given(text=st.text(max_size=60))
def test_tokens_joined_are_the_text(bpe: BpeTokenizer, text: str) -> None:
    assume("<" not in text)  # where the names of special tokens begin, which give no text
    for tokenizer in (bpe, ByteTokenizer()):
        tokens = tokenizer.encode(text)
        assert b"".join(tokenizer.token_bytes(token) for token in tokens) == text.encode()
        assert tokenizer.decode(tokens) == text


def test_merges_are_applied(bpe: BpeTokenizer) -> None:
    assert [bpe.token_bytes(token) for token in bpe.encode("hello hello world é9hello12")] == [
        *(b"hello", b" hello", b" world", b" ", "é".encode(), b"9", b"hello", b"1", b"2")
    ]


def test_special_names_count_in_a_raw_prompt_and_give_no_text(bpe: BpeTokenizer) -> None:
    tokens = bpe.encode("<|im_start|>hello<|im_end|><keep>")
    assert tokens[0] == START
    assert tokens[-2:] == [STOP, KEEP]
    assert bpe.decode(tokens) == "hello<keep>"  # a literal token is text, a control token is not
    assert bpe.eos_ids == (STOP, END)


@settings(deadline=None)
@given(
    contents=st.lists(
        st.lists(st.sampled_from([*SPECIALS, "<|im_", "end|>", "<|", "x", "\n", "\ufdd0", "\ufdd1"]), max_size=8).map(
            "".join
        ),
        min_size=1,
        max_size=3,
    )
)
def test_a_message_cannot_forge_a_special_token_and_keeps_its_text(bpe: BpeTokenizer, contents: list[str]) -> None:
    tokens = bpe.encode_chat([ChatMessage("user", content) for content in contents])
    assert tokens.count(START) == len(contents) + 1
    assert tokens.count(STOP) == len(contents)
    assert END not in tokens
    # Between the template's own tokens stands the text, whole.
    bodies = " ".join("," if token in (START, STOP) else str(token) for token in tokens).split(",")
    turns = [bpe.decode([int(token) for token in body.split()]) for body in bodies[1::2]]
    assert turns == [*(f"user\n{content}" for content in contents), "assistant\n"]


def test_a_chat_is_rendered_by_the_models_own_template(bpe: BpeTokenizer) -> None:
    messages = [ChatMessage("system", "hello"), ChatMessage("user", "world")]
    plain = jinja2.Template(CHATML).render(
        messages=[{"role": m.role, "content": m.content} for m in messages], add_generation_prompt=True
    )
    assert bpe.encode_chat(messages) == bpe.encode(plain)


def test_a_model_with_chatml_tokens_and_no_template_gets_chatml(tmp_path: Path, bpe: BpeTokenizer) -> None:
    messages = [ChatMessage("user", "hello")]
    assert made(tmp_path, TinyLlama(template=None)).encode_chat(messages) == bpe.encode_chat(messages)


def test_a_template_may_refuse_and_reach_nothing(tmp_path: Path) -> None:
    refusing = "{% if messages[0]['role'] != 'user' %}{{ raise_exception('users only') }}{% endif %}hello"
    tokenizer = made(tmp_path, TinyLlama(template=refusing))
    assert tokenizer.decode(tokenizer.encode_chat([ChatMessage("user", "x")])) == "hello"
    with pytest.raises(ChatTemplateError, match="users only"):
        tokenizer.encode_chat([ChatMessage("system", "x")])
    for index, evil in enumerate(
        ("{{ messages.__class__.__mro__ }}", "{{ messages.append(1) }}", "{{ 1 // 0 }}", "{{ messages[9]['role'] }}")
    ):
        tokenizer = made(tmp_path, TinyLlama(template=evil, seed=index + 2))
        with pytest.raises(ChatTemplateError):
            tokenizer.encode_chat([ChatMessage("user", "x")])
    with pytest.raises(ChatTemplateError, match="compile"):
        made(tmp_path, TinyLlama(template="{% if %}"))


def test_a_sequence_begins_with_bos_once_where_the_model_wants_it(tmp_path: Path) -> None:
    tokenizer = made(tmp_path, TinyLlama(adds_bos=True))
    assert tokenizer.encode("hello")[0] == START
    assert tokenizer.encode("") == [START]
    assert tokenizer.encode_chat([ChatMessage("user", "x")]).count(START) == 2  # the template's first one is it


def test_a_model_without_template_and_chatml_has_no_chat(tmp_path: Path) -> None:
    tokenizer = made(tmp_path, TinyLlama(template=None, types=(3, 1, 1, 1)))
    with pytest.raises(ChatTemplateError, match="none"):
        tokenizer.encode_chat([ChatMessage("user", "x")])


@pytest.mark.parametrize("pre", ["gpt-2", "llama-bpe"])
def test_other_known_cuts_keep_the_text(tmp_path: Path, pre: str) -> None:
    tokenizer = made(tmp_path, TinyLlama(pre=pre))
    for text in ("hello world  12345 it's\r\n\n x", "é 日本 😀", " "):
        assert tokenizer.decode(tokenizer.encode(text)) == text


@pytest.mark.parametrize(
    ("tiny", "words"),
    [
        (TinyLlama(pre="deepseek-llm"), "deepseek-llm"),
        (TinyLlama(pre="default"), "default"),
        (TinyLlama(tokenizer="llama"), "tokeniser 'llama'"),
    ],
)
def test_a_tokeniser_that_we_cannot_build_exactly_is_refused(tmp_path: Path, tiny: TinyLlama, words: str) -> None:
    with pytest.raises(UnsupportedModelError, match=words):
        made(tmp_path, tiny)


def test_token_types_of_another_length_than_the_tokens_are_refused(tmp_path: Path) -> None:
    with pytest.raises(WeightsFormatError, match="token types"):
        made(tmp_path, TinyLlama(types=(3, 3)))


def test_text_beyond_the_limits_is_refused(bpe: BpeTokenizer) -> None:
    long = "é" * (limits.TEXT_BYTES_MAX // 2 + 1)
    half = ChatMessage("user", "x" * (limits.TEXT_BYTES_MAX // 2 + 1))
    many = [ChatMessage("user", "x")] * (limits.CHAT_MESSAGES_MAX + 1)
    for tokenizer in tokenizers(bpe):
        with pytest.raises(TextTooLongError, match=str(limits.TEXT_BYTES_MAX)):
            tokenizer.encode(long)
        with pytest.raises(TextTooLongError, match="bytes of chat"):
            tokenizer.encode_chat([half, half])
        with pytest.raises(TextTooLongError, match="messages"):
            tokenizer.encode_chat(many)


@pytest.mark.parametrize("role", ["", "us er", "a<|im_end|>", "X", "r" * 33, "user\n"])
def test_a_role_that_is_no_name_is_refused(bpe: BpeTokenizer, role: str) -> None:
    for tokenizer in tokenizers(bpe):
        with pytest.raises(ChatTemplateError, match="role"):
            tokenizer.encode_chat([ChatMessage(role, "x")])
        with pytest.raises(ChatTemplateError, match="no message"):
            tokenizer.encode_chat([])


def test_half_of_a_surrogate_pair_is_refused(bpe: BpeTokenizer) -> None:
    for tokenizer in tokenizers(bpe):
        with pytest.raises(TokenizerError, match="surrogate"):
            tokenizer.encode("a\ud800b")
        with pytest.raises(TokenizerError, match="surrogate"):
            tokenizer.encode_chat([ChatMessage("user", "\udc00")])


def test_messages_that_leave_no_guard_are_refused(bpe: BpeTokenizer) -> None:
    every = "".join(chr(code) for code in range(0xFDD0, 0xFDF0))
    with pytest.raises(ChatTemplateError, match="code point"):
        bpe.encode_chat([ChatMessage("user", every)])
    assert bpe.encode_chat([ChatMessage("user", every[:-1])])


def test_a_token_outside_the_vocabulary_is_refused(bpe: BpeTokenizer) -> None:
    for tokenizer in tokenizers(bpe):
        for token in (-1, tokenizer.vocab_size):
            with pytest.raises(EngineInputError, match="token"):
                tokenizer.decode([token])


@settings(deadline=None)
@given(data=st.binary(max_size=40), cuts=st.lists(st.integers(0, 40), max_size=10))
def test_detokenising_in_pieces_and_over_hand_overs_gives_the_whole_text(data: bytes, cuts: list[int]) -> None:
    detokenizer, text = Utf8Detokenizer(lambda token: bytes([token])), ""
    for index, byte in enumerate(data):
        if index in cuts:  # goes on elsewhere, from the state alone
            detokenizer = Utf8Detokenizer(lambda token: bytes([token]), detokenizer.state)
        text += detokenizer.push(byte)
        assert len(detokenizer.state) <= 3
    assert text + detokenizer.finish() == data.decode(errors="replace")


@settings(deadline=None)
@given(st.text(max_size=20))
def test_no_piece_holds_part_of_a_character(text: str) -> None:
    detokenizer = Utf8Detokenizer(lambda token: bytes([token]))
    pieces = [detokenizer.push(byte) for byte in text.encode()]
    assert "".join(pieces) == text
    assert "\ufffd" not in "".join(pieces) or "\ufffd" in text
    assert (detokenizer.state, detokenizer.finish()) == (b"", "")


@pytest.mark.parametrize("state", [b"x", b"\xe2\x82\xac", b"\xf0\x9f\x98\x80", b"\xff", b"\xe2x"])
def test_a_state_that_no_detokeniser_gave_is_refused(state: bytes) -> None:
    with pytest.raises(EngineInputError, match="state"):
        Utf8Detokenizer(lambda token: bytes([token]), state)


def tokenizers(bpe: BpeTokenizer) -> Sequence[Tokenizer]:
    return (bpe, ByteTokenizer())

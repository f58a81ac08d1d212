"""Text to tokens and back, of the vocabulary and chat template that a model's weights file carries.

The merges are done by the `tokenizers` package; this module decides what is a special token and what is text.

T1: the names of special tokens count as such in a raw prompt and in the template, never inside a chat message: a user
cannot end his turn and write a system message. T2: tokenising a text and joining `token_bytes` gives the text back.
"""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Final, NoReturn

import jinja2
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer

from kv_core.clock import Clock
from kv_services.engine.errors import ChatTemplateError, EngineInputError
from kv_services.engine.interface import ChatMessage
from kv_services.engine.text import Utf8Detokenizer, check_chat, check_text
from kv_services.engine.weights import open_weights
from kv_services.engine.weights_cache import TextInfo

CHATML: Final = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
"""Used for a model that has ChatML's tokens but brings no template."""

_GUARDS: Final = [chr(code) for code in range(0xFDD0, 0xFDF0)]
"""Code points that Unicode keeps from ever being characters."""


class BpeTokenizer:
    """A `Tokenizer` of a weights file's byte-level BPE. May be used by several threads."""

    def __init__(self, tokenizer_json: bytes, text: TextInfo) -> None:
        self._bpe: Tokenizer = Tokenizer.from_buffer(tokenizer_json)
        self._text = text
        names = self._bpe.get_vocab()
        self._bytes = [b""] * len(names)
        literal, control = set(text.literal_ids), set(text.control_ids)
        self._special: dict[str, int] = {}
        for name, token in names.items():
            if token in control or token in literal:
                self._special[name] = token
            if token in literal:
                self._bytes[token] = name.encode()
            elif token not in control:
                self._bytes[token] = b"".join(_BYTE_OF.get(char) or char.encode() for char in name)
        # Longest first: one name may begin another.
        either = "|".join(re.escape(name) for name in sorted(self._special, key=len, reverse=True))
        self._special_names = re.compile(f"({either})" if either else r"(?!)()")
        self._special_starts = re.compile(f"(?=(?:{either}))(.)" if either else r"(?!)()", re.DOTALL)
        source = text.chat_template or (CHATML if {"<|im_start|>", "<|im_end|>"} <= self._special.keys() else "")
        self._template = _compile(source) if source else None

    @property
    def vocab_size(self) -> int:
        return len(self._bytes)

    @property
    def eos_ids(self) -> tuple[int, ...]:
        return self._text.eos_ids

    def encode(self, text: str) -> list[int]:
        """See `Tokenizer.encode`."""
        check_text(text)
        return self._with_bos(self._tokens(text, guard=""))

    def encode_chat(self, messages: Sequence[ChatMessage]) -> list[int]:
        """See `Tokenizer.encode_chat`."""
        if self._template is None:
            raise ChatTemplateError(detail="the model has none; use a raw prompt")
        check_chat(messages)
        guard = next((char for char in _GUARDS if not any(char in message.content for message in messages)), None)
        if guard is None:
            raise ChatTemplateError(detail="the messages hold every code point that is no character")
        # The guard breaks the names of special tokens in messages until the text was split at the template's own.
        turns = [
            {"role": message.role, "content": self._special_starts.sub(rf"\1{guard}", message.content)}
            for message in messages
        ]
        return self._with_bos(self._tokens(self._render(self._template, turns), guard))

    def decode(self, tokens: Sequence[int]) -> str:
        """See `Tokenizer.decode`."""
        return b"".join(self.token_bytes(token) for token in tokens).decode(errors="replace")

    def token_bytes(self, token: int) -> bytes:
        """See `Tokenizer.token_bytes`."""
        if not 0 <= token < len(self._bytes):
            raise EngineInputError(field="token", value=token, expected=f"in [0, {len(self._bytes)})")
        return self._bytes[token]

    def detokenizer(self, state: bytes = b"") -> "Utf8Detokenizer":
        """See `Tokenizer.detokenizer`."""
        return Utf8Detokenizer(self.token_bytes, state)

    def _tokens(self, text: str, guard: str) -> list[int]:
        tokens: list[int] = []
        for part, piece in enumerate(self._special_names.split(text)):
            if part % 2:
                tokens.append(self._special[piece])
            elif plain := piece.replace(guard, "") if guard else piece:
                tokens.extend(self._bpe.encode(plain, add_special_tokens=False).ids)
        return tokens

    def _with_bos(self, tokens: list[int]) -> list[int]:
        bos = self._text.bos_id
        # A template may have written it already.
        return [bos, *tokens] if self._text.adds_bos and bos is not None and tokens[:1] != [bos] else tokens

    def _render(self, template: jinja2.Template, turns: list[dict[str, str]]) -> str:
        names = {token: name for name, token in self._special.items()}
        bos = names.get(self._text.bos_id, "") if self._text.bos_id is not None else ""
        eos = names.get(self._text.eos_ids[0], "") if self._text.eos_ids else ""
        try:
            return template.render(messages=turns, add_generation_prompt=True, bos_token=bos, eos_token=eos)
        except (jinja2.TemplateError, ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
            raise ChatTemplateError(detail=str(error)[:500]) from error


def open_tokenizer(
    path: Path | None = None, cache_root: Path | None = None, clock: Clock | None = None
) -> BpeTokenizer:
    """The tokeniser of a weights file, None for the default model. Arguments and errors are those of `open_weights`."""
    weights = open_weights(path, cache_root, clock)
    return BpeTokenizer(weights.tokenizer_json, weights.text)


def _compile(source: str) -> jinja2.Template:
    # The template is part of a downloaded file: it may compute text, and reach nothing.
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    environment.globals["raise_exception"] = _refuse
    try:
        return environment.from_string(source)
    except jinja2.TemplateError as error:
        raise ChatTemplateError(detail=f"the model's template does not compile: {error}") from error


def _refuse(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _byte_alphabet() -> dict[str, bytes]:
    """GPT-2's printable stand-ins: each byte that is not printable Latin-1 is a code point from 256 on, in order."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    alphabet = {chr(byte): bytes([byte]) for byte in printable}
    others = (byte for byte in range(256) if byte not in printable)
    return alphabet | {chr(256 + index): bytes([byte]) for index, byte in enumerate(others)}


_BYTE_OF: Final = _byte_alphabet()

"""What every tokeniser needs: checks on text from outside, and turning bytes into text as they come."""

import codecs
import re
from collections.abc import Callable, Sequence
from typing import Final

from kv_services.engine import limits
from kv_services.engine.errors import ChatTemplateError, EngineInputError, TextTooLongError, TokenizerError
from kv_services.engine.interface import ChatMessage

_ROLE: Final = re.compile(r"[a-z_]{1,32}")
_UTF8_HELD_MAX: Final = 3
"""A character has at most four bytes, so at most three wait for the rest."""


def check_text(text: str) -> bytes:
    """The text in UTF-8.

    Raises:
        TextTooLongError: over `limits.TEXT_BYTES_MAX`.
        TokenizerError: it holds half of a surrogate pair.
    """
    data = _utf8(text)
    _check_size("bytes of text", len(data), limits.TEXT_BYTES_MAX)
    return data


def check_chat(messages: Sequence[ChatMessage]) -> None:
    """Refuse a chat that no template should see.

    Raises:
        TextTooLongError: too many messages or too much text.
        ChatTemplateError: no message, or a role that is no name.
        TokenizerError: a text holds half of a surrogate pair.
    """
    _check_size("number of messages", len(messages), limits.CHAT_MESSAGES_MAX)
    _check_size("bytes of chat", sum(len(_utf8(message.content)) for message in messages), limits.TEXT_BYTES_MAX)
    if not messages:
        raise ChatTemplateError(detail="there is no message")
    for message in messages:
        if not _ROLE.fullmatch(message.role):
            raise ChatTemplateError(detail=f"role {message.role[:40]!r} is not a name")


class Utf8Detokenizer:
    """A `Detokenizer` over the bytes of tokens. Its output joined is the text so far, but for an incomplete last
    character; a byte that cannot be part of one becomes U+FFFD.

    Args:
        token_bytes: `Tokenizer.token_bytes`.
        state: bytes held back by another one, to go on from there.
    """

    __slots__ = ("_decoder", "_token_bytes")

    def __init__(self, token_bytes: Callable[[int], bytes], state: bytes = b"") -> None:
        self._token_bytes = token_bytes
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        if len(state) > _UTF8_HELD_MAX or self._decoder.decode(state):
            expected = f"at most {_UTF8_HELD_MAX} bytes that begin a character"
            raise EngineInputError(field="detokeniser state", value=state.hex(), expected=expected)

    def push(self, token: int) -> str:
        """See `Detokenizer.push`."""
        return self._decoder.decode(self._token_bytes(token))

    def finish(self) -> str:
        """See `Detokenizer.finish`."""
        return self._decoder.decode(b"", final=True)

    @property
    def state(self) -> bytes:
        return self._decoder.getstate()[0]


def _check_size(what: str, size: int, limit: int) -> None:
    if size > limit:
        raise TextTooLongError(what=what, size=size, limit=limit)


def _utf8(text: str) -> bytes:
    try:
        return text.encode()
    except UnicodeEncodeError:
        raise TokenizerError(detail="the text holds half of a surrogate pair, which is no character") from None

"""The stub engine's tokeniser: a token is a byte."""

from collections.abc import Sequence
from typing import ClassVar

from kv_services.engine.errors import EngineInputError
from kv_services.engine.interface import ChatMessage
from kv_services.engine.text import Utf8Detokenizer, check_chat, check_text


class ByteTokenizer:
    """A `Tokenizer` for the stub: a token is a byte, and 256 ends a sequence."""

    _END: ClassVar[int] = 256

    @property
    def vocab_size(self) -> int:
        return 257

    @property
    def eos_ids(self) -> tuple[int, ...]:
        return (self._END,)

    def encode(self, text: str) -> list[int]:
        """See `Tokenizer.encode`."""
        return list(check_text(text))

    def encode_chat(self, messages: Sequence[ChatMessage]) -> list[int]:
        """See `Tokenizer.encode_chat`."""
        check_chat(messages)
        tokens: list[int] = []
        for message in messages:
            tokens += [*f"{message.role}\n{message.content}".encode(), self._END]
        return [*tokens, *b"assistant\n"]

    def decode(self, tokens: Sequence[int]) -> str:
        """See `Tokenizer.decode`."""
        return b"".join(self.token_bytes(token) for token in tokens).decode(errors="replace")

    def token_bytes(self, token: int) -> bytes:
        """See `Tokenizer.token_bytes`."""
        if not 0 <= token < self.vocab_size:
            raise EngineInputError(field="token", value=token, expected=f"in [0, {self.vocab_size})")
        return b"" if token == self._END else bytes([token])

    def detokenizer(self, state: bytes = b"") -> Utf8Detokenizer:
        """See `Tokenizer.detokenizer`."""
        return Utf8Detokenizer(self.token_bytes, state)

"""A byte-level tokeniser and a few makers, shared by the gateway's tests."""

from collections.abc import Sequence

from kv_services.engine.interface import ChatMessage
from kv_services.gateway.admission import ServedModel
from kv_services.gateway.completer import Finished, FinishReason, Timings, Token, Usage

EOS = 256
"""The end token of `ByteTokenizer`; bytes are tokens 0 to 255."""


class ByteTokenizer:
    """One token per UTF-8 byte, an end token, and whatever byte strings a test adds as further tokens."""

    def __init__(self, *extra: bytes) -> None:
        self._bytes = [bytes([value]) for value in range(256)] + [b"", *extra]

    @property
    def vocab_size(self) -> int:
        return len(self._bytes)

    @property
    def eos_ids(self) -> tuple[int, ...]:
        return (EOS,)

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def encode_chat(self, messages: Sequence[ChatMessage]) -> list[int]:
        return self.encode("".join(f"<{message.role}>{message.content}\n" for message in messages) + "<assistant>")

    def token_bytes(self, token: int) -> bytes:
        return self._bytes[token]

    def add(self, raw: bytes) -> int:
        """The id of a token with these bytes."""
        self._bytes.append(raw)
        return len(self._bytes) - 1


def served(tokenizer: ByteTokenizer | None = None, *, name: str = "m", max_context: int = 512) -> ServedModel:
    return ServedModel(name, tokenizer or ByteTokenizer(), max_context, "rev-1", created_s=7)


def tokens_of(text: str | bytes, *, start: int = 0) -> list[Token]:
    """One token per byte."""
    raw = text.encode() if isinstance(text, str) else text
    return [Token(start + index, value, logprob=-0.5) for index, value in enumerate(raw)]


def finished(
    reason: FinishReason = FinishReason.STOP, *, prompt: int = 1, completion: int = 1, cached: int = 0
) -> Finished:
    timings = Timings(
        decode_node="d1", prefill_node="p1", kv_bytes_moved=4096, transport="shm", handover_ns=2_500_000, attempts=1
    )
    return Finished(reason, Usage(prompt, completion, cached), timings)

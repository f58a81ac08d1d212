"""Decides what text of an answer the client may see, token by token, and when the text is complete.

One machine is one answer, kept by the gateway that holds its client: it knows tokens by index and no node, so the
request may go on at another node and the text with it. It refuses to know HTTP, JSON and time. Pure.

X1: the text shown depends on the tokens alone, not on when they came; pieces joined are the whole.
X2: only whole characters are shown. Bytes that can begin no character become U+FFFD; bytes of a character that never
    was completed are left out at the end, so that a client that goes on from this text does not go on from garbage.
X3: no stop string is ever shown, nor a part of the one that ended the text (`stop_strings`).
X4: an end token has no text; at most `max_tokens` tokens are taken; after the end nothing is shown.
X5: a token is reported at the latest with its last character, and not at all if the cut left none of its characters.
"""

import codecs
from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Final, Protocol

from kv_services.gateway.completer import Finished, FinishReason, GenerationEvent, Token
from kv_services.gateway.errors import StreamProtocolError
from kv_services.gateway.stop_strings import StopMatcher


class TokenBytes(Protocol):
    """What the machine needs of a tokeniser."""

    def token_bytes(self, token: int) -> bytes:
        """The UTF-8 bytes of one token, which may be a part of a character; empty for a special token."""
        ...


@dataclass(frozen=True, slots=True)
class ShownToken:
    """A token whose text was shown; `text_offset` is where that begins, in characters of the answer."""

    token: Token
    text_offset: int


@dataclass(frozen=True, slots=True)
class TextDelta:
    """What an event adds to the answer; `finish` is set once, with the last text."""

    text: str = ""
    tokens: tuple[ShownToken, ...] = ()
    finish: FinishReason | None = None


_NOTHING: Final = TextDelta()


class TextState:
    """The text of one answer.

    Args:
        stop: strings that end it; none of them empty.
        stop_token_ids: tokens that end it.
        max_tokens: tokens it has at most.
    """

    def __init__(
        self, vocabulary: TokenBytes, *, stop: Sequence[str], stop_token_ids: Collection[int], max_tokens: int
    ) -> None:
        self._vocabulary = vocabulary
        self._matcher = StopMatcher(stop)
        self._stop_token_ids = frozenset(stop_token_ids)
        self._max_tokens = max_tokens
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._unshown: deque[tuple[ShownToken, int]] = deque()
        self._decoded = 0
        self._shown = 0
        self.num_tokens = 0
        self.finish: FinishReason | None = None

    def step(self, event: GenerationEvent) -> TextDelta:
        """Take the next event.

        Raises:
            StreamProtocolError: a token out of order.
            KVError: the vocabulary has no such token.
        """
        if self.finish is not None:
            return _NOTHING
        if isinstance(event, Finished):
            return self._end(event.reason, self._show(self._matcher.flush()))
        if event.index != self.num_tokens:
            raise StreamProtocolError(detail=f"token {event.index} came where {self.num_tokens} was due")
        self.num_tokens += 1
        if event.token_id in self._stop_token_ids:
            return self._end(FinishReason.STOP, self._show(self._matcher.flush()))
        text = self._show(self._matcher.feed(self._decode(event)))
        if self._matcher.matched:
            return self._end(FinishReason.STOP, text)
        if self.num_tokens == self._max_tokens:
            return self._end(FinishReason.LENGTH, text + self._show(self._matcher.flush()))
        tokens = self._take_shown(cut=False)
        return TextDelta(text, tokens) if text or tokens else _NOTHING

    def _decode(self, token: Token) -> str:
        text = self._utf8.decode(self._vocabulary.token_bytes(token.token_id))
        offset = self._decoded
        self._decoded += len(text)
        self._unshown.append((ShownToken(token, offset), self._decoded))
        return text

    def _show(self, text: str) -> str:
        self._shown += len(text)
        return text

    def _end(self, reason: FinishReason, text: str) -> TextDelta:
        self.finish = reason
        tokens = self._take_shown(cut=True)
        self._unshown.clear()
        return TextDelta(text, tokens, reason)

    def _take_shown(self, *, cut: bool) -> tuple[ShownToken, ...]:
        """Tokens whose last character was shown; at the cut, also the one whose first was."""
        taken: list[ShownToken] = []
        while self._unshown:
            shown, end = self._unshown[0]
            if end > self._shown and not (cut and shown.text_offset < self._shown):
                break
            taken.append(shown)
            self._unshown.popleft()
        return tuple(taken)

"""What a client gets: the answers of the OpenAI API as structs, and their bytes.

Decides the form only; what is in it comes from `text_state` and the completer. Pure.

F1: the whole answer and the joined chunks of a streamed one say the same.
F2: what OpenAI's API does not have is in the object `kv_fabric`, in the last message of an answer.
F3: no number is written that JSON has not: a logarithm of zero is -9999.0, as in the API we speak.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, Literal, Protocol

import msgspec
from msgspec import UNSET, Struct, UnsetType

from kv_core.errors import KVError
from kv_services.gateway.completer import FinishReason, Timings, Usage
from kv_services.gateway.errors import StreamProtocolError, fault_of, param_of
from kv_services.gateway.text_state import ShownToken, TokenBytes

LOGPROB_MIN: Final = -9999.0


class ErrorBody(Struct, frozen=True):
    """OpenAI's form of an error."""

    message: str
    type: str
    param: str | None
    code: str


class ErrorAnswer(Struct, frozen=True):
    """The whole body of a refusal, or a chunk that ends a stream."""

    error: ErrorBody


class PromptDetails(Struct, frozen=True):
    """`usage.prompt_tokens_details`."""

    cached_tokens: int


class UsageBody(Struct, frozen=True):
    """`usage`."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptDetails


class FabricBody(Struct, frozen=True):
    """`kv_fabric`: where the request ran and what its KV cost. Times in milliseconds: `prefill_ms` for waiting and
    computing at the prefill node; `handover_ms` from the first bytes sent to the last ones verified, while computing
    goes on; `handover_tail_ms` what of it came after that. `tokens_per_s` counts from the first token, and is null for
    an answer of one."""

    request_id: str
    prefill_node: str | None
    decode_node: str
    prompt_tokens: int
    cached_tokens: int
    kv_bytes_moved: int
    transport: str
    prefill_ms: float
    handover_ms: float
    handover_tail_ms: float
    ttft_ms: float
    tokens_per_s: float | None
    attempts: int


class Candidate(Struct, frozen=True):
    """One token of a chat's logprobs."""

    token: str
    logprob: float
    bytes: list[int]


class ChosenToken(Struct, frozen=True):
    """The chosen token of a chat's logprobs, with the alternatives."""

    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[Candidate]


class ChatLogprobs(Struct, frozen=True):
    """`logprobs` of a chat choice."""

    content: list[ChosenToken]
    refusal: None = None


class CompletionLogprobs(Struct, frozen=True):
    """`logprobs` of a completion choice: parallel lists."""

    tokens: list[str]
    token_logprobs: list[float]
    top_logprobs: list[dict[str, float]] | None
    text_offset: list[int]


class CompletionChoice(Struct, frozen=True):
    """A completion's choice, whole or one chunk of it."""

    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: FinishReason | None
    index: int = 0


class ChatMessageBody(Struct, frozen=True):
    """A whole answer of a chat."""

    content: str
    role: Literal["assistant"] = "assistant"
    refusal: None = None


class ChatChoice(Struct, frozen=True):
    """The choice of a whole chat answer."""

    message: ChatMessageBody
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason
    index: int = 0


class ChatDelta(Struct, frozen=True, omit_defaults=True):
    """What a chunk adds to a chat's message."""

    role: Literal["assistant"] | UnsetType = UNSET
    content: str | UnsetType = UNSET


class ChatChunkChoice(Struct, frozen=True):
    """The choice of one chunk of a chat answer."""

    delta: ChatDelta
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason | None
    index: int = 0


class Answer(Struct, frozen=True):
    """The envelope of every answer and chunk."""

    id: str
    object: str
    created: int
    model: str
    system_fingerprint: str
    choices: list[CompletionChoice] | list[ChatChoice] | list[ChatChunkChoice]
    usage: UsageBody | UnsetType | None = UNSET
    kv_fabric: FabricBody | UnsetType = UNSET


class ModelCard(Struct, frozen=True):
    """One entry of /v1/models."""

    id: str
    created: int
    object: Literal["model"] = "model"
    owned_by: str = "kv-fabric"


class ModelList(Struct, frozen=True):
    """/v1/models."""

    data: list[ModelCard]
    object: Literal["list"] = "list"


_ENCODER: Final = msgspec.json.Encoder()
encode: Final[Callable[[object], bytes]] = _ENCODER.encode
DONE: Final = b"data: [DONE]\n\n"
KEEPALIVE: Final = b": keep-alive\n\n"


def sse(body: bytes) -> bytes:
    """One server-sent event; JSON has no line break in it."""
    return b"data: " + body + b"\n\n"


def error_answer(error: KVError) -> ErrorAnswer:
    """An error in OpenAI's form."""
    fault = fault_of(error)
    return ErrorAnswer(ErrorBody(str(error), fault.type, param_of(error), fault.code))


def usage_body(usage: Usage) -> UsageBody:
    """Token counts in OpenAI's form."""
    total = usage.prompt_tokens + usage.completion_tokens
    return UsageBody(usage.prompt_tokens, usage.completion_tokens, total, PromptDetails(usage.cached_tokens))


def fabric_body(request_id: str, usage: Usage, timings: Timings, *, ttft_ns: int, last_token_ns: int) -> FabricBody:
    """`kv_fabric`; both times count from the whole request read."""
    span_ns = last_token_ns - ttft_ns
    rate = (usage.completion_tokens - 1) * 1e9 / span_ns if usage.completion_tokens > 1 and span_ns > 0 else None
    return FabricBody(
        request_id=request_id,
        prefill_node=timings.prefill_node,
        decode_node=timings.decode_node,
        prompt_tokens=usage.prompt_tokens,
        cached_tokens=usage.cached_tokens,
        kv_bytes_moved=timings.kv_bytes_moved,
        transport=timings.transport,
        prefill_ms=round(timings.prefill_ns / 1e6, 3),
        handover_ms=round(timings.handover_ns / 1e6, 3),
        handover_tail_ms=round(timings.tail_ns / 1e6, 3),
        ttft_ms=round(ttft_ns / 1e6, 3),
        tokens_per_s=None if rate is None else round(rate, 2),
        attempts=timings.attempts,
    )


@dataclass(frozen=True, slots=True)
class AnswerHead:
    """What every message of one answer says."""

    request_id: str
    created_s: int
    model: str
    fingerprint: str


class AnswerForm(Protocol):
    """One route's way to say an answer."""

    def opening(self) -> Answer | None:
        """The chunk before the first text, if the route has one."""
        ...

    def chunk(self, text: str, tokens: Sequence[ShownToken], finish: FinishReason | None) -> Answer:
        """A piece of a streamed answer."""
        ...

    def whole(self, text: str, tokens: Sequence[ShownToken], finish: FinishReason) -> Answer:
        """An answer that is not streamed."""
        ...

    def trailer(self) -> Answer:
        """The last chunk, without a choice, which carries the usage."""
        ...


class CompletionForm:
    """/v1/completions."""

    def __init__(self, head: AnswerHead, vocabulary: TokenBytes, top: int | None) -> None:
        self._head = head
        self._vocabulary = vocabulary
        self._top = top

    def opening(self) -> Answer | None:
        return None

    def chunk(self, text: str, tokens: Sequence[ShownToken], finish: FinishReason | None) -> Answer:
        logprobs = self._logprobs(tokens) if tokens else None
        return self._answer([CompletionChoice(text, logprobs, finish)])

    def whole(self, text: str, tokens: Sequence[ShownToken], finish: FinishReason) -> Answer:
        return self._answer([CompletionChoice(text, self._logprobs(tokens), finish)])

    def trailer(self) -> Answer:
        return self._answer([])

    def _answer(self, choices: list[CompletionChoice]) -> Answer:
        head = self._head
        return Answer(head.request_id, "text_completion", head.created_s, head.model, head.fingerprint, choices)

    def _logprobs(self, tokens: Sequence[ShownToken]) -> CompletionLogprobs | None:
        if self._top is None:
            return None
        names = [self._name(shown.token.token_id) for shown in tokens]
        chosen = [_finite(shown.token.logprob) for shown in tokens]
        tops: list[dict[str, float]] | None = None if self._top == 0 else []
        if tops is not None:
            for name, logprob, shown in zip(names, chosen, tokens, strict=True):
                top = {self._name(token_id): _finite(value) for token_id, value in shown.token.top_logprobs}
                # The chosen token is always among them, as in the API we speak.
                tops.append(top | {name: logprob})
        return CompletionLogprobs(names, chosen, tops, [shown.text_offset for shown in tokens])

    def _name(self, token_id: int) -> str:
        return _text_or_escapes(self._vocabulary.token_bytes(token_id), "bytes:")


class ChatForm:
    """/v1/chat/completions."""

    def __init__(self, head: AnswerHead, vocabulary: TokenBytes, top: int | None) -> None:
        self._head = head
        self._vocabulary = vocabulary
        self._top = top

    def opening(self) -> Answer | None:
        return self._chunk(ChatDelta(role="assistant", content=""), (), None)

    def chunk(self, text: str, tokens: Sequence[ShownToken], finish: FinishReason | None) -> Answer:
        return self._chunk(ChatDelta(content=text) if text else ChatDelta(), tokens, finish)

    def whole(self, text: str, tokens: Sequence[ShownToken], finish: FinishReason) -> Answer:
        choice = ChatChoice(ChatMessageBody(text), self._logprobs(tokens), finish)
        return self._answer("chat.completion", [choice])

    def trailer(self) -> Answer:
        return self._answer("chat.completion.chunk", [])

    def _chunk(self, delta: ChatDelta, tokens: Sequence[ShownToken], finish: FinishReason | None) -> Answer:
        logprobs = self._logprobs(tokens) if tokens else None
        return self._answer("chat.completion.chunk", [ChatChunkChoice(delta, logprobs, finish)])

    def _answer(self, kind: str, choices: list[ChatChoice] | list[ChatChunkChoice]) -> Answer:
        head = self._head
        return Answer(head.request_id, kind, head.created_s, head.model, head.fingerprint, choices)

    def _logprobs(self, tokens: Sequence[ShownToken]) -> ChatLogprobs | None:
        if self._top is None:
            return None
        return ChatLogprobs([self._chosen(shown) for shown in tokens])

    def _chosen(self, shown: ShownToken) -> ChosenToken:
        token = shown.token
        one = self._candidate(token.token_id, token.logprob)
        top = [self._candidate(token_id, logprob) for token_id, logprob in token.top_logprobs]
        return ChosenToken(one.token, one.logprob, one.bytes, top)

    def _candidate(self, token_id: int, logprob: float | None) -> Candidate:
        raw = self._vocabulary.token_bytes(token_id)
        return Candidate(_text_or_escapes(raw, ""), _finite(logprob), list(raw))


def _text_or_escapes(raw: bytes, prefix: str) -> str:
    """A token's text; a part of a character is written as escapes, as in the API we speak."""
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return prefix + "".join(f"\\x{byte:02x}" for byte in raw)


def _finite(logprob: float | None) -> float:
    if logprob is None or math.isnan(logprob):
        raise StreamProtocolError(detail="a token came without the log-probability that was asked for")
    return max(logprob, LOGPROB_MIN)
